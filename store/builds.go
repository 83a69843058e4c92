package store

import (
	"context"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// Built is what a build made, or was given, under a key of its tenant.
type Built struct {
	Tenant   string
	Key      string
	Record   string // JSON; the server's own
	Manifest string // content that it keeps from being collected; "" = none
	Size     int64
	UsedAt   time.Time
}

// Builds is the cache of builds of images.
type Builds interface {
	// PutBuilt records b in place of what its key gave.
	PutBuilt(ctx context.Context, b Built) error
	GetBuilt(ctx context.Context, key string) (Built, error)
	// ListBuilt lists those in scope, the one used longest ago first.
	ListBuilt(ctx context.Context) ([]Built, error)
	// DeleteBuilt forgets one that was not used since a time; one that was, or is
	// not there, is no error.
	DeleteBuilt(ctx context.Context, key string, since time.Time) error
}

// CheckBuilt is what every implementation asks of a record. What it breaks is a
// defect of the caller.
func CheckBuilt(b Built) error {
	if b.Key == "" || b.Record == "" {
		return &sandbox.Error{Class: sandbox.Internal, Op: "store.built", Msg: "what was built has a key and a record"}
	}
	return nil
}
