package agent

import (
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

func TestStrain(t *testing.T) {
	l := Limits{Memory: 20 * gib}.withDefaults() // 2 GiB are kept
	for _, c := range []struct {
		name string
		h    Host
		want strain
	}{
		{"half is free", Host{Memory: 10 * gib}, relaxed},
		{"a page above the reserve", Host{Memory: 2*gib + 4096}, relaxed},
		{"all but the reserve is used", Host{Memory: 2 * gib}, short},
		{"into the reserve", Host{Memory: gib + 1}, short},
		{"half of the reserve", Host{Memory: gib}, critical},
		{"nothing", Host{}, critical},
		{"free, and yet everybody waits", Host{Memory: 10 * gib, Stalled: 10}, short},
		{"they wait, and there is nothing", Host{Memory: gib / 2, Stalled: 90}, critical},
	} {
		if got := l.strain(c.h); got != c.want {
			t.Errorf("%s: %d, want %d", c.name, got, c.want)
		}
	}
}

// Whatever the machine has and however fast its cores use it up, a look comes
// before what is above the reserve is gone, or as soon as a look may come.
func TestLooksComeInTime(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := Limits{Memory: rapid.Int64Range(gib, 1<<40).Draw(t, "memory")}.withDefaults()
		h := Host{Memory: rapid.Int64Range(0, l.Memory).Draw(t, "free")}
		cores := rapid.IntRange(1, 256).Draw(t, "cores")
		after := l.lookAfter(h, cores)
		used := int64(float64(cores) * appetite * after.Seconds())
		if after < lookLeast || after > lookMost || after > lookLeast && h.Memory-used < l.MemoryReserve-4096 {
			t.Fatalf("with %d free above %d the next look is after %v: %d may be used by then", h.Memory, l.MemoryReserve, after, used)
		}
	})
}

func TestParseHost(t *testing.T) {
	psi := "some avg10=1.50 avg60=0.00 avg300=0.00 total=7858609\nfull avg10=12.25 avg60=0.00 avg300=0.00 total=4359450\n"
	if got := parsePressure([]byte(psi)); got != 12.25 {
		t.Errorf("stalled for %v %%", got)
	}
	if got := parsePressure(nil); got != 0 {
		t.Errorf("no file: %v", got)
	}
	if got := keyed([]byte("total_cache 5\ntotal_inactive_file 42\n"), "total_inactive_file"); got != 42 {
		t.Errorf("cache %d", got)
	}
}

// greedy is a world whose machine has what its sandboxes leave.
type greedy struct {
	*world
	others atomic.Int64 // bytes that somebody else uses
	disk   atomic.Int64
}

func inGreedyWorld(t *testing.T, f func(t *testing.T, g *greedy, store *faultyStore)) {
	inStateWorld(t, func(t *testing.T, w *world, store *faultyStore) {
		g := &greedy{world: w}
		g.disk.Store(100 * gib)
		state := w.cfg
		w.cfg = func(c *Config) {
			state(c)
			c.host = func() (Host, error) {
				if now := w.reading.Load(); now != nil {
					return (*now)()
				}
				return g.left()
			}
		}
		w.crash(nil) // the machine is another one now
		w.open()
		f(t, g, store)
	})
}

func (g *greedy) left() (Host, error) {
	free := 64*gib - g.others.Load()
	if n := g.opened.Load(); n != nil {
		n.mu.Lock()
		defer n.mu.Unlock()
		for _, b := range n.mu.live {
			if m, ok := b.kernel.(runtime.Meter); ok {
				use, _ := m.MemoryUse()
				free -= use
			}
		}
	}
	return Host{Memory: free, Disk: g.disk.Load()}, nil
}

// uses makes a sandbox as large as that.
func (g *greedy) uses(id string, bytes int64) {
	g.Node.mu.Lock()
	k := g.Node.mu.live[id].kernel.ID()
	g.Node.mu.Unlock()
	g.host.SetMemory(k, bytes)
}

func reserve(n int64) func(*sandbox.Spec) {
	return func(s *sandbox.Spec) {
		s.Resources.Memory, s.Resources.MemoryLimit, s.Resources.Reserve = 32*gib, 32*gib, n
	}
}

func TestTheLargestBeyondItsReserveIsParkedAndComesBack(t *testing.T) {
	inGreedyWorld(t, func(t *testing.T, g *greedy, _ *faultyStore) {
		g.create("promised", reserve(30*gib))
		g.create("large", reserve(gib))
		g.create("small", reserve(gib))
		g.uses("promised", 30*gib)
		g.uses("small", 3*gib)
		g.others.Store(24 * gib)
		g.uses("large", 5*gib) // 2 of 64 are left: less than half of the reserve
		time.Sleep(2 * lookMost)
		g.expectStandby("large", sandbox.Cold)
		g.expectStandby("promised", sandbox.Awake)
		g.expectStandby("small", sandbox.Awake)

		// It does not come back while there is no room, also after a crash.
		time.Sleep(time.Minute)
		g.expectStandby("large", sandbox.Cold)
		g.crash(nil)
		g.open()
		time.Sleep(time.Minute)
		g.expectStandby("large", sandbox.Cold)
		g.others.Store(0)
		time.Sleep(2 * lookMost)
		g.expectStandby("large", sandbox.Awake)
		g.consistent("large", "promised", "small")
	})
}

// Who puts a parked sandbox to sleep means it.
func TestAParkedSandboxThatIsPutToSleepStays(t *testing.T) {
	inGreedyWorld(t, func(t *testing.T, g *greedy, _ *faultyStore) {
		g.create("a", reserve(gib))
		g.others.Store(58 * gib)
		g.uses("a", 4*gib)
		time.Sleep(2 * lookMost)
		g.expectStandby("a", sandbox.Cold)
		if err := g.Pause(t.Context(), "a", true); err != nil {
			t.Fatal(err)
		}
		g.crash(nil)
		g.open()
		g.others.Store(0)
		time.Sleep(time.Minute)
		g.expectStandby("a", sandbox.Cold)
		if err := g.touch("a"); err != nil {
			t.Error(err)
		}
	})
}

// Within the reserve nobody who runs is touched; nothing new is admitted, and what
// stands goes to disk.
func TestShortOfMemoryOnlyRefuses(t *testing.T) {
	inGreedyWorld(t, func(t *testing.T, g *greedy, _ *faultyStore) {
		g.create("runs", reserve(gib))
		g.create("stands", reserve(gib))
		if err := g.Pause(t.Context(), "stands", false); err != nil {
			t.Fatal(err)
		}
		g.uses("runs", 59*gib)
		time.Sleep(2 * lookMost)
		g.expectStandby("runs", sandbox.Awake)
		g.expectStandby("stands", sandbox.Cold)
		_, err := g.Create(t.Context(), smallBox("late", reserve(gib)), baseImage)
		expectClass(t, err, sandbox.ErrNoCapacity)
		if c := g.CapacityNow(); c.Full == "" {
			t.Error("a node that admits nobody does not say why")
		}
		g.uses("runs", gib)
		time.Sleep(2 * lookMost)
		g.create("late", reserve(gib))
		if c := g.CapacityNow(); c.Full != "" {
			t.Errorf("a node that has room says %q", c.Full)
		}
	})
}

// One that cannot be put on disk ends with OOM, and its neighbour does not.
func TestWhoCannotBeParkedEnds(t *testing.T) {
	for name, spoil := range map[string]func(g *greedy, s *faultyStore){
		"the store fails":       func(_ *greedy, s *faultyStore) { s.begin = errors.New("broken") },
		"the disk is too small": func(g *greedy, _ *faultyStore) { g.disk.Store(10 * gib) },
	} {
		t.Run(name, func(t *testing.T) {
			inGreedyWorld(t, func(t *testing.T, g *greedy, store *faultyStore) {
				g.create("within", reserve(32*gib))
				g.create("beyond", reserve(gib))
				g.create("little", reserve(gib))
				g.uses("within", 30*gib)
				g.uses("little", 2*gib)
				spoil(g, store)
				g.uses("beyond", 31*gib)
				time.Sleep(2 * lookMost)
				synctest.Wait()
				g.expectEnd("beyond", sandbox.OOM, "the machine ran out of memory")
				g.expectStandby("within", sandbox.Awake)
				g.consistent("within", "little")
			})
		})
	}
}

// While one is written out, those that grow stand still.
func TestWhatGrowsStandsStillMeanwhile(t *testing.T) {
	inGreedyWorld(t, func(t *testing.T, g *greedy, store *faultyStore) {
		for _, id := range []string{"huge", "grows", "calm"} {
			g.create(id, reserve(gib))
		}
		g.uses("calm", 10*gib)
		g.uses("grows", 10*gib)
		var seen atomic.Pointer[map[string]sandbox.Standby]
		store.onBegin = func() {
			if seen.Load() == nil {
				now := g.StandbyNow()
				seen.Store(&now)
			}
		}
		var looks atomic.Int64
		g.reads(func() (Host, error) { // the node has looked at all of them once when it grows
			if looks.Add(1) == 2 {
				g.uses("grows", 11*gib)
			}
			return g.left()
		})
		g.uses("huge", 42*gib)
		time.Sleep(2 * lookMost)
		meanwhile := *seen.Load()
		if meanwhile["huge"] != sandbox.Hot || meanwhile["grows"] != sandbox.Hot || meanwhile["calm"] != sandbox.Awake {
			t.Errorf("while the largest was written out: %v", meanwhile)
		}
		g.expectStandby("grows", sandbox.Awake)
		g.expectStandby("calm", sandbox.Awake)
	})
}
