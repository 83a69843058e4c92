package runtime

import (
	"context"
	"net"
	"net/netip"
	"os"
)

// What follows are powers that not every driver has. A caller finds them by
// type assertion on a [Kernel] (on a [Blank] for Restorer); [Capabilities] says
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
}

// Checkpoint describes the files of a checkpoint. Who keeps those keeps this
// beside them, and as secret: the guest's key is in both.
type Checkpoint struct {
	Version int      `json:"version"`
	Driver  string   `json:"driver"`
	Build   string   `json:"build"` // what a driver must be to restore it, in the driver's own words
	Files   []string `json:"files"` // names in the directory
	Data    []byte   `json:"data"`  // the driver's own
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
type Differ interface {
	Diff(ctx context.Context, w *os.File) error
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
