package node

import (
	"context"
	"net"
	"time"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/sandbox"
)

// Dial opens a byte stream to a TCP port inside a sandbox, which is woken for
// it, and keeps it active until release is called. The stream may be used beyond
// that: it stands still while the sandbox sleeps, which it does not keep it from,
// and what is written to it wakes it. It ends with the sandbox and its episode.
func (n *Node) Dial(ctx context.Context, id string, port int) (c net.Conn, release func(), err error) {
	b, release, err := n.hold(ctx, id)
	if err != nil {
		return nil, nil, err
	}
	gc, err := n.inside(b).Guest().Connect(ctx, port)
	if err != nil {
		release()
		return nil, nil, err
	}
	return &visit{gc, n, b}, release, nil
}

// visit is a connection from outside.
type visit struct {
	*guest.Conn
	n *Node
	b *box
}

// Write wakes the sandbox. It is asked before, so that a sleeper's stream does
// not fill, and after: what was written while it went to sleep would else wait for
// the next who comes.
func (v *visit) Write(p []byte) (n int, err error) {
	if err := v.n.stir(v.b); err != nil {
		return 0, err
	}
	n, err = v.Conn.Write(p)
	if err == nil && v.b.asleep.Load() {
		err = v.n.stir(v.b)
	}
	return n, err
}

// stir wakes a sandbox for bytes that came for it, and notes that they did.
func (n *Node) stir(b *box) error {
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
