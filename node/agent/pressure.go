package agent

import (
	"cmp"
	"fmt"
	goruntime "runtime"
	"slices"
	"time"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// A node gives out more memory than there is, because most of it is never
// touched. What it owes in return: that neither the host's OOM killer nor a
// neighbour's appetite ends a sandbox. So the node looks at what the machine has
// left, the more often the less that is, and acts in this order:
//
//  1. kernels restored ahead, warm ones (pool) and resting ones go, sandboxes that stand go to disk, nothing new is
//     admitted;
//  2. with half of the reserve gone, sandboxes that run and use more than is
//     reserved for them are parked, the largest first: they go to disk with all
//     that runs in them, and come back when there is room;
//  3. one that cannot be parked ends with OOM.
//
// Who uses no more than was reserved for it is never touched.

// strain is how short of memory a machine is.
type strain int

const (
	relaxed  strain = iota
	short           // into the reserve, or everybody waits for memory now and then
	critical        // half of the reserve is gone
)

// stalledMost is the percentage of time in which nobody on the machine could go on
// for want of memory that is too much: of a tenth of it all pages are fetched
// twice, and it only gets worse with more.
const stalledMost = 10

func (l Limits) strain(h Host) strain {
	switch {
	case h.Memory <= l.MemoryReserve/2:
		return critical
	case h.Memory <= l.MemoryReserve || h.Stalled >= stalledMost:
		return short
	}
	return relaxed
}

const (
	// appetite is how fast a core can use up memory, in bytes a second: what
	// touching pages costs inside a sandbox is about 1 GiB a second.
	appetite = 1 << 30
	// A look costs 0.1 ms.
	lookMost, lookLeast = 5 * time.Second, 50 * time.Millisecond
)

// lookAfter is when to look again, so that what is above the reserve cannot be used
// up in between.
func (l Limits) lookAfter(h Host, cores int) time.Duration {
	seconds := float64(h.Memory-l.MemoryReserve) / (appetite * float64(cores))
	return min(max(time.Duration(seconds*float64(time.Second)), lookLeast), lookMost)
}

// guardHost looks at what the machine has left for as long as the node runs.
func (n *Node) guardHost() {
	last := relaxed
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-n.ctx.Done():
			return
		case <-timer.C:
		}
		h, now, err := n.look()
		if err != nil {
			n.log.Error("cannot tell what the machine has left", "err", err)
			timer.Reset(lookMost)
			continue
		}
		if now != last {
			n.log.Warn("memory of the machine", "short", now > relaxed, "critical", now == critical, "available", amount(h.Memory, "B"), "stalled_percent", h.Stalled)
		}
		if last = now; now > relaxed {
			n.relieve()
		} else {
			n.unpark(h)
		}
		timer.Reset(n.limits().lookAfter(h, goruntime.NumCPU()))
	}
}

// look reads the machine and tells admission.
func (n *Node) look() (Host, strain, error) {
	h, err := n.cfg.host()
	if err != nil {
		return h, relaxed, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	l := n.mu.reservations
	if low := h.Disk < l.limits.DiskReserve; low != (l.host.Disk < l.limits.DiskReserve) {
		n.log.Warn("disk space", "low", low, "free", amount(h.Disk, "B"))
	}
	l.Observe(h)
	return h, l.limits.strain(h), nil
}

func (n *Node) limits() Limits {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.mu.reservations.limits
}

// freeMemory is what warm kernels may still take.
func (n *Node) freeMemory() int64 {
	h, err := n.cfg.host()
	if err != nil {
		return 0
	}
	return h.Memory - n.limits().MemoryReserve
}

// relieve frees memory until the machine has enough, or nothing is left to free.
func (n *Node) relieve() {
	before := n.memoryLoads(nil)
	held := map[*box]func(){} // stopped here, and how to give them back
	defer func() {
		for b, giveBack := range held {
			if err := n.thaw(b); err != nil && b.ctx.Err() == nil {
				n.log.Error("a sandbox that was stopped for want of memory did not go on", "sandbox", b.id, "err", err)
			}
			giveBack()
		}
	}()
	reserve := n.limits().MemoryReserve
	for n.ctx.Err() == nil {
		h, now, err := n.look()
		if err != nil || now == relaxed {
			return
		}
		if n.clearAhead() || n.clearRests() || n.coolLongest(held) {
			if h.Memory > reserve {
				return // they only wait for it: whether that helped shows in seconds
			}
			continue
		}
		if now != critical {
			return
		}
		before = n.stillGrowers(before, held)
		if !n.parkOne(before, held) {
			return
		}
	}
}

// stillGrowers stops what has grown since the look before, and says what all use
// now. To stop one takes a millisecond, to write out the largest seconds, in which
// others could use up the rest.
func (n *Node) stillGrowers(before []load, held map[*box]func()) []load {
	loads := n.memoryLoads(before)
	for _, l := range loads {
		if l.grown > 0 && held[l.b] == nil {
			n.holdStill(l.b, held)
		}
	}
	return loads
}

// load is what a sandbox that runs uses beyond what is reserved for it.
type load struct {
	b           *box
	use, excess int64
	grown       int64 // since the look before; 0 if there was none
}

// ownMemory is what a kernel takes for itself, which is not its sandbox's excess: an
// idle one is worth nothing to park, and must not end for what others use.
const ownMemory = 24 << 20

// memoryLoads lists those who use more than is reserved for them, the largest excess
// first.
func (n *Node) memoryLoads(before []load) []load {
	type running struct {
		b        *box
		m        runtime.Meter
		reserved int64
	}
	n.mu.Lock()
	var all []running
	for _, b := range n.mu.live {
		if m, ok := b.kernel.(runtime.Meter); ok && b.end == nil && b.sb.State == sandbox.Running {
			all = append(all, running{b, m, b.resources.Reserved()})
		}
	}
	n.mu.Unlock()
	was := map[*box]int64{}
	for _, l := range before {
		was[l.b] = l.use
	}
	var out []load
	for _, r := range all { // reads of the host's files: not under the lock
		use, err := r.m.MemoryUse()
		if err != nil || use <= r.reserved+ownMemory {
			continue // gone meanwhile, or within what it was promised
		}
		l := load{b: r.b, use: use, excess: use - r.reserved}
		if before != nil {
			l.grown = use - was[r.b]
		}
		out = append(out, l)
	}
	slices.SortFunc(out, func(a, b load) int { return cmp.Or(cmp.Compare(b.excess, a.excess), cmp.Compare(a.b.id, b.b.id)) })
	return out
}

// tryOwn is own without waiting; nil if somebody has it.
func (n *Node) tryOwn(b *box) (giveBack func()) {
	select {
	case b.op <- struct{}{}:
		if b.ctx.Err() == nil {
			return func() { <-b.op }
		}
		<-b.op
	default:
	}
	return nil
}

// holdStill stops a sandbox that runs and keeps it for itself: who calls it waits.
func (n *Node) holdStill(b *box, held map[*box]func()) {
	giveBack := n.tryOwn(b)
	if giveBack == nil {
		return
	}
	n.mu.Lock()
	awake := b.sb.Standby == sandbox.Awake
	n.mu.Unlock()
	if awake {
		err := n.freeze(b, true, false)
		if err == nil {
			held[b] = giveBack
			return
		}
		n.log.Warn("short of memory: a sandbox that grows could not be stopped", "sandbox", b.id, "err", err)
	}
	giveBack()
}

// parkOne writes the first that can be written to disk, and says whether memory came
// free. Where none can, the first ends.
func (n *Node) parkOne(loads []load, held map[*box]func()) bool {
	var worst *load
	for i, l := range loads {
		giveBack := held[l.b]
		if giveBack == nil {
			if giveBack = n.tryOwn(l.b); giveBack == nil {
				continue // it is being snapshotted, reset or killed
			}
		}
		delete(held, l.b)
		parked, err := n.parkWatching(l, loads, held)
		if err != nil && worst == nil {
			worst = &loads[i]
		}
		giveBack()
		if parked {
			return true
		}
	}
	if worst == nil {
		return false
	}
	n.mu.Lock()
	n.endLocked(worst.b, sandbox.End{Cause: sandbox.OOM, Detail: fmt.Sprintf("the machine ran out of memory, and this sandbox could not be put on disk: it used %s, and %s were reserved for it",
		amount(worst.use, "B"), amount(worst.use-worst.excess, "B"))}, true)
	n.mu.Unlock()
	select {
	case <-worst.b.gone:
		return true
	case <-worst.b.stuck:
	case <-n.ctx.Done():
	}
	return false
}

// parkWatching is park while what else grows is stopped.
func (n *Node) parkWatching(l load, loads []load, held map[*box]func()) (parked bool, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		parked, err = n.park(l)
	}()
	tick := time.NewTicker(lookLeast)
	defer tick.Stop()
	for {
		select {
		case <-done:
			return parked, err
		case <-tick.C:
			if _, now, err := n.look(); err == nil && now == critical {
				loads = n.stillGrowers(loads, held)
			}
		}
	}
}

// park puts a sandbox on disk with all that runs in it; the caller owns it. One that
// has no kernel any more is neither parked nor an error.
func (n *Node) park(l load) (parked bool, err error) {
	n.mu.Lock()
	gone := l.b.kernel == nil || l.b.end != nil
	free := n.mu.reservations.host.Disk - n.mu.reservations.limits.DiskReserve
	n.mu.Unlock()
	if gone {
		return false, nil
	}
	if l.use > free {
		err = sandbox.Errorf(sandbox.DiskFull, "node.park", "%s do not fit onto the disk", amount(l.use, "B"))
	} else {
		n.log.Warn("short of memory: a sandbox that runs is parked", "sandbox", l.b.id, "uses", amount(l.use, "B"), "beyond_its_reserve", amount(l.excess, "B"))
		err = n.cool(l.b, true)
	}
	if err == nil || l.b.ctx.Err() != nil {
		return err == nil, nil
	}
	n.log.Error("short of memory: a sandbox could not be parked", "sandbox", l.b.id, "err", err)
	if terr := n.thaw(l.b); terr != nil {
		n.log.Error("a sandbox that was stopped for want of memory did not go on", "sandbox", l.b.id, "err", terr)
	}
	return false, err
}

// unpark wakes what was parked, the first to go first, while there is room for all
// that it had. It takes more room than was the reason to park: it would go again
// at once.
func (n *Node) unpark(h Host) {
	limits := n.limits()
	n.mu.Lock()
	var next *box
	for _, b := range n.mu.live {
		if b.parked && b.end == nil && (next == nil || cmp.Or(b.since.Compare(next.since), cmp.Compare(b.id, next.id)) < 0) {
			next = b
		}
	}
	var size int64
	if next != nil && next.cold != nil {
		size = next.cold.Size
	}
	n.mu.Unlock()
	if next == nil || h.Memory-limits.MemoryReserve < size+limits.MemoryReserve/4 {
		return
	}
	if !n.unparking.CompareAndSwap(false, true) {
		return // one at a time: what the one before takes is not seen yet
	}
	n.log.Info("a parked sandbox goes on", "sandbox", next.id)
	n.background(func() {
		defer n.unparking.Store(false)
		if err := n.wake(n.ctx, next); err != nil && next.ctx.Err() == nil && n.ctx.Err() == nil {
			n.log.Error("a parked sandbox could not be woken", "sandbox", next.id, "err", err)
		}
	})
}

// clearAhead destroys the kernels that were restored for nobody yet, and says whether
// there were any.
func (n *Node) clearAhead() (any bool) {
	for _, c := range n.classes {
		any = c.ahead.clear() || any
	}
	return any
}

// clearRests destroys the kernels that rest, and says whether there were any.
func (n *Node) clearRests() (any bool) {
	for _, c := range n.classes {
		any = c.rests != nil && c.rests.clear() || any
	}
	return any
}

// coolLongest puts the sandbox on disk that has stood longest, but for those that
// are held here, and says whether one went.
func (n *Node) coolLongest(held map[*box]func()) bool {
	if n.states == nil {
		return false
	}
	n.mu.Lock()
	var b *box
	for _, o := range n.mu.live {
		if o.sb.Standby == sandbox.Hot && held[o] == nil && o.active == 0 && o.end == nil && (b == nil || cmp.Or(o.since.Compare(b.since), cmp.Compare(o.id, b.id)) < 0) {
			b = o
		}
	}
	n.mu.Unlock()
	if b == nil {
		return false
	}
	n.log.Info("short of memory: a paused sandbox goes to disk", "sandbox", b.id)
	n.coolIdle(b)
	n.mu.Lock()
	defer n.mu.Unlock()
	return b.sb.Standby != sandbox.Hot || b.end != nil // or the disk is full too, or it was just paused again
}
