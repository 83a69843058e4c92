package agent

import (
	"bytes"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/sandbox"
)

const (
	maxUserFile = 1 << 20 // of /etc/passwd and /etc/group that is read
	maxGroups   = 256     // supplementary groups of one user
)

// ident is a resolved user.
type ident struct {
	uid, gid uint32
	groups   []uint32
	name     string // "" for a uid that has no entry
	home     string
}

// mayEnter says whether the user may use a directory as its own, by the mode of
// that directory alone.
func (id ident) mayEnter(st *unix.Stat_t) bool {
	bit := uint32(0o001)
	switch {
	case id.uid == 0:
		return true
	case id.uid == st.Uid:
		bit = 0o100
	case id.gid == st.Gid, slices.Contains(id.groups, st.Gid):
		bit = 0o010
	}
	return st.Mode&bit != 0
}

// userDB reads the container's /etc/passwd and /etc/group. They are the user's
// files and may say anything; all that matters here is that reading them is
// bounded. Content is kept until the file changes: a process start then costs
// one stat.
type userDB struct {
	mu struct {
		sync.Mutex
		passwd cachedFile
		group  cachedFile
	}
}

type cachedFile struct {
	ino   uint64
	size  int64
	mtime unix.Timespec
	data  []byte
}

// load returns the content, "" if the file cannot be used. It runs on a thread
// inside.
func (c *cachedFile) load(sp Space, path string) []byte {
	var st unix.Stat_t
	if err := sp.stat(path, &st); err != nil {
		*c = cachedFile{}
		return nil
	}
	if c.ino == st.Ino && c.size == st.Size && c.mtime == st.Mtim && c.data != nil {
		return c.data
	}
	*c = cachedFile{}
	fd, err := sp.open(path, unix.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil
	}
	defer unix.Close(fd)
	if err := unix.Fstat(fd, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil
	}
	buf := make([]byte, min(st.Size, maxUserFile))
	n := 0
	for n < len(buf) {
		m, err := unix.Read(fd, buf[n:])
		if err == unix.EINTR {
			continue
		}
		if m <= 0 || err != nil {
			break
		}
		n += m
	}
	*c = cachedFile{ino: st.Ino, size: st.Size, mtime: st.Mtim, data: buf[:n]}
	return c.data
}

// fields calls f with the colon-separated fields of each line until f is done.
func fields(data []byte, atLeast int, f func([]string) (done bool)) {
	for len(data) > 0 {
		line := data
		if i := bytes.IndexByte(data, '\n'); i >= 0 {
			line, data = data[:i], data[i+1:]
		} else {
			data = nil
		}
		if parts := strings.Split(string(line), ":"); len(parts) >= atLeast && f(parts) {
			return
		}
	}
}

func id32(s string) (uint32, bool) {
	n, err := strconv.ParseUint(s, 10, 32)
	return uint32(n), err == nil && n != 1<<32-1 // -1 means "leave as it is" to chown
}

// lookup resolves name, uid, name:group or uid:gid; "" is root. It runs on a
// thread inside.
func (db *userDB) lookup(sp Space, spec string) (ident, error) {
	db.mu.Lock()
	defer db.mu.Unlock()
	if spec == "" {
		spec = "0"
	}
	user, group, hasGroup := strings.Cut(spec, ":")
	var id ident
	found := false
	uid, numeric := id32(user)
	fields(db.mu.passwd.load(sp, "/etc/passwd"), 6, func(p []string) bool {
		u, ok1 := id32(p[2])
		g, ok2 := id32(p[3])
		if !ok1 || !ok2 || p[0] == "" || p[0] != user && !(numeric && u == uid) {
			return false
		}
		id, found = ident{uid: u, gid: g, name: p[0], home: p[5]}, true
		return true
	})
	switch {
	case found:
	case numeric:
		id = ident{uid: uid}
	case user == "root":
		id = ident{name: "root"}
	default:
		return ident{}, sandbox.InvalidField("user", "no user %q in the sandbox's /etc/passwd", user).
			WithHint("use a user of the image, or a numeric uid or uid:gid")
	}
	if id.home == "" {
		id.home = "/"
		if id.uid == 0 {
			id.home = "/root"
		}
	}
	if id.uid == 0 && id.name == "" {
		id.name = "root"
	}
	if !hasGroup {
		if id.name != "" {
			id.groups = db.memberships(sp, id)
		}
		return id, nil
	}
	gid, numeric := id32(group)
	found = false
	fields(db.mu.group.load(sp, "/etc/group"), 3, func(p []string) bool {
		g, ok := id32(p[2])
		if ok && p[0] == group {
			gid, found = g, true
		}
		return found
	})
	if !found && !numeric {
		return ident{}, sandbox.InvalidField("user", "no group %q in the sandbox's /etc/group", group)
	}
	id.gid = gid
	return id, nil
}

func (db *userDB) memberships(sp Space, id ident) []uint32 {
	var groups []uint32
	fields(db.mu.group.load(sp, "/etc/group"), 4, func(p []string) bool {
		g, ok := id32(p[2])
		if !ok || g == id.gid {
			return false
		}
		for m := range strings.SplitSeq(p[3], ",") {
			if m == id.name {
				groups = append(groups, g)
				break
			}
		}
		return len(groups) >= maxGroups
	})
	return groups
}

// names gives owners of files their names, reading each file once.
func (db *userDB) names(sp Space) (user, group func(uint32) string) {
	db.mu.Lock()
	defer db.mu.Unlock()
	return nameTable(db.mu.passwd.load(sp, "/etc/passwd")), nameTable(db.mu.group.load(sp, "/etc/group"))
}

func nameTable(data []byte) func(uint32) string {
	cache := map[uint32]string{}
	return func(want uint32) string {
		if n, ok := cache[want]; ok {
			return n
		}
		name := ""
		fields(data, 3, func(p []string) bool {
			if id, ok := id32(p[2]); ok && id == want {
				name = p[0]
				return true
			}
			return false
		})
		cache[want] = name
		return name
	}
}
