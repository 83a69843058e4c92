package agent

import (
	"bufio"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	fileThreads = 4
	fileKeep    = 10 * time.Second
	lastCap     = 63
)

// containerSpace is the user's container of the kernel the agent runs in. It
// is entered thread by thread: the process as a whole stays in the root
// container, out of sight of the user's pid namespace.
type containerSpace struct {
	filesOnly bool // no spawner thread is made ahead

	mu     sync.Mutex
	inside *inside // nil when not entered
}

// inside is one entered container.
type inside struct {
	init  *os.File // pidfd of its init
	gone  chan struct{}
	null  *os.File
	pids  *pidsGroup
	spawn *threadPool
	file  *threadPool
}

// NewContainerSpace acts in the container entered by Enter's init pid.
func NewContainerSpace() Space { return &containerSpace{} }

func (c *containerSpace) enter(initPID int, pids int64) (int, error) {
	if initPID == 0 {
		var err error
		if initPID, err = findInit(); err != nil {
			return 0, err
		}
	}
	fd, err := unix.PidfdOpen(initPID, 0)
	if err != nil {
		return 0, fmt.Errorf("pidfd_open of init %d: %w", initPID, err)
	}
	bounding, err := boundingOf(initPID)
	if err != nil {
		unix.Close(fd)
		return 0, err
	}
	group, err := newPidsGroup(pids)
	if err != nil {
		unix.Close(fd)
		return 0, err
	}
	// Whatever init has: a forked child is the agent's memory until it executes,
	// code inside can stop it there, and who may trace it then reads the secret.
	// Debuggers work without, on processes of their own user.
	bounding &^= 1 << unix.CAP_SYS_PTRACE
	unix.SetNonblock(fd, true) // for os.NewFile: wait for its end in the poller
	in := &inside{init: os.NewFile(uintptr(fd), "init"), gone: make(chan struct{}), pids: group}
	in.spawn = newThreadPool(1, 0, func() error {
		// Before the thread is inside, where the group is out of sight.
		if err := group.join(); err != nil {
			return err
		}
		if err := enterThread(fd); err != nil {
			return err
		}
		unix.Umask(0o022)
		return confineThread(bounding)
	})
	in.file = newThreadPool(fileThreads, fileKeep, func() error { return enterThread(fd) })
	if in.null, err = openNull(); err == nil && !c.filesOnly {
		// gVisor puts a tmpfs of its own on an empty /tmp, in memory and without
		// a limit. Ours is the image's, on the writable layer. Where there is no
		// such mount (not in gVisor) the call fails, which is as good.
		err = in.spawn.do(func() { unix.Unmount("/tmp", unix.MNT_DETACH) })
	}
	if err != nil {
		in.close()
		return 0, err
	}
	go in.watch()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.inside = in
	return initPID, nil
}

func (c *containerSpace) forFiles() Space { return &containerSpace{filesOnly: true} }

// enterThread moves the calling thread into the container of a pidfd. The pid
// namespace applies to what it forks.
func enterThread(pidfd int) error {
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("unshare(CLONE_FS): %w", err)
	}
	if err := unix.Setns(pidfd, unix.CLONE_NEWNS|unix.CLONE_NEWPID|unix.CLONE_NEWIPC|unix.CLONE_NEWUTS); err != nil {
		return fmt.Errorf("setns: %w", err)
	}
	unix.Umask(0)
	return nil
}

// confineThread leaves the thread's own powers as they are, but takes from
// what it executes all that the container's init may not have. The powers stay
// on purpose: the forked child shares the agent's memory until it executes,
// and what holds more capabilities than the tracer cannot be traced by it.
func confineThread(bounding uint64) error {
	for c := uintptr(0); c <= lastCap; c++ {
		if bounding&(1<<c) != 0 {
			continue
		}
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0); err == unix.EINVAL {
			break // above the last capability of this kernel
		} else if err != nil {
			return fmt.Errorf("drop capability %d: %w", c, err)
		}
	}
	// Inheritable and ambient capabilities pass execve beside the bounding set.
	unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return fmt.Errorf("capget: %w", err)
	}
	data[0].Inheritable, data[1].Inheritable = 0, 0
	if err := unix.Capset(&hdr, &data[0]); err != nil {
		return fmt.Errorf("capset: %w", err)
	}
	return nil
}

// boundingOf reads the capability bounding set of a process.
func boundingOf(pid int) (uint64, error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if v, ok := strings.CutPrefix(s.Text(), "CapBnd:"); ok {
			return strconv.ParseUint(strings.TrimSpace(v), 16, 64)
		}
	}
	return 0, fmt.Errorf("no CapBnd in the status of init %d", pid)
}

// watch closes gone when init has ended. It ends with init's descriptor.
func (in *inside) watch() {
	rc, err := in.init.SyscallConn()
	if err != nil {
		return
	}
	ended := false
	rc.Read(func(fd uintptr) bool {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, _ := unix.Poll(p, 0)
		ended = n > 0
		return ended
	})
	if ended {
		close(in.gone)
	}
}

func (in *inside) close() {
	in.file.close()
	in.spawn.close()
	in.init.Close()
	in.pids.close()
	if in.null != nil {
		in.null.Close()
	}
}

func (c *containerSpace) leave() {
	c.mu.Lock()
	in := c.inside
	c.inside = nil
	c.mu.Unlock()
	if in != nil {
		in.close()
	}
}

func (c *containerSpace) now() *inside {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.inside
}

func (c *containerSpace) files(f func()) error {
	if in := c.now(); in != nil {
		return in.file.do(f)
	}
	return errLeft
}

func (c *containerSpace) spawner(f func()) error {
	if in := c.now(); in != nil {
		return in.spawn.do(f)
	}
	return errLeft
}

func (c *containerSpace) open(path string, flags int, mode uint32) (int, error) {
	return retryEINTR(func() (int, error) { return unix.Open(path, flags|unix.O_CLOEXEC|unix.O_NOCTTY, mode) })
}

func (c *containerSpace) stat(path string, st *unix.Stat_t) error { return unix.Stat(path, st) }

func (c *containerSpace) terminal() (int, error) {
	return c.open("/dev/ptmx", unix.O_RDWR|unix.O_NONBLOCK, 0)
}

func (c *containerSpace) workdir(path string) string { return path }
func (c *containerSpace) program(path string) string { return path }
func (c *containerSpace) users() bool                { return true }
func (c *containerSpace) contained() bool            { return true }

func (c *containerSpace) initGone() <-chan struct{} {
	if in := c.now(); in != nil {
		return in.gone
	}
	return nil
}

func (c *containerSpace) devNull() (*os.File, error) {
	if in := c.now(); in != nil {
		return in.null, nil
	}
	return nil, errLeft
}
