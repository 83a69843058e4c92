package nodetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

func (s *suite) testProcess(t *testing.T) {
	id := s.box(t)
	sp := s.script("echo out; echo err >&2; exit 3")
	for round := range 2 { // the second time it is told again and not run
		var out, errs bytes.Buffer
		var started, ended bool
		var offset int64
		for ev, err := range s.Node.Start(t.Context(), id, sp, 0) {
			must(t, "start", err)
			switch {
			case ev.Started != nil:
				if started = true; ev.Started.ExecID != sp.ExecID || ev.Started.Replayed != (round == 1) {
					t.Errorf("round %d: started %+v", round, *ev.Started)
				}
			case ev.Output != nil:
				if ev.Output.Offset != offset {
					t.Errorf("offset %d after %d bytes", ev.Output.Offset, offset)
				}
				offset += int64(len(ev.Output.Data))
				if ev.Output.Stream == sandbox.Stdout {
					out.Write(ev.Output.Data)
				} else {
					errs.Write(ev.Output.Data)
				}
			case ev.End != nil:
				if ended = true; ev.End.Cause != sandbox.Exited || ev.End.ExitCode != 3 || ev.End.OutputBytes != 8 {
					t.Errorf("end %+v", *ev.End)
				}
			}
		}
		if !started || !ended || out.String() != "out\n" || errs.String() != "err\n" {
			t.Errorf("round %d: started %v, ended %v, %q, %q", round, started, ended, out.String(), errs.String())
		}
	}
	end, err := s.Node.Wait(t.Context(), id, sp.ExecID)
	if err != nil || end.ExitCode != 3 {
		t.Errorf("wait: %+v, %v", end, err)
	}
	procs, tasks, err := s.Node.Processes(t.Context(), id)
	if err != nil || len(procs) != 1 || procs[0].ExecID != sp.ExecID || procs[0].End == nil {
		t.Errorf("processes: %+v, %+v, %v", procs, tasks, err)
	}
	expect(t, "no such program", last(s.Node.Start(t.Context(), id, sandbox.ProcessSpec{ExecID: "none", Args: []string{"no-such-program"}}, 0)), sandbox.ErrCommandNotFound)
	expect(t, "no such process", last(s.Node.Attach(t.Context(), id, "never", 0)), sandbox.ErrNotFound)
	expect(t, "an empty request", last(s.Node.Start(t.Context(), id, sandbox.ProcessSpec{ExecID: "empty"}, 0)), sandbox.ErrInvalid)
}

func (s *suite) testProcessInput(t *testing.T) {
	id := s.box(t)
	sp := s.script("cat; echo done")
	sp.Stdin, sp.Input = true, []byte("first ")
	var out strings.Builder
	for ev, err := range s.Node.Start(t.Context(), id, sp, 0) {
		must(t, "start", err)
		if ev.Output != nil {
			out.Write(ev.Output.Data)
		}
		if out.String() == "first " {
			must(t, "input", s.Node.SendInput(t.Context(), id, sp.ExecID, []byte("sec\x00nd\xff")))
		}
		if strings.HasSuffix(out.String(), "\xff") {
			must(t, "close", s.Node.CloseInput(t.Context(), id, sp.ExecID))
		}
	}
	if out.String() != "first sec\x00nd\xffdone\n" {
		t.Errorf("%q", out.String())
	}
	tty := s.script("stty size; sleep 60")
	tty.PTY = &sandbox.TermSize{Rows: 11, Cols: 22}
	for ev, err := range s.Node.Start(t.Context(), id, tty, 0) {
		must(t, "start", err)
		if o := ev.Output; o != nil {
			if o.Stream != sandbox.PTYOut || !strings.Contains(string(o.Data), "11 22") {
				t.Errorf("%+v %q", *o, o.Data)
			}
			must(t, "resize", s.Node.Resize(t.Context(), id, tty.ExecID, sandbox.TermSize{Rows: 5, Cols: 6}))
			must(t, "signal", s.Node.Signal(t.Context(), id, tty.ExecID, "SIGKILL", false))
		}
		if ev.End != nil && ev.End.Cause != sandbox.KilledByUser {
			t.Errorf("end %+v", *ev.End)
		}
	}
}

// A reader that leaves, by itself or by its context, leaves the process running.
func (s *suite) testProcessCut(t *testing.T) {
	id := s.box(t)
	sp := s.script("echo one; until test -e go; do sleep 0.02; done; echo two")
	for ev, err := range s.Node.Start(t.Context(), id, sp, 0) {
		must(t, "start", err)
		if ev.Output != nil {
			break
		}
	}
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	var err error
	for _, err = range s.Node.Attach(ctx, id, sp.ExecID, 0) {
		leave()
	}
	expect(t, "its context ended", err, sandbox.ErrCanceled)
	wait, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err = s.Node.Wait(wait, id, sp.ExecID)
	expect(t, "waiting", err, sandbox.ErrDeadline)
	s.write(t, id, "go", "")
	var out strings.Builder
	for ev, err := range s.Node.Attach(t.Context(), id, sp.ExecID, 4) {
		must(t, "attach", err)
		if ev.Output != nil {
			out.Write(ev.Output.Data)
		}
	}
	if out.String() != "two\n" {
		t.Errorf("the rest is %q", out.String())
	}
}

func (s *suite) testProcessEnds(t *testing.T) {
	id := s.box(t)
	ended := make(chan error, 2)
	ready := make(chan struct{}, 2)
	for range 2 {
		go func() {
			var err error
			var ev sandbox.ProcessEvent
			for ev, err = range s.Node.Start(t.Context(), id, s.script("sleep 60"), 0) {
				if ev.Started != nil {
					ready <- struct{}{}
				}
				if ev.End != nil {
					err = fmt.Errorf("it is told an end: %+v", *ev.End)
					break
				}
			}
			ended <- err
		}()
	}
	<-ready
	<-ready
	must(t, "kill", s.Node.Kill(t.Context(), id, sandbox.End{Cause: sandbox.KilledByUser}))
	for range 2 {
		expect(t, "the stream", <-ended, sandbox.ErrEnded)
	}
}

// Much output arrives whole, at several readers at once.
func (s *suite) testProcessOutput(t *testing.T) {
	const lines = 200_000
	id := s.box(t)
	sp := s.script(fmt.Sprintf("seq 1 %d", lines))
	var want bytes.Buffer
	for i := range lines {
		fmt.Fprintln(&want, i+1)
	}
	var got bytes.Buffer
	for ev, err := range s.Node.Start(t.Context(), id, sp, 0) {
		must(t, "start", err)
		if ev.Lost != nil {
			t.Fatalf("lost %+v", *ev.Lost)
		}
		if ev.Output != nil {
			got.Write(ev.Output.Data)
		}
	}
	if !bytes.Equal(got.Bytes(), want.Bytes()) {
		t.Errorf("%d bytes of %d", got.Len(), want.Len())
	}
}

// Readers that rest hold up nobody but their own process.
func (s *suite) testSlowReaders(t *testing.T) {
	id := s.box(t)
	const resting = 24
	ctx, cancel := context.WithCancel(t.Context())
	hold := make(chan struct{})
	var begun, over sync.WaitGroup
	for range resting {
		begun.Add(1)
		over.Go(func() {
			first := sync.OnceFunc(begun.Done)
			for ev, err := range s.Node.Start(ctx, id, s.script("yes"), 0) {
				if err != nil {
					first()
					if !errors.Is(err, sandbox.ErrCanceled) {
						t.Error(err)
					}
					return
				}
				if ev.Output != nil {
					first()
					<-hold
				}
			}
		})
	}
	begun.Wait()
	if got := s.exec(t, id, "echo served"); got != "served" {
		t.Errorf("%q", got)
	}
	s.write(t, id, "f", "content")
	cancel()
	close(hold)
	over.Wait()
}

// The caller's deadline reaches the node as what it is.
func (s *suite) testDeadline(t *testing.T) {
	id := s.box(t)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	began := time.Now()
	expect(t, "start", last(s.Node.Start(ctx, id, s.script("sleep 60"), 0)), sandbox.ErrDeadline)
	if took := time.Since(began); took > patience/2 {
		t.Errorf("it took %s", took)
	}
}
