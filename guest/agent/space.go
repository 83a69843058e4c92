package agent

import (
	"os"

	"golang.org/x/sys/unix"
)

// Space is where an agent acts: the user's container, or a directory.
// [NewContainerSpace] and [HostSpace] make the two there are.
type Space interface {
	// enter makes the container of this init reachable, until leave. home says
	// that workdir is there.
	enter(initPID int, pids int64, workdir string) (home bool, err error)
	// prepare does ahead what it can of an enter to come.
	prepare(initPID int, pids int64, workdir string) error
	// resolv writes /etc/resolv.conf.
	resolv(content string) error
	// rest undoes prepare, and lets go of containers that were left.
	rest()
	// forFiles is another space of the same kind that starts no processes.
	forFiles() Space
	// leave ends the threads inside and, where no container is destroyed
	// afterwards, what they started.
	leave()

	// files runs f on a thread where open and absolute paths mean the
	// container's. spawner is the same on the one thread that forks.
	files(f func()) error
	spawner(f func()) error

	// open opens a clean absolute path of the container. It must be called by
	// f of files or spawner. Symlinks are followed and cannot lead outside.
	open(path string, flags int, mode uint32) (int, error)
	// stat is fstat of what open would open, under the same rules.
	stat(path string, st *unix.Stat_t) error
	// terminal opens the master side of a new terminal, under the same rules.
	terminal() (int, error)
	// workdir and program are a directory to start in and a file to execute,
	// as the spawner must name them.
	workdir(path string) string
	program(path string) string

	// users says that processes and files get the user they ask for.
	users() bool
	// contained says that processes live in a pid namespace of their own.
	contained() bool
	// initGone is closed when the container's init has ended; nil without one.
	initGone() <-chan struct{}
	// processes is the group processes are started in; nil for none.
	processes() *group
	// devNull is the stdin of processes that want none.
	devNull() (*os.File, error)
}

// openNull opens the agent's own /dev/null: the container's may be anything by
// now. Without one, a pipe at its end reads the same. Not by os.OpenFile, which
// offers it to the poller in four more calls.
func openNull() (*os.File, error) {
	if fd, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0); err == nil {
		return os.NewFile(uintptr(fd), "/dev/null"), nil
	}
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	w.Close()
	return r, nil
}

// fdOpen is open at a directory descriptor, for one name and never through a
// symlink: the step that every walk is made of.
func fdOpen(dir int, name string, flags int, mode uint32) (int, error) {
	return retryEINTR(func() (int, error) {
		return unix.Openat(dir, name, flags|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NOCTTY|unix.O_NONBLOCK, mode)
	})
}

func retryEINTR(f func() (int, error)) (int, error) {
	for {
		n, err := f()
		if err != unix.EINTR {
			return n, err
		}
	}
}
