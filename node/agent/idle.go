package agent

import (
	"context"
	"time"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// A sandbox is active while a call to it is under way or a process started
// through the API runs in it. Calls are counted here; processes only the guest
// knows, and it is asked only when the idle time has passed without a call.

// inside is what the guest says about its container.
type inside struct {
	attached bool
	running  int       // API processes
	ended    time.Time // of the last API process that did
}

// inspectTimeout: a guest that takes longer is busy, hence not idle.
const inspectTimeout = 10 * time.Second

func inspect(ctx context.Context, k runtime.Kernel) (inside, error) {
	ctx, cancel := context.WithTimeout(ctx, inspectTimeout)
	defer cancel()
	procs, _, err := k.Guest().Processes(ctx)
	if sandbox.ClassOf(err) == sandbox.Precondition {
		return inside{}, nil
	}
	if err != nil {
		return inside{}, err
	}
	in := inside{attached: true}
	for _, p := range procs {
		if p.End == nil {
			in.running++
		} else if p.End.At.After(in.ended) {
			in.ended = p.End.At
		}
	}
	return in, nil
}

// armLocked sets the time at which b must be looked at next. Calls do not move
// it: due finds out that they have been.
func (n *Node) armLocked(b *box) {
	at := b.sb.ExpiresAt
	switch d := b.sb.Spec.IdleTimeout; {
	case b.sb.Standby == sandbox.Hot && b.idled && n.states != nil && n.states.cfg.ColdAfter > 0:
		if cold := b.since.Add(n.states.cfg.ColdAfter); at.IsZero() || cold.Before(at) {
			at = cold
		}
	case b.sb.Standby == sandbox.Awake && d > 0:
		if idle := b.activeLocked().Add(d); at.IsZero() || idle.Before(at) {
			at = idle
		}
	}
	n.timers.set(b.id, at)
}

// due ends b if its time is over and looks closer if it seems idle.
func (n *Node) due(id string) {
	now := time.Now()
	n.mu.Lock()
	defer n.mu.Unlock()
	b := n.mu.live[id]
	if b == nil || b.end != nil {
		return
	}
	if at := b.sb.ExpiresAt; !at.IsZero() && !now.Before(at) {
		if b.sb.Spec.OnTimeout == sandbox.IdlePause {
			n.timers.set(id, time.Time{}) // pauseExpired sets it again
			n.goLocked(func() { n.pauseExpired(b, at) })
			return
		}
		n.endLocked(b, sandbox.End{Cause: sandbox.TTL, At: now}, true)
		return
	}
	switch b.sb.Standby {
	case sandbox.Hot:
		if b.idled && n.states != nil && n.states.cfg.ColdAfter > 0 && !now.Before(b.since.Add(n.states.cfg.ColdAfter)) {
			n.timers.set(id, b.sb.ExpiresAt)
			n.goLocked(func() { n.coolIdle(b) })
			return
		}
		fallthrough
	case sandbox.Cold:
		n.armLocked(b)
		return
	}
	if b.active > 0 {
		b.lastActive = now
	}
	d := b.sb.Spec.IdleTimeout
	if d <= 0 || now.Before(b.activeLocked().Add(d)) {
		n.armLocked(b)
		return
	}
	n.timers.set(id, b.sb.ExpiresAt) // checkIdle sets the idle time again
	n.goLocked(func() { n.checkIdle(b) })
}

// checkIdle asks the guest whether anything runs and ends b if nothing did for
// its idle time. A guest that does not answer is taken for busy.
func (n *Node) checkIdle(b *box) {
	n.mu.Lock()
	k := b.kernel
	n.mu.Unlock()
	if k == nil {
		return // cold in the meantime
	}
	in, err := n.cfg.inspect(n.ctx, k)
	now := time.Now()
	n.mu.Lock()
	defer n.mu.Unlock()
	if b.end != nil || b.sb.Standby != sandbox.Awake {
		return
	}
	d := b.sb.Spec.IdleTimeout
	if err != nil || in.running > 0 {
		// Look again soon enough to end it at most a quarter late. That a
		// process ran until a moment ago is found in its end.
		at := now.Add(min(max(d/4, time.Second), time.Minute))
		if exp := b.sb.ExpiresAt; !exp.IsZero() && exp.Before(at) {
			at = exp
		}
		n.timers.set(b.id, at)
		return
	}
	if in.ended.After(b.lastActive) && in.ended.Before(now) {
		b.lastActive = in.ended
	}
	if b.active == 0 && !now.Before(b.activeLocked().Add(d)) {
		if b.sb.Spec.OnIdle == sandbox.IdlePause {
			n.goLocked(func() { n.pauseIdle(b) })
			return
		}
		n.endLocked(b, sandbox.End{Cause: sandbox.Idle, At: now}, true)
		return
	}
	n.armLocked(b)
}
