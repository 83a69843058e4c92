package agent

import (
	"context"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// find returns a sandbox that was created here and is not yet gone, after
// waiting for its create if that is still under way. sandbox.ErrEnded while
// its end is known, sandbox.ErrNoSandbox otherwise.
func (n *Node) find(ctx context.Context, id string) (*box, error) {
	for {
		n.mu.Lock()
		b := n.mu.live[id]
		end, over := n.mu.ends[id]
		n.mu.Unlock()
		switch {
		case b == nil && over:
			return nil, endedError(id, end)
		case b == nil:
			return nil, sandbox.Errorf(sandbox.NotFound, "node", "no sandbox %s on node %s", id, n.cfg.Name).WithReason(sandbox.NoSandbox)
		}
		select {
		case <-b.ready:
		case <-ctx.Done():
			return nil, contextError("node", ctx)
		}
		n.mu.Lock()
		same := n.mu.live[id] == b
		n.mu.Unlock()
		if same {
			return b, nil
		}
	}
}

// hold returns a running sandbox, woken if it was not, and keeps it from being
// idle until release.
func (n *Node) hold(ctx context.Context, id string) (b *box, release func(), err error) {
	for {
		b, err = n.find(ctx, id)
		if err != nil {
			return nil, nil, err
		}
		n.mu.Lock()
		if b.end != nil {
			end := *b.end
			n.mu.Unlock()
			return nil, nil, endedError(id, end)
		}
		if b.sb.Standby == sandbox.Awake {
			break
		}
		n.mu.Unlock()
		if err := n.wake(ctx, b); err != nil {
			return nil, nil, err
		}
	}
	defer n.mu.Unlock()
	n.hookGuestLocked(b)
	b.active++
	return b, sync.OnceFunc(func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		b.active--
		b.lastActive = time.Now()
		if b.active == 0 && b.calm != nil {
			close(b.calm)
			b.calm = nil
		}
	}), nil
}

// hookGuestLocked sees to the calls that will be made to the guest of b: that those
// which a pause met before they were sent wake it, and that those which get lost
// are noticed.
func (n *Node) hookGuestLocked(b *box) {
	if b.hooked == b.kernel {
		return
	}
	b.hooked = b.kernel
	g := b.kernel.Guest()
	g.OnHeld(func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.goLocked(func() {
			if err := n.wake(n.ctx, b); err != nil && b.ctx.Err() == nil && n.ctx.Err() == nil {
				n.log.Warn("a sandbox did not wake for a call that waits", "sandbox", b.id, "err", err)
			}
		})
	})
	g.OnSilent(func(op string) {
		n.silent.Add(1)
		n.log.Warn("a call was lost between node and guest and is sent again", "sandbox", b.id, "call", op)
	})
}

// inside is the kernel of a sandbox that is held, for what may change it.
func (n *Node) inside(b *box) runtime.Kernel {
	n.mu.Lock()
	defer n.mu.Unlock()
	b.touched++
	return b.kernel
}

// userOf is who the processes of a sandbox are, as its image says.
func (n *Node) userOf(b *box) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return b.image.User
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

// Stats is what a sandbox uses. Looking does not keep it from being idle and
// does not wake it.
func (n *Node) Stats(ctx context.Context, id string) (sandbox.Stats, error) {
	b, err := n.find(ctx, id)
	if err != nil {
		return sandbox.Stats{}, err
	}
	n.mu.Lock()
	k, cold := b.kernel, b.cold
	n.mu.Unlock()
	if cold != nil {
		return sandbox.Stats{DiskUsed: cold.Stored}, nil
	}
	s, err := k.Stats(ctx)
	if cause := context.Cause(b.ctx); cause != nil {
		return sandbox.Stats{}, cause // its kernel may be another's by now
	}
	s.EgressSent, s.EgressReceived = n.traffic(k)
	return s, err
}
