package agent

import (
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/guest/wire"
	"github.com/cove-sandbox/cove/sandbox"
)

// mount moves a mount of another container to a directory of this one, made if
// it is missing.
func (ep *episode) mount(r wire.Req) error {
	c, ok := ep.space.(*containerSpace)
	if !ok {
		return sandbox.Errorf(sandbox.Unsupported, "guest.mount", "mounts need a container")
	}
	p, err := cleanPath("path", r.Path)
	if err != nil {
		return err
	}
	if p == "/" {
		return sandbox.InvalidField("path", "must not be /")
	}
	var target int
	if err := ep.inside(func() (err error) { target, err = openMountpoint(p); return err }); err != nil {
		return fileError(p, err)
	}
	defer unix.Close(target)
	if err := c.bring(r.InitPID, r.To, target); err != nil {
		return sandbox.Errorf(sandbox.Unavailable, "guest.mount", "%w", err)
	}
	return nil
}

// openMountpoint opens a directory by a clean absolute path, none of whose
// parts may be a symlink, and makes the missing ones: what is mounted there
// must be found under the name that was asked for, whatever code inside does.
// It runs on a thread inside.
func openMountpoint(p string) (int, error) {
	dir, err := unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	for name := range strings.SplitSeq(strings.TrimPrefix(p, "/"), "/") {
		next, err := fdOpen(dir, name, unix.O_PATH|unix.O_DIRECTORY, 0)
		if err == unix.ENOENT {
			if err = unix.Mkdirat(dir, name, 0o755); err == nil || err == unix.EEXIST {
				next, err = fdOpen(dir, name, unix.O_PATH|unix.O_DIRECTORY, 0)
			}
		}
		unix.Close(dir)
		if err != nil {
			return -1, err
		}
		dir = next
	}
	return dir, nil
}

// bring clones the mount at path of the container of an init and puts the
// clone on a directory of this one. Two threads do it, for each must be in the
// mount namespace it acts on.
func (c *containerSpace) bring(initPID int, path string, target int) error {
	in := c.now()
	if in == nil {
		return errLeft
	}
	pidfd, err := unix.PidfdOpen(initPID, 0)
	if err != nil {
		return fmt.Errorf("pidfd_open of init %d: %w", initPID, err)
	}
	defer unix.Close(pidfd)
	tree := -1
	t, err := newThread(func() error {
		if err := ownRoot(); err != nil {
			return err
		}
		if err := enterThread(pidfd, 0); err != nil {
			return err
		}
		var err error
		if tree, err = unix.OpenTree(unix.AT_FDCWD, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC); err != nil {
			return fmt.Errorf("open_tree: %w", err)
		}
		return nil
	})
	if err != nil {
		return err
	}
	t.end()
	defer unix.Close(tree)
	derr := in.file.do(func() {
		err = unix.MoveMount(tree, "", target, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH)
	})
	if derr != nil {
		return derr
	}
	if err != nil {
		return fmt.Errorf("move_mount: %w", err)
	}
	return nil
}
