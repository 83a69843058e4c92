package store

import (
	"context"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// SealedSecret is a secret whose value nobody can read who has only the record:
// Value is empty, Sealed is what the server made of it.
type SealedSecret struct {
	sandbox.Secret
	Sealed []byte
}

// Secrets are named within their tenant.
type Secrets interface {
	// CreateSecret is sandbox.ErrAlreadyExists where the name is taken.
	CreateSecret(ctx context.Context, s SealedSecret) error
	GetSecret(ctx context.Context, name string) (SealedSecret, error)
	// ListSecrets lists those in scope by tenant and name.
	ListSecrets(ctx context.Context) ([]SealedSecret, error)
	// ReplaceSecret makes s of the one of its name that was last updated at was;
	// sandbox.ErrConflict if that is another time.
	ReplaceSecret(ctx context.Context, s SealedSecret, was time.Time) error
	DeleteSecret(ctx context.Context, name string) error
}

// CheckSecret is what every implementation asks of a record. What it breaks is a
// defect of the caller.
func CheckSecret(s SealedSecret) error {
	switch {
	case s.Name == "":
		return sandbox.InvalidField("name", "a secret has a name")
	case !s.Value.IsZero():
		return &sandbox.Error{Class: sandbox.Internal, Op: "store.secret", Msg: "a value that is not sealed"}
	case len(s.Sealed) == 0:
		return &sandbox.Error{Class: sandbox.Internal, Op: "store.secret", Msg: "a secret without a value"}
	}
	return nil
}
