// Package runtime is the contract between a node and what isolates a sandbox.
//
// A [Driver] boots kernels ahead of demand, each of a [Class]: what a kernel is
// before it is anybody's. Several drivers, and several classes of one, may serve
// a node. A [Kernel] takes one user
// container of any image ([Kernel.Attach]), may be given a pristine one
// ([Kernel.Reset]), and dies with its sandbox: it is never reused for another.
// Inside every kernel runs our guest; [Kernel.Guest] talks to it.
//
// Kernels outlive the process that made them. [Kernel.Handle] is what a node
// writes to its journal, and [Driver.Adopt] takes the kernel back after a
// restart. [Driver.Sweep] removes from the host whatever no handle refers to.
//
// Drivers: gvisor (the real one) and fake (the same guest in-process, no
// isolation, for fast tests of everything above). Both run runtimetest.
package runtime

import (
	"context"
	"net/netip"
	"os"
	"time"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/sandbox"
)

// Capabilities say what a driver can do beyond the contract, so that callers and the
// conformance suite ask instead of guessing.
type Capabilities struct {
	Isolated bool // code inside cannot see the host's files, processes or network
	Limits   bool // CPU, memory, pids and disk limits are enforced
	Adopt    bool // kernels survive the process that booted them

	// The optional interfaces of a kernel or a blank; see optional.go.
	Pause      bool // Pauser
	Checkpoint bool // Checkpointer and Restorer, files
	Hold       bool // Holder
	Processes  bool // a checkpoint holds processes and memory too
	Diff       bool // Differ
	Mount      bool // Mounter
	Volumes    bool // host directories can be mounted into a container
	Network    bool // Plugger, and Container.Device
	Reuse      bool // Reuser
	Layer      bool // LayerLister
	Clock      bool // Clocked, and Container.Clock

	// What classes of its kernels may and must say; see Class.
	Devices   bool // kernels can have devices of the host
	FixedSize bool // kernels have their size from Boot on: their class must say it
}

// Driver makes and finds kernels. Safe for concurrent use.
type Driver interface {
	Name() string
	Capabilities() Capabilities

	// Boot starts a kernel of a class with a guest that answers, ready for
	// Attach. A class that the driver cannot boot is what Class.Check says. On
	// error nothing is left behind.
	Boot(ctx context.Context, id string, c Class) (Kernel, error)

	// Adopt takes back a kernel booted by an earlier process. It fails with
	// sandbox.ErrNotFound if the kernel is no longer alive; what is left of it
	// is removed by Sweep. A driver that knows why it died returns it instead,
	// with Done closed. Any other error is tried again: it does not say that
	// the kernel is gone.
	Adopt(ctx context.Context, h Handle) (Kernel, error)

	// Sweep destroys every kernel of this driver's directory whose id is not
	// in keep, with its processes, namespaces, cgroups, mounts and files, and
	// says what it removed. It must not run concurrently with Boot.
	Sweep(ctx context.Context, keep map[string]bool) (removed []string, err error)

	// Close lets go of what the driver holds. Kernels go on running.
	Close() error
}

// Blanker is a driver that can make kernels in two steps. A blank kernel is a
// sentry without a guest: 30-45 ms of a boot are behind it, and a snapshot can
// be restored into it, which a started one no longer allows.
type Blanker interface {
	Blank(ctx context.Context, id string, c Class) (Blank, error)
}

// BuildKeeper is a Blanker that keeps the programs of its earlier builds, so
// that what was checkpointed with them can go on after an upgrade. A build is
// what Checkpoint.Build says; "" is any.
type BuildKeeper interface {
	// Fits says whether a blank as Blank makes them has the programs of a build.
	Fits(build string) bool
	// BlankOf is Blank with the programs of a build. sandbox.ErrPrecondition if
	// they are not there, or the machine cannot run what they saved.
	BlankOf(ctx context.Context, id string, c Class, build string) (Blank, error)
	// PruneBuilds removes all programs but the current ones, those of kernels
	// that are there, and those of builds, which is asked only if there are
	// others, and may miss what is checkpointed meanwhile.
	PruneBuilds(ctx context.Context, builds func(context.Context) ([]string, error)) (freed int64, err error)
}

// Blank is a kernel whose guest is not started. It becomes a kernel once, by
// Start; Destroy ends one that is not wanted. Done is closed when it dies.
type Blank interface {
	ID() string
	Start(ctx context.Context) (Kernel, error)
	Done() <-chan struct{}
	Destroy(ctx context.Context) error
}

// Handle is what must survive a restart to find a kernel again. Data is the
// driver's own and opaque to everyone else.
type Handle struct {
	Version int    `json:"version"`
	Driver  string `json:"driver"`
	ID      string `json:"id"`
	Data    []byte `json:"data"`
}

// Rootfs is an image ready to be attached.
type Rootfs struct {
	Path       string   // the EROFS file; for the fake driver a tar, or "" for an empty root
	Env        []string // KEY=value
	WorkingDir string   // "" = /
	User       string   // "" = root
}

// Container is what Attach puts into a kernel.
type Container struct {
	// Sandbox is the id of the sandbox: the hostname inside, and COVE_SANDBOX_ID
	// of what starts. "" is none.
	Sandbox   string
	Rootfs    Rootfs
	Env       map[string]string // over the image's
	Resources sandbox.Resources
	Volumes   []Volume // no target in another
	Mounts    []Mount  // of a driver with Capabilities.Mount
	Device    *Device  // nil = no network but the loopback; of no meaning to Reset, which keeps what is there
	// Resolvers are written to /etc/resolv.conf; none: it stays as it is in the image.
	Resolvers []netip.Addr
	// Clock is what the clock of day reads at the start; zero = the host's. See Clocked.
	Clock time.Time

	// Guest is of the kernel that a checkpoint being restored was made of, and
	// outlived it: a driver that can makes it the new kernel's. nil = none.
	Guest *guest.Client
}

// Mount is an EROFS file that a container has read-only from its start, as by
// Mounter, which takes three times as long as the rest of a create: what is missing
// of Target is made. It is there again after a Reset.
type Mount struct {
	Source string // the file
	Target string // absolute and clean
}

// Volume is a host directory in a container. Its content outlives every
// container and kernel: a write that has returned inside survives whatever ends
// the sandbox. Code inside can reach nothing of the host but what is below
// Source; device nodes and setuid bits there mean nothing.
//
// Whoever else has the directory sees a change once the call that made it has
// returned, and inside a change made elsewhere is seen by the next call.
type Volume struct {
	Source   string // a directory of the host: the volume's, and nothing else
	Target   string // absolute and clean, not / and not in /proc, /sys or /dev
	ReadOnly bool   // refused by the host too, not only inside
	Shared   bool   // others may write at the same time; a driver may cache more without
	// Added is a volume that the checkpoint being restored does not have: it is mounted once
	// what was saved runs, before the restore returns. Of no meaning but to a restore.
	Added bool
}

// VolumeChecker is a kernel that can say whether its container's volumes are
// served. The error is typed (sandbox.Unavailable) and tells which are not: the
// rest of the sandbox goes on, calls on those give I/O errors, and a Reset
// repairs it.
type VolumeChecker interface {
	VolumesErr(ctx context.Context) error
}

// Kernel is one booted kernel. Safe for concurrent use, except that Attach,
// Reset and Destroy exclude one another; callers serialise them.
type Kernel interface {
	ID() string
	Handle() Handle

	// Attach gives a kernel its user container and limits. Once only, unless it
	// was vacated (Reuser).
	Attach(ctx context.Context, c Container) error

	// Reset destroys the user container with all it wrote and ran and attaches
	// a pristine one. If it fails the kernel must be destroyed.
	Reset(ctx context.Context, c Container) error

	// Guest talks to the guest of this kernel. The same value every time.
	Guest() *guest.Client

	// Bulk runs one transfer in the guest's own container with donated host
	// descriptors: 1.8 GB/s where the guest connection gives 45 MB/s. stdin or
	// stdout may be nil. The files stay the caller's to close. The driver fills
	// in op.InitPID.
	Bulk(ctx context.Context, op guest.BulkOp, stdin, stdout *os.File) error

	// Stats of the whole kernel, counted by the host.
	Stats(ctx context.Context) (sandbox.Stats, error)

	// Done is closed when the kernel process or the user container's init is
	// gone. Exit then says why.
	Done() <-chan struct{}
	Exit() Exit

	// Destroy ends the kernel and removes all it held on the host. It is
	// idempotent and works on a kernel that has died.
	Destroy(ctx context.Context) error
}

// Exit is why a kernel stopped serving.
type Exit struct {
	Cause  sandbox.Cause // OOM, InitKilled, Infra or, after Destroy, KilledByUser
	Detail string
	At     time.Time
}
