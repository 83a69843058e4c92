package agent

import (
	"context"
	"iter"
	"sync"

	"github.com/cove-sandbox/cove/internal/notify"
	"github.com/cove-sandbox/cove/sandbox"
)

// progresses has the latest progress of the work that callers gave a name.
// Who works only ever replaces it; who looks is woken, and waited for by nobody.
type progresses struct {
	mu struct {
		sync.Mutex
		of map[string]*progress
	}
}

// progress is of one name, from the first who works or looks to the last.
type progress struct {
	last    sandbox.Progress
	nth     int // of last; 0 = there was none
	changed notify.Change
	users   int
	over    bool
}

// begin is work under a name. report says how far it is, end that it is over. ""
// is work that nobody looks at.
func (b *progresses) begin(op string) (report func(sandbox.Progress), end func()) {
	if op == "" {
		return func(sandbox.Progress) {}, func() {}
	}
	p := b.join(op)
	set := func(f func()) {
		b.mu.Lock()
		defer b.mu.Unlock()
		f()
		p.changed.Tell()
	}
	return func(v sandbox.Progress) { set(func() { p.last, p.nth = v, p.nth+1 }) },
		func() { set(func() { p.over = true }); b.leave(op, p) }
}

func (b *progresses) join(op string) *progress {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mu.of == nil {
		b.mu.of = map[string]*progress{}
	}
	p := b.mu.of[op]
	if p == nil || p.over {
		p = &progress{}
		b.mu.of[op] = p
	}
	p.users++
	return p
}

func (b *progresses) leave(op string, p *progress) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if p.users--; p.users == 0 && b.mu.of[op] == p {
		delete(b.mu.of, op)
	}
}

func (b *progresses) look(p *progress) (last sandbox.Progress, nth int, changed <-chan struct{}, over bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return p.last, p.nth, p.changed.Next(), p.over
}

// Progress follows the work of a name.
func (n *Node) Progress(ctx context.Context, op string) iter.Seq2[sandbox.Progress, error] {
	return func(yield func(sandbox.Progress, error) bool) {
		p := n.progress.join(op)
		defer n.progress.leave(op, p)
		seen := 0
		for {
			last, nth, changed, over := n.progress.look(p)
			if nth > seen && !yield(last, nil) {
				return
			}
			seen = nth
			if over {
				return
			}
			select {
			case <-changed:
			case <-ctx.Done():
				yield(sandbox.Progress{}, contextError("node.progress", ctx))
				return
			case <-n.ctx.Done():
				yield(sandbox.Progress{}, errClosing)
				return
			}
		}
	}
}
