package sqlite

import (
	"context"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// PutLogin implements store.Logins.
func (s *Store) PutLogin(ctx context.Context, l store.SealedLogin) error {
	tenant, err := names(ctx)
	if err == nil {
		err = store.CheckLogin(l)
	}
	if err != nil {
		return err
	}
	return s.write(ctx, "put_login", func(t *tx) error {
		_, err := t.exec(`INSERT INTO registry_logins (tenant, registry, username, sealed, updated_at) VALUES (?, ?, ?, ?, ?)
			ON CONFLICT (tenant, registry) DO UPDATE SET username = excluded.username, sealed = excluded.sealed, updated_at = excluded.updated_at`,
			tenant, l.Registry, l.Username, hex.EncodeToString(l.Sealed), nanos(l.UpdatedAt))
		return err
	})
}

const loginRow = `SELECT tenant, registry, username, sealed, updated_at FROM registry_logins`

// GetLogin implements store.Logins.
func (s *Store) GetLogin(ctx context.Context, registry string) (store.SealedLogin, error) {
	tenant, err := names(ctx)
	if err != nil {
		return store.SealedLogin{}, err
	}
	var r loginColumns
	err = s.readRow(ctx, loginRow+` WHERE tenant = ? AND registry = ?`, []any{tenant, registry}, r.all()...)
	if errors.Is(err, sql.ErrNoRows) {
		return store.SealedLogin{}, noLogin(registry)
	}
	if err != nil {
		return store.SealedLogin{}, s.fault(ctx, "get_login", err)
	}
	return r.login()
}

// ListLogins implements store.Logins.
func (s *Store) ListLogins(ctx context.Context) ([]store.SealedLogin, error) {
	out, err := s.listLogins(ctx)
	return out, s.fault(ctx, "list_logins", err)
}

func (s *Store) listLogins(ctx context.Context) (out []store.SealedLogin, err error) {
	who, err := whose(ctx)
	if err != nil {
		return nil, err
	}
	st, err := s.stmt(ctx, loginRow+` WHERE ? IN (tenant, '*') ORDER BY tenant, registry`)
	if err != nil {
		return nil, err
	}
	rows, err := st.QueryContext(ctx, who)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var r loginColumns
		if err := rows.Scan(r.all()...); err != nil {
			return nil, err
		}
		l, err := r.login()
		if err != nil {
			return nil, err
		}
		out = append(out, l)
	}
	return out, rows.Err()
}

// DeleteLogin implements store.Logins.
func (s *Store) DeleteLogin(ctx context.Context, registry string) error {
	tenant, err := names(ctx)
	if err != nil {
		return err
	}
	return s.write(ctx, "delete_login", func(t *tx) error {
		n, err := t.exec(`DELETE FROM registry_logins WHERE tenant = ? AND registry = ?`, tenant, registry)
		if err == nil && n == 0 {
			return noLogin(registry)
		}
		return err
	})
}

// loginColumns is a row of registry_logins.
type loginColumns struct {
	tenant, registry, username, sealed string
	updated                            int64
}

func (r *loginColumns) all() []any {
	return []any{&r.tenant, &r.registry, &r.username, &r.sealed, &r.updated}
}

func (r *loginColumns) login() (store.SealedLogin, error) {
	sealed, err := hex.DecodeString(r.sealed)
	if err != nil {
		return store.SealedLogin{}, damaged("login", r.registry, err)
	}
	return store.SealedLogin{Sealed: sealed, RegistryLogin: sandbox.RegistryLogin{Tenant: r.tenant, Registry: r.registry, Username: r.username,
		UpdatedAt: instant(r.updated)}}, nil
}

func noLogin(registry string) error {
	return &sandbox.Error{Class: sandbox.NotFound, Msg: fmt.Sprintf("no login to '%.80s'", registry)}
}
