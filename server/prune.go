package server

import (
	"context"
	"slices"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/snapshot"
	"github.com/cove-sandbox/cove/store"
)

// PruneRequest says which snapshots stay: what is beyond the rules goes.
type PruneRequest struct {
	Sandbox    string // only its own; "" = all
	KeepLast   int    // of each sandbox
	KeepLabels map[string]string
	MaxBytes   int64
	MaxAge     time.Duration
	DryRun     bool
}

// PrunedSnapshot is one that went, or would have.
type PrunedSnapshot struct {
	ID     string
	Reason string
	Frees  int64
}

// PruneSnapshots deletes what the rules do not keep. KeepLast is per sandbox; with
// it alone, whatever is beyond goes. Beside MaxAge and MaxBytes it protects.
func (s *Server) PruneSnapshots(ctx context.Context, r PruneRequest) (removed []PrunedSnapshot, err error) {
	ctx, call, err := s.begin(ctx, "snapshot.prune", about("sandbox", r.Sandbox))
	if err != nil {
		return nil, err
	}
	defer call.end(&err)
	err = sandbox.ValidateRetention(r.KeepLast, r.KeepLabels, r.MaxBytes, r.MaxAge)
	if err == nil && r.Sandbox != "" {
		err = validID("sandbox", r.Sandbox)
	}
	if err != nil {
		return nil, err
	}
	snaps, err := s.allSnapshots(ctx, store.SnapshotFilter{Sandbox: r.Sandbox})
	if err != nil {
		return nil, err
	}
	elsewhere, err := s.notIn(ctx, snaps, r.Sandbox != "")
	if err != nil {
		return nil, err
	}
	sizes, err := s.sizes(ctx)
	if err != nil {
		return nil, err
	}
	byID := make(map[string]sandbox.Snapshot, len(snaps))
	for _, snap := range snaps {
		byID[snap.ID] = snap
	}
	for _, gone := range decidePrune(r, snaps, elsewhere, sizes, s.cfg.Clock()) {
		if !r.DryRun {
			_, err := s.deleteSnapshot(ctx, byID[gone.ID])
			if sandbox.ClassOf(err) == sandbox.NotFound {
				continue // somebody was faster
			}
			if err != nil {
				s.content.want() // what was deleted so far
				return nil, err
			}
		}
		removed = append(removed, PrunedSnapshot{ID: gone.ID, Reason: string(gone.Reason), Frees: gone.Frees})
	}
	if !r.DryRun && len(removed) > 0 {
		s.collectSoon(ctx)
	}
	return removed, nil
}

// notIn is the snapshots in scope that a prune does not decide about: those of
// templates and, if it is about one sandbox, of others.
func (s *Server) notIn(ctx context.Context, snaps []sandbox.Snapshot, some bool) (others []sandbox.Snapshot, err error) {
	if others, err = s.allSnapshots(ctx, store.SnapshotFilter{Hidden: true}); err != nil || !some {
		return others, err
	}
	in := make(map[string]bool, len(snaps))
	for _, snap := range snaps {
		in[snap.ID] = true
	}
	all, err := s.allSnapshots(ctx, store.SnapshotFilter{})
	for _, snap := range all {
		if !in[snap.ID] {
			others = append(others, snap)
		}
	}
	return others, err
}

// kept marks for [snapshot.Decide] what keep_last and keep_labels hold: it
// counts over all snapshots, and wants all labels, where the API counts per
// sandbox and takes any.
const kept = "kept"

// decidePrune takes snapshots newest first. What others need is neither counted
// nor freed.
func decidePrune(r PruneRequest, snaps, others []sandbox.Snapshot, sc contentSizes, now time.Time) []snapshot.Removal {
	var stays snapshot.Holding
	for _, snap := range others {
		stays.Add(sc.of(snap.Content))
	}
	list := make([]snapshot.Snap, 0, len(snaps))
	seen := map[string]int{}
	for _, snap := range snaps {
		sn := snapshot.Snap{ID: snap.ID, Created: snap.CreatedAt, Blobs: slices.DeleteFunc(sc.of(snap.Content), stays.Has), Labels: map[string]string{}}
		if seen[snap.Sandbox]++; seen[snap.Sandbox] <= r.KeepLast || hasAny(snap.Labels, r.KeepLabels) {
			sn.Labels[kept] = kept
		}
		list = append(list, sn)
	}
	return snapshot.Decide(snapshot.Rules{KeepLabels: map[string]string{kept: kept}, MaxAge: r.MaxAge, MaxBytes: r.MaxBytes,
		OnlyKept: r.MaxAge == 0 && r.MaxBytes == 0}, list, now)
}

func hasAny(have, want map[string]string) bool {
	for k, v := range want {
		if got, ok := have[k]; ok && got == v {
			return true
		}
	}
	return false
}

// allSnapshots is every page of a list, newest first.
func (s *Server) allSnapshots(ctx context.Context, f store.SnapshotFilter) (all []sandbox.Snapshot, err error) {
	return listAll(ctx, s.store, f)
}

func listAll(ctx context.Context, st store.Snapshots, f store.SnapshotFilter) (all []sandbox.Snapshot, err error) {
	f.PageSize = maxPage
	for {
		page, next, err := st.ListSnapshots(ctx, f)
		if err != nil {
			return nil, err
		}
		all = append(all, page...)
		if next == "" {
			return all, nil
		}
		f.PageToken = next
	}
}
