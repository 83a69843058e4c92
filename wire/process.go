package wire

import (
	"math"

	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

// TermSize is nil for nil.
func TermSize(t *sandbox.TermSize) *covev1.TermSize {
	if t == nil {
		return nil
	}
	return &covev1.TermSize{Rows: uint32(t.Rows), Cols: uint32(t.Cols)}
}

// TermSizeFrom refuses what a terminal cannot have; field is "process.pty" or "size".
func TermSizeFrom(field string, t *covev1.TermSize) (*sandbox.TermSize, error) {
	if t == nil {
		return nil, nil
	}
	if t.Rows == 0 || t.Rows > math.MaxUint16 {
		return nil, sandbox.InvalidField(field+".rows", "%d; want 1 to 65535", t.Rows)
	}
	if t.Cols == 0 || t.Cols > math.MaxUint16 {
		return nil, sandbox.InvalidField(field+".cols", "%d; want 1 to 65535", t.Cols)
	}
	return &sandbox.TermSize{Rows: uint16(t.Rows), Cols: uint16(t.Cols)}, nil
}

func ProcessSpec(s sandbox.ProcessSpec) *covev1.ProcessSpec {
	return &covev1.ProcessSpec{
		ExecId:  s.ExecID,
		Args:    s.Args,
		Command: s.Command,
		Cwd:     s.Cwd,
		Env:     s.Env,
		User:    s.User,
		Stdin:   s.Stdin,
		Input:   s.Input,
		Pty:     TermSize(s.PTY),
		Timeout: Duration(s.Timeout),
	}
}

// ProcessSpecFrom names fields as the request does: "process.pty.rows".
func ProcessSpecFrom(p *covev1.ProcessSpec) (sandbox.ProcessSpec, error) {
	if p == nil {
		return sandbox.ProcessSpec{}, nil
	}
	pty, err := TermSizeFrom("process.pty", p.Pty)
	if err != nil {
		return sandbox.ProcessSpec{}, err
	}
	timeout, err := DurationFrom("process.timeout", p.Timeout)
	if err != nil {
		return sandbox.ProcessSpec{}, err
	}
	return sandbox.ProcessSpec{
		ExecID:  p.ExecId,
		Args:    p.Args,
		Command: p.Command,
		Cwd:     p.Cwd,
		Env:     p.Env,
		User:    p.User,
		Stdin:   p.Stdin,
		Input:   p.Input,
		PTY:     pty,
		Timeout: timeout,
	}, nil
}

func ProcessEnd(e sandbox.ProcessEnd) *covev1.ProcessEnd {
	return &covev1.ProcessEnd{End: End(e.End), OutputBytes: e.OutputBytes, Duration: durationpb.New(e.Duration), EgressDenied: e.EgressDenied, ReplayMissed: e.ReplayMissed,
		CpuTime: Duration(e.CPUTime), PeakMemory: e.PeakMemory}
}

func ProcessEndFrom(p *covev1.ProcessEnd) sandbox.ProcessEnd {
	return sandbox.ProcessEnd{
		End:         EndFrom(p.GetEnd()),
		OutputBytes: p.GetOutputBytes(),
		Duration:    p.GetDuration().AsDuration(),

		CPUTime:      p.GetCpuTime().AsDuration(),
		PeakMemory:   p.GetPeakMemory(),
		EgressDenied: p.GetEgressDenied(),
		ReplayMissed: p.GetReplayMissed(),
	}
}

// Event shares the output's bytes with ev.
func Event(ev sandbox.ProcessEvent) *covev1.ProcessEvent {
	switch {
	case ev.Output != nil:
		return &covev1.ProcessEvent{Event: &covev1.ProcessEvent_Output{Output: &covev1.ProcessOutput{
			Stream: covev1.OutputStream(ev.Output.Stream), // the same numbers; a test holds them together
			Offset: ev.Output.Offset,
			Data:   ev.Output.Data,
		}}}
	case ev.Started != nil:
		return &covev1.ProcessEvent{Event: &covev1.ProcessEvent_Started{Started: &covev1.ProcessStarted{
			ExecId:   ev.Started.ExecID,
			Pid:      int32(ev.Started.PID),
			Replayed: ev.Started.Replayed,
		}}}
	case ev.Lost != nil:
		return &covev1.ProcessEvent{Event: &covev1.ProcessEvent_Lost{Lost: &covev1.ProcessLost{From: ev.Lost.From, To: ev.Lost.To}}}
	case ev.End != nil:
		return &covev1.ProcessEvent{Event: &covev1.ProcessEvent_End{End: ProcessEnd(*ev.End)}}
	case ev.Standby != nil:
		return &covev1.ProcessEvent{Event: &covev1.ProcessEvent_Standby{Standby: &covev1.ProcessStandby{Standby: string(*ev.Standby)}}}
	}
	return KeepAlive()
}

// KeepAlive is the event of a quiet stream.
func KeepAlive() *covev1.ProcessEvent {
	return &covev1.ProcessEvent{Event: &covev1.ProcessEvent_KeepAlive{KeepAlive: &covev1.KeepAlive{}}}
}

// EventFrom reports ok false for events that carry nothing for the caller:
// keep-alives, and kinds newer than this client.
func EventFrom(p *covev1.ProcessEvent) (ev sandbox.ProcessEvent, ok bool) {
	switch e := p.GetEvent().(type) {
	case *covev1.ProcessEvent_Output:
		return sandbox.ProcessEvent{Output: &sandbox.Output{
			Stream: sandbox.Stream(e.Output.GetStream()),
			Offset: e.Output.GetOffset(),
			Data:   e.Output.GetData(),
		}}, true
	case *covev1.ProcessEvent_Started:
		return sandbox.ProcessEvent{Started: &sandbox.ProcessStarted{
			ExecID:   e.Started.GetExecId(),
			PID:      int(e.Started.GetPid()),
			Replayed: e.Started.GetReplayed(),
		}}, true
	case *covev1.ProcessEvent_Lost:
		return sandbox.ProcessEvent{Lost: &sandbox.Lost{From: e.Lost.GetFrom(), To: e.Lost.GetTo()}}, true
	case *covev1.ProcessEvent_End:
		end := ProcessEndFrom(e.End)
		return sandbox.ProcessEvent{End: &end}, true
	case *covev1.ProcessEvent_Standby:
		standby := sandbox.Standby(e.Standby.GetStandby())
		return sandbox.ProcessEvent{Standby: &standby}, true
	}
	return sandbox.ProcessEvent{}, false
}

func Process(p sandbox.Process) *covev1.Process {
	out := &covev1.Process{
		ExecId:    p.ExecID,
		Pid:       int32(p.PID),
		Args:      validUTF8(p.Args),
		User:      p.User,
		Cwd:       p.Cwd,
		Pty:       p.PTY,
		StartedAt: Time(p.StartedAt),
	}
	if p.End != nil {
		out.End = ProcessEnd(*p.End)
	}
	return out
}

func ProcessFrom(p *covev1.Process) sandbox.Process {
	out := sandbox.Process{
		ExecID:    p.GetExecId(),
		PID:       int(p.GetPid()),
		Args:      p.GetArgs(),
		User:      p.GetUser(),
		Cwd:       p.GetCwd(),
		PTY:       p.GetPty(),
		StartedAt: TimeFrom(p.GetStartedAt()),
	}
	if p.GetEnd() != nil {
		e := ProcessEndFrom(p.End)
		out.End = &e
	}
	return out
}

// Task replaces bytes that are not UTF-8: code inside chooses its own command
// line, and protobuf would refuse the whole answer.
func Task(t sandbox.Task) *covev1.Task {
	return &covev1.Task{
		Pid:     int32(t.PID),
		Ppid:    int32(t.PPID),
		Uid:     int32(t.UID),
		State:   utf8String(t.State),
		Command: utf8String(t.Command),
		ExecId:  utf8String(t.ExecID),
	}
}

func TaskFrom(p *covev1.Task) sandbox.Task {
	return sandbox.Task{
		PID:     int(p.GetPid()),
		PPID:    int(p.GetPpid()),
		UID:     int(p.GetUid()),
		State:   p.GetState(),
		Command: p.GetCommand(),
		ExecID:  p.GetExecId(),
	}
}
