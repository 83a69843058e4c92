package agent

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cove-sandbox/cove/cas"
	"github.com/cove-sandbox/cove/cas/local"
	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/runtime/fake"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/snapshot"
)

// inStateWorld is inWorld with a content store, which outlives crashes.
func inStateWorld(t *testing.T, f func(t *testing.T, w *world, store *faultyStore)) {
	dir := t.TempDir()
	st, err := local.Open(dir+"/state", local.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	store := &faultyStore{Store: st}
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, dir)
		w.cfg = func(c *Config) { c.State = &StateConfig{Store: store, Plain: dir + "/plain", ColdAfter: time.Minute} }
		w.open()
		defer w.finish()
		f(t, w, store)
	})
}

// faultyStore fails on request.
type faultyStore struct {
	*local.Store
	begin   error
	onBegin func()
}

func (f *faultyStore) Begin() (cas.Batch, error) {
	if f.onBegin != nil {
		f.onBegin()
	}
	if f.begin != nil {
		return nil, f.begin
	}
	return f.Store.Begin()
}

func (f *faultyStore) blobs(t tb) (n int) {
	t.Helper()
	if err := f.List(context.Background(), func(cas.Info) error { n++; return nil }); err != nil {
		t.Errorf("list: %v", err)
	}
	return n
}

func pauses(s *sandbox.Spec) { s.OnIdle = sandbox.IdlePause }

func (w *world) expectStandby(id string, want sandbox.Standby) {
	w.t.Helper()
	synctest.Wait()
	if got := w.StandbyNow()[id]; got != want {
		w.t.Errorf("%s is %q, want %q", id, got, want)
	}
}

// touch is a short call.
func (w *world) touch(id string) error {
	_, release, err := w.Guest(context.Background(), id)
	if err == nil {
		release()
	}
	return err
}

func TestAnIdleSandboxSleepsDeeperWithTimeAndWakes(t *testing.T) {
	inStateWorld(t, func(t *testing.T, w *world, store *faultyStore) {
		w.create("a", idle(time.Minute), pauses)
		w.create("b")
		time.Sleep(59 * time.Second)
		w.expectStandby("a", sandbox.Awake)
		time.Sleep(2 * time.Second)
		w.expectStandby("a", sandbox.Hot)
		w.consistent("a", "b")
		time.Sleep(time.Minute)
		w.expectStandby("a", sandbox.Cold)
		w.consistent("a", "b")
		if used := w.CapacityNow().Used; used.Memory != gib {
			t.Errorf("cold it takes memory: %+v", used)
		}
		if s, err := w.Stats(t.Context(), "a"); err != nil || s.Memory != 0 {
			t.Errorf("stats %+v, %v", s, err)
		}
		w.expectStandby("a", sandbox.Cold) // looking does not wake it
		if err := w.touch("a"); err != nil {
			t.Fatal(err)
		}
		w.expectStandby("a", sandbox.Awake)
		w.consistent("a", "b")
		time.Sleep(61 * time.Second)
		w.expectStandby("a", sandbox.Hot) // and it sleeps again
		if err := w.touch("a"); err != nil {
			t.Fatal(err)
		}
		w.expectStandby("a", sandbox.Awake)
		w.expectStandby("b", sandbox.Awake)
		w.expectNoNotice()
	})
}

// A timeout that pauses is spent by it: who wakes the sandbox is not thrown out by
// the time that is over already, and may set another.
func TestATimeoutThatPauses(t *testing.T) {
	inStateWorld(t, func(t *testing.T, w *world, store *faultyStore) {
		w.create("a", timeout(time.Minute), func(s *sandbox.Spec) { s.OnTimeout = sandbox.IdlePause })
		time.Sleep(59 * time.Second)
		w.expectStandby("a", sandbox.Awake)
		time.Sleep(2 * time.Second)
		w.expectStandby("a", sandbox.Hot)
		time.Sleep(time.Hour)
		w.expectStandby("a", sandbox.Cold)
		w.consistent("a")
		if err := w.touch("a"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Hour)
		w.expectStandby("a", sandbox.Awake)
		if err := w.SetExpiry(t.Context(), "a", time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		time.Sleep(61 * time.Second)
		w.expectStandby("a", sandbox.Hot)
		w.expectNoNotice()
	})
}

func TestWhatWasPausedByHandStaysHot(t *testing.T) {
	inStateWorld(t, func(t *testing.T, w *world, store *faultyStore) {
		w.create("a", timeout(time.Hour))
		if err := w.Pause(t.Context(), "a", false); err != nil {
			t.Fatal(err)
		}
		time.Sleep(50 * time.Minute)
		w.expectStandby("a", sandbox.Hot)
		if err := w.Pause(t.Context(), "a", true); err != nil {
			t.Fatal(err)
		}
		w.expectStandby("a", sandbox.Cold)
		time.Sleep(11 * time.Minute) // its time runs on while it sleeps
		w.expectNotice("a")
		w.expectEnd("a", sandbox.TTL, "")
		w.consistent()
		if freed, err := w.Collect(t.Context(), nil); err != nil || freed == 0 || store.blobs(t) != 0 {
			t.Errorf("freed %d, %d blobs left, %v", freed, store.blobs(t), err)
		}
	})
}

// A memory snapshot brings its disk along: a sandbox restored from it holds
// that much, awake or asleep before, also after a crash.
func TestARestoreTakesTheSizeOfTheDiskOver(t *testing.T) {
	inStateWorld(t, func(t *testing.T, w *world, store *faultyStore) {
		sized := func(n int64) func(*sandbox.Spec) { return func(s *sandbox.Spec) { s.Resources.Disk = n } }
		snap := func(id string, size int64) sandbox.Snapshot {
			w.create(id, sized(size))
			c, _, err := w.Take(t.Context(), id, node.SnapshotRequest{Kind: sandbox.MemorySnapshot, Keep: true})
			if err != nil {
				t.Fatal(err)
			}
			return sandbox.Snapshot{Kind: sandbox.MemorySnapshot, Spec: smallBox(id, sized(size)).Spec, Content: c}
		}
		small, large := snap("small", 1<<20), snap("large", gib)
		all := []string{"a", "large", "small"}
		w.create("a", sized(gib/2))
		for i, from := range []sandbox.Snapshot{small, large, small, large} {
			if i > 1 {
				if err := w.Pause(t.Context(), "a", true); err != nil {
					t.Fatal(err)
				}
			}
			if _, _, err := w.Restore(t.Context(), "a", baseImage, from); err != nil {
				t.Fatal(err)
			}
			w.consistent(all...)
			if got, want := w.promisedDisk(), gib+1<<20+from.Spec.Resources.Disk; got != want {
				t.Errorf("%d: %d are promised, want %d", i, got, want)
			}
		}
		w.crash(nil)
		w.open()
		w.consistent(all...)
		if got := w.promisedDisk(); got != 2*gib+1<<20 {
			t.Errorf("after a crash %d are promised", got)
		}
		// What does not fit is refused, and what it had stays promised.
		w.Node.mu.Lock()
		w.Node.mu.reservations.limits.Disk = gib / 2
		w.Node.mu.Unlock()
		if _, _, err := w.Restore(t.Context(), "small", baseImage, large); sandbox.ClassOf(err) != sandbox.TooLarge {
			t.Error(err)
		}
		w.consistent(all...)
		if got := w.promisedDisk(); got != 2*gib+1<<20 {
			t.Errorf("after a refusal %d are promised", got)
		}
	})
}

// What is taken of a sandbox on disk adds nothing, and is in as many bytes as
// it is.
func TestBlobsOfColdContent(t *testing.T) {
	inStateWorld(t, func(t *testing.T, w *world, store *faultyStore) {
		w.create("a")
		if err := w.Pause(t.Context(), "a", true); err != nil {
			t.Fatal(err)
		}
		c, _, err := w.Take(t.Context(), "a", node.SnapshotRequest{Kind: sandbox.MemorySnapshot, Keep: true})
		if err != nil || c.Stored != 0 {
			t.Fatalf("%+v, %v", c, err)
		}
		lost := "sha256:" + strings.Repeat("0", 64)
		for range 2 { // read, and remembered
			got, err := w.Blobs(t.Context(), []string{c.Manifest, lost, "nonsense"})
			var h snapshot.Holding
			h.Add(got[c.Manifest])
			if err != nil || len(got) != 1 || len(got[c.Manifest]) != store.blobs(t) {
				t.Fatalf("%v, %v", got, err)
			}
			var stored int64
			if err := store.List(t.Context(), func(i cas.Info) error { stored += i.Stored; return nil }); err != nil || h.Bytes() != stored {
				t.Errorf("%d bytes of %d, %v", h.Bytes(), stored, err)
			}
		}
		if err := w.Kill(t.Context(), "a", sandbox.End{Cause: sandbox.KilledByUser}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(pendingFor + time.Second)
		if _, err := w.Collect(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		if got, err := w.Blobs(t.Context(), []string{c.Manifest}); err != nil || len(got) != 0 || w.states.mu.blobs != 0 {
			t.Errorf("of what is gone: %v, %v", got, err)
		}
	})
}

func TestStandbySurvivesACrashAndColdAlsoTheMachine(t *testing.T) {
	inStateWorld(t, func(t *testing.T, w *world, store *faultyStore) {
		for _, id := range []string{"hot", "cold", "awake"} {
			w.create(id)
		}
		for id, cold := range map[string]bool{"hot": false, "cold": true} {
			if err := w.Pause(t.Context(), id, cold); err != nil {
				t.Fatal(err)
			}
		}
		w.crash(nil)
		w.open()
		w.expectStandby("hot", sandbox.Hot)
		w.expectStandby("cold", sandbox.Cold)
		w.expectStandby("awake", sandbox.Awake)
		w.consistent("awake", "cold", "hot")
		for _, id := range []string{"hot", "cold"} {
			if err := w.touch(id); err != nil {
				t.Errorf("%s does not wake: %v", id, err)
			}
		}
		w.consistent("awake", "cold", "hot")
		if err := w.Pause(t.Context(), "cold", true); err != nil {
			t.Fatal(err)
		}
		w.crash(nil)
		w.host.Reboot()
		w.boot = "boot-2"
		w.open()
		w.consistent("cold")
		w.expectEnd("hot", sandbox.NodeLost, "machine restarted")
		if err := w.touch("cold"); err != nil {
			t.Errorf("after the machine's restart: %v", err)
		}
		w.consistent("cold")
	})
}

// Whatever fails on the way down or up, the sandbox is in one well-defined
// state and can be tried again.
func TestFailuresOnTheWayDownAndUp(t *testing.T) {
	full := sandbox.Errorf(sandbox.DiskFull, "cas", "%w", syscall.ENOSPC)
	inStateWorld(t, func(t *testing.T, w *world, store *faultyStore) {
		w.create("a")
		ctx := t.Context()
		for name, step := range map[string]struct {
			breaks, heals func()
			class         *sandbox.Error
		}{
			"checkpoint": {func() { w.drv.Fail(fake.Checkpoint, errBroken) }, func() { w.drv.Heal() }, sandbox.ErrUnavailable},
			"pause":      {func() { w.drv.Fail(fake.Pause, errBroken) }, func() { w.drv.Heal() }, sandbox.ErrUnavailable},
			"store":      {func() { store.begin = full }, func() { store.begin = nil }, sandbox.ErrDiskFull},
			"journal": {func() {
				w.disk.setFault(func(op, _ string) error {
					if op == "sync" {
						return syscall.EIO
					}
					return nil
				})
			}, func() { w.disk.setFault(nil) }, sandbox.ErrUnavailable},
		} {
			step.breaks()
			err := w.Pause(ctx, "a", true)
			step.heals()
			if !errors.Is(err, step.class) {
				t.Errorf("%s: %v", name, err)
			}
			w.expectStandby("a", sandbox.Awake)
			if err := w.touch("a"); err != nil {
				t.Errorf("after a failed %s: %v", name, err)
			}
			w.consistent("a")
			time.Sleep(time.Minute) // the journal repairs itself
		}
		if err := w.Pause(ctx, "a", true); err != nil {
			t.Fatal(err)
		}
		w.drv.Fail(fake.Restore, errBroken)
		if err := w.touch("a"); err == nil {
			t.Error("woke without a kernel")
		}
		w.expectStandby("a", sandbox.Cold)
		w.drv.Heal()
		w.consistent("a")
		if err := w.touch("a"); err != nil {
			t.Error(err)
		}
		w.expectStandby("a", sandbox.Awake)
		w.consistent("a")
	})
}

func TestMemoryPressurePutsTheLongestSleeperOnDisk(t *testing.T) {
	var free atomic.Int64
	free.Store(20 * gib)
	inStateWorld(t, func(t *testing.T, w *world, store *faultyStore) {
		for _, id := range []string{"old", "young", "awake"} {
			w.create(id)
		}
		w.cfg = nil
		w.reads(func() (Host, error) {
			if w.StandbyNow()["old"] == sandbox.Cold {
				return Host{Memory: 20 * gib, Disk: 100 * gib}, nil
			}
			return Host{Memory: free.Load(), Disk: 100 * gib}, nil
		})
		for _, id := range []string{"old", "young"} {
			if err := w.Pause(t.Context(), id, false); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Second)
		}
		free.Store(6 * gib) // of 64: into the reserve
		time.Sleep(2 * lookMost)
		w.expectStandby("old", sandbox.Cold)
		w.expectStandby("young", sandbox.Hot)
		w.expectStandby("awake", sandbox.Awake)
	})
}

func TestWakingWaitsForCapacity(t *testing.T) {
	inStateWorld(t, func(t *testing.T, w *world, store *faultyStore) {
		w.create("a")
		if err := w.Pause(t.Context(), "a", true); err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, id := range ids("b", 57) { // 0.9 of 64 GiB
			w.create(id)
			names = append(names, id)
		}
		woken := make(chan error, 1)
		go func() { woken <- w.touch("a") }()
		time.Sleep(10 * time.Second)
		w.expectStandby("a", sandbox.Cold)
		if err := w.Kill(t.Context(), "b0", sandbox.End{Cause: sandbox.KilledByUser}); err != nil {
			t.Fatal(err)
		}
		if err := <-woken; err != nil {
			t.Error(err)
		}
		w.expectStandby("a", sandbox.Awake)
		w.consistent(append([]string{"a"}, names[1:]...)...)
		if err := w.Pause(t.Context(), "a", true); err != nil {
			t.Fatal(err)
		}
		w.create("c")
		start := time.Now()
		expectClass(t, w.touch("a"), sandbox.ErrNoCapacity)
		if d := time.Since(start); d < wakeTimeout || d > wakeTimeout+time.Second {
			t.Errorf("gave up after %v", d)
		}
	})
}

// A call under way does not keep a sandbox that was told to sleep awake, and
// does not wake it.
func TestColdDespiteACall(t *testing.T) {
	inStateWorld(t, func(t *testing.T, w *world, store *faultyStore) {
		w.create("a")
		_, release, err := w.Guest(t.Context(), "a")
		if err != nil {
			t.Fatal(err)
		}
		if err := w.Pause(t.Context(), "a", true); err != nil {
			t.Fatal(err)
		}
		w.expectStandby("a", sandbox.Cold)
		release()
		w.expectStandby("a", sandbox.Cold)
		if err := w.touch("a"); err != nil {
			t.Error(err)
		}
		w.consistent("a")
	})
}

// A kernel that dies in its sleep ends its sandbox like any other.
func TestAHotKernelDies(t *testing.T) {
	inStateWorld(t, func(t *testing.T, w *world, store *faultyStore) {
		w.create("a")
		if err := w.Pause(t.Context(), "a", false); err != nil {
			t.Fatal(err)
		}
		w.host.Kill(w.kernelOf("a"), runtime.Exit{Cause: sandbox.OOM, Detail: "over the memory limit"})
		w.expectNotice("a")
		w.expectEnd("a", sandbox.OOM, "")
		w.consistent()
		expectClass(t, w.touch("a"), sandbox.ErrEnded)
	})
}

func TestBlanksFollowDemand(t *testing.T) {
	inStateWorld(t, func(t *testing.T, w *world, store *faultyStore) {
		w.create("a")
		c, _, err := w.Node.Take(t.Context(), "a", node.SnapshotRequest{Kind: sandbox.MemorySnapshot, Keep: true})
		if err != nil {
			t.Fatal(err)
		}
		var want []string
		for _, id := range ids("c", 6) {
			if _, err := w.CreateFrom(t.Context(), smallBox(id), baseImage, sandbox.Snapshot{Kind: sandbox.MemorySnapshot, Content: c}); err != nil {
				t.Fatal(err)
			}
			want = append(want, id)
		}
		w.consistent(slices.Concat([]string{"a"}, want)...)
		time.Sleep(10 * time.Second)
		if got := w.classes[0].blanks.count(); got < 2 {
			t.Errorf("%d blanks after a burst", got)
		}
		time.Sleep(2 * blankFade)
		w.consistent(slices.Concat([]string{"a"}, want)...)
	})
}

// What is stopped into a snapshot is there until its caller has the snapshot on
// record: it goes on if that fails, and outlives a crash in between.
func TestStoppedOnceCommitted(t *testing.T) {
	inStateWorld(t, func(t *testing.T, w *world, store *faultyStore) {
		w.create("a")
		prepare := func() node.Prepared {
			p, err := w.PrepareSnapshot(t.Context(), "a", node.SnapshotRequest{Kind: sandbox.MemorySnapshot, Keep: true, Stop: true})
			if err != nil {
				t.Fatal(err)
			}
			return p
		}
		p := prepare()
		w.expectStandby("a", sandbox.Hot)
		if err := w.AbortSnapshot(t.Context(), p.Token); err != nil {
			t.Error(err)
		}
		expectClass(t, w.CommitSnapshot(t.Context(), p.Token), sandbox.ErrConflict)
		w.expectStandby("a", sandbox.Awake)
		if err := w.touch("a"); err != nil {
			t.Error(err)
		}
		w.consistent("a")

		kept := prepare().Content
		w.drv.Crash()
		w.disk = w.disk.crash(func(n int) int { return n })
		_ = w.Node.Close()
		w.open()
		if err := w.touch("a"); err != nil {
			t.Errorf("after a crash between the record and the end: %v", err)
		}
		if _, err := w.Verify(t.Context(), kept); err != nil {
			t.Error(err)
		}
		w.consistent("a")

		// The same of one that is asleep on disk.
		if err := w.Pause(t.Context(), "a", true); err != nil {
			t.Fatal(err)
		}
		if err := w.AbortSnapshot(t.Context(), prepare().Token); err != nil {
			t.Error(err)
		}
		w.expectStandby("a", sandbox.Cold)

		p = prepare()
		for range 2 { // its answer may get lost
			if err := w.CommitSnapshot(t.Context(), p.Token); err != nil || p.Content.Manifest == "" {
				t.Errorf("%+v, %v", p, err)
			}
		}
		expectClass(t, w.AbortSnapshot(t.Context(), p.Token), sandbox.ErrConflict)
		w.expectNotice("a")
		w.expectEnd("a", sandbox.KilledByUser, "stopped by a snapshot")
		w.consistent()
	})
}

// Whoever leaves a snapshot leaves the sandbox as it was, at every step, and
// nothing that a collection would spare.
func TestACallerLeavesASnapshot(t *testing.T) {
	inStateWorld(t, func(t *testing.T, w *world, store *faultyStore) {
		w.create("a")
		for _, stop := range []bool{false, true} {
			for _, at := range []string{"before", "checkpoint", "store", "commit"} {
				ctx, leave := context.WithCancel(t.Context())
				r := node.SnapshotRequest{Kind: sandbox.MemorySnapshot, Keep: true, Stop: stop}
				switch at {
				case "before":
					leave()
				case "checkpoint":
					w.drv.Hook(fake.Checkpoint, func(context.Context, string) error { leave(); return nil })
				case "store":
					store.onBegin = leave
				}
				p, err := w.PrepareSnapshot(ctx, "a", r)
				w.drv.Hook(fake.Checkpoint, nil)
				store.onBegin = nil
				leave()
				if at == "commit" { // which never comes
					time.Sleep(node.DefaultPrepared)
				} else if err == nil || p.Content.Manifest != "" {
					t.Errorf("stop %v at %s: %+v, %v", stop, at, p, err)
				}
				w.expectStandby("a", sandbox.Awake)
				if err := w.touch("a"); err != nil {
					t.Errorf("stop %v at %s: %v", stop, at, err)
				}
				if (at == "store" || at == "commit") && !w.litter.Load() {
					t.Errorf("stop %v at %s: nothing to collect", stop, at)
				}
				if _, err := w.Collect(t.Context(), nil); err != nil || store.blobs(t) != 0 {
					t.Errorf("stop %v at %s: %d blobs are left, %v", stop, at, store.blobs(t), err)
				}
				w.consistent("a")
			}
		}
		w.expectNoNotice()

		// And what was made, but will have no name.
		c, _, err := w.Node.Take(t.Context(), "a", node.SnapshotRequest{Kind: sandbox.MemorySnapshot, Keep: true})
		if err != nil {
			t.Fatal(err)
		}
		if err := w.Release(t.Context(), c); err != nil || !w.litter.Load() {
			t.Errorf("litter %v, %v", w.litter.Load(), err)
		}
		if _, err := w.Collect(t.Context(), nil); err != nil || store.blobs(t) != 0 {
			t.Errorf("%d blobs are left, %v", store.blobs(t), err)
		}
	})
}

// A caller that had the sandbox awake and asks it for something only after a pause
// has landed is answered: its call wakes the sandbox, hot or cold.
func TestACallThatAPauseOvertakesWakes(t *testing.T) {
	for _, cold := range []bool{false, true} {
		inStateWorld(t, func(t *testing.T, w *world, store *faultyStore) {
			w.create("a")
			g, release, err := w.Guest(t.Context(), "a")
			if err != nil {
				t.Fatal(err)
			}
			defer release()
			if err := w.Pause(t.Context(), "a", cold); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			// The kernels of this world may have no guest behind the wire to answer.
			if _, err := g.Stat(ctx, "/"); ctx.Err() != nil {
				t.Errorf("cold %v: it waits until its caller gives up: %v", cold, err)
			}
			w.expectStandby("a", sandbox.Awake)
		})
	}
}

func (w *world) promisedDisk() int64 {
	w.Node.mu.Lock()
	defer w.Node.mu.Unlock()
	used, _ := w.Node.mu.reservations.Used()
	return used.Disk
}
