package agent

import (
	"context"
	"errors"
	"time"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// Standby is two steps down from running. Hot: the kernel stands still and
// keeps its memory; 1 ms each way. Cold: its state is in the content store and
// the kernel is gone; what is left is an entry here and in the journal. Every
// call that needs the sandbox wakes it (hold).
//
// Hot is not journaled: the driver knows of a kernel it adopts whether it is
// paused. Cold is, after the content is durable and before the kernel goes, so
// that at every moment one of the two is there.

const (
	pauseTimeout = 30 * time.Second
	// coolTimeout bounds writing the memory of a sandbox to disk.
	coolTimeout = 5 * time.Minute
	// wakeTimeout bounds a wake, waiting for capacity included.
	wakeTimeout   = 2 * time.Minute
	capacityRetry = 100 * time.Millisecond
)

// Pause puts a sandbox on standby. Streams under way stand still with it and go
// on when it wakes. Short calls that meet it on its way to cold may fail as
// unavailable.
func (n *Node) Pause(ctx context.Context, id string, cold bool) error {
	if err := n.call(); err != nil {
		return err
	}
	defer n.calls.Done()
	b, err := n.find(ctx, id)
	if err != nil {
		return err
	}
	giveBack, err := n.own(ctx, b)
	if err != nil {
		return err
	}
	defer giveBack()
	if !cold {
		return sandbox.WithOp("node.pause", n.freeze(b, true, false))
	}
	return sandbox.WithOp("node.pause", n.cool(b, false))
}

// Resume wakes a sandbox, and says how long that took.
func (n *Node) Resume(ctx context.Context, id string) (took time.Duration, err error) {
	start := time.Now()
	if err := n.call(); err != nil {
		return 0, err
	}
	defer n.calls.Done()
	_, release, err := n.hold(ctx, id)
	if err != nil {
		return 0, sandbox.WithOp("node.resume", err)
	}
	release()
	return time.Since(start), nil
}

// Standby lists the sandboxes that are not awake.
func (n *Node) Standby(context.Context) (map[string]sandbox.Standby, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	out := map[string]sandbox.Standby{}
	for id, b := range n.mu.live {
		if b.sb.Standby != sandbox.Awake {
			out[id] = b.sb.Standby
		}
	}
	return out, nil
}

// freeze makes an awake sandbox hot; the caller owns it. busy says that calls
// under way do not matter. From the moment it is marked, calls wait to wake it.
func (n *Node) freeze(b *box, busy, idled bool) error {
	n.mu.Lock()
	k := b.kernel
	if b.sb.Standby != sandbox.Awake || !busy && b.active > 0 {
		n.mu.Unlock()
		return nil
	}
	p, ok := k.(runtime.Pauser)
	if !ok {
		n.mu.Unlock()
		return b.class.unsupported("pause")
	}
	n.setStandbyLocked(b, sandbox.Hot, idled)
	n.mu.Unlock()
	ctx, cancel := context.WithTimeout(b.ctx, pauseTimeout)
	defer cancel()
	err := p.Pause(ctx)
	if err == nil || p.Paused() {
		k.Guest().Stand(sandbox.Hot)
		if err != nil { // it stands, but for a detail
			n.log.Warn("a pause was not clean", "sandbox", b.id, "err", err)
		}
		return nil
	}
	n.mu.Lock()
	n.setStandbyLocked(b, sandbox.Awake, false)
	n.mu.Unlock()
	return n.explain(b, k, err)
}

// setStandbyLocked records where a sandbox stands now.
func (n *Node) setStandbyLocked(b *box, s sandbox.Standby, idled bool) {
	now := time.Now()
	b.sb.Standby, b.since, b.idled = s, now, idled
	b.asleep.Store(s != sandbox.Awake)
	if s == sandbox.Awake {
		b.lastActive, b.parked = now, false
	}
	n.armLocked(b)
}

// endNotice is how long after a call to a dead kernel broke its end may be
// noticed: the one comes over a socket, the other over a pidfd.
const endNotice = time.Second

// explain prefers the end of a sandbox over the broken call it caused.
func (n *Node) explain(b *box, k runtime.Kernel, err error) error {
	if sandbox.ClassOf(err) == sandbox.Unavailable {
		select {
		case <-k.Done():
		case <-b.ctx.Done():
		case <-time.After(endNotice):
		}
	}
	if err != nil && isDone(k) {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.endLocked(b, endOf(k.Exit()), true)
		if b.end != nil {
			return endedError(b.id, *b.end)
		}
	}
	if cause := context.Cause(b.ctx); cause != nil {
		return cause
	}
	return hintDisk(err)
}

// cool puts a sandbox on disk; the caller owns it. If that fails it is as it
// was. park says that nobody asked for it: it is woken as soon as there is room.
func (n *Node) cool(b *box, park bool) (err error) {
	if n.states == nil {
		return sandbox.Errorf(sandbox.Unsupported, "", "this node keeps no state: cold standby needs a content store")
	}
	n.mu.Lock()
	was := b.sb.Standby
	n.mu.Unlock()
	if was == sandbox.Cold {
		return n.unmarkParked(b)
	}
	if err := n.freeze(b, true, false); err != nil {
		return err
	}
	if was == sandbox.Awake {
		defer func() {
			if err != nil {
				err = errors.Join(err, n.thaw(b))
			}
		}()
	}
	n.mu.Lock()
	k := b.kernel
	n.mu.Unlock()
	ctx, cancel := context.WithTimeout(b.ctx, coolTimeout)
	defer cancel()
	c, _, err := n.checkpoint(ctx, b, k, true, true, func(sandbox.Progress) {})
	if err != nil {
		return n.explain(b, k, err)
	}
	if err := n.journal.append(record{Kind: recCold, ID: b.id, Cold: &c, Parked: park}); err != nil {
		return err
	}
	g := k.Guest()
	g.Outlive()
	g.Stand(sandbox.Cold)
	n.mu.Lock()
	b.cold, b.kernel, b.waiting, b.parked = &c, nil, g, park
	n.setStandbyLocked(b, sandbox.Cold, false)
	n.releaseLocked(b)
	n.mu.Unlock()
	n.discard(k)
	n.sweepSealed()
	return nil
}

// unmarkParked makes one that the node put on disk one that its owner did: it is
// no longer woken when there is room.
func (n *Node) unmarkParked(b *box) error {
	n.mu.Lock()
	was, cold := b.parked, b.cold
	n.mu.Unlock()
	if !was {
		return nil
	}
	if err := n.journal.append(record{Kind: recCold, ID: b.id, Cold: cold}); err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	b.parked = false
	return nil
}

// wake brings a sandbox back. It goes on when the caller leaves: whoever comes
// next waits less.
func (n *Node) wake(ctx context.Context, b *box) error {
	giveBack, err := n.own(ctx, b)
	if err != nil {
		return err
	}
	defer giveBack()
	n.mu.Lock()
	was := b.sb.Standby
	n.mu.Unlock()
	switch was {
	case sandbox.Hot:
		return n.thaw(b)
	case sandbox.Cold:
		return sandbox.WithOp("node.wake", n.warm(b))
	}
	return nil
}

// thaw makes a hot sandbox run.
func (n *Node) thaw(b *box) error {
	n.mu.Lock()
	k, was := b.kernel, b.sb.Standby
	n.mu.Unlock()
	if was != sandbox.Hot {
		return nil
	}
	ctx, cancel := context.WithTimeout(b.ctx, pauseTimeout)
	defer cancel()
	if err := k.(runtime.Pauser).Resume(ctx); err != nil {
		return n.explain(b, k, err)
	}
	k.Guest().Stand(sandbox.Awake)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.setStandbyLocked(b, sandbox.Awake, false)
	return nil
}

// warm makes a cold sandbox run in a new kernel. If that fails it stays cold.
// Between the restore and its record nobody can have seen it run, so a crash
// there may begin again from the same state.
func (n *Node) warm(b *box) error {
	n.creates.begin()
	defer n.creates.end()
	ctx, cancel := context.WithTimeout(b.ctx, wakeTimeout)
	defer cancel()
	if err := n.waitForCapacity(ctx, b); err != nil {
		return err
	}
	k, err := n.restore(ctx, b, *b.cold, b.sb.Spec.Volumes, b.waiting)
	if err == nil {
		err = n.journal.append(record{Kind: recCreated, ID: b.id, Entry: n.entryOf(b, k)})
		if err != nil {
			n.discard(k)
		}
	}
	if err != nil {
		n.mu.Lock()
		n.releaseLocked(b)
		n.mu.Unlock()
		if cause := context.Cause(b.ctx); cause != nil {
			return cause
		}
		return err
	}
	n.mu.Lock()
	n.abandonLocked(b, k)
	b.kernel, b.cold = k, nil
	n.litter.Store(true)
	n.setStandbyLocked(b, sandbox.Awake, false)
	n.goLocked(func() { n.watch(b, k) })
	sb := b.sb
	n.mu.Unlock()
	k.Guest().Stand(sandbox.Awake)
	n.interceptAgain(sb, k)
	return nil
}

// abandonLocked ends what waits for a sandbox to wake, unless it goes on in k.
func (n *Node) abandonLocked(b *box, k runtime.Kernel) {
	if b.waiting != nil && (k == nil || k.Guest() != b.waiting) {
		b.waiting.Abandon()
	}
	b.waiting = nil
}

// entryOf is b's record with another kernel.
func (n *Node) entryOf(b *box, k runtime.Kernel) *entry {
	n.mu.Lock()
	defer n.mu.Unlock()
	sb := b.sb
	sb.Standby = sandbox.Awake
	return &entry{Sandbox: sb, Image: b.image, Kernel: k.Handle(), Needs: b.needs, Clock: b.clock.mark()}
}

// waitForCapacity reserves what a sandbox that wakes needs, as soon as the machine has it: its caller
// should see latency, not an error.
func (n *Node) waitForCapacity(ctx context.Context, b *box) error {
	for {
		n.mu.Lock()
		err := n.mu.reservations.Readmit(b.class.Name, b.resources, time.Second)
		b.held = err == nil
		n.mu.Unlock()
		if err == nil || sandbox.ClassOf(err) != sandbox.NoCapacity {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(capacityRetry):
		}
	}
}

// pauseIdle is what an idle timeout does to a sandbox that asked for it.
func (n *Node) pauseIdle(b *box) {
	giveBack, err := n.own(n.ctx, b)
	if err != nil {
		return
	}
	defer giveBack()
	if err := n.freeze(b, false, true); err != nil {
		n.log.Warn("an idle sandbox could not be paused", "sandbox", b.id, "err", err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if b.end == nil {
		n.armLocked(b)
	}
}

// pauseExpired is pauseIdle for one whose time is over and that is to be paused
// then, whatever runs in it. Its timeout is spent: who wakes it sets another, or it
// would be paused again while its first call is under way.
func (n *Node) pauseExpired(b *box, expired time.Time) {
	giveBack, err := n.own(n.ctx, b)
	if err != nil {
		return
	}
	defer giveBack()
	n.mu.Lock()
	moved := !b.sb.ExpiresAt.Equal(expired)
	n.mu.Unlock()
	if !moved {
		if err := n.freeze(b, true, true); err != nil { // it must not live on for ever
			n.log.Warn("a sandbox whose time is over could not be paused and ends", "sandbox", b.id, "err", err)
			n.mu.Lock()
			n.endLocked(b, sandbox.End{Cause: sandbox.TTL, At: time.Now(), Detail: "could not be paused"}, true)
			n.mu.Unlock()
			return
		}
		if err := n.journal.append(record{Kind: recExpiry, ID: b.id}); err != nil {
			n.log.Warn("the spent timeout of a sandbox is not on record", "sandbox", b.id, "err", err)
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if b.end != nil {
		return
	}
	if !moved {
		b.sb.ExpiresAt = time.Time{}
	}
	n.armLocked(b)
}

// coolIdle puts a hot sandbox on disk.
func (n *Node) coolIdle(b *box) {
	giveBack, err := n.own(n.ctx, b)
	if err != nil {
		return
	}
	defer giveBack()
	n.mu.Lock()
	hot := b.sb.Standby == sandbox.Hot
	n.mu.Unlock()
	if !hot {
		return // woken in between
	}
	if err := n.cool(b, false); err != nil {
		n.log.Warn("a paused sandbox could not be put on disk", "sandbox", b.id, "err", err)
		n.mu.Lock()
		defer n.mu.Unlock()
		if b.end == nil && b.sb.Standby == sandbox.Hot {
			n.setStandbyLocked(b, sandbox.Hot, b.idled) // tried again after the same time
		}
	}
}
