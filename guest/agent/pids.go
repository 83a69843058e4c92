package agent

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
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
type pidsGroup struct{ dir string }

func newPidsGroup(limit int64) (*pidsGroup, error) {
	if limit == 0 {
		return nil, nil
	}
	if err := mountPids(); err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(pidsMount, "episode")
	if err != nil {
		return nil, err
	}
	// The forking thread itself counts for one.
	if err := os.WriteFile(filepath.Join(dir, "pids.max"), []byte(strconv.FormatInt(limit+1, 10)), 0); err != nil {
		return nil, err
	}
	return &pidsGroup{dir}, nil
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

// findInit finds the init of the user's container: the youngest process beside
// the agent that has no parent in this kernel and is called init. It is asked
// before any code of the user runs.
func findInit() (int, error) {
	ents, err := os.ReadDir("/proc")
	if err != nil {
		return 0, err
	}
	found := 0
	for _, e := range ents {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() || pid < found {
			continue
		}
		status, err := os.ReadFile(filepath.Join("/proc", e.Name(), "status"))
		if err != nil || !strings.Contains(string(status), "\nPPid:\t0\n") {
			continue
		}
		// Bulk transfers have no parent either.
		if cmd, err := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline")); err == nil && strings.HasSuffix(string(cmd), "\x00init\x00") {
			found = pid
		}
	}
	if found == 0 {
		return 0, errors.New("no init of a container in this kernel")
	}
	return found, nil
}
