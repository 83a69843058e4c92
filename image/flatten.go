package image

import (
	"archive/tar"
	"context"
	"errors"
	"io"
	"math"
	"os"
	"strings"

	"github.com/cove-sandbox/cove/image/erofs"
	"github.com/cove-sandbox/cove/sandbox"
)

// flattener merges layers into one tree. Contents stay in spool files; nodes
// point into them.
type flattener struct {
	root   *erofs.Node
	limits Limits
	notes  Notes
	ws     *workspace
	spools []*os.File
	sparse *os.File // one of spools, for all sparse files: a file each would use up descriptors

	cleanup []func() // after the image is written

	unpacked int64 // bytes of all layers so far
	entries  int
	names    int64

	// Of the layer being applied.
	without []string               // absolute paths that are left out, with all below
	aside   map[string]*erofs.Node // files of those, by name
	touched map[entry]struct{}     // what it added; whiteouts of the same layer spare these
	dropped map[string]struct{}    // devices it had; hard links to them go too
}

// entry is a name in a directory. Hard links share a node, so a node alone
// does not say which name is meant.
type entry struct {
	dir  *erofs.Node
	name string
}

// tarBlock is the unit of a tar.
const tarBlock = 512

// maxXattrNotes bounds the list in the sidecar.
const maxXattrNotes = 1000

func newFlattener(limits Limits, ws *workspace) *flattener {
	return &flattener{root: erofs.NewDir(0o755, 0, 0), limits: limits, ws: ws, touched: map[entry]struct{}{}}
}

func (f *flattener) close() {
	for _, s := range f.spools {
		s.Close()
	}
	for _, fn := range f.cleanup {
		fn()
	}
}

func (f *flattener) newSpool() (*os.File, error) {
	s, err := os.CreateTemp(f.ws.dir, "spool-") // two trees may share a workspace
	if err == nil {
		f.spools = append(f.spools, s)
	}
	return s, err
}

// form says what the entries of a tar mean.
type form int

const (
	formRoot  form = iota // a root file system: every name is a file
	formLayer             // an OCI layer: ".wh." names take away what lower layers brought (image-spec, layer.md)
	formPlain             // a directory as it is; the tar has to have its end mark
	formDiff              // changes to an image, in the overlay's form or OCI's; the tar has to have its end mark
)

// apply reads one uncompressed layer to its end.
func (f *flattener) apply(ctx context.Context, layer io.Reader, form form) error {
	spool, err := f.newSpool()
	if err != nil {
		return err
	}
	return f.applySpooled(ctx, layer, spool, spool, form)
}

// applySpooled reads a layer that is, or through w becomes, the content of
// spool.
func (f *flattener) applySpooled(ctx context.Context, layer io.Reader, spool *os.File, w io.Writer, form form) error {
	f.touched, f.dropped, f.aside = map[entry]struct{}{}, map[string]struct{}{}, map[string]*erofs.Node{}
	in := &spooler{ctx: ctx, r: layer, w: w, left: f.limits.Unpacked - f.unpacked, limit: f.limits.Unpacked}
	tr := tar.NewReader(in)
	end := int64(0) // of the entries so far
	for {
		hdr, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err == nil {
			err = f.applyEntry(hdr, tr, in, spool, form)
		}
		if err == nil && form >= formPlain {
			_, err = io.Copy(io.Discard, tr)
			end = (in.n + tarBlock - 1) / tarBlock * tarBlock
		}
		if err != nil {
			return tarError(ctx, in, err)
		}
	}
	// archive/tar takes a stream that stops between two entries for a whole
	// one. A layer has a digest against that; the tar of a snapshot has only
	// its end mark.
	if form >= formPlain && in.err == nil && in.n < end+tarBlock {
		return invalid("the tar stops after %d bytes without its end mark", in.n)
	}
	// What follows the end mark still counts for the layer's digest.
	if _, err := io.Copy(io.Discard, in); err != nil {
		return tarError(ctx, in, err)
	}
	f.unpacked += in.n
	return nil
}

// tarError tells a fault of the archive from one below it.
func tarError(ctx context.Context, in *spooler, err error) error {
	var se *sandbox.Error
	switch {
	case in.err != nil:
		return in.err
	case ctx.Err() != nil || errors.As(err, &se):
		return err
	case errors.Is(err, tar.ErrHeader) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, tar.ErrFieldTooLong):
		return invalid("not a readable tar archive: %w", err)
	}
	return err
}

func (f *flattener) applyEntry(hdr *tar.Header, tr *tar.Reader, in *spooler, spool *os.File, form form) error {
	if hdr.Typeflag == tar.TypeXGlobalHeader {
		return nil
	}
	parts, err := splitPath(hdr.Name, f.limits.Depth)
	if err != nil {
		return err
	}
	if len(parts) == 0 { // the root itself
		if hdr.Typeflag != tar.TypeDir {
			return invalid("the archive's root is not a directory")
		}
		return setMeta(f.root, hdr)
	}
	out := f.isWithout(parts)
	if out && hdr.Typeflag != tar.TypeReg {
		return f.count(len(hdr.Name))
	}
	base := parts[len(parts)-1]
	if form == formLayer && strings.HasPrefix(base, ".wh.") || form == formDiff && isEmptyWhiteout(hdr, base) {
		return f.whiteout(parts[:len(parts)-1], base)
	}
	n := &erofs.Node{}
	switch hdr.Typeflag {
	case tar.TypeReg, tar.TypeCont, tar.TypeGNUSparse:
		n.Mode = erofs.TypeRegular
		if err := f.content(n, hdr, tr, in, spool); err != nil {
			return err
		}
	case tar.TypeDir:
		n = erofs.NewDir(0, 0, 0)
	case tar.TypeSymlink:
		n.Mode, n.Target = erofs.TypeSymlink, hdr.Linkname
		if n.Target == "" || len(n.Target) > erofs.MaxTarget || strings.IndexByte(n.Target, 0) >= 0 {
			return invalid("symlink %q has a target of %d bytes", clip(hdr.Name), len(n.Target))
		}
	case tar.TypeFifo:
		n.Mode = erofs.TypeFIFO
	case tar.TypeLink:
		return f.hardLink(parts, hdr, form)
	case tar.TypeChar, tar.TypeBlock:
		if form == formDiff {
			if isOverlayWhiteout(hdr) {
				return f.overlayWhiteout(parts)
			}
			if err := setDevice(n, hdr); err != nil {
				return err
			}
			break
		}
		// gVisor brings its own /dev, and a device of a stranger's choice is
		// nothing to pass on. What it would have replaced goes, as on a disk.
		f.notes.Devices++
		if err := f.drop(parts); err != nil {
			return err
		}
		if dir, err := f.walk(parts[:len(parts)-1], false); err == nil && dir != nil {
			dir.Remove(base)
		}
		return nil
	default:
		return invalid("%q has unknown tar type %q", clip(hdr.Name), hdr.Typeflag)
	}
	if err := setMeta(n, hdr); err != nil {
		return err
	}
	if out { // what stays may be another name of it: package managers link files out of their caches
		f.aside[strings.Join(parts, "/")] = n
		return f.count(len(hdr.Name))
	}
	f.noteXattrs(parts, hdr, form)
	dir, err := f.walk(parts[:len(parts)-1], true)
	if err != nil {
		return err
	}
	if old := dir.Child(base); old != nil && old.IsDir() && n.IsDir() {
		if form == formDiff && isOpaque(hdr) {
			for _, child := range old.Names() {
				f.hide(old, child)
			}
		}
		f.touched[entry{dir, base}] = struct{}{}
		return setMeta(old, hdr) // a directory named again keeps its content
	}
	return f.put(dir, base, n)
}

// isWithout says whether a name is left out of the layer being applied.
func (f *flattener) isWithout(parts []string) bool {
	if len(f.without) == 0 {
		return false
	}
	name := "/" + strings.Join(parts, "/")
	for _, w := range f.without {
		if name == w || strings.HasPrefix(name, w+"/") {
			return true
		}
	}
	return false
}

// drop remembers a name that is left out.
func (f *flattener) drop(parts []string) error {
	name := strings.Join(parts, "/")
	f.dropped[name] = struct{}{}
	return f.count(len(name))
}

func setMeta(n *erofs.Node, hdr *tar.Header) error {
	if hdr.Uid < 0 || hdr.Gid < 0 || int64(hdr.Uid) >= math.MaxUint32 || int64(hdr.Gid) >= math.MaxUint32 {
		return invalid("%q has owner %d:%d", clip(hdr.Name), hdr.Uid, hdr.Gid)
	}
	perm := uint16(hdr.Mode & 0o7777)
	if n.IsSymlink() {
		perm = 0o777
	}
	n.Mode = n.Mode&erofs.TypeMask | perm
	n.UID, n.GID = uint32(hdr.Uid), uint32(hdr.Gid)
	n.Mtime, n.MtimeNsec = hdr.ModTime.Unix(), uint32(hdr.ModTime.Nanosecond())
	if n.Mtime < 0 {
		n.Mtime, n.MtimeNsec = 0, 0
	}
	return nil
}

// content points a file at its bytes. They follow the header in the spool,
// except for a sparse file, which has to be written out in full.
func (f *flattener) content(n *erofs.Node, hdr *tar.Header, tr *tar.Reader, in *spooler, spool *os.File) error {
	n.Size = hdr.Size
	if n.Size == 0 {
		return nil
	}
	if n.Size > f.limits.Unpacked-f.unpacked-in.n {
		return tooLarge("%q and the files before it are over %d bytes", clip(hdr.Name), f.limits.Unpacked)
	}
	off := in.n
	if isSparse(hdr) {
		var err error
		if f.sparse == nil {
			if f.sparse, err = f.newSpool(); err != nil {
				return err
			}
		}
		spool = f.sparse
		if off, err = spool.Seek(0, io.SeekEnd); err != nil {
			return err
		}
		if _, err := io.Copy(spool, tr); err != nil {
			return err
		}
		f.unpacked += n.Size // on top of the few bytes it has in the layer
	}
	size := n.Size
	n.Open = func() (io.ReadCloser, error) {
		return io.NopCloser(io.NewSectionReader(spool, off, size)), nil
	}
	return nil
}

func isSparse(hdr *tar.Header) bool {
	if hdr.Typeflag == tar.TypeGNUSparse {
		return true
	}
	for k := range hdr.PAXRecords {
		if strings.HasPrefix(k, "GNU.sparse.") {
			return true
		}
	}
	return false
}

// hardLink gives an existing node of the image another name. The target is
// resolved in the tree, so it can only be a file of this image.
func (f *flattener) hardLink(parts []string, hdr *tar.Header, form form) error {
	target, err := splitPath(hdr.Linkname, f.limits.Depth)
	if err != nil {
		return err
	}
	if _, gone := f.dropped[strings.Join(target, "/")]; gone {
		if form == formDiff {
			return f.overlayWhiteout(parts)
		}
		return f.drop(parts)
	}
	n := f.aside[strings.Join(target, "/")]
	if n == nil && len(target) > 0 {
		dir, err := f.walk(target[:len(target)-1], false)
		if err != nil {
			return err
		}
		if dir != nil {
			n = dir.Child(target[len(target)-1])
		}
	}
	if n == nil {
		return invalid("hard link %q to %q, which is not in the image", clip(hdr.Name), clip(hdr.Linkname))
	}
	if n.IsDir() {
		return invalid("hard link %q to directory %q", clip(hdr.Name), clip(hdr.Linkname))
	}
	dir, err := f.walk(parts[:len(parts)-1], true)
	if err != nil {
		return err
	}
	return f.put(dir, parts[len(parts)-1], n)
}

// whiteout removes what lower layers have at a name, or with ".wh..wh..opq"
// everything they have in the directory. Order within a layer does not matter:
// what this layer brings stays.
func (f *flattener) whiteout(parent []string, base string) error {
	name := strings.TrimPrefix(base, ".wh.")
	if name == "" || name == "." || name == ".." {
		return invalid("whiteout %q names nothing", base)
	}
	dir, err := f.walk(parent, false)
	if err != nil || dir == nil {
		return err
	}
	switch {
	case name == ".wh..opq":
		for _, child := range dir.Names() {
			f.hide(dir, child)
		}
	case strings.HasPrefix(name, ".wh."):
		// .wh..wh.plnk and its kind are aufs' own records.
	case dir.Child(name) != nil:
		f.hide(dir, name)
	}
	return nil
}

// hide removes an entry of lower layers and reports whether anything of this
// layer is at or below it, in which case that much stays.
func (f *flattener) hide(dir *erofs.Node, name string) (kept bool) {
	_, kept = f.touched[entry{dir, name}]
	if n := dir.Child(name); n.IsDir() {
		for _, child := range n.Names() {
			if f.hide(n, child) {
				kept = true
			}
		}
	}
	if !kept {
		dir.Remove(name)
	}
	return kept
}

func (f *flattener) noteXattrs(parts []string, hdr *tar.Header, form form) {
	for k, v := range hdr.PAXRecords {
		name, ok := strings.CutPrefix(k, paxXattr)
		if !ok || form == formDiff && strings.HasPrefix(name, overlayXattr) {
			continue
		}
		f.notes.Xattrs++
		at := "/" + strings.Join(parts, "/")
		if f.notes.XattrList == nil {
			f.notes.XattrList = map[string]xattr{}
		}
		x := f.notes.XattrList[at]
		if len(f.notes.XattrList) >= maxXattrNotes && x == nil || len(v) > 1024 || len(x) >= 16 {
			continue
		}
		if x == nil {
			x = xattr{}
			f.notes.XattrList[at] = x
		}
		x[name] = []byte(v)
	}
}

// contentBytes is about what the image will take, for progress.
func (f *flattener) contentBytes() int64 { return f.unpacked }

// spooler reads a layer, keeps a copy and counts. Its first error sticks, so
// that a full disk is not reported as a bad archive.
type spooler struct {
	ctx   context.Context
	r     io.Reader
	w     io.Writer
	n     int64
	left  int64
	limit int64
	err   error
}

func (s *spooler) Read(b []byte) (int, error) {
	if s.err != nil {
		return 0, s.err
	}
	if s.err = s.ctx.Err(); s.err != nil {
		return 0, s.err
	}
	n, err := s.r.Read(b)
	s.n += int64(n)
	if s.left -= int64(n); s.left < 0 {
		s.err = tooLarge("layers over %d bytes unpacked", s.limit)
		return 0, s.err
	}
	if n > 0 {
		if _, werr := s.w.Write(b[:n]); werr != nil {
			s.err = werr
			return 0, werr
		}
	}
	if err != nil && err != io.EOF {
		s.err = err
	}
	return n, err
}
