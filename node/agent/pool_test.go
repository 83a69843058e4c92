package agent

import (
	"context"
	"errors"
	"fmt"
	goruntime "runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/runtime/fake"
	"github.com/cove-sandbox/cove/sandbox"
)

// poolWorld is a pool over bare fake kernels in virtual time. A boot takes
// 100 ms.
type poolWorld struct {
	*pool
	host      *fake.Host
	drv       *fake.Driver
	boots     atomic.Int64
	now, most atomic.Int64 // boots under way, and the most there were
	freeMem   atomic.Int64
}

const bootTakes = 100 * time.Millisecond

func inPool(t *testing.T, cfg PoolSettings, f func(t *testing.T, w *poolWorld)) {
	synctest.Test(t, func(t *testing.T) {
		w := &poolWorld{host: fake.NewHost("", fake.Options{Bare: true})}
		w.drv = w.host.Open()
		w.freeMem.Store(100 * gib)
		w.drv.Hook(fake.Boot, func(ctx context.Context, id string) error {
			w.boots.Add(1)
			n := w.now.Add(1)
			defer w.now.Add(-1)
			w.most.Store(max(w.most.Load(), n))
			select {
			case <-time.After(bootTakes):
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
		discard := func(k runtime.Kernel) { _ = k.Destroy(context.Background()) }
		creates := &creates{}
		boot := func(ctx context.Context, id string) (runtime.Kernel, error) {
			return w.drv.Boot(ctx, id, runtime.Class{})
		}
		w.pool = newPool(cfg, boot, discard, w.freeMem.Load, creates, quiet)
		w.pool.start()
		defer func() {
			w.pool.close()
			synctest.Wait()
		}()
		f(t, w)
	})
}

func testPool() PoolSettings {
	return PoolSettings{Min: 4, Max: 64, Parallel: 2, Background: 1, Grace: 20 * time.Millisecond, Patience: 250 * time.Millisecond, KernelMemory: 10 << 20}
}

func (w *poolWorld) take(t *testing.T) runtime.Kernel {
	t.Helper()
	w.creates.begin()
	defer w.creates.end()
	k, err := w.pool.take(t.Context())
	if err != nil {
		t.Fatalf("take: %v", err)
	}
	return k
}

func (w *poolWorld) expectReady(t *testing.T, want int) {
	t.Helper()
	synctest.Wait()
	if got, target := w.counts(); got != want {
		t.Errorf("%d warm kernels (target %d), want %d", got, target, want)
	}
}

func TestPoolFillsToItsMinimumOneAtATime(t *testing.T) {
	inPool(t, testPool(), func(t *testing.T, w *poolWorld) {
		time.Sleep(time.Second)
		w.expectReady(t, 4)
		if w.most.Load() != 1 {
			t.Errorf("%d background boots at once", w.most.Load())
		}
	})
}

func TestAWarmKernelIsTakenAtOnceAndReplacedAfterTheGrace(t *testing.T) {
	inPool(t, testPool(), func(t *testing.T, w *poolWorld) {
		time.Sleep(time.Second)
		start, boots := time.Now(), w.boots.Load()
		w.take(t)
		if d := time.Since(start); d != 0 {
			t.Errorf("waited %v for a warm kernel", d)
		}
		time.Sleep(19 * time.Millisecond)
		synctest.Wait()
		if w.boots.Load() != boots {
			t.Error("a boot began within the grace of the create")
		}
		time.Sleep(2 * time.Millisecond)
		synctest.Wait()
		if w.boots.Load() != boots+1 {
			t.Error("no boot began after the grace")
		}
		time.Sleep(bootTakes)
		w.expectReady(t, 4)
	})
}

func TestBackgroundBootsWaitForCreatesButNotForever(t *testing.T) {
	inPool(t, testPool(), func(t *testing.T, w *poolWorld) {
		time.Sleep(time.Second)
		w.take(t)
		boots := w.boots.Load()
		w.creates.begin() // a create that goes on and on
		defer w.creates.end()
		time.Sleep(200 * time.Millisecond)
		synctest.Wait()
		if w.boots.Load() != boots {
			t.Error("a background boot ran beside a create")
		}
		time.Sleep(100 * time.Millisecond)
		synctest.Wait()
		if w.boots.Load() != boots+1 {
			t.Error("creates starve the pool")
		}
	})
}

func TestABurstQueuesFairlyBehindBoundedBoots(t *testing.T) {
	inPool(t, testPool(), func(t *testing.T, w *poolWorld) {
		time.Sleep(time.Second) // 4 are warm
		const n = 64
		var mu sync.Mutex
		var order []int
		var wg sync.WaitGroup
		start := time.Now()
		for i := range n {
			wg.Go(func() {
				w.creates.begin()
				defer w.creates.end()
				if _, err := w.pool.take(t.Context()); err != nil {
					t.Error(err)
				}
				mu.Lock()
				defer mu.Unlock()
				order = append(order, i)
			})
			synctest.Wait() // so that they queue in this order
		}
		wg.Wait()
		for at, i := range order {
			if d := at - i; d > 2 || d < -2 { // two boots end at the same instant
				t.Errorf("creator %d was served as number %d", i, at)
			}
		}
		if w.most.Load() > 2 {
			t.Errorf("%d boots at once", w.most.Load())
		}
		if d, want := time.Since(start), (n-4)/2*bootTakes; d != want {
			t.Errorf("took %v, want %v: every boot at full width and none wasted", d, want)
		}
		time.Sleep(time.Minute)
		if ready, _ := w.counts(); ready < 32 {
			t.Errorf("a minute after a burst of %d only %d are warm", n, ready)
		}
		time.Sleep(time.Hour)
		w.expectReady(t, 4) // and forgotten
	})
}

func TestACreatorJoinsABootUnderWay(t *testing.T) {
	cfg := testPool()
	cfg.Min = 1
	inPool(t, cfg, func(t *testing.T, w *poolWorld) {
		time.Sleep(bootTakes * 9 / 10)
		start := time.Now()
		w.take(t)
		if d := time.Since(start); d != bootTakes/10 {
			t.Errorf("waited %v, not for the boot under way", d)
		}
	})
}

func TestACreatorWhoLeavesDoesNotTakeAKernelAlong(t *testing.T) {
	cfg := testPool()
	cfg.Min = 0
	inPool(t, cfg, func(t *testing.T, w *poolWorld) {
		ctx, cancel := context.WithTimeout(t.Context(), bootTakes/2)
		defer cancel()
		_, err := w.pool.take(ctx)
		if !errors.Is(err, sandbox.ErrDeadline) {
			t.Fatalf("take: %v", err)
		}
		time.Sleep(bootTakes)
		w.expectReady(t, 1)
		if len(w.host.IDs()) != 1 {
			t.Errorf("kernels: %v", w.host.IDs())
		}
	})
}

func TestADeadWarmKernelIsNeverHandedOutAndIsReplaced(t *testing.T) {
	inPool(t, testPool(), func(t *testing.T, w *poolWorld) {
		time.Sleep(time.Second)
		dead := map[string]bool{}
		for _, id := range w.host.IDs() {
			dead[id] = true
			w.host.Kill(id, runtime.Exit{Cause: sandbox.Infra, Detail: "test"})
		}
		if k := w.take(t); dead[k.ID()] {
			t.Error("took a dead kernel")
		}
		time.Sleep(time.Minute)
		w.expectReady(t, 4)
		for _, id := range w.host.IDs() {
			if dead[id] {
				t.Errorf("dead kernel %s was not destroyed", id)
			}
		}
	})
}

func TestKernelsThatKeepDyingDoNotSpinTheMachine(t *testing.T) {
	inPool(t, testPool(), func(t *testing.T, w *poolWorld) {
		for end := time.Now().Add(10 * time.Minute); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
			for _, id := range w.host.IDs() {
				w.host.Kill(id, runtime.Exit{Cause: sandbox.Infra})
			}
		}
		if n := w.boots.Load(); n > 60 {
			t.Errorf("%d boots in ten minutes of dying kernels", n)
		}
	})
}

func TestBootsThatFailReachTheCreatorsAndBackOff(t *testing.T) {
	cfg := testPool()
	cfg.Min = 0
	inPool(t, cfg, func(t *testing.T, w *poolWorld) {
		boom := sandbox.Errorf(sandbox.Unavailable, "fake.boot", "no more processes")
		var failing atomic.Bool
		failing.Store(true)
		w.drv.Hook(fake.Boot, func(context.Context, string) error {
			w.boots.Add(1)
			time.Sleep(bootTakes)
			if failing.Load() {
				return boom
			}
			return nil
		})
		const n = 50
		errs := make(chan error, n)
		for range n {
			go func() { _, err := w.pool.take(t.Context()); errs <- err }()
		}
		for range n {
			err := <-errs
			var e *sandbox.Error
			if !errors.As(err, &e) || e.Class != sandbox.Unavailable || !errors.Is(err, boom) || e.RetryAfter <= 0 {
				t.Fatalf("a creator was told %v", err)
			}
		}
		if got := w.boots.Load(); got > 6 {
			t.Errorf("%d creators cost %d failing boots", n, got)
		}
		if _, err := w.pool.take(t.Context()); !errors.Is(err, boom) {
			t.Errorf("while tripped: %v", err)
		}
		failing.Store(false)
		time.Sleep(backoffMax)
		w.take(t)
	})
}

func TestOneFailedBootIsNotFelt(t *testing.T) {
	cfg := testPool()
	cfg.Min = 0
	inPool(t, cfg, func(t *testing.T, w *poolWorld) {
		w.drv.Fail(fake.Boot, errors.New("hiccup"))
		w.take(t)
	})
}

func TestAPoolGivesWayToMemory(t *testing.T) {
	inPool(t, testPool(), func(t *testing.T, w *poolWorld) {
		time.Sleep(time.Second)
		w.expectReady(t, 4)
		w.freeMem.Store(-20 << 20)
		time.Sleep(10 * time.Second)
		if ready, _ := w.counts(); ready > 2 {
			t.Errorf("%d warm kernels on a machine short of memory", ready)
		}
	})
}

func TestQuiesceRunsWithNoBootUnderWay(t *testing.T) {
	inPool(t, testPool(), func(t *testing.T, w *poolWorld) {
		time.Sleep(bootTakes / 2)
		ran := false
		err := w.quiesce(t.Context(), func() error {
			ran = true
			if w.now.Load() != 0 {
				t.Error("a boot is under way")
			}
			time.Sleep(10 * bootTakes)
			if w.now.Load() != 0 {
				t.Error("a boot began")
			}
			return nil
		})
		if err != nil || !ran {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		w.expectReady(t, 4)
	})
}

func TestAClosedPoolLeavesNothing(t *testing.T) {
	inPool(t, testPool(), func(t *testing.T, w *poolWorld) {
		time.Sleep(bootTakes * 5 / 2) // two warm, one on its way
		errs := make(chan error, 8)
		for range 8 {
			go func() {
				k, err := w.pool.take(t.Context())
				if err == nil {
					err = k.Destroy(context.Background())
				}
				errs <- err
			}()
		}
		synctest.Wait()
		w.pool.close()
		for range 8 {
			if err := <-errs; err != nil && !errors.Is(err, sandbox.ErrUnavailable) {
				t.Errorf("a creator in the queue was told %v", err)
			}
		}
		if ids := w.host.IDs(); len(ids) != 0 {
			t.Errorf("left: %v", fmt.Sprint(ids))
		}
	})
}

// A tenant with many creates in line does not keep another's first one waiting.
func TestTenantsTakeTurns(t *testing.T) {
	cfg := testPool()
	cfg.Min, cfg.Parallel = -1, 1
	inPool(t, cfg, func(t *testing.T, w *poolWorld) {
		order := make(chan string, 20)
		join := func(tenant string) {
			go func() {
				if _, _, err := w.pool.takeFor(t.Context(), tenant, trust{}); err != nil {
					t.Error(err)
				}
				order <- tenant
			}()
			synctest.Wait()
		}
		for range 8 {
			join("many")
		}
		join("one")
		got := ""
		for range 9 {
			got += (<-order)[:1]
		}
		if got != "momm"+"mmmmm" && got != "ommm"+"mmmmm" {
			t.Errorf("served in the order %s", got)
		}
	})
}

// Boots ahead of demand take every core that nobody uses, and half of them otherwise.
func TestBackgroundBootsTakeIdleCores(t *testing.T) {
	for idle, want := range map[int]int64{0: 1, 3: 3, 9: 4} {
		cfg := testPool()
		cfg.Min, cfg.Parallel = 8, 4
		synctest.Test(t, func(t *testing.T) {
			w := &poolWorld{}
			var now, most atomic.Int64
			w.pool = newPool(cfg, func(ctx context.Context, id string) (runtime.Kernel, error) {
				most.Store(max(most.Load(), now.Add(1)))
				defer now.Add(-1)
				time.Sleep(bootTakes)
				return nil, errors.New("enough")
			}, func(runtime.Kernel) {}, func() int64 { return 100 * gib }, &creates{}, quiet)
			w.pool.idle = func() int { return idle }
			w.pool.start()
			time.Sleep(bootTakes / 2)
			if got := most.Load(); got != want {
				t.Errorf("%d idle cores: %d boots at once, want %d", idle, got, want)
			}
			w.pool.close()
		})
	}
}

func TestCoreMeter(t *testing.T) {
	stat := "cpu  100 0 100 1000 0 0 0 0 0 0\ncpu0 1 2 3\n"
	m := &coreMeter{read: func() ([]byte, error) { return []byte(stat), nil }}
	if got := m.idle(); got != 0 {
		t.Errorf("before anything was measured: %d", got)
	}
	stat = "cpu  200 0 100 1100 0 0 0 0 50 0\n" // half of the time; a guest's is in the first
	if got, want := m.idle(), goruntime.NumCPU()/2; got != want {
		t.Errorf("%d, want %d", got, want)
	}
}
