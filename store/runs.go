package store

import (
	"context"

	"github.com/cove-sandbox/cove/sandbox"
)

// Runs are records of a trainer's jobs, kept after their end until they are
// deleted. A heartbeat changes nothing here, as of leases.
type Runs interface {
	// CreateRun records a run; sandbox.ErrAlreadyExists where the tenant has one
	// of that name.
	CreateRun(ctx context.Context, r sandbox.Run) error
	// GetRun finds by id or by name; the id wins.
	GetRun(ctx context.Context, nameOrID string) (sandbox.Run, error)
	// ListRuns lists those in scope, newest first (CreatedAt, then ID); the ended
	// ones only if they are asked for.
	ListRuns(ctx context.Context, ended bool) ([]sandbox.Run, error)
	// UpdateRun changes a record by f, which must not change ID, Tenant, Name or
	// CreatedAt, and may be called more than once.
	UpdateRun(ctx context.Context, id string, f func(*sandbox.Run) error) (sandbox.Run, error)
	// DeleteRun forgets a run and its checkpoints. Deleting what is not there is
	// no error.
	DeleteRun(ctx context.Context, id string) error

	// PutCheckpoint makes the next version of a run's document and forgets those
	// that are keep versions older. ifVersion, where set, must be the latest there
	// is, 0 for none: sandbox.ErrConflict otherwise.
	PutCheckpoint(ctx context.Context, run string, c sandbox.Checkpoint, ifVersion *int64, keep int) (sandbox.Checkpoint, error)
	// GetCheckpoint finds a version, 0 = the latest; sandbox.ErrNotFound.
	GetCheckpoint(ctx context.Context, run string, version int64) (sandbox.Checkpoint, error)
	// ListCheckpoints lists what is kept, newest first, without documents.
	ListCheckpoints(ctx context.Context, run string) ([]sandbox.Checkpoint, error)
}

// CheckRun is what every implementation asks of a record. What it breaks is a
// defect of the caller.
func CheckRun(r sandbox.Run) error {
	switch {
	case !sandbox.ValidID(r.ID):
		return sandbox.InvalidField("id", "%.80q is no id of a run", r.ID)
	case r.Name == "":
		return sandbox.InvalidField("name", "a run has a name")
	case r.State != sandbox.RunActive && r.State != sandbox.RunEnded:
		return sandbox.InvalidField("state", "%.40q is no state of a run", r.State)
	}
	return nil
}

// CheckRunUpdate is what every implementation asks of a change.
func CheckRunUpdate(old, next sandbox.Run) error {
	if old.ID != next.ID || old.Tenant != next.Tenant || old.Name != next.Name || !old.CreatedAt.Equal(next.CreatedAt) {
		return sandbox.InvalidField("run", "its id, tenant, name and time of creation do not change")
	}
	return CheckRun(next)
}
