package gvisor_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/internal/testbin"
	"github.com/cove-sandbox/cove/runtime/gvisor"
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
			k, err := d.Blank(ctx, fmt.Sprintf("burst%d", i))
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
func TestStillborn(t *testing.T) {
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
		if err := os.WriteFile(runsc, []byte(text), 0o755); err != nil {
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
	k, err := d.Blank(ctx, "third")
	if err != nil {
		t.Fatal(err)
	}
	if err := k.Destroy(ctx); err != nil {
		t.Error(err)
	}
	script(3)
	if _, err := d.Blank(ctx, "never"); sandbox.ClassOf(err) != sandbox.Unavailable {
		t.Errorf("three that died: %v", err)
	}
	if ents, err := os.ReadDir(filepath.Join(dir, "d", "k")); err != nil || len(ents) != 0 {
		t.Errorf("left behind: %v %v", ents, err)
	}
}
