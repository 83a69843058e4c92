package server

import (
	"context"
	"io"
	"net/http"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/wire"
)

type systemService struct{ *Server }

func (s systemService) Info(ctx context.Context, r *connect.Request[covev1.InfoRequest]) (*connect.Response[covev1.InfoResponse], error) {
	c := s.node.Capacity()
	if !isRoot(ctx) {
		// What others use is not a tenant's to know.
		u, err := s.usage(ctx, callerOf(ctx).key.Tenant)
		if err != nil {
			return nil, err
		}
		c.Sandboxes, c.Used.MilliCPU, c.Used.Memory, c.Used.Disk = u.Sandboxes, u.MilliCPU, u.Memory, u.Disk
		c.WarmKernels, c.WarmTarget, c.LostCalls = 0, 0, 0
	}
	held, err := s.snapshotTotals(ctx)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&covev1.InfoResponse{
		Version: s.cfg.Version,
		Runtime: c.Runtime,
		Total: &covev1.Capacity{
			Sandboxes: c.MaxSandboxes,
			Cpu:       float64(c.Total.MilliCPU) / 1000,
			Memory:    c.Total.Memory,
			Disk:      c.Total.Disk,
		},
		Used: &covev1.Capacity{
			Sandboxes: c.Sandboxes,
			Cpu:       float64(c.Used.MilliCPU) / 1000,
			Memory:    c.Used.Memory,
			Disk:      c.Used.Disk,
		},
		WarmKernels: int32(c.WarmKernels),
		WarmTarget:  int32(c.WarmTarget),
		LostCalls:   c.LostCalls,
		Snapshots:   held,
	}), nil
}

// snapshotTotals is of the caller's tenant, or of all for root.
func (s *Server) snapshotTotals(ctx context.Context) (*covev1.SnapshotTotals, error) {
	if isRoot(ctx) {
		ctx = asServer(ctx)
	}
	ages, err := s.store.SnapshotAges(ctx, s.cfg.Clock())
	if err != nil {
		return nil, err
	}
	bytes, err := s.snapshotBytes(ctx)
	if err != nil {
		return nil, err
	}
	return &covev1.SnapshotTotals{Count: ages.Count, Bytes: bytes, AgeSeconds: ages.Seconds, Oldest: wire.Time(ages.Oldest)}, nil
}

// healthz needs no key and tells nothing but whether to send work here. A
// draining server is 503, which is what a load balancer looks at.
func (s *Server) healthz(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	if s.calls.isDraining() {
		w.WriteHeader(http.StatusServiceUnavailable)
		_, _ = io.WriteString(w, "draining\n")
		return
	}
	_, _ = io.WriteString(w, "ok\n")
}
