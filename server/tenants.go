package server

import (
	"cmp"
	"context"
	"errors"

	"github.com/cove-sandbox/cove/quota"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

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

// CreateTenant makes a tenant.
func (s *Server) CreateTenant(ctx context.Context, name string, q sandbox.Quota, labels map[string]string) (tn sandbox.Tenant, err error) {
	ctx, call, err := s.begin(ctx, "tenant.create", about("name", name))
	if err != nil {
		return tn, err
	}
	defer call.end(&err)
	if err := firstError(sandbox.ValidateTenantName("name", name), sandbox.ValidateLabels("labels", labels), q.Validate("quota")); err != nil {
		return tn, err
	}
	tn = sandbox.Tenant{ID: sandbox.NewID(s.cfg.Rand), Name: name, Quota: q, Labels: labels, CreatedAt: s.cfg.Clock().UTC()}
	if err := s.store.CreateTenant(asServer(ctx), tn); err != nil {
		return tn, err
	}
	call.concerns("tenant", tn.ID)
	return tn, nil
}

// GetTenant is a tenant by name or id, "" the caller's own, with what it uses.
func (s *Server) GetTenant(ctx context.Context, ref string) (tn sandbox.Tenant, used quota.Usage, err error) {
	ctx, call, err := s.begin(ctx, "tenant.get", about("name", ref))
	if err != nil {
		return tn, used, err
	}
	defer call.end(&err)
	if tn, err = s.findTenant(ctx, "name", cmp.Or(ref, callerOf(ctx).key.Tenant)); err != nil {
		return tn, used, err
	}
	used, err = s.usage(store.In(ctx, tn.ID), tn.ID)
	return tn, used, err
}

// usage is all that a tenant holds; ctx is in its scope.
func (s *Server) usage(ctx context.Context, tenant string) (quota.Usage, error) {
	used := s.reservations.usage(tenant)
	recordings, err := s.recordingBytes(ctx)
	if err != nil {
		return used, err
	}
	if used.ImageBytes, err = s.store.ImageBytes(ctx); err != nil {
		return used, err
	}
	used.SnapshotBytes, err = s.snapshotBytes(ctx)
	used.SnapshotBytes += recordings
	return used, err
}

// ListTenants lists all there are.
func (s *Server) ListTenants(ctx context.Context) (tns []sandbox.Tenant, err error) {
	ctx, call, err := s.begin(ctx, "tenant.list")
	if err != nil {
		return nil, err
	}
	defer call.end(&err)
	return s.store.ListTenants(asServer(ctx))
}

// SetQuota replaces a quota. What is above the new one stays and nothing is
// added until it is below.
func (s *Server) SetQuota(ctx context.Context, ref string, q sandbox.Quota) (tn sandbox.Tenant, err error) {
	ctx, call, err := s.begin(ctx, "tenant.set_quota", about("name", ref))
	if err != nil {
		return tn, err
	}
	defer call.end(&err)
	if err := q.Validate("quota"); err != nil {
		return tn, err
	}
	if tn, err = s.findTenant(ctx, "name", ref); err != nil {
		return tn, err
	}
	call.concerns("tenant", tn.ID)
	defer s.quotas.forget(tn.ID)
	return s.store.SetQuota(asServer(ctx), tn.ID, q)
}

// DeleteTenant removes a tenant that has nothing left.
func (s *Server) DeleteTenant(ctx context.Context, ref string) (err error) {
	ctx, call, err := s.begin(ctx, "tenant.delete", about("name", ref))
	if err != nil {
		return err
	}
	defer call.end(&err)
	tn, err := s.findTenant(ctx, "name", ref)
	if err != nil {
		return err
	}
	err = s.store.DeleteTenant(asServer(ctx), tn.ID)
	if err == nil {
		err = s.node.PutSecrets(asServer(ctx), tn.ID, nil)
	}
	s.keys.forgetTenant(tn.ID)
	s.calls.endKeys(ctx, func(k store.Key) bool { return k.Tenant == tn.ID })
	s.quotas.forget(tn.ID)
	s.images.invalidate()
	return err
}
