package gvisor

import (
	"context"
	"errors"
	"os"
	"time"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

var _ runtime.Reuser = (*Kernel)(nil)

// Vacate ends the container for another sandbox's. See runtime.Reuser.
//
// It is the first half of a reset: the guest kills init, which takes the PID
// namespace along, and the sentry destroys what is left (mounts, layer, IPC and UTS
// namespaces). Beyond a reset, everything that is the sandbox's and not the
// container's goes: what the guest remembers (Scrub), limits and size (set by the
// next Attach), and what the host has counted.
func (k *Kernel) Vacate(ctx context.Context) error {
	const op = "gvisor.vacate"
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case k.mu.container == "":
		return sandbox.Errorf(sandbox.Precondition, op, "kernel %s has no container", k.id)
	case k.mu.paused:
		return k.errPaused(op)
	case k.mu.plugged:
		return sandbox.Errorf(sandbox.Precondition, op, "kernel %s has a network device, which is its sandbox's", k.id)
	case k.d.groups.oomKills(k.id) > 0:
		return sandbox.Errorf(sandbox.Precondition, op, "processes of kernel %s were ended by the host", k.id)
	}
	<-k.mu.cleaned
	k.takeSpareLocked(runtime.Container{}) // which no container is like: it goes with the others
	k.mu.initPID = 0                       // its death is ours
	// Who called the sandbox before must not reach the next with the same client.
	next := guest.NewClient(nil, nil)
	next.MoveTo(k.guest)
	k.guest = next
	if err := k.guest.Scrub(ctx); err != nil {
		return k.explain(op, err)
	}
	old := k.containers()
	for _, cid := range append(old, k.mu.container) {
		k.mu.served = max(k.mu.served, episode(cid))
	}
	k.mu.container, k.mu.image = "", ""
	k.cleanLocked(old)
	<-k.mu.cleaned
	if left := k.containers(); len(left) > 0 {
		return sandbox.Errorf(sandbox.Unavailable, op, "containers %v of kernel %s resist", left, k.id)
	}
	if err := errors.Join(k.requota(), k.discount()); err != nil {
		return k.explain(op, err)
	}
	return k.light(ctx, op)
}

// What a kernel may keep of the sandboxes that it served. The sentry counts its heap and the memory of sandboxes against the
// limit of the next, but not the stubs of processes, which stay (0.15 MiB each): they come out of the 32 MiB at least that
// the host's limit is above the sentry's.
const (
	keptMost        = 2 * kernelOverhead
	stubsMost       = 128
	givenBackWithin = 250 * time.Millisecond // what a sandbox had is the host's again: 100 MB take 20 ms
)

// light refuses a kernel that keeps more. After a fork bomb the next sandbox met the host's limit, which ends it whole,
// where the sentry would have ended a process; and files of /dev/shm stay until the guest enters the next container.
func (k *Kernel) light(ctx context.Context, op string) error {
	for end := time.Now().Add(givenBackWithin); ; {
		kept, err := k.MemoryUse()
		if err != nil {
			return k.explain(op, err)
		}
		stubs := len(k.d.groups.procs(k.id))
		if kept <= keptMost && stubs <= stubsMost {
			return nil
		}
		if stubs > stubsMost || time.Now().After(end) {
			return sandbox.Errorf(sandbox.Precondition, op, "kernel %s keeps %d MiB and %d processes of what it served", k.id, kept>>20, stubs)
		}
		select {
		case <-ctx.Done():
			return k.explain(op, ctx.Err())
		case <-time.After(2 * time.Millisecond):
		}
	}
}

// discount has the next sandbox's use counted from zero.
func (k *Kernel) discount() error {
	s, err := k.d.groups.stats(k.id)
	if err != nil {
		return err
	}
	k.saved.Before, k.saved.Reused = s.CPUTime, true
	if k.d.groups.v2 {
		return nil // Stats leaves the peak out
	}
	return os.WriteFile(k.d.groups.path("memory", k.id, "memory.max_usage_in_bytes"), []byte("0"), 0)
}
