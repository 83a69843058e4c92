package e2b

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/server"
	"github.com/cove-sandbox/cove/server/e2b/envd/process"
)

// processes is the agent's process service. E2B names a process by its pid or by a
// tag that the caller chose; the tag is part of the exec_id, so that nothing is
// kept here and a restart loses none.
type processes struct{ *dialect }

const (
	execPrefix = "e2b-"
	maxTag     = 64 // bytes; 86 of the 128 characters of an exec_id
)

func newExecID(tag string) (string, error) {
	if len(tag) > maxTag {
		return "", sandbox.InvalidField("tag", "has %d bytes; at most %d are accepted", len(tag), maxTag)
	}
	id := execPrefix + sandbox.NewID(rand.Reader)
	if tag != "" {
		id += "-" + base64.RawURLEncoding.EncodeToString([]byte(tag))
	}
	return id, nil
}

// tagOf is the tag in an exec_id; "" for none.
func tagOf(exec string) string {
	rest, ok := strings.CutPrefix(exec, execPrefix)
	_, encoded, tagged := strings.Cut(rest, "-")
	if !ok || !tagged {
		return ""
	}
	b, err := base64.RawURLEncoding.DecodeString(encoded)
	if err != nil {
		return ""
	}
	return string(b)
}

// find is the process that is meant. Pids come again: one that runs is meant before
// one that has ended, and of those the last.
func (s processes) find(ctx context.Context, sel *process.ProcessSelector) (found sandbox.Process, err error) {
	ps, _, err := s.server.ListProcesses(ctx, meant(ctx).sandbox.ID)
	if err != nil {
		return found, err
	}
	for _, p := range ps {
		if !selects(sel, p) {
			continue
		}
		better := p.StartedAt.After(found.StartedAt)
		if runs := p.End == nil; runs != (found.End == nil) {
			better = runs
		}
		if found.ExecID == "" || better {
			found = p
		}
	}
	if found.ExecID == "" {
		what := fmt.Sprintf("pid %d", sel.GetPid())
		if tag := sel.GetTag(); tag != "" {
			what = fmt.Sprintf("tag %q", tag)
		}
		return found, &sandbox.Error{Class: sandbox.NotFound, Msg: "process with " + what + " not found"}
	}
	return found, nil
}

func selects(sel *process.ProcessSelector, p sandbox.Process) bool {
	switch by := sel.GetSelector().(type) {
	case *process.ProcessSelector_Pid:
		return p.PID == int(by.Pid)
	case *process.ProcessSelector_Tag:
		return by.Tag != "" && tagOf(p.ExecID) == by.Tag
	}
	return false
}

// running is the exec_id of a process that runs: nothing else takes input or
// signals.
func (s processes) running(ctx context.Context, sel *process.ProcessSelector) (exec string, err error) {
	p, err := s.find(ctx, sel)
	if err == nil && p.End != nil {
		err = &sandbox.Error{Class: sandbox.NotFound, Msg: "the process has ended"}
	}
	return p.ExecID, err
}

func (s processes) List(ctx context.Context, _ *connect.Request[process.ListRequest]) (*connect.Response[process.ListResponse], error) {
	ps, _, err := s.server.ListProcesses(ctx, meant(ctx).sandbox.ID)
	if err != nil {
		return nil, err
	}
	out := &process.ListResponse{}
	for _, p := range ps {
		if p.End != nil {
			continue
		}
		info := &process.ProcessInfo{Pid: uint32(p.PID), Config: &process.ProcessConfig{}}
		if len(p.Args) > 0 {
			info.Config.Cmd, info.Config.Args = p.Args[0], p.Args[1:]
		}
		if p.Cwd != "" {
			info.Config.Cwd = &p.Cwd
		}
		if tag := tagOf(p.ExecID); tag != "" {
			info.Tag = &tag
		}
		out.Processes = append(out.Processes, info)
	}
	return connect.NewResponse(out), nil
}

func (s processes) Start(ctx context.Context, r *connect.Request[process.StartRequest], out *connect.ServerStream[process.StartResponse]) error {
	spec, err := s.spec(ctx, r.Msg)
	if err != nil {
		return err
	}
	return s.follow(ctx, func(ev *process.ProcessEvent) error { return out.Send(&process.StartResponse{Event: ev}) }, func(ctx context.Context, sink server.ProcessSink) error {
		return s.server.StartProcess(ctx, server.StartRequest{Sandbox: meant(ctx).sandbox.ID, Process: spec}, sink)
	})
}

func (s processes) spec(ctx context.Context, m *process.StartRequest) (p sandbox.ProcessSpec, err error) {
	cfg := m.GetProcess()
	if cfg.GetCmd() == "" {
		return p, sandbox.InvalidField("process.cmd", "is missing; say what to run")
	}
	tag := m.GetTag()
	if p.ExecID, err = newExecID(tag); err != nil {
		return p, err
	}
	p.Args = append([]string{cfg.GetCmd()}, cfg.GetArgs()...)
	p.Env, p.User = cfg.GetEnvs(), meant(ctx).user
	p.Stdin = m.Stdin == nil || *m.Stdin
	if size := m.GetPty().GetSize(); m.Pty != nil {
		p.PTY, p.Stdin = termSize(size), true
	}
	if cwd := cfg.GetCwd(); cwd != "" {
		if p.Cwd, err = s.resolve(ctx, cwd); err != nil {
			return p, err
		}
	} else if p.Cwd, err = s.home(ctx); err != nil {
		return p, err
	}
	// The SDKs' timeout comes as the call's deadline, and ends the process: one that
	// is never read again is not to run for ever.
	if at, ok := ctx.Deadline(); ok {
		p.Timeout = max(time.Until(at), time.Millisecond)
	}
	return p, nil
}

func termSize(s *process.PTY_Size) *sandbox.TermSize {
	const most = 1<<16 - 1
	return &sandbox.TermSize{Rows: uint16(min(s.GetRows(), most)), Cols: uint16(min(s.GetCols(), most))}
}

// Connect follows a process that was started before. What is still held of its
// output comes first.
func (s processes) Connect(ctx context.Context, r *connect.Request[process.ConnectRequest], out *connect.ServerStream[process.ConnectResponse]) error {
	p, err := s.find(ctx, r.Msg.GetProcess())
	if err != nil {
		return err
	}
	return s.follow(ctx, func(ev *process.ProcessEvent) error { return out.Send(&process.ConnectResponse{Event: ev}) }, func(ctx context.Context, sink server.ProcessSink) error {
		return s.server.AttachProcess(ctx, meant(ctx).sandbox.ID, p.ExecID, 0, false, sink)
	})
}

// follow sends the events of a process. When its sandbox is gone or paused under it
// the connection breaks, as with E2B: an SDK that sees that asks whether the sandbox
// is well, and says what became of it.
func (s processes) follow(ctx context.Context, send func(*process.ProcessEvent) error, run func(context.Context, server.ProcessSink) error) error {
	begun := false
	err := run(ctx, func(evs []sandbox.ProcessEvent, _ bool) error {
		for _, ev := range evs {
			if err := s.send(ev, send); err != nil {
				return err
			}
			begun = true
		}
		return nil
	})
	if begun && gone(err) {
		panic(http.ErrAbortHandler)
	}
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return timedOut()
	}
	return err
}

func timedOut() error {
	return &sandbox.Error{Class: sandbox.DeadlineReached, Msg: "the timeout of the command passed"}
}

func (s processes) send(ev sandbox.ProcessEvent, send func(*process.ProcessEvent) error) error {
	switch {
	case ev.Started != nil:
		return send(&process.ProcessEvent{Event: &process.ProcessEvent_Start{Start: &process.ProcessEvent_StartEvent{Pid: uint32(ev.Started.PID)}}})
	case ev.Output != nil:
		data := &process.ProcessEvent_DataEvent{}
		switch ev.Output.Stream {
		case sandbox.Stderr:
			data.Output = &process.ProcessEvent_DataEvent_Stderr{Stderr: ev.Output.Data}
		case sandbox.PTYOut:
			data.Output = &process.ProcessEvent_DataEvent_Pty{Pty: ev.Output.Data}
		default:
			data.Output = &process.ProcessEvent_DataEvent_Stdout{Stdout: ev.Output.Data}
		}
		return send(&process.ProcessEvent{Event: &process.ProcessEvent_Data{Data: data}})
	case ev.End != nil:
		end, err := endOf(*ev.End)
		if err != nil {
			return err
		}
		return send(&process.ProcessEvent{Event: &process.ProcessEvent_End{End: end}})
	case ev.Standby != nil && *ev.Standby != sandbox.Awake:
		return sandbox.ErrAsleep
	case ev.Lost != nil, ev.Standby != nil:
		return nil // E2B has no word for either
	}
	return send(&process.ProcessEvent{Event: &process.ProcessEvent_Keepalive{Keepalive: &process.ProcessEvent_KeepAlive{}}})
}

// endOf is the end of a process, or the error that a process has to E2B that did
// not come to an end of its own.
func endOf(e sandbox.ProcessEnd) (*process.ProcessEvent_EndEvent, error) {
	switch e.Cause {
	case sandbox.Exited:
		out := &process.ProcessEvent_EndEvent{ExitCode: int32(e.ExitCode), Exited: true, Status: fmt.Sprintf("exit status %d", e.ExitCode)}
		if e.ExitCode != 0 {
			out.Error = &out.Status
		}
		return out, nil
	case sandbox.Deadline:
		return nil, timedOut()
	case sandbox.Signalled, sandbox.OOM, sandbox.NoDisk:
	case sandbox.KilledByUser:
		if e.Signal == "" && e.ExitCode == 0 { // of the sandbox, not of the process
			return nil, sandbox.ErrEnded
		}
	default:
		return nil, sandbox.ErrEnded
	}
	status := "signal: killed"
	if e.Signal != "" && e.Signal != "SIGKILL" {
		status = "signal: " + strings.ToLower(strings.TrimPrefix(e.Signal, "SIG"))
		if e.Signal == "SIGTERM" {
			status = "signal: terminated"
		}
	}
	if e.Cause == sandbox.OOM {
		status += " (out of memory)"
	}
	return &process.ProcessEvent_EndEvent{ExitCode: -1, Status: status, Error: &status}, nil
}

func (s processes) Update(ctx context.Context, r *connect.Request[process.UpdateRequest]) (*connect.Response[process.UpdateResponse], error) {
	exec, err := s.running(ctx, r.Msg.GetProcess())
	if err == nil && r.Msg.Pty != nil {
		err = s.server.ResizeTerminal(ctx, meant(ctx).sandbox.ID, exec, termSize(r.Msg.GetPty().GetSize()))
	}
	return connect.NewResponse(&process.UpdateResponse{}), err
}

func (s processes) SendInput(ctx context.Context, r *connect.Request[process.SendInputRequest]) (*connect.Response[process.SendInputResponse], error) {
	exec, err := s.running(ctx, r.Msg.GetProcess())
	if err == nil {
		err = s.server.SendInput(ctx, meant(ctx).sandbox.ID, exec, inputOf(r.Msg.GetInput()))
	}
	return connect.NewResponse(&process.SendInputResponse{}), err
}

func inputOf(in *process.ProcessInput) []byte {
	if p, ok := in.GetInput().(*process.ProcessInput_Pty); ok {
		return p.Pty
	}
	return in.GetStdin()
}

func (s processes) StreamInput(ctx context.Context, in *connect.ClientStream[process.StreamInputRequest]) (*connect.Response[process.StreamInputResponse], error) {
	exec := ""
	for in.Receive() {
		switch ev := in.Msg().GetEvent().(type) {
		case *process.StreamInputRequest_Start:
			var err error
			if exec, err = s.running(ctx, ev.Start.GetProcess()); err != nil {
				return nil, err
			}
		case *process.StreamInputRequest_Data:
			if exec == "" {
				return nil, sandbox.InvalidField("start", "is missing; it comes before data")
			}
			if err := s.server.SendInput(ctx, meant(ctx).sandbox.ID, exec, inputOf(ev.Data.GetInput())); err != nil {
				return nil, err
			}
		}
	}
	if err := in.Err(); err != nil {
		return nil, err
	}
	return connect.NewResponse(&process.StreamInputResponse{}), nil
}

func (s processes) SendSignal(ctx context.Context, r *connect.Request[process.SendSignalRequest]) (*connect.Response[process.SendSignalResponse], error) {
	signal := ""
	switch r.Msg.GetSignal() {
	case process.Signal_SIGNAL_SIGKILL:
		signal = "SIGKILL"
	case process.Signal_SIGNAL_SIGTERM:
		signal = "SIGTERM"
	default:
		return nil, sandbox.InvalidField("signal", "%s is not accepted; SIGNAL_SIGKILL and SIGNAL_SIGTERM are", r.Msg.GetSignal())
	}
	exec, err := s.running(ctx, r.Msg.GetProcess())
	if err == nil {
		err = s.server.SignalProcess(ctx, meant(ctx).sandbox.ID, exec, signal, false)
	}
	return connect.NewResponse(&process.SendSignalResponse{}), err
}

func (s processes) CloseStdin(ctx context.Context, r *connect.Request[process.CloseStdinRequest]) (*connect.Response[process.CloseStdinResponse], error) {
	exec, err := s.running(ctx, r.Msg.GetProcess())
	if err == nil {
		err = s.server.CloseInput(ctx, meant(ctx).sandbox.ID, exec)
	}
	return connect.NewResponse(&process.CloseStdinResponse{}), err
}
