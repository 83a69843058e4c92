package image

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"syscall"

	"github.com/cove-sandbox/cove/image/erofs"
	"github.com/cove-sandbox/cove/sandbox"
)

// ImportDir makes an image of a directory on this machine: its owners, modes,
// times, symlinks and hard links as they are. Symlinks are copied, never
// followed; other file systems mounted below are left out.
func (l *Library) ImportDir(ctx context.Context, dir string, cfg sandbox.ImageConfig, progress func(sandbox.Progress)) (sandbox.Image, error) {
	return l.build(ctx, "image.import_dir", progress, func(b *build) (sidecar, error) {
		info, err := os.Stat(dir)
		if errors.Is(err, fs.ErrNotExist) || err == nil && !info.IsDir() {
			return sidecar{}, sandbox.InvalidField("dir", "%s is not a directory on this machine", dir)
		}
		root, err := os.OpenRoot(dir)
		if err != nil {
			return sidecar{}, err
		}
		b.cleanup = append(b.cleanup, func() { root.Close() })
		b.progress.step("flatten", 0, 0)
		d := &dirReader{flattener: b.flattener, ctx: b.ctx, root: root, inodes: map[inodeKey]*erofs.Node{}}
		if err := d.read(); err != nil {
			return sidecar{}, err
		}
		return sidecar{Image: sandbox.Image{Source: "dir", Config: cfg}}, nil
	})
}

type inodeKey struct{ dev, ino uint64 }

type dirReader struct {
	*flattener
	ctx    context.Context
	root   *os.Root
	dev    uint64
	inodes map[inodeKey]*erofs.Node // of files with several links
}

func (d *dirReader) read() error {
	info, err := d.root.Stat(".")
	if err != nil {
		return err
	}
	d.dev = info.Sys().(*syscall.Stat_t).Dev
	setStat(d.flattener.root, info)
	return d.readDir(d.flattener.root, ".", 1)
}

func (d *dirReader) readDir(node *erofs.Node, name string, depth int) error {
	if err := d.ctx.Err(); err != nil {
		return err
	}
	if depth > d.limits.Depth {
		return tooLarge("directory %q is more than %d levels deep", clip(name), d.limits.Depth)
	}
	f, err := d.root.Open(name)
	if err != nil {
		return err
	}
	entries, err := f.ReadDir(-1)
	f.Close()
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := d.readEntry(node, path.Join(name, e.Name()), e.Name(), depth); err != nil {
			return err
		}
	}
	return nil
}

func (d *dirReader) readEntry(parent *erofs.Node, name, base string, depth int) error {
	info, err := d.root.Lstat(name)
	if err != nil {
		return err
	}
	st := info.Sys().(*syscall.Stat_t)
	key := inodeKey{st.Dev, st.Ino}
	if n := d.inodes[key]; n != nil {
		return d.put(parent, base, n)
	}
	n := &erofs.Node{}
	switch info.Mode().Type() {
	case 0:
		n.Mode = erofs.TypeRegular
		n.Size = info.Size()
		if d.unpacked += n.Size; d.unpacked > d.limits.Unpacked {
			return tooLarge("directory over %d bytes", d.limits.Unpacked)
		}
		n.Open = func() (io.ReadCloser, error) { return d.openSame(name, key, n.Size) }
	case fs.ModeDir:
		n = erofs.NewDir(0, 0, 0)
	case fs.ModeSymlink:
		n.Mode = erofs.TypeSymlink
		if n.Target, err = d.root.Readlink(name); err != nil {
			return err
		}
		if n.Target == "" || len(n.Target) > erofs.MaxTarget {
			return invalid("symlink %q has a target of %d bytes", clip(name), len(n.Target))
		}
	case fs.ModeNamedPipe:
		n.Mode = erofs.TypeFIFO
	default:
		d.notes.Devices++
		return nil
	}
	setStat(n, info)
	if st.Nlink > 1 && !n.IsDir() {
		d.inodes[key] = n
	}
	if err := d.put(parent, base, n); err != nil {
		return err
	}
	if !n.IsDir() {
		return nil
	}
	if st.Dev != d.dev {
		d.notes.Mounts++
		return nil
	}
	return d.readDir(n, name, depth+1)
}

// openSame opens a file that was seen before and refuses one that was
// exchanged meanwhile: between the two looks, a process that can write the
// directory could have put a symlink there.
func (d *dirReader) openSame(name string, key inodeKey, size int64) (io.ReadCloser, error) {
	f, err := d.root.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err != nil {
		f.Close()
		return nil, err
	}
	st := info.Sys().(*syscall.Stat_t)
	if (inodeKey{st.Dev, st.Ino}) != key || info.Size() != size {
		f.Close()
		return nil, sandbox.Errorf(sandbox.Conflict, "", "%s changed while it was imported", clip(name))
	}
	return f, nil
}

func setStat(n *erofs.Node, info fs.FileInfo) {
	st := info.Sys().(*syscall.Stat_t)
	n.Mode = n.Mode&erofs.TypeMask | uint16(st.Mode&0o7777)
	n.UID, n.GID = st.Uid, st.Gid
	n.Mtime, n.MtimeNsec = st.Mtim.Sec, uint32(st.Mtim.Nsec)
	if n.Mtime < 0 {
		n.Mtime, n.MtimeNsec = 0, 0
	}
}
