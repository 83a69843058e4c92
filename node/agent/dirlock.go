package agent

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// lockPatience is how long a lock whose owner is dead may outlive it: a child
// that was forked when its parent was killed shares the lock until it executes.
const lockPatience = 10 * time.Second

// lockDir makes the directory this process's alone until the file is closed.
// The kernel drops the lock with the process, however it dies.
func lockDir(ctx context.Context, dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.Unavailable, "node.open", "%w", err)
	}
	for deadline := time.Now().Add(lockPatience); ; {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			break
		}
		if err != syscall.EWOULDBLOCK {
			f.Close()
			return nil, sandbox.Errorf(sandbox.Unavailable, "node.open", "lock %s: %w", f.Name(), err)
		}
		pid := lockOwner(f)
		if pid == 0 || Alive(pid) || time.Now().After(deadline) || ctx.Err() != nil {
			f.Close()
			holder := "another process"
			if pid != 0 {
				holder = fmt.Sprintf("process %d", pid)
			}
			return nil, &sandbox.Error{Class: sandbox.Precondition, Op: "node.open", Msg: fmt.Sprintf("%s is in use by %s", dir, holder),
				Hint: "stop that one first, or give this node a directory of its own"}
		}
		time.Sleep(5 * time.Millisecond)
	}
	// A full disk here is no reason not to start: without the pid, the next
	// one waits for nobody.
	_ = f.Truncate(0)
	_, _ = f.WriteAt(fmt.Appendf(nil, "%d\n", os.Getpid()), 0)
	return f, nil
}

// lockOwner is the pid written by who took the lock; 0 if there is none.
func lockOwner(f *os.File) int {
	b := make([]byte, 32)
	n, _ := f.ReadAt(b, 0)
	pid, _ := strconv.Atoi(strings.TrimSpace(string(b[:n])))
	return pid
}

// Alive says whether a process can still do something. One that was killed is
// there until its parent has looked, and holds its locks and sockets until its
// last thread has ended; by then its memory, arguments included, is gone.
func Alive(pid int) bool {
	if syscall.Kill(pid, 0) == syscall.ESRCH {
		return false
	}
	args, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return err != nil || len(args) > 0
}
