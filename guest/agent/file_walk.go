package agent

import (
	"fmt"
	"io"
	"os"
	"path"
	"sort"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/sandbox"
)

const (
	maxDepth   = 256     // of directories a walk enters
	maxList    = 10_000  // entries of one listing
	maxEntries = 1 << 20 // of one directory that a walk sorts and enters
	batch      = 1024    // names read at once
)

// dirNames reads up to limit names of an open directory.
func dirNames(fd, limit int) ([]string, bool, error) {
	// A descriptor of its own, read from its start: os.File wants to close it.
	own, err := fdOpen(fd, ".", unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, false, err
	}
	d := os.NewFile(uintptr(own), "dir")
	defer d.Close()
	var names []string
	for {
		more, err := d.Readdirnames(batch)
		names = append(names, more...)
		if err == io.EOF {
			return names, false, nil
		}
		if err != nil {
			return names, false, err
		}
		if len(names) > limit {
			return names[:limit], true, nil
		}
	}
}

// visit is called for every entry below a directory, parents first, with the
// directory that holds it. Entering is refused by returning false.
type visit func(dir int, name, p string, st *unix.Stat_t) (enter bool, err error)

// walk visits all below an open directory in order of name. It holds one
// descriptor per level, follows no symlink, and does not recurse. What
// disappears meanwhile is skipped.
func walk(fd int, p string, depth int, f visit) error {
	type level struct {
		fd    int
		p     string
		names []string
	}
	var stack []level
	push := func(fd int, p string) error {
		names, over, err := dirNames(fd, maxEntries)
		if err != nil {
			return err
		}
		if over {
			return sandbox.Errorf(sandbox.TooLarge, "", "%s has more than %d entries", p, maxEntries)
		}
		sort.Strings(names)
		stack = append(stack, level{fd, p, names})
		return nil
	}
	defer func() {
		for _, l := range stack[min(1, len(stack)):] {
			unix.Close(l.fd)
		}
	}()
	if err := push(fd, p); err != nil {
		return err
	}
	for len(stack) > 0 {
		top := &stack[len(stack)-1]
		if len(top.names) == 0 {
			if len(stack) > 1 {
				unix.Close(top.fd)
			}
			stack = stack[:len(stack)-1]
			continue
		}
		name := top.names[0]
		top.names = top.names[1:]
		var st unix.Stat_t
		if err := unix.Fstatat(top.fd, name, &st, unix.AT_SYMLINK_NOFOLLOW); err == unix.ENOENT {
			continue
		} else if err != nil {
			return err
		}
		child := path.Join(top.p, name)
		enter, err := f(top.fd, name, child, &st)
		if err == unix.ENOENT {
			continue
		}
		if err != nil {
			return err
		}
		if !enter || st.Mode&unix.S_IFMT != unix.S_IFDIR || len(stack) >= depth {
			continue
		}
		if len(stack) >= maxDepth {
			return &sandbox.Error{Class: sandbox.Precondition, Msg: fmt.Sprintf("more than %d directories deep: %s", maxDepth, clip(child, 200))}
		}
		next, err := fdOpen(top.fd, name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
		if err == unix.ENOENT || err == unix.ENOTDIR || err == unix.ELOOP {
			continue // replaced meanwhile
		}
		if err != nil {
			return err
		}
		if err := push(next, child); err != nil {
			unix.Close(next)
			if err == unix.ENOENT {
				continue
			}
			return err
		}
	}
	return nil
}

// openDir opens a directory to be walked; a symlink to one counts as one.
func (ep *episode) openDir(p string) (int, error) {
	var fd int
	err := ep.inside(func() (err error) {
		fd, err = ep.space.open(p, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NONBLOCK, 0)
		return err
	})
	return fd, err
}

// list describes what is below a directory, with its attributes if they are asked
// for: each file is opened for them.
func (ep *episode) list(p string, depth, limit int, attrs bool) (files []sandbox.FileInfo, truncated bool, err error) {
	if depth < 0 {
		return nil, false, sandbox.InvalidField("depth", "must not be negative")
	}
	if limit < 0 {
		return nil, false, sandbox.InvalidField("limit", "must not be negative")
	}
	if depth == 0 {
		depth = 1
	}
	if limit == 0 || limit > maxList {
		limit = maxList
	}
	fd, err := ep.openDir(p)
	if err != nil {
		return nil, false, err
	}
	defer unix.Close(fd)
	var d describer
	if err := ep.inside(func() error { d = ep.describer(); return nil }); err != nil {
		return nil, false, err
	}
	size := 0
	err = walk(fd, p, depth, func(dir int, name, child string, st *unix.Stat_t) (bool, error) {
		// Long names and targets count too: the answer must fit a frame.
		if len(files) >= limit || size > 4<<20 {
			truncated = true
			return false, io.EOF
		}
		fi := d.info(child, st)
		if fi.Type == sandbox.Symlink {
			fi.Target, _ = readlinkat(dir, name)
		}
		if attrs {
			fi.Attributes = attributesAt(dir, name, fi.Type)
			for k, v := range fi.Attributes {
				size += len(k) + len(v)
			}
		}
		size += 2*len(child) + len(fi.Target) + len(fi.Owner) + len(fi.Group) + 200
		files = append(files, fi)
		return true, nil
	})
	if err == io.EOF {
		err = nil
	}
	return files, truncated, err
}

// remove removes a path; recursive, with all below it.
func (ep *episode) remove(p string, recursive bool) error {
	if p == "/" {
		return sandbox.InvalidField("path", "the root directory cannot be removed").WithHint("reset the sandbox instead")
	}
	dir, name, full := -1, "", false
	err := ep.inside(func() (err error) {
		if dir, name, err = openParent(ep.space, p); err != nil {
			dir = -1
			return err
		}
		// Inside, where the mounts are known: seen from the agent's own mount
		// namespace a mount point is a directory like any other, and removing
		// it unmounts what is there.
		err = unix.Unlinkat(dir, name, 0)
		if err != unix.EISDIR && err != unix.EPERM {
			return err
		}
		var st unix.Stat_t
		if serr := unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW); serr != nil || st.Mode&unix.S_IFMT != unix.S_IFDIR {
			return err
		}
		err = unix.Unlinkat(dir, name, unix.AT_REMOVEDIR)
		full = err == unix.ENOTEMPTY || err == unix.EEXIST
		return err
	})
	if dir >= 0 {
		defer unix.Close(dir)
	}
	if !recursive || !full {
		return err
	}
	return removeTree(dir, name)
}

// removeTree removes a directory with all below it. It holds at most flatten
// descriptors: a directory found deeper is first moved up to the top, so that
// a tree of any depth comes down. Directories are emptied a batch at a time,
// so one of any size does too.
func removeTree(dir int, name string) error {
	const flatten = 64
	top, err := openSameMount(dir, name)
	if err != nil {
		return err
	}
	type level struct {
		fd   int
		name string
	}
	stack := []level{{top, name}}
	defer func() {
		for _, l := range stack {
			unix.Close(l.fd)
		}
	}()
	moved := 0
	for len(stack) > 0 {
		here := stack[len(stack)-1]
		names, _, err := dirNames(here.fd, batch)
		if err != nil {
			return err
		}
		var enter string
		for _, n := range names {
			err := unix.Unlinkat(here.fd, n, 0)
			if err == nil || err == unix.ENOENT {
				continue
			}
			if err != unix.EISDIR && err != unix.EPERM {
				return err
			}
			rerr := unix.Unlinkat(here.fd, n, unix.AT_REMOVEDIR)
			switch rerr {
			case nil, unix.ENOENT:
				continue
			case unix.ENOTEMPTY, unix.EEXIST:
			case unix.ENOTDIR:
				return err // a file that may not be removed
			default:
				return rerr
			}
			if len(stack) >= flatten {
				moved++
				if err := unix.Renameat(here.fd, n, top, fmt.Sprintf(".cove-rm-%d-%s", moved, tempName())); err != nil && err != unix.ENOENT {
					return err
				}
				continue
			}
			enter = n
			break
		}
		if enter != "" {
			fd, err := openSameMount(here.fd, enter)
			if err == unix.ENOENT || err == unix.ENOTDIR || err == unix.ELOOP {
				continue
			}
			if err != nil {
				return err
			}
			stack = append(stack, level{fd, enter})
			continue
		}
		parent := dir
		if len(stack) > 1 {
			parent = stack[len(stack)-2].fd
		}
		switch err := unix.Unlinkat(parent, here.name, unix.AT_REMOVEDIR); err {
		case nil, unix.ENOENT:
		case unix.ENOTEMPTY, unix.EEXIST:
			if len(names) == 0 {
				return err // not empty, and nothing in it that we can see
			}
			continue // more than a batch, or someone is filling it
		default:
			return err
		}
		unix.Close(here.fd)
		stack = stack[:len(stack)-1]
	}
	return nil
}

// openSameMount opens a directory to empty it, but no mount point: those cannot
// be removed, so nothing of what is mounted there may go either.
func openSameMount(dir int, name string) (int, error) {
	var parent, st unix.Stat_t
	if err := unix.Fstat(dir, &parent); err != nil {
		return -1, err
	}
	fd, err := fdOpen(dir, name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return -1, err
	}
	if err = unix.Fstat(fd, &st); err == nil && st.Dev != parent.Dev {
		err = unix.EBUSY
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// chmod sets the mode of what a path leads to; recursive, of all below it too,
// leaving symlinks alone.
func (ep *episode) chmod(p string, mode uint32, recursive bool) error {
	var fd int
	err := ep.inside(func() (err error) {
		fd, err = ep.space.open(p, unix.O_PATH, 0)
		return err
	})
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := chmodFD(fd, mode); err != nil || !recursive {
		return err
	}
	return eachBelow(fd, p, func(dir int, name string, st *unix.Stat_t) error {
		if st.Mode&unix.S_IFMT == unix.S_IFLNK {
			return nil
		}
		f, err := fdOpen(dir, name, unix.O_PATH, 0)
		if err != nil {
			return err
		}
		defer unix.Close(f)
		return chmodFD(f, mode)
	})
}

// chmodFD changes the mode of what a path descriptor stands for, which fchmod
// refuses. The agent's /proc names the descriptor without a path to follow.
func chmodFD(fd int, mode uint32) error {
	return unix.Chmod(fmt.Sprintf("/proc/self/fd/%d", fd), mode)
}

// chown sets the owner of a path itself; recursive, of all below it too.
func (ep *episode) chown(p, user string, recursive bool) error {
	if user == "" {
		return sandbox.InvalidField("user", "must be set")
	}
	var dir int
	var name string
	var id ident
	err := ep.inside(func() (err error) {
		if id, err = ep.userDB.lookup(ep.space, user); err != nil {
			return err
		}
		dir, name, err = openParent(ep.space, p)
		return err
	})
	if err != nil {
		return err
	}
	defer unix.Close(dir)
	if err := unix.Fchownat(dir, name, int(id.uid), int(id.gid), unix.AT_SYMLINK_NOFOLLOW); err != nil || !recursive {
		return err
	}
	fd, err := fdOpen(dir, name, unix.O_PATH, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return eachBelow(fd, p, func(dir int, name string, _ *unix.Stat_t) error {
		return unix.Fchownat(dir, name, int(id.uid), int(id.gid), unix.AT_SYMLINK_NOFOLLOW)
	})
}

// eachBelow calls f for all below fd, if it is a directory.
func eachBelow(fd int, p string, f func(dir int, name string, st *unix.Stat_t) error) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return err
	}
	return walk(fd, p, maxDepth+1, func(dir int, name, _ string, st *unix.Stat_t) (bool, error) {
		return true, f(dir, name, st)
	})
}
