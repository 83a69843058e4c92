package server

import (
	"context"
	"errors"
	"iter"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

func TestProcessStreams(t *testing.T) {
	w := newWorld(t)
	sb := w.create(nil)
	s := w.start(sb.Id, "", "echo hello world") // the server makes an exec id
	execID := s.Msg().GetStarted().ExecId
	if execID == "" {
		t.Error("no exec id")
	}
	out, end, err := rest(s)
	if err != nil || out != "hello world\n" || end.GetEnd().GetCause() != "exited" || end.OutputBytes != 12 {
		t.Errorf("got %q, %v, %v", out, end, err)
	}

	// The same id does not run again, and output is replayed from an offset.
	again, err := w.client.Processes.Start(t.Context(), connect.NewRequest(&covev1.StartProcessRequest{SandboxId: sb.Id, Offset: 6,
		Process: &covev1.ProcessSpec{ExecId: execID, Command: "echo other"}}))
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if !again.Receive() || !again.Msg().GetStarted().GetReplayed() {
		t.Error("not replayed:", again.Msg())
	}
	if out, _, err := rest(again); out != "world\n" || err != nil {
		t.Errorf("replayed %q, %v", out, err)
	}
}

// asleep starts a command that has said so, and sleeps.
func (w *world) asleep(id, exec string) *connect.ServerStreamForClient[covev1.ProcessEvent] {
	w.Helper()
	s := w.start(id, exec, sleeping)
	if !s.Receive() || string(s.Msg().GetOutput().GetData()) != "sleeping\n" {
		w.Fatalf("it does not sleep: %v, %v", s.Msg(), s.Err())
	}
	return s
}

// Whatever ends a sandbox ends the streams of its processes with that cause,
// not with a broken connection.
func TestSandboxEndEndsStreams(t *testing.T) {
	for _, cause := range []sandbox.Cause{sandbox.OOM, sandbox.TTL, sandbox.Idle, sandbox.InitKilled, sandbox.Infra, sandbox.Evicted} {
		t.Run(string(cause), func(t *testing.T) {
			w := newWorld(t)
			sb := w.create(nil)
			s := w.asleep(sb.Id, "p")
			waited := make(chan *covev1.ProcessEnd, 1)
			go func() {
				r, err := w.client.Processes.Wait(t.Context(), connect.NewRequest(&covev1.WaitProcessRequest{SandboxId: sb.Id, ExecId: "p"}))
				if err != nil {
					t.Error(err)
				}
				waited <- r.Msg.GetEnd()
			}()
			held(w, 2)
			w.die(sb.Id, cause)
			out, end, err := rest(s)
			if err != nil || out != "" || end.GetEnd().GetCause() != string(cause) || end.OutputBytes != 9 {
				t.Errorf("got %q, %v, %v", out, end, err)
			}
			if end := <-waited; end.GetEnd().GetCause() != string(cause) {
				t.Errorf("wait got %v", end)
			}
		})
	}
	t.Run("killed by user", func(t *testing.T) {
		w := newWorld(t)
		sb := w.create(nil)
		s := w.start(sb.Id, "p", sleeping)
		w.kill(sb.Id)
		if _, end, err := rest(s); err != nil || end.GetEnd().GetCause() != "killed_by_user" {
			t.Errorf("got %v, %v", end, err)
		}
	})
	t.Run("reset", func(t *testing.T) {
		w := newWorld(t)
		sb := w.create(nil)
		s := w.start(sb.Id, "p", sleeping)
		if _, err := w.client.Sandboxes.Reset(t.Context(), connect.NewRequest(&covev1.ResetRequest{Id: sb.Id})); err != nil {
			t.Fatal(err)
		}
		if _, end, err := rest(s); err != nil || end.GetEnd().GetCause() != "reset" {
			t.Errorf("got %v, %v", end, err)
		}
	})
	t.Run("a call under way", func(t *testing.T) {
		w := newWorld(t)
		sb := w.create(nil)
		s, err := w.client.Files.Watch(t.Context(), connect.NewRequest(&covev1.WatchFilesRequest{SandboxId: sb.Id, Path: "/"}))
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		s.Receive()
		w.node.die(sb.Id, sandbox.OOM)
		for s.Receive() {
		}
		wantError(t, s.Err(), sandbox.ErrEnded, "oom")
	})
	t.Run("only the connection", func(t *testing.T) {
		w := newWorld(t, func(c *Config) { c.EndWait = time.Millisecond })
		sb := w.create(nil)
		s := w.start(sb.Id, "p", sleeping)
		close(w.node.cut)
		_, _, err := rest(s)
		wantError(t, err, sandbox.ErrUnavailable)
	})
}

// held waits until n calls hold a guest.
func held(w *world, n int) {
	for {
		if w.node.saw().held >= n {
			return
		}
		select {
		case <-time.After(time.Millisecond):
		case <-w.Context().Done():
			w.Fatal("nobody holds a guest")
		}
	}
}

// To a process the death of its container is a SIGKILL; the caller learns better.
func TestSIGKILLFromADyingSandbox(t *testing.T) {
	w := newWorld(t)
	sb := w.create(nil)
	s := w.start(sb.Id, "p", "kill -KILL $$")
	if _, end, err := rest(s); err != nil || end.GetEnd().GetCause() != "signalled" || end.End.Signal != "SIGKILL" {
		t.Errorf("got %v, %v", end, err)
	}
	// The process goes first, and the end of the container comes right after.
	w.node.onEvent = func(ev sandbox.ProcessEvent) {
		if ev.End != nil {
			w.node.die(sb.Id, sandbox.InitKilled)
		}
	}
	s, err := w.client.Processes.Start(t.Context(), connect.NewRequest(&covev1.StartProcessRequest{SandboxId: sb.Id,
		Process: &covev1.ProcessSpec{ExecId: "q", Command: sleeping}}))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	s.Receive()
	if err := unix.Kill(int(s.Msg().GetStarted().Pid), unix.SIGKILL); err != nil { // a process of this machine
		t.Fatal(err)
	}
	if _, end, err := rest(s); err != nil || end.GetEnd().GetCause() != "init_killed" {
		t.Errorf("got %v, %v", end, err)
	}
}

func TestLeavingAStreamDoesNotEndTheProcess(t *testing.T) {
	w := newWorld(t)
	sb := w.create(nil)
	ctx, cancel := context.WithCancel(t.Context())
	s, err := w.client.Processes.Start(ctx, connect.NewRequest(&covev1.StartProcessRequest{SandboxId: sb.Id,
		Process: &covev1.ProcessSpec{ExecId: "p", Command: "echo sleeping; exec cat", Stdin: true}}))
	if err != nil {
		t.Fatal(err)
	}
	s.Receive()
	cancel()
	for s.Receive() {
	}
	wantError(t, s.Err(), sandbox.ErrCanceled)
	_ = s.Close()

	wait := func(most time.Duration) *covev1.ProcessEnd {
		r, err := w.client.Processes.Wait(t.Context(), connect.NewRequest(&covev1.WaitProcessRequest{SandboxId: sb.Id, ExecId: "p", MaxWait: durationpb.New(most)}))
		if err != nil {
			t.Fatal(err)
		}
		return r.Msg.End
	}
	if end := wait(1); end != nil {
		t.Fatalf("it ended: %v", end)
	}
	if _, err := w.client.Processes.SendInput(t.Context(), connect.NewRequest(&covev1.SendInputRequest{SandboxId: sb.Id, ExecId: "p", Data: []byte("more")})); err != nil {
		t.Fatal(err)
	}
	a, err := w.client.Processes.Attach(t.Context(), connect.NewRequest(&covev1.AttachProcessRequest{SandboxId: sb.Id, ExecId: "p", Offset: 9}))
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	a.Receive()
	if a.Receive(); string(a.Msg().GetOutput().GetData()) != "more" {
		t.Errorf("got %v", a.Msg())
	}
	if _, err := w.client.Processes.Signal(t.Context(), connect.NewRequest(&covev1.SignalRequest{SandboxId: sb.Id, ExecId: "p"})); err != nil {
		t.Fatal(err)
	}
	if _, end, err := rest(a); err != nil || end.GetEnd().GetCause() != "killed_by_user" || end.End.Signal != "SIGKILL" {
		t.Errorf("got %v, %v", end, err)
	}
	if end := wait(time.Minute); end.GetEnd().GetCause() != "killed_by_user" {
		t.Errorf("got %v", end)
	}
}

// A drain lets calls finish and cuts streams at its deadline; they can come back.
func TestDrainCutsStreams(t *testing.T) {
	w := newWorld(t)
	sb := w.create(nil)
	s := w.asleep(sb.Id, "p")
	ctx, cancel := context.WithCancel(t.Context())
	drained := make(chan int)
	go func() { drained <- w.server.Drain(ctx) }()
	for !w.server.calls.isDraining() {
		<-tick()
	}
	w.get(sb.Id) // still served
	select {
	case <-drained:
		t.Fatal("did not wait for the stream")
	default:
	}
	cancel() // the deadline
	out, end, err := rest(s)
	e := wantError(t, err, sandbox.ErrUnavailable, "stopping", "exec_id")
	if out != "" || end != nil || e.RetryAfter == 0 {
		t.Errorf("got %q, %v, %+v", out, end, e)
	}
	if left := <-drained; left != 0 {
		t.Errorf("%d calls left", left)
	}
	if w.node.liveCount() != 1 {
		t.Error("the sandbox must live on")
	}
}

func TestHundredsOfStreamsOnOneConnection(t *testing.T) {
	w := newWorld(t)
	sb := w.create(nil)
	var wg sync.WaitGroup
	const n = 400 // net/http's own cap is 250
	var streams [n]*connect.ServerStreamForClient[covev1.ProcessEvent]
	for i := range n {
		wg.Go(func() { streams[i] = w.start(sb.Id, "", sleeping) })
	}
	wg.Wait()
	w.kill(sb.Id)
	for _, s := range streams {
		if _, end, err := rest(s); err != nil || end.GetEnd().GetCause() != "killed_by_user" {
			t.Fatalf("got %v, %v", end, err)
		}
	}
}

// Who hears late that its connection broke is told of the sandbox's end, not of a
// reset that was over when its process began.
func TestTheEndOfASandboxThatWasReset(t *testing.T) {
	w := newWorld(t)
	sb := w.create(nil)
	if _, err := w.client.Sandboxes.Reset(t.Context(), connect.NewRequest(&covev1.ResetRequest{Id: sb.Id})); err != nil {
		t.Fatal(err)
	}
	resets := w.server.ends.resetCount(sb.Id)
	if resets == 0 {
		t.Fatal("a reset is not counted")
	}
	w.kill(sb.Id)
	w.ended(sb.Id)
	if end, ok := w.server.endOfProcess(w.own(), sb.Id, resets, time.Minute); !ok || end.Cause != sandbox.KilledByUser {
		t.Errorf("%v, %v", end, ok)
	}
	killed := sandbox.ProcessEnd{End: sandbox.End{Cause: sandbox.Signalled, Signal: "SIGKILL"}}
	if end := w.server.correctEnd(w.own(), sb.Id, resets, killed); end.Cause != sandbox.KilledByUser {
		t.Errorf("%v", end)
	}
}

// sent collects what a pump sends.
type sent struct {
	mu   sync.Mutex
	evs  []sandbox.ProcessEvent
	gate chan struct{} // if set, each send waits for it
	fail error
}

func (s *sent) send(evs []sandbox.ProcessEvent, _ bool) error {
	if s.gate != nil {
		<-s.gate
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.evs = append(s.evs, evs...)
	return s.fail
}

func output(off int64, data string) sandbox.ProcessEvent {
	return sandbox.ProcessEvent{Output: &sandbox.Output{Stream: sandbox.Stdout, Offset: off, Data: []byte(data)}}
}

func TestPumpKeepsQuietStreamsAlive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var got sent
		p := newPump(got.send, 15*time.Second)
		err := p.run(t.Context(), sunk(func(ctx context.Context, sink func(sandbox.ProcessEvent) error) error {
			_ = sink(output(0, "a"))
			time.Sleep(50 * time.Second) // virtual
			return sink(output(1, "b"))
		}))
		var kinds []string
		for _, ev := range got.evs {
			switch {
			case ev.Output == nil:
				kinds = append(kinds, "alive")
			default:
				kinds = append(kinds, string(ev.Output.Data))
			}
		}
		if err != nil || strings.Join(kinds, " ") != "a alive alive alive b" {
			t.Errorf("sent %v, %v", kinds, err)
		}
	})
}

// What comes while a send is under way goes out joined; nothing waits for more.
func TestPumpJoinsSmallOutputs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		got := sent{gate: make(chan struct{})}
		p := newPump(got.send, time.Hour)
		buf := []byte("x")
		go func() {
			synctest.Wait()
			if len(got.evs) != 0 {
				t.Error("the gate is shut")
			}
			close(got.gate)
		}()
		err := p.run(t.Context(), sunk(func(ctx context.Context, sink func(sandbox.ProcessEvent) error) error {
			for i := range int64(1000) {
				ev := output(i, "")
				ev.Output.Data = buf // reused, as a connection does
				buf[0] = 'a' + byte(i%26)
				if i >= 500 {
					ev.Output.Stream = sandbox.Stderr
				}
				if err := sink(ev); err != nil {
					return err
				}
			}
			return sink(sandbox.ProcessEvent{End: &sandbox.ProcessEnd{}})
		}))
		if err != nil || p.end == nil || p.offset != 1000 {
			t.Fatal(err, p.end, p.offset)
		}
		if len(got.evs) > 4 {
			t.Errorf("sent %d events", len(got.evs))
		}
		next := int64(0)
		for _, ev := range got.evs {
			o := ev.Output
			if o.Offset != next {
				t.Errorf("offset %d, want %d", o.Offset, next)
			}
			for i, b := range o.Data {
				if b != 'a'+byte((next+int64(i))%26) || (o.Stream == sandbox.Stderr) != (next >= 500) {
					t.Fatalf("byte %d is %c of %d", next+int64(i), b, o.Stream)
				}
			}
			next += int64(len(o.Data))
		}
		if next != 1000 {
			t.Errorf("sent %d bytes", next)
		}
	})
}

// A slow reader holds the guest back instead of filling memory.
func TestPumpPushesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		got := sent{gate: make(chan struct{})}
		p := newPump(got.send, time.Hour)
		var put int64
		go func() {
			synctest.Wait()
			if put > 2*pumpBytes {
				t.Errorf("%d bytes wait for a reader that does not read", put)
			}
			close(got.gate)
		}()
		chunk := strings.Repeat("x", 64<<10)
		const total = 16 << 20
		err := p.run(t.Context(), sunk(func(ctx context.Context, sink func(sandbox.ProcessEvent) error) error {
			for put < total {
				if err := sink(output(put, chunk)); err != nil {
					return err
				}
				put += int64(len(chunk))
			}
			return nil
		}))
		if err != nil || p.offset != total {
			t.Errorf("%v, %d sent", err, p.offset)
		}
	})
}

func TestPumpStopsWhenTheReaderIsGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gone := errors.New("gone")
		got := sent{fail: gone}
		p := newPump(got.send, time.Hour)
		err := p.run(t.Context(), sunk(func(ctx context.Context, sink func(sandbox.ProcessEvent) error) error {
			if err := sink(output(0, "a")); err != nil {
				return err
			}
			<-ctx.Done()
			return ctx.Err()
		}))
		if !errors.Is(p.sendErr, gone) || !errors.Is(err, context.Canceled) {
			t.Errorf("got %v and %v", p.sendErr, err)
		}
	})
}

// sunk is a stream of what f gives its sink.
func sunk(f func(ctx context.Context, sink func(sandbox.ProcessEvent) error) error) func(context.Context) iter.Seq2[sandbox.ProcessEvent, error] {
	return func(ctx context.Context) iter.Seq2[sandbox.ProcessEvent, error] {
		return func(yield func(sandbox.ProcessEvent, error) bool) {
			left := errors.New("left")
			err := f(ctx, func(ev sandbox.ProcessEvent) error {
				if !yield(ev, nil) {
					return left
				}
				return nil
			})
			if err != nil && err != left {
				yield(sandbox.ProcessEvent{}, err)
			}
		}
	}
}
