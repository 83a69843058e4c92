package store

import (
	"context"

	"github.com/cove-sandbox/cove/sandbox"
)

// SealedLogin is a login whose password nobody can read who has only the record:
// Sealed is what the server made of it.
type SealedLogin struct {
	sandbox.RegistryLogin
	Sealed []byte
}

// Logins are who tenants are to registries, one each.
type Logins interface {
	// PutLogin records l in place of the one of its tenant and registry.
	PutLogin(ctx context.Context, l SealedLogin) error
	GetLogin(ctx context.Context, registry string) (SealedLogin, error)
	// ListLogins lists those in scope by tenant and registry.
	ListLogins(ctx context.Context) ([]SealedLogin, error)
	DeleteLogin(ctx context.Context, registry string) error
}

// CheckLogin is what every implementation asks of a record. What it breaks is a
// defect of the caller.
func CheckLogin(l SealedLogin) error {
	switch {
	case l.Registry == "":
		return sandbox.InvalidField("registry", "a login is to a registry")
	case l.Username == "":
		return sandbox.InvalidField("username", "a login is somebody's")
	case len(l.Sealed) == 0:
		return &sandbox.Error{Class: sandbox.Internal, Op: "store.login", Msg: "a login without a password"}
	}
	return nil
}
