package e2e

import (
	"context"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/e2e/world"
	"github.com/cove-sandbox/cove/sandbox"
)

// TestExecMeetsARestore: what ran before a restore ends with cause reset, whoever
// waits for it and however, and what begins meanwhile runs in the new episode.
func TestExecMeetsARestore(t *testing.T) {
	w := world.New(t, world.Options{})
	b := w.Create(t, world.Small())
	type outcome struct {
		r   world.Result
		err error
	}
	begin := func(id string) chan outcome {
		started, done := make(chan struct{}), make(chan outcome, 1)
		go func() {
			var o outcome
			o.err = b.Start(t.Context(), sandbox.ProcessSpec{ExecID: id, Args: []string{"sleep", "1000"}}, 0, func(ev sandbox.ProcessEvent) error {
				if ev.Started != nil {
					close(started)
				}
				if ev.End != nil {
					o.r.End = *ev.End
				}
				return nil
			})
			done <- o
		}()
		within(t, started, "the process does not start")
		return done
	}
	old := begin("before-the-snapshot")
	for _, kind := range []sandbox.SnapshotKind{sandbox.MemorySnapshot, sandbox.FilesystemSnapshot} {
		snap := b.Snapshot(t, world.Take{Kind: kind})
		long := begin("after-it-" + string(kind))
		waited := make(chan *covev1.WaitProcessResponse, 1)
		go func() {
			r, err := w.Client().Processes.Wait(t.Context(), connect.NewRequest(&covev1.WaitProcessRequest{SandboxId: b.ID, ExecId: "after-it-" + string(kind)}))
			if err != nil {
				t.Errorf("wait: %v", err)
				waited <- &covev1.WaitProcessResponse{}
				return
			}
			waited <- r.Msg
		}()
		ctx, stop := context.WithCancel(t.Context())
		var loop sync.WaitGroup
		loop.Go(func() {
			for ctx.Err() == nil {
				r, err := b.TryExec(t.Context(), sandbox.ProcessSpec{Command: "echo here"})
				if err != nil || r.End.Cause != sandbox.ResetCause && (r.End.Cause != sandbox.Exited || string(r.Out) != "here\n") {
					t.Errorf("one that met the restore: %v, %v, %q", err, r.End.End, r.Out)
					return
				}
			}
		})
		if err := b.TryRestore(t.Context(), snap.ID); err != nil {
			t.Fatal(err)
		}
		stop()
		loop.Wait()
		for what, done := range map[string]chan outcome{"read since before the snapshot": old, "read": long} {
			if done == nil {
				continue
			}
			if o := within(t, done, what+": it goes on"); o.err != nil || o.r.End.Cause != sandbox.ResetCause {
				t.Errorf("%s %s: ended by %v, %v", kind, what, o.r.End.End, o.err)
			}
		}
		old = nil
		if r := within(t, waited, "the wait goes on"); r.GetEnd().GetEnd().GetCause() != string(sandbox.ResetCause) {
			t.Errorf("%s, waited for: %v", kind, r)
		}
	}
}

// TestForkNobodyLearnedOf kills the server between a fork and its answer, and the
// client never asks again. Its children end a minute after the next start.
func TestForkNobodyLearnedOf(t *testing.T) {
	t.Parallel() // a minute of waiting
	w := world.New(t, world.Options{})
	b := w.Create(t, world.Small())
	asked := make(chan error, 1)
	go func() {
		_, err := w.Client().Sandboxes.Fork(t.Context(), connect.NewRequest(&covev1.ForkRequest{Id: b.ID, Count: 20, IdempotencyKey: "once"}))
		asked <- err
	}()
	living := func() int {
		list, err := w.Running(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return len(list)
	}
	// At most eight are being made at a time, so that with ten on record some stand.
	world.Eventually(t, time.Minute, "some children stand", func() bool { return living() > 1+10 })
	w.Kill(t)
	if err := within(t, asked, "the fork goes on"); err == nil {
		t.Fatal("the fork was faster than the end of its server: nothing is shown")
	}
	w.Start(t)
	if n := living(); n < 2 {
		t.Fatalf("%d live after the start: nothing is shown", n)
	}
	world.Eventually(t, 90*time.Second, "its children are gone", func() bool { return living() == 1 })
	b.Must(t, "true")
}
