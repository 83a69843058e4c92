package volume

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/internal/durable"
	"github.com/cove-sandbox/cove/internal/untar"
	"github.com/cove-sandbox/cove/sandbox"
)

// looseness is how many times its size the files of a volume may add up to in
// a snapshot. A sparse file can claim terabytes in a volume of megabytes, and
// a tar has no holes.
const looseness = 4

const (
	// maxDepth of directories in a snapshot: each is an open file meanwhile.
	maxDepth = 512
	// maxLinks is how many files with several names are remembered as such;
	// more are written once for each name.
	maxLinks = 1 << 20
)

// Snapshot writes the content of a volume as a tar, also while it is attached.
// It is the content of one instant: the image is copied first, as Clone does,
// and read from the copy, so that a slow reader holds up nobody. Files,
// directories, symlinks, hard links, owners, modes and times are in it;
// sockets, FIFOs and extended attributes are not.
func (s *Set) Snapshot(ctx context.Context, id string, w io.Writer) (err error) {
	const op = "volume.snapshot"
	v, err := s.Get(ctx, id)
	if err != nil {
		return sandbox.WithOp(op, err)
	}
	name := "snapshot" + newID()
	tmp := s.temp(name + ".img")
	defer func() { err = fail(op, errors.Join(err, remove(tmp))) }()
	if err := s.copyTo(ctx, v.ID, tmp, v.Size); err != nil {
		return err
	}
	return s.mountedTemp(tmp, name, func(data *os.Root) error {
		t := tarWriter{ctx: ctx, root: data, w: tar.NewWriter(w), left: looseness * v.Size, links: map[uint64]string{}}
		if err := t.dir("."); err != nil {
			return err
		}
		return t.w.Close()
	})
}

// mountedTemp runs f on the data of an image that is no volume (yet).
func (s *Set) mountedTemp(image, name string, f func(data *os.Root) error) (err error) {
	if err := s.at("mount temp"); err != nil {
		return err
	}
	if err := mountImage(image, s.point(name), 0); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, detach(s.point(name))) }()
	data, err := os.OpenRoot(s.hostdir(name))
	if err != nil {
		return err
	}
	defer data.Close()
	return f(data)
}

// tarWriter walks a volume into a tar.
type tarWriter struct {
	ctx   context.Context
	root  *os.Root
	w     *tar.Writer
	left  int64             // bytes of files that may still come
	links map[uint64]string // inode → the first name of a file with several
}

func (t *tarWriter) dir(name string) error {
	if strings.Count(name, "/") >= maxDepth {
		return sandbox.Errorf(sandbox.TooLarge, "", "directories are over %d deep", maxDepth).WithHint("clone the volume instead")
	}
	d, err := t.root.Open(name)
	if err != nil {
		return err
	}
	defer d.Close()
	for {
		ents, err := d.ReadDir(256) // not all at once: there may be millions
		for _, e := range ents {
			if err := t.entry(path.Join(name, e.Name())); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func (t *tarWriter) entry(name string) error {
	if err := t.ctx.Err(); err != nil {
		return err
	}
	info, err := t.root.Lstat(name)
	if err != nil {
		return err
	}
	st := info.Sys().(*syscall.Stat_t)
	target := ""
	if info.Mode()&fs.ModeSymlink != 0 {
		if target, err = t.root.Readlink(name); err != nil {
			return err
		}
	}
	if kind := info.Mode().Type(); kind&(fs.ModeSocket|fs.ModeNamedPipe|fs.ModeDevice) != 0 {
		return nil
	}
	h, err := tar.FileInfoHeader(info, target)
	if err != nil {
		return err
	}
	h.Name, h.Uid, h.Gid, h.Uname, h.Gname, h.Format = name, int(st.Uid), int(st.Gid), "", "", tar.FormatPAX
	if info.IsDir() {
		h.Name += "/"
	}
	if first, seen := t.links[st.Ino]; seen && info.Mode().IsRegular() {
		h.Typeflag, h.Linkname, h.Size = tar.TypeLink, first, 0
		return t.w.WriteHeader(h)
	}
	if info.Mode().IsRegular() && st.Nlink > 1 && len(t.links) < maxLinks {
		t.links[st.Ino] = name
	}
	if t.left -= h.Size; t.left < 0 {
		return sandbox.Errorf(sandbox.TooLarge, "", "with %q the files claim over %d times the volume's size: they are sparse, and a tar has no holes", name, looseness).
			WithHint("clone the volume instead")
	}
	if err := t.w.WriteHeader(h); err != nil {
		return err
	}
	switch {
	case info.IsDir():
		return t.dir(name)
	case info.Mode().IsRegular():
		f, err := t.root.Open(name)
		if err != nil {
			return err
		}
		defer f.Close()
		_, err = io.Copy(t.w, f)
		return err
	}
	return nil
}

// Import makes a volume from a tar, such as Snapshot writes. Nothing in the tar
// can reach out of the new volume, and it is there whole or not at all. What
// does not fit is sandbox.ErrDiskFull.
func (s *Set) Import(ctx context.Context, id string, size int64, r io.Reader) (Volume, error) {
	const op = "volume.import"
	v, err := s.make(ctx, op, id, size, func(tmp string, size int64) error {
		if err := s.newImage(ctx, tmp, size); err != nil {
			return err
		}
		point := strings.TrimSuffix(filepath.Base(tmp), ".img")
		err := s.mountedTemp(tmp, point, func(data *os.Root) error { return fileError("the content", extract(ctx, data, r)) })
		if errors.Is(err, sandbox.ErrDiskFull) {
			return TooSmall(size)
		}
		if err != nil {
			return err
		}
		return durable.Sync(tmp)
	})
	if err != nil {
		return Volume{}, fail(op, err)
	}
	return v, nil
}

// TooSmall is why something cannot be put into a new volume.
func TooSmall(size int64) *sandbox.Error {
	return sandbox.Errorf(sandbox.DiskFull, "", "a volume of %s is too small for the content", sandbox.FormatSize(size)).
		WithHint("ask for a larger one; some of a volume is its file system's own")
}

// maxEntries bounds a tar of empty names; ext4 would run out of inodes first
// in any volume below this.
const maxEntries = 1 << 28

func extract(ctx context.Context, root *os.Root, from io.Reader) error {
	err := untar.Extract(ctx, root, from, untar.Options{Bytes: math.MaxInt64, Entries: maxEntries, Modes: 0o7777, Owners: true, Chroot: true})
	var refused *untar.EntryError
	if errors.As(err, &refused) {
		return fileError(fmt.Sprintf("tar entry %q", refused.Name), refused.Err)
	}
	if err != nil {
		return err
	}
	d, err := root.Open(".")
	if err != nil {
		return err
	}
	return errors.Join(unix.Syncfs(int(d.Fd())), d.Close())
}
