package agent

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/runtime/fake"
	"github.com/cove-sandbox/cove/sandbox"
)

// snapshotOf takes a memory snapshot of a sandbox that is made for it.
func (w *world) snapshotOf(id string) sandbox.Snapshot {
	w.t.Helper()
	w.create(id)
	c, _, err := w.Node.Take(context.Background(), id, node.SnapshotRequest{Kind: sandbox.MemorySnapshot, Keep: true})
	if err != nil {
		w.t.Fatalf("snapshot of %s: %v", id, err)
	}
	return sandbox.Snapshot{Kind: sandbox.MemorySnapshot, Content: c}
}

func (w *world) createFrom(id string, from sandbox.Snapshot, edits ...func(*sandbox.Sandbox)) {
	w.t.Helper()
	sb := smallBox(id)
	for _, e := range edits {
		e(&sb)
	}
	if _, err := w.CreateFrom(context.Background(), sb, baseImage, from); err != nil {
		w.t.Fatalf("create %s: %v", id, err)
	}
}

// pair creates two, a second apart: no burst, and enough to be in use.
func (w *world) pair(a, b string, from sandbox.Snapshot, edits ...func(*sandbox.Sandbox)) {
	w.t.Helper()
	w.createFrom(a, from, edits...)
	time.Sleep(time.Second)
	w.createFrom(b, from, edits...)
}

func of(tenant string) func(*sandbox.Sandbox) { return func(s *sandbox.Sandbox) { s.Tenant = tenant } }

// heldIDs are the kernels that were restored for nobody yet.
func (w *world) heldIDs() (ids []string) {
	a := w.classes[0].ahead
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, u := range a.mu.used {
		for _, h := range u.held {
			ids = append(ids, h.ID())
		}
	}
	slices.Sort(ids)
	return ids
}

func (w *world) expectHeld(want int) []string {
	w.t.Helper()
	synctest.Wait()
	ids := w.heldIDs()
	if len(ids) != want {
		w.t.Errorf("%d kernels are held, want %d", len(ids), want)
	}
	if c := w.CapacityNow(); c.HeldKernels != len(ids) {
		w.t.Errorf("the node says that %d are held of %d, and %d are", c.HeldKernels, c.HeldTarget, len(ids))
	}
	return ids
}

// From the second time on kernels are held of a checkpoint, a create takes one of
// them, and they go when nobody comes any more.
func TestHeldForCreates(t *testing.T) {
	inStateWorld(t, func(t *testing.T, w *world, _ *faultyStore) {
		from := w.snapshotOf("a") // kernels here are bare: all of their snapshots are the same, and tenants are told apart
		w.createFrom("c1", from, of("t1"))
		w.createFrom("d1", from, of("t2"))
		time.Sleep(10 * time.Second)
		w.expectHeld(0) // who came once may never come again
		w.createFrom("c2", from, of("t1"))
		time.Sleep(10 * time.Second)
		held := w.expectHeld(1)
		w.consistent("a", "c1", "c2", "d1") // and it counts as nobody's
		restores := 0
		w.drv.Hook(fake.Restore, func(context.Context, string) error { restores++; return nil })
		w.createFrom("c3", from, of("t1"))
		if got := w.kernelOf("c3"); got != held[0] || restores != 0 {
			t.Errorf("it has kernel %s after %d restores, held was %v", got, restores, held)
		}
		w.createFrom("d2", from, of("t2")) // for which none is held
		if restores != 1 {
			t.Errorf("%d restores", restores)
		}
		time.Sleep(10 * time.Second)
		w.expectHeld(2) // one of each
		w.consistent("a", "c1", "c2", "c3", "d1", "d2")
		time.Sleep(aheadIdle)
		w.expectHeld(0)
		w.consistent("a", "c1", "c2", "c3", "d1", "d2")
	})
}

// A burst takes what is held and restores the rest as ever; the next one is expected to
// be as large.
func TestHeldInABurst(t *testing.T) {
	inStateWorld(t, func(t *testing.T, w *world, _ *faultyStore) {
		from := w.snapshotOf("a")
		for _, id := range ids("b", 5) {
			w.createFrom(id, from)
		}
		time.Sleep(10 * time.Second)
		w.expectHeld(0) // one fork is no use of its own
		for _, id := range ids("d", 5) {
			w.createFrom(id, from)
		}
		time.Sleep(10 * time.Second)
		w.expectHeld(5)
		restores := 0
		w.drv.Hook(fake.Restore, func(context.Context, string) error { restores++; return nil })
		for _, id := range ids("c", 7) {
			w.createFrom(id, from)
		}
		if restores != 2 {
			t.Errorf("%d of 7 were restored, 5 were held", restores)
		}
	})
}

// What is held of a checkpoint is for creates like those before: of the same tenant and on
// the same size of disk.
func TestHeldOfAnother(t *testing.T) {
	inStateWorld(t, func(t *testing.T, w *world, _ *faultyStore) {
		from := w.snapshotOf("a")
		w.pair("b", "c", from, of("t1"))
		time.Sleep(10 * time.Second)
		held := w.expectHeld(1)
		for id, edit := range map[string]func(*sandbox.Sandbox){
			"other":  of("t2"),
			"larger": func(s *sandbox.Sandbox) { of("t1")(s); s.Spec.Resources.Disk = 2 * gib },
		} {
			w.createFrom(id, from, edit)
			if got := w.kernelOf(id); got == held[0] {
				t.Errorf("%s was given a kernel that was held for another", id)
			}
		}
		if now := w.expectHeld(1); now[0] != held[0] {
			t.Errorf("held is %v, was %v", now, held)
		}
		w.createFrom("small", from, of("t1"), func(s *sandbox.Sandbox) { s.Spec.Resources.Memory = gib / 2 })
		if got := w.kernelOf("small"); got != held[0] {
			t.Errorf("it has kernel %s, held was %v", got, held) // limits are given with the name
		}
	})
}

// A held kernel that dies is noticed, is not given out, and is replaced.
func TestHeldThatDies(t *testing.T) {
	inStateWorld(t, func(t *testing.T, w *world, _ *faultyStore) {
		from := w.snapshotOf("a")
		w.pair("b", "c", from)
		time.Sleep(10 * time.Second)
		held := w.expectHeld(1)
		w.host.Kill(held[0], runtime.Exit{Cause: sandbox.Infra})
		w.createFrom("d", from) // at once: nobody may have noticed
		if got := w.kernelOf("d"); got == held[0] {
			t.Error("a dead kernel was given out")
		}
		time.Sleep(10 * time.Second)
		again := w.expectHeld(1)
		w.host.Kill(again[0], runtime.Exit{Cause: sandbox.Infra})
		time.Sleep(10 * time.Second)
		if last := w.expectHeld(1); last[0] == again[0] || slices.Contains(w.host.IDs(), again[0]) {
			t.Errorf("held is %v after %v died; on the machine: %v", last, again, w.host.IDs())
		}
		w.drv.Fail(fake.Take, errBroken)
		w.createFrom("e", from) // one that does not go on is replaced by a restore
		w.consistent("a", "b", "c", "d", "e")
	})
}

// Nobody feels that kernels cannot be held.
func TestHoldThatFails(t *testing.T) {
	inStateWorld(t, func(t *testing.T, w *world, _ *faultyStore) {
		from := w.snapshotOf("a")
		tries := 0
		w.drv.Hook(fake.Hold, func(context.Context, string) error { tries++; return errBroken })
		w.pair("b", "c", from)
		time.Sleep(time.Minute)
		w.expectHeld(0)
		if tries < 2 || tries > 20 {
			t.Errorf("tried %d times in a minute", tries)
		}
		w.drv.Hook(fake.Hold, nil)
		w.createFrom("d", from)
		time.Sleep(time.Minute)
		w.expectHeld(1)
		w.consistent("a", "b", "c", "d")
	})
}

// What is held gives way: to memory that is short before anything else does, to a
// deleted checkpoint, and to creates and the kernels they need.
func TestHeldGivesWay(t *testing.T) {
	inStateWorld(t, func(t *testing.T, w *world, _ *faultyStore) {
		from := w.snapshotOf("a")
		w.pair("b", "c", from)
		time.Sleep(10 * time.Second)
		held := w.expectHeld(1)
		if err := w.Pause(t.Context(), "b", false); err != nil {
			t.Fatal(err)
		}
		// Without the kernel that is held the machine has enough.
		w.reads(func() (Host, error) {
			if slices.Contains(w.host.IDs(), held[0]) {
				return Host{Memory: 5 * gib, Disk: 100 * gib}, nil
			}
			return Host{Memory: 64*gib/10 + heldMemory, Disk: 100 * gib}, nil
		})
		time.Sleep(10 * time.Second)
		if slices.Contains(w.host.IDs(), held[0]) {
			t.Error("memory is short and it is held")
		}
		w.expectStandby("b", sandbox.Hot)
		w.reads(nil)
		time.Sleep(10 * time.Second)
		w.expectHeld(1)
		if _, err := w.Collect(t.Context(), []string{from.Content.Manifest}); err != nil {
			t.Fatal(err)
		}
		w.expectHeld(1)
		if _, err := w.Collect(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		w.expectHeld(0)
		time.Sleep(10 * time.Second)
		w.expectHeld(0)
		w.consistent("a", "b", "c")
	})
}

func TestHoldsWaitForCreates(t *testing.T) {
	inStateWorld(t, func(t *testing.T, w *world, _ *faultyStore) {
		from := w.snapshotOf("a")
		time.Sleep(time.Minute)
		attach := make(chan struct{})
		w.drv.Hook(fake.Attach, func(context.Context, string) error { <-attach; return nil })
		go w.create("slow")
		synctest.Wait()
		w.pair("b", "c", from)
		time.Sleep(10 * time.Second)
		w.expectHeld(0) // somebody creates
		close(attach)
		time.Sleep(10 * time.Second)
		w.expectHeld(1)
	})
}

// A node that stops leaves none, one that dies leaves them to the next start.
func TestHeldAndTheNode(t *testing.T) {
	inStateWorld(t, func(t *testing.T, w *world, _ *faultyStore) {
		from := w.snapshotOf("a")
		w.pair("b", "c", from)
		time.Sleep(10 * time.Second)
		held := w.expectHeld(1)
		if err := w.Node.Close(); err != nil {
			t.Fatal(err)
		}
		if slices.Contains(w.host.IDs(), held[0]) {
			t.Error("a node that stopped left what it held")
		}
		w.open()
		w.consistent("a", "b", "c")
		w.pair("d", "e", from)
		time.Sleep(10 * time.Second)
		held = w.expectHeld(1)
		w.crash(func(n int) int { return n })
		if !slices.Contains(w.host.IDs(), held[0]) {
			t.Error("what was held went with the process: the test shows nothing")
		}
		w.open()
		if slices.Contains(w.host.IDs(), held[0]) {
			t.Error("what an earlier process held is there")
		}
		w.consistent("a", "b", "c", "d", "e")
	})
}

// What is expected is held before the first create of it, and let go of with the
// expectation.
func TestHeldForWhatIsExpected(t *testing.T) {
	inStateWorld(t, func(t *testing.T, w *world, _ *faultyStore) {
		from := w.snapshotOf("a")
		e := node.Expectation{TTL: time.Minute, Restores: 3, States: []sandbox.Content{from.Content},
			Ahead: []node.Ahead{{Tenant: "t1", Spec: smallBox("").Spec, Image: baseImage, From: from.Content, Count: 3}}}
		if _, err := w.Expect(t.Context(), "plan", e); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Second)
		held := w.expectHeld(3)
		w.createFrom("b", from, of("t1"))
		if got := w.kernelOf("b"); !slices.Contains(held, got) {
			t.Errorf("it has kernel %s, held were %v", got, held)
		}
		time.Sleep(2 * time.Minute)
		w.expectHeld(0) // one create is no use of its own
		w.consistent("a", "b")
	})
}

// With keys nothing is restored before it is wanted.
func TestNothingIsHeldWithKeys(t *testing.T) {
	inStateWorld(t, func(t *testing.T, w *world, _ *faultyStore) {
		if err := w.Node.Close(); err != nil {
			t.Fatal(err)
		}
		plain := w.cfg
		w.cfg = func(c *Config) { plain(c); c.State.Sealed = true }
		w.open()
		from := w.snapshotOf("a")
		for _, id := range ids("b", 4) {
			w.createFrom(id, from)
		}
		time.Sleep(10 * time.Second)
		w.expectHeld(0)
	})
}
