package agent

import (
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/sandbox"
)

// cleanPath refuses what cannot be a path inside and makes the rest lexically
// clean, so that its parent and its name are known.
func cleanPath(field, p string) (string, error) {
	switch {
	case p == "":
		return "", sandbox.InvalidField(field, "must not be empty")
	case p[0] != '/':
		return "", sandbox.InvalidField(field, "must be absolute, %q is not", clip(p, 100))
	case len(p) >= maxPath:
		return "", sandbox.InvalidField(field, "must be shorter than %d bytes, has %d", maxPath, len(p))
	case strings.IndexByte(p, 0) >= 0:
		return "", sandbox.InvalidField(field, "must not contain a NUL byte")
	}
	return path.Clean(p), nil
}

// path is a path that a caller named; a relative one is below the working
// directory, as for a process that is started without one.
func (ep *episode) path(field, p string) (string, error) {
	if p != "" && p[0] != '/' {
		p = ep.workdir + "/" + p
	}
	return cleanPath(field, p)
}

// openParent opens the directory that holds p, for a call on the name alone.
// It runs on a thread inside. "/" is its own parent, under the name ".".
func openParent(sp Space, p string) (dir int, name string, err error) {
	parent, name := path.Split(p)
	if name == "" {
		parent, name = "/", "."
	}
	dir, err = sp.open(parent, unix.O_PATH|unix.O_DIRECTORY, 0)
	return dir, name, err
}

// owner is who files that are made belong to; nil where that is not ours to
// choose.
type owner struct{ uid, gid int }

// fileOwner resolves opt.User. It runs on a thread inside. Where there are no users
// of the container's own, root can still give files away.
func (ep *episode) fileOwner(user string) (*owner, error) {
	id, err := ep.identity(user)
	if err != nil || !ep.space.users() && os.Geteuid() != 0 {
		return nil, err
	}
	return &owner{int(id.uid), int(id.gid)}, nil
}

// openDirs opens a directory and makes what is missing of it. It runs on a
// thread inside.
func openDirs(sp Space, dir string, mode uint32, own *owner) (int, error) {
	fd, err := sp.open(dir, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != unix.ENOENT {
		return fd, err
	}
	have := dir // the deepest ancestor that exists
	for err == unix.ENOENT && have != "/" {
		have = path.Dir(have)
		fd, err = sp.open(have, unix.O_PATH|unix.O_DIRECTORY, 0)
	}
	if err != nil {
		return -1, err
	}
	for name := range strings.SplitSeq(strings.Trim(strings.TrimPrefix(dir, have), "/"), "/") {
		next, err := makeDir(fd, name, mode, own)
		unix.Close(fd)
		if err != nil {
			return -1, err
		}
		fd = next
	}
	return fd, nil
}

// makeDir makes one directory, or takes the one that a neighbour just made.
func makeDir(parent int, name string, mode uint32, own *owner) (int, error) {
	err := unix.Mkdirat(parent, name, 0o700)
	if err != nil && err != unix.EEXIST {
		return -1, err
	}
	made := err == nil
	fd, err := fdOpen(parent, name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil || !made {
		return fd, err
	}
	if err := setAttrs(fd, &mode, own); err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// setAttrs gives a new file its owner and mode: owner first, because chown
// clears setuid.
func setAttrs(fd int, mode *uint32, own *owner) error {
	if own != nil {
		if err := unix.Fchown(fd, own.uid, own.gid); err != nil {
			return err
		}
	}
	if mode != nil {
		return unix.Fchmod(fd, *mode&0o7777)
	}
	return nil
}

// makeWorkdir makes the working directory where the image has none, as other
// runtimes do.
func (ep *episode) makeWorkdir() (err error) {
	ferr := ep.space.spawner(func() {
		var st unix.Stat_t
		if ep.space.stat(ep.workdir, &st) == nil {
			return
		}
		var own *owner
		if own, err = ep.fileOwner(""); err != nil {
			return
		}
		var fd int
		if fd, err = openDirs(ep.space, ep.workdir, 0o755, own); err == nil {
			unix.Close(fd)
		}
	})
	if ferr != nil {
		return ferr
	}
	return err
}
