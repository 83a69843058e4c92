package server

import (
	"context"
	"errors"
	"io"
	"strings"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// tenantVolumes is a node's volumes as one tenant sees them. A node has one name
// for each, so a tenant's volume "data" is there "data.TENANT_"; the default
// tenant's, and with it all from before there were tenants, are as they are
// called. No name a user may choose ends in "_", so none of them is another's.
type tenantVolumes struct{ set VolumeSet }

const tenantMark = "_"

// onNode is the node's name for a tenant's volume.
func onNode(tenant, name string) string {
	if tenant == sandbox.DefaultTenant {
		return name
	}
	return name + "." + tenant + tenantMark
}

// fromNode is the tenant of a node's volume and what it calls it.
func fromNode(name string) (tenant, plain string) {
	marked, ok := strings.CutSuffix(name, tenantMark)
	if i := strings.LastIndexByte(marked, '.'); ok && i > 0 {
		return marked[i+1:], marked[:i]
	}
	return sandbox.DefaultTenant, name
}

// find is a volume in scope by its name or id, as it is called there. Every
// method but Create and List begins with it and goes on with the id.
func (t tenantVolumes) find(ctx context.Context, ref string) (sandbox.Volume, error) {
	scope := store.ScopeOf(ctx)
	if err := scope.Check(); err != nil {
		return sandbox.Volume{}, err
	}
	v, err := t.set.Get(ctx, onNode(scope.Owner(""), ref))
	if errors.Is(err, sandbox.ErrNotFound) {
		v, err = t.set.Get(ctx, ref) // an id, or the name of another's
	}
	if err != nil && !errors.Is(err, sandbox.ErrNotFound) {
		return v, err
	}
	tenant, plain := fromNode(v.Name)
	if err != nil || !scope.Sees(tenant) || ref != v.ID && ref != plain {
		return sandbox.Volume{}, &sandbox.Error{Class: sandbox.NotFound, Msg: "no volume '" + ref + "'", Hint: `"cove volume ls" lists them`}
	}
	return named(v), nil
}

// named is a volume as its tenant calls it.
func named(v sandbox.Volume) sandbox.Volume {
	_, v.Name = fromNode(v.Name)
	return v
}

// plainNames takes the node's names for volumes out of what is said about them.
func plainNames(err error) error {
	var e *sandbox.Error
	if !errors.As(err, &e) || !strings.Contains(e.Error(), tenantMark) {
		return err
	}
	words := strings.Split(e.Msg, " ")
	if e.Msg == "" && e.Err != nil {
		words = strings.Split(e.Err.Error(), " ")
	}
	for i, w := range words {
		bare := strings.Trim(w, `"':,;`)
		if strings.HasSuffix(bare, tenantMark) {
			_, plain := fromNode(bare)
			words[i] = strings.Replace(w, bare, plain, 1)
		}
	}
	c := *e
	c.Msg, c.Err = strings.Join(words, " "), nil
	return &c
}

func (t tenantVolumes) Create(ctx context.Context, v sandbox.Volume) (sandbox.Volume, error) {
	scope := store.ScopeOf(ctx)
	if err := scope.Check(); err != nil {
		return v, err
	}
	v.Name = onNode(scope.Owner(""), v.Name)
	v, err := t.set.Create(ctx, v)
	return named(v), plainNames(err)
}

func (t tenantVolumes) CreateFrom(ctx context.Context, v sandbox.Volume, c sandbox.Content) (sandbox.Volume, error) {
	scope := store.ScopeOf(ctx)
	if err := scope.Check(); err != nil {
		return v, err
	}
	v.Name = onNode(scope.Owner(""), v.Name)
	v, err := t.set.CreateFrom(ctx, v, c)
	return named(v), plainNames(err)
}

func (t tenantVolumes) Snapshot(ctx context.Context, name string) (sandbox.Content, error) {
	v, err := t.find(ctx, name)
	if err != nil {
		return sandbox.Content{}, err
	}
	c, err := t.set.Snapshot(ctx, v.ID)
	return c, plainNames(err)
}

func (t tenantVolumes) Get(ctx context.Context, name string) (sandbox.Volume, error) {
	return t.find(ctx, name)
}

func (t tenantVolumes) List(ctx context.Context) ([]sandbox.Volume, error) {
	scope := store.ScopeOf(ctx)
	if err := scope.Check(); err != nil {
		return nil, err
	}
	vols, err := t.set.List(ctx)
	var out []sandbox.Volume
	for _, v := range vols {
		if tenant, _ := fromNode(v.Name); scope.Sees(tenant) {
			out = append(out, named(v))
		}
	}
	return out, err
}

func (t tenantVolumes) Delete(ctx context.Context, name string) error {
	v, err := t.find(ctx, name)
	if err != nil {
		return err
	}
	return plainNames(t.set.Delete(ctx, v.ID))
}

func (t tenantVolumes) Resize(ctx context.Context, name string, size int64) (sandbox.Volume, error) {
	v, err := t.find(ctx, name)
	if err != nil {
		return v, err
	}
	v, err = t.set.Resize(ctx, v.ID, size)
	return named(v), plainNames(err)
}

func (t tenantVolumes) Clone(ctx context.Context, name string, to sandbox.Volume) (sandbox.Volume, error) {
	v, err := t.find(ctx, name)
	if err != nil {
		return v, err
	}
	to.Name = onNode(store.ScopeOf(ctx).Owner(""), to.Name)
	v, err = t.set.Clone(ctx, v.ID, to)
	return named(v), plainNames(err)
}

func (t tenantVolumes) ListFiles(ctx context.Context, name, path string, depth int) ([]sandbox.FileInfo, bool, error) {
	v, err := t.find(ctx, name)
	if err != nil {
		return nil, false, err
	}
	return t.set.ListFiles(ctx, v.ID, path, depth)
}

func (t tenantVolumes) ReadFile(ctx context.Context, name, path string) (io.ReadCloser, sandbox.FileInfo, error) {
	v, err := t.find(ctx, name)
	if err != nil {
		return nil, sandbox.FileInfo{}, err
	}
	return t.set.ReadFile(ctx, v.ID, path)
}

func (t tenantVolumes) WriteFile(ctx context.Context, name, path string, r io.Reader, mode uint32) (sandbox.FileInfo, error) {
	v, err := t.find(ctx, name)
	if err != nil {
		return sandbox.FileInfo{}, err
	}
	return t.set.WriteFile(ctx, v.ID, path, r, mode)
}

func (t tenantVolumes) RemoveFile(ctx context.Context, name, path string, recursive bool) error {
	v, err := t.find(ctx, name)
	if err != nil {
		return err
	}
	return t.set.RemoveFile(ctx, v.ID, path, recursive)
}
