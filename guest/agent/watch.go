package agent

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/guest/wire"
	"github.com/cove-sandbox/cove/sandbox"
)

// maxWatched directories may one watch cover.
const maxWatched = 8192

const watchMask = unix.IN_CREATE | unix.IN_DELETE | unix.IN_MODIFY | unix.IN_ATTRIB | unix.IN_MOVED_FROM | unix.IN_MOVED_TO |
	unix.IN_DELETE_SELF | unix.IN_MOVE_SELF | unix.IN_EXCL_UNLINK

// watcher follows one path by inotify. Directories below it are watched one by
// one; what appears in a new one before it is watched is found by listing it,
// so an event may come twice but not never.
type watcher struct {
	ep        *episode
	root      string
	recursive bool
	fd        int
	file      *os.File // of fd
	emit      func(sandbox.FileChange) error

	paths map[int32]string // by watch descriptor
	last  sandbox.FileChange
	ended bool // the watched path itself is gone
}

// errOver ends a watch whose path or episode is gone.
var errOver = errors.New("watch over")

func (s *session) watch(ep *episode, r wire.Req) error {
	p, err := ep.path("path", r.Path)
	if err != nil {
		return err
	}
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return fileError(p, err)
	}
	w := &watcher{ep: ep, root: p, recursive: r.Flag, fd: fd, file: os.NewFile(uintptr(fd), "inotify"), paths: map[int32]string{}}
	defer w.file.Close()
	w.emit = func(c sandbox.FileChange) error {
		if s.conn.QueueJSON(wire.Change, c) != nil {
			return errGone
		}
		return nil
	}
	var dir int
	if err := ep.inside(func() (err error) { dir, err = ep.space.open(p, unix.O_PATH, 0); return err }); err != nil {
		return fileError(p, err)
	}
	err = w.add(dir, p, false)
	unix.Close(dir)
	if err != nil {
		return fileError(p, err)
	}
	if err := w.emit(sandbox.FileChange{Path: p, Op: "ready"}); err != nil {
		return err
	}
	stop := make(chan struct{})
	defer close(stop)
	go func() {
		select {
		case <-s.ctx.Done():
		case <-ep.over:
		case <-stop:
			return
		}
		w.file.SetReadDeadline(time.Unix(1, 0))
	}()
	for {
		if s.conn.Flush() != nil {
			return errGone
		}
		switch err := w.step(); {
		case s.ctx.Err() != nil:
			return errGone
		case err == errOver, os.IsTimeout(err):
			return s.reply(wire.Res{}, nil)
		case err != nil:
			return err
		}
	}
}

// add watches what an open path descriptor stands for and, recursively, what
// is below it. With fresh set it reports all it finds as created.
func (w *watcher) add(fd int, p string, fresh bool) error {
	if err := w.addOne(fd, p); err != nil || !w.recursive && !fresh {
		return err
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return err
	}
	depth := 1
	if w.recursive {
		depth = maxDepth
	}
	return walk(fd, p, depth, func(dir int, name, child string, st *unix.Stat_t) (bool, error) {
		if fresh {
			if err := w.report(child, "create"); err != nil {
				return false, err
			}
		}
		if !w.recursive || st.Mode&unix.S_IFMT != unix.S_IFDIR {
			return false, nil
		}
		sub, err := fdOpen(dir, name, unix.O_PATH|unix.O_DIRECTORY, 0)
		if err != nil {
			return false, err
		}
		defer unix.Close(sub)
		return true, w.addOne(sub, child)
	})
}

func (w *watcher) addOne(fd int, p string) error {
	if len(w.paths) >= maxWatched {
		return &sandbox.Error{Class: sandbox.TooLarge, Msg: fmt.Sprintf("more than %d directories below %s", maxWatched, w.root), Hint: "watch a smaller directory, or not recursively"}
	}
	// By descriptor through the agent's own /proc: no path of the container is
	// resolved again, and no thread inside is needed.
	wd, err := unix.InotifyAddWatch(w.fd, fmt.Sprintf("/proc/self/fd/%d", fd), watchMask)
	if err != nil {
		return err
	}
	w.paths[int32(wd)] = p
	return nil
}

// step waits for events and reports them.
func (w *watcher) step() error {
	rc, err := w.file.SyscallConn()
	if err != nil {
		return err
	}
	buf := make([]byte, 16<<10)
	var n int
	var rerr error
	err = rc.Read(func(fd uintptr) bool {
		n, rerr = retryEINTR(func() (int, error) { return unix.Read(int(fd), buf) })
		return rerr != unix.EAGAIN
	})
	if err != nil {
		return err
	}
	if rerr != nil {
		return rerr
	}
	for b := buf[:n]; len(b) >= unix.SizeofInotifyEvent; {
		wd := int32(binary.NativeEndian.Uint32(b))
		mask := binary.NativeEndian.Uint32(b[4:])
		size := int(binary.NativeEndian.Uint32(b[12:]))
		name := string(bytes.TrimRight(b[unix.SizeofInotifyEvent:unix.SizeofInotifyEvent+size], "\x00"))
		b = b[unix.SizeofInotifyEvent+size:]
		if err := w.event(wd, mask, name); err != nil {
			return err
		}
	}
	w.last = sandbox.FileChange{} // only neighbours in one read are merged
	if w.ended {
		return errOver
	}
	return nil
}

func (w *watcher) event(wd int32, mask uint32, name string) error {
	if mask&unix.IN_Q_OVERFLOW != 0 {
		return w.report(w.root, "overflow")
	}
	dir, ok := w.paths[wd]
	if !ok {
		return nil
	}
	if mask&unix.IN_IGNORED != 0 {
		delete(w.paths, wd)
		w.ended = w.ended || dir == w.root
		return nil
	}
	p := path.Join(dir, name)
	switch {
	case mask&(unix.IN_DELETE_SELF|unix.IN_MOVE_SELF) != 0:
		if dir != w.root {
			return nil // its parent reports it
		}
		w.ended = true
		if mask&unix.IN_MOVE_SELF != 0 {
			return w.report(p, "rename")
		}
		return w.report(p, "remove")
	case mask&(unix.IN_CREATE|unix.IN_MOVED_TO) != 0:
		if err := w.report(p, "create"); err != nil {
			return err
		}
		if mask&unix.IN_ISDIR != 0 && w.recursive {
			return w.addNew(p)
		}
	case mask&unix.IN_MOVED_FROM != 0:
		w.forget(p)
		return w.report(p, "rename")
	case mask&unix.IN_DELETE != 0:
		return w.report(p, "remove")
	case mask&unix.IN_MODIFY != 0:
		return w.report(p, "write")
	case mask&unix.IN_ATTRIB != 0:
		return w.report(p, "chmod")
	}
	return nil
}

// addNew watches a directory that has just appeared.
func (w *watcher) addNew(p string) error {
	var fd int
	err := w.ep.inside(func() (err error) {
		fd, err = w.ep.space.open(p, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
		return err
	})
	if err != nil {
		return nil // gone again, which its parent reports
	}
	defer unix.Close(fd)
	switch err := w.add(fd, p, true); {
	case errors.Is(err, errGone):
		return err
	case err != nil: // above the limit, or gone in the middle
		return w.report(p, "overflow")
	}
	return nil
}

// forget stops watching what was moved away.
func (w *watcher) forget(p string) {
	for wd, dir := range w.paths {
		if dir == p || strings.HasPrefix(dir, p+"/") {
			unix.InotifyRmWatch(w.fd, uint32(wd))
			delete(w.paths, wd)
		}
	}
}

// report sends a change, unless the one before in the same read was the same.
func (w *watcher) report(p, op string) error {
	c := sandbox.FileChange{Path: p, Op: op}
	if c == w.last {
		return nil
	}
	w.last = c
	return w.emit(c)
}
