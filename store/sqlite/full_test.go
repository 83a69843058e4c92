package sqlite

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// A file system that really is full shows itself in the WAL, in its index or in
// a checkpoint, each with another code of SQLite's.
func TestFullFileSystem(t *testing.T) {
	dir := t.TempDir()
	if err := syscall.Mount("cove-test", dir, "tmpfs", 0, "size=2m"); err != nil {
		t.Skipf("needs the right to mount: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	path := filepath.Join(dir, "cove.db")
	s, err := Open(everywhere(), path)
	if err != nil {
		t.Fatal(err)
	}
	ballast := filepath.Join(dir, "ballast")
	if err := os.WriteFile(ballast, make([]byte, 200<<10), 0o600); err != nil {
		t.Fatal(err)
	}
	made := map[string]bool{}
	fill := func() {
		t.Helper()
		for i := range 1000 {
			sb := newSandbox(fmt.Sprintf("a%dx%d", len(made), i))
			sb.Spec.Env = map[string]string{"X": strings.Repeat("x", 20<<10)}
			_, _, err := s.CreateSandbox(everywhere(), sb, store.Idempotency{})
			if err == nil {
				made[sb.ID] = true
				continue
			}
			class(t, "create on a full disk", err, sandbox.ErrDiskFull, true)
			_, err = s.GetSandbox(everywhere(), sb.ID)
			class(t, "what did not fit", err, sandbox.ErrNotFound, false)
			return
		}
		t.Fatal("2 MiB hold 20 MiB")
	}
	fill()
	fill() // it stays full, and says so again

	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	create(t, s, newSandbox("again"))
	made["again"] = true
	if err := s.Close(); err != nil && !errors.Is(err, sandbox.ErrDiskFull) {
		t.Error(err)
	}
	if s, err = Open(everywhere(), path); err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	sbs, _, err := s.ListSandboxes(everywhere(), store.Filter{PageSize: 10000})
	if err != nil || len(sbs) != len(made) {
		t.Errorf("%d of %d sandboxes after a full disk, %v", len(sbs), len(made), err)
	}
}
