package native

import (
	"context"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/server"
	"github.com/cove-sandbox/cove/wire"
)

type leases struct{ *server.Server }

func (s leases) Create(ctx context.Context, r *connect.Request[covev1.CreateLeaseRequest]) (*connect.Response[covev1.CreateLeaseResponse], error) {
	ttl, err := wire.DurationFrom("ttl", r.Msg.Ttl)
	if err != nil {
		return nil, err
	}
	l, err := s.CreateLease(ctx, r.Msg.Name, ttl)
	return answer(&covev1.CreateLeaseResponse{Lease: protoLease(l)}, err)
}

func (s leases) Heartbeat(ctx context.Context, r *connect.Request[covev1.HeartbeatRequest]) (*connect.Response[covev1.HeartbeatResponse], error) {
	l, err := s.RenewLease(ctx, r.Msg.Id)
	return answer(&covev1.HeartbeatResponse{Lease: protoLease(l)}, err)
}

func (s leases) Get(ctx context.Context, r *connect.Request[covev1.GetLeaseRequest]) (*connect.Response[covev1.GetLeaseResponse], error) {
	l, err := s.GetLease(ctx, r.Msg.Id)
	return answer(&covev1.GetLeaseResponse{Lease: protoLease(l)}, err)
}

func (s leases) List(ctx context.Context, r *connect.Request[covev1.ListLeasesRequest]) (*connect.Response[covev1.ListLeasesResponse], error) {
	list, err := s.ListLeases(ctx)
	return answer(&covev1.ListLeasesResponse{Leases: each(list, protoLease)}, err)
}

func (s leases) End(ctx context.Context, r *connect.Request[covev1.EndLeaseRequest]) (*connect.Response[covev1.EndLeaseResponse], error) {
	ids, err := s.EndLease(ctx, r.Msg.Id)
	return answer(&covev1.EndLeaseResponse{Ids: ids}, err)
}

func protoLease(l server.LeaseStatus) *covev1.Lease { return wire.Lease(l.Lease, l.Sandboxes) }
