package image

import (
	"context"
	"io"
	"net/netip"
	"path"
	"strconv"
	"strings"
	"time"

	"github.com/cove-sandbox/cove/image/erofs"
	"github.com/cove-sandbox/cove/sandbox"
)

// CopyLayer writes the tar of the layer that a COPY, ADD or WORKDIR makes, and
// says what it holds but for times: the same files in another checkout are the
// same layer to a cache. Without any change the digest is "".
//
// Both sides are trees in memory, so that a symlink of the context or the image
// leads nowhere but there. What goes where is as BuildKit has it.
//
// What is fetched from elsewhere comes from where allow lets it.
func (l *Library) CopyLayer(ctx context.Context, c sandbox.Copying, open func(sandbox.Content) (io.ReadCloser, error),
	allow func(name string, to netip.AddrPort) bool, w io.Writer) (digest string, err error) {
	err = l.work(ctx, "image.copy", nil, func(b *build) error {
		if _, err := b.stack(b.ctx, l, c.Onto, open); err != nil {
			return err
		}
		b.touched = map[entry]struct{}{}
		src := newFlattener(l.limits, b.ws)
		defer src.close()
		cp := &copier{build: b, src: src, c: c, kept: c.From != nil, at: map[*erofs.Node]string{}, now: l.opts.Now()}
		if err := cp.prepare(open, allow); err != nil {
			return err
		}
		if err := cp.run(); err != nil {
			return err
		}
		digest, err = writeChanges(b.ctx, w, b.root, cp.changed)
		if len(cp.changed) == 0 {
			digest = "" // all of it was there
		}
		return err
	})
	return digest, err
}

// copier is one COPY under way.
type copier struct {
	*build
	src  *flattener
	c    sandbox.Copying
	kept bool // owners are as in the source

	uid, gid uint32
	owned    bool // uid and gid were asked for
	mode     *uint16
	match    excluder
	now      time.Time

	at      map[*erofs.Node]string // real paths of directories of the target that were walked
	changed []string               // real paths that the layer has
}

// prepare reads the source and what the instruction says of owner and mode.
func (cp *copier) prepare(open Opener, allow func(string, netip.AddrPort) bool) (err error) {
	c := cp.c
	switch {
	case c.From != nil:
		_, err = cp.src.stack(cp.ctx, cp.lib, *c.From, open)
	case c.Files != nil:
		err = cp.readFiles(open)
	case c.Fetch != nil:
		err = cp.fetch(allow)
	default:
		for _, f := range c.Inline {
			cp.src.root.Put(f.Name, textFile(f.Data))
			cp.c.Sources = append(cp.c.Sources, f.Name)
		}
	}
	if err != nil {
		return err
	}
	if c.Owner != "" {
		cp.owned = true
		if cp.uid, cp.gid, err = cp.owner(c.Owner); err != nil {
			return err
		}
	}
	if c.Mode != "" {
		m, err := strconv.ParseUint(c.Mode, 8, 16)
		if err != nil || m > 0o7777 {
			return invalid("mode %q is not octal and at most 7777", clip(c.Mode))
		}
		mode := uint16(m)
		cp.mode = &mode
	}
	cp.match, err = newExcluder(c.Exclude)
	return err
}

// readFiles is the caller's own files: their owner is root, whoever it was there.
func (cp *copier) readFiles(open Opener) error {
	r, err := open(*cp.c.Files)
	if err != nil {
		return err
	}
	defer r.Close()
	if err := cp.src.apply(cp.ctx, r, formPlain); err != nil {
		return err
	}
	if !cp.c.Ignore {
		return nil
	}
	return cp.src.ignore(cp.c.IgnoreFile)
}

func (cp *copier) run() error {
	dest := path.Clean("/" + cp.c.Dest)
	if cp.c.Sources == nil { // WORKDIR
		_, err := cp.dir(dest)
		return err
	}
	toDir := strings.HasSuffix(cp.c.Dest, "/") || strings.HasSuffix(cp.c.Dest, "/.")
	type match struct {
		name string
		n    *erofs.Node
	}
	var matches []match
	for _, pattern := range cp.c.Sources {
		names, err := cp.src.glob(pattern)
		if err != nil {
			return err
		}
		for _, name := range names {
			n := cp.src.source(name)
			if n == nil || n.Mode == 0 {
				return notThere(pattern)
			}
			matches = append(matches, match{name, n})
		}
	}
	if len(matches) > 1 && !toDir {
		if n := cp.lookup(dest); n == nil || !n.IsDir() {
			for _, m := range matches {
				if !m.n.IsDir() {
					return sandbox.Errorf(sandbox.Invalid, "", "several files are copied to %q, which is no directory", clip(cp.c.Dest)).
						WithHint("end the destination with a slash")
				}
			}
		}
	}
	for _, m := range matches {
		if err := cp.one(m.name, m.n, dest, toDir); err != nil {
			return err
		}
	}
	return nil
}

func notThere(pattern string) error {
	return sandbox.Errorf(sandbox.NotFound, "", "%q is not there", clip(pattern)).
		WithHint("sources are paths within the build context or stage; .dockerignore may leave them out")
}

// one copies a source: a file to or into the destination, of a directory what is
// in it.
func (cp *copier) one(name string, n *erofs.Node, dest string, toDir bool) error {
	if cp.c.Parents {
		dest = path.Join(dest, path.Dir(name))
		toDir = true
		if n.IsDir() {
			dest = path.Join(dest, path.Base(name))
		}
	}
	if n.IsDir() {
		dir, err := cp.dir(dest)
		if err != nil {
			return err
		}
		return cp.tree(name, n, dir)
	}
	if cp.c.Unpack {
		if done, err := cp.unpack(name, n, dest); done || err != nil {
			return err
		}
	}
	base := path.Base(dest)
	if old := cp.lookup(dest); toDir || old != nil && old.IsDir() {
		base = path.Base(name)
	} else {
		dest = path.Dir(dest)
	}
	dir, err := cp.dir(dest)
	if err != nil {
		return err
	}
	return cp.file(n, dir, base)
}

// tree copies what is in a directory.
func (cp *copier) tree(name string, from, to *erofs.Node) error {
	if err := cp.ctx.Err(); err != nil {
		return err
	}
	for _, base := range from.Names() {
		child, at := from.Child(base), path.Join(name, base)
		out, err := cp.match.excludes(at, child.IsDir())
		if err != nil {
			return err
		}
		if out {
			continue
		}
		if !child.IsDir() {
			if err := cp.file(child, to, base); err != nil {
				return err
			}
			continue
		}
		dir := to.Child(base)
		switch {
		case dir != nil && dir.IsSymlink(): // as a copy into a mounted root follows it
			if dir, err = cp.dir(path.Join(cp.at[to], base)); err != nil {
				return err
			}
		case dir != nil && !dir.IsDir():
			return invalid("%q is a file, and a directory is to be copied there", clip(path.Join(cp.at[to], base)))
		case dir == nil:
			dir = erofs.NewDir(0, 0, 0)
			cp.meta(dir, child)
			if err := cp.place(to, base, dir); err != nil {
				return err
			}
		}
		if err := cp.tree(at, child, dir); err != nil {
			return err
		}
	}
	return nil
}

// file copies anything but a directory.
func (cp *copier) file(n, to *erofs.Node, base string) error {
	if old := to.Child(base); old != nil && old.IsDir() {
		return invalid("%q is a directory, and a file is to be copied there", clip(path.Join(cp.at[to], base)))
	}
	made := &erofs.Node{Mode: n.Mode, Target: n.Target, Rdev: n.Rdev, Size: n.Size, Open: n.Open}
	cp.meta(made, n)
	return cp.place(to, base, made)
}

// meta gives a copy its owner, mode and time.
func (cp *copier) meta(to, from *erofs.Node) {
	to.Mode = to.Mode&erofs.TypeMask | from.Mode&0o7777
	if cp.mode != nil && !to.IsSymlink() {
		to.Mode = to.Mode&erofs.TypeMask | *cp.mode
	}
	switch {
	case cp.owned:
		to.UID, to.GID = cp.uid, cp.gid
	case cp.kept:
		to.UID, to.GID = from.UID, from.GID
	}
	to.Mtime, to.MtimeNsec = from.Mtime, from.MtimeNsec
	if from.Mtime == 0 && from.MtimeNsec == 0 {
		to.Mtime = cp.now.Unix()
	}
}

// place puts a node into a directory of the target and into the layer.
func (cp *copier) place(dir *erofs.Node, base string, n *erofs.Node) error {
	at := path.Join(cp.at[dir], base)
	if strings.Count(at, "/") > cp.limits.Depth {
		return tooLarge("path of more than %d levels", cp.limits.Depth)
	}
	if err := cp.put(dir, base, n); err != nil {
		return err
	}
	if n.IsRegular() {
		if cp.unpacked += n.Size; cp.unpacked > cp.limits.Unpacked {
			return tooLarge("files over %d bytes", cp.limits.Unpacked)
		}
	}
	if n.IsDir() {
		cp.at[n] = at
	}
	cp.changed = append(cp.changed, at)
	return nil
}

// dir is a directory of the target, through its symlinks, made if it is not there.
func (cp *copier) dir(name string) (*erofs.Node, error) {
	here := cp.root
	cp.at[here] = "/"
	parts := strings.Split(strings.Trim(name, "/"), "/")
	stack := []*erofs.Node{here}
	links := 0
	for len(parts) > 0 {
		part := parts[0]
		parts = parts[1:]
		here = stack[len(stack)-1]
		switch part {
		case "", ".":
			continue
		case "..":
			if len(stack) > 1 {
				stack = stack[:len(stack)-1]
			}
			continue
		}
		child := here.Child(part)
		switch {
		case child == nil:
			if len(part) > erofs.MaxName {
				return nil, invalid("name of %d bytes in %q", len(part), clip(name))
			}
			child = erofs.NewDir(0o755, 0, 0)
			child.Mtime = cp.now.Unix()
			if cp.owned {
				child.UID, child.GID = cp.uid, cp.gid
			}
			if err := cp.place(here, part, child); err != nil {
				return nil, err
			}
		case child.IsSymlink():
			if links++; links > maxLinks {
				return nil, invalid("more than %d symlinks in %q", maxLinks, clip(name))
			}
			if path.IsAbs(child.Target) {
				stack = stack[:1]
			}
			if parts = append(strings.Split(child.Target, "/"), parts...); len(parts) > maxPath {
				return nil, invalid("symlinks expand %q to too long a path", clip(name))
			}
			continue
		case !child.IsDir():
			return nil, invalid("%q is a file, and %q is to be below it", clip(path.Join(cp.at[here], part)), clip(name))
		}
		cp.at[child] = path.Join(cp.at[here], part)
		stack = append(stack, child)
	}
	return stack[len(stack)-1], nil
}
