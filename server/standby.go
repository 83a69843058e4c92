package server

import (
	"context"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/wire"
)

// asItIs is a record with what only the node knows: whether it is awake. That
// changes with every call into a sandbox, so it is asked and never stored.
func (s *Server) asItIs(sb sandbox.Sandbox) sandbox.Sandbox {
	sb.Standby = s.node.Standby()[sb.ID]
	return sb
}

// Pause is finished once begun: a caller that leaves half-way would not know
// whether its sandbox is paused.
func (s sandboxService) Pause(ctx context.Context, r *connect.Request[covev1.PauseRequest]) (*connect.Response[covev1.PauseResponse], error) {
	sb, err := s.live(ctx, r.Msg.Id)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), snapshotTimeout)
	defer cancel()
	defer context.AfterFunc(s.calls.cut, cancel)()
	if err := s.node.Pause(ctx, sb.ID, r.Msg.Cold); err != nil {
		return nil, s.explain(ctx, sb.ID, err)
	}
	return connect.NewResponse(&covev1.PauseResponse{Sandbox: wire.Sandbox(s.asItIs(sb))}), nil
}

func (s sandboxService) Resume(ctx context.Context, r *connect.Request[covev1.ResumeRequest]) (*connect.Response[covev1.ResumeResponse], error) {
	sb, err := s.live(ctx, r.Msg.Id)
	if err != nil {
		return nil, err
	}
	took, err := s.node.Resume(ctx, sb.ID)
	if err != nil {
		return nil, s.explain(ctx, sb.ID, err)
	}
	return connect.NewResponse(&covev1.ResumeResponse{Sandbox: wire.Sandbox(s.asItIs(sb)), NodeTime: durationpb.New(took)}), nil
}

// live is the record of a sandbox that has not ended, or why there is none.
func (s *Server) live(ctx context.Context, id string) (sandbox.Sandbox, error) {
	sb, err := s.get(ctx, id)
	if err != nil {
		return sb, err
	}
	return sb, sb.Usable()
}
