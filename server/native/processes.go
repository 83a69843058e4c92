package native

import (
	"context"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/server"
	"github.com/cove-sandbox/cove/wire"
)

type processes struct{ *server.Server }

func (s processes) Start(ctx context.Context, r *connect.Request[covev1.StartProcessRequest], out *connect.ServerStream[covev1.ProcessEvent]) error {
	if r.Msg.Process == nil {
		return sandbox.InvalidField("process", "is missing; say what to run")
	}
	spec, err := wire.ProcessSpecFrom(r.Msg.Process)
	if err != nil {
		return err
	}
	return s.StartProcess(ctx, server.StartRequest{Sandbox: r.Msg.SandboxId, Process: spec, Offset: r.Msg.Offset, KillOnCancel: r.Msg.KillOnCancel}, events(ctx, out))
}

func (s processes) Attach(ctx context.Context, r *connect.Request[covev1.AttachProcessRequest], out *connect.ServerStream[covev1.ProcessEvent]) error {
	return s.AttachProcess(ctx, r.Msg.SandboxId, r.Msg.ExecId, r.Msg.Offset, r.Msg.KillOnCancel, events(ctx, out))
}

// events sends what a process does, what comes together in one write.
func events(ctx context.Context, out *connect.ServerStream[covev1.ProcessEvent]) server.ProcessSink {
	batch := batchFrom(ctx)
	return func(evs []sandbox.ProcessEvent, flush bool) error {
		batch.hold()
		for _, ev := range evs {
			if err := out.Send(wire.Event(ev)); err != nil {
				return err
			}
		}
		if flush {
			batch.release()
		}
		return nil
	}
}

func (s processes) SendInput(ctx context.Context, r *connect.Request[covev1.SendInputRequest]) (*connect.Response[covev1.SendInputResponse], error) {
	return answer(&covev1.SendInputResponse{}, s.Server.SendInput(ctx, r.Msg.SandboxId, r.Msg.ExecId, r.Msg.Data))
}

func (s processes) CloseInput(ctx context.Context, r *connect.Request[covev1.CloseInputRequest]) (*connect.Response[covev1.CloseInputResponse], error) {
	return answer(&covev1.CloseInputResponse{}, s.Server.CloseInput(ctx, r.Msg.SandboxId, r.Msg.ExecId))
}

func (s processes) Signal(ctx context.Context, r *connect.Request[covev1.SignalRequest]) (*connect.Response[covev1.SignalResponse], error) {
	return answer(&covev1.SignalResponse{}, s.SignalProcess(ctx, r.Msg.SandboxId, r.Msg.ExecId, r.Msg.Signal, r.Msg.ProcessOnly))
}

func (s processes) Resize(ctx context.Context, r *connect.Request[covev1.ResizeRequest]) (*connect.Response[covev1.ResizeResponse], error) {
	size, err := wire.TermSizeFrom("size", r.Msg.Size)
	if err != nil {
		return nil, err
	}
	return answer(&covev1.ResizeResponse{}, s.ResizeTerminal(ctx, r.Msg.SandboxId, r.Msg.ExecId, size))
}

func (s processes) List(ctx context.Context, r *connect.Request[covev1.ListProcessesRequest]) (*connect.Response[covev1.ListProcessesResponse], error) {
	ps, tasks, err := s.ListProcesses(ctx, r.Msg.SandboxId)
	return answer(&covev1.ListProcessesResponse{Processes: each(ps, wire.Process), Tasks: each(tasks, wire.Task)}, err)
}

func (s processes) Wait(ctx context.Context, r *connect.Request[covev1.WaitProcessRequest]) (*connect.Response[covev1.WaitProcessResponse], error) {
	most, err := wire.DurationFrom("max_wait", r.Msg.MaxWait)
	if err != nil {
		return nil, err
	}
	end, ended, err := s.WaitProcess(ctx, r.Msg.SandboxId, r.Msg.ExecId, most)
	out := &covev1.WaitProcessResponse{}
	if ended {
		out.End = wire.ProcessEnd(end)
	}
	return answer(out, err)
}
