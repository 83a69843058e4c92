package spawn

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/internal/mountinfo"
)

// leaveMounts takes away, of the mounts of a process that is apart, what comes and goes
// with sandboxes of this server and of others: files that hold a namespace, and volumes,
// whose loop devices it would keep busy.
func leaveMounts(args []string) error {
	var needed string
	for _, a := range args {
		if dir, ok := strings.CutPrefix(a, apartFlag); ok {
			needed = dir
		}
	}
	if needed == "" {
		return nil
	}
	ours, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		return err
	}
	theirs, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", os.Getppid()))
	if err != nil {
		return err
	}
	if ours == theirs {
		return errors.New("mounts that are the server's are not to be taken away")
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	all, err := mountinfo.Own()
	if err != nil {
		return err
	}
	for _, at := range passing(all, needed, self) {
		// One below another is gone with it.
		if err := unix.Unmount(at, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("leaving the mount at %s: %w", at, err)
		}
	}
	return nil
}

// passing lists what of all mounts holds a namespace or is on a loop device, but nothing
// that a needed path is on.
func passing(all []mountinfo.Mount, needed ...string) (out []string) {
	for _, m := range all {
		if (m.Kind == "nsfs" || strings.HasPrefix(m.Source, "/dev/loop")) && !on(m.At, needed) {
			out = append(out, m.At)
		}
	}
	return out
}

func on(mount string, paths []string) bool {
	for _, p := range paths {
		if rel, err := filepath.Rel(mount, p); err == nil && rel != ".." && !strings.HasPrefix(rel, "../") {
			return true
		}
	}
	return false
}
