package gvisor

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	goruntime "runtime"
	"strconv"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"gvisor.dev/gvisor/pkg/sentry/pgalloc"
	"gvisor.dev/gvisor/runsc/specutils"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// Restore lets a blank kernel go on from a checkpoint. See runtime.Restorer.
//
// Pages in a file of their own are read in the background, those that are
// touched first. The sentry has the file open until then, so that its name may
// go away; if its content does, the kernel ends.
func (b *blank) Restore(ctx context.Context, dir string, cp runtime.Checkpoint, c runtime.Container) (runtime.Kernel, error) {
	const op = "gvisor.restore"
	was, err := b.restorable(dir, cp, c)
	if err != nil {
		return nil, err
	}
	if err := b.goOn(ctx, b.spec, dir, was, c); err != nil {
		return nil, b.fail(ctx, op, err)
	}
	if err := ctx.Err(); err != nil {
		return nil, b.undo(ctx, op, err)
	}
	return b.Kernel, nil
}

// fail undoes a restore. A sentry that cannot write its layer dies of it, and says
// nothing: before what it wrote goes, the disk is asked.
func (k *Kernel) fail(ctx context.Context, op string, err error) error {
	if full := probeSpace(k.dir()); full != nil {
		err = sandbox.Errorf(sandbox.DiskFull, op, "kernel %s: %w", k.id, errors.Join(full, err)).WithHint("make room and try again")
	}
	return k.undo(ctx, op, err)
}

// restorable checks all that can be known without touching a kernel.
func (k *Kernel) restorable(dir string, cp runtime.Checkpoint, c runtime.Container) (was checkpointed, err error) {
	const op = "gvisor.restore"
	if cp.Driver != driverName || cp.Version != checkpointVersion {
		return was, sandbox.Errorf(sandbox.Precondition, op, "checkpoint %s version %d is not for this driver", cp.Driver, cp.Version).WithReason(sandbox.RestoreRefused).
			WithHint("the files of the snapshot can still be used")
	}
	if err := k.build().restores(parseBuild(cp.Build)); err != nil {
		return was, err
	}
	if err := json.Unmarshal(cp.Data, &was); err != nil {
		return was, sandbox.Errorf(sandbox.Corrupt, op, "checkpoint: %w", err)
	}
	if _, err := hex.DecodeString(was.Secret); err != nil || was.InitPID <= 0 {
		return was, sandbox.Errorf(sandbox.Corrupt, op, "checkpoint without a guest (%v)", err)
	}
	image, err := superblockID(c.Rootfs.Path)
	if err != nil {
		return was, sandbox.WithOp(op, err)
	}
	if was.Image != "" && was.Image != image {
		return was, sandbox.Errorf(sandbox.Precondition, op, "%s is not the image the checkpoint was made on", c.Rootfs.Path)
	}
	for _, m := range was.Mounts {
		if id, err := superblockID(m.Source); err != nil || id != m.ID {
			return was, sandbox.Errorf(sandbox.Precondition, op, "%s, mounted at %s in the checkpoint, is not there or another (%v)", m.Source, m.Path, err)
		}
	}
	if err := checkVolumes(c.Volumes); err != nil {
		return was, sandbox.WithOp(op, err)
	}
	if err := checkHeld(was.Held, c.Volumes); err != nil {
		return was, sandbox.WithOp(op, err)
	}
	for _, name := range cp.Files {
		if st, err := os.Lstat(filepath.Join(dir, filepath.Base(name))); err != nil || !st.Mode().IsRegular() {
			return was, sandbox.Errorf(sandbox.Precondition, op, "the checkpoint in %s has no file %q: %v", dir, name, err)
		}
	}
	return was, nil
}

// goOn is Restore without the cleaning up.
func (k *Kernel) goOn(ctx context.Context, root *specs.Spec, dir string, was checkpointed, c runtime.Container) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	vols, err := k.loadLocked(ctx, root, dir, was, c)
	if err != nil {
		return err
	}
	defer vols.close()
	if err := k.setSize(c); err != nil { // the limit is of the kernel that is there now
		return err
	}
	if err := k.rekeyLocked(ctx, c); err != nil {
		return err
	}
	if err := k.addVolumes(ctx, vols); err != nil {
		return err
	}
	if err := k.d.groups.limit(k.id, c.Resources); err != nil {
		return err
	}
	k.servesLocked(was, c)
	return nil
}

// loadLocked has the sentry load a checkpoint, and waits for its guest to answer to the
// secret it was saved with. The volumes are those of c, for addVolumes; the caller closes them.
func (k *Kernel) loadLocked(ctx context.Context, root *specs.Spec, dir string, was checkpointed, c runtime.Container) (_ *volumeMounts, err error) {
	// Memory is limited from the start; the CPU only once it runs, for a share
	// of a core would make the restore itself slow.
	wide := c.Resources
	wide.MilliCPU = int64(goruntime.NumCPU()) * 1000
	if err := k.d.groups.limit(k.id, wide); err != nil {
		return nil, err
	}
	if err := k.setSize(c); err != nil { // what goes on sees it from the start
		return nil, err
	}
	if err := k.sb.Restore(k.d.start, root, k.id, dir, false /* direct */, true /* background */, linksOf(c.Device, true)); err != nil {
		return nil, err
	}
	k.mu.plugged = c.Device != nil
	cid := containerName(1)
	vols, err := k.serveVolumes(c.Volumes, cid)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			vols.close()
		}
	}()
	if err := k.restoreContainer(c, cid, vols, was.Mounts); err != nil {
		return nil, err
	}
	k.mu.container = cid // and runs, also if its source was paused: gVisor does not save that
	own := k.saved.Secret
	k.saved.Secret = was.Secret
	err = k.connect(ctx)
	k.saved.Secret = own
	return vols, err
}

// rekeyLocked makes what was loaded the sandbox that c says.
func (k *Kernel) rekeyLocked(ctx context.Context, c runtime.Container) error {
	secret, err := hex.DecodeString(k.saved.Secret)
	if err != nil {
		return err
	}
	if err := k.guest.Rekey(ctx, secret, guest.Container{Env: runtime.Environ(c), Pids: c.Resources.Pids, Hostname: c.Sandbox}, c.Guest != nil); err != nil {
		return fmt.Errorf("giving the guest its secret: %w", err)
	}
	if c.Guest != nil {
		c.Guest.MoveTo(k.guest)
		k.guest = c.Guest
	}
	return nil
}

// servesLocked notes whose container the kernel has from now on.
func (k *Kernel) servesLocked(was checkpointed, c runtime.Container) {
	k.mu.initPID, k.mu.image = was.InitPID, c.Rootfs.Path
	k.watchInitLocked()
}

// restoreContainer names the files of the user's container, the last that the
// sentry needs; it runs when this returns.
func (k *Kernel) restoreContainer(c runtime.Container, cid string, vols *volumeMounts, mounts []mount) error {
	spec := userSpec(k.id, filepath.Join(k.dir(), "empty"), k.programs.guestfs)
	files := []string{c.Rootfs.Path, k.programs.guestfs}
	confs := []specutils.GoferMountConf{
		{Lower: specutils.Erofs, Upper: specutils.AnonOverlay, Size: strconv.FormatInt(c.Resources.Disk, 10)},
		{Lower: specutils.Erofs, Upper: specutils.NoOverlay},
	}
	saved := vols.those(false)
	spec.Mounts = append(spec.Mounts, saved.mounts...)
	confs = append(confs, saved.confs...)
	for _, m := range mounts {
		spec.Mounts = append(spec.Mounts, m.spec())
		files = append(files, m.Source)
		confs = append(confs, specutils.GoferMountConf{Lower: specutils.Erofs, Upper: specutils.NoOverlay})
	}
	var images []*os.File
	defer func() {
		for _, f := range images {
			f.Close()
		}
	}()
	var gofers []*os.File
	for i, p := range files {
		f, err := os.Open(p)
		if err != nil {
			return err
		}
		images = append(images, f)
		gofers = append(gofers, f)
		if i == 1 { // the image and the guest's come first, as at a start
			gofers = append(gofers, saved.files...)
		}
	}
	layer, err := os.OpenFile(k.layer(cid), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer layer.Close()
	pgalloc.IMAWorkAroundForMemFile(layer.Fd())
	stdin, err := os.Open(k.d.stdio())
	if err != nil {
		return err
	}
	defer stdin.Close()
	if err := k.sb.CreateSubcontainer(k.d.conf, cid, nil); err != nil {
		return err
	}
	if err := k.sb.RestoreSubcontainer(spec, k.d.conf, cid, []*os.File{stdin, stdin, stdin}, gofers, []*os.File{layer}, nil, confs); err != nil {
		return vols.explain(err)
	}
	return k.keepMounts(cid, mounts)
}
