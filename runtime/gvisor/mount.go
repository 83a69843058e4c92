package gvisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"gvisor.dev/gvisor/runsc/specutils"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// mount is one EROFS file mounted into a running container.
type mount struct {
	Source string `json:"source"` // the file
	ID     string `json:"id"`     // its superblockID
	Path   string `json:"path"`   // where it is
	Key    string `json:"key"`    // what the sentry knows it by
}

// spec says to a restore where the file of Key is.
func (m mount) spec() specs.Mount {
	return specs.Mount{Destination: m.Key, Type: "erofs", Source: m.Source, Options: []string{"ro"}}
}

func (k *Kernel) mountsFile(cid string) string { return filepath.Join(k.dir(), cid+".mounts") }

// mounts are those of a container. They are kept in a file for the process
// that adopts the kernel.
func (k *Kernel) mounts(cid string) []mount {
	var ms []mount
	b, err := os.ReadFile(k.mountsFile(cid))
	if err == nil {
		err = json.Unmarshal(b, &ms)
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		k.d.log.Error("mounts of a kernel", "kernel", k.id, "err", err)
	}
	return ms
}

func (k *Kernel) keepMounts(cid string, ms []mount) error {
	if len(ms) == 0 {
		if err := os.Remove(k.mountsFile(cid)); !errors.Is(err, os.ErrNotExist) {
			return err
		}
		return nil
	}
	b, err := json.Marshal(ms)
	if err != nil {
		return err
	}
	tmp := k.mountsFile(cid) + ".new"
	if err := os.WriteFile(tmp, b, 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, k.mountsFile(cid))
}

var _ runtime.Mounter = (*Kernel)(nil)

// Mount mounts an EROFS file into the container. See runtime.Mounter.
//
// gVisor's own Sandbox.Mount gives the file system no name by which a restore
// could find its file again, and panics there; only what a container is started
// with has one. So a container of a moment is started with the file mounted at
// Key, the guest moves a clone of that mount over, and it is destroyed: the
// file system lives on with the clone, named {"user", Key}, and costs nothing
// else. A restore finds Key in the mounts of the user's container.
func (k *Kernel) Mount(ctx context.Context, erofs, path string) error {
	const op = "gvisor.mount"
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.mu.container == "" || k.mu.initPID == 0 {
		return sandbox.Errorf(sandbox.Precondition, op, "kernel %s has no container", k.id)
	}
	if k.mu.paused {
		return k.errPaused(op)
	}
	id, err := superblockID(erofs)
	if err != nil {
		return sandbox.WithOp(op, err)
	}
	ms := k.mounts(k.mu.container)
	m := mount{Source: erofs, ID: id, Path: path, Key: fmt.Sprintf("%s/%d", mountKeys, len(ms)+1)}
	ferry := fmt.Sprintf("mount%d", len(ms)+1)
	<-k.mu.cleaned
	init, err := k.launchFile(ferry, m)
	if err != nil {
		_ = k.sb.DestroyContainer(ferry) // as far as it came
		return k.explain(op, err)
	}
	// Known before it is there: a checkpoint with a file too many is restored,
	// one with a file too few is not.
	if err = k.keepMounts(k.mu.container, append(ms, m)); err == nil {
		err = k.guest.Mount(ctx, init, m.Key, path)
	}
	switch sandbox.ClassOf(err) {
	case sandbox.Invalid, sandbox.NotFound, sandbox.Precondition, sandbox.Denied, sandbox.DiskFull:
		// The guest refused, so it is not there; of any other error one cannot
		// say.
		err = errors.Join(err, k.keepMounts(k.mu.container, ms))
	}
	if derr := k.sb.DestroyContainer(ferry); err == nil {
		err = derr
	}
	if err != nil {
		return k.explain(op, err)
	}
	return nil
}

// mountKeys is where ferries have what they carry.
const mountKeys = "/carried"

// launchFile starts a ferry with m.
func (k *Kernel) launchFile(cid string, m mount) (initPID int, err error) {
	f, err := os.Open(m.Source)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	return k.launchFerry(cid, volumeMounts{mounts: []specs.Mount{m.spec()}, files: []*os.File{f},
		confs: []specutils.GoferMountConf{{Lower: specutils.Erofs, Upper: specutils.NoOverlay}}})
}

// launchFerry starts a container with the guest's own file system and what it carries.
func (k *Kernel) launchFerry(cid string, m volumeMounts) (initPID int, err error) {
	spec := userSpec(k.id, filepath.Join(k.dir(), "empty"), k.programs.guestfs)
	spec.Process.Args = []string{strings.TrimPrefix(initArgs()[0], guestMount), "init"}
	spec.Mounts = m.mounts
	var files []*os.File
	defer func() {
		for _, f := range files {
			f.Close()
		}
	}()
	for _, p := range []string{k.d.stdio(), k.programs.guestfs} {
		f, err := os.Open(p)
		if err != nil {
			return 0, err
		}
		files = append(files, f)
	}
	if err := k.sb.CreateSubcontainer(k.d.conf, cid, nil); err != nil {
		return 0, err
	}
	err = k.sb.StartSubcontainer(spec, k.d.conf, cid, []*os.File{files[0], files[0], files[0]}, slices.Concat(files[1:], m.files), nil, nil,
		slices.Concat([]specutils.GoferMountConf{{Lower: specutils.Erofs, Upper: specutils.MemoryOverlay}}, m.confs)) // over it, for the mount points
	if err != nil {
		return 0, err
	}
	procs, err := k.sb.Processes(cid)
	if err != nil {
		return 0, err
	}
	if len(procs) != 1 {
		return 0, fmt.Errorf("the new container has %d processes", len(procs))
	}
	return int(procs[0].PID), nil
}

// addVolumes mounts the volumes that a checkpoint does not have into the container that was
// restored from it. The ferry has each at the path the container will: that is the name by
// which a later restore finds it, as if the container had been started with it.
func (k *Kernel) addVolumes(ctx context.Context, vols *volumeMounts) error {
	m := vols.those(true)
	if len(m.mounts) == 0 {
		return nil
	}
	const ferry = "volumes"
	init, err := k.launchFerry(ferry, m)
	for _, v := range m.mounts {
		if err == nil {
			err = k.guest.Mount(ctx, init, v.Destination, v.Destination)
			var refused *sandbox.Error
			if errors.As(err, &refused) && refused.Class == sandbox.Precondition {
				// A failed precondition is one that left the kernel as it was.
				err = sandbox.InvalidField("volumes.target", "%s: %s", v.Destination, refused.Msg).
					WithHint("choose a path that is a directory in the snapshot, or that is not there")
			}
		}
	}
	if derr := k.sb.DestroyContainer(ferry); err == nil {
		err = derr
	}
	return vols.explain(err)
}
