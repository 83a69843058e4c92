package agent

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/egress/policy"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// ahead is the third pool of a class: kernels already restored from the checkpoints
// that sandboxes are being created from (runtime.Holder). They stand and are nobody's; a
// create from the same checkpoint of the same tenant takes one, and it goes on as if it
// had been restored then, in 2 ms instead of 40. All of it is only there to be quick: who
// finds none restores its own.
//
// A node with keys holds none: the content of a checkpoint would be in clear, in the
// kernel's memory and its writable layer, while nobody uses it.
type ahead struct {
	n     *Node
	class *kernelClass
	wake  chan struct{} // capacity 1

	mu struct {
		sync.Mutex
		closed  bool
		used    []*usedOrigin
		target  int           // of all together, as of the last look
		restore time.Duration // one takes; moving average
	}
}

// origin is what creates have in common that can take the same held kernels.
type origin struct {
	tenant, manifest string
	image            string // its file
	disk             int64  // the writable layer is as large as it was saved
	networked        bool   // with a device
}

// usedOrigin is an origin that sandboxes are, or will soon be, created from. Guarded by
// ahead.mu.
type usedOrigin struct {
	origin
	from      sandbox.Content
	container runtime.Container // of the last: its image, and limits until it is somebody's
	occasions int
	began     time.Time // the last of them
	demand    demand
	last      time.Time // create
	expected  int
	held      []*heldKernel // the longest first
	failures  int           // in a row
	notBefore time.Time     // the next attempt
}

// heldKernel is a kernel that was restored for nobody yet.
type heldKernel struct {
	runtime.Held
	cp    runtime.Checkpoint
	taken chan struct{} // closed when it is not in the pool any more
}

func newAhead(n *Node, c *kernelClass) *ahead {
	a := &ahead{n: n, class: c, wake: make(chan struct{}, 1)}
	a.mu.restore = 100 * time.Millisecond
	return a
}

// originOf is what b is created from, if kernels can be held of it.
func (a *ahead) originOf(b *box, from sandbox.Content) (o origin, ok bool) {
	n := a.n
	n.mu.Lock()
	c, sb, needs := b.container, b.sb, len(b.needs)
	n.mu.Unlock()
	switch {
	case a.class.Pool.Ahead <= 0 || !a.class.can.Hold || n.states == nil || n.sealed():
	case from.Manifest == "": // a fork's is gone when its children stand
	case needs+len(from.Needs)+len(c.Volumes)+len(c.Mounts)+len(sb.Spec.Volumes) > 0: // each is held by a sandbox
	case b.clock != nil || !from.Clock.IsZero(): // one that is deterministic begins where nobody was before
	case a.class.blanks.make == nil || a.class.blanks.keeperOf(from.Build) != nil:
	default:
		return origin{tenant: sb.Tenant, manifest: from.Manifest, image: c.Rootfs.Path, disk: c.Resources.Disk, networked: networked(sb.Spec.Network)}, true
	}
	return o, false
}

// take returns a kernel held of an origin, nil if there is none, and counts the create.
func (a *ahead) take(o origin, from sandbox.Content, c runtime.Container) *heldKernel {
	now := time.Now()
	var dead []*heldKernel
	defer func() {
		a.poke()
		for _, h := range dead {
			a.n.background(func() { a.n.discard(h) })
		}
	}()
	a.mu.Lock()
	defer a.mu.Unlock()
	u := a.getLocked(o)
	u.from, u.container, u.last = from, bare(c), now
	if now.Sub(u.began) >= occasion {
		u.occasions, u.began = u.occasions+1, now
	}
	u.demand.note(now)
	for len(u.held) > 0 {
		h := u.held[len(u.held)-1]
		u.dropLocked(h)
		select {
		case <-h.Done():
			dead = append(dead, h)
		default:
			return h
		}
	}
	return nil
}

// bare is what a kernel is restored with that is nobody's yet: nothing of the sandbox
// that c is of.
func bare(c runtime.Container) runtime.Container {
	return runtime.Container{Rootfs: c.Rootfs, Resources: c.Resources}
}

func (a *ahead) getLocked(o origin) *usedOrigin {
	i := slices.IndexFunc(a.mu.used, func(u *usedOrigin) bool { return u.origin == o })
	if i < 0 {
		i = len(a.mu.used)
		a.mu.used = append(a.mu.used, &usedOrigin{origin: o})
	}
	return a.mu.used[i]
}

// dropLocked takes a kernel out of the pool; false if it is not in it any more.
func (u *usedOrigin) dropLocked(h *heldKernel) bool {
	i := slices.Index(u.held, h)
	if i < 0 {
		return false
	}
	u.held = slices.Delete(u.held, i, i+1)
	close(h.taken)
	return true
}

// dropAllLocked takes all of an origin's out, for the caller to discard.
func (u *usedOrigin) dropAllLocked() []*heldKernel {
	all := slices.Clone(u.held)
	for _, h := range all {
		u.dropLocked(h)
	}
	return all
}

// expectedOrigin is one that somebody said will be created from.
type expectedOrigin struct {
	origin
	from      sandbox.Content
	container runtime.Container
	count     int
}

// expect replaces what is expected.
func (a *ahead) expect(all []expectedOrigin) {
	a.mu.Lock()
	defer a.mu.Unlock()
	defer a.poke()
	for _, u := range a.mu.used {
		u.expected = 0
	}
	for _, e := range all {
		u := a.getLocked(e.origin)
		u.expected += e.count
		if u.occasions == 0 {
			u.from, u.container = e.from, e.container
		}
	}
}

func (a *ahead) poke() {
	select {
	case a.wake <- struct{}{}:
	default:
	}
}

// counts are the held kernels there are and the number aimed at.
func (a *ahead) counts() (held, target int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, u := range a.mu.used {
		held += len(u.held)
	}
	return held, a.mu.target
}

// run holds what is worth it whenever no creator would feel that, and lets go of all in
// the end.
func (a *ahead) run(ctx context.Context) {
	defer a.close()
	for {
		again := time.After(poolTick)
		var free int64
		if a.used() { // else nobody need look at the machine
			free = a.n.freeMemory()
		}
		u, over := a.plan(time.Now(), free)
		for _, h := range over {
			a.n.discard(h)
		}
		if u != nil {
			again = time.After(blankRetry)
			if a.class.pool.satisfied() {
				a.restoreOne(ctx, u)
				a.poke()
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-a.wake:
		case <-again:
		}
	}
}

func (a *ahead) used() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.mu.used) > 0
}

// plan looks at what is used: it forgets what is not any more, says of what one should be
// restored next, nil = of nothing, and takes out what is too much.
func (a *ahead) plan(now time.Time, memory int64) (next *usedOrigin, over []*heldKernel) {
	a.mu.Lock()
	defer a.mu.Unlock()
	held := 0
	var uses []use
	a.mu.used = slices.DeleteFunc(a.mu.used, func(u *usedOrigin) bool {
		s := use{occasions: u.occasions, peak: u.demand.peakNow(now), rate: u.demand.rateNow(now), idle: now.Sub(u.last), expected: u.expected}
		if s.over() {
			over = append(over, u.dropAllLocked()...)
			return true
		}
		uses = append(uses, s)
		held += len(u.held)
		return false
	})
	targets := heldTargets(uses, heldBounds{most: a.class.Pool.Ahead, held: held, memory: memory, restore: a.mu.restore})
	a.mu.target = 0
	for i, u := range a.mu.used {
		a.mu.target += targets[i]
		for len(u.held) > targets[i] {
			h := u.held[0]
			u.dropLocked(h)
			over = append(over, h)
		}
		if len(u.held) < targets[i] && !now.Before(u.notBefore) && (next == nil || len(u.held) < len(next.held)) {
			next = u
		}
	}
	return next, over
}

// restoreOne holds one more kernel of an origin.
func (a *ahead) restoreOne(ctx context.Context, u *usedOrigin) {
	a.mu.Lock()
	from, c := u.from, u.container
	a.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, restoreTimeout)
	defer cancel()
	start := time.Now()
	h, err := a.hold(ctx, u.origin, from, c)
	a.mu.Lock()
	unwanted := a.mu.closed || !slices.Contains(a.mu.used, u) // its checkpoint was deleted meanwhile
	switch {
	case err != nil:
		u.failures++
		u.notBefore = time.Now().Add(backoff(u.failures))
		if ctx.Err() == nil {
			a.n.log.Warn("a kernel could not be restored ahead", "class", a.class.Name, "manifest", from.Manifest, "err", err)
		}
	case !unwanted:
		u.failures = 0
		a.mu.restore += (time.Since(start) - a.mu.restore) / 8
		u.held = append(u.held, h)
		a.n.tasks.Go(func() { a.watch(u, h) }) // run, which is here, is a task too
	}
	a.mu.Unlock()
	if err == nil && unwanted {
		a.n.discard(h)
	}
}

// watch notices a held kernel that dies before anybody takes it.
func (a *ahead) watch(u *usedOrigin, h *heldKernel) {
	select {
	case <-h.taken:
		return
	case <-h.Done():
	}
	a.mu.Lock()
	dropped := u.dropLocked(h)
	if dropped {
		u.failures++
		u.notBefore = time.Now().Add(backoff(u.failures))
	}
	a.mu.Unlock()
	if dropped {
		a.n.log.Warn("a kernel restored ahead died", "kernel", h.ID(), "class", a.class.Name)
		a.n.discard(h)
		a.poke()
	}
}

// hold restores a kernel for nobody yet. One with a device has a network that nothing
// leaves.
func (a *ahead) hold(ctx context.Context, o origin, from sandbox.Content, c runtime.Container) (_ *heldKernel, err error) {
	n := a.n
	dir, cp, release, err := n.states.use(ctx, from)
	if err != nil {
		return nil, err
	}
	defer release()
	if err := n.sameClass(a.class, cp.Class); err != nil {
		return nil, err
	}
	k, err := a.class.blanks.get(ctx, from.Build)
	if err != nil {
		return nil, err
	}
	holder, ok := k.(runtime.Holder)
	if !ok {
		a.class.blanks.giveBack(k, from.Build)
		return nil, a.class.unsupported("hold what was restored")
	}
	if o.networked {
		p, err := policy.Compile(sandbox.Network{Mode: sandbox.NetworkRules})
		if err == nil {
			c.Device, err = n.device(ctx, a.class, k.ID(), sandbox.Sandbox{}, p)
		}
		if err != nil {
			a.class.blanks.giveBack(k, from.Build)
			return nil, err
		}
		defer c.Device.File.Close()
	}
	h, err := holder.Hold(ctx, dir, cp, c)
	if err == nil {
		return &heldKernel{Held: h, cp: cp, taken: make(chan struct{})}, nil
	}
	n.removeNetwork(k.ID())
	if sandbox.ClassOf(err) == sandbox.Precondition { // the blank is as it was
		a.class.blanks.giveBack(k, from.Build)
	} else {
		n.kernels.remove(k.ID())
	}
	return nil, err
}

// begin makes a held kernel b's.
func (n *Node) begin(ctx context.Context, b *box, h *heldKernel) (runtime.Kernel, error) {
	n.mu.Lock()
	c, sb := b.container, b.sb
	n.mu.Unlock()
	if networked(sb.Spec.Network) {
		p, err := n.policyOf(b)
		if err != nil {
			return nil, err
		}
		box := n.cfg.Networks.Box(h.ID())
		if box == nil {
			return nil, sandbox.Errorf(sandbox.Unavailable, "node.restore", "the network of kernel %s is gone", h.ID())
		}
		i, err := n.interception(sb)
		if err != nil {
			return nil, err
		}
		box.Intercept(i)
		box.Set(p, sb.NetworkGeneration)
	}
	return h.Take(ctx, c)
}

// keepOnly lets go of what was restored from content that is gone.
func (a *ahead) keepOnly(kept map[string]bool) {
	a.mu.Lock()
	var gone []*heldKernel
	a.mu.used = slices.DeleteFunc(a.mu.used, func(u *usedOrigin) bool {
		if kept[u.manifest] {
			return false
		}
		gone = append(gone, u.dropAllLocked()...)
		return true
	})
	a.mu.Unlock()
	for _, h := range gone {
		a.n.discard(h)
	}
}

// clear lets go of all that is held, and says whether there was any. What is worth it is
// held again when there is memory for it.
func (a *ahead) clear() bool {
	a.mu.Lock()
	var all []*heldKernel
	for _, u := range a.mu.used {
		all = append(all, u.dropAllLocked()...)
	}
	a.mu.Unlock()
	for _, h := range all {
		a.n.discard(h)
	}
	return len(all) > 0
}

func (a *ahead) close() {
	a.mu.Lock()
	a.mu.closed = true
	a.mu.Unlock()
	a.clear()
}
