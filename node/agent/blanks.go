package agent

import (
	"context"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// blanks is the second pool of a class: kernels made half-way (runtime.Blanker). A memory
// snapshot can only be restored into one of these; until something asks for
// that, they give a boot for a waiting creator a head start of 30-45 ms. Few
// are enough, because a blank is replaced as soon as the machine has a moment.
type blanks struct {
	n     *Node
	class *kernelClass
	make  runtime.Blanker // nil: the driver has none and this holds nothing
	base  int             // held when nobody comes
	wake  chan struct{}   // capacity 1

	// making is read-locked while one is being made, locked while the driver is
	// swept.
	making sync.RWMutex

	mu struct {
		sync.Mutex
		ready []runtime.Blank
		want  int       // base, and more after somebody found none
		soon  int       // that callers expect to take: see Node.Expect
		last  time.Time // of the demand that raised it
	}
}

const (
	// mostBlanks are held after a burst of restores; a fork of eight is usual.
	mostBlanks = 8
	// blankFade without a restore takes the pool back to its base.
	blankFade = time.Minute
)

// blankRetry is how long a failed or put-off attempt waits for the next.
const blankRetry = 250 * time.Millisecond

func newBlanks(n *Node, c *kernelClass) *blanks {
	maker, _ := c.Driver.(runtime.Blanker)
	want := c.Pool.Blank
	if maker == nil {
		want = 0
	}
	b := &blanks{n: n, class: c, make: maker, base: want, wake: make(chan struct{}, 1)}
	b.mu.want = want
	return b
}

// keeperOf is who makes a blank of a build that those of the pool are not; nil
// where they are.
func (b *blanks) keeperOf(build string) runtime.BuildKeeper {
	if keeper, ok := b.make.(runtime.BuildKeeper); ok && !keeper.Fits(build) {
		return keeper
	}
	return nil
}

// get returns a blank kernel for a checkpoint of a build, made now if none is
// ready.
func (b *blanks) get(ctx context.Context, build string) (runtime.Blank, error) {
	if b.make == nil {
		return nil, b.class.unsupported("restore memory").WithReason(sandbox.RestoreRefused)
	}
	if err := b.class.pool.usable(); err != nil {
		return nil, err
	}
	if keeper := b.keeperOf(build); keeper != nil {
		return b.one(ctx, func(ctx context.Context, id string) (runtime.Blank, error) {
			return keeper.BlankOf(ctx, id, b.class.Class.Class, build)
		})
	}
	k := b.take()
	b.mu.Lock()
	b.mu.last = time.Now()
	if k == nil && b.base > 0 {
		b.mu.want = min(b.mu.want+1, max(mostBlanks, b.base))
	}
	b.mu.Unlock()
	if k != nil {
		return k, nil
	}
	return b.one(ctx, b.plain)
}

// plain makes a blank kernel of the class.
func (b *blanks) plain(ctx context.Context, id string) (runtime.Blank, error) {
	return b.make.Blank(ctx, id, b.class.Class.Class)
}

// giveBack returns a blank that get gave for a build and that was not used after
// all.
func (b *blanks) giveBack(k runtime.Blank, build string) {
	if b.keeperOf(build) != nil {
		b.discard(k) // no use for anything else
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.mu.ready = append(b.mu.ready, k)
}

// one makes a blank kernel.
func (b *blanks) one(ctx context.Context, make func(ctx context.Context, id string) (runtime.Blank, error)) (runtime.Blank, error) {
	b.making.RLock()
	defer b.making.RUnlock()
	ctx, cancel := context.WithTimeout(ctx, bootTimeout)
	defer cancel()
	id := newKernelID()
	b.n.kernels.add(id)
	k, err := make(ctx, id)
	if err != nil {
		b.n.kernels.remove(id)
		return nil, err
	}
	return k, nil
}

// short says whether another blank is wanted. A demand that has passed fades.
func (b *blanks) short() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mu.want > b.base && time.Since(b.mu.last) > blankFade {
		b.mu.want = b.base
	}
	return len(b.mu.ready) < max(b.mu.want, b.mu.soon)
}

// expect has so many blanks be ready, at most as many as after a burst.
func (b *blanks) expect(restores int) {
	if b.base == 0 {
		return
	}
	b.mu.Lock()
	b.mu.soon = min(restores, max(mostBlanks, b.base))
	b.mu.Unlock()
	select {
	case b.wake <- struct{}{}:
	default:
	}
}

// take returns a blank kernel, or nil if none is ready.
func (b *blanks) take() runtime.Blank {
	for k := b.pop(); k != nil; k = b.pop() {
		select {
		case b.wake <- struct{}{}:
		default:
		}
		select {
		case <-k.Done():
			b.n.background(func() { b.discard(k) })
		default:
			return k
		}
	}
	return nil
}

// pop takes the newest out of the pool, dead or alive.
func (b *blanks) pop() runtime.Blank {
	b.mu.Lock()
	defer b.mu.Unlock()
	last := len(b.mu.ready) - 1
	if last < 0 {
		return nil
	}
	k := b.mu.ready[last]
	b.mu.ready = b.mu.ready[:last]
	return k
}

func (b *blanks) count() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.mu.ready)
}

// run keeps the pool full whenever no creator would feel it, and destroys it
// in the end.
func (b *blanks) run(ctx context.Context) {
	defer b.close()
	failures := 0
	for {
		var again <-chan time.Time
		if b.short() {
			again = time.After(blankRetry)
			if b.class.pool.satisfied() {
				if err := b.fill(ctx); err != nil {
					failures++
					b.n.log.Warn("pool: a blank kernel could not be made", "class", b.class.Name, "err", err)
					again = time.After(backoff(failures))
				} else {
					failures = 0
					continue
				}
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-b.wake:
		case <-again:
		}
	}
}

func (b *blanks) fill(ctx context.Context) error {
	k, err := b.one(ctx, b.plain)
	if err == nil {
		b.giveBack(k, "")
	}
	return err
}

// exclusively runs f while no blank is being made.
func (b *blanks) exclusively(f func() error) error {
	b.making.Lock()
	defer b.making.Unlock()
	return f()
}

func (b *blanks) close() {
	b.mu.Lock()
	ready := b.mu.ready
	b.mu.ready = nil
	b.mu.Unlock()
	for _, k := range ready {
		b.discard(k)
	}
}

// discard destroys a blank; one that resists is swept by the next Open.
func (b *blanks) discard(k runtime.Blank) {
	ctx, cancel := context.WithTimeout(context.Background(), destroyTimeout)
	defer cancel()
	if err := k.Destroy(ctx); err != nil {
		b.n.log.Error("destroy failed", "kernel", k.ID(), "err", err)
		return
	}
	b.n.kernels.remove(k.ID())
}
