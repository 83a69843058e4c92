package agent

import (
	"context"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// resetTimeout bounds what takes 6 ms on a quiet machine.
const resetTimeout = 60 * time.Second

// Reset gives the sandbox a pristine container and returns the number of its
// new episode. Once begun it is finished even if the caller leaves: half a
// reset would have to end the sandbox. A reset that fails does end it.
//
// The new episode is journaled first: recovery can then tell a crash amid a
// reset (finished there) from one amid a create (undone there).
func (n *Node) Reset(ctx context.Context, id string) (episode int64, took time.Duration, err error) {
	start := time.Now()
	if err := n.call(); err != nil {
		return 0, 0, err
	}
	defer n.calls.Done()
	b, release, err := n.hold(ctx, id)
	if err != nil {
		return 0, 0, err
	}
	defer release()
	giveBack, err := n.own(ctx, b)
	if err != nil {
		return 0, 0, err
	}
	defer giveBack()

	n.mu.Lock()
	episode = b.sb.Episode + 1
	n.mu.Unlock()
	if err := n.journal.append(record{Kind: recReset, ID: id, Episode: episode}); err != nil {
		return 0, 0, sandbox.WithOp("node.reset", err)
	}
	n.mu.Lock()
	b.sb.Episode = episode
	sb, container := b.sb, b.container
	n.mu.Unlock()
	rctx, cancel := context.WithTimeout(b.ctx, resetTimeout)
	defer cancel()
	k := n.inside(b)
	err = k.Reset(rctx, container)
	if err == nil {
		err = n.trust(rctx, sb, b.image, k)
	}
	if err == nil {
		err = b.clock.rewind(rctx, k)
	}
	if err == nil {
		n.begins(rctx, b, k, false)
	}
	if err != nil {
		end := sandbox.End{Cause: sandbox.Infra, Detail: "reset failed: " + err.Error()}
		if isDone(k) {
			end = endOf(k.Exit())
		}
		n.mu.Lock()
		defer n.mu.Unlock()
		n.endLocked(b, end, true)
		if b.end != nil {
			end = *b.end
		}
		return 0, 0, endedError(id, end)
	}
	n.seekRecording(id, "") // a new episode is told the same again
	return episode, time.Since(start), nil
}

// SetExpiry moves the end of a sandbox's life; zero = never.
func (n *Node) SetExpiry(ctx context.Context, id string, at time.Time) error {
	if err := n.call(); err != nil {
		return err
	}
	defer n.calls.Done()
	b, err := n.find(ctx, id) // without waking it
	if err != nil {
		return err
	}
	giveBack, err := n.own(ctx, b)
	if err != nil {
		return err
	}
	defer giveBack()
	if err := n.journal.append(record{Kind: recExpiry, ID: id, Expires: at}); err != nil {
		return sandbox.WithOp("node.set_expiry", err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	b.sb.ExpiresAt = at
	b.lastActive = time.Now()
	n.armLocked(b)
	return nil
}
