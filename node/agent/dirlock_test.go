package agent

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/cove-sandbox/cove/sandbox"
)

// A server killed while it forks leaves a child that shares its lock until it
// executes: who starts next waits for that, but not for a living owner.
func TestLockOfADeadOwner(t *testing.T) {
	cmd := exec.Command("true")
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	hold := func(dir string, pid int) *os.File {
		f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(f, "%d\n", pid)
		if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
			t.Fatal(err)
		}
		return f
	}

	dir := t.TempDir()
	f := hold(dir, os.Getpid())
	if _, err := lockDir(t.Context(), dir); !errors.Is(err, sandbox.ErrPrecondition) {
		t.Errorf("while its owner lives: %v", err)
	}
	f.Close()

	dir = t.TempDir()
	f = hold(dir, cmd.Process.Pid)
	got := make(chan error, 1)
	go func() {
		l, err := lockDir(t.Context(), dir)
		if err == nil {
			l.Close()
		}
		got <- err
	}()
	f.Close()
	if err := <-got; err != nil {
		t.Errorf("after its owner died: %v", err)
	}
}
