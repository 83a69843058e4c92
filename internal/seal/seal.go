// Package seal encrypts what Cove keeps: AES-256-GCM, always under a key that is
// derived (HKDF-SHA256) for one purpose, so that no two uses of a key of the
// keyring share one. There are two forms, by how nonces come about:
//
//   - Frames are the numbered parts of a thing that is written once. The key is
//     that thing's alone, and the number is the nonce.
//   - Pieces are added to things that live on, by any process at any time. Each
//     has a random nonce and says which key of the keyring it has.
//
// docs/state-format.md promises that what was sealed opens for ever; the tests
// hold bytes of the first release.
package seal

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"
)

// derive makes the cipher of one purpose. Errors are of lengths that are
// constants here, so they are defects and not for callers to handle.
func derive(key [KeySize]byte, salt []byte, info string) cipher.Block {
	derived, err := hkdf.Key(sha256.New, key[:], salt, info, KeySize)
	if err != nil {
		panic(err)
	}
	block, err := aes.NewCipher(derived)
	if err != nil {
		panic(err)
	}
	return block
}
