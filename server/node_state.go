package server

import (
	"context"
	"io"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/snapshot"
)

// StateNode is what the server needs of a node for snapshots, forks and
// standby. Content of snapshots is the node's; their records are the store's.
type StateNode interface {
	// Pause freezes a sandbox, with cold on disk. Pausing a paused one is no
	// error, and a hot one can still go cold. Guest, Bulk, Reset, Snapshot and
	// everything else that needs the sandbox wakes it; Stats, SetExpiry and
	// Kill do not.
	Pause(ctx context.Context, id string, cold bool) error
	Resume(ctx context.Context, id string) (took time.Duration, err error)
	// Standby lists the sandboxes that are not awake.
	Standby() map[string]sandbox.Standby

	// Snapshot makes the content of a snapshot, complete and durable, or
	// nothing. paused is how long the sandbox stood still. If ctx ends the
	// sandbox is as it was, awake and not stopped, unless Commit has succeeded.
	Snapshot(ctx context.Context, id string, r SnapshotRequest) (c sandbox.Content, paused time.Duration, err error)
	// CreateFrom is Create from a memory snapshot: all that ran goes on. sb's
	// spec is what limits it; img is the image of the snapshot.
	CreateFrom(ctx context.Context, sb sandbox.Sandbox, img sandbox.Image, from sandbox.Snapshot) (took time.Duration, err error)
	// PrepareImage makes the image that sandboxes from a filesystem snapshot
	// start from: image base with the changes. The same every time, and there
	// already from the second on.
	PrepareImage(ctx context.Context, from sandbox.Snapshot, base sandbox.Image, progress func(sandbox.Progress)) (sandbox.Image, error)
	// Restore replaces what a sandbox is by a snapshot, of either kind; img as
	// for CreateFrom or from PrepareImage. If it fails the sandbox is as it
	// was. The episode goes up.
	Restore(ctx context.Context, id string, img sandbox.Image, from sandbox.Snapshot) (episode int64, took time.Duration, err error)
	// Mount puts a directory snapshot at path, read-only, or unpacked.
	Mount(ctx context.Context, id string, from sandbox.Snapshot, path string, unpack bool) error
	// Tar writes the content of a filesystem or directory snapshot.
	Tar(ctx context.Context, c sandbox.Content, w io.Writer) error

	// Release lets go of content that was made with Keep false, or that will
	// have no record.
	Release(ctx context.Context, c sandbox.Content) error
	// Verify reads content and names what is broken; sandbox.ErrCorrupt.
	Verify(ctx context.Context, c sandbox.Content) (bytes int64, err error)
	// Blobs says what blobs each content is in, its manifest's own among them.
	// Content that cannot be read is left out. It is not to be changed.
	Blobs(ctx context.Context, manifests []string) (map[string][]snapshot.Blob, error)
	// Collect removes all stored content but that of the given manifests and of
	// sandboxes in standby. A Snapshot under way is safe.
	Collect(ctx context.Context, keep []string) (freed int64, err error)

	// Sealed says that stored content is encrypted: no plain form of it may lie
	// on disk longer than it is in use.
	Sealed() bool
	// Litter says that content became useless since the last Collect by what
	// the node did itself: a sandbox woke from cold standby, or ended in it, or a
	// snapshot was given up.
	Litter() bool

	// Volumes of the node; nil where it can have none.
	Volumes() VolumeSet
	// Recordings of the node; nil where it keeps none.
	Recordings() RecordingSet
}

// SnapshotRequest is what to take.
type SnapshotRequest struct {
	Kind     sandbox.SnapshotKind
	Path     string // of a directory
	Stop     bool   // the sandbox has ended when it returns, killed_by_user
	Keep     bool   // in the content store; otherwise until Release, for a fork
	Progress func(sandbox.Progress)
	// Commit, if there is one, is called with the content before Stop ends the
	// sandbox, which goes on if it fails.
	Commit func(sandbox.Content) error
}

// VolumeSet makes and keeps volumes on a node; it persists them itself. Names
// or ids are taken everywhere.
type VolumeSet interface {
	Create(ctx context.Context, v sandbox.Volume) (sandbox.Volume, error)
	// CreateFrom makes a volume with the content of a directory snapshot.
	CreateFrom(ctx context.Context, v sandbox.Volume, c sandbox.Content) (sandbox.Volume, error)
	// Snapshot makes the content of a directory snapshot.
	Snapshot(ctx context.Context, name string) (sandbox.Content, error)
	Get(ctx context.Context, name string) (sandbox.Volume, error)
	List(ctx context.Context) ([]sandbox.Volume, error)
	Delete(ctx context.Context, name string) error
	Resize(ctx context.Context, name string, size int64) (sandbox.Volume, error)
	Clone(ctx context.Context, name string, to sandbox.Volume) (sandbox.Volume, error)
	ListFiles(ctx context.Context, name, path string, depth int) (files []sandbox.FileInfo, truncated bool, err error)
	ReadFile(ctx context.Context, name, path string) (io.ReadCloser, sandbox.FileInfo, error)
	WriteFile(ctx context.Context, name, path string, r io.Reader, mode uint32) (sandbox.FileInfo, error)
	RemoveFile(ctx context.Context, name, path string, recursive bool) error
}
