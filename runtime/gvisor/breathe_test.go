package gvisor

import (
	"bytes"
	"context"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/image/imagetest"
	"github.com/cove-sandbox/cove/internal/testbin"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// A paused kernel that breathes runs meanwhile, stands still again after it, is
// found so by another process, and can be saved.
func TestBreathe(t *testing.T) {
	lib, img := imagetest.Base(t)
	path, err := lib.Path(img.ID)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	open := func(dir string) *Driver {
		t.Helper()
		d, err := Open(ctx, Config{Dir: dir, RunscPath: testbin.Runsc(t), GuestPath: testbin.Guest(t)})
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	dir := t.TempDir()
	d := open(dir)
	booted, err := d.Boot(ctx, "k")
	if err != nil {
		t.Fatal(err)
	}
	k := booted.(*Kernel)
	defer func() {
		if err := k.Destroy(context.Background()); err != nil {
			t.Error(err)
		}
	}()
	c := runtime.Container{Rootfs: runtime.Rootfs{Path: path, User: "root"},
		Resources: sandbox.Resources{MilliCPU: 1000, MemoryLimit: 256 << 20, Disk: 64 << 20, Pids: 100}}
	if err := k.Attach(ctx, c); err != nil {
		t.Fatal(err)
	}
	run := func(id, script string) string {
		t.Helper()
		var out bytes.Buffer
		err := k.Guest().Start(ctx, sandbox.ProcessSpec{ExecID: id, Command: script}, 0, func(e sandbox.ProcessEvent) error {
			if e.Output != nil {
				out.Write(e.Output.Data)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return out.String()
	}
	run("counts", "nohup sh -c 'while :; do echo >> /n; done' >/dev/null 2>&1 &")
	if err := k.Pause(ctx); err != nil {
		t.Fatal(err)
	}
	used := func() int64 { // what it has used of the CPU says whether it ran
		s, err := d.groups.stats(k.id)
		if err != nil {
			t.Fatal(err)
		}
		return int64(s.CPUTime)
	}
	before := used()
	if err := k.breathe(); err != nil {
		t.Fatal(err)
	}
	after := used()
	if after-before < int64(breath)/20 || !k.Paused() {
		t.Errorf("it used %v, paused %v", time.Duration(after-before), k.Paused())
	}
	handle := k.Handle()
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	d = open(dir)
	defer d.Close()
	adopted, err := d.Adopt(ctx, handle)
	if err != nil {
		t.Fatal(err)
	}
	k = adopted.(*Kernel)
	if !k.Paused() {
		t.Error("adopted it is not paused")
	}
	if _, err := k.Checkpoint(ctx, t.TempDir(), runtime.CheckpointOptions{}); err != nil {
		t.Error(err)
	}
	if err := k.Resume(ctx); err != nil {
		t.Fatal(err)
	}
	if out := run("after", "test -s /n && echo counted"); out != "counted\n" {
		t.Errorf("resumed: %q", out)
	}
}
