package agent

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// groupMount is where the agent mounts the kernel's own cgroups. Below /dev,
// the one writable place of the root container; the user's container does not
// see it.
const groupMount = "/dev/cove-groups"

// maxGroupDepth is how deep groups may be nested below an episode's. An exec's is
// at 1.
const maxGroupDepth = 16

// mountGroups mounts them once per kernel. Version 2: of the seven version 1
// hierarchies a sentry has, a fork is charged to a random one, so that a pids
// limit there lets six of seven through.
var mountGroups = sync.OnceValue(func() error {
	if err := os.Mkdir(groupMount, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	// nsdelegate: a process may make groups below its own, move its processes
	// there and limit them, but neither leave its own nor change its limits.
	if err := unix.Mount("none", groupMount, "cgroup2", 0, "nsdelegate"); err != nil {
		return fmt.Errorf("mount of cgroup2: %w", err)
	}
	return nil
})

// group is the cgroup of all processes of one episode, with the limit of how
// many there may be. Nil where the kernel is not ours: it limits nothing.
type group struct {
	dir  string
	max  int64 // as set; 0 = not yet
	next atomic.Int64
}

func newGroup() (*group, error) {
	if err := mountGroups(); err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(groupMount, "episode")
	if err != nil {
		return nil, err
	}
	// A directory that is no cgroup would take any file, and limit nothing.
	if _, err := os.Stat(filepath.Join(dir, "pids.max")); err != nil {
		return nil, fmt.Errorf("no pids controller: %w", err)
	}
	// So that what is made inside can be removed without a path that is too long.
	if err := os.WriteFile(filepath.Join(dir, "cgroup.max.depth"), []byte(strconv.Itoa(maxGroupDepth)), 0); err != nil {
		return nil, err
	}
	return &group{dir: dir}, nil
}

// limit sets how many processes and threads there may be; 0 = any number.
func (g *group) limit(n int64) error {
	if g == nil || n == 0 || n == g.max {
		return nil
	}
	g.max = n
	return os.WriteFile(filepath.Join(g.dir, "pids.max"), []byte(strconv.FormatInt(n, 10)), 0)
}

// sub makes the group of one exec. Its processes are started in it and cannot
// leave, whatever they do to their session, parent and environment: it is the
// root of their cgroup namespace.
func (g *group) sub() (*subgroup, error) {
	if g == nil {
		return nil, nil
	}
	dir := filepath.Join(g.dir, strconv.FormatInt(g.next.Add(1), 10))
	if err := unix.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		unix.Rmdir(dir)
		return nil, err
	}
	return &subgroup{dir: dir, fd: fd}, nil
}

// sweep removes the groups made so far that an exec left behind, because a
// daemon outlived it. Later ones may be empty and about to get their first process.
func (g *group) sweep(upTo int64) {
	ents, _ := os.ReadDir(g.dir)
	for _, e := range ents {
		if n, err := strconv.ParseInt(e.Name(), 10, 64); err == nil && n <= upTo {
			removeGroup(filepath.Join(g.dir, e.Name()))
		}
	}
}

// close removes the group if its last process is gone; one that is dying yet
// leaves an empty group behind, which costs the kernel a few hundred bytes.
func (g *group) close() {
	if g != nil {
		g.sweep(g.next.Load())
		unix.Rmdir(g.dir)
	}
}

// subgroup is the cgroup of one exec. Nil does nothing.
type subgroup struct {
	dir string
	fd  int // to start a process in it; -1 after started
}

// into is what a clone takes, 0 for none (which is never ours: it is stdin).
func (s *subgroup) into() int {
	if s == nil {
		return 0
	}
	return s.fd
}

// started lets go of the descriptor.
func (s *subgroup) started() {
	if s != nil && s.fd >= 0 {
		unix.Close(s.fd)
		s.fd = -1
	}
}

// kill ends every process in it at once, and waits (a second at most) until
// none is left.
func (s *subgroup) kill() error {
	if err := os.WriteFile(filepath.Join(s.dir, "cgroup.kill"), []byte("1"), 0); err != nil {
		return err
	}
	for range 1000 {
		if b, err := os.ReadFile(filepath.Join(s.dir, "cgroup.events")); err != nil || bytes.Contains(b, []byte("populated 0")) {
			return err
		}
		time.Sleep(time.Millisecond)
	}
	return nil
}

// remove takes it away unless something that outlived the exec is in it.
func (s *subgroup) remove() {
	if s != nil {
		s.started()
		removeGroup(s.dir)
	}
}

// removeGroup removes a group with the groups that code inside has made below
// it, those that are empty.
func removeGroup(dir string) {
	err := unix.Rmdir(dir)
	if err != unix.EBUSY && err != unix.ENOTEMPTY {
		return
	}
	ents, _ := os.ReadDir(dir)
	below := false
	for _, e := range ents {
		if e.IsDir() {
			removeGroup(filepath.Join(dir, e.Name()))
			below = true
		}
	}
	if below {
		unix.Rmdir(dir)
	}
}
