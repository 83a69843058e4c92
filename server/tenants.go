package server

import (
	"context"
	"errors"
	"fmt"
	"math"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/quota"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
	"github.com/cove-sandbox/cove/wire"
)

type tenantService struct{ *Server }

// findTenant is a tenant by name or id: any for an installation's admin, and
// otherwise the caller's own. Another's is not there.
func (s *Server) findTenant(ctx context.Context, field, ref string) (sandbox.Tenant, error) {
	if err := sandbox.ValidateTenantName(field, ref); err != nil {
		return sandbox.Tenant{}, err
	}
	if isRoot(ctx) {
		ctx = asServer(ctx)
	}
	tn, err := s.store.GetTenant(ctx, ref)
	if errors.Is(err, sandbox.ErrNotFound) {
		return tn, &sandbox.Error{Class: sandbox.NotFound, Msg: "no tenant '" + ref + "'", Hint: `"cove tenant ls" lists them`}
	}
	return tn, err
}

func (s tenantService) Create(ctx context.Context, r *connect.Request[covev1.CreateTenantRequest]) (*connect.Response[covev1.CreateTenantResponse], error) {
	q, err := quotaFrom(r.Msg.Quota)
	if err = firstError(sandbox.ValidateTenantName("name", r.Msg.Name), sandbox.ValidateLabels("labels", r.Msg.Labels), err); err != nil {
		return nil, err
	}
	tn := sandbox.Tenant{ID: sandbox.NewID(s.cfg.Rand), Name: r.Msg.Name, Quota: q, Labels: r.Msg.Labels, CreatedAt: s.cfg.Clock().UTC()}
	if err := s.store.CreateTenant(asServer(ctx), tn); err != nil {
		return nil, err
	}
	return connect.NewResponse(&covev1.CreateTenantResponse{Tenant: protoTenant(tn)}), nil
}

func (s tenantService) Get(ctx context.Context, r *connect.Request[covev1.GetTenantRequest]) (*connect.Response[covev1.GetTenantResponse], error) {
	ref := r.Msg.Name
	if ref == "" {
		ref = callerOf(ctx).key.Tenant
	}
	tn, err := s.findTenant(ctx, "name", ref)
	if err != nil {
		return nil, err
	}
	p := protoTenant(tn)
	used, err := s.usage(store.In(ctx, tn.ID), tn.ID)
	if err != nil {
		return nil, err
	}
	p.Used = protoQuota(sandbox.Quota{Sandboxes: used.Sandboxes, MilliCPU: used.MilliCPU, Memory: used.Memory, Disk: used.Disk, SnapshotBytes: used.SnapshotBytes})
	return connect.NewResponse(&covev1.GetTenantResponse{Tenant: p}), nil
}

// usage is all that a tenant holds; ctx is in its scope.
func (s *Server) usage(ctx context.Context, tenant string) (quota.Usage, error) {
	used := s.ledger.usage(tenant)
	volumes, err := s.volumeBytes(ctx)
	if err != nil {
		return used, err
	}
	used.Disk += volumes
	recordings, err := s.recordingBytes(ctx)
	if err != nil {
		return used, err
	}
	used.SnapshotBytes, err = s.snapshotBytes(ctx)
	used.SnapshotBytes += recordings
	return used, err
}

func (s tenantService) List(ctx context.Context, r *connect.Request[covev1.ListTenantsRequest]) (*connect.Response[covev1.ListTenantsResponse], error) {
	tns, err := s.store.ListTenants(asServer(ctx))
	if err != nil {
		return nil, err
	}
	out := &covev1.ListTenantsResponse{}
	for _, tn := range tns {
		out.Tenants = append(out.Tenants, protoTenant(tn))
	}
	return connect.NewResponse(out), nil
}

// SetQuota replaces a quota. What is above the new one stays and nothing is
// added until it is below.
func (s tenantService) SetQuota(ctx context.Context, r *connect.Request[covev1.SetQuotaRequest]) (*connect.Response[covev1.SetQuotaResponse], error) {
	q, err := quotaFrom(r.Msg.Quota)
	if err != nil {
		return nil, err
	}
	tn, err := s.findTenant(ctx, "name", r.Msg.Name)
	if err != nil {
		return nil, err
	}
	tn, err = s.store.SetQuota(asServer(ctx), tn.ID, q)
	s.quotas.forget(tn.ID)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&covev1.SetQuotaResponse{Tenant: protoTenant(tn)}), nil
}

func (s tenantService) Delete(ctx context.Context, r *connect.Request[covev1.DeleteTenantRequest]) (*connect.Response[covev1.DeleteTenantResponse], error) {
	tn, err := s.findTenant(ctx, "name", r.Msg.Name)
	if err != nil {
		return nil, err
	}
	if set := s.node.Volumes(); set != nil {
		vols, err := set.List(store.In(ctx, tn.ID))
		if err != nil {
			return nil, err
		}
		if len(vols) > 0 {
			return nil, &sandbox.Error{Class: sandbox.Precondition, Msg: fmt.Sprintf("tenant %s has %d volumes", tn.Name, len(vols)),
				Hint: "delete them first, with a key of the tenant"}
		}
	}
	if set := s.node.Recordings(); set != nil {
		recs, err := set.List(store.In(ctx, tn.ID))
		if err != nil {
			return nil, err
		}
		if len(recs) > 0 {
			return nil, &sandbox.Error{Class: sandbox.Precondition, Msg: fmt.Sprintf("tenant %s has %d recordings", tn.Name, len(recs)),
				Hint: "delete them first, with a key of the tenant"}
		}
	}
	err = s.store.DeleteTenant(asServer(ctx), tn.ID)
	if err == nil {
		err = s.node.PutSecrets(asServer(ctx), tn.ID, nil)
	}
	s.keys.forgetTenant(tn.ID)
	s.quotas.forget(tn.ID)
	s.images.invalidate()
	return answer(&covev1.DeleteTenantResponse{}, err)
}

func quotaFrom(p *covev1.Quota) (sandbox.Quota, error) {
	if p == nil {
		return sandbox.Quota{}, nil
	}
	if !(p.Cpu >= 0 && p.Cpu <= 1e9) {
		return sandbox.Quota{}, sandbox.InvalidField("quota.cpu", "%g is not accepted; 0 to 1e9 cores are", p.Cpu)
	}
	q := sandbox.Quota{Sandboxes: p.Sandboxes, MilliCPU: int64(math.Round(p.Cpu * 1000)), Memory: p.Memory, Disk: p.Disk, SnapshotBytes: p.SnapshotBytes,
		CreatesPerSecond: p.CreatesPerSecond, Weight: p.Weight}
	return q, q.Validate("quota")
}

func protoQuota(q sandbox.Quota) *covev1.Quota {
	return &covev1.Quota{Sandboxes: q.Sandboxes, Cpu: float64(q.MilliCPU) / 1000, Memory: q.Memory, Disk: q.Disk, SnapshotBytes: q.SnapshotBytes,
		CreatesPerSecond: q.CreatesPerSecond, Weight: q.Weight}
}

func protoTenant(t sandbox.Tenant) *covev1.Tenant {
	return &covev1.Tenant{Id: t.ID, Name: t.Name, Quota: protoQuota(t.Quota), Labels: t.Labels, CreatedAt: wire.Time(t.CreatedAt)}
}
