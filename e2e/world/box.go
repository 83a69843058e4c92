package world

import (
	"bytes"
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/wire"
)

// callWithin bounds every call of a test: a hang is a failure with a name, not
// a test binary that is killed.
const callWithin = 2 * time.Minute

// Box is one sandbox as its user sees it.
type Box struct {
	W  *World
	ID string
}

// Small is a spec that leaves room for many.
func Small() sandbox.Spec {
	return sandbox.Spec{Resources: sandbox.Resources{MilliCPU: 1000, Memory: 128 * sandbox.MiB, Disk: 512 * sandbox.MiB, Pids: 512}}
}

// Create makes a sandbox and kills it at the end of the test.
func (w *World) Create(t testing.TB, spec sandbox.Spec) *Box {
	t.Helper()
	b, err := w.TryCreate(t.Context(), spec, "")
	if err != nil {
		t.Fatalf("create: %v", err)
	}
	t.Cleanup(func() { b.kill(t) })
	return b
}

// TryCreate makes a sandbox; the caller sees to its end.
func (w *World) TryCreate(ctx context.Context, spec sandbox.Spec, key string) (*Box, error) {
	ctx, cancel := context.WithTimeout(ctx, callWithin)
	defer cancel()
	spec, err := w.originate(ctx, spec, key)
	if err != nil {
		return nil, err
	}
	return w.make(ctx, spec, key)
}

// Running lists every sandbox that runs.
func (w *World) Running(ctx context.Context) ([]sandbox.Sandbox, error) {
	return w.List(ctx, nil)
}

// List pages through the sandboxes that have not ended, or those in states.
func (w *World) List(ctx context.Context, states []covev1.SandboxState) ([]sandbox.Sandbox, error) {
	ctx, cancel := context.WithTimeout(ctx, callWithin)
	defer cancel()
	var all []sandbox.Sandbox
	for token := ""; ; {
		r, err := w.Client().Sandboxes.List(ctx, connect.NewRequest(&covev1.ListSandboxesRequest{States: states, PageToken: token}))
		if err != nil {
			return nil, err
		}
		for _, p := range r.Msg.Sandboxes {
			sb, err := wire.SandboxFrom(p)
			if err != nil {
				return nil, err
			}
			all = append(all, sb)
		}
		if token = r.Msg.NextPageToken; token == "" {
			return all, nil
		}
	}
}

// Info asks the server about itself.
func (w *World) Info(ctx context.Context) (*covev1.InfoResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, callWithin)
	defer cancel()
	r, err := w.Client().System.Info(ctx, connect.NewRequest(&covev1.InfoRequest{}))
	if err != nil {
		return nil, err
	}
	return r.Msg, nil
}

// killAll ends every sandbox, at the end of a test whose context is over.
func (w *World) killAll(t testing.TB) {
	sbs, err := w.Running(context.Background())
	if err != nil {
		t.Errorf("listing sandboxes at the end: %v", err)
	}
	for _, sb := range sbs {
		(&Box{w, sb.ID}).kill(t)
	}
}

// kill is for cleanups: it needs no live context, and forgives a server that
// the test has ended.
func (b *Box) kill(t testing.TB) {
	if !b.W.serverAlive() {
		return // the world's own end restarts it and kills all
	}
	if _, err := b.TryKill(context.Background()); err != nil && !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("kill %s: %v", b.ID, err)
	}
}

// TryKill ends the sandbox and returns how it ended.
func (b *Box) TryKill(ctx context.Context) (sandbox.Sandbox, error) {
	ctx, cancel := context.WithTimeout(ctx, callWithin)
	defer cancel()
	r, err := b.W.Client().Sandboxes.Kill(ctx, connect.NewRequest(&covev1.KillRequest{Id: b.ID}))
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	return wire.SandboxFrom(r.Msg.Sandbox)
}

// Get is the sandbox's record.
func (b *Box) Get(t testing.TB) sandbox.Sandbox {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), callWithin)
	defer cancel()
	r, err := b.W.Client().Sandboxes.Get(ctx, connect.NewRequest(&covev1.GetSandboxRequest{Id: b.ID}))
	if err != nil {
		t.Fatalf("get %s: %v", b.ID, err)
	}
	sb, err := wire.SandboxFrom(r.Msg.Sandbox)
	if err != nil {
		t.Fatal(err)
	}
	return sb
}

// WantEnd waits for the sandbox to end and demands the cause.
func (b *Box) WantEnd(t testing.TB, within time.Duration, want sandbox.Cause) sandbox.End {
	t.Helper()
	var sb sandbox.Sandbox
	if !poll(within, func() bool { sb = b.Get(t); return sb.State == sandbox.EndedState }) {
		t.Fatalf("sandbox %s is still %s after %s, want its end by %s", b.ID, sb.State, within, want)
	}
	if sb.End == nil || sb.End.Cause != want {
		t.Fatalf("sandbox %s ended by %v, want %s", b.ID, sb.End, want)
	}
	return *sb.End
}

// WantRunning demands that the sandbox has not ended.
func (b *Box) WantRunning(t testing.TB) {
	t.Helper()
	if sb := b.Get(t); sb.State != sandbox.Running {
		t.Fatalf("sandbox %s is %s (%v), want it running", b.ID, sb.State, sb.End)
	}
}

// Reset gives the sandbox a new episode.
func (b *Box) Reset(t testing.TB) sandbox.Sandbox {
	t.Helper()
	sb, err := b.TryReset(t.Context())
	if err != nil {
		t.Fatalf("reset %s: %v", b.ID, err)
	}
	return sb
}

// TryReset is Reset with an error.
func (b *Box) TryReset(ctx context.Context) (sandbox.Sandbox, error) {
	ctx, cancel := context.WithTimeout(ctx, callWithin)
	defer cancel()
	r, err := b.W.Client().Sandboxes.Reset(ctx, connect.NewRequest(&covev1.ResetRequest{Id: b.ID}))
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	return wire.SandboxFrom(r.Msg.Sandbox)
}

// Stats is what the sandbox uses.
func (b *Box) Stats(t testing.TB) sandbox.Stats {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), callWithin)
	defer cancel()
	r, err := b.W.Client().Sandboxes.Stats(ctx, connect.NewRequest(&covev1.StatsRequest{Id: b.ID}))
	if err != nil {
		t.Fatalf("stats of %s: %v", b.ID, err)
	}
	return wire.StatsFrom(r.Msg)
}

// Result is a process seen to its end.
type Result struct {
	Started sandbox.ProcessStarted
	Out     []byte // stdout and terminal output
	Err     []byte // stderr
	Lost    []sandbox.Lost
	End     sandbox.ProcessEnd
	Next    int64 // offset after the last byte seen
}

// add takes one event and demands that offsets have no hole and no overlap.
func (r *Result) add(ev sandbox.ProcessEvent) error {
	switch {
	case ev.Started != nil:
		r.Started = *ev.Started
	case ev.Output != nil:
		if ev.Output.Offset != r.Next {
			return errors.New("a hole or an overlap in the output")
		}
		r.Next += int64(len(ev.Output.Data))
		if ev.Output.Stream == sandbox.Stderr {
			r.Err = append(r.Err, ev.Output.Data...)
		} else {
			r.Out = append(r.Out, ev.Output.Data...)
		}
	case ev.Lost != nil:
		r.Lost = append(r.Lost, *ev.Lost)
		r.Next = ev.Lost.To
	case ev.End != nil:
		r.End = *ev.End
	}
	return nil
}

// Start opens one stream and hands its events to sink until the end of the
// process. It does not come back after a broken connection.
func (b *Box) Start(ctx context.Context, p sandbox.ProcessSpec, offset int64, sink func(sandbox.ProcessEvent) error) error {
	s, err := b.W.Client().Processes.Start(ctx, connect.NewRequest(&covev1.StartProcessRequest{SandboxId: b.ID, Process: wire.ProcessSpec(p), Offset: offset}))
	return drain(s, err, sink)
}

// Attach is Start for a process that exists.
func (b *Box) Attach(ctx context.Context, execID string, offset int64, sink func(sandbox.ProcessEvent) error) error {
	s, err := b.W.Client().Processes.Attach(ctx, connect.NewRequest(&covev1.AttachProcessRequest{SandboxId: b.ID, ExecId: execID, Offset: offset}))
	return drain(s, err, sink)
}

func drain(s *connect.ServerStreamForClient[covev1.ProcessEvent], err error, sink func(sandbox.ProcessEvent) error) error {
	if err != nil {
		return err
	}
	defer s.Close()
	for s.Receive() {
		ev, ok := wire.EventFrom(s.Msg())
		if !ok {
			continue
		}
		if err := sink(ev); err != nil {
			return err
		}
		if ev.End != nil {
			return nil
		}
	}
	if err := s.Err(); err != nil {
		return err
	}
	return &sandbox.Error{Class: sandbox.Unavailable, Msg: "the stream ended before the process", Err: io.ErrUnexpectedEOF}
}

// TryExec runs a process to its end over one stream.
func (b *Box) TryExec(ctx context.Context, p sandbox.ProcessSpec) (Result, error) {
	ctx, cancel := context.WithTimeout(ctx, callWithin+p.Timeout)
	defer cancel()
	var r Result
	err := b.Start(ctx, p, 0, r.add)
	return r, err
}

// Exec is TryExec for processes that must run.
func (b *Box) Exec(t testing.TB, p sandbox.ProcessSpec) Result {
	t.Helper()
	r, err := b.TryExec(t.Context(), p)
	if err != nil {
		t.Fatalf("exec in %s: %v\nstdout %.300q\nstderr %.300q", b.ID, err, r.Out, r.Err)
	}
	return r
}

// Root runs a shell line as root.
func (b *Box) Root(t testing.TB, line string) Result {
	t.Helper()
	return b.Exec(t, sandbox.ProcessSpec{Command: line, User: "root"})
}

// Python runs a program as root, with a deadline where timeout is set.
func (b *Box) Python(t testing.TB, program string, timeout time.Duration) Result {
	t.Helper()
	return b.Exec(t, sandbox.ProcessSpec{Args: []string{"python3", "-c", program}, User: "root", Timeout: timeout})
}

// Must runs a shell line as root, demands exit code 0 and returns stdout
// without the last newline.
func (b *Box) Must(t testing.TB, line string) string {
	t.Helper()
	r := b.Root(t, line)
	r.WantExit(t, 0)
	return strings.TrimSuffix(string(r.Out), "\n")
}

// WantExit demands an exit code.
func (r Result) WantExit(t testing.TB, code int) {
	t.Helper()
	if r.End.Cause != sandbox.Exited || r.End.ExitCode != code {
		t.Fatalf("ended by %v, want exit %d\nstdout %.500q\nstderr %.500q", r.End.End, code, r.Out, r.Err)
	}
}

// WantCause demands a cause.
func (r Result) WantCause(t testing.TB, want ...sandbox.Cause) {
	t.Helper()
	for _, c := range want {
		if r.End.Cause == c {
			return
		}
	}
	t.Fatalf("ended by %v, want %v\nstdout %.500q\nstderr %.500q", r.End.End, want, r.Out, r.Err)
}

// Tasks are the processes inside.
func (b *Box) Tasks(t testing.TB) ([]sandbox.Process, []sandbox.Task) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), callWithin)
	defer cancel()
	r, err := b.W.Client().Processes.List(ctx, connect.NewRequest(&covev1.ListProcessesRequest{SandboxId: b.ID}))
	if err != nil {
		t.Fatalf("processes of %s: %v", b.ID, err)
	}
	var ps []sandbox.Process
	for _, p := range r.Msg.Processes {
		ps = append(ps, wire.ProcessFrom(p))
	}
	var ts []sandbox.Task
	for _, p := range r.Msg.Tasks {
		ts = append(ts, wire.TaskFrom(p))
	}
	return ps, ts
}

// Write puts a file as root.
func (b *Box) Write(t testing.TB, path string, data []byte) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), callWithin)
	defer cancel()
	err := b.W.Client().Upload(ctx, b.ID, path, bytes.NewReader(data), int64(len(data)), sandbox.WriteOptions{User: "root", Mode: 0o755, Parents: true})
	if err != nil {
		t.Fatalf("writing %s: %v", path, err)
	}
}

// Read takes a file of at most 16 MiB through the Connect API.
func (b *Box) Read(ctx context.Context, path string) ([]byte, sandbox.FileInfo, error) {
	ctx, cancel := context.WithTimeout(ctx, callWithin)
	defer cancel()
	r, err := b.W.Client().Files.Read(ctx, connect.NewRequest(&covev1.ReadFileRequest{SandboxId: b.ID, Path: path}))
	if err != nil {
		return nil, sandbox.FileInfo{}, err
	}
	return r.Msg.Data, wire.FileInfoFrom(r.Msg.Info), nil
}
