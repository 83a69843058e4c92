package server

import (
	"context"
	"slices"
	"time"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/snapshot"
	"github.com/cove-sandbox/cove/store"
	"github.com/cove-sandbox/cove/wire"
)

// Prune deletes what the rules do not keep. keep_last is per sandbox; with it
// alone, whatever is beyond goes. Beside max_age and max_bytes it protects.
func (s snapshotService) Prune(ctx context.Context, r *connect.Request[covev1.PruneSnapshotsRequest]) (*connect.Response[covev1.PruneSnapshotsResponse], error) {
	m := r.Msg
	age, err := wire.DurationFrom("max_age", m.MaxAge)
	if err == nil {
		err = sandbox.ValidateRetention(int(m.KeepLast), m.KeepLabels, m.MaxBytes, age)
	}
	if err == nil && m.Sandbox != "" {
		err = validID("sandbox", m.Sandbox)
	}
	if err != nil {
		return nil, err
	}
	snaps, err := s.allSnapshots(ctx, store.SnapshotFilter{Sandbox: m.Sandbox})
	if err != nil {
		return nil, err
	}
	elsewhere, err := s.notIn(ctx, snaps, m.Sandbox != "")
	if err != nil {
		return nil, err
	}
	sc, err := s.scales(ctx)
	if err != nil {
		return nil, err
	}
	byID := make(map[string]sandbox.Snapshot, len(snaps))
	for _, snap := range snaps {
		byID[snap.ID] = snap
	}
	out := &covev1.PruneSnapshotsResponse{}
	for _, gone := range decidePrune(m, age, snaps, elsewhere, sc, s.cfg.Clock()) {
		snap := byID[gone.ID]
		if !m.DryRun {
			err := s.deleteSnapshot(ctx, snap)
			if sandbox.ClassOf(err) == sandbox.NotFound {
				continue // somebody was faster
			}
			if err != nil {
				s.content.want() // what was deleted so far
				return nil, err
			}
		}
		out.Removed = append(out.Removed, &covev1.PrunedSnapshot{Id: snap.ID, Reason: string(gone.Reason), Stored: gone.Frees})
	}
	if !m.DryRun && len(out.Removed) > 0 {
		s.collectSoon(ctx)
	}
	return connect.NewResponse(out), nil
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
func decidePrune(m *covev1.PruneSnapshotsRequest, age time.Duration, snaps, others []sandbox.Snapshot, sc scales, now time.Time) []snapshot.Removal {
	var stays snapshot.Holding
	for _, snap := range others {
		stays.Add(sc.of(snap.Content))
	}
	list := make([]snapshot.Snap, 0, len(snaps))
	seen := map[string]int32{}
	for _, snap := range snaps {
		sn := snapshot.Snap{ID: snap.ID, Created: snap.CreatedAt, Blobs: slices.DeleteFunc(sc.of(snap.Content), stays.Has), Labels: map[string]string{}}
		if seen[snap.Sandbox]++; seen[snap.Sandbox] <= m.KeepLast || hasAny(snap.Labels, m.KeepLabels) {
			sn.Labels[kept] = kept
		}
		list = append(list, sn)
	}
	return snapshot.Decide(snapshot.Rules{KeepLabels: map[string]string{kept: kept}, MaxAge: age, MaxBytes: m.MaxBytes,
		OnlyKept: age == 0 && m.MaxBytes == 0}, list, now)
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
	f.PageSize = maxPage
	for {
		page, next, err := s.store.ListSnapshots(ctx, f)
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
