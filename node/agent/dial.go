package agent

import (
	"context"
	"time"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/sandbox"
)

// Dial opens a byte stream to a TCP port inside a sandbox, which is woken for
// it. The stream stands still while the sandbox sleeps, which it does not keep it
// from, and what is written to it wakes it. It ends with the sandbox and its
// episode.
func (n *Node) Dial(ctx context.Context, id string, port int) (node.Conn, error) {
	b, release, err := n.hold(ctx, id)
	if err != nil {
		return nil, err
	}
	defer release()
	c, err := n.inside(b).Guest().Connect(ctx, port)
	if err != nil {
		return nil, err
	}
	return &inboundConn{c, n, b}, nil
}

// inboundConn is a connection from outside.
type inboundConn struct {
	*guest.Conn
	n *Node
	b *box
}

// Write wakes the sandbox. It is asked before, so that a sleeper's stream does
// not fill, and after: what was written while it went to sleep would else wait for
// the next who comes.
func (v *inboundConn) Write(p []byte) (n int, err error) {
	if err := v.n.wakeForBytes(v.b); err != nil {
		return 0, err
	}
	n, err = v.Conn.Write(p)
	if err == nil && v.b.asleep.Load() {
		err = v.n.wakeForBytes(v.b)
	}
	return n, err
}

// wakeForBytes wakes a sandbox for bytes that came for it, and notes that they did.
func (n *Node) wakeForBytes(b *box) error {
	b.heard.Store(time.Now().UnixNano())
	for b.asleep.Load() {
		if err := n.wake(b.ctx, b); err != nil {
			return sandbox.WithOp("node.wake", err)
		}
	}
	return nil
}

// activeLocked is when b was last used.
func (b *box) activeLocked() time.Time {
	if at := time.Unix(0, b.heard.Load()); at.After(b.lastActive) {
		return at
	}
	return b.lastActive
}
