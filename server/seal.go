package server

import (
	"crypto/rand"
	"errors"
	"strings"

	"github.com/cove-sandbox/cove/egress/secret"
	"github.com/cove-sandbox/cove/internal/seal"
	"github.com/cove-sandbox/cove/sandbox"
)

// vault seals the values of secrets and the passwords of registries for the
// store, bound to what they are of, so that one row's value cannot stand in for
// another's.
//
//	u8 version, then a piece of package seal
type vault struct{ keys *seal.Keyring }

const sealVersion = 1

func (v vault) pieces() *seal.Pieces { return v.keys.Pieces("cove secrets v1") }

func (v vault) seal(s sandbox.Secret) ([]byte, error) { return v.sealValue(s.Value, sealContext(s)) }

// sealValue binds a value to what it is the value of.
func (v vault) sealValue(value sandbox.SecretValue, bound []byte) ([]byte, error) {
	if _, _, ok := v.keys.Active(); !ok {
		return nil, &sandbox.Error{Class: sandbox.Unsupported, Msg: "this server has no key to keep secrets with"}
	}
	return append([]byte{sealVersion}, v.pieces().Seal([]byte(value.Reveal()), bound)...), nil
}

// open fills in the value. What cannot be opened names itself, and says nothing
// of its content.
func (v vault) open(s sandbox.Secret, sealed []byte) (_ sandbox.Secret, err error) {
	s.Value, err = v.openValue("secret "+s.Name, sealed, sealContext(s))
	return s, err
}

func (v vault) openValue(what string, sealed, bound []byte) (none sandbox.SecretValue, err error) {
	if len(sealed) == 0 || sealed[0] != sealVersion {
		return none, sandbox.Errorf(sandbox.Corrupt, "server.seal", "the value of %s is damaged, or of a newer Cove", what)
	}
	plain, err := v.pieces().Open(sealed[1:], bound)
	if errors.Is(err, sandbox.ErrPrecondition) { // for whoever asks it is as good as damaged
		return none, sandbox.Errorf(sandbox.Corrupt, "server.seal", "the value of %s: %w", what, err).
			WithHint("start the server with the keys it had, or set it again")
	}
	if err != nil {
		return none, sandbox.Errorf(sandbox.Corrupt, "server.seal", "the value of %s does not verify", what)
	}
	return sandbox.NewSecretValue(string(plain)), nil
}

func sealContext(s sandbox.Secret) []byte { return []byte(s.Tenant + "\x00" + s.Name) }

// newPlaceholder is what stands for a secret inside sandboxes. It opens nothing.
func newPlaceholder(name string) string {
	return secret.Prefix + name + "-" + strings.ToLower(rand.Text()[:16])
}
