package node

import (
	"context"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// blanks is the second pool: kernels made half-way (runtime.Blanker). A memory
// snapshot can only be restored into one of these; until something asks for
// that, they give a boot for a waiting creator a head start of 30-45 ms. Few
// are enough, because a blank is replaced as soon as the machine has a moment.
type blanks struct {
	n    *Node
	make runtime.Blanker // nil: the driver has none and this holds nothing
	base int             // held when nobody comes
	wake chan struct{}   // capacity 1

	// making is read-locked while one is being made, locked while the driver is
	// swept.
	making sync.RWMutex

	mu    sync.Mutex
	ready []runtime.Blank
	want  int       // base, and more after somebody found none
	last  time.Time // of the demand that raised it
}

const (
	// mostBlanks are held after a burst of restores; a fork of eight is usual.
	mostBlanks = 8
	// blankFade without a restore takes the pool back to its base.
	blankFade = time.Minute
)

// blankRetry is how long a failed or put-off attempt waits for the next.
const blankRetry = 250 * time.Millisecond

func newBlanks(n *Node, want int) *blanks {
	maker, _ := n.cfg.Driver.(runtime.Blanker)
	if maker == nil {
		want = 0
	}
	return &blanks{n: n, make: maker, base: want, want: want, wake: make(chan struct{}, 1)}
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
		return nil, sandbox.Errorf(sandbox.Unsupported, "", "runtime %s cannot restore memory", b.n.cfg.Driver.Name()).WithReason(sandbox.RestoreRefused)
	}
	if keeper := b.keeperOf(build); keeper != nil {
		return b.one(ctx, func(ctx context.Context, id string) (runtime.Blank, error) { return keeper.BlankOf(ctx, id, build) })
	}
	k := b.take()
	b.mu.Lock()
	b.last = time.Now()
	if k == nil && b.base > 0 {
		b.want = min(b.want+1, max(mostBlanks, b.base))
	}
	b.mu.Unlock()
	if k != nil {
		return k, nil
	}
	return b.one(ctx, b.make.Blank)
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
	b.ready = append(b.ready, k)
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
	if b.want > b.base && time.Since(b.last) > blankFade {
		b.want = b.base
	}
	return len(b.ready) < b.want
}

// take returns a blank kernel, or nil if none is ready.
func (b *blanks) take() runtime.Blank {
	b.mu.Lock()
	defer b.mu.Unlock()
	for len(b.ready) > 0 {
		k := b.ready[len(b.ready)-1]
		b.ready = b.ready[:len(b.ready)-1]
		select {
		case b.wake <- struct{}{}:
		default:
		}
		select {
		case <-k.Done():
			b.n.tasks.Go(func() { b.discard(k) })
		default:
			return k
		}
	}
	return nil
}

func (b *blanks) count() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.ready)
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
			if b.n.pool.satisfied() {
				if err := b.fill(ctx); err != nil {
					failures++
					b.n.log.Warn("pool: a blank kernel could not be made", "err", err)
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
	k, err := b.one(ctx, b.make.Blank)
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
	ready := b.ready
	b.ready = nil
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
