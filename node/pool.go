package node

import (
	"context"
	"fmt"
	"log/slog"
	goruntime "runtime"
	"slices"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// PoolSettings bound the warm kernels. Zero fields take the defaults.
type PoolSettings struct {
	Min int // warm kernels held even when nobody comes; default 4
	Max int // default 256, at most 1/20 of the memory
	// Blank kernels held beside them (see blanks); default 1, -1 = none.
	Blank int
	// Parallel boots for creators that wait; default the number of cores: a
	// boot is CPU-bound (66 ms), more at once only make each one slower.
	Parallel int
	// Background boots ahead of demand; default half the cores, so that they
	// do not take the CPU from what sandboxes do.
	Background int
	// Grace after a create before the next background boot: the first exec
	// comes right behind a create and must not share its core with a boot.
	Grace time.Duration // default 20 ms
	// Patience is the longest a background boot is put off by creates.
	Patience     time.Duration // default 250 ms
	KernelMemory int64         // of one warm kernel; default 12 MiB
}

func (s PoolSettings) withDefaults(memory int64) PoolSettings {
	cores := goruntime.NumCPU()
	def := func(p *int, v int) {
		if *p == 0 {
			*p = v
		}
	}
	if s.KernelMemory == 0 {
		s.KernelMemory = 12 << 20
	}
	def(&s.Min, 4)
	def(&s.Blank, 1)
	def(&s.Max, min(256, max(s.Min, int(memory/20/s.KernelMemory))))
	def(&s.Parallel, cores)
	def(&s.Background, max(1, cores/2))
	if s.Grace == 0 {
		s.Grace = 20 * time.Millisecond
	}
	if s.Patience == 0 {
		s.Patience = 250 * time.Millisecond
	}
	return s
}

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

// pool holds booted kernels ahead of demand. One goroutine (run) starts every
// boot; creators that find none ready queue first come, first served, and are
// given the next kernels to come up, whatever they were booted for.
type pool struct {
	cfg     PoolSettings
	boot    func(ctx context.Context, id string) (runtime.Kernel, error)
	discard func(runtime.Kernel) // destroys, seeing to it until it is done
	memory  func() int64         // free above the host's reserve
	log     *slog.Logger

	ctx    context.Context
	cancel context.CancelFunc
	tasks  sync.WaitGroup // run, boots, watches
	wake   chan struct{}  // capacity 1

	mu        sync.Mutex
	closed    bool
	pauses    int // >0: no boot may start
	ready     []*warmKernel
	waiters   []*waiter
	booting   int
	bootEnded chan struct{} // closed and replaced at the end of each boot
	creating  int           // creates under way
	created   time.Time     // end of the last one
	putOff    time.Time     // since when a background boot has been waiting
	demand    demand
	target    int
	bootTime  time.Duration // moving average
	free      int64         // cached memory()
	freeAt    time.Time
	failures  int       // boots failed in a row
	deaths    int       // warm kernels that died, since the last take
	bootErr   error     // of the last failed boot
	fillAt    time.Time // no background boot before
	tripped   time.Time // creators are refused until then
}

// warmKernel is a booted kernel that nobody has taken yet.
type warmKernel struct {
	runtime.Kernel
	taken chan struct{}
}

// waiter is a creator in the queue. Its channel gets exactly one grant, unless
// it leaves the queue first.
type waiter struct {
	grant    chan grant
	failures int // boots that failed while it was first in line
}

type grant struct {
	kernel runtime.Kernel
	err    error
}

func newPool(cfg PoolSettings, boot func(context.Context, string) (runtime.Kernel, error), discard func(runtime.Kernel),
	memory func() int64, log *slog.Logger) *pool {
	ctx, cancel := context.WithCancel(context.Background())
	return &pool{cfg: cfg, boot: boot, discard: discard, memory: memory, log: log, ctx: ctx, cancel: cancel,
		wake: make(chan struct{}, 1), bootEnded: make(chan struct{}), bootTime: 100 * time.Millisecond}
}

func (p *pool) start() { p.tasks.Go(p.run) }

// close ends boots under way and destroys the warm kernels.
func (p *pool) close() {
	p.mu.Lock()
	p.closed = true
	p.refuseLocked(errClosing)
	p.mu.Unlock()
	p.cancel()
	p.tasks.Wait()
	for _, k := range p.ready {
		p.discard(k.Kernel)
	}
	p.ready = nil
}

// begin and end bracket a create, which background boots make room for.
func (p *pool) begin() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.creating++
}

func (p *pool) end() {
	p.mu.Lock()
	p.creating--
	p.created = time.Now()
	p.mu.Unlock()
	p.poke()
}

// take returns a kernel that nobody else has: at once where one is ready,
// else the next to boot after those who came before.
func (p *pool) take(ctx context.Context) (runtime.Kernel, error) {
	now := time.Now()
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return nil, errClosing
	}
	p.demand.note(now)
	if k := p.popLocked(); k != nil {
		p.deaths = 0
		p.mu.Unlock()
		p.poke()
		return k, nil
	}
	if now.Before(p.tripped) {
		err := p.bootErrorLocked(p.tripped.Sub(now))
		p.mu.Unlock()
		return nil, err
	}
	w := &waiter{grant: make(chan grant, 1)}
	p.waiters = append(p.waiters, w)
	p.mu.Unlock()
	p.poke()

	select {
	case g := <-w.grant:
		return g.kernel, g.err
	case <-ctx.Done():
	}
	p.leave(w)
	return nil, contextError("node.create", ctx)
}

// leave takes a creator out of the queue. What it was granted meanwhile goes
// to the next in line.
func (p *pool) leave(w *waiter) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if i := slices.Index(p.waiters, w); i >= 0 {
		p.waiters = slices.Delete(p.waiters, i, i+1)
		return
	}
	g := <-w.grant
	switch {
	case g.kernel == nil:
	case p.closed:
		go p.discard(g.kernel)
	default:
		p.grantLocked(g.kernel)
	}
}

// popLocked takes the newest ready kernel that is alive. Newest, so that the
// older ones, which a shrinking pool destroys first, stay untouched.
func (p *pool) popLocked() runtime.Kernel {
	for n := len(p.ready); n > 0; n = len(p.ready) {
		w := p.ready[n-1]
		select {
		case <-w.Done():
			p.ready = p.ready[:n-1]
			p.buryLocked(w)
			continue
		default:
		}
		p.ready = p.ready[:n-1]
		close(w.taken)
		return w.Kernel
	}
	return nil
}

// grantLocked gives a kernel to the first in line, or keeps it.
func (p *pool) grantLocked(k runtime.Kernel) {
	if len(p.waiters) > 0 {
		w := p.waiters[0]
		p.waiters = p.waiters[1:]
		w.grant <- grant{kernel: k}
		return
	}
	w := &warmKernel{Kernel: k, taken: make(chan struct{})}
	p.ready = append(p.ready, w)
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
	if i := slices.Index(p.ready, w); i >= 0 {
		p.ready = slices.Delete(p.ready, i, i+1)
		p.buryLocked(w)
	}
	p.mu.Unlock()
	p.poke()
}

func (p *pool) buryLocked(w *warmKernel) {
	p.deaths++
	p.fillAt = time.Now().Add(backoff(p.deaths))
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

// refreshMemory keeps the host's free memory at most a second old, read
// outside the lock.
func (p *pool) refreshMemory() {
	now := time.Now()
	p.mu.Lock()
	fresh := !p.freeAt.IsZero() && now.Sub(p.freeAt) < time.Second
	p.mu.Unlock()
	if fresh {
		return
	}
	free := p.memory()
	p.mu.Lock()
	p.free, p.freeAt = free, now
	p.mu.Unlock()
}

// stepLocked starts the boots that may start now, lets go of what is too much,
// and says when to look again.
func (p *pool) stepLocked(now time.Time) time.Duration {
	p.target = warmTarget(sizing{min: p.cfg.Min, max: p.cfg.Max, peak: p.demand.peakNow(now), rate: p.demand.rateNow(now),
		bootTime: p.bootTime, ready: len(p.ready), freeMemory: p.free, kernelMemory: p.cfg.KernelMemory})
	if p.pauses > 0 || p.closed {
		return poolTick
	}
	for p.booting < min(p.cfg.Parallel, len(p.waiters)) {
		p.bootLocked()
	}
	deficit := p.target - len(p.ready) - max(p.booting-len(p.waiters), 0)
	if deficit <= 0 || len(p.waiters) > 0 {
		p.putOff = time.Time{}
		if surplus := len(p.ready) - p.target; surplus > 0 && (p.free < 0 || now.Sub(p.created) >= shrinkAfter) {
			w := p.ready[0]
			p.ready = p.ready[1:]
			close(w.taken)
			p.tasks.Go(func() { p.discard(w.Kernel); p.poke() })
		}
		return poolTick
	}
	for deficit > 0 && p.booting < p.cfg.Background {
		if wait := p.fillAt.Sub(now); wait > 0 {
			return min(wait, poolTick)
		}
		if p.putOff.IsZero() {
			p.putOff = now
		}
		if busy := p.creating > 0 || now.Sub(p.created) < p.cfg.Grace; busy {
			if wait := p.putOff.Add(p.cfg.Patience).Sub(now); wait > 0 {
				if p.creating == 0 {
					wait = min(wait, p.created.Add(p.cfg.Grace).Sub(now))
				}
				return wait
			}
		}
		p.putOff = now
		p.bootLocked()
		deficit--
	}
	return poolTick
}

func (p *pool) bootLocked() {
	p.booting++
	p.tasks.Go(func() {
		start := time.Now()
		ctx, cancel := context.WithTimeout(p.ctx, bootTimeout)
		defer cancel()
		k, err := p.boot(ctx, newKernelID())

		p.mu.Lock()
		p.booting--
		close(p.bootEnded)
		p.bootEnded = make(chan struct{})
		switch {
		case err != nil:
			p.failedLocked(err)
		case p.closed:
			p.mu.Unlock()
			p.discard(k)
			return
		default:
			p.failures, p.tripped = 0, time.Time{}
			p.bootTime += (time.Since(start) - p.bootTime) / 8
			p.grantLocked(k)
		}
		p.mu.Unlock()
		p.poke()
	})
}

// failedLocked tells creators about a failed boot: the first in line after its
// second, all of them once boots only fail.
func (p *pool) failedLocked(err error) {
	if p.closed {
		return
	}
	now := time.Now()
	p.failures++
	p.bootErr = err
	wait := backoff(p.failures)
	p.fillAt = now.Add(wait)
	p.log.Error("pool: boot failed", "err", err, "in_a_row", p.failures, "retry_in", wait)
	if p.failures >= trippedAt {
		p.tripped = p.fillAt
		p.refuseLocked(p.bootErrorLocked(wait))
		return
	}
	if len(p.waiters) > 0 {
		if w := p.waiters[0]; w.failures > 0 {
			p.waiters = p.waiters[1:]
			w.grant <- grant{err: p.bootErrorLocked(wait)}
		} else {
			w.failures++
		}
	}
}

func (p *pool) refuseLocked(err error) {
	for _, w := range p.waiters {
		w.grant <- grant{err: err}
	}
	p.waiters = nil
}

func (p *pool) bootErrorLocked(retry time.Duration) error {
	return &sandbox.Error{Class: sandbox.Unavailable, Op: "node.boot", Msg: "no kernel could be booted", Err: p.bootErr,
		RetryAfter: retry, Hint: "run cove doctor on the node; its log has the reason"}
}

// quiesce runs f while no boot is under way, as Sweep needs.
func (p *pool) quiesce(ctx context.Context, f func() error) error {
	p.mu.Lock()
	p.pauses++
	defer func() {
		p.mu.Lock()
		p.pauses--
		p.mu.Unlock()
		p.poke()
	}()
	for p.booting > 0 {
		ended := p.bootEnded
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

// counts are the warm kernels there are and the number aimed at.
func (p *pool) counts() (ready, target int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.ready), p.target
}

// satisfied says that the pool has what it wants and nobody is creating.
func (p *pool) satisfied() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.creating == 0 && len(p.waiters) == 0 && p.booting == 0 && len(p.ready) >= p.target &&
		time.Since(p.created) >= p.cfg.Grace
}

// busy says whether a creator could notice a pause.
func (p *pool) busy() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.creating > 0 || len(p.waiters) > 0
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
