package server

import (
	"context"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// Info is what a server is and has. What a tenant learns of use is its own.
type Info struct {
	sandbox.Capacity
	Version       string
	Gateway       string // below what ports have hosts, as a URL; "" = below none
	Snapshots     store.SnapshotAges
	SnapshotBytes int64
}

// Info says what the server is, what it has and what of it is used.
func (s *Server) Info(ctx context.Context) (in Info, err error) {
	ctx, call, err := s.begin(ctx, "system.info")
	if err != nil {
		return in, err
	}
	defer call.end(&err)
	has, err := s.node.Capacity(ctx)
	if err != nil {
		return in, err
	}
	in = Info{Capacity: has, Version: s.cfg.Version}
	if s.cfg.Ports != nil {
		in.Gateway = s.cfg.Ports.Domain()
	}
	if !isRoot(ctx) {
		// What others use is not a tenant's to know.
		u, err := s.usage(ctx, callerOf(ctx).key.Tenant)
		if err != nil {
			return in, err
		}
		in.Sandboxes, in.Used.MilliCPU, in.Used.Memory, in.Used.Disk = u.Sandboxes, u.MilliCPU, u.Memory, u.Disk
		in.WarmKernels, in.WarmTarget, in.HeldKernels, in.HeldTarget, in.LostCalls, in.Full = 0, 0, 0, 0, 0, ""
	} else {
		ctx = asServer(ctx)
	}
	if in.Snapshots, err = s.store.SnapshotAges(ctx, s.cfg.Clock()); err != nil {
		return in, err
	}
	in.SnapshotBytes, err = s.snapshotBytes(ctx)
	return in, err
}
