package sqlite

import (
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// CreateTemplateVersion implements store.Templates. The version is a column and
// is given in the transaction: the record has none.
func (s *Store) CreateTemplateVersion(ctx context.Context, tpl sandbox.Template, snap sandbox.Snapshot) (sandbox.Template, error) {
	if tpl.Name == "" {
		return sandbox.Template{}, sandbox.InvalidField("name", "a template has a name")
	}
	tenant, err := names(ctx)
	if err != nil {
		return sandbox.Template{}, err
	}
	if store.ScopeOf(ctx).All() && tpl.Tenant != "" {
		tenant = tpl.Tenant
	}
	snap.Hidden, snap.ExpiresAt, snap.Tenant, tpl.Tenant = true, time.Time{}, tenant, tenant
	snapRecord, err := encodeSnapshot(snap)
	if err != nil {
		return sandbox.Template{}, err
	}
	tpl.Version, tpl.Snapshot, tpl.CreatedAt = 0, snap.ID, tpl.CreatedAt.UTC()
	b, err := json.Marshal(tpl)
	if err != nil {
		return sandbox.Template{}, &sandbox.Error{Class: sandbox.Invalid, Msg: "the template cannot be recorded", Err: err}
	}
	var version int64
	err = s.write(ctx, "create_template_version", func(t *tx) error {
		if err := t.insertSnapshot(snap, snapRecord); err != nil {
			return err
		}
		if _, err := t.exec(`INSERT INTO template_names (tenant, name, last_version) VALUES (?, ?, 1)
			ON CONFLICT (tenant, name) DO UPDATE SET last_version = template_names.last_version + 1`, tenant, tpl.Name); err != nil {
			return err
		}
		if err := t.row(`SELECT last_version FROM template_names WHERE tenant = ? AND name = ?`, []any{tenant, tpl.Name}, &version); err != nil {
			return err
		}
		_, err := t.exec(`INSERT INTO templates (tenant, name, version, snapshot_id, created_at, record) VALUES (?, ?, ?, ?, ?, ?)`,
			tenant, tpl.Name, version, snap.ID, nanos(tpl.CreatedAt), string(b))
		return err
	})
	if err != nil {
		return sandbox.Template{}, err
	}
	return decodeTemplate(tpl.Name, version, string(b))
}

const templateRow = `SELECT t.name, t.version, t.record FROM templates t`

// GetTemplate implements store.Templates.
func (s *Store) GetTemplate(ctx context.Context, name string, version int64) (sandbox.Template, error) {
	tenant, err := names(ctx)
	if err != nil {
		return sandbox.Template{}, err
	}
	var got string
	var record string
	err = s.readRow(ctx, templateRow+` WHERE t.tenant = ? AND t.name = ? AND (? = 0 OR t.version = ?) ORDER BY t.version DESC LIMIT 1`,
		[]any{tenant, name, version, version}, &got, &version, &record)
	if errors.Is(err, sql.ErrNoRows) {
		return sandbox.Template{}, noTemplate(name, version)
	}
	if err != nil {
		return sandbox.Template{}, s.fault(ctx, "get_template", err)
	}
	return decodeTemplate(got, version, record)
}

// ListTemplates implements store.Templates.
func (s *Store) ListTemplates(ctx context.Context, name string) ([]sandbox.Template, error) {
	tenant, err := names(ctx)
	if err != nil {
		return nil, err
	}
	query, args := templateRow+` WHERE t.tenant = ? AND t.name = ? ORDER BY t.version DESC`, []any{tenant, name}
	if name == "" {
		query, args = templateRow+` WHERE t.tenant = ? AND t.version = (SELECT max(n.version) FROM templates n WHERE n.tenant = t.tenant AND n.name = t.name) ORDER BY t.name`, []any{tenant}
	}
	st, err := s.stmt(ctx, query)
	if err != nil {
		return nil, s.fault(ctx, "list_templates", err)
	}
	rows, err := st.QueryContext(ctx, args...)
	if err != nil {
		return nil, s.fault(ctx, "list_templates", err)
	}
	tpls, err := scanTemplates(rows)
	return tpls, s.fault(ctx, "list_templates", err)
}

// TagTemplate implements store.Templates. Tags are in the record of their version.
func (s *Store) TagTemplate(ctx context.Context, name string, version int64, tags []string) error {
	tenant, err := names(ctx)
	if err != nil {
		return err
	}
	return s.write(ctx, "tag_template", func(t *tx) error {
		st, err := t.stmt(templateRow + ` WHERE t.tenant = ? AND t.name = ?`)
		if err != nil {
			return err
		}
		rows, err := st.Query(tenant, name)
		if err != nil {
			return err
		}
		all, err := scanTemplates(rows)
		if err != nil {
			return err
		}
		found := version == 0 && len(all) > 0
		for _, tpl := range all {
			now := slices.DeleteFunc(slices.Clone(tpl.Tags), func(tag string) bool { return slices.Contains(tags, tag) })
			if tpl.Version == version {
				found = true
				now = append(now, tags...)
			}
			slices.Sort(now)
			if now = slices.Compact(now); slices.Equal(now, tpl.Tags) {
				continue
			}
			of := tpl.Version
			tpl.Version, tpl.Tags = 0, now
			b, err := json.Marshal(tpl)
			if err != nil {
				return err
			}
			if _, err := t.exec(`UPDATE templates SET record = ? WHERE tenant = ? AND name = ? AND version = ?`, string(b), tenant, name, of); err != nil {
				return err
			}
		}
		if !found {
			return noTemplate(name, version)
		}
		return nil
	})
}

// DeleteTemplate implements store.Templates.
func (s *Store) DeleteTemplate(ctx context.Context, name string, version int64) (gone []sandbox.Template, err error) {
	tenant, err := names(ctx)
	if err != nil {
		return nil, err
	}
	err = s.write(ctx, "delete_template", func(t *tx) error {
		st, err := t.stmt(templateRow + ` WHERE t.tenant = ? AND t.name = ? AND (? = 0 OR t.version = ?) ORDER BY t.version DESC`)
		if err != nil {
			return err
		}
		rows, err := st.Query(tenant, name, version, version)
		if err != nil {
			return err
		}
		if gone, err = scanTemplates(rows); err != nil {
			return err
		}
		if len(gone) == 0 {
			return noTemplate(name, version)
		}
		for _, tpl := range gone {
			if _, err := t.exec(`DELETE FROM templates WHERE tenant = ? AND name = ? AND version = ?`, tenant, name, tpl.Version); err != nil {
				return err
			}
			if err := t.deleteSnapshot(tpl.Snapshot); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return gone, nil
}

func scanTemplates(rows *sql.Rows) (tpls []sandbox.Template, err error) {
	defer rows.Close()
	for rows.Next() {
		var name, record string
		var version int64
		if err := rows.Scan(&name, &version, &record); err != nil {
			return nil, err
		}
		tpl, err := decodeTemplate(name, version, record)
		if err != nil {
			return nil, err
		}
		tpls = append(tpls, tpl)
	}
	return tpls, rows.Err()
}

func decodeTemplate(name string, version int64, record string) (tpl sandbox.Template, err error) {
	if err := json.Unmarshal([]byte(record), &tpl); err != nil {
		return sandbox.Template{}, damaged("template", name, err)
	}
	tpl.Version = version
	tpl.Tenant = cmp.Or(tpl.Tenant, sandbox.DefaultTenant) // from before there were tenants
	return tpl, nil
}

func noTemplate(name string, version int64) error {
	if version > 0 {
		name = fmt.Sprintf("%s@%d", name, version)
	}
	return &sandbox.Error{Class: sandbox.NotFound, Msg: fmt.Sprintf("no template '%.80s'", name)}
}
