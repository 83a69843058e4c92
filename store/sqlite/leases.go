package sqlite

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// CreateLease implements store.Leases.
func (s *Store) CreateLease(ctx context.Context, l sandbox.Lease) error {
	if _, err := whose(ctx); err != nil {
		return err
	}
	if err := store.CheckLease(l); err != nil {
		return err
	}
	l.Tenant, l.CreatedAt, l.ExpiresAt = store.ScopeOf(ctx).Owner(l.Tenant), l.CreatedAt.UTC(), time.Time{}
	record, err := json.Marshal(l)
	if err != nil {
		return &sandbox.Error{Class: sandbox.Invalid, Msg: "the lease cannot be recorded", Err: err}
	}
	return s.write(ctx, "create_lease", func(t *tx) error {
		n, err := t.exec(`INSERT INTO leases (id, tenant, created_at, record) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING`,
			l.ID, l.Tenant, nanos(l.CreatedAt), string(record))
		if err == nil && n == 0 {
			return &sandbox.Error{Class: sandbox.AlreadyExists, Msg: fmt.Sprintf("there is a lease '%s' already", l.ID)}
		}
		return err
	})
}

// ListLeases implements store.Leases.
func (s *Store) ListLeases(ctx context.Context) ([]sandbox.Lease, error) {
	out, err := s.listLeases(ctx)
	return out, s.fault(ctx, "list_leases", err)
}

func (s *Store) listLeases(ctx context.Context) (out []sandbox.Lease, err error) {
	who, err := whose(ctx)
	if err != nil {
		return nil, err
	}
	st, err := s.stmt(ctx, `SELECT id, record FROM leases WHERE ? IN (tenant, '*') ORDER BY created_at, id`)
	if err != nil {
		return nil, err
	}
	rows, err := st.QueryContext(ctx, who)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var id, record string
		if err := rows.Scan(&id, &record); err != nil {
			return nil, err
		}
		var l sandbox.Lease
		if err := json.Unmarshal([]byte(record), &l); err != nil {
			return nil, damaged("lease", id, err)
		}
		out = append(out, l)
	}
	return out, rows.Err()
}

// DeleteLease implements store.Leases.
func (s *Store) DeleteLease(ctx context.Context, id string) error {
	who, err := whose(ctx)
	if err != nil {
		return err
	}
	return s.write(ctx, "delete_lease", func(t *tx) error {
		_, err := t.exec(`DELETE FROM leases WHERE id = ? AND ? IN (tenant, '*')`, id, who)
		return err
	})
}
