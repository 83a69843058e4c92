package seal

import (
	"crypto/cipher"
	"encoding/binary"
)

// TagSize is how much longer a frame gets.
const TagSize = 16

// Frames seals the numbered parts of one thing. Safe for concurrent use.
type Frames struct{ aead cipher.AEAD }

// NewFrames derives the key of a thing. The pair of key and salt must be new for
// each: with the same, equal numbers would be equal nonces.
func NewFrames(key [KeySize]byte, salt []byte, info string) *Frames {
	gcm, err := cipher.NewGCM(derive(key, salt, info))
	if err != nil {
		panic(err) // of a block size that is AES's
	}
	return &Frames{gcm}
}

// Nonce is the place of a frame. Only the last may say so: without it a thing is
// cut off.
func Nonce(number uint64, last bool) (n [12]byte) {
	binary.BigEndian.PutUint64(n[3:], number)
	if last {
		n[11] = 1
	}
	return n
}

// Seal appends a frame to dst, which may be plain[:0]. bound is authenticated
// with it.
func (f *Frames) Seal(dst []byte, number uint64, last bool, plain, bound []byte) []byte {
	n := Nonce(number, last)
	return f.aead.Seal(dst, n[:], plain, bound)
}

// Open appends what was sealed to dst, which may be sealed[:0]; false if it was
// changed or belongs elsewhere.
func (f *Frames) Open(dst []byte, number uint64, last bool, sealed, bound []byte) ([]byte, bool) {
	n := Nonce(number, last)
	plain, err := f.aead.Open(dst, n[:], sealed, bound)
	return plain, err == nil
}
