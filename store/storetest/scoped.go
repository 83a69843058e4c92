package storetest

import (
	"context"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// scoped gives every call the scope its contract asks for, so that the
// scenarios need not say it: the default tenant's, and the installation's for
// images and for what only that may. Scopes themselves are tenants.go's.
type scoped struct{ store.Store }

func in(ctx context.Context) context.Context  { return store.In(ctx, sandbox.DefaultTenant) }
func all(ctx context.Context) context.Context { return store.Installation(ctx) }

func (s scoped) CreateSandbox(ctx context.Context, sb sandbox.Sandbox, idem store.Idempotency) (sandbox.Sandbox, bool, error) {
	return s.Store.CreateSandbox(in(ctx), sb, idem)
}
func (s scoped) SandboxByKey(ctx context.Context, idem store.Idempotency) (sandbox.Sandbox, error) {
	return s.Store.SandboxByKey(in(ctx), idem)
}
func (s scoped) GetSandbox(ctx context.Context, id string) (sandbox.Sandbox, error) {
	return s.Store.GetSandbox(in(ctx), id)
}
func (s scoped) ListSandboxes(ctx context.Context, f store.Filter) ([]sandbox.Sandbox, string, error) {
	return s.Store.ListSandboxes(in(ctx), f)
}
func (s scoped) UpdateSandbox(ctx context.Context, id string, f func(*sandbox.Sandbox) error) (sandbox.Sandbox, error) {
	return s.Store.UpdateSandbox(in(ctx), id, f)
}
func (s scoped) EndSandbox(ctx context.Context, id string, end sandbox.End) (sandbox.Sandbox, error) {
	return s.Store.EndSandbox(in(ctx), id, end)
}
func (s scoped) ForgetSandbox(ctx context.Context, id string) error {
	return s.Store.ForgetSandbox(in(ctx), id)
}
func (s scoped) ForgetEnded(ctx context.Context, before time.Time, limit int) (int, error) {
	return s.Store.ForgetEnded(all(ctx), before, limit)
}

func (s scoped) PutImage(ctx context.Context, img sandbox.Image, name string) error {
	return s.Store.PutImage(all(ctx), img, name)
}
func (s scoped) GetImage(ctx context.Context, nameOrID string) (sandbox.Image, error) {
	return s.Store.GetImage(all(ctx), nameOrID)
}
func (s scoped) ListImages(ctx context.Context) ([]sandbox.Image, error) {
	return s.Store.ListImages(all(ctx))
}
func (s scoped) RemoveImageName(ctx context.Context, name string) (sandbox.Image, error) {
	return s.Store.RemoveImageName(all(ctx), name)
}
func (s scoped) RemoveImage(ctx context.Context, id string) error {
	return s.Store.RemoveImage(all(ctx), id)
}

func (s scoped) RemovePreparedImage(ctx context.Context, id string) error {
	return s.Store.RemovePreparedImage(all(ctx), id)
}

func (s scoped) CreateKey(ctx context.Context, k store.Key) error {
	if k.Role == "" {
		k.Role = sandbox.DeveloperRole
	}
	return s.Store.CreateKey(in(ctx), k)
}
func (s scoped) KeyByHash(ctx context.Context, hash []byte) (store.Key, error) {
	return s.Store.KeyByHash(all(ctx), hash)
}
func (s scoped) ListKeys(ctx context.Context) ([]store.Key, error) { return s.Store.ListKeys(in(ctx)) }
func (s scoped) RevokeKey(ctx context.Context, id string) error {
	return s.Store.RevokeKey(in(ctx), id)
}
func (s scoped) TouchKey(ctx context.Context, id string, at time.Time) error {
	return s.Store.TouchKey(in(ctx), id, at)
}

func (s scoped) CreateSecret(ctx context.Context, sec store.SealedSecret) error {
	return s.Store.CreateSecret(in(ctx), sec)
}
func (s scoped) GetSecret(ctx context.Context, name string) (store.SealedSecret, error) {
	return s.Store.GetSecret(in(ctx), name)
}
func (s scoped) PutLogin(ctx context.Context, l store.SealedLogin) error {
	return s.Store.PutLogin(in(ctx), l)
}
func (s scoped) GetLogin(ctx context.Context, registry string) (store.SealedLogin, error) {
	return s.Store.GetLogin(in(ctx), registry)
}
func (s scoped) ListLogins(ctx context.Context) ([]store.SealedLogin, error) {
	return s.Store.ListLogins(in(ctx))
}
func (s scoped) DeleteLogin(ctx context.Context, registry string) error {
	return s.Store.DeleteLogin(in(ctx), registry)
}
func (s scoped) PutBuilt(ctx context.Context, b store.Built) error {
	return s.Store.PutBuilt(scopeOr(ctx), b)
}
func (s scoped) GetBuilt(ctx context.Context, key string) (store.Built, error) {
	return s.Store.GetBuilt(scopeOr(ctx), key)
}
func (s scoped) ListBuilt(ctx context.Context) ([]store.Built, error) {
	return s.Store.ListBuilt(scopeOr(ctx))
}
func (s scoped) DeleteBuilt(ctx context.Context, key string, since time.Time) error {
	return s.Store.DeleteBuilt(scopeOr(ctx), key, since)
}

// scopeOr is the scope that a scenario chose, or the default tenant's.
func scopeOr(ctx context.Context) context.Context {
	if store.ScopeOf(ctx).Check() == nil {
		return ctx
	}
	return in(ctx)
}
func (s scoped) ListSecrets(ctx context.Context) ([]store.SealedSecret, error) {
	return s.Store.ListSecrets(in(ctx))
}
func (s scoped) ReplaceSecret(ctx context.Context, sec store.SealedSecret, was time.Time) error {
	return s.Store.ReplaceSecret(in(ctx), sec, was)
}
func (s scoped) DeleteSecret(ctx context.Context, name string) error {
	return s.Store.DeleteSecret(in(ctx), name)
}

func (s scoped) CreateLease(ctx context.Context, l sandbox.Lease) error {
	return s.Store.CreateLease(in(ctx), l)
}
func (s scoped) ListLeases(ctx context.Context) ([]sandbox.Lease, error) {
	return s.Store.ListLeases(in(ctx))
}
func (s scoped) DeleteLease(ctx context.Context, id string) error {
	return s.Store.DeleteLease(in(ctx), id)
}

func (s scoped) CreateSnapshot(ctx context.Context, snap sandbox.Snapshot) (sandbox.Snapshot, error) {
	return s.Store.CreateSnapshot(in(ctx), snap)
}
func (s scoped) GetSnapshot(ctx context.Context, nameOrID string) (sandbox.Snapshot, error) {
	return s.Store.GetSnapshot(in(ctx), nameOrID)
}
func (s scoped) SnapshotAges(ctx context.Context, now time.Time) (store.SnapshotAges, error) {
	return s.Store.SnapshotAges(in(ctx), now)
}
func (s scoped) ListSnapshots(ctx context.Context, f store.SnapshotFilter) ([]sandbox.Snapshot, string, error) {
	return s.Store.ListSnapshots(in(ctx), f)
}
func (s scoped) SetSnapshotImage(ctx context.Context, id, image string) error {
	return s.Store.SetSnapshotImage(in(ctx), id, image)
}
func (s scoped) DeleteSnapshot(ctx context.Context, id string) (sandbox.Snapshot, error) {
	return s.Store.DeleteSnapshot(in(ctx), id)
}
func (s scoped) Manifests(ctx context.Context) ([]string, error) { return s.Store.Manifests(all(ctx)) }
func (s scoped) SnapshotImages(ctx context.Context) ([]string, error) {
	return s.Store.SnapshotImages(all(ctx))
}
func (s scoped) Tree(ctx context.Context, id string) (store.Tree, error) {
	return s.Store.Tree(in(ctx), id)
}

func (s scoped) CreateTemplateVersion(ctx context.Context, t sandbox.Template, snap sandbox.Snapshot) (sandbox.Template, error) {
	return s.Store.CreateTemplateVersion(in(ctx), t, snap)
}
func (s scoped) GetTemplate(ctx context.Context, name string, version int64) (sandbox.Template, error) {
	return s.Store.GetTemplate(in(ctx), name, version)
}
func (s scoped) ListTemplates(ctx context.Context, name string) ([]sandbox.Template, error) {
	return s.Store.ListTemplates(in(ctx), name)
}
func (s scoped) TagTemplate(ctx context.Context, name string, version int64, tags []string) error {
	return s.Store.TagTemplate(in(ctx), name, version, tags)
}
func (s scoped) DeleteTemplate(ctx context.Context, name string, version int64) ([]sandbox.Template, error) {
	return s.Store.DeleteTemplate(in(ctx), name, version)
}

func (s scoped) CreateRun(ctx context.Context, r sandbox.Run) error {
	return s.Store.CreateRun(in(ctx), r)
}
func (s scoped) GetRun(ctx context.Context, ref string) (sandbox.Run, error) {
	return s.Store.GetRun(in(ctx), ref)
}
func (s scoped) ListRuns(ctx context.Context, ended bool) ([]sandbox.Run, error) {
	return s.Store.ListRuns(in(ctx), ended)
}
func (s scoped) UpdateRun(ctx context.Context, id string, f func(*sandbox.Run) error) (sandbox.Run, error) {
	return s.Store.UpdateRun(in(ctx), id, f)
}
func (s scoped) DeleteRun(ctx context.Context, id string) error {
	return s.Store.DeleteRun(in(ctx), id)
}
func (s scoped) PutCheckpoint(ctx context.Context, run string, c sandbox.Checkpoint, ifVersion *int64, keep int) (sandbox.Checkpoint, error) {
	return s.Store.PutCheckpoint(in(ctx), run, c, ifVersion, keep)
}
func (s scoped) GetCheckpoint(ctx context.Context, run string, version int64) (sandbox.Checkpoint, error) {
	return s.Store.GetCheckpoint(in(ctx), run, version)
}
func (s scoped) ListCheckpoints(ctx context.Context, run string) ([]sandbox.Checkpoint, error) {
	return s.Store.ListCheckpoints(in(ctx), run)
}

func (s scoped) CreateGrade(ctx context.Context, g sandbox.Grade) error {
	return s.Store.CreateGrade(in(ctx), g)
}

func (s scoped) UpdateGrade(ctx context.Context, id string, f func(*sandbox.Grade) error) (sandbox.Grade, error) {
	return s.Store.UpdateGrade(in(ctx), id, f)
}

func (s scoped) GetGrade(ctx context.Context, id string) (sandbox.Grade, error) {
	return s.Store.GetGrade(in(ctx), id)
}

func (s scoped) ListGrades(ctx context.Context, f store.GradeFilter) ([]sandbox.Grade, string, error) {
	return s.Store.ListGrades(in(ctx), f)
}

func (s scoped) ForgetGrades(ctx context.Context, before time.Time, limit int) (int, error) {
	return s.Store.ForgetGrades(all(ctx), before, limit)
}

func (s scoped) CreateShipment(ctx context.Context, sh sandbox.Shipment) error {
	return s.Store.CreateShipment(in(ctx), sh)
}
func (s scoped) GetShipment(ctx context.Context, ref string) (sandbox.Shipment, error) {
	return s.Store.GetShipment(in(ctx), ref)
}
func (s scoped) ListShipments(ctx context.Context) ([]sandbox.Shipment, error) {
	return s.Store.ListShipments(in(ctx))
}
func (s scoped) UpdateShipment(ctx context.Context, id string, f func(*sandbox.Shipment) error) (sandbox.Shipment, error) {
	return s.Store.UpdateShipment(in(ctx), id, f)
}
func (s scoped) DeleteShipment(ctx context.Context, id string) error {
	return s.Store.DeleteShipment(in(ctx), id)
}
func (s scoped) PutPosition(ctx context.Context, shipment string, p sandbox.ShipmentPosition) error {
	return s.Store.PutPosition(in(ctx), shipment, p)
}
func (s scoped) ListPositions(ctx context.Context, shipment string) ([]sandbox.ShipmentPosition, error) {
	return s.Store.ListPositions(in(ctx), shipment)
}
