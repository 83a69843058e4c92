package server

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// diskFrom is the size of the writable layer of what is made of a snapshot where
// own is asked for. That of a memory snapshot comes with it, a file system as
// large as it is; anything else gets a new one.
func diskFrom(snap sandbox.Snapshot, own int64) int64 {
	if snap.Kind == sandbox.MemorySnapshot {
		return cmp.Or(snap.Spec.Resources.Disk, own)
	}
	return own
}

// RestoreSandbox takes any snapshot the node holds, not only of the sandbox's own
// tree: whether two machines have a common past is the caller's business, and
// the tree says afterwards where this one stands.
//
// Processes of the old episode end with reset, as after Reset.
func (s *Server) RestoreSandbox(ctx context.Context, id, snapshot string) (sb sandbox.Sandbox, took time.Duration, err error) {
	ctx, call, err := s.begin(ctx, "sandbox.restore", about("id", id), about("snapshot", snapshot), about("sandbox", id))
	if err != nil {
		return sb, 0, err
	}
	defer call.end(&err)
	if snapshot != "" {
		err = call.needs(reads("snapshot", "snapshots"))
	}
	if err := firstError(err, validID("id", id), sandbox.ValidateSnapshotRef("snapshot", snapshot)); err != nil {
		return sb, 0, err
	}
	now, err := s.live(ctx, id)
	if err != nil {
		return sb, 0, err
	}
	snap, release, err := s.useSnapshot(ctx, snapshot)
	if err != nil {
		return sb, 0, err
	}
	defer release()
	// Up to here a caller that leaves stops it; a restore itself is finished.
	o, err := s.originOf(ctx, "snapshot", snap)
	if err != nil {
		return sb, 0, err
	}
	defer o.release()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), createTimeout)
	defer cancel()

	settle, err := s.resizeDisk(ctx, now, diskFrom(snap, now.Spec.Resources.Disk))
	if err != nil {
		return sb, 0, err
	}
	s.lookBeforeReset(ctx, id)
	s.ends.noteReset(id)
	episode, took, err := s.node.Restore(ctx, id, o.img, snap)
	settle(err == nil)
	if err == nil {
		s.ends.noteReset(id) // again, for what began meanwhile and went with the old kernel
	}
	if err != nil {
		if errors.Is(err, sandbox.ErrNoSandbox) || errors.Is(err, sandbox.ErrEnded) {
			s.ends.forgetResets(id)
		}
		return sb, 0, s.explain(ctx, id, s.wayOut(ctx, snap, err))
	}
	update := func(ctx context.Context) (sandbox.Sandbox, error) {
		was := ""
		sb, err := s.store.UpdateSandbox(ctx, id, func(sb *sandbox.Sandbox) error {
			was = sb.ImageID
			sb.Episode, sb.ImageID, sb.Lineage = max(sb.Episode, episode), o.img.ID, o.lineage
			sb.Origin = sandbox.Origin{Snapshot: snap.ID, Kind: snap.Kind}
			sb.Spec.Image = snap.Spec.Image
			sb.Spec.Resources.Disk = diskFrom(snap, sb.Spec.Resources.Disk)
			sb.Spec.Authority = cmp.Or(snap.Spec.Authority, sb.Spec.Authority) // as the node does
			return nil
		})
		s.images.free(was)
		return sb, err
	}
	if sb, err = update(ctx); err != nil {
		if !errors.Is(err, sandbox.ErrEnded) && !errors.Is(err, sandbox.ErrNotFound) {
			// It happened, so the record follows; after a crash Reconcile takes
			// episode and image from the node.
			s.untilDone("restore of "+id, func(ctx context.Context) error {
				_, err := update(ctx)
				if errors.Is(err, sandbox.ErrEnded) || errors.Is(err, sandbox.ErrNotFound) {
					s.images.free(o.img.ID) // its end did not know of it
					return nil
				}
				return err
			})
		}
		return sb, 0, s.explain(ctx, id, err)
	}
	sb.Episode = episode
	return s.asItIs(ctx, sb), took, nil
}
