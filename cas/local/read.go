package local

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"github.com/cove-sandbox/cove/cas"
	"github.com/cove-sandbox/cove/cas/internal/blob"
	"github.com/cove-sandbox/cove/sandbox"
)

func errClosed() error {
	return &sandbox.Error{Class: sandbox.Unavailable, Msg: "the store is closed"}
}

func isDamage(err error) bool { return errors.Is(err, sandbox.ErrCorrupt) }

// openBlob opens the file of a blob and checks its header and end record.
func (s *Store) openBlob(ctx context.Context, id cas.ID) (*blob.Blob, file, error) {
	if _, err := cas.ParseID(string(id)); err != nil {
		return nil, nil, err
	}
	if err := s.check(ctx); err != nil {
		return nil, nil, err
	}
	f, err := s.fs.Open(s.path(id))
	if err != nil {
		return nil, nil, err
	}
	st, err := f.Stat()
	if err != nil {
		return nil, nil, errors.Join(err, f.Close())
	}
	b, err := s.codec.Open(f, st.Size(), id)
	if err != nil {
		f.Close()
		return nil, nil, err
	}
	return b, f, nil
}

// Open reads a blob; see cas.Store. The reader is also an io.WriterTo.
func (s *Store) Open(ctx context.Context, id cas.ID) (io.ReadCloser, error) {
	const op = "cas.get"
	b, f, err := s.openBlob(ctx, id)
	if err != nil {
		return nil, notFound(op, id, err)
	}
	return &reader{r: b.NewReader(ctx), f: f}, nil
}

// reader gives the errors of the format their operation.
type reader struct {
	r *blob.Reader
	f file
}

func (r *reader) Read(p []byte) (int, error) {
	n, err := r.r.Read(p)
	if err != nil && err != io.EOF {
		err = asError("cas.read", err)
	}
	return n, err
}

func (r *reader) WriteTo(w io.Writer) (int64, error) {
	n, err := r.r.WriteTo(w)
	return n, asError("cas.read", err)
}

func (r *reader) Close() error { return r.f.Close() }

// ReadTo writes the content to dst from its start, as fast as the machine can:
// frames are decoded beside each other. After an error dst holds a part.
func (s *Store) ReadTo(ctx context.Context, id cas.ID, dst *os.File) error {
	const op = "cas.read"
	b, f, err := s.openBlob(ctx, id)
	if err != nil {
		return notFound(op, id, err)
	}
	defer f.Close()
	return asError(op, b.ReadTo(ctx, dst, runtime.GOMAXPROCS(0)))
}

// Stat describes a blob; see cas.Store.
func (s *Store) Stat(ctx context.Context, id cas.ID) (cas.Info, error) {
	const op = "cas.stat"
	if _, err := cas.ParseID(string(id)); err != nil {
		return cas.Info{}, asError(op, err)
	}
	if err := s.check(ctx); err != nil {
		return cas.Info{}, asError(op, err)
	}
	info, err := s.stat(id)
	return info, notFound(op, id, err)
}

// stat reads the header and the end record. On damage the Info says what the
// file system knows, with Size -1.
func (s *Store) stat(id cas.ID) (cas.Info, error) {
	f, err := s.fs.Open(s.path(id))
	if err != nil {
		return cas.Info{}, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return cas.Info{}, err
	}
	info := cas.Info{ID: id, Size: -1, Stored: st.Size(), At: st.ModTime()}
	size, err := s.codec.Stat(f, st.Size(), id)
	if err == nil {
		info.Size = size
	}
	return info, err
}

// Delete removes a blob; see cas.Store.
func (s *Store) Delete(ctx context.Context, id cas.ID) error {
	const op = "cas.delete"
	if _, err := cas.ParseID(string(id)); err != nil {
		return asError(op, err)
	}
	if err := s.check(ctx); err != nil {
		return asError(op, err)
	}
	mu := s.stripe(id)
	mu.Lock()
	defer mu.Unlock()
	return asError(op, s.remove(id))
}

// remove does not sync the directory: after a crash a blob may be back, which
// costs space until it is deleted again and is never wrong.
func (s *Store) remove(id cas.ID) error {
	if err := s.fs.Remove(s.path(id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// Sweep deletes a blob that nobody stored lately; see cas.Sweeper.
func (s *Store) Sweep(ctx context.Context, id cas.ID, before time.Time) (bool, error) {
	const op = "cas.sweep"
	if _, err := cas.ParseID(string(id)); err != nil {
		return false, asError(op, err)
	}
	if err := s.check(ctx); err != nil {
		return false, asError(op, err)
	}
	mu := s.stripe(id)
	mu.Lock()
	defer mu.Unlock()
	// Under the stripe: a batch that begins later renews under it too, and then
	// either finds the blob gone or has it younger than its own beginning.
	if at, ok := s.oldest(); ok && at.Before(before) {
		before = at.Truncate(time.Second) // file systems with times in whole seconds exist
	}
	st, err := s.fs.Stat(s.path(id))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, asError(op, err)
	}
	if !st.ModTime().Before(before) {
		return false, nil
	}
	if err := s.remove(id); err != nil {
		return false, asError(op, err)
	}
	return true, nil
}

// List lists the blobs; see cas.Store. Files that are not blobs are left alone.
func (s *Store) List(ctx context.Context, f func(cas.Info) error) error {
	const op = "cas.list"
	for i := range 256 {
		if err := s.check(ctx); err != nil {
			return asError(op, err)
		}
		dir := s.shard(i)
		entries, err := s.fs.ReadDir(dir) // sorted by name
		if err != nil {
			return asError(op, err)
		}
		for _, e := range entries {
			id, err := cas.ParseID("sha256:" + filepath.Base(dir) + e.Name())
			if err != nil {
				continue
			}
			info, err := s.stat(id)
			if errors.Is(err, fs.ErrNotExist) {
				continue // deleted since
			}
			if err != nil && info.ID == "" {
				return asError(op, err)
			}
			if err := f(info); err != nil {
				return err
			}
			if err := ctx.Err(); err != nil {
				return asError(op, err)
			}
		}
	}
	return nil
}
