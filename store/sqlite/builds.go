package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// PutBuilt implements store.Builds.
func (s *Store) PutBuilt(ctx context.Context, b store.Built) error {
	tenant, err := names(ctx)
	if err == nil {
		err = store.CheckBuilt(b)
	}
	if err != nil {
		return err
	}
	return s.write(ctx, "put_built", func(t *tx) error {
		_, err := t.exec(`INSERT INTO build_cache (tenant, key, record, manifest, size, used_at) VALUES (?, ?, ?, ?, ?, ?)
			ON CONFLICT (tenant, key) DO UPDATE SET record = excluded.record, manifest = excluded.manifest, size = excluded.size, used_at = excluded.used_at`,
			tenant, b.Key, b.Record, b.Manifest, b.Size, nanos(b.UsedAt))
		return err
	})
}

const builtRow = `SELECT tenant, key, record, manifest, size, used_at FROM build_cache`

// GetBuilt implements store.Builds.
func (s *Store) GetBuilt(ctx context.Context, key string) (b store.Built, err error) {
	tenant, err := names(ctx)
	if err != nil {
		return b, err
	}
	var used int64
	err = s.readRow(ctx, builtRow+` WHERE tenant = ? AND key = ?`, []any{tenant, key}, &b.Tenant, &b.Key, &b.Record, &b.Manifest, &b.Size, &used)
	if errors.Is(err, sql.ErrNoRows) {
		return b, &sandbox.Error{Class: sandbox.NotFound, Msg: fmt.Sprintf("nothing was built as '%.80s'", key)}
	}
	b.UsedAt = instant(used)
	return b, s.fault(ctx, "get_built", err)
}

// ListBuilt implements store.Builds.
func (s *Store) ListBuilt(ctx context.Context) ([]store.Built, error) {
	out, err := s.listBuilt(ctx)
	return out, s.fault(ctx, "list_built", err)
}

func (s *Store) listBuilt(ctx context.Context) (out []store.Built, err error) {
	who, err := whose(ctx)
	if err != nil {
		return nil, err
	}
	st, err := s.stmt(ctx, builtRow+` WHERE ? IN (tenant, '*') ORDER BY used_at, tenant, key`)
	if err != nil {
		return nil, err
	}
	rows, err := st.QueryContext(ctx, who)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var b store.Built
		var used int64
		if err := rows.Scan(&b.Tenant, &b.Key, &b.Record, &b.Manifest, &b.Size, &used); err != nil {
			return nil, err
		}
		b.UsedAt = instant(used)
		out = append(out, b)
	}
	return out, rows.Err()
}

// DeleteBuilt implements store.Builds.
func (s *Store) DeleteBuilt(ctx context.Context, key string, since time.Time) error {
	tenant, err := names(ctx)
	if err != nil {
		return err
	}
	return s.write(ctx, "delete_built", func(t *tx) error {
		_, err := t.exec(`DELETE FROM build_cache WHERE tenant = ? AND key = ? AND used_at <= ?`, tenant, key, nanos(since))
		return err
	})
}
