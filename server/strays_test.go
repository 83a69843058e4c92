package server

import (
	"context"
	"testing"
	"time"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

func TestProcessDiesWithItsCaller(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.CancelGrace = time.Millisecond })
	sb := w.create(nil)
	start := func(exec string, kill bool) (leave func()) {
		ctx, cancel := context.WithCancel(t.Context())
		st, err := w.client.Processes.Start(ctx, connect.NewRequest(&covev1.StartProcessRequest{SandboxId: sb.Id, KillOnCancel: kill,
			Process: &covev1.ProcessSpec{ExecId: exec, Args: []string{"sleep", "1000"}}}))
		if err != nil {
			t.Fatal(err)
		}
		if !st.Receive() {
			t.Fatal(st.Err())
		}
		return func() { cancel(); _ = st.Close() }
	}
	stay := start("stays", false)
	start("goes", true)()
	stay()
	end, err := w.client.Processes.Wait(t.Context(), connect.NewRequest(&covev1.WaitProcessRequest{SandboxId: sb.Id, ExecId: "goes"}))
	if err != nil || end.Msg.End.GetEnd().GetCause() == "" {
		t.Fatal(end, err)
	}
	list, err := w.client.Processes.List(t.Context(), connect.NewRequest(&covev1.ListProcessesRequest{SandboxId: sb.Id}))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range list.Msg.Processes {
		if p.ExecId == "stays" && p.End != nil {
			t.Error("the other ended too")
		}
	}
}

// Who may only look on has no process killed by leaving.
func TestOnlookersKillNothing(t *testing.T) {
	s := newShared(t, func(c *Config) { c.CancelGrace = time.Millisecond })
	for _, m := range []*covev1.CreateKeyRequest{{Name: "r", Role: "readonly"}, {Name: "s", Role: "developer", Scopes: []string{"processes:read"}}} {
		c := s.dial(s.key(s.red, m))
		st, err := c.Processes.Attach(t.Context(), connect.NewRequest(&covev1.AttachProcessRequest{SandboxId: s.box, ExecId: "none", KillOnCancel: true}))
		if err == nil && !st.Receive() {
			err = st.Err()
		}
		wantError(t, err, sandbox.ErrDenied)
		st, err = c.Processes.Attach(t.Context(), connect.NewRequest(&covev1.AttachProcessRequest{SandboxId: s.box, ExecId: "none"}))
		if err == nil && !st.Receive() {
			err = st.Err()
		}
		wantError(t, err, sandbox.ErrNotFound)
	}
}

func TestStrays(t *testing.T) {
	var b strayBook
	b.init()
	f := follower{"box", "exec", true}
	killed := make(chan string, 10)
	gone := func(name string, stray bool, grace time.Duration) {
		b.gone(f, stray, grace, func(context.Context) { killed <- name })
	}
	waiting := func() int { b.mu.Lock(); defer b.mu.Unlock(); return len(b.mu.strays) }

	b.joined(f)
	gone("came back", true, time.Hour)
	b.joined(f) // forgiven
	b.joined(f)
	gone("not the last", true, 0)
	gone("ended well", false, 0)
	if n := waiting(); n != 0 {
		t.Errorf("%d wait", n)
	}
	b.joined(f)
	gone("last", true, 0)
	if got := <-killed; got != "last" {
		t.Errorf("killed: %s", got)
	}
	b.joined(f)
	begun, ended := make(chan bool), false
	b.gone(f, true, 0, func(ctx context.Context) {
		close(begun)
		<-ctx.Done()
		ended = true
	})
	<-begun
	b.joined(f)
	gone("stopped", true, time.Hour)
	b.stop()
	if waiting() != 0 || len(killed) != 0 || !ended {
		t.Error("a server that stops kills nothing, and leaves no kill under way")
	}
}

// A server that stops cuts its streams and leaves processes alone.
func TestDrainKillsNoProcess(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.CancelGrace = time.Hour })
	sb := w.create(nil)
	st, err := w.client.Processes.Start(t.Context(), connect.NewRequest(&covev1.StartProcessRequest{SandboxId: sb.Id, KillOnCancel: true,
		Process: &covev1.ProcessSpec{ExecId: "e", Args: []string{"sleep", "1000"}}}))
	if err != nil || !st.Receive() {
		t.Fatal(err, st.Err())
	}
	now, cancel := context.WithCancel(t.Context())
	cancel()
	w.server.Drain(now)
	for st.Receive() {
	}
	wantError(t, st.Err(), sandbox.ErrUnavailable)
	w.server.strays.mu.Lock()
	defer w.server.strays.mu.Unlock()
	if len(w.server.strays.mu.strays) != 0 {
		t.Error("it is to be killed")
	}
}
