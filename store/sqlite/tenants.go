package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// everybody stands for all tenants in a statement: "? IN (tenant, '*')" is true
// of every row with it, and of one tenant's with that tenant's id, which never
// looks like it.
const everybody = "*"

// whose is the scope of a call as statements take it.
func whose(ctx context.Context) (string, error) {
	s := store.ScopeOf(ctx)
	if err := s.Check(); err != nil {
		return "", err
	}
	if s.All() {
		return everybody, nil
	}
	return s.Tenant(), nil
}

// names is the tenant whose names a call means.
func names(ctx context.Context) (string, error) {
	s := store.ScopeOf(ctx)
	return s.Owner(""), s.Check()
}

// CreateTenant implements store.Tenants.
func (s *Store) CreateTenant(ctx context.Context, tn sandbox.Tenant) error {
	if err := store.ScopeOf(ctx).CheckAll(); err != nil {
		return err
	}
	if !sandbox.ValidID(tn.ID) || tn.Name == "" {
		return sandbox.InvalidField("tenant", "a tenant has an id and a name")
	}
	record, err := encodeTenant(tn)
	if err != nil {
		return err
	}
	return s.write(ctx, "create_tenant", func(t *tx) error {
		// An id that is another's name would be found instead of it.
		var taken int
		if err := t.row(`SELECT count(*) FROM tenants WHERE id IN (?, ?) OR name IN (?, ?)`, []any{tn.ID, tn.Name, tn.ID, tn.Name}, &taken); err != nil {
			return err
		}
		if taken > 0 {
			return &sandbox.Error{Class: sandbox.AlreadyExists, Field: "name", Msg: "there is a tenant '" + tn.Name + "' already"}
		}
		_, err := t.exec(`INSERT INTO tenants (id, name, created_at, record) VALUES (?, ?, ?, ?)`, tn.ID, tn.Name, nanos(tn.CreatedAt), record)
		return err
	})
}

// GetTenant implements store.Tenants.
func (s *Store) GetTenant(ctx context.Context, nameOrID string) (sandbox.Tenant, error) {
	who, err := whose(ctx)
	if err != nil {
		return sandbox.Tenant{}, err
	}
	var id, record string
	err = s.readRow(ctx, `SELECT id, record FROM tenants WHERE (id = ? OR name = ?) AND ? IN (id, '*') ORDER BY id = ? DESC LIMIT 1`,
		[]any{nameOrID, nameOrID, who, nameOrID}, &id, &record)
	if errors.Is(err, sql.ErrNoRows) {
		return sandbox.Tenant{}, noTenant(nameOrID)
	}
	if err != nil {
		return sandbox.Tenant{}, s.fault(ctx, "get_tenant", err)
	}
	return decodeTenant(id, record)
}

// ListTenants implements store.Tenants.
func (s *Store) ListTenants(ctx context.Context) ([]sandbox.Tenant, error) {
	if err := store.ScopeOf(ctx).CheckAll(); err != nil {
		return nil, err
	}
	records, err := s.column(ctx, "list_tenants", `SELECT record FROM tenants ORDER BY name`)
	if err != nil {
		return nil, err
	}
	out := make([]sandbox.Tenant, len(records))
	for i, r := range records {
		if out[i], err = decodeTenant("", r); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// SetQuota implements store.Tenants.
func (s *Store) SetQuota(ctx context.Context, id string, q sandbox.Quota) (tn sandbox.Tenant, err error) {
	if err := store.ScopeOf(ctx).CheckAll(); err != nil {
		return tn, err
	}
	err = s.write(ctx, "set_quota", func(t *tx) error {
		var record string
		err := t.row(`SELECT record FROM tenants WHERE id = ?`, []any{id}, &record)
		if errors.Is(err, sql.ErrNoRows) {
			return noTenant(id)
		}
		if err != nil {
			return err
		}
		if tn, err = decodeTenant(id, record); err != nil {
			return err
		}
		tn.Quota = q
		if record, err = encodeTenant(tn); err != nil {
			return err
		}
		_, err = t.exec(`UPDATE tenants SET record = ? WHERE id = ?`, record, id)
		return err
	})
	if err != nil {
		return sandbox.Tenant{}, err
	}
	return tn, nil
}

// DeleteTenant implements store.Tenants. Its audit entries stay: what was done
// in its name was done.
func (s *Store) DeleteTenant(ctx context.Context, id string) error {
	if err := store.ScopeOf(ctx).CheckAll(); err != nil {
		return err
	}
	if id == sandbox.DefaultTenant {
		return &sandbox.Error{Class: sandbox.Precondition, Msg: "the default tenant stays"}
	}
	return s.write(ctx, "delete_tenant", func(t *tx) error {
		var known, live, snaps, templates, volumes, recordings, runs int
		if err := t.row(`SELECT (SELECT count(*) FROM tenants WHERE id = ?), (SELECT count(*) FROM sandboxes WHERE tenant = ? AND ended = 0),
			(SELECT count(*) FROM snapshots WHERE tenant = ? AND hidden = 0), (SELECT count(*) FROM templates WHERE tenant = ?),
			(SELECT count(*) FROM volumes WHERE tenant = ?), (SELECT count(*) FROM recordings WHERE tenant = ?),
			(SELECT count(*) FROM runs WHERE tenant = ?)`,
			[]any{id, id, id, id, id, id, id}, &known, &live, &snaps, &templates, &volumes, &recordings, &runs); err != nil {
			return err
		}
		if known == 0 {
			return noTenant(id)
		}
		if live+snaps+templates+volumes+recordings+runs > 0 {
			return &sandbox.Error{Class: sandbox.Precondition,
				Msg:  fmt.Sprintf("tenant %s has %d live sandboxes, %d snapshots, %d versions of templates, %d volumes, %d recordings and %d runs", id, live, snaps, templates, volumes, recordings, runs),
				Hint: "kill and delete them first, with a key of the tenant"}
		}
		for _, q := range []string{
			`DELETE FROM lineage WHERE node_id IN (SELECT id FROM sandboxes WHERE tenant = ?)`,
			`DELETE FROM sandboxes WHERE tenant = ?`,
			`DELETE FROM image_names WHERE tenant = ?`,
			`DELETE FROM template_names WHERE tenant = ?`,
			`DELETE FROM secrets WHERE tenant = ?`,
			`DELETE FROM registry_logins WHERE tenant = ?`,
			`DELETE FROM build_cache WHERE tenant = ?`,
			`DELETE FROM leases WHERE tenant = ?`,
			`DELETE FROM shipments WHERE tenant = ?`,
			`DELETE FROM grades WHERE tenant = ?`,
			`DELETE FROM api_keys WHERE tenant = ?`,
			`DELETE FROM tenants WHERE id = ?`,
		} {
			if _, err := t.exec(q, id); err != nil {
				return err
			}
		}
		return nil
	})
}

// SnapshotContents implements store.Tenants.
func (s *Store) SnapshotContents(ctx context.Context) (map[string]int64, error) {
	const op = "snapshot_contents"
	who, err := whose(ctx)
	if err != nil {
		return nil, err
	}
	st, err := s.stmt(ctx, `SELECT manifest, max(stored) FROM (
		SELECT manifest, stored FROM snapshots WHERE ? IN (tenant, '*') UNION ALL
		SELECT n.manifest, 0 FROM snapshot_needs n JOIN snapshots s ON s.id = n.snapshot_id WHERE ? IN (s.tenant, '*')) GROUP BY manifest`)
	if err != nil {
		return nil, s.fault(ctx, op, err)
	}
	rows, err := st.QueryContext(ctx, who, who)
	if err != nil {
		return nil, s.fault(ctx, op, err)
	}
	defer rows.Close()
	out := map[string]int64{}
	for rows.Next() {
		var manifest string
		var stored int64
		if err := rows.Scan(&manifest, &stored); err != nil {
			return nil, s.fault(ctx, op, err)
		}
		out[manifest] = stored
	}
	return out, s.fault(ctx, op, rows.Err())
}

// wantTenant refuses what would be of a tenant that is gone.
func (t *tx) wantTenant(id string) error {
	var known int
	err := t.row(`SELECT count(*) FROM tenants WHERE id = ?`, []any{id}, &known)
	if err == nil && known == 0 {
		return noTenant(id)
	}
	return err
}

func noTenant(nameOrID string) error {
	return &sandbox.Error{Class: sandbox.NotFound, Msg: fmt.Sprintf("no tenant '%.80s'", nameOrID)}
}

func encodeTenant(tn sandbox.Tenant) (string, error) {
	tn.CreatedAt = tn.CreatedAt.UTC()
	b, err := json.Marshal(tn)
	if err != nil {
		return "", &sandbox.Error{Class: sandbox.Invalid, Msg: "the tenant cannot be recorded", Err: err}
	}
	return string(b), nil
}

func decodeTenant(id, record string) (tn sandbox.Tenant, err error) {
	if err := json.Unmarshal([]byte(record), &tn); err != nil {
		return sandbox.Tenant{}, damaged("tenant", id, err)
	}
	return tn, nil
}
