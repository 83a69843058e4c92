package sandbox

import "time"

// LayerEntry is one name in the writable layer of a sandbox. Names begin with a slash;
// that of the root is "".
type LayerEntry struct {
	Name     string `json:"n,omitempty"`
	Mode     uint32 `json:"m"` // with the type, as in st_mode
	UID      uint32 `json:"u,omitempty"`
	GID      uint32 `json:"g,omitempty"`
	Size     int64  `json:"s,omitempty"`
	Mtime    int64  `json:"t,omitempty"` // nanoseconds by the clock inside
	Ctime    int64  `json:"c,omitempty"` // the same; code inside cannot choose it. 0 = not known
	Ino      uint64 `json:"i,omitempty"`
	Target   string `json:"l,omitempty"` // of a symlink
	Whiteout bool   `json:"w,omitempty"` // what the image has here is removed
	Opaque   bool   `json:"o,omitempty"` // what the image has in this directory is removed
	Hash     []byte `json:"h,omitempty"` // SHA-256 of a file's content, where it was wanted
}

// UpperLayer is what a sandbox has over its image. nil is nothing.
type UpperLayer struct {
	Entries   []LayerEntry `json:"entries"` // a directory before what is in it
	Truncated bool         `json:"truncated,omitempty"`
}

// ChangeKind says what became of a path.
type ChangeKind string

const (
	Added    ChangeKind = "added"
	Modified ChangeKind = "modified"
	Deleted  ChangeKind = "deleted" // with all that was in it
)

// FileState is a path on one side of a comparison.
type FileState struct {
	Type   FileType `json:"type"`
	Size   int64    `json:"size,omitempty"`
	Mode   uint32   `json:"mode"` // 07777
	UID    uint32   `json:"uid,omitempty"`
	GID    uint32   `json:"gid,omitempty"`
	Target string   `json:"target,omitempty"` // of a symlink
	Hash   string   `json:"hash,omitempty"`   // SHA-256 in hex, where it was wanted
}

// Change is one path that differs.
type Change struct {
	Path   string     `json:"path"`
	Kind   ChangeKind `json:"kind"`
	What   []string   `json:"what,omitempty"`   // of Modified: content, type, mode, owner, target
	Before *FileState `json:"before,omitempty"` // nil of what was added
	Now    *FileState `json:"now,omitempty"`    // nil of what was deleted
}

// Diff is what changed in the files of a sandbox. Volumes, and what is mounted, are no
// part of it, nor extended attributes and times.
type Diff struct {
	Since   string   `json:"since"`             // create, image, or the id of a snapshot
	Changes []Change `json:"changes,omitempty"` // in the order of paths; the first ones
	// All of them, listed or not.
	Added    int64 `json:"added"`
	Modified int64 `json:"modified"`
	Deleted  int64 `json:"deleted"`
	Bytes    int64 `json:"bytes"` // of files that were added or have other content
	// Omitted says that Changes has not all of them, Truncated that not all was
	// looked at: there were too many, or it took too long.
	Omitted   bool          `json:"omitted,omitempty"`
	Truncated bool          `json:"truncated,omitempty"`
	Took      time.Duration `json:"took"`

	listed int // bytes of the paths in Changes
}

// Bounds of a diff.
const (
	DiffEntries    = 1000      // changes in one answer unless told
	MaxDiffEntries = 100_000   // in one answer
	MaxLayer       = 1_000_000 // names that are looked at
	MaxDiffBytes   = 4 * GiB   // of content that is read to compare it
	DiffTime       = 30 * time.Second
	maxDiffPaths   = 8 << 20 // bytes of the paths that are listed: those of a deep tree are long
)

// What a diff can be since, beside a snapshot.
const (
	SinceCreate = "create" // what it was created from, or last reset or restored to
	SinceReset  = "reset"  // the same
	SinceImage  = "image"  // the image that its files are over
)

// DiffRequest asks what changed in a sandbox.
type DiffRequest struct {
	Since    string    `json:"since"`              // SinceCreate, SinceImage, or "" with Snapshot or Mark
	Snapshot *Snapshot `json:"snapshot,omitempty"` // a filesystem snapshot
	Mark     string    `json:"mark,omitempty"`     // one that the node was told to set
	Hash     bool      `json:"hash,omitempty"`
	Limit    int       `json:"limit,omitempty"` // changes that are listed; 0 = DiffEntries
}

// Add counts a change and keeps it while there is room.
func (d *Diff) Add(c Change, limit int) {
	switch c.Kind {
	case Added:
		d.Added++
	case Modified:
		d.Modified++
	case Deleted:
		d.Deleted++
	}
	if c.Now != nil && c.Now.Type == Regular && (c.Kind == Added || len(c.What) > 0 && (c.What[0] == "content" || c.What[0] == "type")) {
		d.Bytes += c.Now.Size
	}
	if len(d.Changes) >= limit || d.listed+len(c.Path) > maxDiffPaths {
		d.Omitted = true
		return
	}
	d.listed += len(c.Path)
	d.Changes = append(d.Changes, c)
}
