package gvisor

import (
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// sizeMethod and size are of cmd/runsc/edits (add/size.go.in): gVisor itself
// takes the size of a sandbox from its flags, before we know it.
const sizeMethod = "containerManager.SetSize"

type size struct {
	Cores  uint   // that processes see
	Memory uint64 // bytes that processes see
	Soft   uint64 // bytes above which the largest process ends, the sentry's own included
	Hard   uint64 // bytes above which nothing is given out

	MilliCPU uint64 // in the files of /sys/fs/cgroup; 0 is none
	Pids     uint64 // the same; 0 is any number

	Realtime int64 // what the clock of day is to read now, in nanoseconds; 0 is the host's
}

// memoryReserve is what the host's limit is above the one that the sentry keeps:
// for what is touched between a look and the next, for page tables, and for a
// process that takes a while to end. Into it goes nobody for long, so admission
// does not count it.
func memoryReserve(limit int64) int64 { return min(max(limit/16, 32<<20), 256<<20) }

// sizeOf is what the sentry is told of a sandbox's resources. A part of a core
// is a core: there is no less to see.
func sizeOf(r sandbox.Resources) size {
	soft := r.MemoryLimit + kernelOverhead
	return size{
		Cores:  uint(max((r.MilliCPU+999)/1000, 1)),
		Memory: uint64(r.MemoryLimit),
		Soft:   uint64(soft),
		Hard:   uint64(soft + memoryReserve(r.MemoryLimit)/2),

		MilliCPU: uint64(r.MilliCPU),
		Pids:     uint64(r.Pids),
	}
}

// setSize tells the sentry how large its sandbox is. Programs of an earlier
// build may not know of it: what runs in those sees the host's size, and over
// its limit the sandbox ends.
func (k *Kernel) setSize(c runtime.Container) error {
	s := sizeOf(c.Resources)
	s.Realtime = realtimeOf(c.Clock)
	err := k.control(sizeMethod, &s, nil)
	if err != nil && k.programs != k.d.now {
		k.d.log.Debug("a kernel of an earlier build keeps the size it has", "kernel", k.id, "err", err)
		return nil
	}
	return err
}
