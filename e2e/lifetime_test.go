package e2e

import (
	"context"
	"errors"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/e2e/world"
	"github.com/cove-sandbox/cove/sandbox"
)

// TestLifetimes ends sandboxes by every clock they have. The sandboxes wait
// beside each other, so that the test takes as long as the longest.
func TestLifetimes(t *testing.T) {
	t.Parallel() // it waits for timeouts
	w := world.New(t, world.Options{})
	with := func(f func(*sandbox.Spec)) sandbox.Spec {
		s := world.Small()
		f(&s)
		return s
	}
	setTimeout := func(b *world.Box, d time.Duration) sandbox.Sandbox {
		t.Helper()
		_, err := w.Client().Sandboxes.SetTimeout(t.Context(), connect.NewRequest(&covev1.SetTimeoutRequest{Id: b.ID, Timeout: durationpb.New(d)}))
		if err != nil {
			t.Fatal(err)
		}
		return b.Get(t)
	}
	start := time.Now()
	extended := w.Create(t, with(func(s *sandbox.Spec) { s.Timeout = 4 * time.Second }))
	if sb := setTimeout(extended, 0); !sb.ExpiresAt.IsZero() {
		t.Errorf("after removing its timeout it expires at %s", sb.ExpiresAt)
	}
	shortened := w.Create(t, world.Small())
	if sb := setTimeout(shortened, 3*time.Second); sb.ExpiresAt.IsZero() {
		t.Error("after setting a timeout it has none")
	}
	ttl := w.Create(t, with(func(s *sandbox.Spec) { s.Timeout = 3 * time.Second }))
	ttlExec := make(chan error, 1)
	ttlResult := make(chan world.Result, 1)
	go func() {
		r, err := ttl.TryExec(t.Context(), sandbox.ProcessSpec{Command: "sleep 1000"})
		ttlResult <- r
		ttlExec <- err
	}()
	// A call under way keeps a sandbox busy for longer than its idle timeout.
	const idleFor, busyFor = 4 * time.Second, 7 * time.Second
	lazy := with(func(s *sandbox.Spec) { s.IdleTimeout = idleFor })
	busy := w.Create(t, lazy)
	busyDone := make(chan world.Result, 1)
	go func() {
		r, err := busy.TryExec(t.Context(), sandbox.ProcessSpec{Command: "sleep 7; echo done"})
		if err != nil {
			t.Errorf("an exec longer than the idle timeout: %v", err)
		}
		busyDone <- r
	}()
	// So does a process that nobody watches.
	daemon := w.Create(t, lazy)
	left := errors.New("left")
	ctx, cancel := context.WithCancel(t.Context())
	err := daemon.Start(ctx, sandbox.ProcessSpec{ExecID: "d", Command: "sleep 7"}, 0, func(sandbox.ProcessEvent) error { return left })
	cancel()
	if !errors.Is(err, left) {
		t.Fatal(err)
	}
	idle := w.Create(t, lazy)
	expires := w.Create(t, with(func(s *sandbox.Spec) { s.Timeout = 15 * time.Second }))

	end := idle.WantEnd(t, time.Minute, sandbox.Idle)
	if end.At.Sub(start) < idleFor {
		t.Errorf("idle after %s, before its timeout", end.At.Sub(start))
	}
	end = ttl.WantEnd(t, time.Minute, sandbox.TTL)
	if d := end.At.Sub(start); d < 3*time.Second-100*time.Millisecond {
		t.Errorf("over after %s, before its timeout", d)
	}
	if r, err := <-ttlResult, <-ttlExec; err == nil && r.End.Cause != sandbox.TTL || err != nil && !errors.Is(err, sandbox.ErrEnded) {
		t.Errorf("the exec in it ended by %v, %v; want %s", r.End.End, err, sandbox.TTL)
	}
	shortened.WantEnd(t, time.Minute, sandbox.TTL)
	r := <-busyDone
	r.WantExit(t, 0)
	if string(r.Out) != "done\n" {
		t.Errorf("printed %q", r.Out)
	}
	busyEnd := busy.WantEnd(t, time.Minute, sandbox.Idle)
	if busyEnd.At.Sub(r.End.At) < idleFor-500*time.Millisecond {
		t.Errorf("idle %s after its last process", busyEnd.At.Sub(r.End.At))
	}
	if end := daemon.WantEnd(t, time.Minute, sandbox.Idle); end.At.Sub(start) < busyFor {
		t.Errorf("ended %s after its start while a process ran", end.At.Sub(start))
	}
	// One that expires while the server is away ends by ttl all the same.
	if sb := expires.Get(t); sb.State == sandbox.Running {
		w.Kill(t)
		time.Sleep(time.Until(sb.ExpiresAt.Add(500 * time.Millisecond)))
		w.Start(t)
	}
	expires.WantEnd(t, time.Minute, sandbox.TTL)
	extended.WantRunning(t)
	if got := extended.Must(t, "echo alive"); got != "alive" {
		t.Errorf("got %q", got)
	}
	w.AssertReconciled(t)
}
