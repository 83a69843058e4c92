package gvisor_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/image/imagetest"
	"github.com/cove-sandbox/cove/internal/testbin"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/runtime/gvisor"
	"github.com/cove-sandbox/cove/sandbox"
)

// measured is a driver, and a container of the base image for its kernels.
func measured(b *testing.B) (*gvisor.Driver, runtime.Container) {
	b.Helper()
	lib, img := imagetest.Base(b)
	path, err := lib.Path(img.ID)
	if err != nil {
		b.Fatal(err)
	}
	d, err := gvisor.Open(context.Background(), gvisor.Config{Dir: b.TempDir(), RunscPath: testbin.Runsc(b), GuestPath: testbin.Guest(b)})
	if err != nil {
		b.Fatal(err)
	}
	return d, runtime.Container{Rootfs: runtime.Rootfs{Path: path, Env: img.Config.Env},
		Resources: sandbox.Resources{MilliCPU: 2000, MemoryLimit: 512 << 20, Disk: 1 << 30, Pids: 4096}}
}

// BenchmarkLife reports what each step of a sandbox's life costs the driver.
func BenchmarkLife(b *testing.B) {
	d, c := measured(b)
	defer d.Close()
	spent := map[string]time.Duration{}
	step := func(name string, f func() error) {
		t := time.Now()
		if err := f(); err != nil {
			b.Fatal(name, err)
		}
		spent[name] += time.Since(t)
	}
	ctx := context.Background()
	n := 0
	for b.Loop() {
		var k runtime.Kernel
		n++
		exec := func() error {
			n++
			return k.Guest().Start(ctx, sandbox.ProcessSpec{ExecID: fmt.Sprint(n), Args: []string{"true"}}, 0, func(sandbox.ProcessEvent) error { return nil })
		}
		step("boot", func() (err error) { k, err = d.Boot(ctx, fmt.Sprint("k", n), runtime.Class{}); return err })
		step("attach", func() error { return k.Attach(ctx, c) })
		step("exec1", exec)
		for range 5 {
			step("exec", exec)
		}
		step("reset", func() error { return k.Reset(ctx, c) })
		step("exec1reset", exec)
		step("destroy", func() error { return k.Destroy(ctx) })
	}
	spent["exec"] /= 5
	for name, t := range spent {
		b.ReportMetric(float64(t.Microseconds())/1000/float64(b.N), name+"-ms")
	}
	b.ReportMetric(0, "ns/op")
}

// BenchmarkFirst is what a first create and exec cost in a kernel as it boots, in one
// that has rehearsed, and in one that served another sandbox, in turn: time, and CPU
// of the kernel from its boot on (or from when it was vacated), and of that CPU what each
// step took. With cgroup v1 the first 20 ms or so of a sentry are not counted there: start-cpu-ms is
// all of the sentry's own process until it has booted, without its stubs.
// "later" is what the third and the fourth sandbox of a kernel cost.
// COVE_BENCH_RUNSC, a list of runsc binaries, compares them in one run, as in BenchmarkRestore; each may
// be followed by the guest that it is to have, RUNSC+GUEST.
func BenchmarkFirst(b *testing.B) {
	paths := strings.FieldsFunc(os.Getenv("COVE_BENCH_RUNSC"), func(r rune) bool { return r == ',' })
	if len(paths) == 0 {
		paths = []string{testbin.Runsc(b)}
	}
	var fs []*firsts
	for _, p := range paths {
		runsc, guest, given := strings.Cut(p, "+")
		if !given {
			guest = testbin.Guest(b)
		}
		d, err := gvisor.Open(context.Background(), gvisor.Config{Dir: b.TempDir(), RunscPath: runsc, GuestPath: guest})
		if err != nil {
			b.Fatal(err)
		}
		defer d.Close()
		f := &firsts{b: b, d: d, spent: map[string]time.Duration{}, times: map[string]int{}}
		if len(paths) > 1 {
			f.suffix = ":" + filepath.Base(runsc)
			if given {
				f.suffix += "+" + filepath.Base(guest)
			}
		}
		fs = append(fs, f)
	}
	lib, img := imagetest.Base(b)
	path, err := lib.Path(img.ID)
	if err != nil {
		b.Fatal(err)
	}
	c := runtime.Container{Rootfs: runtime.Rootfs{Path: path, Env: img.Config.Env},
		Resources: sandbox.Resources{MilliCPU: 2000, MemoryLimit: 512 << 20, Disk: 1 << 30, Pids: 4096}}
	for b.Loop() {
		for _, f := range fs {
			for _, rehearsed := range []bool{false, true} {
				f.life(c, rehearsed)
			}
		}
	}
	for _, f := range fs {
		for name, t := range f.spent {
			b.ReportMetric(float64(t.Microseconds())/1000/float64(f.times[name]), name+f.suffix)
		}
	}
	b.ReportMetric(0, "ns/op")
}

// firsts are the first steps of kernels of one driver.
type firsts struct {
	b      *testing.B
	d      *gvisor.Driver
	suffix string
	n      int
	spent  map[string]time.Duration // by metric
	times  map[string]int
}

func (f *firsts) add(metric string, d time.Duration) {
	f.spent[metric] += d
	f.times[metric]++
}

// life boots a kernel and has it serve four sandboxes.
func (f *firsts) life(c runtime.Container, rehearsed bool) {
	must := func(err error) {
		f.b.Helper()
		if err != nil {
			f.b.Fatal(err)
		}
	}
	ctx := context.Background()
	f.n++
	began := time.Now()
	k, err := f.d.Boot(ctx, fmt.Sprint("k", f.n), runtime.Class{})
	must(err)
	defer func() { must(k.Destroy(ctx)) }()
	name, used := "fresh", time.Duration(0)
	step := func(step string, err error) {
		must(err)
		now, ok := k.(runtime.CPUMeter).CPUTime() // not Stats, which asks the guest
		if !ok {
			f.b.Fatal("no CPU time")
		}
		f.add(name+"-"+step+"-cpu-ms", now-used)
		used = now
	}
	if rehearsed {
		name = "rehearsed"
	}
	step("boot", nil)
	f.add("start-cpu-ms", processCPU(f.b, k))
	if rehearsed {
		step("rehearsal", k.(runtime.Rehearser).Rehearse(ctx))
	}
	from := time.Duration(0)
	for use := range 4 {
		if use > 0 {
			name, began, from = "reused", time.Now(), used
			if use > 1 {
				name = "later"
			}
			k.Guest().Retire()
			step("vacate", k.(runtime.Reuser).Vacate(ctx))
		}
		step("attach", k.Attach(ctx, c))
		step("exec", k.Guest().Start(ctx, sandbox.ProcessSpec{ExecID: name + fmt.Sprint(use), Args: []string{"true"}}, 0, func(sandbox.ProcessEvent) error { return nil }))
		f.add(name+"-ms", time.Since(began))
		f.add(name+"-cpu-ms", used-from)
	}
}

// processCPU is what the sentry's process has used since it was started, before it was in its cgroup too.
func processCPU(b *testing.B, k runtime.Kernel) time.Duration {
	b.Helper()
	var of struct {
		PID int `json:"pid"`
	}
	if err := json.Unmarshal(k.Handle().Data, &of); err != nil {
		b.Fatal(err)
	}
	var t unix.Timespec
	if err := unix.ClockGettime(int32(^of.PID<<3|2), &t); err != nil { // clock_getcpuclockid(3)
		b.Fatal(err)
	}
	return time.Duration(t.Nano())
}
