package e2e

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/e2e/world"
	"github.com/cove-sandbox/cove/sandbox"
)

// again says whether an error is the server's absence, which a caller answers
// by asking again.
func again(err error) bool {
	switch sandbox.ClassOf(err) {
	case sandbox.Unavailable, sandbox.Canceled:
		return true
	}
	return false
}

// untilEnd starts a process by its exec_id, and starts it again by the same id
// whenever the connection breaks, as the SDKs do. The output comes whole.
func untilEnd(ctx context.Context, b *world.Box, p sandbox.ProcessSpec) (r world.Result, first int, err error) {
	for pause := 10 * time.Millisecond; ; pause = min(2*pause, 500*time.Millisecond) {
		err = b.Start(ctx, p, r.Next, func(ev sandbox.ProcessEvent) error {
			switch {
			case ev.Started != nil:
				if !ev.Started.Replayed {
					first++
				}
			case ev.Lost != nil:
				return fmt.Errorf("lost %+v", *ev.Lost)
			case ev.Output != nil:
				if ev.Output.Offset != r.Next {
					return fmt.Errorf("offset %d after %d", ev.Output.Offset, r.Next)
				}
				r.Next += int64(len(ev.Output.Data))
				r.Out = append(r.Out, ev.Output.Data...)
			case ev.End != nil:
				r.End = *ev.End
			}
			return nil
		})
		if err == nil || !again(err) || ctx.Err() != nil {
			return r, first, err
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
}

// TestExecAtMostOnce starts the same exec_id from twenty callers at once while
// the server is killed and comes back: it runs once, and all see all of it.
func TestExecAtMostOnce(t *testing.T) {
	w := world.New(t, world.Options{})
	b := w.Create(t, world.Small())
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	for round := range 3 {
		id := fmt.Sprintf("once-%d", round)
		const callers = 20
		var wg sync.WaitGroup
		var mu sync.Mutex
		firsts := 0
		for range callers {
			wg.Go(func() {
				r, first, err := untilEnd(ctx, b, sandbox.ProcessSpec{ExecID: id, User: "root",
					Command: fmt.Sprintf("echo ran >> /count-%d; for i in $(seq 40); do echo line $i; sleep 0.05; done; exit 3", round)})
				if err != nil {
					t.Errorf("%s: %v", id, err)
					return
				}
				if r.End.Cause != sandbox.Exited || r.End.ExitCode != 3 || strings.Count(string(r.Out), "\n") != 40 || !strings.HasSuffix(string(r.Out), "line 40\n") {
					t.Errorf("%s: %v, output %q", id, r.End.End, r.Out)
				}
				mu.Lock()
				firsts += first
				mu.Unlock()
			})
		}
		// In the middle of the starts, then in the middle of the output.
		if round > 0 {
			world.Eventually(t, time.Minute, "it runs", func() bool {
				ps, _ := b.Tasks(t)
				return len(ps) > round
			})
		}
		w.Restart(t)
		wg.Wait()
		if firsts > 1 {
			t.Errorf("%s: %d callers were told they started it", id, firsts)
		}
		if got := b.Must(t, fmt.Sprintf("cat /count-%d", round)); got != "ran" {
			t.Errorf("%s ran %d times", id, strings.Count(got, "ran"))
		}
	}
	// Much later the same id still answers with what happened then.
	r := b.Exec(t, sandbox.ProcessSpec{ExecID: "once-0", Command: "echo another", User: "root"})
	if !r.Started.Replayed || r.End.ExitCode != 3 || !strings.Contains(string(r.Out), "line 40") {
		t.Errorf("a later start of the id: %+v %q", r.Started, r.Out)
	}
	// One that could not start is not tried again either.
	for range 2 {
		_, err := b.TryExec(ctx, sandbox.ProcessSpec{ExecID: "bad", Args: []string{"no-such-program"}})
		if c := sandbox.ClassOf(err); c != sandbox.NotFound && c != sandbox.Invalid {
			t.Errorf("a program that is not there: %v", err)
		}
	}
	w.AssertReconciled(t)
}

// TestCreateOnce sends one idempotency key many times, over a crash.
func TestCreateOnce(t *testing.T) {
	w := world.New(t, world.Options{})
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	spec := world.Small()
	spec.Labels = map[string]string{"run": "7"}
	var wg sync.WaitGroup
	var mu sync.Mutex
	ids := map[string]int{}
	for range 10 {
		wg.Go(func() {
			for {
				b, err := w.TryCreate(ctx, spec, "the-key")
				if err != nil && again(err) && ctx.Err() == nil {
					time.Sleep(20 * time.Millisecond)
					continue
				}
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				ids[b.ID]++
				mu.Unlock()
				return
			}
		})
	}
	w.Restart(t)
	wg.Wait()
	if len(ids) != 1 {
		t.Fatalf("one key made %d sandboxes: %v", len(ids), ids)
	}
	w.Restart(t)
	b, err := w.TryCreate(ctx, spec, "the-key")
	if err != nil || ids[b.ID] == 0 {
		t.Fatalf("after a restart the key gives %v, %v; want %v", b, err, ids)
	}
	other := spec
	other.Resources.Memory *= 2
	if _, err := w.TryCreate(ctx, other, "the-key"); !errors.Is(err, sandbox.ErrAlreadyExists) {
		t.Errorf("the key with another spec: %v, want %s", err, sandbox.AlreadyExists)
	}
	if got := b.Must(t, "echo alive"); got != "alive" {
		t.Errorf("got %q", got)
	}
	// After its end the key still names it: a retry must not make a second one.
	if _, err := b.TryKill(ctx); err != nil {
		t.Fatal(err)
	}
	ended, err := w.TryCreate(ctx, spec, "the-key")
	if err != nil || ended.ID != b.ID {
		t.Errorf("after the end the key gives %v, %v; want %s", ended, err, b.ID)
	}
	live, err := w.Running(ctx)
	if err != nil || len(live) != 0 {
		t.Errorf("%d sandboxes run, %v", len(live), err)
	}
	w.AssertReconciled(t)
}
