package gvisor_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/runtime/gvisor"
	"github.com/cove-sandbox/cove/sandbox"
)

// The share of the CPU is lifted while a kernel saves itself, and is what it was
// after a checkpoint, after one that failed, and after a process that died in the
// middle of one.
func TestCheckpointLiftsTheShareOfTheCPU(t *testing.T) {
	ctx := t.Context()
	dir := t.TempDir()
	d := open(t, dir)
	defer func() { d.Close() }()
	kernel, err := d.Boot(ctx, "k", runtime.Class{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { kernel.Destroy(context.Background()) }()
	err = kernel.Attach(ctx, runtime.Container{Rootfs: rootfs(t),
		Resources: sandbox.Resources{MilliCPU: 300, MemoryLimit: 256 << 20, Disk: 64 << 20, Pids: 100}})
	if err != nil {
		t.Fatal(err)
	}
	k := kernel.(*gvisor.Kernel)
	was := gvisor.Quota(t, k)
	same := func(when string) {
		t.Helper()
		if now := gvisor.Quota(t, k); now != was {
			t.Errorf("%s the share is %q, was %q", when, now, was)
		}
	}

	var lifted atomic.Bool
	stop, watched := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(watched)
		for {
			if gvisor.Quota(t, k) != was {
				lifted.Store(true)
			}
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
			}
		}
	}()
	// Some milliseconds each, which who looks may sleep through on a busy machine.
	for try := 0; try < 10 && err == nil && !lifted.Load(); try++ {
		_, err = k.Checkpoint(ctx, t.TempDir(), runtime.CheckpointOptions{})
	}
	close(stop)
	<-watched
	if err != nil {
		t.Fatal(err)
	}
	if !lifted.Load() {
		t.Error("it was never lifted")
	}
	same("after a checkpoint")

	failing, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := k.Checkpoint(failing, t.TempDir(), runtime.CheckpointOptions{}); err == nil {
		t.Error("a checkpoint of one who has left")
	}
	same("after a checkpoint that failed")

	gvisor.Unlimited(k) // and never again limited: the process dies here
	if gvisor.Quota(t, k) == was {
		t.Fatal("not lifted")
	}
	h := k.Handle()
	d.Close()
	d = open(t, dir)
	if kernel, err = d.Adopt(ctx, h); err != nil {
		t.Fatal(err)
	}
	k = kernel.(*gvisor.Kernel)
	same("after a crash")
}
