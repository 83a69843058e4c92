package runtimetest

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

func (s *suite) testBoot(t *testing.T) {
	d := s.open(t)
	k := s.boot(t, d)
	if err := k.Guest().Ping(deadline(t)); err != nil {
		t.Errorf("the guest of a booted kernel: %v", err)
	}
	if h := k.Handle(); h.ID != k.ID() || h.Driver != d.Name() || h.Version == 0 {
		t.Errorf("handle %+v", h)
	}
	if isDone(k) {
		t.Error("done before it began")
	}
	if one, other := k.Guest(), k.Guest(); one != other {
		t.Error("another guest client every time")
	}
	_, err := s.tryExec(deadline(t), k, shell("true"))
	expectClass(t, "exec before attach", err, sandbox.Precondition)
}

func (s *suite) testBootTakenID(t *testing.T) {
	d := s.open(t)
	k := s.attached(t, d)
	if other, err := d.Boot(deadline(t), k.ID(), s.Class); err == nil {
		_ = other.Destroy(deadline(t))
		t.Fatal("two kernels with one id")
	}
	s.sh(t, k, "true") // the refusal did the first no harm
}

// A driver boots the classes that its capabilities allow, and says of any other
// why not, leaving nothing.
func (s *suite) testBootClass(t *testing.T) {
	d := s.open(t)
	can := d.Capabilities()
	sized := sandbox.Resources{MilliCPU: 1000, Memory: 256 << 20}
	for _, c := range []struct {
		name  string
		class runtime.Class
		want  sandbox.Class
	}{
		{"of a size", runtime.Class{Name: "sized", Size: sized}, ""},
		{"of no size", runtime.Class{Name: "any"}, either(can.FixedSize, sandbox.Invalid, "")},
		{"of half a size", runtime.Class{Name: "half", Size: sandbox.Resources{MilliCPU: 1000}}, either(can.FixedSize, sandbox.Invalid, "")},
		{"of a negative size", runtime.Class{Name: "negative", Size: sandbox.Resources{MilliCPU: -1, Memory: 1 << 30}}, sandbox.Invalid},
		{"with a device", runtime.Class{Name: "device", Devices: []string{"/dev/null"}, Size: sized}, either(can.Devices, "", sandbox.Unsupported)},
	} {
		boot := func(make func(id string) (runtime.Kernel, error)) {
			id := s.id()
			k, err := make(id)
			if sandbox.ClassOf(err) != c.want {
				t.Errorf("a class %s: %v, want %q", c.name, err, c.want)
			}
			if err == nil {
				if err := k.Destroy(deadline(t)); err != nil {
					t.Error(err)
				}
			}
		}
		boot(func(id string) (runtime.Kernel, error) { return d.Boot(deadline(t), id, c.class) })
		if maker, ok := d.(runtime.Blanker); ok {
			boot(func(id string) (runtime.Kernel, error) {
				b, err := maker.Blank(deadline(t), id, c.class)
				if err != nil {
					return nil, err
				}
				return b.Start(deadline(t))
			})
		}
	}
	if left, err := d.Sweep(deadline(t), nil); err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func either(cond bool, yes, no sandbox.Class) sandbox.Class {
	if cond {
		return yes
	}
	return no
}

// A blank kernel becomes an ordinary one by Start, or goes without a trace.
func (s *suite) testBlank(t *testing.T) {
	d := s.open(t) // checks that nothing is left
	maker, ok := d.(runtime.Blanker)
	s.need(t, d, "able to make blank kernels", ok)
	unwanted, err := maker.Blank(deadline(t), s.id(), s.Class)
	if err != nil {
		t.Fatal(err)
	}
	if err := unwanted.Destroy(deadline(t)); err != nil {
		t.Error(err)
	}
	waitFor(t, "done", unwanted.Done())
	b, err := maker.Blank(deadline(t), s.id(), s.Class)
	if err != nil {
		t.Fatal(err)
	}
	k, err := b.Start(deadline(t))
	if err != nil {
		t.Fatal(err)
	}
	destroyAtEnd(t, k)
	if k.ID() != b.ID() {
		t.Errorf("blank %s became kernel %s", b.ID(), k.ID())
	}
	if err := k.Attach(deadline(t), s.container(t)); err != nil {
		t.Fatal(err)
	}
	s.sh(t, k, "true")
}

func (s *suite) testBootCancelled(t *testing.T) {
	d := s.open(t) // checks that nothing is left
	for _, after := range []time.Duration{-1, 0, time.Millisecond, 10 * time.Millisecond, 30 * time.Millisecond} {
		ctx, cancel := context.WithCancel(t.Context())
		if after < 0 {
			cancel()
		}
		time.AfterFunc(max(after, 0), cancel)
		k, err := d.Boot(ctx, s.id(), s.Class)
		if err == nil { // quicker than the cancel
			if err := k.Destroy(deadline(t)); err != nil {
				t.Error(err)
			}
			continue
		}
		if after < 0 {
			expectClass(t, "boot with a context that is over", err, sandbox.Canceled)
		}
	}
	removed, err := d.Sweep(deadline(t), nil)
	if err != nil || len(removed) != 0 {
		t.Errorf("cancelled boots left %v (%v)", removed, err)
	}
}

func (s *suite) testAttachOnce(t *testing.T) {
	k := s.attached(t, s.open(t))
	if err := k.Attach(deadline(t), s.container(t)); err == nil {
		t.Error("a second attach succeeded")
	}
	s.sh(t, k, "true")
}

func (s *suite) testDestroy(t *testing.T) {
	d := s.open(t)
	k := s.attached(t, d)
	started, end := s.background(t, k, shell("sleep 1000"))
	waitFor(t, "the process", started)
	for range 2 {
		if err := k.Destroy(deadline(t)); err != nil {
			t.Fatalf("destroy: %v", err)
		}
	}
	waitFor(t, "done", k.Done())
	if x := k.Exit(); x.Cause != sandbox.KilledByUser {
		t.Errorf("exit after destroy: %+v", x)
	}
	waitFor(t, "the stream of the process", end)
	if err := k.Guest().Ping(deadline(t)); err == nil {
		t.Error("the guest of a destroyed kernel answers")
	}
	if _, err := d.Boot(deadline(t), k.ID(), s.Class); err != nil {
		t.Errorf("its id is not free again: %v", err)
	} else if removed, err := d.Sweep(deadline(t), nil); err != nil || !slices.Equal(removed, []string{k.ID()}) {
		t.Errorf("sweep: %v, %v", removed, err)
	}
}

func (s *suite) testDestroyUnattached(t *testing.T) {
	k := s.boot(t, s.open(t))
	if err := k.Destroy(deadline(t)); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "done", k.Done())
}

func (s *suite) testConcurrent(t *testing.T) {
	d := s.open(t)
	const n = 6
	kernels := make([]runtime.Kernel, n)
	c := s.container(t)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			k, err := d.Boot(deadline(t), s.id(), s.Class)
			if err != nil {
				t.Errorf("boot: %v", err)
				return
			}
			kernels[i] = k
			if err := k.Attach(deadline(t), c); err != nil {
				t.Errorf("attach: %v", err)
			}
		})
	}
	wg.Wait()
	for _, k := range kernels {
		if k != nil {
			destroyAtEnd(t, k)
		}
	}
	if t.Failed() {
		return
	}
	for i, k := range kernels {
		wg.Go(func() {
			for j := range 5 {
				want := fmt.Sprintf("%d %d", i, j)
				if got := s.sh(t, k, "echo "+want+" >> mine; tail -n 1 mine"); got != want {
					t.Errorf("kernel %d said %q, want %q", i, got, want)
				}
			}
			if got := s.sh(t, k, "wc -l < mine"); got != "5" {
				t.Errorf("kernel %d has %s lines: somebody else wrote or erased", i, got)
			}
		})
	}
	wg.Wait()
}

func (s *suite) testSweep(t *testing.T) {
	d := s.open(t)
	keep, a, b := s.attached(t, d), s.attached(t, d), s.boot(t, d)
	removed, err := d.Sweep(deadline(t), map[string]bool{keep.ID(): true, "unknown": true})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(removed)
	want := []string{a.ID(), b.ID()}
	slices.Sort(want)
	if !slices.Equal(removed, want) {
		t.Errorf("removed %v, want %v", removed, want)
	}
	waitFor(t, "the end of a swept kernel", a.Done())
	s.sh(t, keep, "true")
	if removed, err := d.Sweep(deadline(t), map[string]bool{keep.ID(): true}); err != nil || len(removed) != 0 {
		t.Errorf("a second sweep removed %v (%v)", removed, err)
	}
}

func (s *suite) testKilled(t *testing.T) {
	if s.Kill == nil {
		t.Skip("nothing to kill it with")
	}
	d := s.open(t)
	k, neighbour := s.attached(t, d), s.attached(t, d)
	s.Kill(t, k)
	waitFor(t, "done", k.Done())
	if x := k.Exit(); x.Cause != sandbox.Infra || x.Detail == "" || x.At.IsZero() {
		t.Errorf("exit %+v, want infra with a detail and a time", x)
	}
	if _, err := s.tryExec(deadline(t), k, shell("true")); err == nil {
		t.Error("a dead kernel ran something")
	}
	if err := k.Destroy(deadline(t)); err != nil {
		t.Errorf("destroy of a dead kernel: %v", err)
	}
	if x := k.Exit(); x.Cause != sandbox.Infra {
		t.Errorf("destroy changed why it ended: %+v", x)
	}
	s.sh(t, neighbour, "true")
}

func (s *suite) testStats(t *testing.T) {
	d := s.open(t)
	k := s.attached(t, d)
	before, err := k.Stats(deadline(t))
	if err != nil {
		t.Fatal(err)
	}
	if before.Memory <= 0 {
		t.Errorf("no memory: %+v", before)
	}
	s.sh(t, k, "head -c 20000000 /dev/zero | tr '\\0' x > big; sync big 2>/dev/null || sync; cksum < big")
	after, err := k.Stats(deadline(t))
	if err != nil {
		t.Fatal(err)
	}
	if grown := after.DiskUsed - before.DiskUsed; grown < 19<<20 || grown > 60<<20 {
		t.Errorf("20 MB written, disk use grew by %d", grown)
	}
	if d.Capabilities().Limits && after.CPUTime <= before.CPUTime {
		t.Errorf("no CPU time used: %v then %v", before.CPUTime, after.CPUTime)
	}
}
