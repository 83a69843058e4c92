package native

import (
	"context"
	"net/http"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/server"
	"github.com/cove-sandbox/cove/server/edge"
	"github.com/cove-sandbox/cove/store"
	"github.com/cove-sandbox/cove/wire"
)

type snapshots struct{ *server.Server }

func (s snapshots) Create(ctx context.Context, r *connect.Request[covev1.CreateSnapshotRequest], out *connect.ServerStream[covev1.CreateSnapshotEvent]) error {
	m := r.Msg
	ttl, err := wire.DurationFrom("ttl", m.Ttl)
	if err != nil {
		return err
	}
	taken, err := s.CreateSnapshot(ctx, server.CreateSnapshotRequest{Sandbox: m.Sandbox, Kind: sandbox.SnapshotKind(m.Kind), Path: m.Path, Name: m.Name,
		Labels: m.Labels, Stop: m.Stop, TTL: ttl, Key: m.IdempotencyKey}, func(p sandbox.Progress) {
		_ = out.Send(wire.SnapshotEvent(p)) // ctx says so when the client left
	})
	if err != nil {
		return err
	}
	size := taken.Snapshot.Content.Size
	return out.Send(&covev1.CreateSnapshotEvent{Step: "done", Done: size, Total: size, Snapshot: wire.Snapshot(taken.Snapshot),
		Unchanged: taken.Unchanged, Paused: durationpb.New(taken.Paused)})
}

func (s snapshots) Get(ctx context.Context, r *connect.Request[covev1.GetSnapshotRequest]) (*connect.Response[covev1.GetSnapshotResponse], error) {
	snap, err := s.GetSnapshot(ctx, r.Msg.Id)
	return answer(&covev1.GetSnapshotResponse{Snapshot: wire.Snapshot(snap)}, err)
}

func (s snapshots) List(ctx context.Context, r *connect.Request[covev1.ListSnapshotsRequest]) (*connect.Response[covev1.ListSnapshotsResponse], error) {
	m := r.Msg
	page, next, err := s.ListSnapshots(ctx, store.SnapshotFilter{Labels: m.Labels, Sandbox: m.Sandbox, Kind: sandbox.SnapshotKind(m.Kind), PageSize: int(m.PageSize), PageToken: m.PageToken})
	return answer(&covev1.ListSnapshotsResponse{NextPageToken: next, Snapshots: each(page, wire.Snapshot)}, err)
}

func (s snapshots) Delete(ctx context.Context, r *connect.Request[covev1.DeleteSnapshotRequest]) (*connect.Response[covev1.DeleteSnapshotResponse], error) {
	freed, err := s.DeleteSnapshot(ctx, r.Msg.Id)
	return answer(&covev1.DeleteSnapshotResponse{Freed: freed}, err)
}

func (s snapshots) Prune(ctx context.Context, r *connect.Request[covev1.PruneSnapshotsRequest]) (*connect.Response[covev1.PruneSnapshotsResponse], error) {
	m := r.Msg
	age, err := wire.DurationFrom("max_age", m.MaxAge)
	if err != nil {
		return nil, err
	}
	removed, err := s.PruneSnapshots(ctx, server.PruneRequest{Sandbox: m.Sandbox, KeepLast: int(m.KeepLast), KeepLabels: m.KeepLabels, MaxBytes: m.MaxBytes, MaxAge: age, DryRun: m.DryRun})
	return answer(&covev1.PruneSnapshotsResponse{Removed: each(removed, func(p server.PrunedSnapshot) *covev1.PrunedSnapshot {
		return &covev1.PrunedSnapshot{Id: p.ID, Reason: p.Reason, Stored: p.Frees}
	})}, err)
}

func (s snapshots) Mount(ctx context.Context, r *connect.Request[covev1.MountSnapshotRequest]) (*connect.Response[covev1.MountSnapshotResponse], error) {
	return answer(&covev1.MountSnapshotResponse{}, s.MountSnapshot(ctx, r.Msg.Sandbox, r.Msg.Snapshot, r.Msg.Path, r.Msg.Unpack))
}

func (s snapshots) Verify(ctx context.Context, r *connect.Request[covev1.VerifySnapshotRequest]) (*connect.Response[covev1.VerifySnapshotResponse], error) {
	n, err := s.VerifySnapshot(ctx, r.Msg.Id)
	return answer(&covev1.VerifySnapshotResponse{Bytes: n}, err)
}

// getSnapshotTar is GET /v1/snapshots/{id}/tar, and HEAD.
func (d *dialect) getSnapshotTar(w http.ResponseWriter, r *http.Request) error {
	return edge.Sending(w, func(begun server.Sending) error {
		return d.server.DownloadSnapshot(r.Context(), r.PathValue("id"), r.Method == http.MethodHead, begun)
	}, tarHeader(w))
}
