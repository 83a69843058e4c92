package node

import (
	"context"
	"os"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/sandbox"
)

// find returns a sandbox that was created here and is not yet gone, after
// waiting for its create if that is still under way. sandbox.ErrEnded while
// its end is known, sandbox.ErrNotFound otherwise.
func (n *Node) find(ctx context.Context, id string) (*box, error) {
	for {
		n.mu.Lock()
		b := n.live[id]
		end, over := n.ends[id]
		n.mu.Unlock()
		switch {
		case b == nil && over:
			return nil, endedError(id, end)
		case b == nil:
			return nil, sandbox.Errorf(sandbox.NotFound, "node", "no sandbox %s on node %s", id, n.cfg.Name)
		}
		select {
		case <-b.ready:
		case <-ctx.Done():
			return nil, contextError("node", ctx)
		}
		n.mu.Lock()
		same := n.live[id] == b
		n.mu.Unlock()
		if same {
			return b, nil
		}
	}
}

// hold returns a running sandbox and keeps it from being idle until release.
func (n *Node) hold(ctx context.Context, id string) (b *box, release func(), err error) {
	b, err = n.find(ctx, id)
	if err != nil {
		return nil, nil, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if b.end != nil {
		return nil, nil, endedError(id, *b.end)
	}
	b.active++
	return b, sync.OnceFunc(func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		b.active--
		b.lastActive = time.Now()
	}), nil
}

// own waits for the sole use of the sandbox's kernel.
func (n *Node) own(ctx context.Context, b *box) (giveBack func(), err error) {
	select {
	case b.op <- struct{}{}:
		if err := b.ctx.Err(); err != nil {
			<-b.op
			return nil, context.Cause(b.ctx)
		}
		return func() { <-b.op }, nil
	case <-b.ctx.Done():
		return nil, context.Cause(b.ctx)
	case <-ctx.Done():
		return nil, contextError("node", ctx)
	}
}

// Guest returns the machine inside and keeps the sandbox active until release
// is called.
func (n *Node) Guest(ctx context.Context, id string) (g *guest.Client, release func(), err error) {
	b, release, err := n.hold(ctx, id)
	if err != nil {
		return nil, nil, err
	}
	return b.kernel.Guest(), release, nil
}

// Bulk moves content between a host descriptor and the sandbox.
func (n *Node) Bulk(ctx context.Context, id string, op guest.BulkOp, stdin, stdout *os.File) error {
	b, release, err := n.hold(ctx, id)
	if err != nil {
		return err
	}
	defer release()
	op.User = b.image.User
	return b.kernel.Bulk(ctx, op, stdin, stdout)
}

// Stats is what a sandbox uses. Looking does not keep it from being idle.
func (n *Node) Stats(ctx context.Context, id string) (sandbox.Stats, error) {
	b, err := n.find(ctx, id)
	if err != nil {
		return sandbox.Stats{}, err
	}
	return b.kernel.Stats(ctx)
}
