package server

import (
	"context"
	"errors"
	"strings"

	"github.com/cove-sandbox/cove/egress/policy"
	"github.com/cove-sandbox/cove/egress/transform"
	"github.com/cove-sandbox/cove/sandbox"
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
	err := policy.Check(n)
	if err == nil {
		_, err = transform.Compile(n.Headers)
	}
	var e *sandbox.Error
	if errors.As(err, &e) {
		c := *e
		c.Field = field + strings.TrimPrefix(e.Field, "network")
		return &c
	}
	return err
}

// SetNetwork returns the network in force and its generation. It goes to the node
// first: what is in force there is the truth, and Reconcile takes its word.
func (s *Server) SetNetwork(ctx context.Context, id string, n sandbox.Network) (now sandbox.Network, generation int64, err error) {
	ctx, call, err := s.begin(ctx, "sandbox.set_network", about("id", id))
	if err != nil {
		return n, 0, err
	}
	defer call.end(&err)
	n = n.WithDefault(s.cfg.Defaults.Network)
	if err := firstError(call.needs(partsOfNetwork("network", n)...), validID("id", id), validateNetwork("network", n)); err != nil {
		return n, 0, err
	}
	// A caller that leaves does not leave the two records apart.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), createTimeout)
	defer cancel()
	n, begun, err := s.changeRecording(ctx, id, n)
	if err != nil {
		return n, 0, err
	}
	if generation, err = s.node.SetNetwork(ctx, id, n); err != nil {
		if begun {
			s.giveUpRecording(n.Record.ID)
		}
		return n, 0, s.explain(ctx, id, err)
	}
	_, err = s.store.UpdateSandbox(ctx, id, func(sb *sandbox.Sandbox) error {
		if sb.NetworkGeneration < generation {
			sb.Spec.Network, sb.NetworkGeneration = n, generation
			sb.Spec = sb.Spec.WithAuthority(id) // as the node does
		}
		return nil
	})
	if err != nil {
		return n, 0, s.explain(ctx, id, err)
	}
	return n, generation, nil
}

// NetworkStatus is what a sandbox's network did, with so many of its last flows.
// It does not wake the sandbox.
func (s *Server) NetworkStatus(ctx context.Context, id string, flows int) (st sandbox.NetworkStatus, err error) {
	ctx, call, err := s.begin(ctx, "sandbox.get_network", about("id", id))
	if err != nil {
		return st, err
	}
	defer call.end(&err)
	if err := validID("id", id); err != nil {
		return st, err
	}
	if flows < 0 || flows > maxFlows {
		return st, sandbox.InvalidField("flows", "%d; 0 to %d are accepted", flows, maxFlows)
	}
	if st, err = s.node.NetworkStatus(ctx, id, flows); err != nil {
		return st, s.explain(ctx, id, err)
	}
	if st.Recording != nil && st.Network.Record != nil {
		st.Recording.Name = st.Network.Record.Name // which the node does not know
	}
	return st, nil
}

// traffic counts what the policy of a sandbox denied so far, what its replay had no
// answer for, and bytes; nothing if that cannot be told, for it is only informative.
func (s *Server) traffic(ctx context.Context, id string) sandbox.NetworkStatus {
	st, err := s.node.NetworkStatus(ctx, id, 0)
	if err != nil {
		return sandbox.NetworkStatus{}
	}
	return st
}
