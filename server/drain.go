package server

import (
	"context"
	"net/http"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// callBook knows the calls under way, so that a drain can wait for them and in
// the end cut them off with a reason.
type callBook struct {
	// cut ends every call's context; its cause is what the callers are told.
	cut    context.Context
	cutNow context.CancelCauseFunc

	mu       sync.Mutex
	draining bool
	active   int
	begun    chan struct{} // closed when draining
	idle     chan struct{} // closed when draining and active is 0
}

func (b *callBook) init() {
	b.cut, b.cutNow = context.WithCancelCause(context.Background())
	b.idle, b.begun = make(chan struct{}), make(chan struct{})
}

// track gives a request a context that ends when the server cuts its calls.
func (b *callBook) track(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b.mu.Lock()
		b.active++
		b.mu.Unlock()
		ctx, cancel := context.WithCancelCause(r.Context())
		stop := context.AfterFunc(b.cut, func() { cancel(context.Cause(b.cut)) })
		defer func() {
			stop()
			cancel(nil)
			b.mu.Lock()
			defer b.mu.Unlock()
			b.active--
			b.checkIdleLocked()
		}()
		next.ServeHTTP(w, r.WithContext(ctx))
	})
}

func (b *callBook) checkIdleLocked() {
	if b.draining && b.active == 0 {
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
	return b.draining
}

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
	if !b.draining {
		close(b.begun)
	}
	b.draining = true
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
	return b.active
}
