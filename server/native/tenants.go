package native

import (
	"context"
	"math"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/server"
	"github.com/cove-sandbox/cove/wire"
)

type tenants struct{ *server.Server }

func (s tenants) Create(ctx context.Context, r *connect.Request[covev1.CreateTenantRequest]) (*connect.Response[covev1.CreateTenantResponse], error) {
	q, err := quotaFrom(r.Msg.Quota)
	if err != nil {
		return nil, err
	}
	tn, err := s.CreateTenant(ctx, r.Msg.Name, q, r.Msg.Labels)
	return answer(&covev1.CreateTenantResponse{Tenant: protoTenant(tn)}, err)
}

func (s tenants) Get(ctx context.Context, r *connect.Request[covev1.GetTenantRequest]) (*connect.Response[covev1.GetTenantResponse], error) {
	tn, used, err := s.GetTenant(ctx, r.Msg.Name)
	p := protoTenant(tn)
	p.Used = protoQuota(sandbox.Quota{Sandboxes: used.Sandboxes, MilliCPU: used.MilliCPU, Memory: used.Memory, Disk: used.Disk, SnapshotBytes: used.SnapshotBytes, ImageBytes: used.ImageBytes})
	return answer(&covev1.GetTenantResponse{Tenant: p}, err)
}

func (s tenants) List(ctx context.Context, r *connect.Request[covev1.ListTenantsRequest]) (*connect.Response[covev1.ListTenantsResponse], error) {
	list, err := s.ListTenants(ctx)
	return answer(&covev1.ListTenantsResponse{Tenants: each(list, protoTenant)}, err)
}

func (s tenants) SetQuota(ctx context.Context, r *connect.Request[covev1.SetQuotaRequest]) (*connect.Response[covev1.SetQuotaResponse], error) {
	q, err := quotaFrom(r.Msg.Quota)
	if err != nil {
		return nil, err
	}
	tn, err := s.Server.SetQuota(ctx, r.Msg.Name, q)
	return answer(&covev1.SetQuotaResponse{Tenant: protoTenant(tn)}, err)
}

func (s tenants) Delete(ctx context.Context, r *connect.Request[covev1.DeleteTenantRequest]) (*connect.Response[covev1.DeleteTenantResponse], error) {
	return answer(&covev1.DeleteTenantResponse{}, s.DeleteTenant(ctx, r.Msg.Name))
}

func quotaFrom(p *covev1.Quota) (sandbox.Quota, error) {
	if p == nil {
		return sandbox.Quota{}, nil
	}
	if !(p.Cpu >= 0 && p.Cpu <= 1e9) {
		return sandbox.Quota{}, sandbox.InvalidField("quota.cpu", "%g is not accepted; 0 to 1e9 cores are", p.Cpu)
	}
	return sandbox.Quota{Sandboxes: p.Sandboxes, MilliCPU: int64(math.Round(p.Cpu * 1000)), Memory: p.Memory, Disk: p.Disk, SnapshotBytes: p.SnapshotBytes,
		CreatesPerSecond: p.CreatesPerSecond, Weight: p.Weight, ImageBytes: p.ImageBytes}, nil
}

func protoQuota(q sandbox.Quota) *covev1.Quota {
	return &covev1.Quota{Sandboxes: q.Sandboxes, Cpu: float64(q.MilliCPU) / 1000, Memory: q.Memory, Disk: q.Disk, SnapshotBytes: q.SnapshotBytes,
		CreatesPerSecond: q.CreatesPerSecond, Weight: q.Weight, ImageBytes: q.ImageBytes}
}

func protoTenant(t sandbox.Tenant) *covev1.Tenant {
	return &covev1.Tenant{Id: t.ID, Name: t.Name, Quota: protoQuota(t.Quota), Labels: t.Labels, CreatedAt: wire.Time(t.CreatedAt)}
}
