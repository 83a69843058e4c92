package erofs

import (
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
)

// ErrFormat is wrapped by every error a Reader gives about the image itself:
// damaged, hostile, or using a part of the format this package does not read.
var ErrFormat = errors.New("erofs: not an image this package can read")

func badFormat(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrFormat, fmt.Sprintf(format, args...))
}

// Reader reads the metadata of an image: what Write makes, and what mkfs.erofs
// makes without compression. It trusts nothing it reads; every offset is held
// against the size of the image, and what can repeat is bounded by the caller
// (see Tree and ReadDir). Not safe for concurrent use.
type Reader struct {
	src        io.ReaderAt
	size       int64 // bytes the superblock claims, which are there
	meta       int64 // where nids count from
	xattrs     int64 // where shared attributes are
	root       uint64
	buildTime  int64
	buildNsec  uint32
	chunks     map[int64][]byte // metadata read so far; a few thousand small reads become a few large ones
	unaligned  []byte
	superblock [superSize]byte
}

const (
	chunkSize = 64 << 10
	maxChunks = 64 // 4 MiB; a tree in our own order needs each once
)

// Inode is what the image says of one inode.
type Inode struct {
	Nid       uint64 // its identity: two names with one nid are hard links
	Mode      uint16
	UID, GID  uint32
	Mtime     int64
	MtimeNsec uint32
	Nlink     uint32 // as the image claims
	Size      int64
	Rdev      uint32 // of a device, as Linux' new_encode_dev has it
	Target    string // of a symlink
	Xattrs    map[string]string

	// Block is where the content of a regular file, or the data of a
	// directory, begins; Size bytes of it lie there in one piece, less Tail.
	Block uint32
	// Tail is the offset in the image of the last Size%4096 bytes where they
	// are packed behind the inode; else 0.
	Tail int64
}

func (i *Inode) IsDir() bool     { return i.Mode&TypeMask == TypeDir }
func (i *Inode) IsRegular() bool { return i.Mode&TypeMask == TypeRegular }
func (i *Inode) IsSymlink() bool { return i.Mode&TypeMask == TypeSymlink }

// Open reads the superblock.
func Open(src io.ReaderAt) (*Reader, error) {
	var head [blockSize]byte
	if _, err := src.ReadAt(head[:], 0); err == io.EOF || err == io.ErrUnexpectedEOF {
		return nil, badFormat("less than a block")
	} else if err != nil {
		return nil, err
	}
	r := &Reader{src: src, chunks: map[int64][]byte{}}
	sb := head[superOff : superOff+superSize]
	copy(r.superblock[:], sb)
	if le.Uint32(sb[0:]) != superMagic {
		return nil, badFormat("no superblock")
	}
	if sb[12] != blockBits {
		return nil, badFormat("blocks of 1<<%d bytes", sb[12])
	}
	if f := le.Uint32(sb[80:]); f != 0 {
		return nil, badFormat("incompatible features %#x", f) // compression, chunks, more devices
	}
	if le.Uint32(sb[8:])&compatChecksum != 0 {
		want := le.Uint32(sb[4:])
		le.PutUint32(sb[4:], 0)
		if got := ^crc32.Checksum(head[superOff:], crc32.MakeTable(crc32.Castagnoli)); got != want {
			return nil, badFormat("superblock checksum %#x, not %#x", got, want)
		}
	}
	r.root = uint64(le.Uint16(sb[14:]))
	r.buildTime, r.buildNsec = clampTime(le.Uint64(sb[24:]), le.Uint32(sb[32:]))
	r.size = int64(le.Uint32(sb[36:])) * blockSize
	r.meta = int64(le.Uint32(sb[40:])) * blockSize
	r.xattrs = int64(le.Uint32(sb[44:])) * blockSize
	if r.size == 0 || r.meta >= r.size {
		return nil, badFormat("%d bytes, inodes at %d", r.size, r.meta)
	}
	// The claim is what all else is held against, so it has to be true.
	var last [1]byte
	if _, err := src.ReadAt(last[:], r.size-1); err == io.EOF {
		return nil, badFormat("shorter than the %d bytes it claims", r.size)
	} else if err != nil {
		return nil, err
	}
	return r, nil
}

// Root is the nid of the root directory.
func (r *Reader) Root() uint64 { return r.root }

// Size is the size of the image in bytes.
func (r *Reader) Size() int64 { return r.size }

// UUID is the superblock's.
func (r *Reader) UUID() (u [16]byte) {
	copy(u[:], r.superblock[48:64])
	return u
}

// bytes returns n bytes of metadata. They are valid until the next call.
func (r *Reader) bytes(off, n int64) ([]byte, error) {
	if off < 0 || n < 0 || off > r.size || n > r.size-off {
		return nil, badFormat("%d bytes at %d of %d", n, off, r.size)
	}
	if at := off % chunkSize; at+n <= chunkSize {
		c, err := r.chunk(off / chunkSize)
		if err != nil {
			return nil, err
		}
		return c[at : at+n], nil
	}
	r.unaligned = r.unaligned[:0]
	for n > 0 { // a few rounds: nothing is asked for that is over 320 KiB
		c, err := r.chunk(off / chunkSize)
		if err != nil {
			return nil, err
		}
		c = c[off%chunkSize:]
		c = c[:min(n, int64(len(c)))]
		r.unaligned = append(r.unaligned, c...)
		off, n = off+int64(len(c)), n-int64(len(c))
	}
	return r.unaligned, nil
}

func (r *Reader) chunk(i int64) ([]byte, error) {
	if c := r.chunks[i]; c != nil {
		return c, nil
	}
	if len(r.chunks) >= maxChunks {
		clear(r.chunks)
	}
	c := make([]byte, min(chunkSize, r.size-i*chunkSize))
	if n, err := r.src.ReadAt(c, i*chunkSize); n < len(c) {
		if err == io.EOF {
			return nil, badFormat("ends at %d", i*chunkSize+int64(n))
		}
		return nil, err
	}
	r.chunks[i] = c
	return c, nil
}

// Inode reads an inode, a symlink's target and its attributes.
func (r *Reader) Inode(nid uint64) (*Inode, error) {
	if nid > uint64(r.size)>>nidShift {
		return nil, badFormat("inode %d of %d bytes", nid, r.size)
	}
	off := r.meta + int64(nid)<<nidShift
	b, err := r.bytes(off, inodeCompact)
	if err != nil {
		return nil, err
	}
	format := le.Uint16(b[0:])
	if format&^0xf != 0 {
		return nil, badFormat("inode %d has format %#x", nid, format)
	}
	in := &Inode{Nid: nid, Mode: le.Uint16(b[4:])}
	length := int64(inodeCompact)
	var raw uint32
	if format&1 == 0 {
		in.Nlink = uint32(le.Uint16(b[6:]))
		in.Size = int64(le.Uint32(b[8:]))
		raw = le.Uint32(b[16:])
		in.UID, in.GID = uint32(le.Uint16(b[24:])), uint32(le.Uint16(b[26:]))
		in.Mtime, in.MtimeNsec = r.buildTime, r.buildNsec
	} else {
		length = inodeSize
		if b, err = r.bytes(off, length); err != nil {
			return nil, err
		}
		size := le.Uint64(b[8:])
		if size > math.MaxInt64 {
			return nil, badFormat("inode %d has %d bytes", nid, size)
		}
		in.Size = int64(size)
		raw = le.Uint32(b[16:])
		in.UID, in.GID = le.Uint32(b[24:]), le.Uint32(b[28:])
		in.Mtime, in.MtimeNsec = clampTime(le.Uint64(b[32:]), le.Uint32(b[40:]))
		in.Nlink = le.Uint32(b[44:])
	}
	xattrs := int64(0)
	if count := int64(le.Uint16(b[2:])); count > 0 {
		xattrs = xattrHeader + (count-1)*xattrSlot
	}
	if xattrs > 0 {
		if err := r.readXattrs(in, off+length, xattrs); err != nil {
			return nil, err
		}
	}
	switch in.Mode & TypeMask {
	case TypeChar, TypeBlock:
		in.Rdev, in.Size = raw, 0
	case TypeFIFO, TypeSocket:
		in.Size = 0
	case TypeRegular, TypeDir, TypeSymlink:
		if err := r.place(in, int(format>>1), raw, off+length+xattrs); err != nil {
			return nil, err
		}
	default:
		return nil, badFormat("inode %d has mode %o", nid, in.Mode)
	}
	if in.IsSymlink() {
		if in.Target, err = r.target(in); err != nil {
			return nil, err
		}
	}
	return in, nil
}

// clampTime keeps a time of 64 unsigned bits within what Go and tar can say.
func clampTime(sec uint64, nsec uint32) (int64, uint32) {
	const year9999 = 253402300799
	if sec > year9999 || nsec > 999_999_999 {
		return int64(min(sec, year9999)), 0
	}
	return int64(sec), nsec
}

// place checks where an inode's data is.
func (r *Reader) place(in *Inode, layout int, raw uint32, behind int64) error {
	whole := in.Size
	switch layout {
	case layoutPlain:
	case layoutInline:
		tail := in.Size % blockSize
		whole -= tail
		if tail == 0 {
			break
		}
		if behind%blockSize+tail > blockSize || behind+tail > r.size {
			return badFormat("packed data of inode %d crosses a block", in.Nid)
		}
		in.Tail = behind
	default:
		return badFormat("inode %d has data layout %d", in.Nid, layout)
	}
	if whole == 0 {
		return nil
	}
	if whole > r.size || int64(raw)*blockSize+roundUp(whole, blockSize) > r.size || raw == 0 {
		return badFormat("inode %d has %d bytes from block %d", in.Nid, whole, raw)
	}
	in.Block = raw
	return nil
}

func (r *Reader) target(in *Inode) (string, error) {
	if in.Size == 0 || in.Size > MaxTarget {
		return "", badFormat("symlink %d has a target of %d bytes", in.Nid, in.Size)
	}
	b, err := r.dataBlock(in, 0)
	if err != nil {
		return "", err
	}
	for _, c := range b {
		if c == 0 {
			return "", badFormat("symlink %d has a target with a NUL", in.Nid)
		}
	}
	return string(b), nil
}

// dataBlock is block i of an inode's data, short at the end.
func (r *Reader) dataBlock(in *Inode, i int64) ([]byte, error) {
	left := in.Size - i*blockSize
	if left < blockSize && in.Tail != 0 {
		return r.bytes(in.Tail, left)
	}
	return r.bytes((int64(in.Block)+i)*blockSize, min(left, blockSize))
}

// ReadDir calls fn for every entry of a directory but "." and "..", in the
// order of the image, which has to be that of names: lookups depend on it, and
// it rules out a name that is there twice. An error of fn ends it.
func (r *Reader) ReadDir(in *Inode, fn func(name string, nid uint64) error) error {
	if !in.IsDir() {
		return badFormat("inode %d is not a directory", in.Nid)
	}
	last := ""
	var block [blockSize]byte
	for i := int64(0); i*blockSize < in.Size; i++ {
		b, err := r.dataBlock(in, i)
		if err != nil {
			return err
		}
		b = block[:copy(block[:], b)] // fn may read on
		if last, err = dirBlock(b, last, fn); err != nil {
			if errors.Is(err, ErrFormat) {
				return fmt.Errorf("directory %d: %w", in.Nid, err)
			}
			return err
		}
	}
	return nil
}

// dirBlock goes through the entries of one block. Their number is where the
// first name begins.
func dirBlock(b []byte, last string, fn func(string, uint64) error) (string, error) {
	if len(b) < direntSize {
		return "", badFormat("a block of %d bytes", len(b))
	}
	names := int(le.Uint16(b[8:]))
	if names < direntSize || names%direntSize != 0 || names > len(b) {
		return "", badFormat("names begin at %d", names)
	}
	count := names / direntSize
	for i := range count {
		e := b[i*direntSize:]
		start, end := int(le.Uint16(e[8:])), len(b)
		if i+1 < count {
			end = int(le.Uint16(e[direntSize+8:]))
		}
		if start < names || end < start || end > len(b) {
			return "", badFormat("a name from %d to %d", start, end)
		}
		raw := b[start:end]
		if i+1 == count { // the last name ends where the padding begins
			for j, c := range raw {
				if c == 0 {
					raw = raw[:j]
					break
				}
			}
		}
		if len(raw) == 0 || len(raw) > MaxName {
			return "", badFormat("a name of %d bytes", len(raw))
		}
		for _, c := range raw {
			if c == 0 || c == '/' {
				return "", badFormat("name %q", raw)
			}
		}
		name := string(raw)
		if name <= last {
			return "", badFormat("name %q after %q", name, last)
		}
		last = name
		if name == "." || name == ".." {
			continue
		}
		if err := fn(name, le.Uint64(e)); err != nil {
			return "", err
		}
	}
	return last, nil
}

// Content reads a regular file.
func (r *Reader) Content(in *Inode) io.Reader {
	off := int64(in.Block) * blockSize
	if in.Tail == 0 {
		return io.NewSectionReader(r.src, off, in.Size)
	}
	tail := in.Size % blockSize
	return io.MultiReader(io.NewSectionReader(r.src, off, in.Size-tail), io.NewSectionReader(r.src, in.Tail, tail))
}

// Tree reads the whole image into a tree for Write. Regular files are not
// read: their nodes point into the image, which has to stay open until the
// tree is written. visit, if not nil, is called before each name is added, so
// that its error can bound a hostile image: a few blocks can hold an endless
// number of hard links, and many files of the same blocks.
func (r *Reader) Tree(visit func(name string, in *Inode) error) (*Node, error) {
	t := &treeReader{Reader: r, visit: visit, nodes: map[uint64]*Node{}}
	in, err := r.Inode(r.root)
	if err != nil {
		return nil, err
	}
	if !in.IsDir() {
		return nil, badFormat("the root is not a directory")
	}
	return t.node(in, 0)
}

type treeReader struct {
	*Reader
	visit func(string, *Inode) error
	nodes map[uint64]*Node
}

func (t *treeReader) node(in *Inode, depth int) (*Node, error) {
	n := &Node{Mode: in.Mode, UID: in.UID, GID: in.GID, Mtime: in.Mtime, MtimeNsec: in.MtimeNsec, Rdev: in.Rdev, Target: in.Target}
	t.nodes[in.Nid] = n
	switch {
	case in.IsRegular():
		n.Size = in.Size
		n.Open = func() (io.ReadCloser, error) { return io.NopCloser(t.Content(in)), nil }
		if in.Size > 0 && in.Tail == 0 {
			n.from, n.fromOff = t.Reader, int64(in.Block)*blockSize
		}
	case in.IsDir():
		n.children = map[string]*Node{}
		if depth >= maxDepth {
			return nil, badFormat("more than %d levels of directories", maxDepth)
		}
		return n, t.ReadDir(in, func(name string, nid uint64) error { return t.child(n, name, nid, depth) })
	}
	return n, nil
}

func (t *treeReader) child(dir *Node, name string, nid uint64, depth int) error {
	old := t.nodes[nid]
	if old != nil && old.IsDir() {
		return badFormat("directory %d has two names", nid) // or is its own ancestor
	}
	in, err := t.Inode(nid)
	if err != nil {
		return err
	}
	if t.visit != nil {
		if err := t.visit(name, in); err != nil {
			return err
		}
	}
	if old == nil {
		if old, err = t.node(in, depth+1); err != nil {
			return err
		}
	}
	dir.children[name] = old
	return nil
}
