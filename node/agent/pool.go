package agent

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/internal/notify"
	"github.com/cove-sandbox/cove/quota"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

const (
	poolTick    = 5 * time.Second  // fading demand is looked at this often
	shrinkAfter = 30 * time.Second // of no create at all
	bootTimeout = 30 * time.Second // a loaded machine boots in a second at worst
	// After this many boots failed in a row creators are told at once
	// instead of each waiting for a failure of its own.
	trippedAt  = 3
	backoffMin = 100 * time.Millisecond
	backoffMax = 30 * time.Second
)

// pool holds booted kernels of a class ahead of demand. One goroutine (run) starts every
// boot; creators that find none ready queue, in turn between tenants and first come,
// first served within one, and are given the next kernels to come up, whatever they
// were booted for.
type pool struct {
	cfg     PoolSettings
	boot    func(ctx context.Context, id string) (runtime.Kernel, error)
	discard func(runtime.Kernel) // destroys, seeing to it until it is done
	memory  func() int64         // free above the host's reserve
	idle    func() int           // cores that nobody uses; nil = none
	spare   func() int           // how many may be warm beside those in use; nil = any number
	creates *creates
	log     *slog.Logger

	ctx    context.Context
	cancel context.CancelFunc
	tasks  sync.WaitGroup // run, boots, watches
	wake   chan struct{}  // capacity 1

	mu struct {
		sync.Mutex
		closed    bool
		pauses    int // >0: no boot may start
		ready     []*warmKernel
		waiters   []*waiter   // in order of arrival
		turns     quota.Queue // of the same: who is next
		booting   int
		bootEnded notify.Change // of each boot
		putOff    time.Time     // since when a background boot has been waiting
		demand    demand
		expected  int // see Node.Expect
		target    int
		bootTime  time.Duration // moving average
		free      int64         // cached memory()
		freeAt    time.Time
		idle      int       // cached idle(), and the cores that boots had then
		spare     int       // cached spare()
		disabled  error     // why the class takes no creates; nil = it does
		failures  int       // boots failed in a row
		deaths    int       // warm kernels that died, since the last take
		bootErr   error     // of the last failed boot
		fillAt    time.Time // no background boot before
		tripped   time.Time // creators are refused until then
	}
}

// warmKernel is a booted kernel that nobody has taken yet.
type warmKernel struct {
	runtime.Kernel
	taken chan struct{}
}

// waiter is a creator in the queue. Its channel gets exactly one grant, unless
// it leaves the queue first.
type waiter struct {
	of       trust // whose kernels it may also have; zero = nobody's
	ticket   int64 // in turns
	grant    chan grant
	failures int // boots that failed while it was first in line
}

type grant struct {
	kernel runtime.Kernel
	uses   int // sandboxes that had it before
	err    error
}

func newPool(cfg PoolSettings, boot func(context.Context, string) (runtime.Kernel, error), discard func(runtime.Kernel),
	memory func() int64, creates *creates, log *slog.Logger) *pool {
	ctx, cancel := context.WithCancel(context.Background())
	p := &pool{cfg: cfg, boot: boot, discard: discard, memory: memory, creates: creates, log: log, ctx: ctx, cancel: cancel, wake: make(chan struct{}, 1)}
	p.mu.bootTime = 100 * time.Millisecond
	p.mu.spare = math.MaxInt
	creates.pools = append(creates.pools, p)
	return p
}

func (p *pool) start() { p.tasks.Go(p.run) }

// close ends boots under way and destroys the warm kernels.
func (p *pool) close() {
	p.mu.Lock()
	p.mu.closed = true
	p.refuseLocked(errClosing)
	p.mu.Unlock()
	p.cancel()
	p.tasks.Wait()
	for _, k := range p.mu.ready {
		p.discard(k.Kernel)
	}
	p.mu.ready = nil
}

// take returns a kernel that nobody else has: at once where one is ready,
// else the next to boot after those who came before.
func (p *pool) take(ctx context.Context) (runtime.Kernel, error) {
	k, _, err := p.takeFor(ctx, "", trust{})
	return k, err
}

// takeFor is take for a tenant, whose turn it waits for, and for one of a trust
// group, who may also get a kernel that others of it let go meanwhile: uses is how
// many had it.
func (p *pool) takeFor(ctx context.Context, tenant string, of trust) (k runtime.Kernel, uses int, err error) {
	now := time.Now()
	p.mu.Lock()
	if err := p.usableLocked(); err != nil {
		p.mu.Unlock()
		return nil, 0, err
	}
	p.mu.demand.note(now)
	if k := p.popLocked(); k != nil {
		p.mu.deaths = 0
		p.mu.Unlock()
		p.poke()
		return k, 0, nil
	}
	if now.Before(p.mu.tripped) {
		err := p.bootErrorLocked(p.mu.tripped.Sub(now))
		p.mu.Unlock()
		return nil, 0, err
	}
	w := &waiter{of: of, ticket: p.mu.turns.Join(tenant, 1), grant: make(chan grant, 1)}
	p.mu.waiters = append(p.mu.waiters, w)
	p.mu.Unlock()
	p.poke()

	select {
	case g := <-w.grant:
		return g.kernel, g.uses, g.err
	case <-ctx.Done():
	}
	p.leave(w)
	return nil, 0, contextError("node.create", ctx)
}

// offer gives a kernel that served one of a group to the first of it in line; false
// if none is.
func (p *pool) offer(of trust, k runtime.Kernel, uses int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	i := slices.IndexFunc(p.mu.waiters, func(w *waiter) bool { return of != trust{} && w.of == of })
	if i < 0 {
		return false
	}
	p.serveLocked(i, grant{kernel: k, uses: uses})
	return true
}

// serveLocked gives one in line what it waits for.
func (p *pool) serveLocked(i int, g grant) {
	w := p.mu.waiters[i]
	p.mu.waiters = slices.Delete(p.mu.waiters, i, i+1)
	p.mu.turns.Served(w.ticket)
	w.grant <- g
}

// leave takes a creator out of the queue. What it was granted meanwhile goes
// to the next in line.
func (p *pool) leave(w *waiter) {
	p.mu.Lock()
	if i := slices.Index(p.mu.waiters, w); i >= 0 {
		p.mu.waiters = slices.Delete(p.mu.waiters, i, i+1)
		p.mu.turns.Leave(w.ticket)
		p.mu.Unlock()
		return
	}
	g := <-w.grant                    // has come: who is out of the queue was granted something
	over := p.mu.closed || g.uses > 0 // one that served a group is nobody else's
	if g.kernel != nil && !over {
		p.grantLocked(g.kernel)
	}
	p.mu.Unlock()
	if g.kernel != nil && over {
		p.discard(g.kernel)
	}
}

// popLocked takes the newest ready kernel that is alive. Newest, so that the
// older ones, which a shrinking pool destroys first, stay untouched.
func (p *pool) popLocked() runtime.Kernel {
	for n := len(p.mu.ready); n > 0; n = len(p.mu.ready) {
		w := p.mu.ready[n-1]
		select {
		case <-w.Done():
			p.mu.ready = p.mu.ready[:n-1]
			p.removeDeadLocked(w)
			continue
		default:
		}
		p.mu.ready = p.mu.ready[:n-1]
		close(w.taken)
		return w.Kernel
	}
	return nil
}

// grantLocked gives a kernel to whose turn it is, or keeps it.
func (p *pool) grantLocked(k runtime.Kernel) {
	if heads := p.mu.turns.Heads(); len(heads) > 0 {
		next := slices.IndexFunc(p.mu.waiters, func(w *waiter) bool { return w.ticket == heads[0] })
		p.serveLocked(next, grant{kernel: k})
		return
	}
	w := &warmKernel{Kernel: k, taken: make(chan struct{})}
	p.mu.ready = append(p.mu.ready, w)
	p.tasks.Go(func() { p.watch(w) })
}

// watch notices a warm kernel that dies before anybody takes it.
func (p *pool) watch(w *warmKernel) {
	select {
	case <-w.taken:
		return
	case <-p.ctx.Done():
		return
	case <-w.Done():
	}
	p.mu.Lock()
	if i := slices.Index(p.mu.ready, w); i >= 0 {
		p.mu.ready = slices.Delete(p.mu.ready, i, i+1)
		p.removeDeadLocked(w)
	}
	p.mu.Unlock()
	p.poke()
}

func (p *pool) removeDeadLocked(w *warmKernel) {
	p.mu.deaths++
	p.mu.fillAt = time.Now().Add(backoff(p.mu.deaths))
	exit := w.Exit()
	p.log.Warn("pool: a warm kernel died", "kernel", w.ID(), "cause", exit.Cause, "detail", exit.Detail)
	p.tasks.Go(func() { p.discard(w.Kernel) })
}

func (p *pool) poke() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// run decides, sleeps until a decision may change, and decides again.
func (p *pool) run() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		p.refreshMemory()
		p.refreshSpare()
		p.mu.Lock()
		next := p.stepLocked(time.Now())
		p.mu.Unlock()
		timer.Reset(next)
		select {
		case <-p.ctx.Done():
			return
		case <-p.wake:
		case <-timer.C:
		}
	}
}

// refreshMemory keeps the host's free memory and idle cores at most a second old,
// read outside the lock.
func (p *pool) refreshMemory() {
	now := time.Now()
	p.mu.Lock()
	fresh := !p.mu.freeAt.IsZero() && now.Sub(p.mu.freeAt) < time.Second
	p.mu.Unlock()
	if fresh {
		return
	}
	free, idle := p.memory(), 0
	if p.idle != nil {
		idle = p.idle()
	}
	p.mu.Lock()
	p.mu.free, p.mu.freeAt, p.mu.idle = free, now, idle+p.mu.booting // a boot has a core of its own
	p.mu.Unlock()
}

// refreshSpare counts what a class that is limited has left. Not under the lock:
// Node.mu comes before it.
func (p *pool) refreshSpare() {
	if p.spare == nil {
		return
	}
	spare := p.spare()
	p.mu.Lock()
	p.mu.spare = spare
	p.mu.Unlock()
}

// disable refuses creates and boots nothing until enable.
func (p *pool) disable(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.disabled = err
}

// enable is the end of disable, and says whether there was one.
func (p *pool) enable() bool {
	p.mu.Lock()
	was := p.mu.disabled
	p.mu.disabled = nil
	p.mu.Unlock()
	p.poke()
	return was != nil
}

// usable says why nothing can be had of the class; nil = something can.
func (p *pool) usable() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.usableLocked()
}

func (p *pool) usableLocked() error {
	switch {
	case p.mu.closed:
		return errClosing
	case p.mu.disabled != nil:
		return &sandbox.Error{Class: sandbox.Unavailable, Op: "node.boot", Msg: "this class of kernels does not work", Err: p.mu.disabled,
			RetryAfter: backoffMax, Hint: "run cove doctor on the node; its log has the reason"}
	}
	return nil
}

// retargetLocked decides how many kernels are to be warm.
func (p *pool) retargetLocked(now time.Time) {
	p.mu.target = warmTarget(sizing{min: p.cfg.Min, max: p.cfg.Max, expected: p.mu.expected, peak: p.mu.demand.peakNow(now), rate: p.mu.demand.rateNow(now),
		bootTime: p.mu.bootTime, ready: len(p.mu.ready), freeMemory: p.mu.free, kernelMemory: p.cfg.KernelMemory})
	p.mu.target = min(p.mu.target, p.mu.spare)
}

// stepLocked starts the boots that may start now, lets go of what is too much,
// and says when to look again.
func (p *pool) stepLocked(now time.Time) time.Duration {
	p.retargetLocked(now)
	if p.mu.pauses > 0 || p.usableLocked() != nil {
		return poolTick
	}
	creating, created := p.creates.now()
	for p.mu.booting < min(p.cfg.Parallel, len(p.mu.waiters)) {
		p.bootLocked()
	}
	deficit := p.mu.target - len(p.mu.ready) - max(p.mu.booting-len(p.mu.waiters), 0)
	if deficit <= 0 || len(p.mu.waiters) > 0 {
		p.mu.putOff = time.Time{}
		if surplus := len(p.mu.ready) - p.mu.target; surplus > 0 && (p.mu.free < 0 || len(p.mu.ready) > p.mu.spare || now.Sub(created) >= shrinkAfter) {
			w := p.mu.ready[0]
			p.mu.ready = p.mu.ready[1:]
			close(w.taken)
			p.tasks.Go(func() { p.discard(w.Kernel); p.poke() })
		}
		return poolTick
	}
	for deficit > 0 && p.mu.booting < max(p.cfg.Background, min(p.mu.idle, p.cfg.Parallel)) {
		if wait := p.mu.fillAt.Sub(now); wait > 0 {
			return min(wait, poolTick)
		}
		if p.mu.putOff.IsZero() {
			p.mu.putOff = now
		}
		if busy := creating > 0 || now.Sub(created) < p.cfg.Grace; busy {
			if wait := p.mu.putOff.Add(p.cfg.Patience).Sub(now); wait > 0 {
				if creating == 0 {
					wait = min(wait, created.Add(p.cfg.Grace).Sub(now))
				}
				return wait
			}
		}
		p.mu.putOff = now
		p.bootLocked()
		deficit--
	}
	return poolTick
}

func (p *pool) bootLocked() {
	p.mu.booting++
	p.tasks.Go(func() {
		start := time.Now()
		ctx, cancel := context.WithTimeout(p.ctx, bootTimeout)
		defer cancel()
		k, err := p.boot(ctx, newKernelID())
		if r, ok := k.(runtime.Rehearser); ok && err == nil && !p.awaited() {
			if err = r.Rehearse(ctx); err != nil {
				p.discard(k)
			}
		}

		p.mu.Lock()
		p.mu.booting--
		p.mu.bootEnded.Tell()
		switch {
		case err != nil:
			p.failedLocked(err)
		case p.mu.closed:
			p.mu.Unlock()
			p.discard(k)
			return
		default:
			p.mu.failures, p.mu.tripped = 0, time.Time{}
			p.mu.bootTime += (time.Since(start) - p.mu.bootTime) / 8
			p.grantLocked(k)
		}
		p.mu.Unlock()
		p.poke()
	})
}

// awaited says that somebody waits for a kernel.
func (p *pool) awaited() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.mu.waiters) > 0
}

// failedLocked tells creators about a failed boot: the first in line after its
// second, all of them once boots only fail.
func (p *pool) failedLocked(err error) {
	if p.mu.closed {
		return
	}
	now := time.Now()
	p.mu.failures++
	p.mu.bootErr = err
	wait := backoff(p.mu.failures)
	p.mu.fillAt = now.Add(wait)
	p.log.Error("pool: boot failed", "err", err, "in_a_row", p.mu.failures, "retry_in", wait)
	if p.mu.failures >= trippedAt {
		p.mu.tripped = p.mu.fillAt
		p.refuseLocked(p.bootErrorLocked(wait))
		return
	}
	if len(p.mu.waiters) > 0 {
		if w := p.mu.waiters[0]; w.failures > 0 {
			p.serveLocked(0, grant{err: p.bootErrorLocked(wait)})
		} else {
			w.failures++
		}
	}
}

func (p *pool) refuseLocked(err error) {
	for _, w := range p.mu.waiters {
		p.mu.turns.Leave(w.ticket)
		w.grant <- grant{err: err}
	}
	p.mu.waiters = nil
}

func (p *pool) bootErrorLocked(retry time.Duration) error {
	return &sandbox.Error{Class: sandbox.Unavailable, Op: "node.boot", Msg: "no kernel could be booted", Err: p.mu.bootErr,
		RetryAfter: retry, Hint: "run cove doctor on the node; its log has the reason"}
}

// quiesce runs f while no boot is under way, as Sweep needs.
func (p *pool) quiesce(ctx context.Context, f func() error) error {
	p.mu.Lock()
	p.mu.pauses++
	defer func() {
		p.mu.Lock()
		p.mu.pauses--
		p.mu.Unlock()
		p.poke()
	}()
	for p.mu.booting > 0 {
		ended := p.mu.bootEnded.Next()
		p.mu.Unlock()
		select {
		case <-ended:
		case <-ctx.Done():
			return contextError("node.gc", ctx)
		}
		p.mu.Lock()
	}
	p.mu.Unlock()
	return f()
}

// expect has so many kernels be warm, within the pool's bounds.
func (p *pool) expect(kernels int) {
	p.mu.Lock()
	p.mu.expected = kernels
	p.retargetLocked(time.Now()) // now, for who asks how many there will be
	p.mu.Unlock()
	p.poke()
}

// counts are the warm kernels there are and the number aimed at.
func (p *pool) counts() (ready, target int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.mu.ready), p.mu.target
}

// satisfied says that the pool has what it wants and nobody is creating.
func (p *pool) satisfied() bool {
	creating, created := p.creates.now()
	p.mu.Lock()
	defer p.mu.Unlock()
	return creating == 0 && p.usableLocked() == nil && len(p.mu.waiters) == 0 && p.mu.booting == 0 && len(p.mu.ready) >= p.mu.target &&
		time.Since(created) >= p.cfg.Grace
}

// busy says whether a creator could notice a pause.
func (p *pool) busy() bool {
	creating, _ := p.creates.now()
	p.mu.Lock()
	defer p.mu.Unlock()
	return creating > 0 || len(p.mu.waiters) > 0
}

// backoff doubles from backoffMin with each failure up to backoffMax.
func backoff(failures int) time.Duration {
	return min(backoffMin<<min(max(failures-1, 0), 20), backoffMax)
}

var errClosing = &sandbox.Error{Class: sandbox.Unavailable, Op: "node", Msg: "the node is shutting down", Hint: "retry when it is back"}

// contextError gives a done context its class.
func contextError(op string, ctx context.Context) error {
	class := sandbox.Canceled
	if ctx.Err() == context.DeadlineExceeded {
		class = sandbox.DeadlineReached
	}
	return sandbox.Errorf(class, op, "%w", fmt.Errorf("gave up waiting: %w", context.Cause(ctx)))
}
