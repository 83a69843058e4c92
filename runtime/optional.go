package runtime

import (
	"context"
	"net"
	"net/netip"
	"os"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// The interfaces below are optional: not every driver has them. A caller finds them by
// type assertion on a [Kernel] (on a [Blank] for Restorer and Holder); [Capabilities] says
// beforehand. Each excludes the others, and Attach, Reset and Destroy, on the
// same kernel; callers serialise them.

// Pauser is a kernel that can be frozen: no process inside, the guest
// included, runs until Resume. Its memory stays where it is. Requests to the
// guest wait for Resume or their context. A paused kernel can be checkpointed,
// destroyed, and adopted, upon which it is still paused. Both calls are
// idempotent. Reset, Bulk, Diff and Mount need a kernel that runs.
type Pauser interface {
	Pause(ctx context.Context) error
	Resume(ctx context.Context) error
	Paused() bool
}

// Checkpointer is a kernel that can write its whole state (processes, memory,
// open files, terminals, the writable layer) into dir, which exists and is
// empty.
//
// The kernel goes on afterwards, and its callers notice a short wait at most:
// attached streams continue where they were. One that was paused stays paused.
// With opt.Stop it is dead on return. After an error dir is empty again and the
// kernel goes on as before, with opt.Stop too.
type Checkpointer interface {
	Checkpoint(ctx context.Context, dir string, opt CheckpointOptions) (Checkpoint, error)
}

// CheckpointOptions are how to make a checkpoint.
type CheckpointOptions struct {
	Stop bool // end the kernel with it: nothing runs between the state and the end
	// Follow says that a later one may leave out what this one has.
	Follow bool
	// Since allows to leave out what the checkpoint with these pages has, if the
	// kernel was restored from that one or has made it last, to be followed.
	// nil: nothing.
	Since *Pages
}

// Pages are those of a checkpoint: the file that PagesFile names.
type Pages struct {
	ID string `json:"id"`
	// Offset is where in the file its own begin, Size where they end. What is before
	// Offset is the file of the checkpoint that was named by Since, as it is: the
	// checkpoint's own file has only the rest, and who restores it puts that behind.
	Offset int64 `json:"offset,omitempty"`
	Size   int64 `json:"size,omitempty"`
	// Whole is the size of the last file that nothing was left out of: what is
	// beyond has parts that nobody needs any more.
	Whole int64 `json:"whole,omitempty"`
}

// PagesFile is the name of the file with the pages of a checkpoint.
const PagesFile = "pages.img"

// Checkpoint describes the files of a checkpoint. Who keeps those keeps this
// beside them, and as secret: the guest's key is in both.
type Checkpoint struct {
	Version int      `json:"version"`
	Driver  string   `json:"driver"`
	Class   string   `json:"class,omitempty"` // name of the kernel's class, the node's to set: it is restored into the same
	Build   string   `json:"build"`           // what a driver must be to restore it, in the driver's own words
	Files   []string `json:"files"`           // names in the directory
	Data    []byte   `json:"data"`            // the driver's own
	// Pages by which a later checkpoint can leave out what this one has; nil
	// where that cannot be, or was not asked for.
	Pages *Pages `json:"pages,omitempty"`
}

// Restorer is a [Blank] that can go on from a checkpoint instead of from the
// start. dir and cp are as Checkpoint left them; c names the image the
// checkpointed container had, and the environment of processes started from
// now on and the limits of the new kernel.
//
// The guest of the new kernel answers to a secret of its own and its writable
// layer is its own: any number may be restored from one checkpoint, also at
// once, also while its source runs. dir must stay until Restore returns.
//
// A checkpoint that this machine cannot restore is sandbox.ErrPrecondition, and
// the blank is as it was. After any other error the blank is gone.
type Restorer interface {
	Restore(ctx context.Context, dir string, cp Checkpoint, c Container) (Kernel, error)
}

// Holder is a [Blank] that can be restored ahead of the sandbox that it will be, for
// whoever wants that soon. Hold is Restore of a container without volumes, and errors are
// its errors; of c count the image, the size of the writable layer and whether there is a
// device.
type Holder interface {
	Hold(ctx context.Context, dir string, cp Checkpoint, c Container) (Held, error)
}

// Held is a kernel that was restored and stands: nothing of its container runs, and
// nothing but its guest has since the checkpoint. It becomes a kernel once, by Take, and
// goes on as one that is restored at that moment with c, which has the image, the disk and
// the device (which stays, and is not looked at) of Hold. After an error of Take it must be
// destroyed. Destroy ends one that is not wanted; Done is closed when it dies. It is
// not adopted: Sweep removes it.
type Held interface {
	ID() string
	Take(ctx context.Context, c Container) (Kernel, error)
	Done() <-chan struct{}
	Destroy(ctx context.Context) error
}

// Differ is a kernel that can say what its container changed against its
// image, as a tar stream. The kernel stands still for the time it takes.
//
// Names are relative to the root of the container, the root itself is "./".
// Created and changed files are in it whole, and a directory in which something
// changed with its attributes. What was removed is there as a character device
// 0:0 of its name, and a directory in one of the image's that is new or replaced
// another has the xattr trusted.overlay.opaque=y (PAX record
// SCHILY.xattr.trusted.overlay.opaque): the form overlayfs itself uses. Xattrs,
// hard links (to a name further up) and mode bits are kept; sockets are left out.
//
// Holes of files are in it as zeros. Files that are more than most bytes together
// are sandbox.ErrTooLarge, before they are read; 0 is no bound.
type Differ interface {
	Diff(ctx context.Context, w *os.File, most int64) error
}

// LayerLister is a kernel that can list the writable layer of its container, without
// content and without standing still.
type LayerLister interface {
	ListLayer(ctx context.Context, q LayerQuery) (*sandbox.UpperLayer, error)
}

// LayerQuery is how a layer is listed.
type LayerQuery struct {
	Most     int       // entries; beyond that it is truncated
	Until    time.Time // it is truncated then; zero = never
	Hash     bool      // of files
	HashMost int64     // bytes that are read for it; files beyond have none
	Only     []string  // files to hash; none = all
}

// Unpacker is a kernel that can unpack a small tar itself, which takes a third of the
// time that its guest needs. What is not plain (a symlink on the way, a directory where a file
// shall be, an entry of another kind) is an error that leaves what was unpacked
// before it: the guest, asked for the same, does it or says why not.
type Unpacker interface {
	Unpack(ctx context.Context, to Unpacking, tar []byte) (Unpacked, error)
}

// Unpacked is how far it came where it failed.
type Unpacked struct {
	There  []string // of Remove, for the guest to remove: nothing was done
	Opened bool     // all of Open was done; nothing was unpacked unless it was
}

// Unpacking is where a tar goes, and whose it will be.
type Unpacking struct {
	Dir      string // absolute and clean; made, as the owner's, if it is missing
	UID, GID uint32
	Remove   []string // what must not be there; see node.Upload, as of Open
	Open     []string
}

// Clocked is a kernel whose clock of day can be set; zero makes it the host's. Clocks
// that measure time do not change. A Reset does not change it; a checkpoint does not
// have it: who restores says it in Container.Clock.
type Clocked interface {
	SetClock(ctx context.Context, at time.Time) error
}

// CPUMeter is a kernel that can say, in microseconds of time, how much processor
// time it has used since it was booted; ok is false if it is not known now.
type CPUMeter interface {
	CPUTime() (used time.Duration, ok bool)
}

// Mounter is a kernel that can mount an EROFS file read-only at an absolute
// path of its running container. No part of path may be a symlink; what is
// missing of it is made. The mount is part of checkpoints, for the restore of
// which the file must be there under its name, and goes with the next Reset.
type Mounter interface {
	Mount(ctx context.Context, erofs, path string) error
}

// Plugger is a kernel that can be given its network device while it runs, as
// Container.Device does at the start. Once only. The device stays across Reset,
// Pause and Checkpoint and is not part of a checkpoint: who restores brings one.
type Plugger interface {
	Plug(ctx context.Context, d Device) error
}

// Device is a network device made on the host. The kernel sends and receives
// Ethernet frames on File, which stays the caller's to close.
type Device struct {
	File      *os.File // a packet socket with PACKET_VNET_HDR
	MTU       int
	GSO       uint32 // largest segment that may be sent; 0 = MTU
	MAC       net.HardwareAddr
	Addresses []netip.Prefix
	Gateways  []netip.Addr // default routes, one of a family at most
	GateMAC   net.HardwareAddr
}

// Meter is a kernel that can say what it uses without asking its guest: also one
// that stands still, on a machine that has no time for more.
type Meter interface {
	MemoryUse() (int64, error) // bytes that cannot be reclaimed, as in sandbox.Stats
}

// Reuser is a kernel that can serve one sandbox after another. Vacate ends the
// container with all it wrote and ran, and forgets it; the kernel then takes
// another by Attach, as one that was just booted. It refuses with
// sandbox.ErrPrecondition where something of the sandbox would stay (a network
// device, a process that ended over its memory limit, a pause), and after any
// error the kernel must be destroyed. Guest is another client from then on; nobody
// may be using the one before.
type Reuser interface {
	Vacate(ctx context.Context) error
}

// Rehearser is a kernel that can go through the life of a sandbox once, before it is
// attached, so that what is slow the first time is behind it. It costs more than it
// saves the first sandbox: it is for a kernel that nobody waits for. After an error
// the kernel must be destroyed.
type Rehearser interface {
	Rehearse(ctx context.Context) error
}
