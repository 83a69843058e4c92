package server

import (
	"context"
	"errors"

	"github.com/cove-sandbox/cove/sandbox"
)

// DiffRequest asks what changed in the files of a sandbox.
type DiffRequest struct {
	Sandbox string
	Since   string // create, reset, image, or a snapshot by name or id; "" = create
	Hash    bool
	Limit   int
}

// DiffSandbox says what changed in the files of a running sandbox.
func (s *Server) DiffSandbox(ctx context.Context, r DiffRequest) (d sandbox.Diff, err error) {
	ctx, call, err := s.begin(ctx, "sandbox.diff", about("id", r.Sandbox))
	if err != nil {
		return d, err
	}
	defer call.end(&err)
	if err := validID("id", r.Sandbox); err != nil {
		return d, err
	}
	if r.Limit < 0 || r.Limit > sandbox.MaxDiffEntries {
		return d, sandbox.InvalidField("limit", "%d is not accepted; 1 to %d is, or 0 for %d", r.Limit, sandbox.MaxDiffEntries, sandbox.DiffEntries)
	}
	ask := sandbox.DiffRequest{Since: r.Since, Hash: r.Hash, Limit: r.Limit}
	switch r.Since {
	case "", sandbox.SinceCreate, sandbox.SinceReset:
		ask.Since = sandbox.SinceCreate
	case sandbox.SinceImage:
	default:
		snap, release, err := s.sinceSnapshot(ctx, call, r)
		if err != nil {
			return d, err
		}
		defer release()
		switch {
		case snap.Kind == sandbox.FilesystemSnapshot:
			ask.Since, ask.Snapshot = "", &snap
		default: // the memory that it came with
			ask.Since = sandbox.SinceCreate
		}
	}
	err = s.inside(ctx, r.Sandbox, func() error {
		d, err = s.node.Diff(ctx, r.Sandbox, ask)
		return err
	})
	return d, err
}

// sinceSnapshot finds the snapshot that a diff is since.
func (s *Server) sinceSnapshot(ctx context.Context, call *call, r DiffRequest) (snap sandbox.Snapshot, release func(), err error) {
	if err := firstError(call.needs(reads("since", "snapshots")), sandbox.ValidateSnapshotRef("since", r.Since)); err != nil {
		return snap, nil, err
	}
	sb, err := s.live(ctx, r.Sandbox)
	if err != nil {
		return snap, nil, err
	}
	snap, release, err = s.useSnapshot(ctx, r.Since)
	if errors.Is(err, sandbox.ErrNotFound) {
		e := *sandbox.AsError(err)
		e.Field, e.Hint = "since", "create, reset and image are accepted too, and every snapshot of \"cove snapshot ls\""
		return snap, nil, &e
	}
	if err != nil {
		return snap, nil, err
	}
	if snap.Kind == sandbox.FilesystemSnapshot || snap.Kind == sandbox.MemorySnapshot && sb.Origin.Snapshot == snap.ID {
		return snap, release, nil
	}
	release()
	return snap, nil, sandbox.InvalidField("since", "'%s' is of kind %s; one of kind filesystem is accepted, or the one the sandbox came from", nameOf(snap), snap.Kind).
		WithHint("cove snapshot create --kind filesystem makes one to compare with")
}
