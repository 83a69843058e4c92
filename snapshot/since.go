package snapshot

import (
	"bytes"
	"context"
	"io"
	"slices"

	"github.com/cove-sandbox/cove/cas"
	"github.com/cove-sandbox/cove/sandbox"
)

// before is what a pack takes of an earlier snapshot: the whole chunks of a file by
// their names, without reading them, and what is behind them as bytes.
type before struct {
	name   string
	size   int64
	chunks []cas.Info // no id: zeros
	rest   []byte     // of the file, behind chunks
}

// load reads the earlier snapshot's manifest, and less than a chunk. nil is none.
func (s *Since) load(ctx context.Context, store cas.Store) (*before, error) {
	if s == nil {
		return nil, nil
	}
	c, err := load(ctx, store, s.ID, KindMemory)
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(c.files, func(f memoryFile) bool { return f.name == s.Name })
	if i < 0 || c.files[i].size != s.Size {
		return nil, sandbox.Errorf(sandbox.Precondition, "", "snapshot %s has no file %q of %d bytes", s.ID, s.Name, s.Size)
	}
	b := &before{name: s.Name, size: s.Size}
	whole := s.Size / chunkSize
	for j, blob := range c.files[i].chunks {
		switch {
		case int64(j) < whole && blob < 0:
			b.chunks = append(b.chunks, cas.Info{})
		case int64(j) < whole:
			b.chunks = append(b.chunks, cas.Info{ID: cas.IDOf(c.blobs[blob].sum), Size: c.blobs[blob].size})
		case blob < 0:
			b.rest = make([]byte, s.Size%chunkSize)
		default:
			var rest bytes.Buffer
			if err := copyBlob(ctx, store, c.blobs[blob], &rest); err != nil {
				return nil, err
			}
			b.rest = rest.Bytes()
		}
	}
	return b, nil
}

// followed is the file from its last, unfinished chunk on, with f behind it.
func (b *before) followed(f io.ReaderAt) io.ReaderAt { return tail{b, f} }

type tail struct {
	b *before
	f io.ReaderAt
}

// ReadAt reads p in full or fails; nothing before the tail is asked for.
func (t tail) ReadAt(p []byte, off int64) (n int, err error) {
	if off < t.b.size {
		n = copy(p, t.b.rest[off-int64(len(t.b.chunks))*chunkSize:])
	}
	if n < len(p) {
		var m int
		m, err = t.f.ReadAt(p[n:], off+int64(n)-t.b.size)
		n += m
	}
	return n, err
}
