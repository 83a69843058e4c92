package agent

import (
	"context"
	"iter"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/sandbox"
)

const (
	// listenTimeout bounds what takes a millisecond once the sandbox is awake.
	listenTimeout = 10 * time.Second
	// relistenPause is between tries to listen again in a sandbox that lives and
	// lost its listener: it got another kernel.
	relistenPause = 100 * time.Millisecond
)

// incoming are connections from inside that their listener's caller was told of
// and has not opened yet.
type incoming struct {
	mu struct {
		sync.Mutex
		byID map[string]net.Conn
	}
}

// maxIncoming is how many may wait; a caller that does not open them gets no more.
const maxIncoming = 256

func (in *incoming) put(c net.Conn) (id string, ok bool) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if len(in.mu.byID) >= maxIncoming {
		return "", false
	}
	if in.mu.byID == nil {
		in.mu.byID = map[string]net.Conn{}
	}
	id = newToken()
	in.mu.byID[id] = c
	return id, true
}

func (in *incoming) take(id string) net.Conn {
	in.mu.Lock()
	defer in.mu.Unlock()
	c := in.mu.byID[id]
	delete(in.mu.byID, id)
	return c
}

func (in *incoming) has(id string) bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.mu.byID[id] != nil
}

// Callbacks listens for as long as it is ranged over.
func (n *Node) Callbacks(ctx context.Context, id string, port int) iter.Seq2[node.Callback, error] {
	return func(yield func(node.Callback, error) bool) {
		l, err := n.listen(ctx, id, port)
		if err != nil {
			yield(node.Callback{}, err)
			return
		}
		defer l.Close()
		var told []string
		defer func() {
			for _, id := range told {
				if c := n.incoming.take(id); c != nil {
					c.Close()
				}
			}
		}()
		defer context.AfterFunc(ctx, func() { l.cancel(contextError("node.callbacks", ctx)) })()
		if !yield(node.Callback{}, nil) {
			return
		}
		for {
			c, err := l.accept()
			if err != nil {
				yield(node.Callback{}, err)
				return
			}
			call, ok := n.incoming.put(c)
			if !ok {
				c.Close()
				continue
			}
			if told = append(told, call); len(told) > 2*maxIncoming { // most of them were opened
				told = slices.DeleteFunc(told, func(id string) bool { return !n.incoming.has(id) })
			}
			if !yield(node.Callback{ID: call}, nil) {
				return
			}
		}
	}
}

// OpenCallback takes a connection that Callbacks told of.
func (n *Node) OpenCallback(_ context.Context, callback string) (node.Conn, error) {
	c, ok := n.incoming.take(callback).(node.Conn)
	if !ok {
		return nil, sandbox.Errorf(sandbox.NotFound, "node.open_callback", "no such callback waits here")
	}
	return c, nil
}

// listen takes the connections that code inside makes to the callback address,
// on a port of it. The sandbox is woken for that once, and then neither kept
// active nor awake: connections stand still with it, and what is written to
// them waits. They end with a reset and with a restore, which the listener
// outlives; it ends when the sandbox does, with the reason. One at a time: a
// second one ends the first. sandbox.ErrPortTaken.
func (n *Node) listen(ctx context.Context, id string, port int) (*listener, error) {
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
	conns chan net.Conn

	ctx    context.Context // ends with Close, the sandbox or the node; its cause says which
	cancel context.CancelCauseFunc
	done   chan struct{} // closed when run has ended
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

// accept waits for the next connection, or the reason why there is none.
func (l *listener) accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.ctx.Done():
		return nil, context.Cause(l.ctx)
	}
}

// Close ends the listener and its connections, and waits until the port inside
// is free, or the sandbox asleep.
func (l *listener) Close() {
	l.cancel(net.ErrClosed)
	<-l.done
}
