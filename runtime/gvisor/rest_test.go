package gvisor_test

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// A restored sandbox in which nothing happens does nothing: its sentry once looked
// every millisecond whether pages that nobody needs were loaded.
func TestRestoredRests(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	d := open(t, t.TempDir())
	defer d.Close()
	c := runtime.Container{Rootfs: rootfs(t), Resources: sandbox.Resources{MilliCPU: 1000, MemoryLimit: 512 << 20, Disk: 64 << 20, Pids: 100}}
	k, err := d.Boot(ctx, "source", runtime.Class{})
	if err != nil {
		t.Fatal(err)
	}
	defer k.Destroy(context.Background())
	if err := k.Attach(ctx, c); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	cp, err := k.(runtime.Checkpointer).Checkpoint(ctx, dir, runtime.CheckpointOptions{Stop: true})
	if err != nil {
		t.Fatal(err)
	}
	b, err := d.Blank(ctx, "child", runtime.Class{})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Destroy(context.Background())
	child, err := b.(runtime.Restorer).Restore(ctx, dir, cp, c)
	if err != nil {
		t.Fatal(err)
	}
	const most = 100 // in a second; it was 800 and more
	n := most
	for before := sleeps(t, child); n >= most; {
		select {
		case <-ctx.Done():
			t.Fatalf("its threads went to sleep %d times in the last second", n)
		case <-time.After(time.Second):
		}
		now := sleeps(t, child)
		n, before = now-before, now
	}
}

// sleeps is how often the threads of a sentry have waited for something.
func sleeps(t *testing.T, k runtime.Kernel) (n int) {
	t.Helper()
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", sentryPID(t, k)))
	if err != nil || len(threads) == 0 {
		t.Fatalf("no threads: %v", err)
	}
	for _, path := range threads {
		for line := range strings.Lines(string(readFile(path))) {
			var of int
			if _, err := fmt.Sscanf(line, "voluntary_ctxt_switches: %d", &of); err == nil {
				n += of
			}
		}
	}
	return n
}

// A kernel in which nothing happens gives back what it booted with. Sets of spans that Go's runtime makes for a
// heap of a gigabyte, and a counter for each call there may be, were 1.6 MiB of it (see overlay.go and table_small.go of
// cmd/runsc/edits).
func TestIdleKernelIsSmall(t *testing.T) {
	c := runtime.Container{Rootfs: rootfs(t), Resources: sandbox.Resources{MilliCPU: 1000, MemoryLimit: 512 << 20, Disk: 64 << 20, Pids: 100}}
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	d := open(t, t.TempDir())
	defer d.Close()
	k, err := d.Boot(ctx, "idle", runtime.Class{})
	if err != nil {
		t.Fatal(err)
	}
	defer k.Destroy(context.Background())
	if err := k.Attach(ctx, c); err != nil {
		t.Fatal(err)
	}
	const most = 5800 // KiB
	for {
		own := ownMemory(t, k)
		if own <= most {
			t.Logf("%d KiB", own)
			return
		}
		select {
		case <-ctx.Done():
			t.Fatalf("its sentry has %d KiB of its own, more than %d", own, most)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// ownMemory of a sentry, in KiB: what is not of a file.
func ownMemory(t *testing.T, k runtime.Kernel) int {
	t.Helper()
	for line := range strings.Lines(string(readFile(fmt.Sprintf("/proc/%d/status", sentryPID(t, k))))) {
		var n int
		if _, err := fmt.Sscanf(line, "RssAnon: %d kB", &n); err == nil {
			return n
		}
	}
	t.Fatal("the process says nothing of its memory")
	return 0
}

func sentryPID(t *testing.T, k runtime.Kernel) int {
	t.Helper()
	var saved struct{ PID int }
	if err := json.Unmarshal(k.Handle().Data, &saved); err != nil || saved.PID == 0 {
		t.Fatalf("no process: %v", err)
	}
	return saved.PID
}
