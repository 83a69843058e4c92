package sandbox

import "time"

// FileType is the kind of a directory entry.
type FileType string

const (
	Regular   FileType = "file"
	Directory FileType = "dir"
	Symlink   FileType = "symlink"
	OtherFile FileType = "other" // device, fifo, socket
)

// FileInfo describes one path inside a sandbox. Symlinks are described, not
// followed.
type FileInfo struct {
	Path    string    `json:"path"`
	Name    string    `json:"name"`
	Type    FileType  `json:"type"`
	Size    int64     `json:"size"`
	Mode    uint32    `json:"mode"` // permission bits with setuid, setgid and sticky (07777)
	UID     uint32    `json:"uid"`
	GID     uint32    `json:"gid"`
	Owner   string    `json:"owner,omitempty"` // by the sandbox's /etc/passwd
	Group   string    `json:"group,omitempty"`
	ModTime time.Time `json:"mod_time"`
	Target  string    `json:"target,omitempty"` // of a symlink
}

// WriteOptions say how a file is written.
type WriteOptions struct {
	User    string `json:"user,omitempty"`    // owner of what is created, and whose rights apply; "" = the image's User
	Mode    uint32 `json:"mode,omitempty"`    // 0 = 0644
	Atomic  bool   `json:"atomic,omitempty"`  // temp file and rename: a reader sees old or new, never half
	Parents bool   `json:"parents,omitempty"` // make missing parents
	Append  bool   `json:"append,omitempty"`
}

// FileChange is what a watch reports.
type FileChange struct {
	Path string `json:"path"`
	Op   string `json:"op"` // create, write, remove, rename, chmod
}
