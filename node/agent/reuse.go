package agent

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// By default a kernel serves one sandbox and dies. Sandboxes that name a trust
// group (Spec.Reuse) have kernels of a class of their own, and a kernel that served
// one of them is vacated (runtime.Reuser) and rests for the next of the same group
// of the same tenant. What that means for who is in the group:
// docs/security-boundary.md.

const (
	// usesMost sandboxes are served by one kernel. What a sentry keeps of each
	// (numbers that go on counting, a heap that does not shrink) stays small, and a
	// sandbox that got a hold on its kernel does not keep it for long.
	usesMost = 64
	// restMost is how long a kernel rests: a trainer comes back within minutes, and
	// one that rests costs what an idle sandbox does.
	restMost = time.Minute
	// vacateTimeout bounds what takes 3 ms.
	vacateTimeout = 10 * time.Second
)

// trust is who may have a kernel one after another. The zero value is nobody.
type trust struct{ tenant, group string }

func trustOf(sb sandbox.Sandbox) trust {
	if sb.Spec.Reuse == "" {
		return trust{}
	}
	return trust{sb.Tenant, sb.Spec.Reuse}
}

// rests are the kernels of a class that are between two sandboxes.
type rests struct {
	most    int                  // that rest at a time
	discard func(runtime.Kernel) // destroys, seeing to it until it is done

	mu struct {
		sync.Mutex
		closed  bool
		resting []*resting // the longest first
	}
}

type resting struct {
	runtime.Kernel
	of    trust
	uses  int // sandboxes it has served
	timer *time.Timer
}

// take returns the kernel of a group that rested last, and how many sandboxes it has
// served; nil if none rests.
func (r *rests) take(of trust) (runtime.Kernel, int) {
	if of == (trust{}) {
		return nil, 0
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := len(r.mu.resting) - 1; i >= 0; i-- {
		k := r.mu.resting[i]
		if k.of != of || isDone(k) || !k.timer.Stop() {
			continue // the timer has it, or gets it
		}
		r.mu.resting = slices.Delete(r.mu.resting, i, i+1)
		return k.Kernel, k.uses
	}
	return nil, 0
}

// put lets a kernel rest, the longest resting one going for it if there are too many.
func (r *rests) put(of trust, k runtime.Kernel, uses int) {
	r.mu.Lock()
	if r.mu.closed {
		r.mu.Unlock()
		r.discard(k)
		return
	}
	n := &resting{Kernel: k, of: of, uses: uses}
	n.timer = time.AfterFunc(restMost, func() { r.drop(n) })
	r.mu.resting = append(r.mu.resting, n)
	var over []*resting
	if more := len(r.mu.resting) - r.most; more > 0 {
		over = slices.Clone(r.mu.resting[:more])
	}
	r.mu.Unlock()
	for _, k := range over {
		r.drop(k)
	}
}

// drop destroys a kernel that rests, unless somebody has it by now.
func (r *rests) drop(k *resting) {
	r.mu.Lock()
	i := slices.Index(r.mu.resting, k)
	if i >= 0 {
		r.mu.resting = slices.Delete(r.mu.resting, i, i+1)
		k.timer.Stop()
	}
	r.mu.Unlock()
	if i >= 0 {
		r.discard(k.Kernel)
	}
}

// clear destroys all that rest, and says whether there were any.
func (r *rests) clear() bool {
	r.mu.Lock()
	all := slices.Clone(r.mu.resting)
	r.mu.Unlock()
	for _, k := range all {
		r.drop(k)
	}
	return len(all) > 0
}

func (r *rests) close() {
	r.mu.Lock()
	r.mu.closed = true
	r.mu.Unlock()
	r.clear()
}

// takeKernel is a kernel for b: one of its group, or a new one.
func (n *Node) takeKernel(ctx context.Context, b *box) (runtime.Kernel, error) {
	of := trustOf(b.sb)
	if b.class.rests != nil {
		if k, uses := b.class.rests.take(of); k != nil {
			b.uses = uses + 1
			return k, nil
		}
	}
	k, uses, err := b.class.pool.takeFor(ctx, b.sb.Tenant, of)
	b.uses = uses + 1
	return k, err
}

// reusable says whether the kernel of a sandbox that ends may serve another. Only an
// end that came from outside is clean: of any other nobody knows what it did to
// its kernel. Neither a restored kernel nor an adopted one is: what was done with
// it before is not known here.
func (n *Node) reusable(b *box, k runtime.Kernel, end sandbox.End) bool {
	switch end.Cause {
	case sandbox.KilledByUser, sandbox.TTL, sandbox.Idle, sandbox.LeaseExpired, sandbox.ClientEnded:
	default:
		return false
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	return b.class.rests != nil && trustOf(b.sb) != (trust{}) && b.placed == k && b.uses < usesMost && b.sb.Standby == sandbox.Awake &&
		b.sb.Spec.Network.Mode == sandbox.NetworkNone && len(b.sb.Spec.Volumes) == 0 && len(b.needs) == 0 && !n.mu.closing && !isDone(k)
}

// vacate has a kernel rest for the next of its group; false if it must be destroyed.
func (n *Node) vacate(b *box, k runtime.Kernel, end sandbox.End) bool {
	if !n.reusable(b, k, end) {
		return false
	}
	ctx, cancel := context.WithTimeout(context.Background(), vacateTimeout)
	defer cancel()
	// A call that is under way must not come to the next sandbox.
	k.Guest().Retire()
	if !n.calmDown(ctx, b) {
		n.log.Warn("a kernel is not used again: calls to its sandbox do not end", "kernel", k.ID())
		return false
	}
	if err := k.(runtime.Reuser).Vacate(ctx); err != nil {
		n.log.Info("a kernel is not used again", "kernel", k.ID(), "err", err)
		return false
	}
	of := trustOf(b.sb)
	if !b.class.pool.offer(of, k, b.uses) {
		b.class.rests.put(of, k, b.uses)
	}
	return true
}

// calmDown waits for the calls to a sandbox that has ended.
func (n *Node) calmDown(ctx context.Context, b *box) bool {
	n.mu.Lock()
	var calm chan struct{}
	if b.active > 0 {
		calm = make(chan struct{})
		b.calm = calm
	}
	n.mu.Unlock()
	if calm == nil {
		return true
	}
	select {
	case <-calm:
		return true
	case <-ctx.Done():
		return false
	}
}
