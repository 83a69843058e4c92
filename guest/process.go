package guest

import (
	"context"
	"encoding/json"
	"sync"

	"github.com/cove-sandbox/cove/guest/wire"
	"github.com/cove-sandbox/cove/sandbox"
)

// Start runs a process and hands its events to sink until its end: Started,
// then output from offset, then End. An exec_id that was started before is
// attached to instead (Started.Replayed). Leaving early, by ctx or by an error
// of sink, does not end the process. A process that could not be started is an
// error; it is remembered, so that the same exec_id gives the same answer.
func (c *Client) Start(ctx context.Context, spec sandbox.ProcessSpec, offset int64, sink func(sandbox.ProcessEvent) error) error {
	input := spec.Input
	spec.Input = nil
	ev := &events{op: wire.OpStart, sink: sink}
	defer c.follow(ev)()
	return c.run(ctx, wire.Req{Op: wire.OpStart, Spec: &spec, Offset: offset}, input, ev.resume, ev.frame)
}

// Attach hands the events of a process to sink: Started, what is held of its
// output from offset on, then live to its End.
func (c *Client) Attach(ctx context.Context, execID string, offset int64, sink func(sandbox.ProcessEvent) error) error {
	ev := &events{op: wire.OpAttach, sink: sink}
	defer c.follow(ev)()
	return c.run(ctx, wire.Req{Op: wire.OpAttach, ExecID: execID, Offset: offset}, nil, ev.resume, ev.frame)
}

// events takes the frames of one process.
type events struct {
	op      string
	sink    func(sandbox.ProcessEvent) error
	started string // its exec id; "" before Started
	next    int64  // offset behind what was handed on; meaningful once more is set
	more    bool

	mu struct { // also keeps calls of the sink apart
		sync.Mutex
		standing sandbox.Standby // that it was told last
		left     bool
	}
}

// resume is what to ask for after the connection was cut: the rest.
func (e *events) resume(r wire.Req, content []byte) (wire.Req, []byte) {
	if e.started == "" {
		return r, content // a start runs once, however often it is sent
	}
	r = wire.Req{Op: wire.OpAttach, ExecID: e.started, Offset: r.Offset}
	if e.more {
		r.Offset = e.next
	}
	return r, nil
}

func (e *events) frame(k wire.Kind, p []byte) (bool, error) {
	var ev sandbox.ProcessEvent
	var err error
	switch k {
	case wire.Started:
		ev.Started = &sandbox.ProcessStarted{}
		err = json.Unmarshal(p, ev.Started)
		if err == nil && e.started != "" {
			return false, nil // of a resumed stream: known
		}
		e.started = ev.Started.ExecID
	case wire.Output:
		if ev.Output, err = wire.ParseOutput(p); err == nil {
			e.next, e.more = ev.Output.Offset+int64(len(ev.Output.Data)), true
		}
	case wire.Lost:
		ev.Lost = &sandbox.Lost{}
		if err = json.Unmarshal(p, ev.Lost); err == nil {
			e.next, e.more = ev.Lost.To, true
		}
	case wire.End:
		ev.End = &sandbox.ProcessEnd{}
		err = json.Unmarshal(p, ev.End)
	default:
		err = unexpected(e.op, k)
	}
	if err != nil {
		return false, err
	}
	if err := e.hand(ev); err != nil {
		return false, errStop{err}
	}
	return ev.End != nil, nil
}

// SendInput writes to the stdin of a process started with Stdin. It returns
// when the process's pipe has taken all of it, so a process that does not read
// holds the caller back.
func (c *Client) SendInput(ctx context.Context, execID string, data []byte) error {
	for len(data) > 0 {
		n := min(len(data), wire.MaxContent)
		if _, err := c.call(ctx, wire.Req{Op: wire.OpInput, ExecID: execID}, data[:n]); err != nil {
			return err
		}
		data = data[n:]
	}
	return nil
}

// CloseInput ends the stdin of a process once all sent input is written.
func (c *Client) CloseInput(ctx context.Context, execID string) error {
	_, err := c.call(ctx, wire.Req{Op: wire.OpCloseInput, ExecID: execID}, nil)
	return err
}

// Signal sends a signal ("SIGTERM", "TERM", "15"; "" is SIGKILL) to the whole
// tree of a process, or to the process only.
func (c *Client) Signal(ctx context.Context, execID, signal string, processOnly bool) error {
	_, err := c.call(ctx, wire.Req{Op: wire.OpSignal, ExecID: execID, Signal: signal, Flag: processOnly}, nil)
	return err
}

// Resize tells the terminal of a process its size.
func (c *Client) Resize(ctx context.Context, execID string, size sandbox.TermSize) error {
	_, err := c.call(ctx, wire.Req{Op: wire.OpResize, ExecID: execID, Size: &size}, nil)
	return err
}

// Processes lists what was started through the API in this episode, and every
// task inside the container.
func (c *Client) Processes(ctx context.Context) ([]sandbox.Process, []sandbox.Task, error) {
	res, err := c.call(ctx, wire.Req{Op: wire.OpProcesses}, nil)
	return res.Processes, res.Tasks, err
}

// Counts is how many processes there are, and how many have ended over the
// memory limit since the kernel was booted or restored.
func (c *Client) Counts(ctx context.Context) (processes, oomKills int64, err error) {
	res, err := c.call(ctx, wire.Req{Op: wire.OpProcesses}, nil)
	return int64(len(res.Tasks)), res.OOMKills, err
}

// Wait returns the end of a process once it has one.
func (c *Client) Wait(ctx context.Context, execID string) (sandbox.ProcessEnd, error) {
	res, err := c.call(ctx, wire.Req{Op: wire.OpWait, ExecID: execID}, nil)
	if err != nil {
		return sandbox.ProcessEnd{}, err
	}
	if res.End == nil {
		return sandbox.ProcessEnd{}, sandbox.Errorf(sandbox.Internal, "guest.wait", "answer without an end")
	}
	return *res.End, nil
}
