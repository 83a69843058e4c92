package snapshot

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/cove-sandbox/cove/cas"
	"github.com/cove-sandbox/cove/sandbox"
)

const (
	// ownBlob is the size from which a file is a blob of its own. Below, a blob
	// costs more (a file, a sync, a table entry) than sharing it saves.
	ownBlob = 32 << 10
	// beside is the size up to which a file is stored beside the reading of the
	// next; larger ones are streamed.
	beside = 4 << 20
)

// Filesystem stores and restores trees.
type Filesystem struct {
	// SpoolDir holds small files while a large tar is read, sealed and without
	// a name; "" is the system's directory for temporary files.
	SpoolDir string
}

// Pack stores the tree that a tar describes: files, directories, symlinks, hard
// links, fifos, devices (an overlay's whiteouts are devices 0:0, or files named
// .wh.*: both are kept as they are) and their PAX records (xattrs, ACLs).
//
// The order of the tar is not kept: gVisor writes directories in the random
// order of a Go map, and with it which of two hard links is called the file.
// Entries are sorted by path and the first name of a file is the file, so that
// a tree has one manifest and storing it again adds nothing. Times of access
// and of change are dropped, for the same reason. A tar that has a path twice,
// leaves the tree, or has entries below something that is not a directory is
// ErrInvalid.
func (fsys Filesystem) Pack(ctx context.Context, store cas.Store, r io.Reader) (_ Manifest, err error) {
	const op = "snapshot.pack"
	batch, err := cas.Begin(store)
	if err != nil {
		return Manifest{}, asError(op, err)
	}
	defer batch.Abort()
	p := newPacker(batch)
	sp := &spool{dir: fsys.SpoolDir, limit: spoolMemory}
	defer sp.close()
	t := tree{packer: p, spool: sp, byPath: map[string]*node{}}
	if err := t.read(ctx, r); err != nil {
		return Manifest{}, asError(op, err)
	}
	c, err := t.content(ctx)
	if err != nil {
		return Manifest{}, asError(op, err)
	}
	m, err := p.finish(ctx, c)
	return m, asError(op, err)
}

// node is an entry on its way into a manifest.
type node struct {
	entry
	linkTo *node   // hard link
	small  spooled // small file
	info   cas.Info
	index  int // in the manifest
}

// tree is a tar that is being read.
type tree struct {
	packer *packer
	spool  *spool
	nodes  []*node
	byPath map[string]*node
}

func (t *tree) read(ctx context.Context, r io.Reader) error {
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(runtime.GOMAXPROCS(0))
	tr := tar.NewReader(r)
	err := func() error {
		for {
			if err := gctx.Err(); err != nil {
				return err
			}
			h, err := tr.Next()
			if errors.Is(err, io.EOF) {
				return nil
			}
			if err != nil {
				return tarError(err)
			}
			n, err := t.add(h)
			if err != nil {
				return err
			}
			if n.size > 0 {
				if err := t.store(gctx, g, n, tr); err != nil {
					return err
				}
			}
		}
	}()
	return errors.Join(g.Wait(), err) // a store that failed is the reason, not the context it ended
}

func tarError(err error) error {
	if errors.Is(err, tar.ErrHeader) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, tar.ErrFieldTooLong) {
		return sandbox.Errorf(sandbox.Invalid, "", "not a whole tar: %w", err)
	}
	return err
}

// add enters what a header says.
func (t *tree) add(h *tar.Header) (*node, error) {
	bad := func(format string, args ...any) (*node, error) {
		return nil, sandbox.InvalidField("tar", "%.200q: %s", h.Name, fmt.Sprintf(format, args...))
	}
	p, err := cleanName(h.Name)
	if err != nil {
		return bad("%v", err)
	}
	if len(t.nodes) == maxEntries {
		return nil, sandbox.Errorf(sandbox.TooLarge, "", "more than %d entries", maxEntries)
	}
	n := &node{entry: entry{typ: h.Typeflag, path: p, mode: uint32(h.Mode & 0o7777), sec: h.ModTime.Unix(), nsec: uint32(h.ModTime.Nanosecond()),
		uname: h.Uname, gname: h.Gname}}
	if h.Uid < 0 || h.Gid < 0 || h.Uid > 1<<32-1 || h.Gid > 1<<32-1 {
		return bad("owner %d:%d", h.Uid, h.Gid)
	}
	if len(h.Uname) > maxName || len(h.Gname) > maxName {
		return bad("the name of its owner is above %d bytes", maxName)
	}
	n.uid, n.gid = uint32(h.Uid), uint32(h.Gid)
	for key, value := range h.PAXRecords {
		if r := (record{key, value}); validRecord(r) {
			n.records = append(n.records, r)
		}
	}
	slices.SortFunc(n.records, func(a, b record) int { return strings.Compare(a.key, b.key) })
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeGNUSparse:
		n.typ = typeFile
		if n.size = h.Size; n.size > maxFile {
			return bad("%d bytes", h.Size)
		}
	case tar.TypeLink:
		target, err := cleanName(h.Linkname)
		if err != nil {
			return bad("hard link: %v", err)
		}
		if n.linkTo = t.byPath[target]; n.linkTo == nil || n.linkTo.typ == typeDir {
			return bad("hard link to %.200q, which is no file before it", h.Linkname)
		}
		if n.linkTo.linkTo != nil {
			n.linkTo = n.linkTo.linkTo
		}
	case tar.TypeSymlink:
		if n.symlink = h.Linkname; n.symlink == "" || len(n.symlink) > maxPath {
			return bad("symlink to %d bytes", len(n.symlink))
		}
	case tar.TypeChar, tar.TypeBlock:
		if h.Devmajor < 0 || h.Devmajor >= 1<<12 || h.Devminor < 0 || h.Devminor >= 1<<20 {
			return bad("device %d:%d", h.Devmajor, h.Devminor)
		}
		n.major, n.minor = uint32(h.Devmajor), uint32(h.Devminor)
	case tar.TypeDir, tar.TypeFifo:
	default:
		return bad("type %q is not supported", h.Typeflag)
	}
	if t.byPath[p] != nil {
		return bad("is there twice")
	}
	t.byPath[p] = n
	t.nodes = append(t.nodes, n)
	return n, nil
}

// cleanName is the path of an entry from its name in a tar: gVisor writes "./",
// "./a/", "./a/b".
func cleanName(name string) (string, error) {
	if name == "" || strings.HasPrefix(name, "/") {
		return "", errors.New("not a relative path")
	}
	// Before cleaning: a/../b is b only where a is no symlink.
	if slices.Contains(strings.Split(name, "/"), "..") {
		return "", errors.New("leaves its directory")
	}
	p := path.Clean(name)
	if p == "." {
		p = ""
	}
	return p, checkPath(p)
}

// store takes the content of a file from the tar.
func (t *tree) store(ctx context.Context, g *errgroup.Group, n *node, tr *tar.Reader) error {
	if n.size > beside {
		info, err := t.packer.put(ctx, io.LimitReader(tr, n.size))
		if err == nil && info.Size != n.size {
			err = tarError(io.ErrUnexpectedEOF)
		}
		n.info = info
		return err
	}
	content := make([]byte, n.size)
	if _, err := io.ReadFull(tr, content); err != nil {
		return tarError(err)
	}
	if n.size < ownBlob {
		var err error
		n.small, err = t.spool.put(content)
		return err
	}
	g.Go(func() (err error) {
		n.info, err = t.packer.put(ctx, bytes.NewReader(content))
		return err
	})
	return nil
}

// content sorts the entries and stores the pack.
func (t *tree) content(ctx context.Context) (*content, error) {
	// The first of a file's names is the file; gVisor chooses at random.
	for _, n := range t.nodes {
		if f := n.linkTo; f != nil && comparePaths(n.path, f.path) < 0 {
			n.path, f.path = f.path, n.path
		}
	}
	slices.SortFunc(t.nodes, func(a, b *node) int { return comparePaths(a.path, b.path) })
	var pack []spooled
	var offset int64
	for i, n := range t.nodes {
		n.index = i
		if n.typ == typeFile && n.size > 0 && n.size < ownBlob {
			n.offset, offset = offset, offset+n.size
			pack = append(pack, n.small)
		}
	}
	var packInfo cas.Info
	if len(pack) > 0 {
		var err error
		if packInfo, err = t.packer.put(ctx, &spoolReader{s: t.spool, queue: pack}); err != nil {
			return nil, err
		}
	}
	c := &content{kind: KindFilesystem, entries: make([]entry, 0, len(t.nodes))}
	table := blobTable{c: c, index: map[cas.ID]int{}}
	check := checker{c: c}
	for _, n := range t.nodes {
		switch {
		case n.linkTo != nil:
			n.target = n.linkTo.index
			// Of a hard link there is one inode: a record of its own says nothing.
			f := n.linkTo
			n.mode, n.uid, n.gid, n.sec, n.nsec, n.uname, n.gname, n.records = f.mode, f.uid, f.gid, f.sec, f.nsec, f.uname, f.gname, nil
		case n.size >= ownBlob:
			n.blob = table.add(n.info)
		case n.size > 0:
			n.blob = table.add(packInfo)
		}
		check.used = append(check.used, make([]bool, len(c.blobs)-len(check.used))...)
		if err := check.entry(&n.entry); err != nil {
			return nil, sandbox.InvalidField("tar", "%v", err)
		}
		c.entries = append(c.entries, n.entry)
	}
	return c, nil
}

// Unpack writes the tree of a snapshot as a tar, always the same bytes: entries
// in order of path, named as gVisor names them. What is written before an error
// is authentic, and the tar has no end.
func (Filesystem) Unpack(ctx context.Context, store cas.Store, id cas.ID, w io.Writer) error {
	const op = "snapshot.unpack"
	c, err := load(ctx, store, id, KindFilesystem)
	if err != nil {
		return asError(op, err)
	}
	tw := tar.NewWriter(w)
	parts := &partReader{ctx: ctx, store: store}
	defer parts.close()
	for i := range c.entries {
		e := &c.entries[i]
		if err := tw.WriteHeader(header(c, e)); err != nil {
			return asError(op, err)
		}
		if e.size == 0 {
			continue
		}
		if err := parts.copy(tw, c.blobs[e.blob], e); err != nil {
			return asError(op, err)
		}
	}
	if err := parts.close(); err != nil {
		return asError(op, err)
	}
	return asError(op, tw.Close())
}

func tarName(e *entry) string {
	switch {
	case e.path == "":
		return "./"
	case e.typ == typeDir:
		return "./" + e.path + "/"
	}
	return "./" + e.path
}

func header(c *content, e *entry) *tar.Header {
	h := &tar.Header{Typeflag: e.typ, Name: tarName(e), Mode: int64(e.mode), Uid: int(e.uid), Gid: int(e.gid), Uname: e.uname, Gname: e.gname,
		ModTime: unixTime(e.sec, e.nsec), Size: e.size, Format: tar.FormatPAX, Devmajor: int64(e.major), Devminor: int64(e.minor)}
	switch e.typ {
	case typeLink:
		h.Linkname = tarName(&c.entries[e.target])
	case typeSymlink:
		h.Linkname = e.symlink
	}
	if len(e.records) > 0 {
		h.PAXRecords = make(map[string]string, len(e.records))
		for _, r := range e.records {
			h.PAXRecords[r.key] = r.value
		}
	}
	return h
}

// partReader copies contents out of blobs. The parts of a pack follow each
// other (the decoder has seen to it), so it is read once, from start to end.
type partReader struct {
	ctx   context.Context
	store cas.Store
	pack  [32]byte
	r     io.ReadCloser
}

func (p *partReader) copy(w io.Writer, b blobRef, e *entry) error {
	if e.offset == 0 && e.size == b.size {
		return copyBlob(p.ctx, p.store, b, w)
	}
	if p.r == nil || p.pack != b.sum {
		if err := p.close(); err != nil {
			return err
		}
		r, err := openBlob(p.ctx, p.store, b)
		if err != nil {
			return err
		}
		p.r, p.pack = r, b.sum
	}
	n, err := io.Copy(w, io.LimitReader(p.r, e.size))
	if err == nil && n != e.size {
		err = damaged(cas.IDOf(b.sum), fmt.Sprintf("shorter than the %d bytes its manifest says", b.size))
	}
	return err
}

// close reads to the end, where the digest of the whole is checked.
func (p *partReader) close() error {
	if p.r == nil {
		return nil
	}
	_, err := io.Copy(io.Discard, p.r)
	err = errors.Join(err, p.r.Close())
	p.r = nil
	return err
}

// asError gives err its class and operation.
func asError(op string, err error) error {
	var se *sandbox.Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, &se):
		if joined, ok := err.(interface{ Unwrap() []error }); ok && len(joined.Unwrap()) > 0 {
			err = se // of several errors the first that has a class
		}
		return sandbox.WithOp(op, err)
	case sandbox.NoSpace(err):
		return (&sandbox.Error{Class: sandbox.DiskFull, Op: op, Err: err}).WithHint("free space on the file system it names")
	case errors.Is(err, context.DeadlineExceeded):
		return &sandbox.Error{Class: sandbox.DeadlineReached, Op: op, Err: err}
	case errors.Is(err, context.Canceled):
		return &sandbox.Error{Class: sandbox.Canceled, Op: op, Err: err}
	}
	return &sandbox.Error{Class: sandbox.Internal, Op: op, Err: err}
}
