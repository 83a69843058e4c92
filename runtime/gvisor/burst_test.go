package gvisor_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/internal/testbin"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/runtime/gvisor"
	"github.com/cove-sandbox/cove/runtime/gvisor/spawn"
	"github.com/cove-sandbox/cove/sandbox"
)

// A burst of boots, more than the machine has cores by far, all stand.
func TestBurst(t *testing.T) {
	most := 24
	if n, err := strconv.Atoi(os.Getenv("COVE_TEST_BURST")); err == nil {
		most = n
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	d := open(t, t.TempDir())
	defer d.Close()
	var wg sync.WaitGroup
	for i := range most {
		wg.Go(func() {
			k, err := d.Blank(ctx, fmt.Sprintf("burst%d", i), runtime.Class{})
			if err != nil {
				t.Error(err)
				return
			}
			if err := k.Destroy(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

// A sentry that dies at its start says why, and is started again.
func TestSentryDiesAtStart(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	dir := t.TempDir()
	for d := dir; d != "/" && d != os.TempDir(); d = filepath.Dir(d) { // the sentry is nobody
		if err := os.Chmod(d, 0o777); err != nil {
			t.Fatal(err)
		}
	}
	runsc := filepath.Join(dir, "runsc")
	script := func(deaths int) {
		t.Helper()
		text := fmt.Sprintf("#!/bin/bash\nfor i in $(seq %[1]d); do mkdir %[2]s/death-%[1]d-$i && { echo died on purpose >&2; exit 1; }; done 2>/dev/null\nexec -a \"$0\" %[3]s \"$@\"\n",
			deaths, dir, testbin.Runsc(t))
		if err := os.WriteFile(runsc+".new", []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(runsc+".new", runsc); err != nil { // the spawner runs the old one
			t.Fatal(err)
		}
	}
	real, err := os.ReadFile(testbin.Runsc(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(runsc, real, 0o755); err != nil { // for the driver to look at
		t.Fatal(err)
	}
	d, err := gvisor.Open(ctx, gvisor.Config{Dir: filepath.Join(dir, "d"), RunscPath: runsc, GuestPath: testbin.Guest(t)})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	script(2)
	k, err := d.Blank(ctx, "third", runtime.Class{})
	if err != nil {
		t.Fatal(err)
	}
	if err := k.Destroy(ctx); err != nil {
		t.Error(err)
	}
	script(3)
	if _, err := d.Blank(ctx, "never", runtime.Class{}); sandbox.ClassOf(err) != sandbox.Unavailable {
		t.Errorf("three that died: %v", err)
	}
	if ents, err := os.ReadDir(filepath.Join(dir, "d", "k")); err != nil || len(ents) != 0 {
		t.Errorf("left behind: %v %v", ents, err)
	}
}

// The process that drives the kernels forks for none of them: its only child is
// the spawner. See package spawn for what a fork of a large server costs.
func TestTheDriverDoesNotFork(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	d := open(t, t.TempDir())
	defer d.Close()
	k, err := d.Blank(ctx, "forked", runtime.Class{})
	if err != nil {
		t.Fatal(err)
	}
	defer k.Destroy(context.WithoutCancel(ctx))
	tasks, err := filepath.Glob("/proc/self/task/*/children")
	if err != nil || len(tasks) == 0 {
		t.Fatalf("no list of children: %v", err)
	}
	var names []string
	for _, task := range tasks {
		b, err := os.ReadFile(task)
		if errors.Is(err, fs.ErrNotExist) {
			continue // a thread that ended
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, pid := range strings.Fields(string(b)) {
			line, err := os.ReadFile("/proc/" + pid + "/cmdline")
			if err != nil {
				t.Fatal(err)
			}
			names = append(names, strings.ReplaceAll(string(line), "\x00", " "))
		}
	}
	if len(names) != 1 || !strings.Contains(names[0], spawn.Command) {
		t.Errorf("children of the driver: %q, want the spawner alone", names)
	}
}
