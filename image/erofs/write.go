package erofs

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"sort"
)

// On-disk constants; see https://docs.kernel.org/filesystems/erofs.html.
const (
	blockBits  = 12
	blockSize  = 1 << blockBits
	superMagic = 0xE0F5E1E2
	superOff   = 1024
	superSize  = 128
	inodeSize  = 64 // extended inodes only: compact ones have no mtime
	direntSize = 12
	nidShift   = 5

	layoutPlain  = 0
	layoutInline = 2

	compatChecksum = 1
	compatMtime    = 2
)

var le = binary.LittleEndian

// RangeWriter is an output that can copy out of another file without the bytes
// passing through this process, or, on a file system with shared extents,
// without being copied at all. Write uses it for files that a Reader found
// whole in another image, neighbours in one range.
type RangeWriter interface {
	io.Writer
	// CopyRange appends n bytes of src from off on.
	CopyRange(src io.ReaderAt, off, n int64) error
}

// Write writes the file system below root to w, front to back in one pass, and
// returns its size. The uuid goes into the superblock as it is. Write uses the
// tree's nodes for its own notes: a tree is written once.
func Write(w io.Writer, root *Node, uuid [16]byte) (size int64, err error) {
	if !root.IsDir() {
		return 0, fmt.Errorf("erofs: the root is not a directory")
	}
	p := &plan{}
	if err := p.collect(root, root, 0); err != nil {
		return 0, err
	}
	if err := p.place(); err != nil {
		return 0, err
	}
	out := &image{w: bufio.NewWriterSize(w, 1<<20)}
	out.ranges, _ = w.(RangeWriter)
	if err := p.writeMeta(out, uuid); err != nil {
		return 0, err
	}
	if err := p.writeData(out); err != nil {
		return 0, err
	}
	return out.pos, out.w.Flush()
}

// plan decides where everything goes before the first byte is written.
type plan struct {
	nodes      []*Node // each once, depth first in name order; root first, because root_nid has 16 bits
	metaBlocks int64
	blocks     int64
}

// maxDepth bounds the recursion over a tree made from hostile input. A Linux
// path has at most 4096 bytes, so nothing deeper could be named.
const maxDepth = 2048

func (p *plan) collect(n, parent *Node, depth int) error {
	if n.seen {
		if n.IsDir() {
			return fmt.Errorf("erofs: a directory with two names")
		}
		n.nlink++
		return nil
	}
	if depth > maxDepth {
		return fmt.Errorf("erofs: more than %d levels of directories", maxDepth)
	}
	n.seen, n.nlink, n.parent = true, 1, parent
	p.nodes = append(p.nodes, n)
	if n.IsSymlink() && (n.Target == "" || len(n.Target) > MaxTarget) {
		return fmt.Errorf("erofs: symlink target of %d bytes", len(n.Target))
	}
	if !n.IsDir() {
		return nil
	}
	n.nlink = 2
	for _, name := range n.Names() {
		if name == "" || name == "." || name == ".." || len(name) > MaxName {
			return fmt.Errorf("erofs: bad name %q", name)
		}
		c := n.children[name]
		if c.IsDir() {
			n.nlink++
		}
		if err := p.collect(c, n, depth+1); err != nil {
			return err
		}
	}
	return nil
}

// place gives each node its inode slot and its data blocks.
func (p *plan) place() error {
	off := int64(superOff + superSize)
	for _, n := range p.nodes {
		switch {
		case n.IsDir():
			n.Size = dirSize(n)
		case n.IsSymlink():
			n.Size = int64(len(n.Target))
		case !n.IsRegular():
			n.Size = 0
		}
		tail := n.Size % blockSize
		n.inline = !n.IsRegular() && tail > 0 && inodeSize+tail <= blockSize
		need := int64(inodeSize)
		if n.inline {
			need += tail
		}
		if off%blockSize+need > blockSize {
			off = roundUp(off, blockSize)
		}
		n.nid = uint64(off) >> nidShift
		off = roundUp(off+need, 1<<nidShift)
	}
	p.metaBlocks = roundUp(off, blockSize) / blockSize
	next := p.metaBlocks
	for _, n := range p.nodes {
		blocks := dataBlocks(n)
		if blocks == 0 {
			continue
		}
		n.block = uint32(next)
		next += blocks
		if next > math.MaxUint32 {
			return fmt.Errorf("erofs: image over 16 TiB")
		}
	}
	p.blocks = next
	return nil
}

// dataBlocks counts the whole blocks of a node's data that are not packed
// behind its inode.
func dataBlocks(n *Node) int64 {
	if n.inline {
		return n.Size / blockSize
	}
	return roundUp(n.Size, blockSize) / blockSize
}

func roundUp(n, to int64) int64 { return (n + to - 1) / to * to }

func (p *plan) writeMeta(out *image, uuid [16]byte) error {
	var sb [superSize]byte
	le.PutUint32(sb[0:], superMagic)
	le.PutUint32(sb[8:], compatChecksum|compatMtime)
	sb[12] = blockBits
	le.PutUint16(sb[14:], uint16(p.nodes[0].nid))
	le.PutUint64(sb[16:], uint64(len(p.nodes)))
	// build_time stays 0: it is not part of the content.
	le.PutUint32(sb[36:], uint32(p.blocks))
	copy(sb[48:64], uuid[:])

	out.zeros(superOff)
	out.write(sb[:])
	var ino [inodeSize]byte
	for i, n := range p.nodes {
		out.zeros(int64(n.nid)<<nidShift - out.pos)
		layout := uint16(layoutPlain)
		if n.inline {
			layout = layoutInline
		}
		le.PutUint16(ino[0:], 1|layout<<1)
		le.PutUint16(ino[4:], n.Mode)
		le.PutUint64(ino[8:], uint64(n.Size))
		le.PutUint32(ino[16:], n.block)
		if t := n.Mode & TypeMask; t == TypeChar || t == TypeBlock {
			le.PutUint32(ino[16:], n.Rdev)
		}
		le.PutUint32(ino[20:], uint32(i+1))
		le.PutUint32(ino[24:], n.UID)
		le.PutUint32(ino[28:], n.GID)
		le.PutUint64(ino[32:], uint64(max(n.Mtime, 0)))
		le.PutUint32(ino[40:], n.MtimeNsec)
		le.PutUint32(ino[44:], n.nlink)
		out.write(ino[:])
		if n.inline {
			data := nodeData(n)
			out.write(data[len(data)-int(n.Size%blockSize):])
		}
	}
	out.zeros(p.metaBlocks*blockSize - out.pos)
	return out.err
}

func (p *plan) writeData(out *image) error {
	for _, n := range p.nodes {
		blocks := dataBlocks(n)
		if blocks == 0 {
			continue
		}
		start := out.pos
		if start != int64(n.block)*blockSize {
			return fmt.Errorf("erofs: laid out block %d at offset %d", n.block, start)
		}
		switch {
		case n.from != nil && out.ranges != nil:
			out.copyRange(n.from, n.fromOff, blocks*blockSize)
		case n.IsRegular():
			if err := copyContent(out, n); err != nil {
				return err
			}
		default:
			data := nodeData(n)
			out.write(data[:min(int64(len(data)), blocks*blockSize)])
		}
		out.zeros(start + blocks*blockSize - out.pos)
		if out.err != nil {
			return out.err
		}
	}
	out.flushRange()
	return out.err
}

// copyContent streams a file's content, which must be as long as was said.
func copyContent(out *image, n *Node) (err error) {
	r, err := n.Open()
	if err != nil {
		return err
	}
	defer r.Close()
	got, err := io.Copy(out, io.LimitReader(r, n.Size))
	if err != nil {
		return err
	}
	if got != n.Size {
		return fmt.Errorf("erofs: content of %d bytes where %d were announced: %w", got, n.Size, io.ErrUnexpectedEOF)
	}
	return nil
}

// nodeData is the data of a directory or symlink.
func nodeData(n *Node) []byte {
	if n.IsSymlink() {
		return []byte(n.Target)
	}
	return dirData(n)
}

// dirNames are a directory's names with "." and "..", in byte order: lookups
// are binary searches. ("!" sorts before ".", so they are not always first.)
func dirNames(n *Node) []string {
	names := make([]string, 0, len(n.children)+2)
	names = append(names, ".", "..")
	for name := range n.children {
		names = append(names, name)
	}
	sort.Strings(names)
	return names
}

// dirBlocks cuts sorted names into runs that fit a block each.
func dirBlocks(names []string) [][]string {
	var runs [][]string
	start, used := 0, 0
	for i, name := range names {
		need := direntSize + len(name)
		if used+need > blockSize {
			runs = append(runs, names[start:i])
			start, used = i, 0
		}
		used += need
	}
	return append(runs, names[start:])
}

func dirSize(n *Node) int64 {
	runs := dirBlocks(dirNames(n))
	size := int64(len(runs)-1) * blockSize
	for _, name := range runs[len(runs)-1] {
		size += int64(direntSize + len(name))
	}
	return size
}

// dirData is a directory's data: per block, the fixed-size entries and then
// their names. All blocks but the last are padded with zeros.
func dirData(n *Node) []byte {
	var data []byte
	for i, run := range dirBlocks(dirNames(n)) {
		if i > 0 {
			data = append(data, make([]byte, roundUp(int64(len(data)), blockSize)-int64(len(data)))...)
		}
		nameOff := len(run) * direntSize
		for _, name := range run {
			var c *Node
			switch name {
			case ".":
				c = n
			case "..":
				c = n.parent
			default:
				c = n.children[name]
			}
			data = le.AppendUint64(data, c.nid)
			data = le.AppendUint16(data, uint16(nameOff))
			data = append(data, direntType(c), 0)
			nameOff += len(name)
		}
		for _, name := range run {
			data = append(data, name...)
		}
	}
	return data
}

func direntType(n *Node) byte {
	switch n.Mode & TypeMask {
	case TypeRegular:
		return 1
	case TypeDir:
		return 2
	case TypeChar:
		return 3
	case TypeBlock:
		return 4
	case TypeFIFO:
		return 5
	case TypeSocket:
		return 6
	case TypeSymlink:
		return 7
	}
	return 0
}

// image is the output. It holds the first block back until it is full, to put
// the superblock's checksum in, so that everything else streams. The first
// error sticks.
type image struct {
	w    *bufio.Writer
	head []byte
	pos  int64
	err  error

	// A range not yet copied, because the next file may continue it.
	ranges  RangeWriter
	from    *Reader
	fromOff int64
	pending int64
}

// copyRange appends n bytes of another image.
func (o *image) copyRange(from *Reader, off, n int64) {
	if o.from != from || o.fromOff+o.pending != off {
		o.flushRange()
		o.from, o.fromOff = from, off
	}
	o.pending += n
	o.pos += n
}

func (o *image) flushRange() {
	if o.pending > 0 && o.err == nil {
		if o.err = o.w.Flush(); o.err == nil {
			o.err = o.ranges.CopyRange(o.from.src, o.fromOff, o.pending)
		}
	}
	o.from, o.pending = nil, 0
}

func (o *image) Write(b []byte) (int, error) {
	o.write(b)
	return len(b), o.err
}

func (o *image) write(b []byte) {
	o.flushRange()
	if o.err != nil {
		return
	}
	o.pos += int64(len(b))
	if free := blockSize - len(o.head); free > 0 {
		take := min(free, len(b))
		o.head = append(o.head, b[:take]...)
		b = b[take:]
		if len(o.head) < blockSize {
			return
		}
		// The format's CRC32C is the one without the final inversion.
		sum := ^crc32.Checksum(o.head[superOff:], crc32.MakeTable(crc32.Castagnoli))
		le.PutUint32(o.head[superOff+4:], sum)
		_, o.err = o.w.Write(o.head)
	}
	if o.err == nil {
		_, o.err = o.w.Write(b)
	}
}

func (o *image) zeros(n int64) {
	var zero [blockSize]byte
	for n > 0 && o.err == nil {
		k := min(n, blockSize)
		o.write(zero[:k])
		n -= k
	}
}
