package gvisor_test

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"gvisor.dev/gvisor/runsc/specutils"

	"github.com/cove-sandbox/cove/internal/testbin"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/runtime/gvisor"
	"github.com/cove-sandbox/cove/sandbox"
)

// BenchmarkRestore is the restore of BenchmarkState alone: its source is gone,
// so nothing else runs, and what the kernel spends on it (CPU, page faults) is
// reported beside the time. Interleaved with attaching to a booted kernel, and with
// taking one that was restored ahead.
// COVE_BENCH_RUNSC, a list of runsc binaries, compares them in one run: each
// round takes all of them in turn, and their metrics have their names.
// COVE_BENCH_MB is how much memory the source holds; 5 if it is not set.
func BenchmarkRestore(b *testing.B) {
	paths := strings.FieldsFunc(os.Getenv("COVE_BENCH_RUNSC"), func(r rune) bool { return r == ',' })
	if len(paths) == 0 {
		paths = []string{testbin.Runsc(b)}
	}
	rs := make([]*restores, len(paths))
	for i, p := range paths {
		suffix := ""
		if len(paths) > 1 {
			suffix = ":" + filepath.Base(p)
		}
		rs[i] = newRestores(b, p, suffix)
		defer rs[i].d.Close()
	}
	for b.Loop() {
		for _, r := range rs {
			r.round(b)
		}
	}
	for _, r := range rs {
		for name, v := range r.spent {
			slices.Sort(v)
			b.ReportMetric(v[len(v)/2], name+r.suffix)
			if strings.HasSuffix(name, "-ms") {
				b.ReportMetric(v[len(v)/10], "low-"+name+r.suffix) // what noise left alone
			}
		}
	}
	b.ReportMetric(0, "ns/op")
}

// restores of one checkpoint.
type restores struct {
	d      *gvisor.Driver
	runsc  string
	c      runtime.Container
	dir    string
	cp     runtime.Checkpoint
	suffix string
	n      int
	spent  map[string][]float64
}

func newRestores(b *testing.B, runsc, suffix string) *restores {
	ctx := context.Background()
	d, err := gvisor.Open(ctx, gvisor.Config{Dir: b.TempDir(), RunscPath: runsc, GuestPath: testbin.Guest(b), DebugLog: os.Getenv("COVE_TEST_SENTRY_LOG")})
	if err != nil {
		b.Fatal(err)
	}
	mb, err := strconv.Atoi(cmp.Or(os.Getenv("COVE_BENCH_MB"), "5"))
	if err != nil {
		b.Fatal(err)
	}
	r := &restores{d: d, runsc: runsc, dir: b.TempDir(), suffix: suffix, spent: map[string][]float64{},
		c: runtime.Container{Rootfs: rootfs(b), Resources: sandbox.Resources{MilliCPU: 2000, MemoryLimit: int64(512+mb) << 20, Disk: 1 << 30, Pids: 4096}}}
	source, err := d.Boot(ctx, r.id(), runtime.Class{})
	if err != nil {
		b.Fatal(err)
	}
	defer source.Destroy(ctx)
	if err := source.Attach(ctx, r.c); err != nil {
		b.Fatal(err)
	}
	up := make(chan struct{}, 1)
	hold := sandbox.ProcessSpec{ExecID: "hold", Args: []string{"python3", "-uc", fmt.Sprintf("import os,time\nx=[os.urandom(1<<20) for _ in range(%d)]\nos.write(1,b'up')\ntime.sleep(1e6)", mb)}}
	go source.Guest().Start(ctx, hold, 0, func(e sandbox.ProcessEvent) error {
		if e.Output != nil {
			up <- struct{}{}
		}
		return nil
	})
	<-up
	r.exec(b, source)
	if r.cp, err = source.(runtime.Checkpointer).Checkpoint(ctx, r.dir, runtime.CheckpointOptions{Stop: true}); err != nil {
		b.Fatal(err)
	}
	return r
}

func (r *restores) id() string { r.n++; return fmt.Sprint("k", r.n) }

func (r *restores) exec(b *testing.B, k runtime.Kernel) {
	b.Helper()
	if err := k.Guest().Start(context.Background(), sandbox.ProcessSpec{ExecID: r.id(), Args: []string{"true"}}, 0, func(sandbox.ProcessEvent) error { return nil }); err != nil {
		b.Fatal(err)
	}
}

func (r *restores) round(b *testing.B) {
	ctx := context.Background()
	specutils.ExePath = r.runsc // gVisor's, and global: the last driver's otherwise
	must := func(err error) {
		b.Helper()
		if err != nil {
			b.Fatal(err)
		}
	}
	note := func(name string, v float64) { r.spent[name] = append(r.spent[name], v) }
	since := func(t time.Time) float64 { return float64(time.Since(t).Microseconds()) / 1000 }
	plain, err := r.d.Boot(ctx, r.id(), runtime.Class{})
	must(err)
	blank, err := r.d.Blank(ctx, r.id(), runtime.Class{})
	must(err)
	m, err := plain.Stats(ctx)
	must(err)
	note("booted-MiB", float64(m.Memory)/(1<<20))
	if m, err = blank.(runtime.Kernel).Stats(ctx); err != nil { // a blank is a kernel that has not begun
		b.Fatal(err)
	}
	note("blank-MiB", float64(m.Memory)/(1<<20))
	t := time.Now()
	must(plain.Attach(ctx, r.c))
	r.exec(b, plain)
	note("attach+exec1-ms", since(t))
	must(plain.Destroy(ctx))

	before := spendingOf(blank.(runtime.Kernel))
	t = time.Now()
	child, err := blank.(runtime.Restorer).Restore(ctx, r.dir, r.cp, r.c)
	must(err)
	restored := since(t)
	mid := spendingOf(child)
	t = time.Now()
	r.exec(b, child)
	exec1 := since(t)
	after := spendingOf(child)
	note("restore-ms", restored)
	note("exec1-ms", exec1)
	note("restore+exec1-ms", restored+exec1)
	t = time.Now()
	r.exec(b, child)
	note("exec2-ms", since(t))
	note("restore-faults", mid.faults-before.faults)
	note("restore-cpu-ms", mid.cpu-before.cpu)
	note("exec1-cpu-ms", after.cpu-mid.cpu)
	s, err := child.Stats(ctx)
	must(err)
	note("child-MiB", float64(s.Memory)/(1<<20))
	must(child.Destroy(ctx))

	ahead, err := r.d.Blank(ctx, r.id(), runtime.Class{})
	must(err)
	held, err := ahead.(runtime.Holder).Hold(ctx, r.dir, r.cp, r.c)
	must(err)
	t = time.Now()
	c := r.c
	c.Sandbox = "taken"
	taken, err := held.Take(ctx, c)
	must(err)
	note("take-ms", since(t))
	r.exec(b, taken)
	note("take+exec1-ms", since(t))
	must(taken.Destroy(ctx))
}

// spending of a kernel: page faults of the sentry, and milliseconds of CPU of
// it and its stubs.
type spending struct{ faults, cpu float64 }

func spendingOf(k runtime.Kernel) (s spending) {
	s.cpu = float64(gvisor.HostCPU(k).Microseconds()) / 1000
	var saved struct{ PID int }
	_ = json.Unmarshal(k.Handle().Data, &saved)
	stat := string(readFile(fmt.Sprintf("/proc/%d/stat", saved.PID)))
	const minflt = 10 - 3 // as proc(5) counts, from the field after the name
	if f := strings.Fields(stat[strings.LastIndexByte(stat, ')')+1:]); len(f) > minflt {
		s.faults, _ = strconv.ParseFloat(f[minflt], 64)
	}
	return s
}
