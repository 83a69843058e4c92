package agent

import (
	"strings"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/sandbox"
)

// attrPrefix is of the extended attributes that are a user's to make up: all
// others mean something to a kernel.
const attrPrefix = "user."

// attributes of an open file: those that fit, which is all that we have set. Code
// inside may have set more, and on a file system that knows none there are none.
func attributes(fd int) map[string]string {
	names := make([]byte, 4*sandbox.MaxAttributes)
	n, err := unix.Flistxattr(fd, names)
	if err != nil || n == 0 {
		return nil
	}
	var out map[string]string
	left := sandbox.MaxAttributes
	value := make([]byte, sandbox.MaxAttributes)
	for full := range strings.SplitSeq(string(names[:n]), "\x00") {
		name, ours := strings.CutPrefix(full, attrPrefix)
		if !ours || name == "" {
			continue
		}
		n, err := unix.Fgetxattr(fd, full, value)
		if err != nil {
			continue // gone meanwhile, or too long
		}
		if left -= len(name) + n; left < 0 {
			break
		}
		if out == nil {
			out = map[string]string{}
		}
		out[name] = string(value[:n])
	}
	return out
}

// attributesAt are those of one name of a directory, if it is a file or a
// directory: opening anything else may do something.
func attributesAt(dir int, name string, t sandbox.FileType) map[string]string {
	if t != sandbox.Regular && t != sandbox.Directory {
		return nil
	}
	fd, err := fdOpen(dir, name, unix.O_RDONLY, 0)
	if err != nil {
		return nil
	}
	defer unix.Close(fd)
	return attributes(fd)
}

// setAttributes makes these all the attributes that a path has. Symlinks are
// followed: they have none of their own.
func (ep *episode) setAttributes(p string, want map[string]string) (*sandbox.FileInfo, error) {
	var fd int
	err := ep.inside(func() (err error) {
		fd, err = ep.space.open(p, unix.O_RDONLY|unix.O_NONBLOCK, 0)
		return err
	})
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	if t := st.Mode & unix.S_IFMT; t != unix.S_IFREG && t != unix.S_IFDIR {
		return nil, errNotRegular(p)
	}
	for name, value := range want {
		if err := unix.Fsetxattr(fd, attrPrefix+name, []byte(value), 0); err != nil {
			return nil, err
		}
	}
	for name := range attributes(fd) {
		if _, keep := want[name]; !keep {
			if err := unix.Fremovexattr(fd, attrPrefix+name); err != nil && err != unix.ENODATA {
				return nil, err
			}
		}
	}
	return ep.infoFD(p, fd)
}
