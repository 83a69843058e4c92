package server

import (
	"context"
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
	byID := make(map[string]sandbox.Snapshot, len(snaps))
	for _, snap := range snaps {
		byID[snap.ID] = snap
	}
	out := &covev1.PruneSnapshotsResponse{}
	for _, gone := range decidePrune(m, age, snaps, s.cfg.Clock()) {
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
		out.Removed = append(out.Removed, &covev1.PrunedSnapshot{Id: snap.ID, Reason: string(gone.Reason), Stored: snap.Content.Stored})
	}
	if !m.DryRun && len(out.Removed) > 0 {
		s.collectSoon(ctx)
	}
	return connect.NewResponse(out), nil
}

// keepLast is the reason of a removal where keep_last is the only rule.
const keepLast snapshot.Reason = "keep_last"

// kept marks for [snapshot.Decide] what keep_last and keep_labels hold: it
// counts over all snapshots, and wants all labels, where the API counts per
// sandbox and takes any.
const kept = "kept"

// decidePrune takes snapshots newest first.
func decidePrune(m *covev1.PruneSnapshotsRequest, age time.Duration, snaps []sandbox.Snapshot, now time.Time) []snapshot.Removal {
	list := make([]snapshot.Snap, 0, len(snaps))
	seen := map[string]int32{}
	for _, snap := range snaps {
		sn := snapshot.Snap{ID: snap.ID, Created: snap.CreatedAt, Bytes: snap.Content.Stored, Labels: map[string]string{}}
		if seen[snap.Sandbox]++; seen[snap.Sandbox] <= m.KeepLast || hasAny(snap.Labels, m.KeepLabels) {
			sn.Labels[kept] = kept
		}
		list = append(list, sn)
	}
	rules := snapshot.Rules{KeepLabels: map[string]string{kept: kept}, MaxAge: age, MaxBytes: m.MaxBytes}
	if age > 0 || m.MaxBytes > 0 {
		return snapshot.Decide(rules, list, now)
	}
	var out []snapshot.Removal
	for _, sn := range list {
		if sn.Labels[kept] == "" {
			out = append(out, snapshot.Removal{ID: sn.ID, Reason: keepLast})
		}
	}
	return out
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
