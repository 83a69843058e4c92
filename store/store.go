// Package store is the contract of Cove's durable record: sandboxes and their
// ends, snapshots and templates, volumes and recordings, images' names, secrets,
// logins to registries, leases, runs, shipments, API keys and idempotency keys. Package storetest
// holds the suite every implementation passes; sqlite is the default one.
//
// A method that changes something returns only when the change is durable.
// Errors are *sandbox.Error: a missing thing is sandbox.ErrNotFound (an image
// sandbox.ErrImageNotFound), a taken one sandbox.ErrAlreadyExists. No method
// reads a clock: times come in as arguments.
//
// Whose things a call sees is the [Scope] of its context. What is not in scope
// is not there: sandbox.ErrNotFound, and no name of it is taken.
package store

import (
	"context"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// Store is safe for concurrent use.
type Store interface {
	Sandboxes
	Images
	Keys
	Snapshots
	Templates
	Tenants
	Audit
	Secrets
	Logins
	Leases
	Runs
	Shipments
	Volumes
	Recordings
	Builds
	Grades
	Close() error
}

// Sandboxes are kept after their end, so that a cause stays readable.
type Sandboxes interface {
	// CreateSandbox records sb. If idem.Key is set and known, nothing is
	// written: the sandbox first created with it is returned with existed set
	// when idem.Hash is the same, sandbox.ErrAlreadyExists when it is not.
	CreateSandbox(ctx context.Context, sb sandbox.Sandbox, idem Idempotency) (got sandbox.Sandbox, existed bool, err error)

	// SandboxByKey finds the sandbox first created with idem.Key, without
	// writing: sandbox.ErrNotFound if the key is not in use,
	// sandbox.ErrAlreadyExists if idem.Hash is not the one it was used with. Hash
	// "" stands for any.
	SandboxByKey(ctx context.Context, idem Idempotency) (sandbox.Sandbox, error)

	GetSandbox(ctx context.Context, id string) (sandbox.Sandbox, error)

	// ListSandboxes pages through newest first (CreatedAt, then ID).
	ListSandboxes(ctx context.Context, f Filter) (sbs []sandbox.Sandbox, next string, err error)

	// UpdateSandbox applies f to the record of a sandbox that has not ended,
	// in one transaction; sandbox.ErrEnded if it has. f may be called again.
	// An error of f is returned as it is and nothing is changed. f cannot
	// change ID or CreatedAt, end the sandbox (EndSandbox does) or move its
	// state back: see CheckUpdate.
	UpdateSandbox(ctx context.Context, id string, f func(*sandbox.Sandbox) error) (sandbox.Sandbox, error)

	// EndSandbox records an end. The first end wins: ending an ended sandbox
	// changes nothing and returns the record as it is.
	EndSandbox(ctx context.Context, id string, end sandbox.End) (sandbox.Sandbox, error)

	// ForgetSandbox deletes a record, whatever its state, and its idempotency
	// key: for a creation that failed, so that the key can be used again.
	// Forgetting what is not there is no error.
	ForgetSandbox(ctx context.Context, id string) error

	// ForgetEnded wants the installation's scope. It deletes at most limit records (and their idempotency keys)
	// that ended before the time, and says how many.
	ForgetEnded(ctx context.Context, before time.Time, limit int) (int, error)
}

// Idempotency ties a caller's key to the request it was used for.
type Idempotency struct {
	Key  string
	Hash string // of the request; the same key with another hash is a misuse
}

// Filter chooses sandboxes. The zero value means all that have not ended.
type Filter struct {
	Labels    map[string]string // all must match
	States    []sandbox.State   // nil = every state but ended
	Run       string            // id of a run; "" = any, and those of none
	PageSize  int               // 0 = 100
	PageToken string            // opaque; from the page before
}

// Images are names for content. Content is shared by all tenants, names are a
// tenant's own or, put with the installation's scope, everybody's; a tenant's
// own name is found first. An image is in a tenant's sight if it has a name
// there, or if a sandbox or snapshot of the tenant uses it.
type Images interface {
	// PutImage records an image and points name at it. A name moves when it
	// is put again; with name "" the image is recorded and nothing points at
	// it. An image put again is recorded as last given; where it came from and
	// when is so for the scope alone that put it, and who put none sees the
	// installation's. img.Names is ignored.
	PutImage(ctx context.Context, img sandbox.Image, name string) error
	// PutImageWithin is PutImage for a tenant that may hold most bytes of images,
	// as ImageBytes counts them: sandbox.ErrQuotaExceeded if it would have more
	// and is not on its way down. 0 is no bound.
	PutImageWithin(ctx context.Context, img sandbox.Image, name string, most int64) error
	// ImageBytes is what the names of the tenant in scope stand for and what its
	// live sandboxes and snapshots keep, each content once. Of the latter what has
	// one of everybody's names counts for nobody, nor what was made of snapshots.
	ImageBytes(ctx context.Context) (int64, error)
	// GetImage finds by exact name or by id; the id wins.
	GetImage(ctx context.Context, nameOrID string) (sandbox.Image, error)
	// ListImages lists newest first (CreatedAt, then ID), Names sorted.
	ListImages(ctx context.Context) ([]sandbox.Image, error)
	// RemoveImageName forgets a name and returns the image it pointed at.
	RemoveImageName(ctx context.Context, name string) (sandbox.Image, error)
	// RemoveImageName never removes a name that is everybody's for a tenant:
	// that is sandbox.ErrDenied.
	// RemoveImage wants the installation's scope. It forgets an image without names that no live sandbox and no
	// snapshot uses; sandbox.ErrPrecondition otherwise.
	RemoveImage(ctx context.Context, id string) error
	// RemovePreparedImage is RemoveImage of one that could be made again: the
	// snapshots it was prepared of do not keep it, and forget it with it. Those
	// that are over it do.
	RemovePreparedImage(ctx context.Context, id string) error
}
