package gvisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

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

// watchGofer collects a gofer of ours when it ends, by a pidfd in Go's poller:
// cmd.Wait would hold a thread for each. That it ends is no end of the kernel:
// its volumes give I/O errors and the rest goes on.
func (k *Kernel) watchGofer(cmd *exec.Cmd, cid string) error {
	pid := cmd.Process.Pid
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
		if err = cmd.Wait(); err == nil { // it has ended: this does not block
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
	cid := k.container
	k.mu.Unlock()
	if cid == "" {
		return nil
	}
	b, err := os.ReadFile(k.volumesFile(cid))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return sandbox.Errorf(sandbox.Unavailable, op, "kernel %s: %w", k.id, err)
	}
	var targets []string
	if err := json.Unmarshal(b, &targets); err != nil {
		return sandbox.Errorf(sandbox.Corrupt, op, "kernel %s: %w", k.id, err)
	}
	if k.goferOf(cid) != 0 {
		return nil
	}
	return sandbox.Errorf(sandbox.Unavailable, op, "kernel %s: the file server of its volumes (%s) is gone: they give I/O errors inside",
		k.id, strings.Join(targets, ", ")).WithHint("what is on the volumes is safe; reset the sandbox to have them served again")
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
