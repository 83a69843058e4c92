package agent

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cove-sandbox/cove/cas/local"
	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/runtime/fake"
	"github.com/cove-sandbox/cove/sandbox"
)

// twoClasses is a machine with the plain class "fake" and the class "gpu", whose
// kernels are of another driver, have a device and a fixed size, and are at most
// three.
type twoClasses struct {
	*world
	gpu    *fake.Host
	gpuDrv *fake.Driver
}

func inTwoClasses(t *testing.T, f func(t *testing.T, w *twoClasses)) {
	dir := t.TempDir()
	store, err := local.Open(dir+"/state", local.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	synctest.Test(t, func(t *testing.T) {
		w := &twoClasses{world: newWorld(t, dir), gpu: fake.NewHost("", fake.Options{Bare: true, Name: "micro", Devices: true, FixedSize: true})}
		w.more = []*fake.Host{w.gpu}
		w.cfg = func(c *Config) {
			w.gpuDrv = w.gpu.Open()
			c.State = &StateConfig{Store: store, Plain: dir + "/plain", ColdAfter: time.Minute}
			c.Classes = append(c.Classes, Class{Driver: w.gpuDrv, Most: 3, Pool: PoolSettings{Min: 2, Background: 1, Parallel: 1},
				Class: runtime.Class{Name: "gpu", Devices: []string{"/dev/nvidia0"}, Size: sandbox.Resources{MilliCPU: 2000, Memory: 8 * gib}}})
		}
		w.open()
		defer w.finish()
		f(t, w)
	})
}

func (w *twoClasses) crash() {
	w.gpuDrv.Crash()
	w.world.crash(func(n int) int { return n })
}

func onGPU(s *sandbox.Spec) { s.KernelClass = "gpu" }

// A sandbox gets a kernel of its class, booted as the class says, and takes of the
// machine what its class does.
func TestSandboxesOfTwoClasses(t *testing.T) {
	inTwoClasses(t, func(t *testing.T, w *twoClasses) {
		w.create("plain")
		w.create("cuda", onGPU)
		w.consistent("plain", "cuda")
		if k := w.kernelOf("cuda"); !w.gpu.IsAttached(k) || w.gpu.Class(k).Name != "gpu" || !slices.Equal(w.gpu.Class(k).Devices, []string{"/dev/nvidia0"}) {
			t.Errorf("kernel %s is %+v, attached on the other driver: %v", k, w.gpu.Class(k), w.gpu.IsAttached(k))
		}
		if k := w.kernelOf("plain"); !w.host.IsAttached(k) || len(w.host.Class(k).Devices) != 0 {
			t.Errorf("kernel %s is %+v", k, w.host.Class(k))
		}
		c := w.CapacityNow()
		if want := int64(8*gib + gib); c.Used.Memory != want || c.Sandboxes != 2 {
			t.Errorf("%d sandboxes take %d bytes, want 2 with %d", c.Sandboxes, c.Used.Memory, want)
		}
		if got := c.Classes; len(got) != 2 || got[0].Name != "fake" || got[0].Sandboxes != 1 || got[1].Name != "gpu" || got[1].Runtime != "micro" || got[1].Sandboxes != 1 || got[1].MaxSandboxes != 3 {
			t.Errorf("classes: %+v", got)
		}
		sbs, _ := w.Live(t.Context())
		for _, sb := range sbs {
			if want := map[string]string{"plain": "fake", "cuda": "gpu"}[sb.ID]; sb.Spec.KernelClass != want {
				t.Errorf("%s has class %q, want %q", sb.ID, sb.Spec.KernelClass, want)
			}
		}
	})
}

func TestAnUnknownClass(t *testing.T) {
	inTwoClasses(t, func(t *testing.T, w *twoClasses) {
		_, err := w.Create(t.Context(), smallBox("a", func(s *sandbox.Spec) { s.KernelClass = "tpu" }), baseImage)
		expectClass(t, err, sandbox.ErrInvalid)
		var e *sandbox.Error
		if !errors.As(err, &e) || e.Field != "spec.kernel_class" || !strings.Contains(e.Hint, "fake, gpu") {
			t.Errorf("%v does not name the field and the classes there are (hint %q)", err, e.Hint)
		}
		w.consistent()
	})
}

// Both classes are found again, each by its driver, after the node was killed;
// leftovers of both are removed.
func TestRecoveryOfTwoClasses(t *testing.T) {
	inTwoClasses(t, func(t *testing.T, w *twoClasses) {
		w.create("plain")
		w.create("cuda", onGPU)
		w.create("asleep", onGPU)
		if err := w.Pause(t.Context(), "asleep", true); err != nil {
			t.Fatal(err)
		}
		plain, cuda := w.kernelOf("plain"), w.kernelOf("cuda")
		time.Sleep(time.Minute) // the pools are full: warm kernels of both are left
		w.crash()
		w.open()
		w.consistent("plain", "cuda", "asleep")
		if p, c := w.kernelOf("plain"), w.kernelOf("cuda"); p != plain || c != cuda {
			t.Errorf("kernels %s and %s, before %s and %s", p, c, plain, cuda)
		}
		if got := w.CapacityNow().Classes[1].Sandboxes; got != 1 {
			t.Errorf("%d are counted in class gpu, want 1: what is cold takes no device", got)
		}
		if err := w.touch("asleep"); err != nil { // it wakes in a kernel of its class
			t.Fatal(err)
		}
		if k := w.kernelOf("asleep"); !w.gpu.IsAttached(k) {
			t.Errorf("kernel %s is not of the class", k)
		}
		w.consistent("plain", "cuda", "asleep")
	})
}

// A journal older than classes is of the default class.
func TestAJournalWithoutClasses(t *testing.T) {
	inTwoClasses(t, func(t *testing.T, w *twoClasses) {
		w.create("old")
		w.Node.mu.Lock()
		b := w.Node.mu.live["old"]
		e := &entry{Sandbox: b.sb, Image: b.image, Kernel: b.kernel.Handle()}
		w.Node.mu.Unlock()
		e.Sandbox.Spec.KernelClass = ""
		if err := w.journal.append(record{Kind: recCreated, ID: "old", Entry: e}); err != nil {
			t.Fatal(err)
		}
		w.crash()
		w.open()
		w.consistent("old")
	})
}

// A node does not start without a class, or with another driver for it, while
// sandboxes of it are there: their kernels would be nobody's.
func TestAClassThatIsGone(t *testing.T) {
	inTwoClasses(t, func(t *testing.T, w *twoClasses) {
		w.create("cuda", onGPU)
		kernel := w.kernelOf("cuda")
		w.crash()
		cfg := w.cfg
		w.cfg = func(c *Config) { cfg(c); c.Classes = c.Classes[:1] }
		expectClass(t, w.tryOpen(), sandbox.ErrPrecondition)
		w.cfg = func(c *Config) { cfg(c); c.Classes[1].Driver, c.Classes[1].Class = w.drv, runtime.Class{Name: "gpu"} }
		expectClass(t, w.tryOpen(), sandbox.ErrPrecondition)
		w.cfg = cfg
		w.open()
		w.consistent("cuda")
		if k := w.kernelOf("cuda"); k != kernel {
			t.Errorf("kernel %s, before %s", k, kernel)
		}
	})
}

// Each pool is filled again by its own driver, and a class that is limited never
// has more kernels, warm ones included, than its devices allow.
func TestPoolsOfTwoClasses(t *testing.T) {
	inTwoClasses(t, func(t *testing.T, w *twoClasses) {
		warm := func(want ...int) {
			t.Helper()
			time.Sleep(time.Minute) // virtual
			var got []int
			for _, c := range w.CapacityNow().Classes {
				got = append(got, c.WarmKernels)
			}
			if !slices.Equal(got, want) {
				t.Errorf("warm kernels %v, want %v", got, want)
			}
			if n := len(w.gpu.IDs()); n > 3 {
				t.Errorf("%d kernels have the device, 3 can", n)
			}
		}
		warm(2, 2)
		w.create("a", onGPU)
		warm(2, 2)
		w.create("b", onGPU)
		warm(2, 1)
		w.create("c", onGPU)
		warm(2, 0)
		_, err := w.Create(t.Context(), smallBox("d", onGPU), baseImage)
		expectClass(t, err, sandbox.ErrNoCapacity)
		if err == nil || !strings.Contains(err.Error(), `3 sandboxes of kernel class "gpu"`) {
			t.Errorf("%v does not say of what there is no more", err)
		}
		w.create("plain") // of which there is
		if err := w.Kill(t.Context(), "a", sandbox.End{Cause: sandbox.KilledByUser}); err != nil {
			t.Fatal(err)
		}
		warm(2, 1)
		w.consistent("b", "c", "plain")
	})
}

// A driver that boots nothing fails the creates of its class and no others.
func TestABrokenClassLeavesTheOther(t *testing.T) {
	inTwoClasses(t, func(t *testing.T, w *twoClasses) {
		time.Sleep(time.Minute)
		w.gpuDrv.Hook(fake.Boot, func(context.Context, string) error { return errBroken })
		w.create("last", onGPU)
		w.create("last2", onGPU)
		for i := range 5 {
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			_, err := w.Create(ctx, smallBox("none", onGPU), baseImage)
			cancel()
			if err == nil {
				t.Fatalf("create %d in the broken class succeeded", i)
			}
			w.create([]string{"a", "b", "c", "d", "e"}[i])
		}
		w.consistent("last", "last2", "a", "b", "c", "d", "e")
	})
}

// A driver that cannot be swept at the start is of no use until it can; the
// other class serves meanwhile. If none can be swept the node does not start.
func TestAClassThatCannotBeSweptAtTheStart(t *testing.T) {
	inTwoClasses(t, func(t *testing.T, w *twoClasses) {
		w.create("cuda", onGPU)
		w.create("plain")
		w.crash()
		cfg := w.cfg
		w.cfg = func(c *Config) { cfg(c); w.gpuDrv.Fail(fake.Sweep, errBroken); w.drv.Fail(fake.Sweep, errBroken) }
		expectClass(t, w.tryOpen(), sandbox.ErrUnavailable)
		w.cfg = func(c *Config) { cfg(c); w.gpuDrv.Fail(fake.Sweep, errBroken) }
		w.open()
		w.create("other")
		_, err := w.Create(t.Context(), smallBox("more", onGPU), baseImage)
		expectClass(t, err, sandbox.ErrUnavailable)
		if !errors.Is(err, errBroken) {
			t.Errorf("%v does not say why", err)
		}
		time.Sleep(2 * time.Minute) // the next sweep succeeds
		w.create("more", onGPU)
		w.consistent("cuda", "plain", "other", "more")
	})
}

// Memory goes on in the class it was saved from, and only there.
func TestMemoryStaysInItsClass(t *testing.T) {
	inTwoClasses(t, func(t *testing.T, w *twoClasses) {
		w.create("cuda", onGPU)
		w.create("plain")
		snap := func(id string) sandbox.Snapshot {
			t.Helper()
			c, _, err := w.Take(t.Context(), id, node.SnapshotRequest{Kind: sandbox.MemorySnapshot, Keep: true})
			if err != nil {
				t.Fatal(err)
			}
			return sandbox.Snapshot{Kind: sandbox.MemorySnapshot, Content: c}
		}
		ofGPU, ofPlain := snap("cuda"), snap("plain")
		refused := func(err error) {
			t.Helper()
			expectClass(t, err, sandbox.ErrPrecondition)
			var e *sandbox.Error
			if !errors.As(err, &e) || e.Reason != sandbox.RestoreRefused {
				t.Errorf("%v is not a refusal to restore", err)
			}
		}
		_, err := w.CreateFrom(t.Context(), smallBox("x"), baseImage, ofGPU)
		refused(err)
		_, err = w.CreateFrom(t.Context(), smallBox("x", onGPU), baseImage, ofPlain)
		refused(err)
		_, _, err = w.Restore(t.Context(), "plain", baseImage, ofGPU)
		refused(err)
		// A record that does not say it does not matter: the state says it.
		unmarked := ofGPU
		unmarked.Content.KernelClass = ""
		_, err = w.CreateFrom(t.Context(), smallBox("x"), baseImage, unmarked)
		refused(err)
		if _, err := w.CreateFrom(t.Context(), smallBox("fork", onGPU), baseImage, ofGPU); err != nil {
			t.Error(err)
		}
		if _, _, err := w.Restore(t.Context(), "plain", baseImage, ofPlain); err != nil {
			t.Error(err)
		}
		// One from before there were classes is of the default.
		old := ofPlain
		old.Content.KernelClass = ""
		if _, err := w.CreateFrom(t.Context(), smallBox("older"), baseImage, old); err != nil {
			t.Error(err)
		}
		w.consistent("cuda", "plain", "fork", "older")
		if k := w.kernelOf("fork"); !w.gpu.IsAttached(k) {
			t.Errorf("kernel %s is not of the class", k)
		}
	})
}

// What the kernels of a class cannot do fails there, typed, and works in the
// other.
func TestClassesCanDifferentThings(t *testing.T) {
	dir := t.TempDir()
	store, err := local.Open(dir+"/state", local.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	synctest.Test(t, func(t *testing.T) {
		basic := fake.NewHost("", fake.Options{Bare: true, Name: "basic"})
		w := newWorld(t, dir)
		w.more = []*fake.Host{basic}
		w.cfg = func(c *Config) {
			c.State = &StateConfig{Store: store, Plain: dir + "/plain"}
			c.Classes = append(c.Classes, Class{Driver: basicDriver{basic.Open()}, Pool: PoolSettings{Min: 1}})
		}
		w.open()
		defer w.finish()
		w.create("able")
		w.create("basic", func(s *sandbox.Spec) { s.KernelClass = "basic" })
		for id, want := range map[string]sandbox.Class{"able": "", "basic": sandbox.Unsupported} {
			_, _, err := w.Take(t.Context(), id, node.SnapshotRequest{Kind: sandbox.MemorySnapshot, Keep: true})
			if got := sandbox.ClassOf(err); got != want {
				t.Errorf("snapshot of %s: %v, want %q", id, err, want)
			}
			if got := sandbox.ClassOf(w.Pause(t.Context(), id, false)); got != want {
				t.Errorf("pause of %s: %q, want %q", id, got, want)
			}
		}
		w.consistent("able", "basic")
	})
}

// basicDriver has none of the optional interfaces.
type basicDriver struct{ runtime.Driver }

func (d basicDriver) Capabilities() runtime.Capabilities { return runtime.Capabilities{Adopt: true} }

func (d basicDriver) Boot(ctx context.Context, id string, c runtime.Class) (runtime.Kernel, error) {
	k, err := d.Driver.Boot(ctx, id, c)
	return basicKernel{k}, err
}

type basicKernel struct{ runtime.Kernel }

func TestOpenRefusesClasses(t *testing.T) {
	plain, sized := fake.NewHost("", fake.Options{Bare: true}).Open(), fake.NewHost("", fake.Options{Bare: true, Name: "micro", Devices: true, FixedSize: true}).Open()
	size := sandbox.Resources{MilliCPU: 1000, Memory: gib}
	for _, c := range []struct {
		name    string
		classes []Class
		want    *sandbox.Error
	}{
		{"none", nil, sandbox.ErrInvalid},
		{"two of a name", []Class{{Driver: plain}, {Driver: plain}}, sandbox.ErrInvalid},
		{"a bad name", []Class{{Driver: plain, Class: runtime.Class{Name: "A class"}}}, sandbox.ErrInvalid},
		{"a driver without devices", []Class{{Driver: plain, Most: 1, Class: runtime.Class{Devices: []string{"/dev/x"}}}}, sandbox.ErrUnsupported},
		{"devices for any number", []Class{{Driver: sized, Class: runtime.Class{Devices: []string{"/dev/x"}, Size: size}}}, sandbox.ErrInvalid},
		{"a fixed size that is not said", []Class{{Driver: sized}}, sandbox.ErrInvalid},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := Open(t.Context(), Config{Dir: t.TempDir(), Name: "n", Images: testImages{}, Classes: c.classes})
			expectClass(t, err, c.want)
		})
	}
}

func TestASandboxFitsIntoItsClass(t *testing.T) {
	inTwoClasses(t, func(t *testing.T, w *twoClasses) {
		for field, ask := range map[string]sandbox.Resources{
			"spec.resources.cpu":          {MilliCPU: 2001, Memory: gib},
			"spec.resources.memory":       {MilliCPU: 100, Memory: 9 * gib},
			"spec.resources.memory_limit": {MilliCPU: 100, Memory: gib, MemoryLimit: 9 * gib},
		} {
			sb := smallBox("big", onGPU)
			sb.Spec.Resources = ask
			_, err := w.Create(t.Context(), sb, baseImage)
			expectClass(t, err, sandbox.ErrTooLarge)
			var e *sandbox.Error
			if errors.As(err, &e) && e.Field != field {
				t.Errorf("%v names %q, want %q", err, e.Field, field)
			}
			sb.ID, sb.Spec.KernelClass = "fits", ""
			if _, err := w.Create(t.Context(), sb, baseImage); err != nil {
				t.Errorf("of the plain class: %v", err)
			}
			if err := w.Kill(t.Context(), "fits", sandbox.End{Cause: sandbox.KilledByUser}); err != nil {
				t.Error(err)
			}
			if err := w.AckEnd(t.Context(), "fits"); err != nil {
				t.Error(err)
			}
		}
	})
}

// Two classes of one driver: their kernels are told apart by the node alone, and
// a sweep of the driver knows the kernels of both.
func TestTwoClassesOfOneDriver(t *testing.T) {
	inStateWorld(t, func(t *testing.T, w *world, _ *faultyStore) {
		cfg := w.cfg
		w.cfg = func(c *Config) {
			cfg(c)
			c.Classes = append(c.Classes, Class{Driver: w.drv, Class: runtime.Class{Name: "other"}, Pool: PoolSettings{Min: 1, Background: 1}})
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		w.open()
		other := func(s *sandbox.Spec) { s.KernelClass = "other" }
		w.create("plain")
		w.create("other", other)
		if p, o := w.host.Class(w.kernelOf("plain")).Name, w.host.Class(w.kernelOf("other")).Name; p != "fake" || o != "other" {
			t.Errorf("booted as %q and %q", p, o)
		}
		c, _, err := w.Take(t.Context(), "other", node.SnapshotRequest{Kind: sandbox.MemorySnapshot, Keep: true})
		if err != nil {
			t.Fatal(err)
		}
		if c.KernelClass != "other" {
			t.Errorf("the content is of class %q", c.KernelClass)
		}
		for _, class := range []string{"other", ""} { // the state says it even where its record does not
			c.KernelClass = class
			_, err = w.CreateFrom(t.Context(), smallBox("x"), baseImage, sandbox.Snapshot{Kind: sandbox.MemorySnapshot, Content: c})
			expectClass(t, err, sandbox.ErrPrecondition)
		}
		c.KernelClass = "other"
		if _, err = w.CreateFrom(t.Context(), smallBox("fork", other), baseImage, sandbox.Snapshot{Kind: sandbox.MemorySnapshot, Content: c}); err != nil {
			t.Error(err)
		}
		time.Sleep(5 * time.Minute) // sweeps take nobody's kernel
		w.consistent("plain", "other", "fork")
		w.crash(func(n int) int { return n })
		w.open()
		w.consistent("plain", "other", "fork")
	})
}
