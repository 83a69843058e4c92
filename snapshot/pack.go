package snapshot

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"time"

	"github.com/cove-sandbox/cove/cas"
	"github.com/cove-sandbox/cove/sandbox"
)

// packer puts blobs into one batch and counts what they add.
type packer struct {
	batch cas.Batch
	added atomic.Int64
}

func newPacker(b cas.Batch) *packer { return &packer{batch: b} }

func (p *packer) put(ctx context.Context, r io.Reader, opts ...cas.PutOption) (cas.Info, error) {
	info, err := p.batch.Put(ctx, r, opts...)
	if err == nil && info.New {
		p.added.Add(info.Stored)
	}
	return info, err
}

// finish stores the manifest and makes everything durable.
func (p *packer) finish(ctx context.Context, c *content) (Manifest, error) {
	raw := encode(c)
	if len(raw) > maxManifest {
		return Manifest{}, sandbox.Errorf(sandbox.TooLarge, "", "the manifest takes %d bytes, above %d", len(raw), maxManifest)
	}
	info, err := p.put(ctx, bytes.NewReader(raw))
	if err != nil {
		return Manifest{}, err
	}
	if err := p.batch.Commit(ctx); err != nil {
		return Manifest{}, err
	}
	return Manifest{ID: info.ID, Kind: c.kind, Size: c.size(), Stored: p.added.Load(), Files: len(c.entries) + len(c.files)}, nil
}

// blobTable gives blobs their index in the manifest, in order of first use.
type blobTable struct {
	c     *content
	index map[cas.ID]int
}

func (t *blobTable) add(info cas.Info) int {
	if i, ok := t.index[info.ID]; ok {
		return i
	}
	sum, _ := info.ID.Sum() // the store made it
	i := len(t.c.blobs)
	t.index[info.ID] = i
	t.c.blobs = append(t.c.blobs, blobRef{sum: sum, size: info.Size})
	return i
}

// load reads a manifest. kind "" is any.
func load(ctx context.Context, store cas.Store, id cas.ID, kind Kind) (*content, error) {
	info, err := store.Stat(ctx, id)
	if err != nil {
		return nil, err
	}
	if info.Size > maxManifest {
		return nil, sandbox.Errorf(sandbox.Invalid, "", "blob %s is not the manifest of a snapshot: %d bytes", id, info.Size)
	}
	r, err := store.Open(ctx, id)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	var raw bytes.Buffer
	if _, err := io.Copy(&raw, io.LimitReader(r, maxManifest+1)); err != nil {
		return nil, err
	}
	c, err := decode(raw.Bytes())
	if err != nil {
		var se *sandbox.Error
		if errors.As(err, &se) {
			return nil, &sandbox.Error{Class: se.Class, Hint: se.Hint, Msg: se.Error(), Err: &cas.BlobError{ID: id, Reason: "as a manifest"}}
		}
		return nil, err
	}
	if kind != "" && c.kind != kind {
		return nil, sandbox.Errorf(sandbox.Invalid, "", "snapshot %s is of kind %s, not %s", id, c.kind, kind)
	}
	return c, nil
}

// openBlob opens a blob that a manifest refers to: that it is missing is damage.
func openBlob(ctx context.Context, store cas.Store, b blobRef) (io.ReadCloser, error) {
	id := cas.IDOf(b.sum)
	r, err := store.Open(ctx, id)
	if errors.Is(err, sandbox.ErrNotFound) {
		return nil, damaged(id, "missing")
	}
	return r, err
}

// copyBlob copies the whole of a blob, and checks that it is as long as said.
func copyBlob(ctx context.Context, store cas.Store, b blobRef, w io.Writer) error {
	r, err := openBlob(ctx, store, b)
	if err != nil {
		return err
	}
	defer r.Close()
	n, err := io.Copy(w, r)
	if err == nil && n != b.size {
		err = damaged(cas.IDOf(b.sum), fmt.Sprintf("%d bytes, and its manifest says %d", n, b.size))
	}
	return err
}

func damaged(id cas.ID, reason string) error {
	return (&sandbox.Error{Class: sandbox.Corrupt, Err: &cas.BlobError{ID: id, Reason: reason}}).
		WithHint("the snapshot cannot be restored from here: delete it, or bring the blob back from a copy")
}

func unixTime(sec int64, nsec uint32) time.Time { return time.Unix(sec, int64(nsec)) }
