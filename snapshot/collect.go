package snapshot

import (
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"runtime"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/cove-sandbox/cove/cas"
	"github.com/cove-sandbox/cove/sandbox"
)

// Refs is every blob a snapshot needs, its manifest first.
func Refs(ctx context.Context, store cas.Store, id cas.ID) ([]cas.ID, error) {
	c, err := load(ctx, store, id, "")
	if err != nil {
		return nil, asError("snapshot.refs", err)
	}
	refs := append(make([]cas.ID, 0, 1+len(c.blobs)), id)
	for i := range c.blobs {
		refs = append(refs, cas.IDOf(c.blobs[i].sum))
	}
	return refs, nil
}

// Blob is a part of a snapshot's content, and the bytes it takes in the store.
type Blob struct {
	Sum    [sha256.Size]byte
	Stored int64
}

// Blobs is every blob a snapshot needs, its manifest first. One that is not
// there takes nothing, and whole is false.
func Blobs(ctx context.Context, store cas.Store, id cas.ID) (blobs []Blob, whole bool, err error) {
	const op = "snapshot.blobs"
	refs, err := Refs(ctx, store, id)
	if err != nil {
		return nil, false, sandbox.WithOp(op, err)
	}
	blobs, whole = make([]Blob, 0, len(refs)), true
	for _, ref := range refs {
		info, err := store.Stat(ctx, ref)
		switch {
		case err == nil:
		case errors.Is(err, sandbox.ErrNotFound), errors.Is(err, sandbox.ErrCorrupt):
			whole = false
		default:
			return nil, false, asError(op, err)
		}
		sum, err := ref.Sum()
		if err != nil {
			return nil, false, asError(op, err)
		}
		blobs = append(blobs, Blob{sum, info.Stored}) // what is damaged still takes its place
	}
	return blobs, whole, nil
}

// Verify reads everything a snapshot needs. The error names the first blob that
// is missing or broken; errors.As finds it as *cas.BlobError.
func Verify(ctx context.Context, store cas.Store, id cas.ID) error {
	const op = "snapshot.verify"
	c, err := load(ctx, store, id, "")
	if err != nil {
		return asError(op, err)
	}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(runtime.GOMAXPROCS(0))
	for i := range c.blobs {
		if ctx.Err() != nil {
			break
		}
		g.Go(func() error { return copyBlob(ctx, store, c.blobs[i], io.Discard) })
	}
	return asError(op, g.Wait())
}

// DefaultGrace is how long a blob that nothing refers to is kept: the time a
// caller has to record the manifest that a Pack returned.
const DefaultGrace = time.Hour

// Collector deletes what no snapshot needs.
type Collector struct {
	Grace time.Duration    // 0 is DefaultGrace; negative none: for a store nobody else uses
	Now   func() time.Time // nil is time.Now
}

// Collect is Collector{}.Collect.
func Collect(ctx context.Context, store cas.Store, roots []cas.ID, dryRun bool) (removed []cas.Info, err error) {
	return Collector{}.Collect(ctx, store, roots, dryRun)
}

// Collect deletes each blob that no root refers to, and returns those; with
// dryRun it only returns them. A root that cannot be read ends it before
// anything is deleted: what it refers to is not known.
//
// It is safe beside a Pack. A Pack stores every blob it relies on, or stores it
// again, which renews its time; and the store refuses to sweep a blob renewed
// since the oldest open batch began, in one step with the check. So a blob of a
// Pack under way stays however long that takes, and afterwards for the grace.
// A lock around Pack and Collect was rejected: a collection reads every
// manifest, and no checkpoint should wait for that.
func (c Collector) Collect(ctx context.Context, store cas.Store, roots []cas.ID, dryRun bool) (removed []cas.Info, err error) {
	const op = "snapshot.collect"
	sweeper, ok := store.(cas.Sweeper)
	if !ok {
		return nil, &sandbox.Error{Class: sandbox.Unsupported, Op: op, Msg: "the store cannot sweep"}
	}
	now, grace := time.Now, c.Grace
	if c.Now != nil {
		now = c.Now
	}
	if grace == 0 {
		grace = DefaultGrace
	}
	// Before the marking: what is stored while it lasts is young.
	before := now().Add(-max(grace, 0))
	if grace < 0 {
		before = before.Add(time.Second) // also what was stored a moment ago
	}
	needed := map[cas.ID]struct{}{}
	for _, root := range roots {
		refs, err := Refs(ctx, store, root)
		if err != nil {
			return nil, rootError(op, root, err)
		}
		for _, id := range refs {
			needed[id] = struct{}{}
		}
	}
	err = store.List(ctx, func(info cas.Info) error {
		if _, ok := needed[info.ID]; ok || !info.At.Before(before) {
			return nil
		}
		if !dryRun {
			if swept, err := sweeper.Sweep(ctx, info.ID, before); err != nil || !swept {
				return err
			}
		}
		removed = append(removed, info)
		return nil
	})
	return removed, asError(op, err)
}

func rootError(op string, root cas.ID, err error) error {
	var se *sandbox.Error
	if !errors.As(err, &se) {
		return asError(op, err)
	}
	return &sandbox.Error{Class: se.Class, Op: op, Msg: "nothing was deleted: what the root " + string(root) + " needs is not known",
		Err: err, Hint: "remove the root from the record if it is lost, then collect again"}
}
