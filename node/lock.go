package node

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/cove-sandbox/cove/sandbox"
)

// lockDir makes the directory this process's alone until the file is closed.
// The kernel drops the lock with the process, however it dies.
func lockDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.Unavailable, "node.open", "%w", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		defer f.Close()
		if err != syscall.EWOULDBLOCK {
			return nil, sandbox.Errorf(sandbox.Unavailable, "node.open", "lock %s: %w", f.Name(), err)
		}
		holder := "another process"
		b := make([]byte, 32)
		if n, _ := f.ReadAt(b, 0); n > 0 {
			holder = "process " + strings.TrimSpace(string(b[:n]))
		}
		return nil, &sandbox.Error{Class: sandbox.Precondition, Op: "node.open", Msg: fmt.Sprintf("%s is in use by %s", dir, holder),
			Hint: "stop that one first, or give this node a directory of its own"}
	}
	// The pid is for people; the lock does not depend on it, so a full disk
	// here is no reason not to start.
	_ = f.Truncate(0)
	_, _ = fmt.Fprintf(f, "%d\n", os.Getpid())
	return f, nil
}
