package native

import (
	"context"
	"slices"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/server"
	"github.com/cove-sandbox/cove/store"
	"github.com/cove-sandbox/cove/wire"
)

type sandboxes struct{ *server.Server }

func (s sandboxes) Create(ctx context.Context, r *connect.Request[covev1.CreateSandboxRequest]) (*connect.Response[covev1.CreateSandboxResponse], error) {
	spec, err := wire.SpecFrom(r.Msg.Spec)
	if err != nil {
		return nil, err
	}
	c, err := s.CreateSandbox(ctx, server.CreateRequest{Spec: spec, Key: r.Msg.IdempotencyKey})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&covev1.CreateSandboxResponse{Sandbox: wire.Sandbox(c.Sandbox), NodeTime: durationpb.New(c.NodeTime), Existed: c.Existed}), nil
}

func (s sandboxes) Get(ctx context.Context, r *connect.Request[covev1.GetSandboxRequest]) (*connect.Response[covev1.GetSandboxResponse], error) {
	sb, err := s.GetSandbox(ctx, r.Msg.Id)
	return answer(&covev1.GetSandboxResponse{Sandbox: wire.Sandbox(sb)}, err)
}

func (s sandboxes) List(ctx context.Context, r *connect.Request[covev1.ListSandboxesRequest]) (*connect.Response[covev1.ListSandboxesResponse], error) {
	m := r.Msg
	f := store.Filter{Labels: m.Labels, Run: m.Run, PageSize: int(m.PageSize), PageToken: m.PageToken}
	for _, p := range m.States {
		st, err := wire.StateFrom(p)
		if err != nil {
			return nil, err
		}
		if !slices.Contains(f.States, st) {
			f.States = append(f.States, st)
		}
	}
	page, next, err := s.ListSandboxes(ctx, f)
	return answer(&covev1.ListSandboxesResponse{NextPageToken: next, Sandboxes: each(page, wire.Sandbox)}, err)
}

func (s sandboxes) SetTimeout(ctx context.Context, r *connect.Request[covev1.SetTimeoutRequest]) (*connect.Response[covev1.SetTimeoutResponse], error) {
	timeout, err := wire.DurationFrom("timeout", r.Msg.Timeout)
	if err != nil {
		return nil, err
	}
	sb, err := s.Server.SetTimeout(ctx, r.Msg.Id, timeout)
	return answer(&covev1.SetTimeoutResponse{Sandbox: wire.Sandbox(sb)}, err)
}

func (s sandboxes) SetLease(ctx context.Context, r *connect.Request[covev1.SetLeaseRequest]) (*connect.Response[covev1.SetLeaseResponse], error) {
	sb, err := s.Server.SetLease(ctx, r.Msg.Id, r.Msg.Lease)
	return answer(&covev1.SetLeaseResponse{Sandbox: wire.Sandbox(sb)}, err)
}

func (s sandboxes) SetSecrets(ctx context.Context, r *connect.Request[covev1.SetSecretsRequest]) (*connect.Response[covev1.SetSecretsResponse], error) {
	err := s.Server.SetSecrets(ctx, r.Msg.Id, r.Msg.Secrets)
	return answer(&covev1.SetSecretsResponse{Secrets: r.Msg.Secrets}, err)
}

func (s sandboxes) Reset(ctx context.Context, r *connect.Request[covev1.ResetRequest]) (*connect.Response[covev1.ResetResponse], error) {
	sb, took, err := s.ResetSandbox(ctx, r.Msg.Id)
	return answer(&covev1.ResetResponse{Sandbox: wire.Sandbox(sb), NodeTime: durationpb.New(took)}, err)
}

func (s sandboxes) Kill(ctx context.Context, r *connect.Request[covev1.KillRequest]) (*connect.Response[covev1.KillResponse], error) {
	sb, err := s.KillSandbox(ctx, r.Msg.Id, r.Msg.IdempotencyKey)
	return answer(&covev1.KillResponse{Sandbox: wire.Sandbox(sb)}, err)
}

func (s sandboxes) KillByLabel(ctx context.Context, r *connect.Request[covev1.KillByLabelRequest]) (*connect.Response[covev1.KillByLabelResponse], error) {
	ids, err := s.Server.KillByLabel(ctx, r.Msg.Labels)
	return answer(&covev1.KillByLabelResponse{Ids: ids}, err)
}

func (s sandboxes) Stats(ctx context.Context, r *connect.Request[covev1.StatsRequest]) (*connect.Response[covev1.StatsResponse], error) {
	st, err := s.SandboxStats(ctx, r.Msg.Id)
	return answer(wire.Stats(st), err)
}

func (s sandboxes) Diff(ctx context.Context, r *connect.Request[covev1.DiffRequest]) (*connect.Response[covev1.DiffResponse], error) {
	d, err := s.DiffSandbox(ctx, server.DiffRequest{Sandbox: r.Msg.Id, Since: r.Msg.Since, Hash: r.Msg.Hash, Limit: int(r.Msg.Limit)})
	return answer(wire.Diff(d), err)
}

func (s sandboxes) Pause(ctx context.Context, r *connect.Request[covev1.PauseRequest]) (*connect.Response[covev1.PauseResponse], error) {
	sb, err := s.PauseSandbox(ctx, server.PauseRequest{Sandbox: r.Msg.Id, Cold: r.Msg.Cold, IfBusy: r.Msg.IfBusy, DropMemory: r.Msg.DropMemory})
	return answer(&covev1.PauseResponse{Sandbox: wire.Sandbox(sb)}, err)
}

func (s sandboxes) Resume(ctx context.Context, r *connect.Request[covev1.ResumeRequest]) (*connect.Response[covev1.ResumeResponse], error) {
	sb, took, err := s.ResumeSandbox(ctx, r.Msg.Id)
	return answer(&covev1.ResumeResponse{Sandbox: wire.Sandbox(sb), NodeTime: durationpb.New(took)}, err)
}

func (s sandboxes) Restore(ctx context.Context, r *connect.Request[covev1.RestoreRequest]) (*connect.Response[covev1.RestoreResponse], error) {
	sb, took, err := s.RestoreSandbox(ctx, r.Msg.Id, r.Msg.Snapshot)
	return answer(&covev1.RestoreResponse{Sandbox: wire.Sandbox(sb), NodeTime: durationpb.New(took)}, err)
}

func (s sandboxes) Fork(ctx context.Context, r *connect.Request[covev1.ForkRequest]) (*connect.Response[covev1.ForkResponse], error) {
	m := r.Msg
	f := server.ForkRequest{Sandbox: m.Id, Snapshot: m.Snapshot, Count: int(m.Count), MinReady: int(m.MinReady), Labels: m.Labels, Env: m.Env, Lease: m.Lease, Key: m.IdempotencyKey}
	if m.Timeout != nil {
		timeout, err := wire.DurationFrom("timeout", m.Timeout)
		if err != nil {
			return nil, err
		}
		f.Timeout = &timeout
	}
	forked, err := s.Server.Fork(ctx, f)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&covev1.ForkResponse{Paused: durationpb.New(forked.Paused), Existed: forked.Existed, Results: each(forked.Children, forkResult)}), nil
}

func (s sandboxes) SetNetwork(ctx context.Context, r *connect.Request[covev1.SetNetworkRequest]) (*connect.Response[covev1.SetNetworkResponse], error) {
	if r.Msg.Network == nil {
		return nil, sandbox.InvalidField("network", "is missing")
	}
	n, err := wire.NetworkFrom(r.Msg.Network)
	if err != nil {
		return nil, err
	}
	n, generation, err := s.Server.SetNetwork(ctx, r.Msg.Id, n)
	return answer(&covev1.SetNetworkResponse{Generation: generation, Network: wire.Network(n)}, err)
}

func (s sandboxes) GetNetwork(ctx context.Context, r *connect.Request[covev1.GetNetworkRequest]) (*connect.Response[covev1.GetNetworkResponse], error) {
	st, err := s.NetworkStatus(ctx, r.Msg.Id, int(r.Msg.Flows))
	out := &covev1.GetNetworkResponse{Network: wire.Network(st.Network), Generation: st.Generation, Allowed: st.Allowed, Denied: st.Denied,
		Flows: each(st.Flows, wire.NetworkFlow)}
	if st.Recording != nil {
		out.Recording = wire.Recording(*st.Recording)
	}
	if st.Replay != nil {
		out.Replay = wire.ReplayStatus(*st.Replay)
	}
	return answer(out, err)
}

func (s sandboxes) Tree(ctx context.Context, r *connect.Request[covev1.TreeRequest]) (*connect.Response[covev1.TreeResponse], error) {
	nodes, err := s.Server.Tree(ctx, r.Msg.Id)
	return answer(&covev1.TreeResponse{Nodes: each(nodes, func(n server.TreeNode) *covev1.TreeNode {
		return &covev1.TreeNode{Id: n.ID, Parent: n.Parent, Kind: n.Kind, Name: n.Name, State: n.State, CreatedAt: wire.Time(n.CreatedAt)}
	})}, err)
}
