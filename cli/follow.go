package cli

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"syscall"
	"time"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

// follower streams one process to its end across broken connections. The
// exec_id makes a repeated Start harmless, the offset makes the output whole.
type follower struct {
	app     *app
	sandbox string
	execID  string
	spec    *covev1.ProcessSpec // nil: attach to what was started before
	offset  int64
	// killOnCancel has the server end the process when nobody reads it any more.
	killOnCancel bool

	onStart  func(*covev1.ProcessStarted) // once
	onOutput func(*covev1.ProcessOutput) error
	// stop ends the stream quietly when it returns true; asked after each event.
	stop func() bool

	started bool
}

// maxBroken bounds how often in a row a stream may break without an event in
// between: about 30 s with the default pauses, the time a restarting server
// may need. A defect that repeats itself is given up sooner.
const (
	maxBroken  = 20
	maxDefects = 3
)

func newExecID() string {
	var b [8]byte
	rand.Read(b[:])
	return "cli-" + hex.EncodeToString(b[:])
}

// run returns the process's end, or nil where stop ended the stream.
func (f *follower) run(ctx context.Context) (*covev1.ProcessEnd, error) {
	broken, defects := 0, 0
	for {
		end, progress, err := f.once(ctx)
		if end != nil || err == nil {
			return end, nil
		}
		var ours *ExitError
		if errors.As(err, &ours) {
			return nil, err // not the connection
		}
		if ctx.Err() != nil {
			return nil, &sandbox.Error{Class: sandbox.Canceled, Err: ctx.Err()}
		}
		if progress {
			broken, defects = 0, 0
		}
		broken++
		switch sandbox.ClassOf(err) {
		case sandbox.Unavailable, sandbox.Canceled: // Canceled by the server: it is draining
		case sandbox.Internal, sandbox.DeadlineReached:
			defects++
		default:
			return nil, err
		}
		if broken > maxBroken || defects > maxDefects {
			return nil, f.gaveUp(err)
		}
		if broken == 1 {
			f.app.warnf("the connection broke (%v); taking it up again", err)
		}
		select {
		case <-time.After(f.app.Backoff(broken)):
		case <-ctx.Done():
		}
	}
}

func (f *follower) gaveUp(err error) error {
	var e *sandbox.Error
	if !errors.As(err, &e) || !f.started {
		return err
	}
	return e.WithHint("the process may still run; 'cove logs %s %s --follow --offset %d' goes on from here", f.sandbox, f.execID, f.offset)
}

// once is one stream. It fails unless the stream came to an end or was stopped.
func (f *follower) once(ctx context.Context) (end *covev1.ProcessEnd, progress bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var s *connect.ServerStreamForClient[covev1.ProcessEvent]
	if f.spec != nil && !f.started {
		s, err = f.app.api.Processes.Start(ctx, connect.NewRequest(&covev1.StartProcessRequest{SandboxId: f.sandbox, Process: f.spec, Offset: f.offset, KillOnCancel: f.killOnCancel}))
	} else {
		// Not Start again: after a reset the same exec_id would be a new run.
		s, err = f.app.api.Processes.Attach(ctx, connect.NewRequest(&covev1.AttachProcessRequest{SandboxId: f.sandbox, ExecId: f.execID, Offset: f.offset, KillOnCancel: f.killOnCancel}))
	}
	if err != nil {
		return nil, false, err
	}
	// Closing reads what is still coming, which for an endless output is for
	// ever: it must be cancelled first.
	defer func() { cancel(); s.Close() }()
	for s.Receive() {
		progress = true
		switch ev := s.Msg().GetEvent().(type) {
		case *covev1.ProcessEvent_Started:
			if !f.started {
				f.started = true
				if id := ev.Started.GetExecId(); id != "" {
					f.execID = id
				}
				if f.onStart != nil {
					f.onStart(ev.Started)
				}
			}
		case *covev1.ProcessEvent_Output:
			if err := f.output(ev.Output); err != nil {
				return nil, true, err
			}
		case *covev1.ProcessEvent_Lost:
			f.app.warnf("%d bytes of output are no longer held by the server", ev.Lost.GetTo()-ev.Lost.GetFrom())
			f.offset = max(f.offset, ev.Lost.GetTo())
		case *covev1.ProcessEvent_Standby:
			if standby := ev.Standby.GetStandby(); standby != "" {
				f.app.warnf("the sandbox was paused (%s); the command stands still until 'cove resume %s' or any other call wakes it", standby, f.sandbox)
			}
		case *covev1.ProcessEvent_End:
			return ev.End, true, nil
		}
		if f.stop != nil && f.stop() {
			return nil, true, nil
		}
	}
	if err := s.Err(); err != nil {
		return nil, progress, err
	}
	return nil, progress, &sandbox.Error{Class: sandbox.Unavailable, Err: io.ErrUnexpectedEOF}
}

// errNoReader is a closed pipe behind us ("| head"): the code a shell gives to
// what SIGPIPE ended, and nothing to say.
var errNoReader = &ExitError{Code: 128 + int(syscall.SIGPIPE)}

// output passes on what is new: a replay may begin before the offset.
func (f *follower) output(o *covev1.ProcessOutput) error {
	skip := f.offset - o.GetOffset()
	if skip >= int64(len(o.GetData())) && skip > 0 {
		return nil
	}
	if skip > 0 {
		o.Data, o.Offset = o.GetData()[skip:], f.offset
	}
	f.offset = o.GetOffset() + int64(len(o.GetData()))
	if err := f.onOutput(o); err != nil {
		if errors.Is(err, syscall.EPIPE) {
			return errNoReader
		}
		return &ExitError{Code: exitCove, Err: fmt.Errorf("writing output: %w", err)}
	}
	return nil
}

// toStdio sends each stream to its own.
func (a *app) toStdio(o *covev1.ProcessOutput) error {
	w := a.Stdout
	if o.GetStream() == covev1.OutputStream_OUTPUT_STREAM_STDERR {
		w = a.Stderr
	}
	_, err := w.Write(o.GetData())
	return err
}

// exitOf turns an end into the exit code of run and exec, and what to say
// where the code alone would mislead.
func exitOf(e *covev1.End) error {
	code := int(e.GetExitCode())
	switch sandbox.Cause(e.GetCause()) {
	case sandbox.Exited:
		if code == 0 {
			return nil
		}
		return &ExitError{Code: code}
	case sandbox.Signalled:
		if code == 0 {
			code = 128 + 9
		}
		return &ExitError{Code: code}
	case sandbox.Deadline:
		return &ExitError{Code: exitTimeout, Err: errors.New("the command's timeout passed; it was killed")}
	case sandbox.OOM:
		return &ExitError{Code: 137, Err: errors.New("the command was ended over the sandbox's memory limit (see --memory-limit)")}
	case sandbox.KilledByUser:
		if code == 0 {
			code = 137
		}
		return &ExitError{Code: code, Err: errors.New("the command was killed through the API")}
	}
	return &ExitError{Code: exitCove, Err: errors.New("the command did not finish: " + endText(e))}
}
