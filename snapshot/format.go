package snapshot

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"path"
	"strings"

	"github.com/cove-sandbox/cove/sandbox"
)

// The manifest, version 1; docs/state-format.md is the promise. Numbers are
// uvarints unless said; a string is its length and its bytes.
//
//	"COVESNAP" version kind
//	blobs:   count, then each: sha256[32] size
//	entries: count, then each as below, in order of path ("/" before any other byte)
//	nothing behind
//
//	filesystem: type path mode uid gid seconds(zigzag) nanoseconds uname gname
//	            records: count, then each: key value, in order of key
//	            file: size, and if that is not 0: blob, offset
//	            hard link: index of the entry · symlink: target · device: major minor
//	memory:     name mode size, then per chunk of 4 MiB: 0 for zeros, or blob+1
const (
	magic   = "COVESNAP"
	version = 1

	kindFilesystem = 1
	kindMemory     = 2
)

// The types of entries are those of tar.
const (
	typeFile    = '0'
	typeLink    = '1'
	typeSymlink = '2'
	typeChar    = '3'
	typeBlock   = '4'
	typeDir     = '5'
	typeFifo    = '6'
)

type blobRef struct {
	sum  [sha256.Size]byte
	size int64
}

type entry struct {
	typ          byte
	path         string // "" is the root; else clean and relative
	mode         uint32 // 12 bits
	uid, gid     uint32
	sec          int64
	nsec         uint32
	uname, gname string
	records      []record // in order of key
	size         int64    // file
	blob         int      // file with a size
	offset       int64    // in the blob
	target       int      // hard link: index of the entry
	symlink      string
	major, minor uint32
}

type record struct{ key, value string }

// memoryFile is a file of a checkpoint.
type memoryFile struct {
	name   string
	mode   uint32
	size   int64
	chunks []int // index of the blob, or -1 for zeros
}

type content struct {
	kind    Kind
	blobs   []blobRef
	entries []entry      // filesystem
	files   []memoryFile // memory
}

func (c *content) size() (n int64) {
	for i := range c.entries {
		n += c.entries[i].size
	}
	for i := range c.files {
		n += c.files[i].size
	}
	return n
}

// comparePaths orders a directory before what is in it, and that before
// anything else: what lies below a path follows it at once.
func comparePaths(a, b string) int {
	for i := range min(len(a), len(b)) {
		if x, y := a[i], b[i]; x != y {
			if x == '/' {
				return -1
			}
			if y == '/' {
				return 1
			}
			return int(x) - int(y)
		}
	}
	return len(a) - len(b)
}

// checkPath accepts the path of an entry: relative, clean, inside. The root is "".
func checkPath(p string) error {
	if p == "" {
		return nil
	}
	if len(p) > maxPath || strings.ContainsRune(p, 0) || p != path.Clean(p) || p == "." || strings.HasPrefix(p, "/") || p == ".." || strings.HasPrefix(p, "../") {
		return fmt.Errorf("path %.100q is not clean and relative", p)
	}
	for name := range strings.SplitSeq(p, "/") {
		if len(name) > maxName {
			return fmt.Errorf("path %.100q has a name above %d bytes", p, maxName)
		}
	}
	return nil
}

func encode(c *content) []byte {
	e := encoder{b: append(make([]byte, 0, 1<<16), magic...)}
	kind := byte(kindFilesystem)
	if c.kind == KindMemory {
		kind = kindMemory
	}
	e.b = append(e.b, version, kind)
	e.int(int64(len(c.blobs)))
	for i := range c.blobs {
		e.b = append(e.b, c.blobs[i].sum[:]...)
		e.int(c.blobs[i].size)
	}
	if c.kind == KindMemory {
		e.int(int64(len(c.files)))
		for i := range c.files {
			e.file(&c.files[i])
		}
		return e.b
	}
	e.int(int64(len(c.entries)))
	for i := range c.entries {
		e.entry(&c.entries[i])
	}
	return e.b
}

type encoder struct{ b []byte }

func (e *encoder) int(v int64) { e.b = binary.AppendUvarint(e.b, uint64(v)) }

func (e *encoder) str(s string) {
	e.int(int64(len(s)))
	e.b = append(e.b, s...)
}

func (e *encoder) entry(n *entry) {
	e.b = append(e.b, n.typ)
	e.str(n.path)
	e.int(int64(n.mode))
	e.int(int64(n.uid))
	e.int(int64(n.gid))
	e.b = binary.AppendVarint(e.b, n.sec)
	e.int(int64(n.nsec))
	e.str(n.uname)
	e.str(n.gname)
	e.int(int64(len(n.records)))
	for _, r := range n.records {
		e.str(r.key)
		e.str(r.value)
	}
	switch n.typ {
	case typeFile:
		e.int(n.size)
		if n.size > 0 {
			e.int(int64(n.blob))
			e.int(n.offset)
		}
	case typeLink:
		e.int(int64(n.target))
	case typeSymlink:
		e.str(n.symlink)
	case typeChar, typeBlock:
		e.int(int64(n.major))
		e.int(int64(n.minor))
	}
}

func (e *encoder) file(f *memoryFile) {
	e.str(f.name)
	e.int(int64(f.mode))
	e.int(f.size)
	for _, c := range f.chunks {
		e.int(int64(c + 1))
	}
}

// decode reads a manifest that may be forged: what it returns is safe to act
// on, and has taken memory in proportion to its length only.
func decode(raw []byte) (*content, error) {
	if len(raw) < len(magic)+2 || !bytes.HasPrefix(raw, []byte(magic)) {
		return nil, &sandbox.Error{Class: sandbox.Invalid, Msg: "not the manifest of a snapshot"}
	}
	if v := raw[len(magic)]; v != version {
		return nil, (&sandbox.Error{Class: sandbox.Unsupported, Msg: fmt.Sprintf("manifest of version %d", v)}).
			WithHint("written by a newer cove: use that")
	}
	d := decoder{b: raw[len(magic)+2:]}
	c := &content{}
	d.blobs(c)
	switch kind := raw[len(magic)+1]; kind {
	case kindFilesystem:
		c.kind = KindFilesystem
		d.entries(c)
	case kindMemory:
		c.kind = KindMemory
		d.files(c)
	default:
		d.fail("kind %d", kind)
	}
	if d.err == nil && len(d.b) > 0 {
		d.fail("%d bytes behind the end", len(d.b))
	}
	if d.err != nil {
		return nil, &sandbox.Error{Class: sandbox.Corrupt, Msg: "the manifest is not valid", Err: d.err}
	}
	return c, nil
}
