package store

import (
	"context"
	"slices"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// Snapshots are records of frozen state; the state itself is a node's.
type Snapshots interface {
	// CreateSnapshot records s. A name that another snapshot has moves to s in
	// the same transaction, and so does the live sandbox it was taken of, which
	// hangs below s from then on; one of a directory is no point to return to and
	// moves nothing. It returns the record as stored.
	CreateSnapshot(ctx context.Context, s sandbox.Snapshot) (sandbox.Snapshot, error)
	// GetSnapshot finds by exact name or by id; the id wins. Hidden ones too.
	GetSnapshot(ctx context.Context, nameOrID string) (sandbox.Snapshot, error)
	// ListSnapshots pages through newest first (CreatedAt, then ID).
	ListSnapshots(ctx context.Context, f SnapshotFilter) (snaps []sandbox.Snapshot, next string, err error)
	// SetSnapshotImage remembers the image that was prepared of a snapshot.
	SetSnapshotImage(ctx context.Context, id, image string) error
	// DeleteSnapshot forgets a snapshot and returns it. While a version of a
	// template needs it, it is sandbox.ErrPrecondition, which names that.
	DeleteSnapshot(ctx context.Context, id string) (sandbox.Snapshot, error)
	// SnapshotAges sums up the snapshots in scope that are not hidden.
	SnapshotAges(ctx context.Context, now time.Time) (SnapshotAges, error)
	// Manifests lists the content that records of all tenants refer to, Needs
	// included. It wants the installation's scope, as SnapshotImages does.
	Manifests(ctx context.Context) ([]string, error)
	// SnapshotImages lists the images without which some snapshot could not be
	// used.
	SnapshotImages(ctx context.Context) ([]string, error)
	// Tree is everything that hangs together with a sandbox or snapshot,
	// through whatever chain of ancestors, gone ones included.
	Tree(ctx context.Context, id string) (Tree, error)
}

// SnapshotFilter chooses snapshots. The zero value means all that are not
// hidden.
type SnapshotFilter struct {
	Labels    map[string]string // all must match
	Sandbox   string            // it was taken of
	Kind      sandbox.SnapshotKind
	Hidden    bool      // the hidden ones instead
	ExpiredAt time.Time // only those that have expired at this time; zero = all
	PageSize  int       // 0 = 100
	PageToken string    // opaque; from the page before
}

// SnapshotAges is how many snapshots there are and how long they have been there.
type SnapshotAges struct {
	Count  int64
	Oldest time.Time // when the oldest was made; zero = there is none
	// Seconds is the sum of their ages. A time.Duration would not hold ten
	// thousand of a month.
	Seconds int64
}

// Tree is the nodes of a tree in no order.
type Tree struct {
	Sandboxes []sandbox.Sandbox // ended ones too
	Snapshots []sandbox.Snapshot
}

// Templates are versions of names. A version is recorded with the snapshot it
// starts from and goes with it, so that neither is ever without the other.
type Templates interface {
	// CreateTemplateVersion gives t the next version of its name and records
	// it and snap, which is hidden from then on and does not expire. Deleted versions are not
	// given out again.
	CreateTemplateVersion(ctx context.Context, t sandbox.Template, snap sandbox.Snapshot) (sandbox.Template, error)
	// GetTemplate finds a version; 0 is the newest there is.
	GetTemplate(ctx context.Context, name string, version int64) (sandbox.Template, error)
	// ListTemplates lists all versions of a name, newest first, or with name ""
	// the newest of each, by name.
	ListTemplates(ctx context.Context, name string) ([]sandbox.Template, error)
	// TagTemplate has a version carry tags, and no other version of its name;
	// version 0: none carries them any more. NotFound where there is no such version,
	// or with 0 no such name.
	TagTemplate(ctx context.Context, name string, version int64, tags []string) error
	// DeleteTemplate forgets a version, or with 0 all of them, with their
	// snapshots, and returns them newest first.
	DeleteTemplate(ctx context.Context, name string, version int64) ([]sandbox.Template, error)
}

// CheckNewSnapshot is what every implementation asks of a new snapshot's
// record. What it breaks is a defect of the caller.
func CheckNewSnapshot(s sandbox.Snapshot) error {
	switch {
	case !sandbox.ValidID(s.ID):
		return sandbox.InvalidField("id", "%.80q is no snapshot id", s.ID)
	case s.Kind != sandbox.MemorySnapshot && s.Kind != sandbox.FilesystemSnapshot && s.Kind != sandbox.DirectorySnapshot:
		return sandbox.InvalidField("kind", "%.80q is no kind of snapshot", s.Kind)
	case s.Content.Manifest == "":
		return sandbox.InvalidField("content.manifest", "a snapshot on record has content that is kept")
	}
	return nil
}

// ImagesOf is which images a snapshot cannot be used without. A directory's
// content goes with any image.
func ImagesOf(s sandbox.Snapshot) []string {
	ids := []string{s.Content.Base, s.Content.Image}
	if s.Kind != sandbox.DirectorySnapshot {
		ids = append(ids, s.ImageID)
	}
	slices.Sort(ids)
	return slices.DeleteFunc(slices.Compact(ids), func(id string) bool { return id == "" })
}
