package agent

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"io"
	"path"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/guest/wire"
	"github.com/cove-sandbox/cove/sandbox"
)

// openRegular opens a regular file and refuses all else: a FIFO would block
// and a device may do anything. O_NONBLOCK keeps even the open from waiting.
func (ep *episode) openRegular(p string, flags int) (int, *unix.Stat_t, error) {
	var fd int
	err := ep.inside(func() (err error) {
		fd, err = ep.space.open(p, flags|unix.O_NONBLOCK, 0)
		return err
	})
	if err != nil {
		return -1, nil, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		unix.Close(fd)
		return -1, nil, err
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		return fd, &st, nil
	case unix.S_IFDIR:
		err = unix.EISDIR
	default:
		err = errNotRegular(p)
	}
	unix.Close(fd)
	return -1, nil, err
}

// read sends length bytes from offset; 0 = to the end.
func (s *session) read(ep *episode, p string, offset, length int64) error {
	if offset < 0 {
		return sandbox.InvalidField("offset", "must not be negative")
	}
	if length < 0 {
		return sandbox.InvalidField("length", "must not be negative")
	}
	fd, st, err := ep.openRegular(p, unix.O_RDONLY)
	if err != nil {
		return fileError(p, err)
	}
	defer unix.Close(fd)
	if length == 0 && st.Size-offset > wire.MaxContent || length > wire.MaxContent {
		return &sandbox.Error{Class: sandbox.TooLarge, Msg: "more than 64 MiB in one read: " + p, Hint: "read it in ranges, or download it"}
	}
	if length == 0 { // files of /proc have no size and do have content
		length = wire.MaxContent
	}
	info, err := ep.infoFD(p, fd)
	if err != nil {
		return fileError(p, err)
	}
	buf := make([]byte, min(length, max(st.Size-offset, 4096), wire.MaxData))
	for length > 0 {
		n, err := retryEINTR(func() (int, error) { return unix.Pread(fd, buf[:min(int64(len(buf)), length)], offset) })
		if err != nil {
			return fileError(p, err)
		}
		if n == 0 {
			break
		}
		if s.conn.WriteFrame(wire.Data, buf[:n]) != nil {
			return errGone
		}
		offset += int64(n)
		length -= int64(n)
	}
	return s.reply(wire.Res{File: info}, nil)
}

// source hands out content piece by piece.
type source func(func([]byte) error) error

// write makes, replaces or extends a file from src.
func (ep *episode) write(p string, opt sandbox.WriteOptions, src source) (*sandbox.FileInfo, error) {
	if opt.Atomic && opt.Append {
		return nil, sandbox.InvalidField("append", "cannot be combined with atomic")
	}
	if p == "/" {
		return nil, unix.EISDIR
	}
	if opt.Parents {
		err := ep.inside(func() error {
			own, err := ep.fileOwner(opt.User)
			if err != nil {
				return err
			}
			fd, err := openDirs(ep.space, path.Dir(p), 0o755, own)
			if err == nil {
				unix.Close(fd)
			}
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	if opt.Atomic && ep.replaceable(p) {
		return ep.writeAtomic(p, opt, src)
	}
	return ep.writeInPlace(p, opt, src)
}

// replaceable says whether a rename may put a new file at p. A symlink is written
// through and a device into, as cp does: replacing /dev/null by a file, or a link
// by what it was to lead to, is what nobody means. Whoever swaps p meanwhile gets
// what rename(2) does, in his own sandbox.
func (ep *episode) replaceable(p string) bool {
	special := false
	_ = ep.inside(func() error { // an error is the write's to tell
		dir, name, err := openParent(ep.space, p)
		if err != nil {
			return err
		}
		defer unix.Close(dir)
		var st unix.Stat_t
		if unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW) == nil {
			special = st.Mode&unix.S_IFMT == unix.S_IFLNK || st.Mode&unix.S_IFMT == unix.S_IFCHR
		}
		return nil
	})
	return !special
}

func (ep *episode) writeInPlace(p string, opt sandbox.WriteOptions, src source) (*sandbox.FileInfo, error) {
	var fd int
	created := false
	var own *owner
	err := ep.inside(func() (err error) {
		if own, err = ep.fileOwner(opt.User); err != nil {
			return err
		}
		// Exclusive first, to know whether the file is new and its owner and
		// mode ours to set. A dangling symlink exists and has no target: the
		// third attempt makes it.
		const base = unix.O_WRONLY | unix.O_NONBLOCK | unix.O_NOCTTY
		fd, err = ep.space.open(p, base|unix.O_CREAT|unix.O_EXCL, 0o600)
		if created = err == nil; created || err != unix.EEXIST {
			return err
		}
		if fd, err = ep.space.open(p, base, 0); err == unix.ENOENT {
			fd, err = ep.space.open(p, base|unix.O_CREAT, 0o600)
			created = err == nil
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
	case unix.S_IFCHR: // /dev/null and the like; its mode and owner stay
		if err := src(func(b []byte) error { return writeAll(fd, b) }); err != nil {
			return nil, err
		}
		return ep.infoFD(p, fd)
	default:
		return nil, errNotRegular(p)
	}
	var at int64
	if opt.Append {
		at = st.Size
	} else if st.Size > 0 { // of nothing it would be a change that watchers are told of
		if err := unix.Ftruncate(fd, 0); err != nil {
			return nil, err
		}
	}
	if created {
		mode := opt.Mode
		if mode == 0 {
			mode = 0o644
		}
		err = setAttrs(fd, &mode, own)
	} else if opt.Mode != 0 {
		err = setAttrs(fd, &opt.Mode, nil)
	}
	if err != nil {
		return nil, err
	}
	if opt.Append {
		// As the kernel's own O_APPEND, so that other appenders are respected.
		if fl, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0); err == nil {
			unix.FcntlInt(uintptr(fd), unix.F_SETFL, fl|unix.O_APPEND)
		}
	}
	if err := src(func(b []byte) error {
		err := pwriteAll(fd, b, at)
		at += int64(len(b))
		return err
	}); err != nil {
		return nil, err
	}
	return ep.infoFD(p, fd)
}

// writeAtomic writes beside the target and renames over it. There is no fsync:
// the file system lives and dies with the kernel, so only other processes
// inside can see a half-done write, and the rename hides it from them.
func (ep *episode) writeAtomic(p string, opt sandbox.WriteOptions, src source) (info *sandbox.FileInfo, err error) {
	var dir, fd int
	var name, temp string
	mode := opt.Mode
	err = ep.inside(func() (err error) {
		own, err := ep.fileOwner(opt.User)
		if err != nil {
			return err
		}
		if dir, name, err = openParent(ep.space, p); err != nil {
			return err
		}
		var st unix.Stat_t
		if serr := unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW); serr == nil {
			switch st.Mode & unix.S_IFMT {
			case unix.S_IFDIR:
				err = unix.EISDIR
			case unix.S_IFREG: // what replaces a file looks like it
				if mode == 0 {
					mode = st.Mode & maxMode
				}
				if opt.User == "" && own != nil {
					own = &owner{int(st.Uid), int(st.Gid)}
				}
			}
		}
		if mode == 0 {
			mode = 0o644
		}
		if err == nil {
			temp = tempName()
			fd, err = fdOpen(dir, temp, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL, 0o600)
		}
		if err != nil {
			unix.Close(dir)
			return err
		}
		if err = setAttrs(fd, &mode, own); err != nil {
			unix.Unlinkat(dir, temp, 0)
			unix.Close(fd)
			unix.Close(dir)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	defer unix.Close(dir)
	defer unix.Close(fd)
	defer func() {
		if err != nil {
			unix.Unlinkat(dir, temp, 0)
		}
	}()
	var at int64
	if err := src(func(b []byte) error {
		err := pwriteAll(fd, b, at)
		at += int64(len(b))
		return err
	}); err != nil {
		return nil, err
	}
	if err := unix.Renameat(dir, temp, dir, name); err != nil {
		return nil, err
	}
	info, ierr := ep.infoFD(p, fd)
	if ierr != nil && !errors.Is(ierr, errLeft) {
		return nil, ierr
	}
	return info, nil
}

func tempName() string {
	b := make([]byte, 8)
	rand.Read(b)
	return ".cove-" + hex.EncodeToString(b)
}

// writeAll is for what has no offsets.
func writeAll(fd int, b []byte) error {
	for len(b) > 0 {
		n, err := retryEINTR(func() (int, error) { return unix.Write(fd, b) })
		if err != nil {
			return err
		}
		if n == 0 {
			return io.ErrShortWrite
		}
		b = b[n:]
	}
	return nil
}

func pwriteAll(fd int, b []byte, at int64) error {
	for len(b) > 0 {
		n, err := retryEINTR(func() (int, error) { return unix.Pwrite(fd, b, at) })
		if err != nil {
			return err
		}
		if n == 0 {
			return io.ErrShortWrite
		}
		b = b[n:]
		at += int64(n)
	}
	return nil
}
