package snapshot

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
)

// decoder reads on after an error as if everything were 0, so that the code
// that uses it has the shape of the format; loops look at err.
type decoder struct {
	b   []byte
	err error
}

func (d *decoder) fail(format string, args ...any) {
	if d.err == nil {
		d.err = fmt.Errorf(format, args...)
	}
	d.b = nil
}

func (d *decoder) byte() byte {
	if len(d.b) == 0 {
		d.fail("it ends too early")
		return 0
	}
	v := d.b[0]
	d.b = d.b[1:]
	return v
}

// int reads a number of at most limit. Only the shortest form of a number is
// accepted: a content has one manifest, and a manifest one name.
func (d *decoder) int(what string, limit int64) int64 {
	v, n := binary.Uvarint(d.b)
	switch {
	case n <= 0 || n > 1 && d.b[n-1] == 0:
		d.fail("%s: not a number", what)
		return 0
	case v > uint64(limit):
		d.fail("%s: %d is above %d", what, v, limit)
		return 0
	}
	d.b = d.b[n:]
	return int64(v)
}

func (d *decoder) signed(what string) int64 {
	v, n := binary.Varint(d.b)
	if n <= 0 || n > 1 && d.b[n-1] == 0 {
		d.fail("%s: not a number", what)
		return 0
	}
	d.b = d.b[n:]
	return v
}

// count reads how many things follow that take at least size bytes each, so
// that nothing is allocated for what cannot be there.
func (d *decoder) count(what string, limit int64, size int) int {
	return int(d.int(what, min(limit, int64(len(d.b)/size))))
}

func (d *decoder) str(what string, limit int64) string {
	n := d.int(what, min(limit, int64(len(d.b))))
	if n > int64(len(d.b)) { // the number itself was some of what was left
		d.fail("%s: it ends too early", what)
		return ""
	}
	s := string(d.b[:n])
	d.b = d.b[n:]
	return s
}

func (d *decoder) blobs(c *content) {
	n := d.count("blobs", maxBlobs, 33)
	c.blobs = make([]blobRef, 0, n)
	seen := make(map[[32]byte]struct{}, n)
	for range n {
		var b blobRef
		if len(d.b) < len(b.sum) {
			d.fail("it ends too early")
			return
		}
		copy(b.sum[:], d.b)
		d.b = d.b[len(b.sum):]
		b.size = d.int("size of a blob", maxTotal)
		if _, twice := seen[b.sum]; twice {
			d.fail("blob %x is there twice", b.sum)
		}
		seen[b.sum] = struct{}{}
		if d.err != nil {
			return
		}
		c.blobs = append(c.blobs, b)
	}
}

const entryMin = 11 // bytes of the smallest entry

func (d *decoder) entries(c *content) {
	n := d.count("entries", maxEntries, entryMin)
	c.entries = make([]entry, 0, min(n, 1<<16)) // an entry takes ten times its bytes: grow as they prove real
	check := checker{c: c, used: make([]bool, len(c.blobs))}
	for range n {
		e := d.entry(c)
		if d.err == nil {
			if err := check.entry(&e); err != nil {
				d.fail("entry %d: %w", len(c.entries), err)
			}
		}
		if d.err != nil {
			return
		}
		c.entries = append(c.entries, e)
	}
	for i, used := range check.used {
		if !used && d.err == nil {
			d.fail("blob %x is not used", c.blobs[i].sum)
		}
	}
}

func (d *decoder) entry(c *content) (e entry) {
	e.typ = d.byte()
	e.path = d.str("path", maxPath)
	e.mode = uint32(d.int("mode", 0o7777))
	e.uid = uint32(d.int("uid", 1<<32-1))
	e.gid = uint32(d.int("gid", 1<<32-1))
	e.sec = d.signed("seconds")
	e.nsec = uint32(d.int("nanoseconds", 1e9-1))
	e.uname = d.str("user", maxName)
	e.gname = d.str("group", maxName)
	n := d.count("records", maxRecords, 2)
	for range n {
		r := record{d.str("key of a record", maxRecords), d.str("record", maxRecords)}
		if d.err != nil {
			return e
		}
		e.records = append(e.records, r)
	}
	switch e.typ {
	case typeFile:
		if e.size = d.int("size", maxFile); e.size > 0 {
			e.blob = int(d.int("blob", int64(len(c.blobs)-1)))
			e.offset = d.int("offset", maxTotal)
		}
	case typeLink:
		e.target = int(d.int("entry of a link", int64(len(c.entries)-1)))
	case typeSymlink:
		e.symlink = d.str("target", maxPath)
	case typeChar, typeBlock:
		e.major = uint32(d.int("major", 1<<12-1))
		e.minor = uint32(d.int("minor", 1<<20-1))
	case typeDir, typeFifo:
	default:
		d.fail("type %q", e.typ)
	}
	return e
}

// checker holds what an entry must be true to: those before it.
type checker struct {
	c     *content
	used  []bool
	total int64
	pack  int   // 1 + the blob whose parts are being used
	end   int64 // in pack
}

func (k *checker) entry(e *entry) error {
	if err := checkPath(e.path); err != nil {
		return err
	}
	if e.path == "" && e.typ != typeDir {
		return errors.New("the root is not a directory")
	}
	if n := len(k.c.entries); n > 0 {
		prev := &k.c.entries[n-1]
		if comparePaths(prev.path, e.path) >= 0 {
			return fmt.Errorf("path %.100q is not behind %.100q", e.path, prev.path)
		}
		// What lies below a path follows it at once, so one look is enough: a
		// file below a symlink would be written where that points to.
		if prev.typ != typeDir && strings.HasPrefix(e.path, prev.path+"/") {
			return fmt.Errorf("path %.100q is below something that is not a directory", e.path)
		}
	}
	if strings.ContainsRune(e.uname+e.gname+e.symlink, 0) {
		return errors.New("a name has a zero byte")
	}
	total := 0
	for i, r := range e.records {
		total += len(r.key) + len(r.value)
		if !validRecord(r) || i > 0 && e.records[i-1].key >= r.key || total > maxRecords {
			return fmt.Errorf("record %.100q", r.key)
		}
	}
	switch e.typ {
	case typeFile:
		return k.content(e)
	case typeLink:
		if t := k.c.entries[e.target].typ; t == typeDir || t == typeLink {
			return errors.New("a hard link to a directory or a link")
		}
	case typeSymlink:
		if e.symlink == "" {
			return errors.New("a symlink to nowhere")
		}
	}
	return nil
}

// content checks where the bytes of a file come from: a blob of its own, or the
// next part of a pack. Parts in another order would let a small manifest make
// its reader read a large blob over and over.
func (k *checker) content(e *entry) error {
	if k.total += e.size; k.total > maxTotal {
		return fmt.Errorf("more than %d bytes in all", int64(maxTotal))
	}
	if e.size == 0 {
		return nil
	}
	size := k.c.blobs[e.blob].size
	if e.offset > size || e.size > size-e.offset {
		return errors.New("content outside of its blob")
	}
	k.used[e.blob] = true
	if e.offset == 0 && e.size == size {
		return nil
	}
	if k.pack != e.blob+1 {
		if e.offset != 0 {
			return errors.New("the parts of a pack are not in order")
		}
		if k.pack > e.blob+1 {
			return errors.New("packs are not in order")
		}
		k.pack, k.end = e.blob+1, 0
	}
	if e.offset != k.end {
		return errors.New("the parts of a pack are not in order")
	}
	k.end += e.size
	return nil
}

// validRecord is what archive/tar can write and does not set itself.
func validRecord(r record) bool {
	switch r.key {
	case "", "path", "linkpath", "size", "uid", "gid", "uname", "gname", "mtime", "atime", "ctime", "charset", "comment":
		return false
	}
	return r.value != "" && !strings.ContainsAny(r.key, "=\x00") && !strings.HasPrefix(r.key, "GNU.sparse.")
}

// files are in order of name, each with one chunk per started 4 MiB.
func (d *decoder) files(c *content) {
	n := d.count("files", maxEntries, 3)
	used := make([]bool, len(c.blobs))
	total := int64(0)
	for range n {
		f := memoryFile{name: d.str("name", maxName), mode: uint32(d.int("mode", 0o777)), size: d.int("size", maxFile)}
		if total += f.size; total > maxTotal {
			d.fail("more than %d bytes in all", int64(maxTotal))
		}
		if err := checkPath(f.name); err != nil || f.name == "" || strings.Contains(f.name, "/") {
			d.fail("file name %.100q", f.name)
		}
		if len(c.files) > 0 && c.files[len(c.files)-1].name >= f.name {
			d.fail("file %.100q is out of order", f.name)
		}
		chunks := (f.size + chunkSize - 1) / chunkSize
		if d.err == nil && chunks > int64(len(d.b)) {
			d.fail("it ends too early")
		}
		if d.err != nil {
			return
		}
		f.chunks = make([]int, chunks)
		for i := range f.chunks {
			b := int(d.int("blob", int64(len(c.blobs)))) - 1
			f.chunks[i] = b
			if d.err != nil {
				return
			}
			if b < 0 {
				continue
			}
			used[b] = true
			if want := min(chunkSize, f.size-int64(i)*chunkSize); c.blobs[b].size != want {
				d.fail("a chunk of %d bytes, not %d", c.blobs[b].size, want)
				return
			}
		}
		c.files = append(c.files, f)
	}
	for i, u := range used {
		if !u && d.err == nil {
			d.fail("blob %x is not used", c.blobs[i].sum)
		}
	}
}
