package image

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// partialAge is how long an unfinished download waits for its next pull.
const partialAge = 7 * 24 * time.Hour

// workspace is the temporary directory of one operation, on the library's file
// system so that the result can be renamed into place. Its lock file stays
// flocked for as long as its owner lives: that, and not an age, is how another
// process tells work under way from what a crash left.
type workspace struct {
	dir  string
	lock *os.File
}

const workspaceLock = ".lock"

func (l *Library) newWorkspace(ctx context.Context) (_ *workspace, err error) {
	unlock, err := l.lockNames(ctx)
	if err != nil {
		return nil, err
	}
	defer unlock() // a sweep cannot see the directory before its lock is held
	dir, err := os.MkdirTemp(l.tmpDir(), "")
	if err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(dir, workspaceLock), os.O_CREATE|os.O_RDWR, 0o600)
	if err == nil {
		err = tryFlock(f)
	}
	if err != nil {
		if f != nil {
			f.Close()
		}
		os.RemoveAll(dir)
		return nil, err
	}
	return &workspace{dir: dir, lock: f}, nil
}

func (w *workspace) path(name string) string { return filepath.Join(w.dir, name) }

// close removes the directory and everything in it.
func (w *workspace) close() error {
	err := os.RemoveAll(w.dir)
	w.lock.Close()
	return err
}

// sweep removes workspaces whose owner is gone, halves of image pairs, and
// partial downloads nobody came back for.
func (l *Library) sweep() error {
	unlock, err := l.lockNames(context.Background())
	if err != nil {
		return err
	}
	defer unlock()
	tmp, err := os.ReadDir(l.tmpDir())
	if err != nil {
		return err
	}
	for _, e := range tmp {
		dir := filepath.Join(l.tmpDir(), e.Name())
		if f, err := os.Open(filepath.Join(dir, workspaceLock)); err == nil {
			held := tryFlock(f) != nil
			f.Close()
			if held {
				continue
			}
		}
		l.log.Info("removing what a crash left", "dir", dir)
		if err := os.RemoveAll(dir); err != nil {
			return err
		}
	}
	blobs, err := os.ReadDir(l.blobDir())
	if err != nil {
		return err
	}
	for _, e := range blobs {
		name := e.Name()
		twin := ""
		if h, ok := strings.CutSuffix(name, ".erofs"); ok {
			twin = l.sidecarPath(h)
		} else if h, ok := strings.CutSuffix(name, ".json"); ok {
			twin = l.blobPath(h)
		} else {
			continue // not ours
		}
		if _, err := os.Stat(twin); errors.Is(err, fs.ErrNotExist) {
			l.log.Info("removing half of an image", "file", name)
			if err := os.Remove(filepath.Join(l.blobDir(), name)); err != nil {
				return err
			}
		}
	}
	partial, err := os.ReadDir(l.partialDir())
	if err != nil {
		return err
	}
	for _, e := range partial {
		info, err := e.Info()
		if err == nil && l.opts.Now().Sub(info.ModTime()) > partialAge {
			os.Remove(filepath.Join(l.partialDir(), e.Name()))
		}
	}
	return nil
}

// lockNames takes the lock under which names in blobs/ and tmp/ change. It is
// held for renames and removals only, never across a build.
func (l *Library) lockNames(ctx context.Context) (unlock func(), err error) {
	f, err := os.OpenFile(filepath.Join(l.dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := flock(ctx, f); err != nil {
		f.Close()
		return nil, err
	}
	return func() { f.Close() }, nil
}

// flock waits for an exclusive lock. The blocking call cannot be interrupted,
// so it asks again every 20 ms: waiting is rare and short.
func flock(ctx context.Context, f *os.File) error {
	for {
		err := tryFlock(f)
		if err == nil || !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func tryFlock(f *os.File) error { return unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) }
