package server

import (
	"context"
	"errors"
	"strings"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/egress/policy"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/wire"
)

// NetworkNode is what the server needs of a node for networks. A node that has
// none refuses to create a sandbox that asks for one.
type NetworkNode interface {
	// SetNetwork returns when the policy is in force, with its generation.
	SetNetwork(ctx context.Context, id string, n sandbox.Network) (generation int64, err error)
	NetworkStatus(ctx context.Context, id string, flows int) (sandbox.NetworkStatus, error)
}

// maxFlows is what a node keeps of each sandbox.
const maxFlows = 512

// validateNetwork checks a network that has its mode. field is what it was
// called in the request.
func validateNetwork(field string, n sandbox.Network) error {
	_, err := policy.Compile(n)
	var e *sandbox.Error
	if errors.As(err, &e) {
		c := *e
		c.Field = field + strings.TrimPrefix(e.Field, "network")
		return &c
	}
	return err
}

// SetNetwork goes to the node first: what is in force there is the truth, and
// Reconcile takes its word.
func (s sandboxService) SetNetwork(ctx context.Context, r *connect.Request[covev1.SetNetworkRequest]) (*connect.Response[covev1.SetNetworkResponse], error) {
	id := r.Msg.Id
	if err := validID("id", id); err != nil {
		return nil, err
	}
	if r.Msg.Network == nil {
		return nil, sandbox.InvalidField("network", "is missing")
	}
	n, err := wire.NetworkFrom(r.Msg.Network)
	if err == nil {
		n = n.WithDefault(s.cfg.Defaults.Network)
		err = validateNetwork("network", n)
	}
	if err != nil {
		return nil, err
	}
	// A caller that leaves does not leave the two records apart.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), createTimeout)
	defer cancel()
	if n, err = s.changeTape(ctx, id, n); err != nil {
		return nil, err
	}
	generation, err := s.node.SetNetwork(ctx, id, n)
	if err != nil {
		return nil, s.explain(ctx, id, err)
	}
	_, err = s.store.UpdateSandbox(ctx, id, func(sb *sandbox.Sandbox) error {
		if sb.NetworkGeneration < generation {
			sb.Spec.Network, sb.NetworkGeneration = n, generation
			sb.Spec = sb.Spec.WithAuthority(id) // as the node does
		}
		return nil
	})
	if err != nil {
		return nil, s.explain(ctx, id, err)
	}
	return connect.NewResponse(&covev1.SetNetworkResponse{Generation: generation, Network: wire.Network(n)}), nil
}

// GetNetwork does not wake the sandbox.
func (s sandboxService) GetNetwork(ctx context.Context, r *connect.Request[covev1.GetNetworkRequest]) (*connect.Response[covev1.GetNetworkResponse], error) {
	if err := validID("id", r.Msg.Id); err != nil {
		return nil, err
	}
	if r.Msg.Flows < 0 || r.Msg.Flows > maxFlows {
		return nil, sandbox.InvalidField("flows", "%d; 0 to %d are accepted", r.Msg.Flows, maxFlows)
	}
	st, err := s.node.NetworkStatus(ctx, r.Msg.Id, int(r.Msg.Flows))
	if err != nil {
		return nil, s.explain(ctx, r.Msg.Id, err)
	}
	out := &covev1.GetNetworkResponse{Network: wire.Network(st.Network), Generation: st.Generation, Allowed: st.Allowed, Denied: st.Denied}
	for _, f := range st.Flows {
		out.Flows = append(out.Flows, wire.NetworkFlow(f))
	}
	if st.Recording != nil {
		out.Recording = wire.Recording(*st.Recording)
	}
	if st.Replay != nil {
		out.Replay = wire.ReplayStatus(*st.Replay)
	}
	return connect.NewResponse(out), nil
}

// refused counts what the policy of a sandbox denied so far, and what its replay
// had no answer for; 0 if that cannot be told, for it is only informative.
func (s *Server) refused(ctx context.Context, id string) (denied, missed int64) {
	st, err := s.node.NetworkStatus(ctx, id, 0)
	if err != nil {
		return 0, 0
	}
	return st.Denied, st.Missed
}
