// Package local keeps blobs as files of a directory, for one process at a time.
//
//	dir/lock      held (flock) while the store is open
//	dir/tmp/N     blobs that are being written; removed at Open
//	dir/ab/cdef…  the blob sha256:abcdef…
//
// A blob is written to tmp, synced, renamed to its name, and the directory is
// synced: under its name it is always whole. A crash leaves at most files in
// tmp, and Open removes them: there is no other recovery.
package local

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/cove-sandbox/cove/cas"
	"github.com/cove-sandbox/cove/cas/internal/blob"
	"github.com/cove-sandbox/cove/internal/seal"
	"github.com/cove-sandbox/cove/sandbox"
)

// Options of a store. The zero value is a plain store that compresses.
type Options struct {
	// Keys, once there are any, seal every new blob. Blobs from before are
	// still read.
	Keys *seal.Keyring
	// Uncompressed stores everything as if each Put asked for it.
	Uncompressed bool
}

// Store implements cas.Store, cas.Batcher and cas.Sweeper.
type Store struct {
	dir    string
	opts   Options
	fs     fsys
	codec  *blob.Codec
	now    func() time.Time
	probes probes
	lock   *os.File
	temp   atomic.Uint64

	// Names come and go under the lock of their stripe, so that finding a blob
	// and renewing it is one step, and checking its age and deleting it is one.
	stripes [64]sync.Mutex
	dirs    [256]directory

	mu struct {
		sync.Mutex
		closed  bool
		batches map[*batch]time.Time   // open ones, and when each began
		putting map[*staging]time.Time // Puts under way count like batches
	}
}

var (
	_ cas.Store   = (*Store)(nil)
	_ cas.Batcher = (*Store)(nil)
	_ cas.Sweeper = (*Store)(nil)
)

// Open opens the store in dir, made if it is not there, and removes what a
// crash left. ErrPrecondition when another process has it open.
func Open(dir string, opts Options) (*Store, error) {
	return openFS(hostFS{}, dir, opts)
}

func openFS(fsys fsys, dir string, opts Options) (_ *Store, err error) {
	const op = "cas.open"
	codec, err := blob.NewCodec(opts.Keys, runtime.GOMAXPROCS(0))
	if err != nil {
		return nil, err
	}
	s := &Store{dir: dir, opts: opts, fs: fsys, codec: codec, now: time.Now}
	s.mu.batches, s.mu.putting = map[*batch]time.Time{}, map[*staging]time.Time{}
	if err := fsys.MkdirAll(dir); err != nil {
		return nil, asError(op, err)
	}
	// A second process would remove the first one's files in tmp.
	if s.lock, err = lockDir(filepath.Join(dir, "lock")); err != nil {
		return nil, asError(op, err)
	}
	defer func() {
		if err != nil {
			s.lock.Close()
		}
	}()
	if err := s.recover(); err != nil {
		return nil, asError(op, err)
	}
	return s, nil
}

func lockDir(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		f.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, (&sandbox.Error{Class: sandbox.Precondition, Msg: path + " is held: another process has the store open"}).
				WithHint("stop the other one, or give this one a directory of its own")
		}
		return nil, err
	}
	return f, nil
}

// recover makes the directories and empties tmp. All 256 are made at once, so
// that a Put never makes one that would have to be durable first.
func (s *Store) recover() error {
	tmp := filepath.Join(s.dir, "tmp")
	if err := s.fs.MkdirAll(tmp); err != nil {
		return err
	}
	left, err := s.fs.ReadDir(tmp)
	if err != nil {
		return err
	}
	for _, e := range left {
		if err := s.fs.Remove(filepath.Join(tmp, e.Name())); err != nil {
			return err
		}
	}
	for i := range 256 {
		if err := s.fs.MkdirAll(s.shard(i)); err != nil {
			return err
		}
	}
	return s.fs.SyncDir(s.dir)
}

// Close gives the directory free for another process. Calls afterwards fail;
// readers that are open stay so.
func (s *Store) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.closed {
		return nil
	}
	s.mu.closed = true
	return s.lock.Close()
}

func (s *Store) check(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.closed {
		return errClosed()
	}
	return nil
}

func (s *Store) shard(i int) string {
	const digits = "0123456789abcdef"
	return filepath.Join(s.dir, string([]byte{digits[i>>4], digits[i&15]}))
}

func (s *Store) path(id cas.ID) string {
	hex := id.Hex()
	return filepath.Join(s.dir, hex[:2], hex[2:])
}

// home is the directory of a blob.
func (s *Store) home(id cas.ID) int {
	sum, _ := id.Sum() // callers have checked it
	return int(sum[0])
}

// syncHome returns when the names in a directory are on disk.
func (s *Store) syncHome(i int) error {
	return s.dirs[i].sync(func() error { return s.fs.SyncDir(s.shard(i)) })
}

func (s *Store) tempPath() string {
	return filepath.Join(s.dir, "tmp", strconv.FormatUint(s.temp.Add(1), 10))
}

func (s *Store) stripe(id cas.ID) *sync.Mutex {
	sum, _ := id.Sum() // callers have checked it
	return &s.stripes[sum[0]%64]
}

// asError gives err its class and operation. Errors about one blob come with
// both already but for the operation.
func asError(op string, err error) error {
	var se *sandbox.Error
	switch {
	case err == nil:
		return nil
	case sandbox.NoSpace(err):
		return (&sandbox.Error{Class: sandbox.DiskFull, Op: op, Msg: "no space left for blobs", Err: err}).
			WithHint("delete snapshots or collect garbage, or free space on the file system of the blob directory")
	case errors.As(err, &se):
		return sandbox.WithOp(op, err)
	case errors.Is(err, context.DeadlineExceeded):
		return &sandbox.Error{Class: sandbox.DeadlineReached, Op: op, Err: err}
	case errors.Is(err, context.Canceled):
		return &sandbox.Error{Class: sandbox.Canceled, Op: op, Err: err}
	case errors.Is(err, syscall.EIO) || errors.Is(err, syscall.EROFS):
		return (&sandbox.Error{Class: sandbox.Unavailable, Op: op, Err: err}).WithHint("the disk under the blob directory fails: see the kernel's log")
	}
	return &sandbox.Error{Class: sandbox.Internal, Op: op, Err: err}
}

func notFound(op string, id cas.ID, err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return &sandbox.Error{Class: sandbox.NotFound, Op: op, Err: &cas.BlobError{ID: id, Reason: "not in the store"}}
	}
	return asError(op, err)
}
