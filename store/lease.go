package store

import (
	"context"

	"github.com/cove-sandbox/cove/sandbox"
)

// Leases are kept while they last. When a lease expires is no part of its
// record: it changes with every heartbeat, and a server that starts gives each
// its whole time again, because the heartbeats of the time before had nobody
// to hear them.
type Leases interface {
	// CreateLease is sandbox.ErrAlreadyExists where the id is taken.
	CreateLease(ctx context.Context, l sandbox.Lease) error
	// ListLeases lists those in scope, oldest first (CreatedAt, then ID).
	ListLeases(ctx context.Context) ([]sandbox.Lease, error)
	// DeleteLease forgets a lease; sandboxes are not its concern. Deleting what
	// is not there is no error.
	DeleteLease(ctx context.Context, id string) error
}

// CheckLease is what every implementation asks of a record. What it breaks is a
// defect of the caller.
func CheckLease(l sandbox.Lease) error {
	if !sandbox.ValidID(l.ID) {
		return sandbox.InvalidField("id", "%.80q is no lease id", l.ID)
	}
	return nil
}
