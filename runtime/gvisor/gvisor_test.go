package gvisor_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/cove-sandbox/cove/internal/testbin"
	"github.com/cove-sandbox/cove/runtime/gvisor"
)

// open opens a driver in a fresh directory and checks at the end that nothing
// of it is left on the host.
func open(t *testing.T, dir string) *gvisor.Driver {
	t.Helper()
	d, err := gvisor.Open(context.Background(), gvisor.Config{
		Dir: dir, RunscPath: testbin.Runsc(t), GuestPath: testbin.Guest(t), DebugLog: os.Getenv("COVE_TEST_SENTRY_LOG"),
	})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func tempDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "cove-gv-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Errorf("cleaning up: %v", err)
		}
	})
	return filepath.Join(dir, "gv")
}
