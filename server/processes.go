package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"strings"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

const (
	// MaxInput is the most one call writes to a process's stdin.
	MaxInput = 16 << 20

	defaultWait = time.Minute
	longestWait = time.Hour

	// killGrace is how long the end of a process killed by a signal waits for
	// news that its whole sandbox went: to the processes of a container whose
	// init dies, that is just a SIGKILL. Kills through the API have their own
	// cause and do not wait.
	killGrace = 100 * time.Millisecond
)

// inside runs f, which calls into a sandbox. f's errors pass, unless they mean
// that there is no such sandbox or that it ended under it: then the error says
// so, and why.
func (s *Server) inside(ctx context.Context, id string, f func() error) error {
	if err := validID("sandbox_id", id); err != nil {
		return err
	}
	err := f()
	switch {
	case err == nil:
		return nil
	case errors.Is(err, sandbox.ErrNoSandbox) || errors.Is(err, sandbox.ErrEnded):
		return s.explain(ctx, id, err)
	case ctx.Err() != nil || !broken(err):
		return err
	}
	if end, ok := s.awaitEnd(ctx, id, s.endWait(ctx, id)); ok {
		return endedError(id, end)
	}
	return err
}

// endWait is how long to wait for news of an end after an error that may mean
// one. A full container answers Unavailable to a start, too; while the node
// thinks that the sandbox lives, that is the better guess.
func (s *Server) endWait(ctx context.Context, id string) time.Duration {
	if s.lives(ctx, id) {
		return min(s.cfg.EndWait, 500*time.Millisecond)
	}
	return s.cfg.EndWait
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

// ProcessSink takes the events of a process as they come, some at a time. It must
// not hold them back once flush is set; without it the end of the stream, or
// another event, follows at once. One call at a time.
type ProcessSink func(evs []sandbox.ProcessEvent, flush bool) error

// StartRequest asks for a process in a sandbox.
type StartRequest struct {
	Sandbox string
	Process sandbox.ProcessSpec // without an ExecID it gets one
	Offset  int64               // into the output of a process that was started before
	// KillOnCancel has the process killed when its last reader left and did not
	// come back.
	KillOnCancel bool
}

// StartProcess runs a process and follows it to its end. With the ExecID of one
// that was started before it runs nothing and follows that.
func (s *Server) StartProcess(ctx context.Context, r StartRequest, sink ProcessSink) (err error) {
	ctx, call, err := s.begin(ctx, "process.start", about("sandbox", r.Sandbox))
	if err != nil {
		return err
	}
	defer call.end(&err)
	return s.start(ctx, r, call.onFirst(sink))
}

// ExecProcess is StartProcess for a dialect that collects what a process printed
// and answers when it has ended.
func (s *Server) ExecProcess(ctx context.Context, r StartRequest, sink ProcessSink) (err error) {
	ctx, call, err := s.begin(ctx, "process.exec", about("id", r.Sandbox), about("exec", r.Process.ExecID))
	if err != nil {
		return err
	}
	defer call.end(&err)
	return s.start(ctx, r, sink)
}

func (s *Server) start(ctx context.Context, r StartRequest, sink ProcessSink) error {
	if r.Process.ExecID == "" {
		r.Process.ExecID = sandbox.NewID(s.cfg.Rand)
	}
	if err := r.Process.Validate(); err != nil {
		return err
	}
	if len(r.Process.Input) > MaxInput {
		return TooMuchInput("process.input", len(r.Process.Input))
	}
	if err := validOffset(r.Offset); err != nil {
		return err
	}
	step, err := s.beginStep(ctx, r)
	if err != nil {
		return err
	}
	if step != nil {
		sink = step.tap(s, sink)
		defer func() { s.leaveStep(step, err) }()
		s.observe(ctx, step, step.of.run)
	}
	who := follower{r.Sandbox, r.Process.ExecID, r.KillOnCancel}
	err = s.stream(ctx, who, sink, func(ctx context.Context) iter.Seq2[sandbox.ProcessEvent, error] {
		return inProcess(s.node.Start(ctx, r.Sandbox, r.Process, r.Offset))
	})
	return err
}

// inProcess spells the field of a stream's error as a request does: the node
// knows a process, not what is around it.
func inProcess(events iter.Seq2[sandbox.ProcessEvent, error]) iter.Seq2[sandbox.ProcessEvent, error] {
	return func(yield func(sandbox.ProcessEvent, error) bool) {
		for ev, err := range events {
			var e *sandbox.Error
			if errors.As(err, &e) && e.Field != "" && !strings.HasPrefix(e.Field, "process") {
				c := *e
				c.Field = "process." + c.Field
				err = &c
			}
			if !yield(ev, err) {
				return
			}
		}
	}
}

// AttachProcess follows a process from an offset of its output.
func (s *Server) AttachProcess(ctx context.Context, id, exec string, offset int64, killOnCancel bool, sink ProcessSink) (err error) {
	ctx, call, err := s.begin(ctx, "process.attach", about("sandbox", id), about("exec", exec))
	if err != nil {
		return err
	}
	defer call.end(&err)
	if killOnCancel { // to look on is to read, to have it killed is not
		err = call.needs(writes("kill_on_cancel", "processes"))
	}
	if err := firstError(err, sandbox.ValidateExecID("exec_id", exec), validOffset(offset)); err != nil {
		return err
	}
	return s.stream(ctx, follower{id, exec, killOnCancel}, sink, func(ctx context.Context) iter.Seq2[sandbox.ProcessEvent, error] {
		return s.node.Attach(ctx, id, exec, offset)
	})
}

// stream sends a process's events until it ends or the caller leaves, which
// does not end the process, unless the caller wants that.
//
// When the connection breaks because the sandbox is over or was reset, the
// stream still ends properly: with an end event that has the sandbox's cause.
func (s *Server) stream(ctx context.Context, who follower, sink ProcessSink,
	follow func(context.Context) iter.Seq2[sandbox.ProcessEvent, error],
) error {
	id := who.sandbox
	if err := validID("sandbox_id", id); err != nil {
		return err
	}
	s.strays.joined(who)
	resets := s.ends.resetCount(id)
	began := time.Now()
	before := s.traffic(ctx, id)
	p := newPump(sink, s.cfg.KeepAlive)
	err := p.run(ctx, follow)
	s.left(ctx, who, p.started && p.end == nil && !errors.Is(p.sendErr, sandbox.ErrAsleep))
	switch {
	case p.sendErr != nil:
		return p.sendErr
	case p.end != nil: // the pump leaves sending it to us
		if suspicious(p.end.End) {
			_ = p.sink(nil, true) // the output need not wait with it
		}
		end := s.correctEnd(ctx, id, resets, *p.end)
		now := s.traffic(ctx, id)
		end.EgressDenied, end.ReplayMissed = max(0, now.Denied-before.Denied), max(0, now.Missed-before.Missed)
		end.EgressSent, end.EgressReceived = grown(now.Sent, before.Sent), grown(now.Received, before.Received)
		return p.finish(end)
	case err == nil:
		err = &sandbox.Error{Class: sandbox.Unavailable, Msg: "the stream ended before the process", Hint: "attach again by its exec_id"}
	}
	if !p.started && (errors.Is(err, sandbox.ErrNoSandbox) || errors.Is(err, sandbox.ErrEnded)) {
		return s.explain(ctx, id, err)
	}
	if ctx.Err() != nil || !broken(err) {
		return err
	}
	if !p.started {
		end, ok := s.endOfProcess(ctx, id, resets, s.endWait(ctx, id))
		switch {
		case !ok:
			return err
		case end.Cause == sandbox.ResetCause && s.lives(ctx, id): // nothing of it has begun where it would go on: it begins there
			return s.stream(ctx, who, sink, follow)
		}
		return endedError(id, end)
	}
	end, ok := s.endOfProcess(ctx, id, resets, s.cfg.EndWait)
	if !ok {
		return err
	}
	return p.finish(sandbox.ProcessEnd{End: end, OutputBytes: p.offset, Duration: time.Since(began)})
}

// endOfProcess is why a process went whose connection broke: its episode was
// reset or its sandbox ended. ok is false if neither is known to have happened
// after a while.
func (s *Server) endOfProcess(ctx context.Context, id string, resets uint64, wait time.Duration) (end sandbox.End, ok bool) {
	reset := func() bool { return s.ends.resetSince(id, resets) }
	// A restore that was under way when the process began is noted before it
	// takes the old kernel away and once more when it has.
	if !reset() {
		if end, ok := s.awaitEndUnless(ctx, id, wait, reset); ok {
			return end, true
		}
	}
	if reset() {
		return sandbox.End{Cause: sandbox.ResetCause, At: s.cfg.Clock().UTC()}, true
	}
	return sandbox.End{}, false
}

// suspicious says whether an end may be the sandbox's rather than the
// process's own: to the processes of a container that dies, it is a SIGKILL.
func suspicious(e sandbox.End) bool { return e.Cause == sandbox.Signalled && e.Signal == "SIGKILL" }

// correctEnd replaces "killed by a signal" by why its sandbox went, if it did.
func (s *Server) correctEnd(ctx context.Context, id string, resets uint64, end sandbox.ProcessEnd) sandbox.ProcessEnd {
	if !suspicious(end.End) {
		return end
	}
	if s.ends.resetSince(id, resets) {
		end.Cause = sandbox.ResetCause
		return end
	}
	if sbEnd, ok := s.awaitEnd(ctx, id, killGrace); ok {
		end.End = sbEnd
	}
	return end
}

// SendInput writes to the stdin of a process.
func (s *Server) SendInput(ctx context.Context, id, exec string, data []byte) (err error) {
	ctx, call, err := s.begin(ctx, "process.send_input", about("sandbox", id), about("exec", exec))
	if err != nil {
		return err
	}
	defer call.end(&err)
	if err := sandbox.ValidateExecID("exec_id", exec); err != nil {
		return err
	}
	if len(data) > MaxInput {
		return TooMuchInput("data", len(data))
	}
	err = s.inside(ctx, id, func() error { return s.node.SendInput(ctx, id, exec, data) })
	if err == nil {
		s.stepInput(id, exec, data, false)
	}
	return err
}

// CloseInput ends the stdin of a process.
func (s *Server) CloseInput(ctx context.Context, id, exec string) (err error) {
	ctx, call, err := s.begin(ctx, "process.close_input", about("sandbox", id), about("exec", exec))
	if err != nil {
		return err
	}
	defer call.end(&err)
	if err := sandbox.ValidateExecID("exec_id", exec); err != nil {
		return err
	}
	err = s.inside(ctx, id, func() error { return s.node.CloseInput(ctx, id, exec) })
	if err == nil {
		s.stepInput(id, exec, nil, true)
	}
	return err
}

// SignalProcess sends a signal to a process and its children, or to it alone; "" is
// SIGKILL.
func (s *Server) SignalProcess(ctx context.Context, id, exec, signal string, processOnly bool) (err error) {
	ctx, call, err := s.begin(ctx, "process.signal", about("sandbox", id), about("exec", exec))
	if err != nil {
		return err
	}
	defer call.end(&err)
	if err := sandbox.ValidateExecID("exec_id", exec); err != nil {
		return err
	}
	if len(signal) > 16 {
		return sandbox.InvalidField("signal", `%.20q is no signal; "SIGTERM", "TERM" or "15" is accepted`, signal)
	}
	return s.inside(ctx, id, func() error { return s.node.Signal(ctx, id, exec, cmp.Or(signal, "SIGKILL"), processOnly) })
}

// ResizeTerminal tells a process the size of its terminal.
func (s *Server) ResizeTerminal(ctx context.Context, id, exec string, size *sandbox.TermSize) (err error) {
	ctx, call, err := s.begin(ctx, "process.resize", about("sandbox", id), about("exec", exec))
	if err != nil {
		return err
	}
	defer call.end(&err)
	if err := sandbox.ValidateExecID("exec_id", exec); err != nil {
		return err
	}
	if size == nil {
		return sandbox.InvalidField("size", "is missing; rows and cols are needed")
	}
	if err := sandbox.ValidateTermSize("size", *size); err != nil {
		return err
	}
	return s.inside(ctx, id, func() error { return s.node.Resize(ctx, id, exec, *size) })
}

// ListProcesses lists what was started in a sandbox, and what runs there.
func (s *Server) ListProcesses(ctx context.Context, id string) (ps []sandbox.Process, tasks []sandbox.Task, err error) {
	ctx, call, err := s.begin(ctx, "process.list", about("sandbox", id))
	if err != nil {
		return nil, nil, err
	}
	defer call.end(&err)
	err = s.inside(ctx, id, func() error {
		ps, tasks, err = s.node.Processes(ctx, id)
		return err
	})
	return ps, tasks, err
}

// WaitProcess waits for the end of a process, at most so long; 0 is a minute.
// ended is false if it still runs.
func (s *Server) WaitProcess(ctx context.Context, id, exec string, most time.Duration) (end sandbox.ProcessEnd, ended bool, err error) {
	ctx, call, err := s.begin(ctx, "process.wait", about("sandbox", id), about("exec", exec))
	if err != nil {
		return end, false, err
	}
	defer call.end(&err)
	if err := sandbox.ValidateExecID("exec_id", exec); err != nil {
		return end, false, err
	}
	if most < 0 || most > longestWait {
		return end, false, sandbox.InvalidField("max_wait", "%s is not accepted; up to %s is, or 0 for %s", most, longestWait, defaultWait)
	}
	if err := validID("sandbox_id", id); err != nil {
		return end, false, err
	}
	resets := s.ends.resetCount(id)
	began := time.Now()
	waiting, cancel := context.WithTimeout(ctx, cmp.Or(most, defaultWait))
	defer cancel()
	end, err = s.node.Wait(waiting, id, exec)
	switch {
	case err == nil:
		return s.correctEnd(ctx, id, resets, end), true, nil
	case ctx.Err() == nil && waiting.Err() != nil: // still running
		return end, false, nil
	case errors.Is(err, sandbox.ErrNoSandbox):
		return end, false, s.explain(ctx, id, err)
	case ctx.Err() != nil || !broken(err):
		return end, false, err
	}
	why, ok := s.endOfProcess(ctx, id, resets, s.cfg.EndWait)
	if !ok {
		return end, false, err
	}
	return sandbox.ProcessEnd{End: why, Duration: time.Since(began)}, true, nil
}

func validOffset(n int64) error {
	if n < 0 {
		return sandbox.InvalidField("offset", "%d is not accepted; 0 or a byte offset seen before is", n)
	}
	return nil
}

// TooMuchInput is the error of more input than one call takes, in a field.
func TooMuchInput(field string, n int) error {
	return &sandbox.Error{Class: sandbox.TooLarge, Field: field,
		Msg:  fmt.Sprintf("%s in one call; at most %s are accepted", sandbox.FormatSize(int64(n)), sandbox.FormatSize(MaxInput)),
		Hint: "send it in pieces, or as a file over PUT /v1/sandboxes/{id}/files"}
}
