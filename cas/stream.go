package cas

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"

	"github.com/cove-sandbox/cove/sandbox"
)

// Stream seals the pieces of one thing that is appended to, which a blob, named
// by all of its content, cannot be. Each piece says which key it has, so that a
// new one may come on top of the keyring half-way. Its key follows from that and
// the name of the thing: pieces of another do not open. Safe for concurrent use.
type Stream struct {
	keys *Keyring
	name string
}

// Stream is nil for a keyring without keys.
func (k *Keyring) Stream(name string) *Stream {
	if _, _, ok := k.Active(); !ok {
		return nil
	}
	return &Stream{k, name}
}

// Overhead is how much longer a piece gets.
func (s *Stream) Overhead() int { return len(KeyID{}) + 12 + 16 }

func (s *Stream) aead(key [KeySize]byte) cipher.AEAD {
	derived, err := hkdf.Key(sha256.New, key[:], nil, "cove stream v1 "+s.name, KeySize)
	if err != nil {
		panic(err) // of lengths that are constants
	}
	block, err := aes.NewCipher(derived)
	if err != nil {
		panic(err)
	}
	// A key of its own per thing: the 2^32 pieces after which random nonces of
	// 96 bits should not go on are of one thing, not of all.
	gcm, err := cipher.NewGCMWithRandomNonce(block)
	if err != nil {
		panic(err)
	}
	return gcm
}

// Seal encrypts a piece; place is authenticated with it.
func (s *Stream) Seal(plain, place []byte) []byte {
	id, key, _ := s.keys.Active()
	out := make([]byte, len(id), len(id)+len(plain)+s.Overhead())
	copy(out, id[:])
	return s.aead(key).Seal(out, nil, plain, place)
}

// Open decrypts a piece: sandbox.Precondition if its key is not here,
// sandbox.Corrupt if it was changed or belongs elsewhere.
func (s *Stream) Open(sealed, place []byte) ([]byte, error) {
	const op = "cas.stream"
	var id KeyID
	if len(sealed) < len(id) {
		return nil, sandbox.Errorf(sandbox.Corrupt, op, "too short")
	}
	copy(id[:], sealed)
	key, ok := s.keys.Key(id)
	if !ok {
		return nil, sandbox.Errorf(sandbox.Precondition, op, "it is sealed with key %s, which is not here", id).WithHint("put that key back into the file of keys")
	}
	plain, err := s.aead(key).Open(nil, nil, sealed[len(id):], place)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.Corrupt, op, "%w", err)
	}
	return plain, nil
}
