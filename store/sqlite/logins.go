package sqlite

import (
	"context"
	"encoding/hex"
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
	return s.change(ctx, "put_login", nil, `INSERT INTO registry_logins (tenant, registry, username, sealed, updated_at) VALUES (?, ?, ?, ?, ?)
		ON CONFLICT (tenant, registry) DO UPDATE SET username = excluded.username, sealed = excluded.sealed, updated_at = excluded.updated_at`,
		tenant, l.Registry, l.Username, hex.EncodeToString(l.Sealed), nanos(l.UpdatedAt))
}

const loginRow = `SELECT tenant, registry, username, sealed, updated_at FROM registry_logins`

// GetLogin implements store.Logins.
func (s *Store) GetLogin(ctx context.Context, registry string) (store.SealedLogin, error) {
	tenant, err := names(ctx)
	if err != nil {
		return store.SealedLogin{}, err
	}
	return one(ctx, s, "get_login", scanLogin, noLogin(registry), loginRow+` WHERE tenant = ? AND registry = ?`, tenant, registry)
}

// ListLogins implements store.Logins.
func (s *Store) ListLogins(ctx context.Context) ([]store.SealedLogin, error) {
	return listed(ctx, s, "list_logins", scanLogin, loginRow+` WHERE ? IN (tenant, '*') ORDER BY tenant, registry`)
}

// DeleteLogin implements store.Logins.
func (s *Store) DeleteLogin(ctx context.Context, registry string) error {
	tenant, err := names(ctx)
	if err != nil {
		return err
	}
	return s.change(ctx, "delete_login", noLogin(registry), `DELETE FROM registry_logins WHERE tenant = ? AND registry = ?`, tenant, registry)
}

func scanLogin(row scanner) (l store.SealedLogin, err error) {
	var sealed string
	var updated int64
	if err := row(&l.Tenant, &l.Registry, &l.Username, &sealed, &updated); err != nil {
		return store.SealedLogin{}, err
	}
	if l.Sealed, err = hex.DecodeString(sealed); err != nil {
		return store.SealedLogin{}, damaged("login", l.Registry, err)
	}
	l.UpdatedAt = instant(updated)
	return l, nil
}

func noLogin(registry string) error {
	return &sandbox.Error{Class: sandbox.NotFound, Msg: fmt.Sprintf("no login to '%.80s'", registry)}
}
