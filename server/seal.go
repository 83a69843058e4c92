package server

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"strings"

	"github.com/cove-sandbox/cove/cas"
	"github.com/cove-sandbox/cove/sandbox"
)

// vault seals the values of secrets, and passwords of registries, for the store: AES-256-GCM, with a key of
// its own that follows from the keyring's, bound to tenant and name so that one
// row's value cannot stand in for another's.
//
//	u8 version, key id (8), nonce (12), ciphertext and tag
type vault struct{ keys *cas.Keyring }

const (
	sealVersion = 1
	sealHead    = 1 + len(cas.KeyID{})
)

func (v vault) aead(key [cas.KeySize]byte) (cipher.AEAD, error) {
	own, err := hkdf.Key(sha256.New, key[:], nil, "cove secrets v1", cas.KeySize)
	if err != nil {
		return nil, err
	}
	block, err := aes.NewCipher(own)
	if err != nil {
		return nil, err
	}
	return cipher.NewGCMWithRandomNonce(block)
}

func (v vault) seal(s sandbox.Secret) ([]byte, error) { return v.sealValue(s.Value, sealContext(s)) }

// sealValue binds a value to what it is the value of.
func (v vault) sealValue(value sandbox.SecretValue, bound []byte) ([]byte, error) {
	id, key, ok := v.keys.Active()
	if !ok {
		return nil, &sandbox.Error{Class: sandbox.Unsupported, Msg: "this server has no key to keep secrets with"}
	}
	a, err := v.aead(key)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.Internal, "server.seal", "%w", err)
	}
	out := append([]byte{sealVersion}, id[:]...)
	return a.Seal(out, nil, []byte(value.Reveal()), bound), nil
}

// open fills in the value. What cannot be opened names itself, and says nothing
// of its content.
func (v vault) open(s sandbox.Secret, sealed []byte) (_ sandbox.Secret, err error) {
	s.Value, err = v.openValue("secret "+s.Name, sealed, sealContext(s))
	return s, err
}

func (v vault) openValue(what string, sealed, bound []byte) (none sandbox.SecretValue, err error) {
	if len(sealed) < sealHead || sealed[0] != sealVersion {
		return none, sandbox.Errorf(sandbox.Corrupt, "server.seal", "the value of %s is damaged, or of a newer Cove", what)
	}
	id := cas.KeyID(sealed[1:sealHead])
	key, ok := v.keys.Key(id)
	if !ok {
		return none, sandbox.Errorf(sandbox.Corrupt, "server.seal", "%s is sealed with key %s, which this server does not have", what, id).
			WithHint("start it with the keys it had, or set it again")
	}
	a, err := v.aead(key)
	if err != nil {
		return none, sandbox.Errorf(sandbox.Internal, "server.seal", "%w", err)
	}
	plain, err := a.Open(nil, nil, sealed[sealHead:], bound)
	if err != nil {
		return none, sandbox.Errorf(sandbox.Corrupt, "server.seal", "the value of %s does not verify", what)
	}
	return sandbox.NewSecretValue(string(plain)), nil
}

func sealContext(s sandbox.Secret) []byte { return []byte(s.Tenant + "\x00" + s.Name) }

// newPlaceholder is what stands for a secret inside sandboxes. It opens nothing.
func newPlaceholder(name string) string {
	return "cove-secret-" + name + "-" + strings.ToLower(rand.Text()[:16])
}
