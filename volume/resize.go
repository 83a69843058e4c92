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

	"github.com/cove-sandbox/cove/internal/durable"
	"github.com/cove-sandbox/cove/sandbox"
)

const ioctlResizeFS = 0x40086610 // EXT4_IOC_RESIZE_FS: _IOW('f', 16, __u64)

// finishResize brings the image and its file system to the size of the record.
// Each step may have been done before, and a kill amid any harms nothing. The
// caller holds v.slow.
//
// The kernel grows a mounted file system with its journal's help, if the server
// has CAP_SYS_RESOURCE. Without, resize2fs does, which has no such help and
// works on a copy.
func (s *Set) finishResize(ctx context.Context, v *volume, rec record) (err error) {
	if rec.Made == rec.Size {
		return nil
	}
	if err := s.at("truncate"); err != nil {
		return err
	}
	if err := extend(s.image(rec.ID), rec.Size); err != nil {
		return err
	}
	if !v.mounted {
		if err := s.mount(rec); err != nil {
			return err
		}
		v.mounted = true
		defer func() { err = errors.Join(err, s.unmount(v)) }()
	}
	if err := s.at("resize"); err != nil {
		return err
	}
	err = s.resizeMounted(rec)
	s.mu.Lock()
	inUse := v.users > 0 || len(v.holders) > 0
	s.mu.Unlock()
	if errors.Is(err, unix.EPERM) && !inUse {
		if err = s.unmount(v); err == nil {
			err = s.resizeCopy(ctx, v, rec)
		}
	}
	if err != nil {
		return fmt.Errorf("growing the volume: %w", err)
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

// extend makes a file as long as size, durably, if it is shorter.
func extend(path string, size int64) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	st, err := f.Stat()
	if err == nil && st.Size() < size {
		err = f.Truncate(size)
	}
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
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
		return sandbox.Errorf(sandbox.Precondition, "", "the volume is in use, and the server may not resize it then: %w", err).
			WithHint("end the sandboxes that have it and try again, or give the server CAP_SYS_RESOURCE")
	}
	return err
}

// resizeCopy grows a volume that is not mounted: a copy of it, which then takes
// its place.
func (s *Set) resizeCopy(ctx context.Context, v *volume, rec record) (err error) {
	image, tmp := s.image(rec.ID), s.temp(rec.ID+".img")
	if err := unused(ctx, image); err != nil {
		return err
	}
	src, err := os.Open(image)
	if err != nil {
		return err
	}
	defer src.Close()
	dst, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dst.Close(), remove(tmp)) }()
	if err := s.copyFrozen(ctx, v, src, dst); err != nil {
		return err
	}
	for _, args := range [][]string{
		{"e2fsck", "-f", "-p", tmp}, // resize2fs insists
		{"resize2fs", tmp, fmt.Sprintf("%dK", rec.Size/1024)},
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
	if err := s.at("resized"); err != nil {
		return err
	}
	if err := dst.Sync(); err != nil {
		return err
	}
	return durable.Rename(tmp, image)
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
