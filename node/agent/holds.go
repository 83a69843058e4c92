package agent

import (
	"context"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/sandbox"
)

// holds are the leases on the activity of sandboxes. A caller that dies renews
// none, so that no sandbox is kept awake by somebody who is gone. They are not
// journaled: after a restart nobody is idle for a while anyway.
type holds struct {
	mu struct {
		sync.Mutex
		byToken map[string]*lease
	}
}

type lease struct {
	release func()
	timer   *time.Timer
	until   time.Time // guarded by holds.mu
}

// Hold wakes a sandbox and keeps it from being idle.
func (n *Node) Hold(ctx context.Context, id string, ttl time.Duration) (node.Hold, error) {
	if err := validTTL(ttl); err != nil {
		return node.Hold{}, err
	}
	_, release, err := n.hold(ctx, id)
	if err != nil {
		return node.Hold{}, err
	}
	token := newToken()
	l := &lease{release: release, until: time.Now().Add(ttl)}
	n.holds.mu.Lock()
	defer n.holds.mu.Unlock()
	if n.holds.mu.byToken == nil {
		n.holds.mu.byToken = map[string]*lease{}
	}
	n.holds.mu.byToken[token] = l
	l.timer = time.AfterFunc(ttl, func() { n.holds.lapse(token) })
	return node.Hold{Token: token, Until: l.until}, nil
}

// RenewHold makes a hold last for ttl from now.
func (n *Node) RenewHold(_ context.Context, token string, ttl time.Duration) (node.Hold, error) {
	if err := validTTL(ttl); err != nil {
		return node.Hold{}, err
	}
	n.holds.mu.Lock()
	defer n.holds.mu.Unlock()
	l := n.holds.mu.byToken[token]
	if l == nil {
		return node.Hold{}, &sandbox.Error{Class: sandbox.NotFound, Reason: sandbox.NoLease, Op: "node.hold", Msg: "the hold is over", Hint: "hold the sandbox again"}
	}
	l.until = time.Now().Add(ttl)
	l.timer.Reset(ttl)
	return node.Hold{Token: token, Until: l.until}, nil
}

// ReleaseHold ends a hold.
func (n *Node) ReleaseHold(_ context.Context, token string) error {
	n.holds.drop(token, time.Time{})
	return nil
}

// lapse ends a hold whose time is over; a renewal may have come just before.
func (h *holds) lapse(token string) { h.drop(token, time.Now()) }

func (h *holds) drop(token string, at time.Time) {
	h.mu.Lock()
	l := h.mu.byToken[token]
	if l == nil || !at.IsZero() && at.Before(l.until) {
		h.mu.Unlock()
		return
	}
	delete(h.mu.byToken, token)
	l.timer.Stop()
	h.mu.Unlock()
	l.release()
}

// stop forgets all of them, when the node closes.
func (h *holds) stop() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, l := range h.mu.byToken {
		l.timer.Stop()
	}
	clear(h.mu.byToken)
}

func validTTL(ttl time.Duration) error {
	if ttl <= 0 || ttl > node.MaxHold {
		return sandbox.InvalidField("ttl", "%s is not accepted; more than 0 and at most %s is", ttl, node.MaxHold)
	}
	return nil
}
