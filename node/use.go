package node

import (
	"context"
	"net"
	"strconv"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// keepFor is a hold's ttl, and keepEvery how often it is renewed: a caller that
// is gone keeps no sandbox awake for longer than that.
const (
	keepFor   = 30 * time.Second
	keepEvery = 10 * time.Second
)

// Keep wakes a sandbox and keeps it from being idle until release.
func Keep(ctx context.Context, n Node, id string) (release func(), err error) {
	h, err := n.Hold(ctx, id, keepFor)
	if err != nil {
		return nil, err
	}
	base := context.WithoutCancel(ctx)
	var mu sync.Mutex // of timer, which its own function sets anew
	var timer *time.Timer
	renew := func() {
		short, cancel := context.WithTimeout(base, keepEvery)
		defer cancel()
		_, err := n.RenewHold(short, h.Token, keepFor)
		mu.Lock()
		defer mu.Unlock()
		if timer != nil && (err == nil || sandbox.ClassOf(err) == sandbox.Unavailable) {
			timer.Reset(keepEvery)
		}
	}
	mu.Lock()
	timer = time.AfterFunc(keepEvery, renew)
	mu.Unlock()
	return sync.OnceFunc(func() {
		mu.Lock()
		timer.Stop()
		timer = nil
		mu.Unlock()
		short, cancel := context.WithTimeout(base, keepEvery)
		defer cancel()
		_ = n.ReleaseHold(short, h.Token) // it ends by itself else
	}), nil
}

// Listen is the callbacks of a sandbox as a listener. Its end, and with it the
// sandbox's, is the error of Accept.
func Listen(ctx context.Context, n Node, id string, port int) (net.Listener, error) {
	l := &listener{conns: make(chan net.Conn), done: make(chan struct{}), addr: callbackAddr{port}}
	ready := make(chan struct{})
	l.ctx, l.cancel = context.WithCancelCause(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() { l.cancel(context.Cause(ctx)) })
	go func() {
		defer close(l.done)
		err := l.run(n, id, port, sync.OnceFunc(func() { stop(); close(ready) }))
		l.cancel(err)
	}()
	select {
	case <-ready:
		return l, nil
	case <-l.done:
		stop()
		return nil, context.Cause(l.ctx)
	}
}

type listener struct {
	ctx    context.Context // ends with Close, or with its reason
	cancel context.CancelCauseFunc
	conns  chan net.Conn
	done   chan struct{} // closed when run has ended
	addr   net.Addr
}

func (l *listener) run(n Node, id string, port int, ready func()) error {
	for c, err := range n.Callbacks(l.ctx, id, port) {
		if err != nil {
			return err
		}
		if c.ID == "" {
			ready()
			continue
		}
		conn, err := n.OpenCallback(l.ctx, c.ID)
		if err != nil {
			continue // its caller inside has left
		}
		select {
		case l.conns <- conn:
		case <-l.ctx.Done():
			conn.Close()
			return net.ErrClosed
		}
	}
	return net.ErrClosed
}

func (l *listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.ctx.Done():
		return nil, context.Cause(l.ctx)
	}
}

// Close ends the listening and its connections.
func (l *listener) Close() error {
	l.cancel(net.ErrClosed)
	<-l.done
	return nil
}

func (l *listener) Addr() net.Addr { return l.addr }

// callbackAddr is a port of the callback address, which has the same name in
// every sandbox.
type callbackAddr struct{ port int }

func (callbackAddr) Network() string { return "tcp" }
func (a callbackAddr) String() string {
	return net.JoinHostPort("cove.internal", strconv.Itoa(a.port))
}
