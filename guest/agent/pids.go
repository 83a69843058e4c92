package agent

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"
)

// pidsMount is where the agent mounts the kernel's own pids controller. Below
// /dev, the one writable place of the root container; the user's container
// does not see it.
const pidsMount = "/dev/cove-pids"

// mountPids mounts the controller once per kernel.
var mountPids = sync.OnceValue(func() error {
	if err := os.Mkdir(pidsMount, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	if err := unix.Mount("none", pidsMount, "cgroup", 0, "pids"); err != nil && err != unix.EBUSY {
		return fmt.Errorf("mount of the pids controller: %w", err)
	}
	return nil
})

// pidsGroup limits the processes of one episode. The thread that forks is a
// member, so what it forks is born in it. Nil limits nothing.
type pidsGroup struct {
	dir string
	max int64 // as set; 0 = not yet
}

func newPidsGroup() (*pidsGroup, error) {
	if err := mountPids(); err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(pidsMount, "episode")
	if err != nil {
		return nil, err
	}
	return &pidsGroup{dir: dir}, nil
}

// limit sets how many processes and threads there may be; 0 = any number.
func (g *pidsGroup) limit(n int64) error {
	if g == nil || n == 0 || n == g.max {
		return nil
	}
	g.max = n
	// The forking thread itself counts for one.
	return os.WriteFile(filepath.Join(g.dir, "pids.max"), []byte(strconv.FormatInt(n+1, 10)), 0)
}

// join makes the calling thread a member.
func (g *pidsGroup) join() error {
	if g == nil {
		return nil
	}
	return os.WriteFile(filepath.Join(g.dir, "tasks"), []byte(strconv.Itoa(unix.Gettid())), 0)
}

// close removes the group if its last process is gone; one that is dying yet
// leaves an empty group behind, which costs the kernel a few hundred bytes.
func (g *pidsGroup) close() {
	if g != nil {
		os.Remove(g.dir)
	}
}
