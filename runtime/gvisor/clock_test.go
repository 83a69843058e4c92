package gvisor_test

import (
	"bytes"
	"context"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// clocks are what a process inside reads, in seconds.
type clocks struct{ real, mono, boot, cpu float64 }

// What docs/state.md says about clocks, of one process that lives through a
// pause and a restore.
func TestClocks(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	d := open(t, t.TempDir())
	defer d.Close() // deferred calls run last first: after the kernels are gone
	c := runtime.Container{Rootfs: rootfs(t), Resources: sandbox.Resources{MilliCPU: 1000, MemoryLimit: 512 << 20, Disk: 64 << 20, Pids: 100}}
	k, err := d.Boot(ctx, "source", runtime.Class{})
	if err != nil {
		t.Fatal(err)
	}
	defer k.Destroy(context.Background())
	if err := k.Attach(ctx, c); err != nil {
		t.Fatal(err)
	}
	spec := sandbox.ProcessSpec{ExecID: "clock", Stdin: true, Args: []string{"python3", "-uc", `
import sys, time, os
for line in sys.stdin:
    os.write(1, b"%f %f %f %f\n" % (time.time(), time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME), time.process_time()))`}}
	started := make(chan struct{})
	go k.Guest().Start(ctx, spec, 0, func(e sandbox.ProcessEvent) error {
		if e.Started != nil {
			close(started)
		}
		return nil
	})
	<-started
	var offset int64
	read := func(k runtime.Kernel) (c clocks) {
		t.Helper()
		if err := k.Guest().SendInput(ctx, "clock", []byte("\n")); err != nil {
			t.Fatal(err)
		}
		stop := fmt.Errorf("read")
		err := k.Guest().Attach(ctx, "clock", offset, func(e sandbox.ProcessEvent) error {
			if e.Output == nil {
				return nil
			}
			offset = e.Output.Offset + int64(len(e.Output.Data))
			if strings.TrimSpace(string(e.Output.Data)) == "" { // the end of the line before
				return nil
			}
			if _, err := fmt.Sscan(string(e.Output.Data), &c.real, &c.mono, &c.boot, &c.cpu); err != nil {
				return err
			}
			return stop
		})
		if err != stop {
			t.Fatal(err)
		}
		return c
	}
	// between checks that all but the CPU's clock went on for as long as it
	// took, which was at least the rest.
	between := func(what string, a, b clocks, rest time.Duration) {
		t.Helper()
		for name, d := range map[string]float64{"realtime": b.real - a.real, "monotonic": b.mono - a.mono, "boottime": b.boot - a.boot} {
			if d < rest.Seconds() || d > 2*(b.real-a.real) {
				t.Errorf("%s of %v: %s went on for %.3f s", what, rest, name, d)
			}
		}
		if d := b.cpu - a.cpu; d > rest.Seconds()/2 {
			t.Errorf("%s of %v: %.3f s of CPU", what, rest, d)
		}
	}
	const rest = 500 * time.Millisecond // real time is what is tested
	a := read(k)
	if err := k.(runtime.Pauser).Pause(ctx); err != nil {
		t.Fatal(err)
	}
	time.Sleep(rest)
	if err := k.(runtime.Pauser).Resume(ctx); err != nil {
		t.Fatal(err)
	}
	b := read(k)
	between("a pause", a, b, rest)

	dir := t.TempDir()
	cp, err := k.(runtime.Checkpointer).Checkpoint(ctx, dir, runtime.CheckpointOptions{Stop: true})
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(rest)
	blank, err := d.Blank(ctx, "child", runtime.Class{})
	if err != nil {
		t.Fatal(err)
	}
	child, err := blank.(runtime.Restorer).Restore(ctx, dir, cp, c)
	if err != nil {
		t.Fatal(err)
	}
	defer child.Destroy(context.Background())
	between("a time on disk", b, read(child), rest)
}

// A clock that is not calibrated is read by a call into the sentry, and a Go program reads it at every turn. One of a
// kernel that has just booted is read without: it takes less than half the time of what is always a call.
func TestClockOfAYoungKernelIsNoCall(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	d := open(t, t.TempDir())
	defer d.Close()
	k, err := d.Boot(ctx, "young", runtime.Class{})
	if err != nil {
		t.Fatal(err)
	}
	defer k.Destroy(context.Background())
	c := runtime.Container{Rootfs: rootfs(t), Resources: sandbox.Resources{MilliCPU: 1000, MemoryLimit: 512 << 20, Disk: 64 << 20, Pids: 100}}
	if err := k.Attach(ctx, c); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	err = k.Guest().Start(ctx, sandbox.ProcessSpec{ExecID: "clock", Args: []string{"python3", "-uc", `
import time, os
def took(f):
    t = time.perf_counter()
    for _ in range(2000): f()
    return time.perf_counter() - t
print(min(took(time.monotonic) for _ in range(3)) / min(took(os.getppid) for _ in range(3)))`}}, 0, func(e sandbox.ProcessEvent) error {
		if e.Output != nil {
			out.Write(e.Output.Data)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	ratio, err := strconv.ParseFloat(strings.TrimSpace(out.String()), 64)
	if err != nil {
		t.Fatal(err)
	}
	if ratio == 0 || ratio > 0.5 {
		t.Errorf("a look at the clock takes %.2f of the time of a call", ratio)
	}
}
