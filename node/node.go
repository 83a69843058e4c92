package node

import (
	"context"
	"io"
	"iter"
	"net"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/snapshot"
)

// Node runs sandboxes on one machine. Safe for concurrent use.
type Node interface {
	// Info is what the node is and what it can do.
	Info(ctx context.Context) (Info, error)
	Capacity(ctx context.Context) (sandbox.Capacity, error)

	Lifecycle
	Ends
	Processes
	Files
	Ports
	State
	Network

	// Progress follows the work that a call was named for by its op, from
	// whenever somebody looks until the work ends. A reader that is slow sees
	// less of it: the latest there is, and the node waits for nobody. Work of
	// that name that has not begun is waited for.
	Progress(ctx context.Context, op string) iter.Seq2[sandbox.Progress, error]

	// Expect says what its caller will soon ask for, under a name of its own, in
	// place of what was said under that name before, and returns what of it is
	// ready. The node gets it ready meanwhile, as far as it has room. It is
	// forgotten e.TTL after it was said; the zero Expectation forgets it at once.
	Expect(ctx context.Context, name string, e Expectation) (Expected, error)

	// What a node may not have says so: Info, and sandbox.ErrUnsupported.
	Volumes() Volumes
	Recordings() Recordings
	Images() Images
}

// Info is what a node is. Name, Sealed and the powers do not change while it runs.
type Info struct {
	Name       string `json:"name"`
	Sealed     bool   `json:"sealed,omitempty"`     // stored content is encrypted: no plain form of it may lie on disk longer than it is in use
	Volumes    bool   `json:"volumes,omitempty"`    // it has them
	Recordings bool   `json:"recordings,omitempty"` // it has them
	// Litter says that content became useless since the last Collect by what the
	// node did itself: a sandbox woke from cold standby, or ended in it, or a
	// snapshot was given up.
	Litter bool `json:"litter,omitempty"`
}

// Expectation is what is wanted soon: kernels of the default class for sandboxes
// that start, and for those that go on from memory snapshots, with what these hold.
type Expectation struct {
	Kernels  int               `json:"kernels,omitempty"`
	Restores int               `json:"restores,omitempty"`
	States   []sandbox.Content `json:"states,omitempty"` // of memory snapshots
	// Ahead says more of what goes on from those: with it the node can have some of it
	// restored when it is asked for.
	Ahead []Ahead       `json:"ahead,omitempty"`
	TTL   time.Duration `json:"ttl,omitempty"` // at most MaxExpect
}

// Ahead is creates from a memory snapshot, as CreateFrom will be asked for them.
type Ahead struct {
	Tenant string          `json:"tenant,omitempty"`
	Spec   sandbox.Spec    `json:"spec"`
	Image  sandbox.Image   `json:"image"`
	From   sandbox.Content `json:"from"`
	Count  int             `json:"count"`
}

// MaxExpect is the longest an expectation lasts without being said again;
// MaxExpectations is how many names there may be at a time.
const (
	MaxExpect       = 10 * time.Minute
	MaxExpectations = 1024
)

// Expected is what there is for an expectation. Kernels are shared with all who
// create: none is anybody's before it is taken.
type Expected struct {
	Kernels  int             `json:"kernels"`  // warm now
	Aim      int             `json:"aim"`      // how many the node is heating to, within its bounds and its memory
	Restores int             `json:"restores"` // blank kernels ready now
	States   []ExpectedState `json:"states,omitempty"`
}

// ExpectedState is how far the content of a memory snapshot is.
type ExpectedState struct {
	Manifest string         `json:"manifest"`
	Ready    bool           `json:"ready,omitempty"`
	Err      *sandbox.Error `json:"err,omitempty"` // why it will not be
}

// Lifecycle of sandboxes.
type Lifecycle interface {
	// Create admits sb, attaches its container and returns when the node's own
	// record of it is durable. On error nothing of it is left.
	Create(ctx context.Context, sb sandbox.Sandbox, img sandbox.Image) (took time.Duration, err error)
	// CreateFrom is Create from a memory snapshot: all that ran goes on. sb's
	// spec is what limits it; img is the image of the snapshot.
	CreateFrom(ctx context.Context, sb sandbox.Sandbox, img sandbox.Image, from sandbox.Snapshot) (took time.Duration, err error)
	// Reset gives the sandbox a pristine container. One that fails ends it.
	Reset(ctx context.Context, id string) (episode int64, took time.Duration, err error)
	// Restore replaces what a sandbox is by a snapshot, of memory or of files;
	// img as for CreateFrom or from PrepareImage. If it fails the sandbox is as
	// it was. The episode goes up.
	Restore(ctx context.Context, id string, img sandbox.Image, from sandbox.Snapshot) (episode int64, took time.Duration, err error)
	// Kill ends a sandbox with a cause and returns when nothing is left of it. The
	// first cause wins; of one that has ended it is nil.
	Kill(ctx context.Context, id string, end sandbox.End) error
	// SetExpiry moves the end of a sandbox's life; zero = never.
	SetExpiry(ctx context.Context, id string, at time.Time) error
	Stats(ctx context.Context, id string) (sandbox.Stats, error)

	// Pause freezes a sandbox, with cold on disk. Pausing a paused one is no
	// error, and a hot one can still go cold.
	Pause(ctx context.Context, id string, cold bool) error
	Resume(ctx context.Context, id string) (took time.Duration, err error)
	// Standby lists the sandboxes that are not awake.
	Standby(ctx context.Context) (map[string]sandbox.Standby, error)

	// Hold wakes a sandbox and keeps it from being idle until the hold is released
	// or ttl has passed without a renewal, whichever is first.
	Hold(ctx context.Context, id string, ttl time.Duration) (Hold, error)
	// RenewHold makes a hold last for ttl from now; sandbox.ErrNoLease if it is
	// over.
	RenewHold(ctx context.Context, token string, ttl time.Duration) (Hold, error)
	// ReleaseHold ends a hold. One that is over is no error.
	ReleaseHold(ctx context.Context, token string) error

	// Live lists the sandboxes that have not ended.
	Live(ctx context.Context) ([]sandbox.Sandbox, error)
}

// Hold is a lease on the activity of a sandbox.
type Hold struct {
	Token string    `json:"token"`
	Until time.Time `json:"until"`
}

// MaxHold is the longest a hold lasts without being renewed.
const MaxHold = 10 * time.Minute

// Ends of sandboxes. The node keeps each until it is acknowledged, over restarts.
type Ends interface {
	// Ends lists those that were not acknowledged.
	Ends(ctx context.Context) (map[string]sandbox.End, error)
	// Ended tells of them: at first of all that were not acknowledged, then of
	// each that comes by itself. What a Kill ends its caller knows.
	Ended(ctx context.Context) iter.Seq2[Ended, error]
	// AckEnd forgets an end that is on record elsewhere. One that is not there
	// is no error.
	AckEnd(ctx context.Context, id string) error
}

// Ended is a sandbox that has ended.
type Ended struct {
	ID  string      `json:"id"`
	End sandbox.End `json:"end"`
}

// Processes of a sandbox that were started through the API.
type Processes interface {
	// Start runs a process and tells of it until its end: Started, output from
	// offset, End. An exec id that was started before is not run again. Data of
	// an output is good until the next element.
	Start(ctx context.Context, id string, spec sandbox.ProcessSpec, offset int64) iter.Seq2[sandbox.ProcessEvent, error]
	// Attach is Start of what was started.
	Attach(ctx context.Context, id, execID string, offset int64) iter.Seq2[sandbox.ProcessEvent, error]
	SendInput(ctx context.Context, id, execID string, data []byte) error
	CloseInput(ctx context.Context, id, execID string) error
	// Signal goes to the whole tree unless processOnly.
	Signal(ctx context.Context, id, execID, signal string, processOnly bool) error
	Resize(ctx context.Context, id, execID string, size sandbox.TermSize) error
	Processes(ctx context.Context, id string) ([]sandbox.Process, []sandbox.Task, error)
	// Wait returns when a process has ended.
	Wait(ctx context.Context, id, execID string) (sandbox.ProcessEnd, error)
}

// Files of a sandbox. Paths that are not absolute are below its working directory.
type Files interface {
	// ReadFile returns length bytes from offset; 0 = to the end. What is too
	// much for one call is sandbox.ErrTooLarge: Download has no bound.
	ReadFile(ctx context.Context, id, path string, offset, length int64) ([]byte, sandbox.FileInfo, error)
	WriteFile(ctx context.Context, id, path string, data []byte, opt sandbox.WriteOptions) (sandbox.FileInfo, error)
	StatFile(ctx context.Context, id, path string) (sandbox.FileInfo, error)
	ListFiles(ctx context.Context, id, path string, opt sandbox.ListOptions) (files []sandbox.FileInfo, truncated bool, err error)
	MakeDir(ctx context.Context, id, path string, opt sandbox.WriteOptions) (sandbox.FileInfo, error)
	MoveFile(ctx context.Context, id, from, to string) (sandbox.FileInfo, error)
	RemoveFile(ctx context.Context, id, path string, recursive bool) error
	Chmod(ctx context.Context, id, path string, mode uint32, recursive bool) error
	Chown(ctx context.Context, id, path, owner string, recursive bool) error
	// SetAttributes makes these all the extended attributes "user.*" of a path.
	SetAttributes(ctx context.Context, id, path string, attrs map[string]string) (sandbox.FileInfo, error)
	// Watch reports changes below a path. The first has Op "ready": what happens
	// after it is seen. "overflow" says that changes were dropped.
	Watch(ctx context.Context, id, path string, recursive bool) iter.Seq2[sandbox.FileChange, error]

	// Upload writes what r gives. Content that breaks off, by an error of r or the
	// caller's leaving, is not taken for whole: an atomic file stays as it was. The
	// error of r is then the answer. When Upload fails, a read of r may still be
	// under way; it is the last.
	Upload(ctx context.Context, id string, to Upload, r io.Reader) error
	// Download gives content to w as it comes. When it fails what was written is
	// not whole.
	Download(ctx context.Context, id string, from Download, w io.Writer) error
}

// Upload is where content goes: to a file, or as a tar into a directory.
type Upload struct {
	Path  string               `json:"path"`
	Tar   bool                 `json:"tar,omitempty"`
	Write sandbox.WriteOptions `json:"write,omitzero"`
	// Remove are clean absolute paths that are removed before, with all below them;
	// what is not there is no error.
	Remove []string `json:"remove,omitempty"`
	// Open are clean absolute paths that the owner, UID:GID in Write.User, can come to
	// before a tar is unpacked, and write in where they are directories: an agent was
	// root, and who judges its work is not. Those above them get the bit to be passed
	// by all; what is not there is left alone. Where it is not nil, entries have no more
	// than permission bits, and the kernel may unpack them itself.
	Open []string `json:"open,omitzero"`
}

// Download is what content is wanted: of a file from Offset, Length bytes or 0 =
// to the end, or of a directory as a tar.
type Download struct {
	Path   string `json:"path"`
	Tar    bool   `json:"tar,omitempty"`
	Offset int64  `json:"offset,omitempty"`
	Length int64  `json:"length,omitempty"`
}

// Ports are connections into a sandbox and out of it to the callback address.
type Ports interface {
	// Dial opens a byte stream to a TCP port inside; sandbox.ErrPortClosed if
	// nothing listens there. It does not keep the sandbox awake: it stands still
	// with it, and what is written to it wakes it. It ends with the sandbox and
	// its episode. The context is of the dialling only.
	Dial(ctx context.Context, id string, port int) (Conn, error)
	// Callbacks listens on a port of the callback address for as long as it is
	// ranged over, and tells of each connection that code inside makes to it. The
	// first element has no ID: from there on it listens. One at a time: another
	// takes it over, and this one fails with sandbox.ErrConflict.
	// sandbox.ErrPortTaken if a program inside has the port. Connections stand
	// still with the sandbox and end with its episode; the listening goes on.
	Callbacks(ctx context.Context, id string, port int) iter.Seq2[Callback, error]
	// OpenCallback takes a connection that Callbacks told of. It ends with the
	// Callbacks that told of it.
	OpenCallback(ctx context.Context, callback string) (Conn, error)
}

// Callback is a connection from inside that waits to be opened.
type Callback struct {
	ID string `json:"id,omitempty"`
}

// Conn is a byte stream each half of which is closed by its own side.
type Conn interface {
	net.Conn
	CloseWrite() error
}

// State of sandboxes outside of kernels. Content is the node's; records of it
// are its caller's.
type State interface {
	// PrepareSnapshot makes the content of a snapshot, complete and durable, or
	// nothing, and nothing comes of it yet: the caller records it and then says
	// CommitSnapshot, or else AbortSnapshot. If neither comes before Prepared.Until
	// it is aborted. With Stop the sandbox stands still until then.
	PrepareSnapshot(ctx context.Context, id string, r SnapshotRequest) (Prepared, error)
	// CommitSnapshot lets content be the caller's, and with Stop ends the sandbox.
	// Said twice it is the same as once. sandbox.ErrConflict if it was aborted, by
	// whomever; sandbox.ErrNotFound if it is not known any more.
	CommitSnapshot(ctx context.Context, token string) error
	// AbortSnapshot lets content go and the sandbox go on. Aborting what is
	// aborted or not known is no error, what is committed sandbox.ErrConflict.
	AbortSnapshot(ctx context.Context, token string) error

	// PrepareImage makes the image that sandboxes from a filesystem snapshot
	// start from: image base with the changes. The same every time, and there
	// already from the second on.
	PrepareImage(ctx context.Context, from sandbox.Snapshot, base sandbox.Image, op string) (sandbox.Image, error)
	// Diff says what changed in the files of a sandbox since it was created, reset or
	// restored, or since a filesystem snapshot or a mark. It is woken.
	Diff(ctx context.Context, id string, r sandbox.DiffRequest) (sandbox.Diff, error)
	// MarkFiles remembers the files of a sandbox as they are, for one Diff. A reset
	// forgets it, and so does a node that is opened again.
	MarkFiles(ctx context.Context, id, mark string) error
	// Mount puts a directory snapshot at path, read-only, or unpacked.
	Mount(ctx context.Context, id string, from sandbox.Snapshot, path string, unpack bool) error
	// Tar writes the content of a filesystem or directory snapshot.
	Tar(ctx context.Context, c sandbox.Content, w io.Writer) error
	// Release ends the node's own hold on content that it made: what was made with
	// Keep false goes, and what is stored stays for as long as Collect is told of it.
	Release(ctx context.Context, c sandbox.Content) error
	// Verify reads content and names what is broken; sandbox.ErrCorrupt.
	Verify(ctx context.Context, c sandbox.Content) (bytes int64, err error)
	// Blobs says what blobs each content is in, its manifest's own among them.
	// Content that cannot be read is left out. It is not to be changed.
	Blobs(ctx context.Context, manifests []string) (map[string][]snapshot.Blob, error)
	// Collect removes all stored content but that of the given manifests, of
	// sandboxes in standby, and of what is being prepared.
	Collect(ctx context.Context, keep []string) (freed int64, err error)
}

// SnapshotRequest is what to take of a sandbox.
type SnapshotRequest struct {
	Kind sandbox.SnapshotKind `json:"kind"`
	Path string               `json:"path,omitempty"` // of a directory
	Stop bool                 `json:"stop,omitempty"` // the commit ends the sandbox, as killed_by_user
	Keep bool                 `json:"keep,omitempty"` // in the content store; otherwise until Release, of memory for a fork, of files as their plain tar: no durable write
	Op   string               `json:"op,omitempty"`   // for Progress
	Most int64                `json:"most,omitempty"` // bytes of the files of a filesystem snapshot, holes too; more is sandbox.ErrTooLarge; 0 = no bound
	// TTL is how long the caller has until it commits; 0 = DefaultPrepared.
	TTL time.Duration `json:"ttl,omitempty"`
}

// DefaultPrepared is many times what a caller needs to write one record.
const DefaultPrepared = time.Minute

// Prepared is a snapshot that waits for its commit.
type Prepared struct {
	Token   string          `json:"token"`
	Content sandbox.Content `json:"content"`
	Paused  time.Duration   `json:"paused"` // how long the sandbox stood still for it
	Until   time.Time       `json:"until"`
}

// Network of sandboxes. A node that has none refuses to create a sandbox that
// asks for one.
type Network interface {
	// SetNetwork returns when the policy is in force, with its generation.
	SetNetwork(ctx context.Context, id string, n sandbox.Network) (generation int64, err error)
	NetworkStatus(ctx context.Context, id string, flows int) (sandbox.NetworkStatus, error)
	// PutSecrets makes these all the secrets of a tenant, with their values, which
	// the node keeps in memory only. When it returns, requests of running
	// sandboxes go by them.
	PutSecrets(ctx context.Context, tenant string, secrets []sandbox.Secret) error
	// UseSecrets says which of its tenant's secrets a sandbox has, and returns the
	// authority that it trusts from then on.
	UseSecrets(ctx context.Context, id string, names []string) (authority string, err error)
}
