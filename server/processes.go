package server

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/wire"
)

type processService struct{ *Server }

const (
	// maxInput is the most one call writes to a process's stdin.
	maxInput = 16 << 20

	defaultWait = time.Minute
	longestWait = time.Hour

	// killGrace is how long the end of a process killed by a signal waits for
	// news that its whole sandbox went: to the processes of a container whose
	// init dies, that is just a SIGKILL. Kills through the API have their own
	// cause and do not wait.
	killGrace = 100 * time.Millisecond

	// resetNews is how often one who waits for an end looks whether it was a
	// restore.
	resetNews = 50 * time.Millisecond
)

// guest is the machine inside a sandbox, or why there is none. The sandbox
// counts as active until release.
func (s *Server) guest(ctx context.Context, id string) (g Guest, release func(), err error) {
	if err := validID("sandbox_id", id); err != nil {
		return nil, nil, err
	}
	g, release, err = s.node.Guest(ctx, id)
	if err != nil {
		return nil, nil, s.explain(ctx, id, err)
	}
	return g, release, nil
}

// withGuest runs f with the machine inside. f's errors pass, unless they mean
// that the sandbox ended under it: then the error says so, and why.
func (s *Server) withGuest(ctx context.Context, id string, f func(Guest) error) error {
	g, release, err := s.guest(ctx, id)
	if err != nil {
		return err
	}
	defer release()
	err = f(g)
	if err == nil || ctx.Err() != nil || !broken(err) {
		return err
	}
	if end, ok := s.awaitEnd(ctx, id, s.doubt(ctx, id)); ok {
		return endedError(id, end)
	}
	return err
}

// doubt is how long to wait for news of an end after an error that may mean
// one. A full container answers Unavailable to a start, too; while the node
// thinks that the sandbox lives, that is the better guess.
func (s *Server) doubt(ctx context.Context, id string) time.Duration {
	_, release, err := s.node.Guest(ctx, id)
	if err != nil {
		return s.cfg.EndWait
	}
	release()
	return min(s.cfg.EndWait, 500*time.Millisecond)
}

// broken says whether err may mean that the machine inside is gone, as opposed
// to an answer it gave.
func broken(err error) bool {
	switch sandbox.ClassOf(err) {
	case sandbox.Unavailable, sandbox.Internal, sandbox.Ended:
		return true
	}
	return false
}

func endedError(id string, end sandbox.End) error {
	sb := sandbox.Sandbox{ID: id, State: sandbox.EndedState, End: &end}
	return sb.Usable()
}

func (s processService) Start(ctx context.Context, r *connect.Request[covev1.StartProcessRequest], out *connect.ServerStream[covev1.ProcessEvent]) error {
	if r.Msg.Process == nil {
		return sandbox.InvalidField("process", "is missing; say what to run")
	}
	spec, err := wire.ProcessSpecFrom(r.Msg.Process)
	if err != nil {
		return err
	}
	if spec.ExecID == "" {
		spec.ExecID = sandbox.NewID(s.cfg.Rand)
	}
	if err := spec.Validate(); err != nil {
		return err
	}
	if len(spec.Input) > maxInput {
		return tooMuchInput("process.input", len(spec.Input))
	}
	if err := validOffset(r.Msg.Offset); err != nil {
		return err
	}
	who := follower{r.Msg.SandboxId, spec.ExecID, r.Msg.KillOnCancel}
	return s.stream(ctx, who, out.Send, func(ctx context.Context, g Guest, sink func(sandbox.ProcessEvent) error) error {
		return inProcess(g.Start(ctx, spec, r.Msg.Offset, sink))
	})
}

// inProcess spells the field of a guest's error as the request does: the guest
// knows a process, not the message around it.
func inProcess(err error) error {
	var e *sandbox.Error
	if !errors.As(err, &e) || e.Field == "" || strings.HasPrefix(e.Field, "process") {
		return err
	}
	c := *e
	c.Field = "process." + c.Field
	return &c
}

func (s processService) Attach(ctx context.Context, r *connect.Request[covev1.AttachProcessRequest], out *connect.ServerStream[covev1.ProcessEvent]) error {
	if err := sandbox.ValidateExecID("exec_id", r.Msg.ExecId); err != nil {
		return err
	}
	if err := validOffset(r.Msg.Offset); err != nil {
		return err
	}
	who := follower{r.Msg.SandboxId, r.Msg.ExecId, r.Msg.KillOnCancel}
	return s.stream(ctx, who, out.Send, func(ctx context.Context, g Guest, sink func(sandbox.ProcessEvent) error) error {
		return g.Attach(ctx, r.Msg.ExecId, r.Msg.Offset, sink)
	})
}

// stream sends a process's events until it ends or the caller leaves, which
// does not end the process, unless the caller wants that.
//
// When the connection breaks because the sandbox is over or was reset, the
// stream still ends properly: with an end event that has the sandbox's cause.
func (s *Server) stream(ctx context.Context, who follower, send func(*covev1.ProcessEvent) error,
	follow func(context.Context, Guest, func(sandbox.ProcessEvent) error) error,
) error {
	id := who.sandbox
	g, release, err := s.guest(ctx, id)
	if err != nil {
		return err
	}
	defer release()
	s.strays.joined(who)
	resets := s.ends.resetCount(id)
	began := time.Now()
	denied, missed := s.refused(ctx, id)
	p := newPump(send, batchFrom(ctx), s.cfg.KeepAlive)
	err = p.run(ctx, func(ctx context.Context, sink func(sandbox.ProcessEvent) error) error { return follow(ctx, g, sink) })
	s.left(ctx, who, p.started && p.end == nil)
	switch {
	case p.sendErr != nil:
		return p.sendErr
	case p.end != nil: // the pump leaves sending it to us
		if suspicious(p.end.End) {
			p.batch.release(true) // the output need not wait with it
		}
		end := s.correctEnd(ctx, id, resets, *p.end)
		nowDenied, nowMissed := s.refused(ctx, id)
		end.EgressDenied, end.ReplayMissed = max(0, nowDenied-denied), max(0, nowMissed-missed)
		return p.finish(end)
	case err == nil:
		err = &sandbox.Error{Class: sandbox.Unavailable, Msg: "the stream ended before the process", Hint: "attach again by its exec_id"}
	}
	if ctx.Err() != nil || !broken(err) {
		return err
	}
	if !p.started {
		if s.restored(ctx, id, resets) { // nothing of it has begun where it would go on: it begins there
			return s.stream(ctx, who, send, follow)
		}
		if end, ok := s.awaitEnd(ctx, id, s.doubt(ctx, id)); ok {
			return endedError(id, end)
		}
		return err
	}
	end, ok := s.endOfProcess(ctx, id, resets)
	if !ok {
		return err
	}
	return p.finish(sandbox.ProcessEnd{End: end, OutputBytes: p.offset, Duration: time.Since(began)})
}

// restored says whether a sandbox whose guest went away got another. One that
// ended did not.
func (s *Server) restored(ctx context.Context, id string, resets uint64) bool {
	if s.ends.resetCount(id) == resets {
		return false
	}
	_, release, err := s.node.Guest(ctx, id)
	if err == nil {
		release()
	}
	return err == nil
}

// endOfProcess is why a process went whose connection broke: its episode was
// reset or its sandbox ended. ok is false if neither is known to have happened.
func (s *Server) endOfProcess(ctx context.Context, id string, resets uint64) (end sandbox.End, ok bool) {
	if s.ends.resetCount(id) != resets {
		return sandbox.End{Cause: sandbox.ResetCause, At: s.cfg.Clock().UTC()}, true
	}
	// A restore that was under way when the process began is noted before it
	// takes the old kernel away and once more when it has.
	for until := time.Now().Add(s.cfg.EndWait); ; {
		if end, ok := s.awaitEnd(ctx, id, min(resetNews, s.cfg.EndWait)); ok {
			return end, true
		}
		if s.ends.resetCount(id) != resets {
			return sandbox.End{Cause: sandbox.ResetCause, At: s.cfg.Clock().UTC()}, true
		}
		if ctx.Err() != nil || !time.Now().Before(until) {
			return sandbox.End{}, false
		}
	}
}

// suspicious says whether an end may be the sandbox's rather than the
// process's own: to the processes of a container that dies, it is a SIGKILL.
func suspicious(e sandbox.End) bool { return e.Cause == sandbox.Signalled && e.Signal == "SIGKILL" }

// correctEnd replaces "killed by a signal" by why its sandbox went, if it did.
func (s *Server) correctEnd(ctx context.Context, id string, resets uint64, end sandbox.ProcessEnd) sandbox.ProcessEnd {
	if !suspicious(end.End) {
		return end
	}
	if s.ends.resetCount(id) != resets {
		end.Cause = sandbox.ResetCause
		return end
	}
	if sbEnd, ok := s.awaitEnd(ctx, id, killGrace); ok {
		end.End = sbEnd
	}
	return end
}

func (s processService) SendInput(ctx context.Context, r *connect.Request[covev1.SendInputRequest]) (*connect.Response[covev1.SendInputResponse], error) {
	if err := sandbox.ValidateExecID("exec_id", r.Msg.ExecId); err != nil {
		return nil, err
	}
	if len(r.Msg.Data) > maxInput {
		return nil, tooMuchInput("data", len(r.Msg.Data))
	}
	return answer(&covev1.SendInputResponse{}, s.withGuest(ctx, r.Msg.SandboxId, func(g Guest) error {
		return g.SendInput(ctx, r.Msg.ExecId, r.Msg.Data)
	}))
}

func (s processService) CloseInput(ctx context.Context, r *connect.Request[covev1.CloseInputRequest]) (*connect.Response[covev1.CloseInputResponse], error) {
	if err := sandbox.ValidateExecID("exec_id", r.Msg.ExecId); err != nil {
		return nil, err
	}
	return answer(&covev1.CloseInputResponse{}, s.withGuest(ctx, r.Msg.SandboxId, func(g Guest) error {
		return g.CloseInput(ctx, r.Msg.ExecId)
	}))
}

func (s processService) Signal(ctx context.Context, r *connect.Request[covev1.SignalRequest]) (*connect.Response[covev1.SignalResponse], error) {
	if err := sandbox.ValidateExecID("exec_id", r.Msg.ExecId); err != nil {
		return nil, err
	}
	sig := r.Msg.Signal
	if sig == "" {
		sig = "SIGKILL"
	}
	if len(sig) > 16 {
		return nil, sandbox.InvalidField("signal", `%.20q is no signal; "SIGTERM", "TERM" or "15" is accepted`, sig)
	}
	return answer(&covev1.SignalResponse{}, s.withGuest(ctx, r.Msg.SandboxId, func(g Guest) error {
		return g.Signal(ctx, r.Msg.ExecId, sig, r.Msg.ProcessOnly)
	}))
}

func (s processService) Resize(ctx context.Context, r *connect.Request[covev1.ResizeRequest]) (*connect.Response[covev1.ResizeResponse], error) {
	if err := sandbox.ValidateExecID("exec_id", r.Msg.ExecId); err != nil {
		return nil, err
	}
	size, err := wire.TermSizeFrom("size", r.Msg.Size)
	if err != nil {
		return nil, err
	}
	if size == nil {
		return nil, sandbox.InvalidField("size", "is missing; rows and cols are needed")
	}
	if err := sandbox.ValidateTermSize("size", *size); err != nil {
		return nil, err
	}
	return answer(&covev1.ResizeResponse{}, s.withGuest(ctx, r.Msg.SandboxId, func(g Guest) error {
		return g.Resize(ctx, r.Msg.ExecId, *size)
	}))
}

func (s processService) List(ctx context.Context, r *connect.Request[covev1.ListProcessesRequest]) (*connect.Response[covev1.ListProcessesResponse], error) {
	out := &covev1.ListProcessesResponse{}
	return answer(out, s.withGuest(ctx, r.Msg.SandboxId, func(g Guest) error {
		ps, tasks, err := g.Processes(ctx)
		for _, p := range ps {
			out.Processes = append(out.Processes, wire.Process(p))
		}
		for _, t := range tasks {
			out.Tasks = append(out.Tasks, wire.Task(t))
		}
		return err
	}))
}

func (s processService) Wait(ctx context.Context, r *connect.Request[covev1.WaitProcessRequest]) (*connect.Response[covev1.WaitProcessResponse], error) {
	if err := sandbox.ValidateExecID("exec_id", r.Msg.ExecId); err != nil {
		return nil, err
	}
	most, err := wire.DurationFrom("max_wait", r.Msg.MaxWait)
	if err != nil {
		return nil, err
	}
	if most < 0 || most > longestWait {
		return nil, sandbox.InvalidField("max_wait", "%s is not accepted; up to %s is, or 0 for %s", most, longestWait, defaultWait)
	}
	if most == 0 {
		most = defaultWait
	}
	id := r.Msg.SandboxId
	g, release, err := s.guest(ctx, id)
	if err != nil {
		return nil, err
	}
	defer release()
	resets := s.ends.resetCount(id)
	began := time.Now()
	wctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	end, err := g.Wait(wctx, r.Msg.ExecId)
	switch {
	case err == nil:
		end = s.correctEnd(ctx, id, resets, end)
	case ctx.Err() == nil && wctx.Err() != nil: // still running
		return connect.NewResponse(&covev1.WaitProcessResponse{}), nil
	case ctx.Err() != nil || !broken(err):
		return nil, err
	default:
		why, ok := s.endOfProcess(ctx, id, resets)
		if !ok {
			return nil, err
		}
		end = sandbox.ProcessEnd{End: why, Duration: time.Since(began)}
	}
	return connect.NewResponse(&covev1.WaitProcessResponse{End: wire.ProcessEnd(end)}), nil
}

// answer is the response, unless there is an error.
func answer[T any](m *T, err error) (*connect.Response[T], error) {
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(m), nil
}

func validOffset(n int64) error {
	if n < 0 {
		return sandbox.InvalidField("offset", "%d is not accepted; 0 or a byte offset seen before is", n)
	}
	return nil
}

func tooMuchInput(field string, n int) error {
	return &sandbox.Error{Class: sandbox.TooLarge, Field: field,
		Msg:  fmt.Sprintf("%s in one call; at most %s are accepted", sandbox.FormatSize(int64(n)), sandbox.FormatSize(maxInput)),
		Hint: "send it in pieces, or as a file over PUT /v1/sandboxes/{id}/files"}
}
