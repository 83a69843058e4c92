package local

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"io/fs"
	"slices"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/cas"
)

// probeSize is how much of a content is read before anything is written: up to
// that, a content that is there already costs a hash and no write. It is the
// size of a chunk of memory, for which that matters most.
const probeSize = 4 << 20

// probes are the buffers for that; 4 MiB each is too much to leave to the
// garbage collector.
type probes struct{ pool sync.Pool }

func (p *probes) get() *[]byte {
	if b, ok := p.pool.Get().(*[]byte); ok {
		return b
	}
	b := make([]byte, probeSize)
	return &b
}

// staging is a blob on its way to its name.
type staging struct {
	info cas.Info
	tmp  string // "" when the blob was there already
	file file   // open for the sync to come; nil when tmp is ""
}

// Put stores a blob; see cas.Store.
func (s *Store) Put(ctx context.Context, r io.Reader, opts ...cas.PutOption) (cas.Info, error) {
	const op = "cas.put"
	st := &staging{}
	// What this Put finds there and renews must not be swept before it returns.
	if err := s.begin(st); err != nil {
		return cas.Info{}, asError(op, err)
	}
	defer s.end(st)
	if err := s.stage(ctx, st, r, opts); err != nil {
		return cas.Info{}, asError(op, err)
	}
	if st.file != nil {
		err := st.file.Sync()
		if err = errors.Join(err, st.file.Close()); err != nil {
			s.drop(st)
			return cas.Info{}, asError(op, err)
		}
	}
	if err := s.publish(st); err != nil {
		return cas.Info{}, asError(op, err)
	}
	// Also when it was there: whoever renamed it may not have synced yet.
	if err := s.syncHome(s.home(st.info.ID)); err != nil {
		return cas.Info{}, asError(op, err)
	}
	return st.info, nil
}

func (s *Store) begin(st *staging) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.closed {
		return errClosed()
	}
	s.mu.putting[st] = s.now()
	return nil
}

func (s *Store) end(st *staging) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.mu.putting, st)
}

// stage reads r to its end into a file of tmp, unless the content is there. On
// error nothing is left. The file is written but not synced.
func (s *Store) stage(ctx context.Context, st *staging, r io.Reader, opts []cas.PutOption) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	compress := !s.opts.Uncompressed && !slices.Contains(opts, cas.Uncompressed)
	probe := s.probes.get()
	defer s.probes.pool.Put(probe)

	n, err := io.ReadFull(ctxReader{ctx, r}, *probe)
	first := (*probe)[:n]
	switch {
	case errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF):
		sum := sha256.Sum256(first)
		id := cas.IDOf(sum)
		if info, ok, err := s.renew(id); err != nil || ok {
			st.info = info
			return err
		}
		return s.write(ctx, st, bytes.NewReader(first), compress, &sum)
	case err != nil:
		return err
	}
	if err := s.write(ctx, st, io.MultiReader(bytes.NewReader(first), r), compress, nil); err != nil {
		return err
	}
	info, ok, err := s.renew(st.info.ID)
	if err == nil && !ok {
		return nil
	}
	err = errors.Join(err, st.file.Close())
	s.drop(st)
	st.info, st.tmp, st.file = info, "", nil
	return err
}

// write encodes r into a new file of tmp.
func (s *Store) write(ctx context.Context, st *staging, r io.Reader, compress bool, known *[sha256.Size]byte) (err error) {
	path := s.tempPath()
	f, err := s.fs.Create(path)
	if err != nil {
		return err
	}
	st.tmp, st.file = path, f
	defer func() {
		if err != nil {
			f.Close()
			s.drop(st)
			st.tmp, st.file = "", nil
		}
	}()
	w, err := s.codec.NewWriter(f, compress, known)
	if err != nil {
		return err
	}
	if _, err := io.CopyBuffer(struct{ io.Writer }{w}, ctxReader{ctx, r}, make([]byte, copySize)); err != nil {
		return err
	}
	if st.info, err = w.Finish(); err != nil {
		return err
	}
	st.info.New, st.info.At = true, s.now()
	return s.fs.Chtimes(path, st.info.At)
}

// copySize is a frame, so that a frame is encoded from where it was read to.
const copySize = 256 << 10

// drop removes what stage left in tmp. An error cannot be helped here: Open
// removes what is left over.
func (s *Store) drop(st *staging) {
	if st.tmp != "" {
		_ = s.fs.Remove(st.tmp)
	}
}

// publish gives a synced file its name. If the name is taken, the one that is
// there stays: it may be open, and it is as good.
func (s *Store) publish(st *staging) error {
	if st.tmp == "" {
		return nil
	}
	mu := s.stripe(st.info.ID)
	mu.Lock()
	defer mu.Unlock()
	info, ok, err := s.renewLocked(st.info.ID)
	if err != nil || ok {
		s.drop(st)
		st.info = info
		return err
	}
	err = s.dirs[s.home(st.info.ID)].name(func() error { return s.fs.Rename(st.tmp, s.path(st.info.ID)) })
	if err != nil {
		s.drop(st)
		return err
	}
	return nil
}

// renew finds a blob and sets its time to now, so that no sweep takes it from
// the one who is about to rely on it.
func (s *Store) renew(id cas.ID) (cas.Info, bool, error) {
	mu := s.stripe(id)
	mu.Lock()
	defer mu.Unlock()
	return s.renewLocked(id)
}

func (s *Store) renewLocked(id cas.ID) (cas.Info, bool, error) {
	info, err := s.stat(id)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return cas.Info{}, false, nil
	case isDamage(err):
		// Seen to be broken, so not there: the rename puts a good one in its place.
		return cas.Info{}, false, nil
	case err != nil:
		return cas.Info{}, false, err
	}
	info.At = s.now()
	return info, true, s.fs.Chtimes(s.path(id), info.At)
}

// ctxReader ends a copy when its context does. A Read that blocks is the
// caller's to end.
type ctxReader struct {
	ctx context.Context
	r   io.Reader
}

func (r ctxReader) Read(p []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	return r.r.Read(p)
}

// oldest is when the oldest batch or Put under way began; ok is false if none is.
func (s *Store) oldest() (at time.Time, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range s.mu.batches {
		if !ok || t.Before(at) {
			at, ok = t, true
		}
	}
	for _, t := range s.mu.putting {
		if !ok || t.Before(at) {
			at, ok = t, true
		}
	}
	return at, ok
}
