package seal

import (
	"crypto/cipher"

	"github.com/cove-sandbox/cove/sandbox"
)

// Pieces seals what is added to one thing, or the values of one kind. Each piece
// says which key it has, so that a new one may come on top of the keyring
// half-way:
//
//	key id (8), nonce (12), ciphertext, tag (16)
//
// Safe for concurrent use.
type Pieces struct {
	keys *Keyring
	info string
}

// Pieces derives keys for a purpose: pieces of another do not open. Without keys
// nothing can be sealed; see Active.
func (k *Keyring) Pieces(purpose string) *Pieces { return &Pieces{k, purpose} }

// Stream are the pieces of a thing with a name, that is appended to; nil for a
// keyring without keys.
func (k *Keyring) Stream(name string) *Pieces {
	if _, _, ok := k.Active(); !ok {
		return nil
	}
	return k.Pieces("cove stream v1 " + name)
}

// Overhead is how much longer a piece gets.
func (p *Pieces) Overhead() int { return len(KeyID{}) + 12 + TagSize }

func (p *Pieces) aead(key [KeySize]byte) cipher.AEAD {
	// A key of its own per thing: the 2^32 pieces after which random nonces of
	// 96 bits should not go on are of one thing, not of all.
	gcm, err := cipher.NewGCMWithRandomNonce(derive(key, nil, p.info))
	if err != nil {
		panic(err) // of a block size that is AES's
	}
	return gcm
}

// Seal encrypts a piece under the active key, which there must be; bound is
// authenticated with it.
func (p *Pieces) Seal(plain, bound []byte) []byte {
	id, key, _ := p.keys.Active()
	out := make([]byte, len(id), len(plain)+p.Overhead())
	copy(out, id[:])
	return p.aead(key).Seal(out, nil, plain, bound)
}

// Open decrypts a piece: sandbox.Precondition if its key is not here,
// sandbox.Corrupt if it was changed or belongs elsewhere.
func (p *Pieces) Open(sealed, bound []byte) ([]byte, error) {
	const op = "seal.open"
	var id KeyID
	if len(sealed) < len(id) {
		return nil, sandbox.Errorf(sandbox.Corrupt, op, "too short")
	}
	copy(id[:], sealed)
	key, ok := p.keys.Key(id)
	if !ok {
		return nil, sandbox.Errorf(sandbox.Precondition, op, "it is sealed with key %s, which is not here", id).WithHint("put that key back into the file of keys")
	}
	plain, err := p.aead(key).Open(nil, nil, sealed[len(id):], bound)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.Corrupt, op, "%w", err)
	}
	return plain, nil
}
