package gvisor

import (
	"testing"
	"time"

	"github.com/cove-sandbox/cove/runtime"
)

import (
	"context"
	"net"
)

// Dial connects to a guest as the driver does.
func Dial(ctx context.Context, k *Kernel) (net.Conn, error) { return k.dial(ctx) }

// HostCPU is the CPU time of a kernel, or of a blank, without its guest being
// asked, which would warm it.
func HostCPU(k runtime.Kernel) time.Duration {
	if b, ok := k.(*blank); ok {
		k = b.Kernel
	}
	s, err := k.(*Kernel).d.groups.stats(k.ID())
	if err != nil {
		panic(err)
	}
	return s.CPUTime
}

// Quota is a kernel's share of the CPU as its cgroup has it.
func Quota(t testing.TB, k *Kernel) string {
	q, err := k.d.groups.quota(k.id)
	if err != nil {
		t.Error(err)
	}
	return q
}

// Unlimited lifts it as a checkpoint does.
func Unlimited(k *Kernel) (limited func()) { return k.unlimited() }

// AwaitSpare returns when a kernel that was reset has its next container ready: what
// runtimetest waits for where a driver makes something ahead.
func (k *Kernel) AwaitSpare(ctx context.Context) error {
	for ctx.Err() == nil {
		k.mu.Lock()
		s := k.mu.spare
		k.mu.Unlock()
		if s == nil { // its timer has not fired
			time.Sleep(time.Millisecond)
			continue
		}
		select {
		case <-s.ready:
			return s.err
		case <-ctx.Done():
		}
	}
	return ctx.Err()
}
