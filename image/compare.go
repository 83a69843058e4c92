package image

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/cove-sandbox/cove/image/erofs"
	"github.com/cove-sandbox/cove/sandbox"
)

// Compare says what differs between an image with one layer over it and the same image
// with another; nil is no layer. Of the image it looks only at paths that one of the
// layers speaks about.
//
// unsure are files that look the same and were opened for writing: only their content can
// say, and now has no hash of them. They count as unchanged.
func (l *Library) Compare(ctx context.Context, id string, before, now *sandbox.UpperLayer, limit int) (d sandbox.Diff, unsure []string, err error) {
	const op = "image.compare"
	file, err := l.Path(id)
	if err != nil {
		return d, nil, err
	}
	f, err := os.Open(file)
	if err != nil {
		return d, nil, sandbox.Errorf(sandbox.Unavailable, op, "%w", err)
	}
	defer f.Close()
	r, err := erofs.Open(f)
	if err != nil {
		return d, nil, sandbox.Errorf(sandbox.Corrupt, op, "%w", err)
	}
	c := comparison{ctx: ctx, base: &baseTree{r: r, dirs: map[string]map[string]uint64{}}, diff: &d, limit: limit}
	c.before, c.now = newSide(c.base, before), newSide(c.base, now)
	d.Truncated = c.before.truncated || c.now.truncated
	err = c.run()
	if ctx.Err() != nil {
		return d, nil, asError(ctx, op, ctx.Err())
	}
	if err != nil {
		return d, nil, sandbox.Errorf(sandbox.Corrupt, op, "%w", err)
	}
	return d, c.unsure, nil
}

// baseTree looks paths of an image up. Each directory is read once.
type baseTree struct {
	r    *erofs.Reader
	dirs map[string]map[string]uint64
}

// at is the inode of a path; nil if there is none.
func (b *baseTree) at(name string) (*erofs.Inode, error) {
	if name == "" {
		return b.r.Inode(b.r.Root())
	}
	names, err := b.list(path.Dir(name))
	nid, ok := names[path.Base(name)]
	if err != nil || !ok {
		return nil, err
	}
	return b.r.Inode(nid)
}

// list is a directory; what is none has no names.
func (b *baseTree) list(dir string) (map[string]uint64, error) {
	if dir == "/" {
		dir = ""
	}
	if names, ok := b.dirs[dir]; ok {
		return names, nil
	}
	in, err := b.at(dir)
	if err != nil {
		return nil, err
	}
	names := map[string]uint64{}
	if in != nil && in.IsDir() {
		err = b.r.ReadDir(in, func(name string, nid uint64) error { names[name] = nid; return nil })
	}
	b.dirs[dir] = names
	return names, err
}

// side is an image with a layer over it.
type side struct {
	base      *baseTree
	upper     map[string]*sandbox.LayerEntry
	shown     map[string]bool // directories of the image whose names are seen
	truncated bool
}

func newSide(base *baseTree, l *sandbox.UpperLayer) *side {
	s := &side{base: base, upper: map[string]*sandbox.LayerEntry{}, shown: map[string]bool{"": true}}
	if l == nil {
		return s
	}
	s.truncated = l.Truncated
	for i := range l.Entries {
		s.upper[l.Entries[i].Name] = &l.Entries[i]
	}
	return s
}

func parent(name string) string { return strings.TrimSuffix(path.Dir(name), "/") }

// shows says whether what the image has in a directory is seen.
func (s *side) shows(dir string) (bool, error) {
	if v, ok := s.shown[dir]; ok {
		return v, nil
	}
	v, err := s.shows(parent(dir))
	if e := s.upper[dir]; err == nil && v && e != nil {
		v = !e.Whiteout && !e.Opaque && e.Mode&erofs.TypeMask == erofs.TypeDir
	}
	if err == nil && v {
		var in *erofs.Inode
		in, err = s.base.at(dir)
		v = in != nil && in.IsDir()
	}
	s.shown[dir] = v
	return v, err
}

// at is what is seen at a path; nil, nil: nothing.
func (s *side) at(name string) (*sandbox.LayerEntry, *erofs.Inode, error) {
	if e := s.upper[name]; e != nil {
		if e.Whiteout {
			return nil, nil, nil
		}
		return e, nil, nil
	}
	if name != "" {
		if v, err := s.shows(parent(name)); err != nil || !v {
			return nil, nil, err
		}
	}
	in, err := s.base.at(name)
	if err != nil || in == nil {
		return nil, nil, err
	}
	return &sandbox.LayerEntry{Name: name, Mode: uint32(in.Mode), UID: in.UID, GID: in.GID, Size: in.Size, Target: in.Target,
		Mtime: in.Mtime*1e9 + int64(in.MtimeNsec)}, in, nil
}

type comparison struct {
	ctx         context.Context
	base        *baseTree
	before, now *side
	diff        *sandbox.Diff
	limit       int
	unsure      []string
	read        int64 // bytes of the image
}

func (c *comparison) run() error {
	all := map[string]struct{}{}
	for _, s := range []*side{c.before, c.now} {
		for name, e := range s.upper {
			all[name] = struct{}{}
			if !e.Opaque || e.Whiteout {
				continue
			}
			names, err := c.base.list(name) // what it hides
			if err != nil {
				return err
			}
			for child := range names {
				all[name+"/"+child] = struct{}{}
			}
		}
	}
	names := make([]string, 0, len(all))
	for name := range all {
		names = append(names, name)
	}
	slices.Sort(names)
	for i, name := range names {
		if i%1024 == 0 && c.ctx.Err() != nil {
			return c.ctx.Err()
		}
		if err := c.one(name); err != nil {
			return err
		}
	}
	return nil
}

func (c *comparison) one(name string) error {
	was, wasIn, err := c.before.at(name)
	if err != nil {
		return err
	}
	is, _, err := c.now.at(name)
	switch {
	case err != nil || was == nil && is == nil:
		return err
	case was == nil:
		c.diff.Add(sandbox.Change{Path: shownAs(name), Kind: sandbox.Added, Now: stateOf(is)}, c.limit)
		return nil
	case is == nil:
		up, _, err := c.now.at(parent(name))
		if err != nil || up == nil || up.Mode&erofs.TypeMask != erofs.TypeDir {
			return err // it went with what it was in
		}
		c.diff.Add(sandbox.Change{Path: shownAs(name), Kind: sandbox.Deleted, Before: stateOf(was)}, c.limit)
		return nil
	case was == is, was.Ino != 0 && was.Ino == is.Ino && was.Ctime == is.Ctime:
		return nil
	}
	what, err := c.differs(was, is, wasIn)
	if err != nil || len(what) == 0 {
		return err
	}
	c.diff.Add(sandbox.Change{Path: shownAs(name), Kind: sandbox.Modified, What: what, Before: stateOf(was), Now: stateOf(is)}, c.limit)
	return nil
}

// differs says in what two files of one name do. in is the first where it is of the image.
func (c *comparison) differs(was, is *sandbox.LayerEntry, in *erofs.Inode) (what []string, err error) {
	if was.Mode&erofs.TypeMask != is.Mode&erofs.TypeMask {
		return []string{"type"}, nil
	}
	if was.Mode&0o7777 != is.Mode&0o7777 {
		what = append(what, "mode")
	}
	if was.UID != is.UID || was.GID != is.GID {
		what = append(what, "owner")
	}
	if was.Target != is.Target {
		what = append(what, "target")
	}
	if was.Mode&erofs.TypeMask != erofs.TypeRegular {
		return what, nil
	}
	other := was.Size != is.Size
	switch {
	case other || is.Size == 0:
	case is.Hash != nil && in != nil && was.Hash == nil:
		if was.Hash, err = c.hash(in); err != nil {
			return nil, err
		}
		other = was.Hash != nil && !bytes.Equal(was.Hash, is.Hash)
	case is.Hash != nil && was.Hash != nil:
		other = !bytes.Equal(was.Hash, is.Hash)
	case in == nil: // two looks at the same file: its ctime moved
		other = was.Mtime != is.Mtime || len(what) == 0
	case was.Mtime != is.Mtime:
		other = true
	default:
		c.unsure = append(c.unsure, is.Name)
	}
	if other {
		what = append([]string{"content"}, what...)
	}
	return what, nil
}

// hash is of a file of the image; nil where that would be too much to read.
func (c *comparison) hash(in *erofs.Inode) ([]byte, error) {
	if c.read += in.Size; c.read > sandbox.MaxDiffBytes {
		c.diff.Truncated = true
		return nil, nil
	}
	sum := sha256.New()
	if _, err := io.Copy(sum, contextReader{c.ctx, c.base.r.Content(in)}); err != nil {
		return nil, err
	}
	return sum.Sum(nil), nil
}

func shownAs(name string) string {
	if name == "" {
		return "/"
	}
	return name
}

func stateOf(e *sandbox.LayerEntry) *sandbox.FileState {
	s := &sandbox.FileState{Type: sandbox.OtherFile, Mode: e.Mode & 0o7777, UID: e.UID, GID: e.GID, Target: e.Target, Hash: hex.EncodeToString(e.Hash)}
	switch e.Mode & erofs.TypeMask {
	case erofs.TypeRegular:
		s.Type, s.Size = sandbox.Regular, e.Size
	case erofs.TypeDir:
		s.Type = sandbox.Directory
	case erofs.TypeSymlink:
		s.Type = sandbox.Symlink
	}
	return s
}
