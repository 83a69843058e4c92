package gvisor

import (
	"context"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/internal/testbin"
	"github.com/cove-sandbox/cove/runtime"
)

// A paused kernel that runs briefly does run meanwhile, stands still again after it, is
// found so by another process, and can be saved.
func TestRunBriefly(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	k, _ := volumeKernel(t)
	run(t, k, "nohup sh -c 'while :; do echo >> /n; done' >/dev/null 2>&1 &")
	if err := k.Pause(ctx); err != nil {
		t.Fatal(err)
	}
	before := HostCPU(k) // says whether it ran
	if err := k.runBriefly(); err != nil {
		t.Fatal(err)
	}
	if used := HostCPU(k) - before; used < briefly/20 || !k.Paused() {
		t.Errorf("it used %v, paused %v", used, k.Paused())
	}
	if err := k.d.Close(); err != nil {
		t.Fatal(err)
	}
	d, err := Open(ctx, Config{Dir: k.d.dir, RunscPath: testbin.Runsc(t), GuestPath: testbin.Guest(t)})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	again, err := d.Adopt(ctx, k.Handle())
	if err != nil {
		t.Fatal(err)
	}
	adopted := again.(*Kernel)
	if !adopted.Paused() {
		t.Error("adopted it is not paused")
	}
	if _, err := adopted.Checkpoint(ctx, t.TempDir(), runtime.CheckpointOptions{}); err != nil {
		t.Error(err)
	}
	if err := adopted.Resume(ctx); err != nil {
		t.Fatal(err)
	}
	if out, _ := run(t, adopted, "test -s /n && echo counted"); out != "counted" {
		t.Errorf("resumed: %q", out)
	}
	if err := adopted.Destroy(ctx); err != nil {
		t.Error(err)
	}
}
