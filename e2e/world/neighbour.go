package world

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// Neighbour is a sandbox that has nothing to do with what goes on beside it
// and is asked all the time whether it still answers, and the host with it.
type Neighbour struct {
	box    *Box
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu struct {
		sync.Mutex
		answers  int
		answered *sync.Cond
		failures []string
		slowest  time.Duration
	}
}

// answerWithin is when a neighbour counts as silenced. An exec takes 14 ms on
// a quiet machine; on two cores shared with other tests and a bomb, seconds.
const answerWithin = 45 * time.Second

// Neighbour creates one and starts asking.
func (w *World) Neighbour(t testing.TB) *Neighbour {
	t.Helper()
	n := &Neighbour{box: w.Create(t, Small())}
	n.mu.answered = sync.NewCond(&n.mu)
	n.box.Must(t, "echo neighbour > /root/marker")
	ctx, cancel := context.WithCancel(context.Background())
	n.cancel = cancel
	n.wg.Go(func() { n.ask(ctx) })
	t.Cleanup(func() { n.cancel(); n.wg.Wait() })
	return n
}

func (n *Neighbour) ask(ctx context.Context) {
	for ctx.Err() == nil {
		start := time.Now()
		err := n.once(ctx)
		took := time.Since(start)
		if ctx.Err() != nil {
			return
		}
		n.mu.Lock()
		if err != nil {
			n.mu.failures = append(n.mu.failures, fmt.Sprintf("%s after %s: %v", start.Format("15:04:05.000"), took.Round(time.Millisecond), err))
		} else {
			n.mu.answers++
		}
		n.mu.slowest = max(n.mu.slowest, took)
		n.mu.answered.Broadcast()
		n.mu.Unlock()
		select {
		case <-ctx.Done():
		case <-time.After(200 * time.Millisecond):
		}
	}
}

func (n *Neighbour) once(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	if err := n.box.W.Healthy(ctx); err != nil {
		return err
	}
	var r Result
	if err := n.box.Start(ctx, sandbox.ProcessSpec{Command: "cat /root/marker", User: "root"}, 0, r.add); err != nil {
		return err
	}
	if r.End.Cause != sandbox.Exited || r.End.ExitCode != 0 || string(r.Out) != "neighbour\n" {
		return fmt.Errorf("answered %q %q, %v", r.Out, r.Err, r.End.End)
	}
	return nil
}

// During demands, at the end of the test it is given, that the neighbour
// answered all through it and once more after.
func (n *Neighbour) During(t testing.TB) {
	n.mu.Lock()
	failed := len(n.mu.failures)
	n.mu.slowest = 0
	n.mu.Unlock()
	t.Cleanup(func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		// A full round that began after the scenario's end: the one under way
		// now may have begun before.
		for want := n.mu.answers + len(n.mu.failures) + 2; n.mu.answers+len(n.mu.failures) < want; {
			n.mu.answered.Wait()
		}
		if f := n.mu.failures[failed:]; len(f) > 0 {
			t.Errorf("the neighbour or the host did not answer:\n%s", strings.Join(f, "\n"))
		}
		t.Logf("slowest answer of the neighbour: %s", n.mu.slowest.Round(time.Millisecond))
	})
}
