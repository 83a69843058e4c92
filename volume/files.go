package volume

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/internal/durable"
	"github.com/cove-sandbox/cove/sandbox"
)

// PutOptions say how a file or directory is made.
type PutOptions struct {
	Mode     uint32 // permission bits; 0 = 0644, of a directory 0755
	UID, GID uint32
	Parents  bool // make the directories on the way, 0755
}

// maxPath is Linux's.
const maxPath = 4096

// inside makes a path of a caller or a tar one below the volume's root. ".."
// stops there, as it does at / inside a sandbox.
func inside(p string) (string, error) {
	if len(p) >= maxPath || strings.ContainsRune(p, 0) {
		return "", sandbox.InvalidField("path", "%.80q is too long or has a NUL", p)
	}
	if p = strings.TrimPrefix(path.Clean("/"+p), "/"); p == "" {
		return ".", nil
	}
	return p, nil
}

// files runs f on the root of a volume. Symlinks in it are followed as long as
// they stay in it (os.Root sees to that, whoever changes them meanwhile); one
// that leaves is refused.
func (s *Set) files(ctx context.Context, op, id, p string, f func(root *os.Root, name string) error) error {
	name, err := inside(p)
	if err != nil {
		return sandbox.WithOp(op, err)
	}
	release, err := s.use(ctx, op, id)
	if err != nil {
		return fail(op, err)
	}
	defer release()
	root, err := os.OpenRoot(s.hostdir(id))
	if err != nil {
		return fail(op, err)
	}
	defer root.Close()
	return sandbox.WithOp(op, fileError(p, f(root, name)))
}

// fileError makes an error on a path in a volume one of ours.
func fileError(p string, err error) error {
	var e *sandbox.Error
	var errno unix.Errno
	switch {
	case err == nil || errors.As(err, &e):
		return err
	}
	// The host's path of it is nobody's business, and p is the user's.
	var pe *fs.PathError
	var le *os.LinkError
	onPath := errors.As(err, &pe)
	switch {
	case onPath:
		err = pe.Err
	case errors.As(err, &le):
		err = le.Err
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return sandbox.Errorf(sandbox.NotFound, "", "%s: %w", p, err)
	case errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.EISDIR), errors.Is(err, unix.ENOTEMPTY), errors.Is(err, unix.ELOOP), errors.Is(err, unix.EXDEV):
		return sandbox.Errorf(sandbox.Precondition, "", "%s: %w", p, err)
	case errors.Is(err, fs.ErrExist): // which a directory that is not empty also is
		return sandbox.Errorf(sandbox.AlreadyExists, "", "%s: %w", p, err)
	case sandbox.NoSpace(err):
		return sandbox.Errorf(sandbox.DiskFull, "", "%s: %w", p, err).WithHint("remove files, or resize the volume")
	case errors.Is(err, unix.ENAMETOOLONG):
		return sandbox.Errorf(sandbox.Invalid, "", "%s: %w", p, err)
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return fail("", err)
	}
	if onPath && !errors.As(err, &errno) {
		// Of os.Root, and the only one of its own: the path leaves.
		return sandbox.Errorf(sandbox.Invalid, "", "%s leads out of the volume: %w", p, err)
	}
	return sandbox.Errorf(sandbox.Unavailable, "", "%s: %w", p, err)
}

// Put writes a file, also while the volume is attached. Under its name is the
// old content or, durably when Put returns, the new, never a part; a link there
// is replaced, not followed.
func (s *Set) Put(ctx context.Context, id, p string, r io.Reader, o PutOptions) (sandbox.FileInfo, error) {
	const op = "volume.put"
	var info sandbox.FileInfo
	err := s.files(ctx, op, id, p, func(root *os.Root, name string) (err error) {
		if name == "." {
			return sandbox.InvalidField("path", "is the volume itself")
		}
		parent, base := path.Split(name)
		if o.Parents && parent != "" {
			if err := root.MkdirAll(path.Clean(parent), 0o755); err != nil {
				return err
			}
		}
		dir, err := root.OpenFile(path.Clean("./"+parent), os.O_RDONLY|unix.O_DIRECTORY, 0)
		if err != nil {
			return err
		}
		defer dir.Close()
		staging, err := os.Open(filepath.Join(s.point(id), stagingDir))
		if err != nil {
			return err
		}
		defer staging.Close()
		tmp := newID()
		f, err := os.OpenFile(filepath.Join(staging.Name(), tmp), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return err
		}
		defer func() {
			if err != nil {
				err = errors.Join(err, remove(f.Name()))
			}
		}()
		if err := s.fill(ctx, f, r, o); err != nil {
			return err
		}
		if err := s.at("put"); err != nil {
			return err
		}
		if err := unix.Renameat(int(staging.Fd()), tmp, int(dir.Fd()), base); err != nil {
			return err
		}
		if err := dir.Sync(); err != nil {
			return err
		}
		st, err := root.Lstat(name)
		if err != nil {
			return err
		}
		info = describe(root, name, st)
		return nil
	})
	return info, err
}

// fill writes a file and closes it, durably.
func (s *Set) fill(ctx context.Context, f *os.File, r io.Reader, o PutOptions) error {
	mode := o.Mode & 0o7777
	if mode == 0 {
		mode = 0o644
	}
	_, err := io.Copy(f, contextReader{ctx, r})
	if err == nil {
		err = unix.Fchown(int(f.Fd()), int(o.UID), int(o.GID))
	}
	if err == nil {
		err = unix.Fchmod(int(f.Fd()), mode)
	}
	if err == nil {
		err = s.at("put sync")
	}
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// contextReader ends with its context.
type contextReader struct {
	ctx context.Context
	r   io.Reader
}

func (c contextReader) Read(b []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	return c.r.Read(b)
}

// GetFile opens a file for reading. The volume stays mounted until it is
// closed.
func (s *Set) GetFile(ctx context.Context, id, p string) (io.ReadCloser, sandbox.FileInfo, error) {
	const op = "volume.get_file"
	var info sandbox.FileInfo
	var out *openFile
	err := s.files(ctx, op, id, p, func(root *os.Root, name string) error {
		// Without waiting: a FIFO would, for a writer that never comes.
		f, err := root.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK, 0)
		if err != nil {
			return err
		}
		st, err := f.Stat()
		if err == nil && !st.Mode().IsRegular() {
			err = sandbox.Errorf(sandbox.Precondition, "", "%s is not a file", p)
		}
		var release func()
		if err == nil {
			release, err = s.use(ctx, op, id)
		}
		if err != nil {
			return errors.Join(err, f.Close())
		}
		info = describe(root, name, st)
		out = &openFile{File: f, release: release}
		return nil
	})
	if err != nil {
		return nil, info, err
	}
	return out, info, nil
}

// openFile is a file that keeps its volume mounted.
type openFile struct {
	*os.File
	release func()
}

func (f *openFile) Close() error {
	err := f.File.Close()
	if f.release != nil && !errors.Is(err, os.ErrClosed) {
		f.release()
	}
	return err
}

// Stat describes what is at a path; a symlink, not what it points to.
func (s *Set) Stat(ctx context.Context, id, p string) (info sandbox.FileInfo, err error) {
	err = s.files(ctx, "volume.stat", id, p, func(root *os.Root, name string) error {
		st, err := root.Lstat(name)
		if err != nil {
			return err
		}
		info = describe(root, name, st)
		return nil
	})
	return info, err
}

// ListFiles describes what is in a directory, in no order, at most limit of
// it; more says whether that was not all.
func (s *Set) ListFiles(ctx context.Context, id, p string, limit int) (out []sandbox.FileInfo, more bool, err error) {
	err = s.files(ctx, "volume.list_files", id, p, func(root *os.Root, name string) error {
		d, err := root.OpenFile(name, os.O_RDONLY|unix.O_DIRECTORY, 0)
		if err != nil {
			return err
		}
		defer d.Close()
		for {
			ents, err := d.ReadDir(256)
			for _, e := range ents {
				if len(out) >= limit {
					more = true
					return nil
				}
				child := path.Join(name, e.Name())
				st, err := root.Lstat(child)
				if errors.Is(err, fs.ErrNotExist) {
					continue // removed meanwhile
				}
				if err != nil {
					return err
				}
				out = append(out, describe(root, child, st))
			}
			if errors.Is(err, io.EOF) {
				return nil
			}
			if err != nil {
				return err
			}
			if err := ctx.Err(); err != nil {
				return err
			}
		}
	})
	return out, more, err
}

// Mkdir makes a directory. One that is there is an error unless Parents is set, and
// then stays as it is.
func (s *Set) Mkdir(ctx context.Context, id, p string, o PutOptions) (info sandbox.FileInfo, err error) {
	err = s.files(ctx, "volume.mkdir", id, p, func(root *os.Root, name string) error {
		mode := o.Mode
		if mode == 0 {
			mode = 0o755
		}
		if o.Parents {
			if err := root.MkdirAll(path.Dir(name), 0o755); err != nil {
				return err
			}
		}
		switch err := root.Mkdir(name, 0o700); {
		case err == nil:
			if err := root.Lchown(name, int(o.UID), int(o.GID)); err != nil {
				return err
			}
			if err := root.Chmod(name, fileMode(mode)); err != nil {
				return err
			}
			if err := durable.SyncIn(root, path.Dir(name)); err != nil {
				return err
			}
		case !o.Parents || !errors.Is(err, fs.ErrExist):
			return err
		}
		st, err := root.Lstat(name)
		if err != nil {
			return err
		}
		if !st.IsDir() {
			return sandbox.Errorf(sandbox.AlreadyExists, "", "%s is no directory", p)
		}
		info = describe(root, name, st)
		return nil
	})
	return info, err
}

// Change gives what is at a path another owner or mode.
func (s *Set) Change(ctx context.Context, id, p string, to sandbox.VolumeFile) (info sandbox.FileInfo, err error) {
	err = s.files(ctx, "volume.change", id, p, func(root *os.Root, name string) error {
		st, err := root.Lstat(name)
		if err != nil {
			return err
		}
		now := describe(root, name, st)
		for at, set := range map[*uint32]*uint32{&now.UID: to.UID, &now.GID: to.GID, &now.Mode: to.Mode} {
			if set != nil {
				*at = *set
			}
		}
		if err := root.Lchown(name, int(now.UID), int(now.GID)); err != nil { // first: it clears setuid
			return err
		}
		if now.Type != sandbox.Symlink {
			if err := root.Chmod(name, fileMode(now.Mode)); err != nil {
				return err
			}
		}
		if st, err = root.Lstat(name); err != nil {
			return err
		}
		info = describe(root, name, st)
		return durable.SyncIn(root, path.Dir(name))
	})
	return info, err
}

// fileMode is Linux's bits as Go has them.
func fileMode(bits uint32) fs.FileMode {
	m := fs.FileMode(bits & 0o777)
	for bit, is := range map[uint32]fs.FileMode{unix.S_ISUID: fs.ModeSetuid, unix.S_ISGID: fs.ModeSetgid, unix.S_ISVTX: fs.ModeSticky} {
		if bits&bit != 0 {
			m |= is
		}
	}
	return m
}

// Remove removes a file, a link or an empty directory; with all set, a
// directory with what is in it. Its name goes at once, the rest after: what a
// context that ends leaves of it nobody sees, and the next mount removes.
func (s *Set) Remove(ctx context.Context, id, p string, all bool) error {
	return s.files(ctx, "volume.remove", id, p, func(root *os.Root, name string) error {
		if name == "." {
			return sandbox.InvalidField("path", "is the volume itself").WithHint("delete the volume")
		}
		st, err := root.Lstat(name)
		if err != nil {
			return err
		}
		if !all || !st.IsDir() {
			if err := root.Remove(name); err != nil {
				return err
			}
			return durable.SyncIn(root, path.Dir(name))
		}
		parent, err := root.OpenFile(path.Dir(name), os.O_RDONLY|unix.O_DIRECTORY, 0)
		if err != nil {
			return err
		}
		defer parent.Close()
		grave := filepath.Join(s.point(id), stagingDir, newID())
		if err := os.Mkdir(grave, 0o700); err != nil {
			return err
		}
		if err := unix.Renameat(int(parent.Fd()), path.Base(name), unix.AT_FDCWD, filepath.Join(grave, "x")); err != nil {
			return errors.Join(err, os.Remove(grave))
		}
		if err := parent.Sync(); err != nil {
			return err
		}
		if err := empty(ctx, grave); err != nil {
			return err
		}
		return os.Remove(grave)
	})
}

func describe(root *os.Root, name string, st fs.FileInfo) sandbox.FileInfo {
	info := sandbox.FileInfo{Path: path.Join("/", name), Name: path.Base(path.Join("/", name)), Type: sandbox.OtherFile, Size: st.Size(), ModTime: st.ModTime()}
	switch {
	case st.Mode().IsRegular():
		info.Type = sandbox.Regular
	case st.IsDir():
		info.Type = sandbox.Directory
	case st.Mode()&fs.ModeSymlink != 0:
		info.Type = sandbox.Symlink
		info.Target, _ = root.Readlink(name) // "" if it has gone meanwhile
	}
	if sys, ok := st.Sys().(*syscall.Stat_t); ok {
		info.Mode, info.UID, info.GID = sys.Mode&0o7777, sys.Uid, sys.Gid
	}
	return info
}
