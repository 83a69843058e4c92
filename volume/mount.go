package volume

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/sandbox"
)

// use has a volume mounted until release is called.
func (s *Set) use(ctx context.Context, op, id string) (release func(), err error) {
	s.mu.Lock()
	v, err := s.findLocked(op, id)
	if err != nil {
		s.mu.Unlock()
		return nil, err
	}
	s.useLocked(v)
	s.mu.Unlock()
	release = func() { s.release(v) }
	if err := s.ensureMounted(ctx, v); err != nil {
		release()
		return nil, err
	}
	return release, nil
}

func (s *Set) useLocked(v *volume) {
	v.users++
	if v.idle != nil {
		v.idle.Stop()
		v.idle = nil
	}
}

// release ends a use, and the mount with it if it was the last.
func (s *Set) release(v *volume) {
	s.mu.Lock()
	v.users--
	s.idleLocked(v)
	now := s.opts.Linger < 0 && v.users == 0 && len(v.holders) == 0 && !s.mu.closed
	s.mu.Unlock()
	if now {
		s.unmountLogged(v)
	}
}

// idleLocked sees to the unmount of a volume nobody uses any more.
func (s *Set) idleLocked(v *volume) {
	if v.users > 0 || len(v.holders) > 0 || s.mu.closed || v.dead || s.opts.Linger < 0 {
		return
	}
	if v.idle != nil {
		v.idle.Stop()
	}
	v.idle = time.AfterFunc(s.opts.Linger, func() { s.unmountLogged(v) })
}

func (s *Set) unmountLogged(v *volume) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := s.unmountIdle(ctx, v); err != nil {
		s.log.Error("unmounting an idle volume", "volume", v.id, "err", err)
	}
}

// unmountIdle unmounts a volume if nobody uses it.
func (s *Set) unmountIdle(ctx context.Context, v *volume) error {
	free, err := v.take(ctx)
	if err != nil {
		return err
	}
	defer free()
	s.mu.Lock()
	busy := v.users > 0 || len(v.holders) > 0
	s.mu.Unlock()
	if busy { // who comes after this waits for slow, and mounts again
		return nil
	}
	return s.unmount(v)
}

func (s *Set) ensureMounted(ctx context.Context, v *volume) error {
	free, err := v.take(ctx)
	if err != nil {
		return err
	}
	defer free()
	s.mu.Lock()
	rec, dead := v.rec, v.dead
	s.mu.Unlock()
	if dead {
		return sandbox.Errorf(sandbox.NotFound, "", "no volume %q", v.id)
	}
	if v.mounted {
		return nil
	}
	if rec.Made < rec.Size { // a crash amid a resize
		if err := s.finishResize(ctx, v, rec); err != nil {
			s.log.Error("a volume stays smaller than it should be", "volume", v.id, "size", rec.Made, "wanted", rec.Size, "err", err)
		}
	}
	if err := s.mount(rec); err != nil {
		return err
	}
	v.mounted = true
	return nil
}

// mount mounts a volume and clears away what puts that were cut off left.
func (s *Set) mount(rec record) error {
	if err := s.at("mount"); err != nil {
		return err
	}
	if err := mountImage(s.image(rec.ID), s.point(rec.ID), 0); err != nil {
		return err
	}
	if err := s.clearStaging(rec.ID); err != nil {
		return errors.Join(err, detach(s.point(rec.ID)))
	}
	return nil
}

func (s *Set) clearStaging(id string) error {
	return empty(context.Background(), filepath.Join(s.point(id), stagingDir)) // nobody else is there
}

// mountImage mounts the file system of an image. noatime: reading a volume
// must not write it. discard: what is deleted inside is given back to the
// host's disk. Programs may be run from a volume, so not noexec.
func mountImage(image, point string, flags uintptr) (err error) {
	if err := os.Mkdir(point, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(point)
		}
	}()
	dev, err := openLoop(image)
	if err != nil {
		return err
	}
	defer dev.Close() // the mount holds it now, or nobody
	if err := unix.Mount(dev.Name(), point, "ext4", flags|unix.MS_NODEV|unix.MS_NOSUID|unix.MS_NOATIME, "discard,errors=remount-ro"); err != nil {
		return fmt.Errorf("mounting %s: %w", image, err)
	}
	return nil
}

// unmount unmounts a volume if it is mounted. The caller holds v.slow.
func (s *Set) unmount(v *volume) error {
	if !v.mounted {
		return nil
	}
	if err := detach(s.point(v.id)); err != nil {
		return err
	}
	v.mounted = false
	return nil
}

// detach syncs and unmounts. The sync is not left to the unmount: with a copy
// of the mount in another namespace that is not the last.
func detach(point string) error {
	if err := drop(point); err != nil {
		return err
	}
	return os.Remove(point)
}

// drop is detach that leaves the mount point.
//
// A mount is busy while any process has a file of it open. That may be a child
// of ours between fork and exec, with copies of all our files: a few
// milliseconds, waited for. What has it longer (somebody's shell) can finish
// on a mount without a name: openLoop finds its file system again.
func drop(point string) error {
	if err := syncFS(point); err != nil {
		return fmt.Errorf("syncing %s: %w", point, err)
	}
	for wait := time.Millisecond; ; wait *= 2 {
		flags := unix.UMOUNT_NOFOLLOW
		if wait > 256*time.Millisecond {
			flags |= unix.MNT_DETACH
		}
		err := unix.Unmount(point, flags)
		if err == nil {
			return nil
		}
		if !errors.Is(err, unix.EBUSY) || flags&unix.MNT_DETACH != 0 {
			return fmt.Errorf("unmounting %s: %w", point, err)
		}
		time.Sleep(wait)
	}
}

func syncFS(point string) error {
	d, err := os.Open(point)
	if err != nil {
		return err
	}
	defer d.Close()
	return unix.Syncfs(int(d.Fd()))
}

const (
	ioctlFreeze = 0xc0045877 // FIFREEZE
	ioctlThaw   = 0xc0045878 // FITHAW
)

// freeze stops all writing to a mounted file system, with everything on disk.
func freeze(point string) error { return onFS(point, ioctlFreeze, 0) }

// thaw undoes freeze. On one that is not frozen it is an error, EINVAL.
func thaw(point string) error { return onFS(point, ioctlThaw, 0) }

func onFS(point string, request, arg uintptr) error {
	d, err := os.Open(point)
	if err != nil {
		return err
	}
	defer d.Close()
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, d.Fd(), request, arg); errno != 0 {
		return errno
	}
	return nil
}
