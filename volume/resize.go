package volume

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/sandbox"
)

const ioctlResizeFS = 0x40086610 // EXT4_IOC_RESIZE_FS: _IOW('f', 16, __u64)

// finishResize brings the image and its file system to the size of the record.
// Each step may have been done before. The caller holds v.slow.
func (s *Set) finishResize(ctx context.Context, v *volume, rec record) error {
	if rec.Made == rec.Size {
		return nil
	}
	s.mu.Lock()
	inUse := v.users > 0 || len(v.holders) > 0
	s.mu.Unlock()
	if v.mounted && !inUse {
		if err := s.unmount(v); err != nil {
			return err
		}
	}
	if err := s.at("truncate"); err != nil {
		return err
	}
	f, err := os.OpenFile(s.image(rec.ID), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	st, err := f.Stat()
	if err == nil && st.Size() < rec.Size {
		err = f.Truncate(rec.Size)
	}
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	if err := s.at("resize"); err != nil {
		return err
	}
	if v.mounted {
		err = s.resizeMounted(rec)
	} else {
		err = s.resizeImage(ctx, rec)
	}
	if err != nil {
		return fmt.Errorf("growing volume %s: %w", rec.Name, err)
	}
	rec.Made = rec.Size
	if err := s.write(rec); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	v.rec.Made = rec.Made
	return nil
}

func (s *Set) resizeMounted(rec record) error {
	dev, err := openLoop(s.image(rec.ID))
	if err != nil {
		return err
	}
	defer dev.Close()
	if err := unix.IoctlSetInt(int(dev.Fd()), unix.LOOP_SET_CAPACITY, 0); err != nil {
		return err
	}
	blocks := uint64(rec.Size) / 4096
	err = onFS(s.point(rec.ID), ioctlResizeFS, uintptr(unsafe.Pointer(&blocks)))
	if errors.Is(err, unix.EPERM) {
		return sandbox.Errorf(sandbox.Precondition, "", "volume %s is in use, and the server may not resize it then: %w", rec.Name, err).
			WithHint("detach it and try again, or give the server CAP_SYS_RESOURCE")
	}
	return err
}

// resizeImage grows the file system of an image that is not mounted anywhere.
func (s *Set) resizeImage(ctx context.Context, rec record) error {
	image := s.image(rec.ID)
	if err := unused(ctx, image); err != nil {
		return err
	}
	for _, args := range [][]string{
		{"e2fsck", "-f", "-p", image}, // resize2fs insists
		{"resize2fs", image, fmt.Sprintf("%dK", rec.Size/1024)},
	} {
		bin, err := e2fs(args[0])
		if err != nil {
			return err
		}
		cmd := exec.CommandContext(ctx, bin, args[1:]...)
		cmd.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
		out, err := runLocked(cmd)
		var exit *exec.ExitError
		if errors.As(err, &exit) && args[0] == "e2fsck" && exit.ExitCode() == 1 {
			err = nil // it had something to put right, and has
		}
		if err != nil {
			return fmt.Errorf("%s: %w: %s", args[0], err, strings.TrimSpace(string(out)))
		}
	}
	f, err := os.Open(image)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// unused waits until an image that was unmounted has no loop device left: its
// file system may live on for a moment in a process being started or ended.
func unused(ctx context.Context, image string) error {
	for wait := time.Millisecond; ; wait *= 2 {
		var st unix.Stat_t
		if err := unix.Stat(image, &st); err != nil {
			return err
		}
		dev, err := findLoop(image, &st)
		if err != nil {
			return err
		}
		if dev == nil {
			return nil
		}
		dev.Close()
		if wait > time.Second {
			return sandbox.Errorf(sandbox.Conflict, "", "%s is still mounted somewhere", image).WithHint("try again when the sandboxes that had it are gone")
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(wait):
		}
	}
}
