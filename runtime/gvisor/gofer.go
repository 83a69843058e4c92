package gvisor

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

var _ runtime.VolumeChecker = (*Kernel)(nil)

// volumesFile says which volumes a container has, for VolumesErr of a process
// that did not start it. It goes with the kernel's directory.
func (k *Kernel) volumesFile(cid string) string { return filepath.Join(k.dir(), cid+".volumes") }

func (k *Kernel) recordVolumes(cid string, vols []runtime.Volume) error {
	var targets []string
	for _, v := range vols {
		targets = append(targets, v.Target)
	}
	b, err := json.Marshal(targets)
	if err != nil {
		return err
	}
	return os.WriteFile(k.volumesFile(cid), b, 0o600)
}

// volumesOf lists where a container has its volumes, in the gofer's order.
func (k *Kernel) volumesOf(cid string) (targets []string, err error) {
	b, err := os.ReadFile(k.volumesFile(cid))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, sandbox.Errorf(sandbox.Unavailable, "", "kernel %s: %w", k.id, err)
	}
	if err := json.Unmarshal(b, &targets); err != nil {
		return nil, sandbox.Errorf(sandbox.Corrupt, "", "kernel %s: %w", k.id, err)
	}
	return targets, nil
}

// watchGofer collects a gofer of ours when it ends, by a pidfd in Go's poller:
// wait would hold a thread for each. That it ends is no end of the kernel:
// its volumes give I/O errors and the rest goes on.
func (k *Kernel) watchGofer(pid int, wait func() error, cid string) error {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		return fmt.Errorf("watching the volumes' file server: %w", err)
	}
	f := os.NewFile(uintptr(fd), "gofer pidfd")
	rc, err := f.SyscallConn()
	if err != nil {
		return errors.Join(err, f.Close())
	}
	k.watchers.Go(func() {
		defer f.Close()
		err := rc.Read(func(fd uintptr) bool {
			p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
			n, err := unix.Poll(p, 0)
			return err == nil && n == 1
		})
		if err != nil {
			k.d.log.Warn("watching the volumes' file server", "kernel", k.id, "err", err)
		}
		if err = wait(); err == nil { // it has ended: this does not block
			_ = os.Remove(k.volumesFile(cid)) // its container was left
			return
		}
		select {
		case <-k.done: // it was killed with the kernel
		default:
			k.d.log.Error("the file server of the volumes ended", "kernel", k.id, "container", cid, "err", err)
		}
	})
	return nil
}

// VolumesErr says whether the volumes are served. See runtime.VolumeChecker.
func (k *Kernel) VolumesErr(context.Context) error {
	const op = "gvisor.volumes"
	k.mu.Lock()
	cid := k.mu.container
	k.mu.Unlock()
	if cid == "" {
		return nil
	}
	targets, err := k.volumesOf(cid)
	if err != nil {
		return sandbox.WithOp(op, err)
	}
	if len(targets) == 0 || k.goferOf(cid) != 0 {
		return nil
	}
	return sandbox.Errorf(sandbox.Unavailable, op, "kernel %s: the file server of its volumes (%s) is gone: they give I/O errors inside",
		k.id, strings.Join(targets, ", ")).WithHint("what is on the volumes is safe; reset the sandbox to have them served again")
}

// heldFile is a file or directory of a volume that something inside has open, or
// is in.
type heldFile struct {
	Target string `json:"target"` // of the volume
	Path   string `json:"path"`   // in it
}

// held lists what a container holds of its volumes: the gofer has a descriptor
// for each, and runs on while the kernel stands still. What was removed by its
// last name is not listed: gVisor saves such a file whole. Nor is a name that is
// no text, or more than maxHeld: then the restore itself fails, and says less.
func (k *Kernel) held(cid string, targets []string) (files []heldFile, err error) {
	if len(targets) == 0 {
		return nil, nil
	}
	dir := fmt.Sprintf("/proc/%d/fd", k.goferOf(cid))
	ents, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("the file server of its volumes: %w", err)
	}
	for _, e := range ents {
		name, err := os.Readlink(filepath.Join(dir, e.Name()))
		if err != nil || strings.HasSuffix(name, " (deleted)") {
			continue // closed since, or removed
		}
		for i, target := range targets {
			if rel, ok := strings.CutPrefix(name, goferVolume(i)+"/"); ok && utf8.ValidString(rel) && len(files) < maxHeld {
				files = append(files, heldFile{target, rel})
			}
		}
	}
	slices.SortFunc(files, func(a, b heldFile) int {
		return cmp.Or(strings.Compare(a.Target, b.Target), strings.Compare(a.Path, b.Path))
	})
	return slices.Compact(files), nil
}

// maxHeld files are noted: code inside opens as many as it likes, and a name may
// have 4 KiB.
const maxHeld = 500

// goferVolume is where the gofer has its i-th volume.
func goferVolume(i int) string { return "/root" + goferMount(i) }

// goferMount is that in its own spec; it makes /root its root.
func goferMount(i int) string { return "/v" + strconv.Itoa(i) }

// checkHeld refuses a restore that would fail for a file that is gone: every
// name that was open is looked up again.
func checkHeld(files []heldFile, vols []runtime.Volume) error {
	for _, v := range vols {
		root, err := os.OpenRoot(v.Source)
		if err != nil {
			return sandbox.Errorf(sandbox.Precondition, "", "the volume for %s: %w", v.Target, err)
		}
		for _, f := range files {
			if f.Target != v.Target {
				continue
			}
			if _, err := root.Lstat(f.Path); errors.Is(err, os.ErrNotExist) {
				root.Close()
				return sandbox.Errorf(sandbox.Precondition, "", "%s, which it has open or is in, was removed from the volume", path.Join(v.Target, f.Path)).
					WithHint("put a file of that name back (cove volume put), and it goes on; or start from its files: cove create --snapshot")
			}
		}
		root.Close()
	}
	return nil
}

// goferOf finds the gofer of a container in the kernel's cgroup, by its name
// and its last argument; 0 if there is none.
func (k *Kernel) goferOf(cid string) int {
	for _, pid := range k.d.groups.procs(k.id) {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if err == nil && strings.HasPrefix(string(b), goferName+"\x00") && strings.HasSuffix(string(b), "\x00"+cid+"\x00") {
			return pid
		}
	}
	return 0
}
