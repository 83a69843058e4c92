package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/e2e/world"
	"github.com/cove-sandbox/cove/sandbox"
)

// TestDrain stops the server with SIGTERM while processes print and a terminal
// is open. Their readers are let go with a reason, come back to the next
// server, and miss no byte; what prints meanwhile is not held up.
func TestDrain(t *testing.T) {
	t.Parallel() // it waits for the drain
	w := world.New(t, world.Options{})
	b := w.Create(t, world.Small())
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()

	// About 17 s: longer than the drain of 10 s, so that it must cut the stream.
	const lines = 340
	type outcome struct {
		r   world.Result
		err error
	}
	done := make(chan outcome, 1)
	go func() {
		r, _, err := untilEnd(ctx, b, sandbox.ProcessSpec{ExecID: "long",
			Args: []string{"python3", "-uc", fmt.Sprintf("import time\nfor i in range(%d):\n    print(i, 'x' * 1000)\n    time.sleep(0.05)\n", lines)}})
		done <- outcome{r, err}
	}()
	short := make(chan outcome, 1)
	world.Eventually(t, time.Minute, "the long process runs", func() bool {
		ps, _ := b.Tasks(t)
		return len(ps) == 1
	})
	go func() {
		var r world.Result
		err := b.Start(ctx, sandbox.ProcessSpec{ExecID: "short", Command: "sleep 3; echo over"}, 0, func(ev sandbox.ProcessEvent) error {
			if ev.Output != nil {
				r.Out = append(r.Out, ev.Output.Data...)
			}
			if ev.End != nil {
				r.End = *ev.End
			}
			return nil
		})
		short <- outcome{r, err}
	}()
	world.Eventually(t, time.Minute, "both run", func() bool {
		ps, _ := b.Tasks(t)
		return len(ps) == 2
	})
	w.Stop(t)
	// A call that ends within the drain gets its answer over the old server.
	if s := <-short; s.err != nil || string(s.r.Out) != "over\n" || s.r.End.Cause != sandbox.Exited {
		t.Errorf("a call shorter than the drain: %q, %v, %v", s.r.Out, s.r.End.End, s.err)
	}
	if n := len(w.Kernels()); n != 1 {
		t.Errorf("%d kernels after the drain, want the sandbox's own alone", n)
	}
	w.Start(t)
	o := <-done
	if o.err != nil {
		t.Fatal(o.err)
	}
	o.r.WantExit(t, 0)
	var want strings.Builder
	for i := range lines {
		fmt.Fprintln(&want, i, strings.Repeat("x", 1000))
	}
	if string(o.r.Out) != want.String() {
		t.Errorf("%d bytes over two servers, want %d", len(o.r.Out), want.Len())
	}
	w.AssertReconciled(t)
}
