package erofs

import (
	"io"
	"sort"
)

// File types, as in st_mode.
const (
	TypeMask    = 0o170000
	TypeFIFO    = 0o010000
	TypeChar    = 0o020000
	TypeDir     = 0o040000
	TypeBlock   = 0o060000
	TypeRegular = 0o100000
	TypeSymlink = 0o120000
	TypeSocket  = 0o140000
)

// Limits of the format as the sentry reads it.
const (
	MaxName   = 255  // bytes of one path component
	MaxTarget = 4095 // bytes of a symlink's target: the sentry cuts at a page less one
)

// Node is one inode. The same node under two names is a hard link; a directory
// has one name. Not safe for concurrent use.
type Node struct {
	Mode      uint16 // type and 07777 bits
	UID, GID  uint32
	Mtime     int64 // seconds; before 1970 becomes 1970
	MtimeNsec uint32

	Target string // of a symlink
	Rdev   uint32 // of a device, as MakeRdev has it

	// Open gives the content of a regular file, exactly Size bytes. It is
	// called once, while the image is written.
	Size int64
	Open func() (io.ReadCloser, error)

	// Where the content already lies block by block, padding included; set by
	// Reader.Tree, used where the output can copy ranges.
	from    *Reader
	fromOff int64

	children map[string]*Node // of a directory

	// Set by Write.
	parent *Node
	nid    uint64
	nlink  uint32
	block  uint32
	inline bool
	seen   bool
}

// NewDir makes an empty directory.
func NewDir(perm uint16, uid, gid uint32) *Node {
	return &Node{Mode: TypeDir | perm&0o7777, UID: uid, GID: gid, children: map[string]*Node{}}
}

// MakeRdev packs a device number as Linux' new_encode_dev does; false if it
// does not fit.
func MakeRdev(major, minor int64) (rdev uint32, ok bool) {
	if major < 0 || major > 0xfff || minor < 0 || minor > 0xfffff {
		return 0, false
	}
	return uint32(minor&0xff | major<<8 | minor&^0xff<<12), true
}

func (n *Node) IsDir() bool     { return n.Mode&TypeMask == TypeDir }
func (n *Node) IsRegular() bool { return n.Mode&TypeMask == TypeRegular }
func (n *Node) IsSymlink() bool { return n.Mode&TypeMask == TypeSymlink }

// Child finds an entry of a directory; nil if there is none.
func (n *Node) Child(name string) *Node { return n.children[name] }

// Put adds or replaces an entry.
func (n *Node) Put(name string, c *Node) { n.children[name] = c }

// Remove takes an entry away.
func (n *Node) Remove(name string) { delete(n.children, name) }

// Len is the number of entries.
func (n *Node) Len() int { return len(n.children) }

// Names lists the entries in byte order, the order of the format.
func (n *Node) Names() []string {
	names := make([]string, 0, len(n.children))
	for name := range n.children {
		names = append(names, name)
	}
	sort.Strings(names)
	return names
}
