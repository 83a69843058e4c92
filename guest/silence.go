package guest

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/guest/wire"
	"github.com/cove-sandbox/cove/sandbox"
)

// SilenceLimits is how long a guest may be silent on a connection before it is asked on
// another how far it has come. Silence as such is no fault, a process that runs has
// nothing to say; only bytes that one side sent and the other never got are. Nobody
// is asked without a request under way.
type SilenceLimits struct {
	Silence time.Duration // before the first question; doubled after each that found nothing wrong
	Longest time.Duration // between two questions
	Arrive  time.Duration // bytes have it to arrive before they are lost
	Answer  time.Duration // a question has it to be answered
	Deaf    time.Duration // a request that ends by itself fails after it, if no question is answered either
}

// defaultSilenceLimits: a call takes milliseconds, and a machine with many times the load it
// is made for makes seconds of them. The longest is what an idle sandbox pays for
// the request that waits for its init.
var defaultSilenceLimits = SilenceLimits{Silence: 5 * time.Second, Longest: 5 * time.Minute, Arrive: 2 * time.Second, Answer: 5 * time.Second, Deaf: time.Minute}

// maxLost is how often one request is sent again for having been lost.
const maxLost = 5

var errDeaf = &sandbox.Error{Class: sandbox.Unavailable, Msg: "the guest does not answer, on new connections neither",
	Hint: "the sandbox may have no CPU left for it; try again, or reset or remove the sandbox"}

// SetSilenceLimits replaces the usual times.
func (c *Client) SetSilenceLimits(d SilenceLimits) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.silence = d
}

// OnSilent has f called, with the request's name, each time that a request was
// lost on a live connection and is sent again: never, unless something is broken.
func (c *Client) OnSilent(f func(op string)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.onSilent = f
}

// watched says which requests have their silence looked into. A rekey is not
// among them: afterwards the old secret opens no
// connection, and whoever rekeys has a deadline.
func watched(op string) bool { return op != wire.OpProgress && op != wire.OpRekey }

// withID gives a request that must not run twice its id.
func withID(r wire.Req) wire.Req {
	if !safeToRepeat(r) {
		var b [12]byte
		_, _ = rand.Read(b[:]) // never fails
		r.ID = hex.EncodeToString(b[:])
	}
	return r
}

// watch is over one request on one connection.
type watch struct {
	c   *Client
	cn  *conn
	op  string
	ctx context.Context

	mu struct {
		sync.Mutex
		timer *time.Timer
		over  bool
	}

	// Of look, which runs once at a time.
	limits SilenceLimits
	wait   time.Duration
	heard  int64
	deaf   time.Time // since when questions are not answered; zero: they are
}

// watch begins to look into the silence of a request; the connection has its id. The request ends with over.
func (c *Client) watch(ctx context.Context, cn *conn, op string) (over func()) {
	if !watched(op) {
		return func() {}
	}
	c.mu.Lock()
	d := c.mu.silence
	c.mu.Unlock()
	w := &watch{c: c, cn: cn, op: op, ctx: ctx, limits: d, wait: d.Silence, heard: cn.Progress().Received}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.mu.timer = time.AfterFunc(w.wait, w.look)
	return w.end
}

func (w *watch) end() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.mu.over = true
	w.mu.timer.Stop()
}

// again looks later.
func (w *watch) again(wait time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.wait = wait; !w.mu.over {
		w.mu.timer.Reset(wait)
	}
}

func (w *watch) look() {
	ours := w.cn.Progress()
	switch {
	case w.ctx.Err() != nil:
		return
	case ours.Received != w.heard || !ours.Reading || w.c.isHeld():
		// It speaks, or our side is busy, or the kernel stands still.
		w.heard, w.deaf = ours.Received, time.Time{}
		w.again(w.limits.Silence)
		return
	}
	lost, err := w.lost()
	if lost && err == nil { // twice: once may be a machine that was away
		lost, err = w.lost()
	}
	var e *sandbox.Error
	switch {
	case errors.Is(err, sandbox.ErrUnavailable) || errors.Is(err, sandbox.ErrDeadline) || errors.Is(err, sandbox.ErrCanceled):
		if now := time.Now(); w.deaf.IsZero() {
			w.deaf = now
		} else if now.Sub(w.deaf) >= w.limits.Deaf && !endless(w.op) && !w.c.isHeld() {
			w.giveUp(errDeaf)
			return
		}
		w.again(w.limits.Silence)
	case errors.As(err, &e):
		// A guest of a Cove that did not know the question. It cannot be asked.
	case lost:
		w.giveUp(nil)
	default:
		w.deaf = time.Time{}
		w.again(min(2*w.wait, w.limits.Longest))
	}
}

// lost asks the guest, and says whether bytes are missing that had the time to
// arrive.
func (w *watch) lost() (bool, error) {
	ours := w.cn.Progress()
	ctx, cancel := context.WithTimeout(w.ctx, w.limits.Answer)
	defer cancel()
	res, err := w.c.call(ctx, wire.Req{Op: wire.OpProgress, Token: w.cn.ID()}, nil)
	if err != nil {
		return false, err
	}
	if !wire.Missing(ours, res.Progress) {
		return false, nil
	}
	select {
	case <-w.ctx.Done():
		return false, nil
	case <-time.After(w.limits.Arrive):
	}
	now := w.cn.Progress()
	ours.Received = now.Received
	return now.Reading && ours.Received == w.heard && wire.Missing(ours, res.Progress), nil
}

// giveUp ends the connection: the request was lost on it (nil), or fails.
func (w *watch) giveUp(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.mu.over {
		return
	}
	w.c.mu.Lock()
	count := w.c.mu.onSilent
	if cut := w.cn.cut || w.c.mu.closed; cut {
		w.c.mu.Unlock()
		return
	}
	w.cn.lost, w.cn.failed = err == nil, err
	w.c.mu.Unlock()
	if count != nil && err == nil {
		count(w.op)
	}
	w.cn.Close()
}

// gaveUp says whether a request ended by its watch: lost, or failed.
func (c *Client) gaveUp(cn *conn) (lost bool, failed error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return cn.lost, cn.failed
}

func (c *Client) isHeld() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.held != nil
}
