package node

import (
	"context"
	"net"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/sandbox"
)

const (
	// listenTimeout bounds what takes a millisecond once the sandbox is awake.
	listenTimeout = 10 * time.Second
	// relistenPause is between tries to listen again in a sandbox that lives and
	// lost its listener: it got another kernel.
	relistenPause = 100 * time.Millisecond
)

// Listen takes the connections that code inside makes to the callback address,
// on a port of it. The sandbox is woken for that once, and then neither kept
// active nor awake: connections stand still with it, and what is written to
// them waits. They end with a reset and with a restore, which the listener
// outlives; it ends when the sandbox does, with the reason. One at a time: a
// second one ends the first. sandbox.ErrPortTaken.
func (n *Node) Listen(ctx context.Context, id string, port int) (net.Listener, error) {
	l := &listener{n: n, id: id, port: port, conns: make(chan net.Conn), done: make(chan struct{})}
	l.ctx, l.cancel = context.WithCancelCause(n.ctx)
	b, release, err := n.hold(ctx, id)
	if err != nil {
		l.cancel(err)
		return nil, err
	}
	defer release()
	// Marked first, so that the one before does not take it back.
	n.mu.Lock()
	old := b.callbacks
	b.callbacks = l
	n.mu.Unlock()
	first, err := l.open(ctx)
	n.mu.Lock()
	defer n.mu.Unlock()
	if err != nil {
		if b.callbacks == l {
			b.callbacks = old
		}
		l.cancel(err)
		return nil, err
	}
	if old != nil {
		old.cancel(errReplaced)
	}
	l.addr = first.Addr()
	if !n.goLocked(func() { l.run(b, first) }) {
		return nil, errClosing // the guest finds out
	}
	return l, nil
}

var errReplaced = &sandbox.Error{Class: sandbox.Conflict, Op: "node.listen", Msg: "another listener has taken the callbacks of this sandbox over"}

// listener is the callback address of one sandbox, in whichever kernel that is.
type listener struct {
	n     *Node
	id    string
	port  int
	addr  net.Addr
	conns chan net.Conn

	ctx    context.Context // ends with Close, the sandbox or the node; its cause says which
	cancel context.CancelCauseFunc
	done   chan struct{} // closed when run has ended
	once   sync.Once
}

// open listens in the kernel that the sandbox has now.
func (l *listener) open(ctx context.Context) (*guest.Listener, error) {
	b, release, err := l.n.hold(ctx, l.id)
	if err != nil {
		return nil, err
	}
	defer release()
	ctx, cancel := context.WithTimeout(ctx, listenTimeout)
	defer cancel()
	gl, err := l.n.inside(b).Guest().Listen(ctx, l.port)
	return gl, sandbox.WithOp("node.listen", err)
}

func (l *listener) run(b *box, gl *guest.Listener) {
	defer close(l.done)
	defer func() {
		l.n.mu.Lock()
		defer l.n.mu.Unlock()
		if b.callbacks == l {
			b.callbacks = nil
		}
	}()
	defer context.AfterFunc(b.ctx, func() { l.cancel(context.Cause(b.ctx)) })()
	for {
		l.serve(gl)
		// At once the first time: code in a kernel that was just restored calls.
		for pause := time.Duration(0); ; pause = relistenPause {
			select {
			case <-l.ctx.Done():
				return
			case <-time.After(pause):
			}
			if !l.ours(b) {
				continue // being replaced
			}
			var err error
			if gl, err = l.open(l.ctx); err == nil {
				break
			}
			if sandbox.ClassOf(err) != sandbox.Unavailable {
				l.cancel(err)
			}
		}
	}
}

func (l *listener) ours(b *box) bool {
	l.n.mu.Lock()
	defer l.n.mu.Unlock()
	return b.callbacks == l
}

// serve hands connections over until the kernel's listener ends.
func (l *listener) serve(gl *guest.Listener) {
	defer gl.Close()
	defer context.AfterFunc(l.ctx, func() { gl.Close() })()
	for {
		c, err := gl.Accept()
		if err != nil {
			return
		}
		select {
		case l.conns <- c:
		case <-l.ctx.Done():
			c.Close()
			return
		}
	}
}

// Accept waits for the next connection. After the end of the sandbox it is
// that, after Close net.ErrClosed.
func (l *listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.ctx.Done():
		return nil, context.Cause(l.ctx)
	}
}

// Close ends the listener and its connections, and waits until the port inside
// is free, or the sandbox asleep.
func (l *listener) Close() error {
	l.once.Do(func() { l.cancel(net.ErrClosed) })
	<-l.done
	return nil
}

func (l *listener) Addr() net.Addr { return l.addr }
