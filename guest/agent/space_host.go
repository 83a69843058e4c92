package agent

import (
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"
)

// hostSpace acts on a directory of this machine: files are confined below it,
// processes are plain processes that start below it. It isolates nothing and
// is for tests and the fake driver.
type hostSpace struct {
	root string

	mu struct { // also serialises spawner, as in a container
		sync.Mutex
		dir  *os.File // root while entered
		null *os.File
	}
}

// HostSpace acts on a directory of this machine, without isolation.
func HostSpace(root string) Space { return &hostSpace{root: root} }

func (h *hostSpace) prepare(int, int64, string) error { return nil }
func (h *hostSpace) rest()                            {}

// resolv does nothing: the host's is the host's.
func (h *hostSpace) resolv(string) error { return nil }

func (h *hostSpace) enter(_ int, _ int64, workdir string) (home bool, err error) {
	d, err := os.OpenFile(h.root, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return false, err
	}
	null, err := openNull()
	if err != nil {
		d.Close()
		return false, err
	}
	h.mu.Lock()
	h.mu.dir, h.mu.null = d, null
	h.mu.Unlock()
	err = h.spawner(func() {
		var st unix.Stat_t
		home = workdir == "" || h.stat(workdir, &st) == nil
	})
	return home, err
}

func (h *hostSpace) forFiles() Space { return HostSpace(h.root) }

func (h *hostSpace) leave() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.mu.dir != nil {
		h.mu.dir.Close()
		h.mu.null.Close()
		h.mu.dir = nil
	}
}

func (h *hostSpace) files(f func()) error {
	h.mu.Lock()
	entered := h.mu.dir != nil
	h.mu.Unlock()
	if !entered {
		return errLeft
	}
	f()
	return nil
}

func (h *hostSpace) spawner(f func()) error { return h.files(f) }

func (h *hostSpace) open(path string, flags int, mode uint32) (int, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.mu.dir == nil {
		return -1, errLeft
	}
	if flags&(unix.O_CREAT|unix.O_TMPFILE) == 0 {
		mode = 0
	}
	if flags&unix.O_PATH == 0 {
		flags |= unix.O_NOCTTY
	}
	how := unix.OpenHow{Flags: uint64(flags | unix.O_CLOEXEC), Mode: uint64(mode), Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS}
	return retryEINTR(func() (int, error) {
		for {
			fd, err := unix.Openat2(int(h.mu.dir.Fd()), "./"+path, &how)
			if err != unix.EAGAIN { // a rename elsewhere during resolution
				return fd, err
			}
		}
	})
}

func (h *hostSpace) stat(path string, st *unix.Stat_t) error {
	fd, err := h.open(path, unix.O_PATH, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.Fstat(fd, st)
}

func (h *hostSpace) terminal() (int, error) {
	return unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC|unix.O_NOCTTY, 0)
}

func (h *hostSpace) workdir(path string) string { return filepath.Join(h.root, path) }

// program prefers one below root, for tests that bring their own; all others
// are this machine's.
func (h *hostSpace) program(path string) string {
	below := filepath.Join(h.root, path)
	if _, err := os.Stat(below); err == nil {
		return below
	}
	return path
}

func (h *hostSpace) users() bool               { return false }
func (h *hostSpace) contained() bool           { return false }
func (h *hostSpace) initGone() <-chan struct{} { return nil }
func (h *hostSpace) processes() *group         { return nil }
func (h *hostSpace) devNull() (*os.File, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.mu.null, nil
}
