package gvisor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/internal/testbin"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// What was running or saved before an upgrade goes on after it, in the programs
// it had, is saved again, and survives the next restart; the programs go when
// nothing needs them.
func TestEarlierProgramsGoOn(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	dir, err := os.MkdirTemp("", "cove-programs-") // t.TempDir is closed to a sentry's user
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	if err := os.Chmod(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	open := func(runsc, guest string) *Driver {
		t.Helper()
		d, err := Open(ctx, Config{Dir: dir, RunscPath: runsc, GuestPath: guest})
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	c := runtime.Container{Rootfs: runtime.Rootfs{Path: baseImage(t), User: "root"},
		Resources: sandbox.Resources{MilliCPU: 1000, MemoryLimit: 256 << 20, Disk: 64 << 20, Pids: 100}}
	expect := func(k runtime.Kernel, script, want string) {
		t.Helper()
		if out, code := run(t, k.(*Kernel), script); out != want || code != 0 {
			t.Errorf("%s: %q, exit code %d, want %q", script, out, code, want)
		}
	}
	defer func() { // what a failed test left
		d := open(testbin.Runsc(t), testbin.Guest(t))
		defer d.Close()
		if swept, err := d.Sweep(context.WithoutCancel(ctx), nil); err != nil || len(swept) > 0 && !t.Failed() {
			t.Errorf("left were %q, %v", swept, err)
		}
	}()
	destroy := func(k interface {
		Destroy(ctx context.Context) error
	}) {
		t.Helper()
		if err := k.Destroy(context.WithoutCancel(ctx)); err != nil {
			t.Error(err)
		}
	}
	checkpoint := func(k runtime.Kernel) (string, runtime.Checkpoint) {
		t.Helper()
		at := t.TempDir()
		cp, err := k.(runtime.Checkpointer).Checkpoint(ctx, at, runtime.CheckpointOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return at, cp
	}
	restore := func(d *Driver, id, at string, cp runtime.Checkpoint) runtime.Kernel {
		t.Helper()
		b, err := d.BlankOf(ctx, id, runtime.Class{}, cp.Build)
		if err != nil {
			t.Fatal(err)
		}
		k, err := b.(runtime.Restorer).Restore(ctx, at, cp, c)
		if err != nil {
			t.Fatal(err)
		}
		return k
	}
	files := func() (names []string) {
		t.Helper()
		ents, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range ents {
			if e.Type().IsRegular() && e.Name() != "stdio" {
				names = append(names, e.Name())
			}
		}
		return names
	}

	d := open(testbin.Runsc(t), testbin.Guest(t))
	k, err := d.Boot(ctx, "first", runtime.Class{})
	if err != nil {
		t.Fatal(err)
	}
	if err := k.Attach(ctx, c); err != nil {
		t.Fatal(err)
	}
	expect(k, "echo saved > /dev/shm/note", "")
	at, cp := checkpoint(k)
	expect(k, "echo running > /dev/shm/note", "")
	handle, was := k.Handle(), files()
	if len(was) != 2 {
		t.Fatalf("after a checkpoint the driver has %q", was)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}

	laterRunsc, laterGuest := testbin.LaterRunsc(t), testbin.LaterGuest(t)
	d = open(laterRunsc, laterGuest)
	if d.Fits(cp.Build) {
		t.Error("a checkpoint of other programs fits")
	}
	b, err := d.Blank(ctx, "plain", runtime.Class{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.(runtime.Restorer).Restore(ctx, at, cp, c); !errors.Is(err, sandbox.ErrPrecondition) {
		t.Errorf("restored into a blank of the new programs: %v", err)
	}
	destroy(b)
	adopted, err := d.Adopt(ctx, handle)
	if err != nil {
		t.Fatal(err)
	}
	expect(adopted, "cat /dev/shm/note", "running")
	runningAt, running := checkpoint(adopted)
	child := restore(d, "child", at, cp)
	expect(child, "cat /dev/shm/note; echo again > /dev/shm/note", "saved")
	childAt, again := checkpoint(child)
	if again.Build != cp.Build {
		t.Errorf("a checkpoint of earlier programs is of %s, want %s", again.Build, cp.Build)
	}
	if err := child.Reset(ctx, c); err != nil {
		t.Fatal(err)
	}
	expect(child, "cat /dev/shm/note 2>/dev/null; echo pristine", "pristine")
	destroy(adopted)
	childHandle := child.Handle()
	fresh, err := d.Boot(ctx, "fresh", runtime.Class{})
	if err != nil {
		t.Fatal(err)
	}
	if err := fresh.Attach(ctx, c); err != nil {
		t.Fatal(err)
	}
	checkpoint(fresh)
	destroy(fresh)
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}

	// The next process knows of the first programs by its kernels and by what it
	// is told alone.
	d = open(laterRunsc, laterGuest)
	defer d.Close()
	if child, err = d.Adopt(ctx, childHandle); err != nil {
		t.Fatal(err)
	}
	prune := func(builds ...string) int64 {
		t.Helper()
		freed, err := d.PruneBuilds(ctx, func(context.Context) ([]string, error) { return builds, nil })
		if err != nil {
			t.Error(err)
		}
		return freed
	}
	if freed := prune(); freed != 0 || len(files()) != 4 {
		t.Errorf("what a kernel needs: %d bytes freed, left are %q", freed, files())
	}
	destroy(child)
	if freed := prune(cp.Build); freed != 0 || len(files()) != 4 {
		t.Errorf("what a checkpoint needs: %d bytes freed, left are %q", freed, files())
	}
	for i, s := range []struct {
		at   string
		cp   runtime.Checkpoint
		want string
	}{{runningAt, running, "running"}, {childAt, again, "again"}} {
		k := restore(d, fmt.Sprintf("later%d", i), s.at, s.cp)
		expect(k, "cat /dev/shm/note", s.want)
		destroy(k)
	}
	if freed := prune(); freed < 50<<20 || slices.ContainsFunc(files(), func(f string) bool { return slices.Contains(was, f) }) || len(files()) != 2 {
		t.Errorf("%d bytes freed, left are %q", freed, files())
	}
	_, err = d.BlankOf(ctx, "none", runtime.Class{}, cp.Build)
	if e := (*sandbox.Error)(nil); !errors.As(err, &e) || e.Class != sandbox.Precondition || e.Hint == "" {
		t.Errorf("of programs that are gone: %v", err)
	}
	if _, err := os.Stat(filepath.Join(dir, "k", "none")); err == nil {
		t.Error("a refused blank left its directory")
	}
}
