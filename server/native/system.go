package native

import (
	"context"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/server"
	"github.com/cove-sandbox/cove/wire"
)

type system struct{ *server.Server }

func (s system) Info(ctx context.Context, r *connect.Request[covev1.InfoRequest]) (*connect.Response[covev1.InfoResponse], error) {
	in, err := s.Server.Info(ctx)
	return answer(&covev1.InfoResponse{
		Version:     in.Version,
		Gateway:     in.Gateway,
		Runtime:     in.Runtime,
		Total:       protoCapacity(in.MaxSandboxes, in.Total),
		Used:        protoCapacity(in.Sandboxes, in.Used),
		WarmKernels: int32(in.WarmKernels),
		WarmTarget:  int32(in.WarmTarget),
		HeldKernels: int32(in.HeldKernels),
		HeldTarget:  int32(in.HeldTarget),
		LostCalls:   in.LostCalls,
		Full:        in.Full,
		Snapshots: &covev1.SnapshotTotals{Count: in.Snapshots.Count, Bytes: in.SnapshotBytes, AgeSeconds: in.Snapshots.Seconds,
			Oldest: wire.Time(in.Snapshots.Oldest)},
	}, err)
}

func protoCapacity(sandboxes int64, r sandbox.Resources) *covev1.Capacity {
	return &covev1.Capacity{Sandboxes: sandboxes, Cpu: float64(r.MilliCPU) / 1000, Memory: r.Memory, Disk: r.Disk}
}

func (s system) Audit(ctx context.Context, r *connect.Request[covev1.AuditRequest], out *connect.ServerStream[covev1.AuditEntry]) error {
	q := server.AuditQuery{All: r.Msg.All, After: r.Msg.After, Follow: r.Msg.Follow}
	if r.Msg.Since != nil {
		q.Since = r.Msg.Since.AsTime()
	}
	return s.ReadAudit(ctx, q, func(entries []sandbox.AuditEntry) error {
		if len(entries) == 0 {
			return out.Conn().Send(nil)
		}
		for _, e := range entries {
			if err := out.Send(protoAudit(e)); err != nil {
				return err
			}
		}
		return nil
	})
}

func protoAudit(e sandbox.AuditEntry) *covev1.AuditEntry {
	return &covev1.AuditEntry{Seq: e.Seq, At: timestamppb.New(e.At), Tenant: e.Tenant, Key: e.Key, KeyName: e.KeyName, Remote: e.Remote,
		Op: e.Op, Things: e.Things, Outcome: e.Outcome, Prev: e.Prev, Hash: e.Hash}
}
