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

	Attributes map[string]string `json:"attributes,omitempty"` // extended attributes "user.*", without that; in a list if asked for
}

// WriteOptions say how a file is written.
type WriteOptions struct {
	User    string `json:"user,omitempty"`    // owner of what is created, and whose rights apply; "" = the image's User
	Mode    uint32 `json:"mode,omitempty"`    // 0 = 0644
	Atomic  bool   `json:"atomic,omitempty"`  // temp file and rename: a reader sees old or new, never half
	Parents bool   `json:"parents,omitempty"` // make missing parents
	Append  bool   `json:"append,omitempty"`
}

// ListOptions say how much of a directory is listed.
type ListOptions struct {
	Depth int `json:"depth"` // 1 = the directory's own entries
	Limit int `json:"limit"`

	Attributes bool `json:"attributes,omitempty"` // too; each file is opened for them
}

// FileChange is what a watch reports.
type FileChange struct {
	Path string `json:"path"`
	Op   string `json:"op"` // create, write, remove, rename, chmod
}

// MaxAttributes is how many bytes the attributes of a file may have, names and
// values together: what ext4 takes.
const MaxAttributes = 4096

const maxAttributeName = 200 // Linux takes 255 with the prefix

// ValidateAttributes checks extended attributes without their prefix "user.".
func ValidateAttributes(field string, attrs map[string]string) error {
	total := 0
	for _, name := range sortedKeys(attrs) {
		total += len(name) + len(attrs[name])
		switch {
		case name == "" || len(name) > maxAttributeName || !plainText(name):
			return InvalidField(field, "%q is no name; 1 to %d bytes of UTF-8 without control characters are accepted", clip(name), maxAttributeName)
		case !plainText(attrs[name]):
			return InvalidField(field, "the value of %q is not UTF-8 without control characters", clip(name))
		}
	}
	if total > MaxAttributes {
		return InvalidField(field, "has %d bytes of names and values; at most %d are accepted", total, MaxAttributes)
	}
	return nil
}
