package server

import (
	"context"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// callBook knows the calls under way, so that a drain can wait for them and in
// the end cut them off with a reason, and so that those of a key end with it.
type callBook struct {
	// cut ends every call's context; its cause is what the callers are told.
	cut    context.Context
	cutNow context.CancelCauseFunc
	begun  chan struct{} // closed when draining
	idle   chan struct{} // closed when draining and active is 0

	mu struct {
		sync.Mutex
		draining bool
		open     map[*openCall]bool
	}
}

// openCall is a call under way, and who makes it.
type openCall struct {
	key store.Key
	cut context.CancelCauseFunc
}

func (b *callBook) init() {
	b.cut, b.cutNow = context.WithCancelCause(context.Background())
	b.idle, b.begun = make(chan struct{}), make(chan struct{})
	b.mu.open = map[*openCall]bool{}
}

// enter counts a call of a key until it leaves, and gives it a context that ends when
// the server cuts its calls off or the key ends.
func (b *callBook) enter(ctx context.Context, key store.Key, now time.Time) (_ context.Context, c *openCall, leave func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	c = &openCall{key, cancel}
	b.mu.Lock()
	b.mu.open[c] = true
	b.mu.Unlock()
	stop := context.AfterFunc(b.cut, func() { cancel(context.Cause(b.cut)) })
	var expiry *time.Timer
	if !key.ExpiresAt.IsZero() {
		expiry = time.AfterFunc(key.ExpiresAt.Sub(now), func() { cancel(expired()) })
	}
	return ctx, c, func() {
		stop()
		if expiry != nil {
			expiry.Stop()
		}
		cancel(nil)
		b.mu.Lock()
		defer b.mu.Unlock()
		delete(b.mu.open, c)
		b.checkIdleLocked()
	}
}

// endKeys ends the calls of keys that are gone. The call that ends them is not cut
// off, should it be of one of them: it has an answer to give.
func (b *callBook) endKeys(by context.Context, gone func(store.Key) bool) {
	own := callOf(by)
	b.mu.Lock()
	defer b.mu.Unlock()
	for c := range b.mu.open {
		if gone(c.key) && (own == nil || c != own.open) {
			c.cut(&sandbox.Error{Class: sandbox.Unauthenticated, Msg: "the API key was revoked", Hint: KeyHint})
		}
	}
}

func (b *callBook) checkIdleLocked() {
	if b.mu.draining && len(b.mu.open) == 0 {
		select {
		case <-b.idle:
		default:
			close(b.idle)
		}
	}
}

// drained is closed when a drain begins, for calls that have no end of their own.
func (b *callBook) drained() <-chan struct{} { return b.begun }

func (b *callBook) isDraining() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.mu.draining
}

// Draining says whether the server is stopping: a load balancer sends no more
// work here.
func (s *Server) Draining() bool { return s.calls.isDraining() }

// stopping is what calls get that come too late or last too long. Sandboxes
// and their processes outlive a restart, so coming back is the way out.
func stopping() *sandbox.Error {
	return &sandbox.Error{
		Class:      sandbox.Unavailable,
		Msg:        "the server is stopping",
		Hint:       "sandboxes and processes go on; ask again, and attach to a process by its exec_id",
		RetryAfter: 2 * time.Second,
	}
}

// cutGrace is how long a call that was cut off may take to return.
const cutGrace = 5 * time.Second

// Drain refuses new sandboxes and pulls from now on and waits for the calls
// under way. When ctx ends, those left (streams of long processes, mostly) end
// with Unavailable. It says how many calls did not even return after that.
func (s *Server) Drain(ctx context.Context) (left int) {
	b := &s.calls
	b.mu.Lock()
	if !b.mu.draining {
		close(b.begun)
	}
	b.mu.draining = true
	b.checkIdleLocked()
	b.mu.Unlock()

	select {
	case <-b.idle:
		return 0
	case <-ctx.Done():
	}
	b.cutNow(stopping())
	grace := time.NewTimer(cutGrace)
	defer grace.Stop()
	select {
	case <-b.idle:
	case <-grace.C:
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.mu.open)
}
