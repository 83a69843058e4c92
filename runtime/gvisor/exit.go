package gvisor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// watch notices the end of the sentry through a pidfd, which works for a child
// and for an adopted process alike, and through Go's poller, so that 4,000
// kernels cost no thread.
func (k *Kernel) watch() error {
	fd, err := unix.PidfdOpen(k.saved.PID, unix.PIDFD_NONBLOCK)
	if err != nil {
		return fmt.Errorf("watching the sentry: %w", err)
	}
	f := os.NewFile(uintptr(fd), "pidfd")
	if processStart(k.saved.PID) != k.saved.StartTime {
		f.Close()
		return errors.New("its process is gone")
	}
	rc, err := f.SyscallConn()
	if err != nil {
		return errors.Join(err, f.Close())
	}
	ctx, cancel := context.WithCancel(context.Background())
	k.stop = func() { cancel(); f.Close() } // an os.File may be closed twice
	if err := k.watchOOM(ctx); err != nil {
		k.stop()
		return err
	}
	k.watchers.Go(func() {
		defer f.Close()
		err := rc.Read(func(fd uintptr) bool {
			p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
			n, err := unix.Poll(p, 0)
			return err == nil && n == 1
		})
		if err != nil && ctx.Err() != nil {
			return // stopped watching, the kernel lives on
		}
		k.reap()
		cause, detail := sandbox.Infra, "the sentry process died"
		if k.d.groups.oomKills(k.id) > 0 {
			cause, detail = sandbox.OOM, overLimit
		}
		if words := k.logTail(); words != "" && !isClosed(k.done) {
			k.d.log.Error("a sentry died", "kernel", k.id, "cause", cause, "words", words)
		}
		k.finish(cause, detail)
	})
	return nil
}

// wordsFile in a kernel's directory is the standard error of its sentry.
const wordsFile = "words"

// mostWords of them are told: the reason of a panic is in its first lines.
const mostWords = 2 << 10

// logTail is what a sentry that died said, to be put after an error; "" where
// that is nothing. Without it the reason of a failed start is only that there
// was one.
func (k *Kernel) logTail() string {
	f, err := os.Open(filepath.Join(k.dir(), wordsFile))
	if err != nil {
		return ""
	}
	defer f.Close()
	b, _ := io.ReadAll(io.LimitReader(f, mostWords))
	if len(b) == 0 {
		return ""
	}
	return ": " + strings.TrimSpace(string(b))
}

// watchInitAfter is when a kernel begins to watch the init of its container. To watch is a
// connection to the guest of its own, which a sandbox of one short exec can do without: 2 of 16 ms of CPU.
// An init that was killed meanwhile is noticed then.
const watchInitAfter = 250 * time.Millisecond

// watchInitLocked notices when code inside kills its container's init, which takes
// the container down but leaves the kernel and the guest alive.
func (k *Kernel) watchInitLocked() {
	if k.mu.initTimer != nil {
		k.mu.initTimer.Stop()
	}
	init := k.mu.initPID
	k.mu.initTimer = time.AfterFunc(watchInitAfter, func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		if !k.mu.destroyed && !k.mu.left && k.mu.initPID == init {
			k.waitForInitLocked()
		}
	})
}

func (k *Kernel) waitForInitLocked() {
	ctx, cancel := context.WithCancel(context.Background())
	client := k.guest
	k.watchers.Go(func() {
		defer cancel()
		if err := client.WaitInit(ctx); err != nil {
			return // left, reset or the whole kernel is going
		}
		// An OOM kill of a stub process looks from inside like a killed init.
		if k.d.groups.oomKills(k.id) > 0 {
			k.finish(sandbox.OOM, overLimit)
			return
		}
		k.finish(sandbox.InitKilled, "process 1 of the sandbox was killed from inside")
	})
	k.watchers.Go(func() {
		select {
		case <-k.done:
			cancel()
		case <-ctx.Done():
		}
	})
}

// stopTimersLocked keeps what was to be done later from being begun.
func (k *Kernel) stopTimersLocked() {
	for _, t := range []*time.Timer{k.mu.spareTimer, k.mu.initTimer} {
		if t != nil {
			t.Stop()
		}
	}
}

// finish records the first reason and closes Done.
func (k *Kernel) finish(cause sandbox.Cause, detail string) {
	k.doneOnce.Do(func() {
		k.exit = runtime.Exit{Cause: cause, Detail: detail, At: time.Now()}
		close(k.done)
	})
}

// reap collects the zombie of a sentry that is our child; for an adopted one
// there is nothing to collect.
func (k *Kernel) reap() {
	var ws unix.WaitStatus
	for {
		_, err := unix.Wait4(k.saved.PID, &ws, unix.WNOHANG, nil)
		if !errors.Is(err, unix.EINTR) {
			return
		}
	}
}

// Destroy ends the kernel and removes all it held. See runtime.Kernel.
func (k *Kernel) Destroy(ctx context.Context) error {
	const op = "gvisor.destroy"
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.mu.destroyed {
		return nil
	}
	k.finish(sandbox.KilledByUser, "destroyed")
	deadline := time.Now().Add(10 * time.Second)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	if k.guest != nil {
		k.guest.Close()
	}
	k.stopTimersLocked()
	// The sentry is process 1 of its own pid namespace: with it go its stubs.
	if k.saved.PID != 0 && processStart(k.saved.PID) == k.saved.StartTime {
		if err := killAndWait(k.saved.PID, deadline); err != nil {
			return sandbox.Errorf(sandbox.Unavailable, op, "kernel %s: %w", k.id, err)
		}
		k.reap()
	}
	// A boot cut short may have left a process we have no pid of.
	for _, pid := range k.d.groups.procs(k.id) {
		if err := killAndWait(pid, deadline); err != nil {
			return sandbox.Errorf(sandbox.Unavailable, op, "kernel %s: %w", k.id, err)
		}
	}
	if k.stop != nil {
		k.stop()
	}
	if err := k.d.groups.remove(k.id, deadline); err != nil {
		return sandbox.Errorf(sandbox.Unavailable, op, "kernel %s: %w", k.id, err)
	}
	socket := k.saved.Socket
	if socket == "" {
		socket = k.d.dir + "/run/runsc-" + k.id + ".sock"
	}
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return sandbox.Errorf(sandbox.Unavailable, op, "%w", err)
	}
	// The directory goes last: it is what Sweep finds a kernel by.
	if err := os.RemoveAll(k.dir()); err != nil {
		return sandbox.Errorf(sandbox.Unavailable, op, "%w", err)
	}
	k.d.kernels.Delete(k)
	k.mu.destroyed = true
	k.watchers.Wait() // a spare being started fails with its sentry
	return nil
}

// gone says whether the sentry has ended or is ending. One that is waited for by
// nobody yet, or whose threads have not all left, still has its place in /proc,
// but no program any more; its sockets close after that, so that whoever was cut
// off by its end finds it gone here.
func (k *Kernel) gone() bool {
	if isClosed(k.done) || processStart(k.saved.PID) != k.saved.StartTime {
		return true
	}
	_, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", k.saved.PID))
	return errors.Is(err, os.ErrNotExist)
}

// killAndWait kills a process and waits until it is gone, ours or not.
func killAndWait(pid int, deadline time.Time) error {
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("killing process %d: %w", pid, err)
	}
	for {
		left := time.Until(deadline)
		if left <= 0 {
			return fmt.Errorf("process %d does not end", pid)
		}
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(left.Milliseconds())+1)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return err
		}
		if n == 1 {
			return nil
		}
	}
}
