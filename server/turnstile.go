package server

import (
	"context"
	"sync"

	"github.com/cove-sandbox/cove/quota"
)

// turnstile lets a few at a time do what takes whole cores, in turn between tenants.
// With 256 at once on two cores each has a hundredth of one, and all of them are
// done when the last is.
type turnstile struct {
	mu struct {
		sync.Mutex
		free    int
		queue   quota.Queue
		waiting map[int64]chan struct{} // by ticket; closed when it is its turn
	}
}

func (t *turnstile) init(width int) { t.mu.free, t.mu.waiting = width, map[int64]chan struct{}{} }

// enter waits for a turn, which lasts until leave.
func (t *turnstile) enter(ctx context.Context, tenant string, weight int32) (leave func(), err error) {
	t.mu.Lock()
	ticket, turn := t.mu.queue.Join(tenant, weight), make(chan struct{})
	t.mu.waiting[ticket] = turn
	t.nextLocked()
	t.mu.Unlock()
	leave = sync.OnceFunc(func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.mu.free++
		t.nextLocked()
	})
	select {
	case <-turn:
		return leave, nil
	case <-ctx.Done():
	}
	t.mu.Lock()
	_, waits := t.mu.waiting[ticket]
	delete(t.mu.waiting, ticket)
	t.mu.queue.Leave(ticket)
	t.mu.Unlock()
	if !waits { // its turn came in the same moment
		leave()
	}
	return nil, ctx.Err()
}

func (t *turnstile) nextLocked() {
	for ; t.mu.free > 0 && t.mu.queue.Len() > 0; t.mu.free-- {
		ticket := t.mu.queue.Heads()[0]
		t.mu.queue.Served(ticket)
		close(t.mu.waiting[ticket])
		delete(t.mu.waiting, ticket)
	}
}
