package volume

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// empty removes all that is in a directory of ours, whatever a sandbox made of
// it: a tree a hundred thousand levels deep (4 KiB each) would cost
// os.RemoveAll as many open files, which are the node's. So directories are not
// descended into but hoisted, up to where dir is, and a level is all there ever
// is to look at.
func empty(ctx context.Context, dir string) error {
	top, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer top.Close()
	for {
		n, err := eachName(ctx, top, func(name string) error { return flatten(ctx, top, name) })
		if err != nil || n == 0 {
			return err
		}
	}
}

// flatten removes a name in top; of a directory, its own content goes or moves
// up.
func flatten(ctx context.Context, top *os.File, name string) error {
	err := unix.Unlinkat(int(top.Fd()), name, 0)
	if !errors.Is(err, unix.EISDIR) {
		return err
	}
	fd, err := unix.Openat(int(top.Fd()), name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	d := os.NewFile(uintptr(fd), name)
	defer d.Close()
	for {
		n, err := eachName(ctx, d, func(child string) error {
			err := unix.Unlinkat(fd, child, 0)
			if errors.Is(err, unix.EISDIR) {
				err = unix.Renameat(fd, child, int(top.Fd()), newID())
			}
			return err
		})
		if err != nil {
			return err
		}
		if n == 0 {
			// Who still has it as working directory may have put something
			// there: the caller comes by again, until its context ends.
			if err := unix.Unlinkat(int(top.Fd()), name, unix.AT_REMOVEDIR); !errors.Is(err, unix.ENOTEMPTY) {
				return err
			}
			return nil
		}
	}
}

// eachName calls f for names in a directory, some of those there are, and says
// how many. f may remove them.
func eachName(ctx context.Context, d *os.File, f func(string) error) (int, error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	if _, err := d.Seek(0, io.SeekStart); err != nil {
		return 0, err
	}
	names, err := d.Readdirnames(1024)
	if err != nil && !errors.Is(err, io.EOF) {
		return 0, err
	}
	for _, name := range names {
		if err := f(name); err != nil && !errors.Is(err, unix.ENOENT) {
			return 0, fmt.Errorf("removing %q: %w", name, err)
		}
	}
	return len(names), nil
}
