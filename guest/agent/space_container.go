package agent

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/guest/wire"
)

const (
	fileThreads = 4
	fileKeep    = 10 * time.Second
	lastCap     = 63
	closeAfter  = 20 * time.Millisecond
)

// containerSpace is the user's container of the kernel the agent runs in. It
// is entered thread by thread: the process as a whole stays in the root
// container, out of sight of the user's pid namespace.
type containerSpace struct {
	filesOnly bool // no spawner is needed
	ahead     bool // the launcher of the next container is made before it is entered

	mu struct {
		sync.Mutex
		inside *inside   // nil when not entered
		staged *inside   // entered and not yet served; nil when none
		next   *launcher // nil when none is being made
		file   *thread   // for the files of the next container, without its setup; nil = none
		dying  *inside   // left, and its processes were killed; nil once they are known to be gone
	}
}

// inside is one entered container.
type inside struct {
	init  *os.File // pidfd of its init
	gone  chan struct{}
	null  *os.File
	group *group
	spawn *threadPool
	file  *threadPool

	initPID int
	workdir string // looked for on arrival
	home    bool   // and found
}

// launcher is what entering a container takes and does not depend on it: the
// thread that forks, confined, and the group of what it forks. Made while the
// kernel waits in its pool and kept from one container to the next, it takes 6
// of 7 ms out of an attach and a reset: a new thread and its forty system
// calls are slow in gVisor.
type launcher struct {
	ready   chan struct{} // closed when the rest is set
	group   *group
	spawner *thread
	err     error
	used    bool // it served a container, whose mount namespace the thread still holds
}

// NewContainerSpace acts in the container entered by Enter's init pid.
func NewContainerSpace() Space { return &containerSpace{} }

// NewKernelSpace is the space of an agent that is PID 1 of a kernel: it begins
// at once to prepare for the container to come.
func NewKernelSpace() Space {
	c := &containerSpace{ahead: true}
	c.mu.next = newLauncher(true)
	go func() { // without it the first call on files makes one, which takes it 2 ms
		t, err := newThread(ownRoot)
		if err != nil {
			return
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		c.mu.file = t
	}()
	return c
}

// newLauncher makes a launcher in the background. Without a group where the kernel is
// not ours to mount things in.
func newLauncher(grouped bool) *launcher {
	b := &launcher{ready: make(chan struct{})}
	go func() {
		defer close(b.ready)
		if grouped {
			if b.group, b.err = newGroup(); b.err != nil {
				return
			}
		}
		b.spawner, b.err = newThread(func() error {
			if err := ownRoot(); err != nil {
				return err
			}
			return confineThread()
		})
	}()
	return b
}

// end destroys a launcher that no container will take.
func (b *launcher) end() {
	<-b.ready
	if b.err == nil {
		b.spawner.end()
	}
	b.group.close()
}

// takeLauncher waits for the launcher made ahead, or makes one.
func (c *containerSpace) takeLauncher() (*launcher, error) {
	c.mu.Lock()
	b := c.mu.next
	c.mu.next = nil
	c.mu.Unlock()
	if b == nil {
		b = newLauncher(c.ahead)
	}
	<-b.ready
	if b.err != nil {
		b.group.close()
		return nil, b.err
	}
	return b, nil
}

// prepare enters the container that will be served next while this one still
// is: what is left for enter is to end the old one, 1 of 5 ms. Nothing runs in
// the new one until then but its init.
func (c *containerSpace) prepare(initPID int, pids int64, workdir string) error {
	in, err := c.join(initPID, pids, workdir)
	if err != nil {
		return err
	}
	c.mu.Lock()
	in, c.mu.staged = c.mu.staged, in
	c.mu.Unlock()
	if in != nil {
		in.close()
	}
	return nil
}

// rest lets go of every container but the one served: what a thread waits in
// for the next one would be part of a checkpoint, and the host knows nothing of
// it any more.
func (c *containerSpace) rest() {
	c.mu.Lock()
	staged, next := c.mu.staged, c.mu.next
	c.mu.staged = nil
	if next != nil && next.used {
		c.mu.next = nil
	}
	c.mu.Unlock()
	if staged != nil {
		staged.close()
	}
	if next != nil && next.used {
		next.end()
	}
}

func (c *containerSpace) enter(initPID int, pids int64, workdir string) (home bool, err error) {
	c.mu.Lock()
	in := c.mu.staged
	c.mu.staged = nil
	c.mu.Unlock()
	if in != nil && (in.initPID != initPID || in.workdir != workdir) {
		in.close()
		in = nil
	}
	if in == nil {
		if in, err = c.join(initPID, pids, workdir); err != nil {
			return false, err
		}
	}
	if err = in.group.limit(pids); err == nil {
		// They died while we were entering: nobody waits for nothing.
		err = c.awaitDead()
	}
	if err != nil {
		in.close()
		return false, err
	}
	go in.watch()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.inside = in
	return in.home, nil
}

// resolv replaces the file, whatever the image has there (a link, a FIFO). On
// the thread that is inside already: the first of those for files takes
// 10 ms and more to come in, which a create would wait for.
func (c *containerSpace) resolv(content string) (err error) {
	c.mu.Lock()
	in := c.mu.inside
	c.mu.Unlock()
	if in == nil || in.spawn == nil {
		return errNoContainer()
	}
	derr := in.spawn.do(func() {
		const path = "/etc/resolv.conf"
		if err = unix.Mkdir("/etc", 0o755); err != nil && err != unix.EEXIST {
			return
		}
		if err = unix.Unlink(path); err != nil && err != unix.ENOENT {
			return
		}
		var fd int
		if fd, err = unix.Open(path, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o644); err != nil {
			return
		}
		_, err = unix.Write(fd, []byte(content))
		unix.Close(fd)
	})
	return errors.Join(derr, err)
}

// join brings threads into the container of an init.
func (c *containerSpace) join(initPID int, pids int64, workdir string) (*inside, error) {
	fd, err := unix.PidfdOpen(initPID, unix.PIDFD_NONBLOCK) // for os.NewFile: wait for its end in the poller
	if err != nil {
		return nil, fmt.Errorf("pidfd_open of init %d: %w", initPID, err)
	}
	in := &inside{init: os.NewFile(uintptr(fd), "init"), gone: make(chan struct{}), initPID: initPID, workdir: workdir}
	c.mu.Lock()
	ahead := c.mu.file
	c.mu.file = nil
	c.mu.Unlock()
	in.file = newThreadPool(fileThreads, fileKeep, ahead, func() error {
		if err := enterThread(fd, 0); err != nil {
			return err
		}
		return disarmThread()
	})
	if in.null, err = openNull(); err == nil && !c.filesOnly {
		err = c.joinSpawner(in, fd, pids)
	}
	if err != nil {
		in.close()
		return nil, err
	}
	return in, nil
}

// joinSpawner brings the prepared thread inside.
func (c *containerSpace) joinSpawner(in *inside, pidfd int, pids int64) error {
	b, err := c.takeLauncher()
	if err != nil {
		return err
	}
	in.group = b.group
	in.spawn = poolOf(b.spawner)
	if err := b.group.limit(pids); err != nil {
		return err
	}
	derr := in.spawn.do(func() {
		if err = enterThread(pidfd, 0o022); err != nil {
			return
		}
		// gVisor puts a tmpfs of its own on an empty /tmp, in memory and
		// without a limit. Ours is the image's, on the writable layer. Where
		// there is no such mount (not in gVisor) the call fails, which is as
		// good.
		unix.Unmount("/tmp", unix.MNT_DETACH)
		var st unix.Stat_t
		in.home = in.workdir == "" || c.stat(in.workdir, &st) == nil
	})
	return errors.Join(derr, err)
}

func (c *containerSpace) forFiles() Space { return &containerSpace{filesOnly: true} }

// ownRoot gives the calling thread a root, a working directory and a umask of
// its own, without which it cannot enter another mount namespace.
func ownRoot() error {
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("unshare(CLONE_FS): %w", err)
	}
	return nil
}

// enterThread moves the calling thread, which has a root and a working
// directory of its own, into the container of a pidfd. The pid namespace
// applies to what it forks.
func enterThread(pidfd, umask int) error {
	if err := unix.Setns(pidfd, unix.CLONE_NEWNS|unix.CLONE_NEWPID|unix.CLONE_NEWIPC|unix.CLONE_NEWUTS); err != nil {
		return fmt.Errorf("setns: %w", err)
	}
	unix.Umask(umask)
	return nil
}

// disarmThread takes CAP_SYS_PTRACE from a thread that works on files: with it,
// links in /proc lead to what processes hold, those that are being started by
// the agent included.
func disarmThread() error {
	return changeCaps(func(data *[2]unix.CapUserData) {
		data[0].Effective &^= 1 << unix.CAP_SYS_PTRACE
		data[0].Permitted &^= 1 << unix.CAP_SYS_PTRACE
	})
}

func changeCaps(change func(*[2]unix.CapUserData)) error {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return fmt.Errorf("capget: %w", err)
	}
	change(&data)
	if err := unix.Capset(&hdr, &data[0]); err != nil {
		return fmt.Errorf("capset: %w", err)
	}
	return nil
}

// processCaps is what processes of root may have, as a mask.
func processCaps() (mask uint64) {
	for _, c := range wire.UserCaps {
		mask |= 1 << c
	}
	return mask
}

// confineThread takes from what the thread executes all but processCaps. Until
// it executes, a forked child shares the agent's memory: that nobody inside may
// trace it then is the kernel's rule (cmd/runsc/edits), not a question of powers.
func confineThread() error {
	keep := processCaps()
	for c := uintptr(0); c <= lastCap; c++ {
		if keep&(1<<c) != 0 {
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
	return changeCaps(func(data *[2]unix.CapUserData) { data[0].Inheritable, data[1].Inheritable = 0, 0 })
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

// kill ends all that runs inside: with its init a pid namespace goes, and the
// init is gone when the rest is (see awaitDead). So a reset need not wait for
// the host to destroy the container before it enters the next.
func (in *inside) kill() {
	rc, err := in.init.SyscallConn()
	if err != nil {
		return
	}
	rc.Control(func(fd uintptr) { unix.PidfdSendSignal(int(fd), unix.SIGKILL, nil, 0) })
}

// deadGrace bounds how long a reset waits for what it killed: after it the sandbox
// ends. On a machine without CPU to spare 2 s were not enough.
const deadGrace = 30 * time.Second

// awaitDead waits until all that ran in the container left last is gone.
func (c *containerSpace) awaitDead() error {
	c.mu.Lock()
	in := c.mu.dying
	c.mu.dying = nil
	c.mu.Unlock()
	if in == nil {
		return nil
	}
	select {
	case <-in.gone:
		return nil
	case <-time.After(deadGrace):
		return errors.New("processes of the container that was left do not end")
	}
}

// reclaim takes the launcher back for the next container, whose namespaces the
// thread will enter from this one's; its group is empty once all inside is
// dead. A thread that does not come back (a fork that hangs) is left to itself.
func (in *inside) reclaim() *launcher {
	t := in.spawn.detach(leaveGrace)
	if t == nil {
		return newLauncher(true)
	}
	b := &launcher{ready: make(chan struct{}), group: in.group, spawner: t, used: true}
	close(b.ready)
	group, made := in.group, in.group.next.Load()
	time.AfterFunc(closeAfter, func() { group.sweep(made) })
	in.spawn, in.group = nil, nil
	return b
}

func (in *inside) close() {
	in.file.close()
	if in.spawn != nil {
		in.spawn.close()
	}
	in.init.Close()
	in.group.close()
	if in.null != nil {
		in.null.Close()
	}
}

func (c *containerSpace) leave() {
	c.mu.Lock()
	in := c.mu.inside
	c.mu.inside = nil
	c.mu.Unlock()
	if in == nil {
		return
	}
	if c.ahead {
		in.kill()
		b := in.reclaim()
		c.mu.Lock()
		old := c.mu.next
		c.mu.next, c.mu.dying = b, in
		if c.mu.file == nil {
			c.mu.file = in.file.takeAhead()
		}
		c.mu.Unlock()
		if old != nil {
			// Left by a reset that found its container prepared, after which
			// nobody prepared the next: two resets in a row, or the host's
			// process died. Forgotten, its thread would hold the container
			// before this one for ever, and no checkpoint could be made.
			time.AfterFunc(closeAfter, old.end)
		}
	}
	// Nothing starts inside any more; ending the threads takes milliseconds
	// that the reset under way needs for something else. And whoever waits for
	// the processes to be gone needs the descriptor of their init.
	time.AfterFunc(closeAfter, func() {
		if c.ahead {
			select {
			case <-in.gone:
			case <-time.After(leaveGrace):
			}
		}
		in.close()
	})
}

func (c *containerSpace) now() *inside {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.inside
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

// open follows links, but not those in /proc that lead to what a process holds
// whatever its name: a child that is being started still has the descriptors
// of the agent, and code inside may know its pid ahead.
func (c *containerSpace) open(path string, flags int, mode uint32) (int, error) {
	how := unix.OpenHow{Flags: uint64(flags | unix.O_CLOEXEC), Resolve: unix.RESOLVE_NO_MAGICLINKS}
	if flags&unix.O_PATH == 0 {
		how.Flags |= unix.O_NOCTTY
	}
	if flags&unix.O_CREAT != 0 { // openat2 refuses a mode without, and with it all but permissions
		how.Mode = uint64(mode & 0o7777)
	}
	return retryEINTR(func() (int, error) { return unix.Openat2(unix.AT_FDCWD, path, &how) })
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

func (c *containerSpace) processes() *group {
	if in := c.now(); in != nil {
		return in.group
	}
	return nil
}

func (c *containerSpace) devNull() (*os.File, error) {
	if in := c.now(); in != nil {
		return in.null, nil
	}
	return nil, errLeft
}
