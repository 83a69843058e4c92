package local

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/cas"
	"github.com/cove-sandbox/cove/cas/castest"
	"github.com/cove-sandbox/cove/sandbox"
)

var errCrash = errors.New("the machine is off")

// faultFS is the host's file system with a fault at one operation. As a crash
// it also plays what a disk may do to what was not synced: content that was
// written is garbage, and a rename is undone (or not: power decides per run).
type faultFS struct {
	hostFS
	fail int   // the operation that fails, counted from 1; 0: none
	err  error // what it fails with; errCrash: and everything after it too

	mu      sync.Mutex
	ops     int
	dirty   map[string]bool // guarded by mu; paths whose content is not synced
	renamed []rename        // guarded by mu; not synced
}

type rename struct{ from, to string }

func newFaultFS(fail int, err error) *faultFS {
	return &faultFS{fail: fail, err: err, dirty: map[string]bool{}}
}

// step counts an operation that changes something and says whether it fails.
func (f *faultFS) step() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ops++
	if f.fail != 0 && (f.ops == f.fail || f.ops > f.fail && f.err == errCrash) {
		return f.err
	}
	return nil
}

func (f *faultFS) Create(name string) (file, error) {
	if err := f.step(); err != nil {
		return nil, err
	}
	file, err := f.hostFS.Create(name)
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	f.dirty[name] = true
	f.mu.Unlock()
	return &faultFile{file: file, fs: f, name: name}, nil
}

func (f *faultFS) Chtimes(name string, at time.Time) error {
	if err := f.step(); err != nil {
		return err
	}
	return f.hostFS.Chtimes(name, at)
}

func (f *faultFS) Rename(from, to string) error {
	if err := f.step(); err != nil {
		return err
	}
	if err := f.hostFS.Rename(from, to); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.renamed = append(f.renamed, rename{from, to})
	if f.dirty[from] {
		delete(f.dirty, from)
		f.dirty[to] = true
	}
	return nil
}

func (f *faultFS) Remove(name string) error {
	if err := f.step(); err != nil && err == errCrash {
		return err // a full disk can still remove
	}
	f.mu.Lock()
	delete(f.dirty, name)
	f.mu.Unlock()
	return f.hostFS.Remove(name)
}

func (f *faultFS) SyncDir(name string) error {
	if err := f.step(); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	left := f.renamed[:0]
	for _, r := range f.renamed {
		if filepath.Dir(r.to) != name {
			left = append(left, r)
		}
	}
	f.renamed = left
	return f.hostFS.SyncDir(name)
}

type faultFile struct {
	file
	fs   *faultFS
	name string
}

func (f *faultFile) Write(p []byte) (int, error) {
	if err := f.fs.step(); err != nil {
		n, _ := f.file.Write(p[:len(p)/2])
		return n, err
	}
	return f.file.Write(p)
}

func (f *faultFile) Sync() error {
	if err := f.fs.step(); err != nil {
		return err
	}
	f.fs.mu.Lock()
	delete(f.fs.dirty, f.name)
	f.fs.mu.Unlock()
	return nil // the point is the order, not the disk's time
}

// powerLoss does to the directory what the disk may do.
func (f *faultFS) powerLoss(t *testing.T, undo bool) {
	t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	for name := range f.dirty {
		st, err := os.Stat(name)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, bytes.Repeat([]byte{0xdb}, int(st.Size())), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if undo {
		for _, r := range f.renamed {
			if err := os.Rename(r.to, r.from); err != nil && !errors.Is(err, fs.ErrNotExist) {
				t.Fatal(err)
			}
		}
	}
}

var crashContents = [][]byte{[]byte("small"), castest.Content(1, 600<<10), castest.Content(2, 5<<20)}

// scripts are what is interrupted. Each returns the contents it was told are stored.
var scripts = map[string]func(context.Context, *Store) (told [][]byte, err error){
	"puts": func(ctx context.Context, s *Store) (told [][]byte, err error) {
		for _, c := range crashContents {
			if _, err := s.Put(ctx, bytes.NewReader(c)); err != nil {
				return told, err
			}
			told = append(told, c)
		}
		_, err = s.Put(ctx, bytes.NewReader(crashContents[0])) // it is there
		return told, err
	},
	"batch": func(ctx context.Context, s *Store) (told [][]byte, err error) {
		b, err := s.Begin()
		if err != nil {
			return nil, err
		}
		defer b.Abort()
		for _, c := range crashContents {
			if _, err := b.Put(ctx, bytes.NewReader(c)); err != nil {
				return nil, err
			}
		}
		if err := b.Commit(ctx); err != nil {
			return nil, err
		}
		return crashContents, nil
	},
}

// A crash at every operation, in both ways the disk may take it: what was told
// is there, whatever is there is whole, and tmp is empty again.
func TestCrashAtEveryStep(t *testing.T) {
	stride := 1
	if testing.Short() {
		stride = 7 // each makes 256 directories and syncs them; the race detector needs a few
	}
	for name, script := range scripts {
		for _, undo := range []bool{false, true} {
			steps := 0
			for fail := 1; ; fail += stride {
				dir := t.TempDir()
				if done := crashOnce(t, dir, newFaultFS(0, nil), fail, undo, script); done {
					break
				}
				os.RemoveAll(dir) // 256 directories each: do not gather them
				if steps++; steps > 200 {
					t.Fatal("the script has no end")
				}
			}
			if steps*stride < 10 {
				t.Errorf("%s: only %d steps failed: the test did not test", name, steps)
			}
			t.Logf("%s, renames undone %v: %d crashes", name, undo, steps)
		}
	}
}

func crashOnce(t *testing.T, dir string, f *faultFS, fail int, undo bool, script func(context.Context, *Store) ([][]byte, error)) (done bool) {
	t.Helper()
	s, err := openFS(f, dir, Options{})
	if err != nil {
		t.Fatal(err)
	}
	f.mu.Lock()
	f.fail, f.err = f.ops+fail, errCrash
	f.mu.Unlock()
	told, err := script(t.Context(), s)
	s.Close()
	if err == nil {
		return true
	}
	f.powerLoss(t, undo)
	s, err = openFS(hostFS{}, dir, Options{})
	if err != nil {
		t.Fatalf("step %d: open after the crash: %v", fail, err)
	}
	defer s.Close()
	for _, c := range told {
		if got, err := read(s, cas.IDOf(sha256.Sum256(c))); err != nil || !bytes.Equal(got, c) {
			t.Errorf("step %d: a blob that was stored: %v", fail, err)
		}
	}
	count := 0
	err = s.List(t.Context(), func(info cas.Info) error {
		count++
		_, err := read(s, info.ID)
		return err
	})
	if err != nil {
		t.Errorf("step %d: something is there by half: %v", fail, err)
	}
	if n := len(files(t, dir)); n != count {
		t.Errorf("step %d: %d files for %d blobs", fail, n, count)
	}
	return false
}

// A full or failing disk at every operation: the error says so, nothing is
// left behind, and the store goes on.
func TestFaultAtEveryStep(t *testing.T) {
	for fault, class := range map[error]error{syscall.ENOSPC: sandbox.ErrDiskFull, syscall.EDQUOT: sandbox.ErrDiskFull, syscall.EIO: sandbox.ErrUnavailable} {
		for name, script := range scripts {
			dir := t.TempDir()
			f := newFaultFS(0, nil)
			s, err := openFS(f, dir, Options{})
			if err != nil {
				t.Fatal(err)
			}
			faults := 0
			for fail := 1; ; fail++ {
				f.mu.Lock()
				f.fail, f.err = f.ops+fail, fault
				f.mu.Unlock()
				_, err := script(t.Context(), s)
				f.mu.Lock()
				reached := f.ops >= f.fail
				f.fail = 0
				f.mu.Unlock()
				if !reached {
					break
				}
				if err != nil {
					faults++
					if !errors.Is(err, class) {
						t.Errorf("%s, step %d: %v", name, fail, err)
					}
				}
				tmp, _ := os.ReadDir(filepath.Join(dir, "tmp"))
				if len(tmp) != 0 {
					t.Errorf("%s, %v at step %d: left %v", name, fault, fail, tmp)
				}
				err = s.List(t.Context(), func(info cas.Info) error {
					if _, err := read(s, info.ID); err != nil {
						return err
					}
					return s.Delete(t.Context(), info.ID)
				})
				if err != nil {
					t.Errorf("%s, step %d: %v", name, fail, err)
				}
				if fail > 200 {
					t.Fatal("the script has no end")
				}
			}
			if faults < 10 {
				t.Errorf("%s: only %d faults", name, faults)
			}
			s.Close()
		}
	}
}
