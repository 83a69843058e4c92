package agent

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cove-sandbox/cove/cas/local"
	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/runtime/fake"
	"github.com/cove-sandbox/cove/sandbox"
)

// inReuseWorld is inWorld with a class for trust groups beside the plain one, and a
// content store.
func inReuseWorld(t *testing.T, f func(t *testing.T, w *world)) {
	dir := t.TempDir()
	store, err := local.Open(dir+"/state", local.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, dir)
		w.cfg = func(c *Config) {
			c.State = &StateConfig{Store: store, Plain: dir + "/plain"}
			c.Classes = append(c.Classes, Class{Class: runtime.Class{Name: "reuse"}, Driver: w.drv, Reuse: true, Pool: PoolSettings{Min: -1, Max: 4, Blank: -1}})
		}
		w.open()
		defer w.finish()
		f(t, w)
	})
}

// inGroup makes a sandbox of a tenant's group.
func (w *world) inGroup(tenant, group, id string, edits ...func(*sandbox.Spec)) string {
	w.t.Helper()
	sb := smallBox(id, edits...)
	sb.Tenant, sb.Spec.Reuse = tenant, group
	if _, err := w.Create(context.Background(), sb, baseImage); err != nil {
		w.t.Fatalf("create %s: %v", id, err)
	}
	return w.kernelOf(id)
}

func (w *world) kill(id string, cause sandbox.Cause) {
	w.t.Helper()
	if err := w.Kill(context.Background(), id, sandbox.End{Cause: cause}); err != nil {
		w.t.Fatalf("kill %s: %v", id, err)
	}
}

func TestAKernelServesTheNextOfItsGroupAndNobodyElse(t *testing.T) {
	inReuseWorld(t, func(t *testing.T, w *world) {
		first := w.inGroup("red", "run", "a")
		w.kill("a", sandbox.KilledByUser)
		for name, other := range map[string][2]string{"othertenant": {"blue", "run"}, "othergroup": {"red", "else"}, "nogroup": {"red", ""}} {
			if got := w.inGroup(other[0], other[1], name); got == first {
				t.Errorf("%s has the kernel of another group", name)
			}
		}
		if got := w.inGroup("red", "run", "b"); got != first {
			t.Error("the next of the group has another kernel")
		}
		if got := w.inGroup("red", "run", "c"); got == first {
			t.Error("two have one kernel")
		}
		w.consistent("b", "c", "othertenant", "othergroup", "nogroup")
		if c := w.CapacityNow(); c.Classes[1].Sandboxes != 4 || c.Classes[0].Sandboxes != 1 {
			t.Errorf("classes: %+v", c.Classes)
		}
		w.kill("nogroup", sandbox.KilledByUser)
		if got := w.inGroup("red", "", "d"); got == first {
			t.Error("one without a group has a kernel of a group")
		}
	})
}

func TestAKernelIsNotReusedAfter(t *testing.T) {
	for name, c := range map[string]struct {
		edit func(*sandbox.Spec)
		then func(t *testing.T, w *world)
	}{
		"an unclean end": {then: func(t *testing.T, w *world) {
			w.host.Kill(w.kernelOf("a"), runtime.Exit{Cause: sandbox.InitKilled})
			synctest.Wait()
		}},
		"an infrastructure fault": {then: func(t *testing.T, w *world) { w.kill("a", sandbox.Infra) }},
		"a pause": {then: func(t *testing.T, w *world) {
			if err := w.Pause(t.Context(), "a", false); err != nil {
				t.Fatal(err)
			}
			w.kill("a", sandbox.KilledByUser)
		}},
		"a scrub that failed": {then: func(t *testing.T, w *world) {
			w.drv.Fail(fake.Vacate, errors.New("something stays"))
			w.kill("a", sandbox.KilledByUser)
		}},
		"a minute of rest": {then: func(t *testing.T, w *world) {
			w.kill("a", sandbox.KilledByUser)
			time.Sleep(restMost + time.Second)
		}},
		"a restart of the node": {then: func(t *testing.T, w *world) {
			w.kill("a", sandbox.KilledByUser)
			w.crash(nil)
			w.open()
		}},
		"an adoption": {then: func(t *testing.T, w *world) {
			w.crash(nil)
			w.open()
			w.kill("a", sandbox.KilledByUser)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			inReuseWorld(t, func(t *testing.T, w *world) {
				first := w.inGroup("red", "run", "a")
				c.then(t, w)
				if got := w.inGroup("red", "run", "b"); got == first {
					t.Error("it is used again")
				}
				synctest.Wait()
				for _, id := range w.host.IDs() {
					if id == first {
						t.Error("it is still there")
					}
				}
				w.consistent("b")
			})
		})
	}
}

func TestAKernelIsNotReusedForEver(t *testing.T) {
	inReuseWorld(t, func(t *testing.T, w *world) {
		served := map[string]int{}
		for range 2*usesMost + 1 {
			served[w.inGroup("red", "run", "a")]++
			w.kill("a", sandbox.KilledByUser)
			if err := w.AckEnd(t.Context(), "a"); err != nil {
				t.Fatal(err)
			}
		}
		for k, n := range served {
			if n > usesMost {
				t.Errorf("%s served %d sandboxes", k, n)
			}
		}
		if len(served) != 3 {
			t.Errorf("%d kernels", len(served))
		}
	})
}

// Who waits for a boot is given what others of the group let go, and keeps nothing
// of theirs if it leaves.
func TestWhoWaitsGetsWhatItsGroupLetsGo(t *testing.T) {
	inReuseWorld(t, func(t *testing.T, w *world) {
		first := w.inGroup("red", "run", "a")
		synctest.Wait()
		block := make(chan struct{})
		w.drv.Hook(fake.Boot, func(context.Context, string) error { <-block; return nil })
		for k := w.classes[1].pool; ; { // what is warm is taken first
			ready, _ := k.counts()
			if ready == 0 {
				break
			}
			got, err := k.take(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			w.discard(got)
		}
		made := make(chan error, 1)
		go func() {
			sb := smallBox("b")
			sb.Tenant, sb.Spec.Reuse = "red", "run"
			_, err := w.Create(context.Background(), sb, baseImage)
			made <- err
		}()
		synctest.Wait()
		w.kill("a", sandbox.KilledByUser)
		if err := <-made; err != nil {
			t.Fatal(err)
		}
		if got := w.kernelOf("b"); got != first {
			t.Error("it waited for another kernel")
		}
		close(block)
		synctest.Wait()
	})
}

func TestRestingKernelsGoUnderPressure(t *testing.T) {
	inReuseWorld(t, func(t *testing.T, w *world) {
		for range 2 {
			first := w.inGroup("red", "run", "a")
			w.kill("a", sandbox.KilledByUser)
			w.reads(func() (Host, error) { return Host{Memory: 5 * gib, Disk: 100 * gib}, nil })
			time.Sleep(2 * lookMost)
			synctest.Wait()
			for _, id := range w.host.IDs() {
				if id == first {
					t.Error("a kernel that rests stays on a machine without memory")
				}
			}
			w.reads(nil)
			time.Sleep(2 * lookMost)
			if err := w.AckEnd(t.Context(), "a"); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// Memory of a sandbox in a group, and memory that a sandbox in a group starts from,
// goes on where it can; what was restored is not used again.
func TestMemoryAndGroups(t *testing.T) {
	inReuseWorld(t, func(t *testing.T, w *world) {
		w.inGroup("red", "run", "grouped")
		w.inGroup("red", "", "plain")
		for _, from := range []string{"grouped", "plain"} {
			c, _, err := w.Take(t.Context(), from, node.SnapshotRequest{Kind: sandbox.MemorySnapshot, Keep: true})
			if err != nil {
				t.Fatal(err)
			}
			snap := sandbox.Snapshot{Kind: sandbox.MemorySnapshot, Spec: smallBox(from).Spec, Content: c}
			for _, group := range []string{"run", ""} {
				id := "of" + from + group
				sb := smallBox(id)
				sb.Tenant, sb.Spec.Reuse = "red", group
				if _, err := w.CreateFrom(t.Context(), sb, baseImage, snap); err != nil {
					t.Fatalf("%s in group %q: %v", from, group, err)
				}
				was := w.kernelOf(id)
				w.kill(id, sandbox.KilledByUser)
				if got := w.inGroup("red", "run", "next"+from+group); got == was {
					t.Errorf("%s in group %q: its kernel is used again", from, group)
				}
			}
		}
	})
}

// Kernels of a group are like those of the plain class: memory of the one goes on in the other. A kernel
// that was restored serves nobody after that.
func TestMemoryGoesInAndOutOfAGroup(t *testing.T) {
	inReuseWorld(t, func(t *testing.T, w *world) {
		w.inGroup("red", "run", "a")
		w.inGroup("red", "", "plain")
		snap := func(id string) sandbox.Snapshot {
			t.Helper()
			c, _, err := w.Take(t.Context(), id, node.SnapshotRequest{Kind: sandbox.MemorySnapshot, Keep: true})
			if err != nil {
				t.Fatal(err)
			}
			return sandbox.Snapshot{Kind: sandbox.MemorySnapshot, Content: c}
		}
		ofGroup, ofPlain := snap("a"), snap("plain")
		b := smallBox("b", func(s *sandbox.Spec) { s.Reuse = "run" })
		b.Tenant = "red"
		if _, err := w.CreateFrom(t.Context(), b, baseImage, ofPlain); err != nil {
			t.Errorf("a sandbox of a group from a plain one: %v", err)
		}
		if _, err := w.CreateFrom(t.Context(), smallBox("c"), baseImage, ofGroup); err != nil {
			t.Errorf("a plain sandbox from one of a group: %v", err)
		}
		if _, _, err := w.Restore(t.Context(), "plain", baseImage, ofGroup); err != nil {
			t.Errorf("a plain sandbox rolled back to one of a group: %v", err)
		}
		restored := w.kernelOf("b")
		w.kill("b", sandbox.KilledByUser)
		if got := w.inGroup("red", "run", "d"); got == restored {
			t.Error("a kernel that was restored is used again")
		}
		w.consistent("a", "plain", "c", "d")
	})
}
