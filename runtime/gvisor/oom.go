package gvisor

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/sandbox"
)

// watchOOM ends the kernel when the host's OOM killer has taken any process of
// it. On v2 that needs no watching: with memory.oom.group the sentry is killed
// too. On v1 the killer takes one process, mostly the stub of the hungry one;
// what it was running dies as if by SIGKILL and the rest goes on, or not,
// depending on which it took. One rule for both: over the limit, the sandbox
// ends.
func (k *Kernel) watchOOM(ctx context.Context) error {
	g := k.d.groups
	if g.v2 {
		return nil
	}
	efd, err := unix.Eventfd(0, unix.EFD_NONBLOCK|unix.EFD_CLOEXEC)
	if err != nil {
		return err
	}
	events := os.NewFile(uintptr(efd), "oom eventfd")
	control, err := os.Open(g.path("memory", k.id, "memory.oom_control"))
	if err != nil {
		return errors.Join(err, events.Close())
	}
	defer control.Close()
	line := fmt.Sprintf("%d %d", efd, control.Fd())
	if err := os.WriteFile(g.path("memory", k.id, "cgroup.event_control"), []byte(line), 0); err != nil {
		return errors.Join(fmt.Errorf("watching for OOM: %w", err), events.Close())
	}
	k.watchers.Go(func() {
		<-ctx.Done()
		events.Close() // unblocks the reader below
	})
	k.watchers.Go(func() {
		var b [8]byte
		for {
			if _, err := events.Read(b[:]); err != nil || binary.NativeEndian.Uint64(b[:]) == 0 {
				return
			}
			// The event says the group is out of memory; the kill, if it
			// comes to one, follows. Reclaim may still have helped.
			for range 40 {
				if g.oomKills(k.id) > 0 {
					k.finish(sandbox.OOM, overLimit)
					return
				}
				select {
				case <-ctx.Done():
					return
				case <-time.After(5 * time.Millisecond):
				}
			}
		}
	})
	return nil
}

const overLimit = "over the memory limit"
