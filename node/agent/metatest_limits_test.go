//go:build !race

package agent_test

import (
	"fmt"
	"testing"
)

// TestEdgeAfterRestore is the one thing that a restore repeats, in the fewest
// steps: an edge that was reported and whose bytes were not read is reported
// once more; one that was asked for once is not. gVisor does not save what an
// epoll instance has ready; it takes everything for ready and looks again
// (vfs/save_restore.go, epollInterest). The plots read until there is no more,
// as epoll(7) asks of who waits for edges, and see no difference; if this fails
// because nothing is repeated, they need not, and docs/state.md says too much.
func TestEdgeAfterRestore(t *testing.T) {
	m := newMachine(t)
	m.create("edge")
	ctx := t.Context()
	e, err := m.begin(ctx, "edge", script{})
	if err != nil {
		t.Fatal(err)
	}
	do := func(step string) string {
		t.Helper()
		out, err := e.run(ctx, []string{"1 me " + step})
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	see := func(when, how string, want ...string) {
		t.Helper()
		step := fmt.Sprintf("epollwait %s keep", how)
		for i, w := range want {
			if got, want := do(step), fmt.Sprintf("1 me %s -> %s\n", step, w); got != want {
				t.Errorf("%s, look %d: %q, not %q", when, i+1, got, want)
			}
		}
	}
	pause := func(cold bool) {
		t.Helper()
		if err := m.Pause(ctx, "edge", cold); err != nil {
			t.Fatal(err)
		}
	}
	do("epoll edge unread edge")
	do("epoll once unread once")
	see("before", "edge", "in", "")
	see("before", "once", "in", "")
	pause(false)
	see("resumed", "edge", "")
	see("resumed", "once", "")
	pause(true)
	see("restored", "edge", "in", "")
	see("restored", "once", "")
	if _, err := e.quit(ctx); err != nil {
		t.Fatal(err)
	}
}
