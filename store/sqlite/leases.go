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
	record, err := encoded("lease", l)
	if err != nil {
		return err
	}
	taken := &sandbox.Error{Class: sandbox.AlreadyExists, Msg: fmt.Sprintf("there is a lease '%s' already", l.ID)}
	return s.change(ctx, "create_lease", taken, `INSERT INTO leases (id, tenant, created_at, record) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING`,
		l.ID, l.Tenant, nanos(l.CreatedAt), record)
}

// ListLeases implements store.Leases.
func (s *Store) ListLeases(ctx context.Context) ([]sandbox.Lease, error) {
	return listed(ctx, s, "list_leases", scanLease, `SELECT id, record FROM leases WHERE ? IN (tenant, '*') ORDER BY created_at, id`)
}

// DeleteLease implements store.Leases.
func (s *Store) DeleteLease(ctx context.Context, id string) error {
	return s.changeSeen(ctx, "delete_lease", nil, `DELETE FROM leases WHERE id = ? AND ? IN (tenant, '*')`, id)
}

func scanLease(row scanner) (l sandbox.Lease, err error) {
	var id, record string
	if err := row(&id, &record); err != nil {
		return l, err
	}
	if err := json.Unmarshal([]byte(record), &l); err != nil {
		return sandbox.Lease{}, damaged("lease", id, err)
	}
	return l, nil
}
