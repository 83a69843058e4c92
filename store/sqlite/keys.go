package sqlite

import (
	"context"
	"database/sql"
	"encoding/hex"
	"errors"
	"strings"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// touchEvery is how far behind the truth LastUsedAt may be. Every request
// touches its key; without this each would cost an fsync.
const touchEvery = time.Minute

// CreateKey implements store.Keys.
func (s *Store) CreateKey(ctx context.Context, k store.Key) error {
	if _, err := whose(ctx); err != nil {
		return err
	}
	if err := store.CheckKey(k); err != nil {
		return err
	}
	k.Tenant = store.ScopeOf(ctx).Owner(k.Tenant)
	return s.write(ctx, "create_key", func(t *tx) error {
		if err := t.wantTenant(k.Tenant); err != nil {
			return err
		}
		n, err := t.exec(`INSERT INTO api_keys (id, hash, name, created_at, last_used_at, tenant, role, scopes, expires_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING`,
			k.ID, hex.EncodeToString(k.Hash), k.Name, nanos(k.CreatedAt), nanos(k.LastUsedAt), k.Tenant, string(k.Role), strings.Join(k.Scopes, " "), nanos(k.ExpiresAt))
		if err == nil && n == 0 {
			return &sandbox.Error{Class: sandbox.AlreadyExists, Msg: "there is a key " + k.ID + " or one with the same secret already"}
		}
		return err
	})
}

const keyColumns = `SELECT id, hash, name, created_at, last_used_at, tenant, role, scopes, expires_at, old_hash, old_until FROM api_keys`

// KeyByHash implements store.Keys.
func (s *Store) KeyByHash(ctx context.Context, hash []byte) (store.Key, error) {
	if err := store.ScopeOf(ctx).CheckAll(); err != nil {
		return store.Key{}, err
	}
	h := hex.EncodeToString(hash)
	k, err := scanKey(s.scan(ctx, keyColumns+` WHERE hash = ? OR old_hash <> '' AND old_hash = ?`, h, h))
	if errors.Is(err, sql.ErrNoRows) {
		k, err = s.keyByOlderHash(ctx, h)
	}
	if errors.Is(err, sql.ErrNoRows) {
		return store.Key{}, &sandbox.Error{Class: sandbox.NotFound, Msg: "no such key"}
	}
	return k, s.fault(ctx, "key_by_hash", err)
}

// keyByOlderHash finds the key that had a secret before its last rotation but
// one. That secret is the key's old one to the caller, with its own end.
func (s *Store) keyByOlderHash(ctx context.Context, h string) (store.Key, error) {
	var id string
	var until int64
	if err := s.readRow(ctx, `SELECT key_id, until FROM old_secrets WHERE hash = ?`, []any{h}, &id, &until); err != nil {
		return store.Key{}, err
	}
	k, err := scanKey(s.scan(ctx, keyColumns+` WHERE id = ?`, id))
	if err != nil {
		return store.Key{}, err
	}
	k.OldHash, err = hex.DecodeString(h)
	k.OldUntil = instant(until)
	return k, err
}

// ListKeys implements store.Keys, oldest first.
func (s *Store) ListKeys(ctx context.Context) ([]store.Key, error) {
	return listed(ctx, s, "list_keys", scanKey, keyColumns+` WHERE ? IN (tenant, '*') ORDER BY created_at, id`)
}

// RevokeKey implements store.Keys.
func (s *Store) RevokeKey(ctx context.Context, id string) error {
	return s.changeSeen(ctx, "revoke_key", noKey(id), `DELETE FROM api_keys WHERE id = ? AND ? IN (tenant, '*')`, id)
}

// RotateKey implements store.Keys.
func (s *Store) RotateKey(ctx context.Context, id string, hash []byte, oldUntil time.Time) (k store.Key, err error) {
	who, err := whose(ctx)
	if err != nil {
		return k, err
	}
	if len(hash) == 0 {
		return k, sandbox.InvalidField("key", "a key has a hash")
	}
	err = s.write(ctx, "rotate_key", func(t *tx) error {
		var taken int
		h := hex.EncodeToString(hash)
		if err := t.row(`SELECT (SELECT count(*) FROM api_keys WHERE hash = ? OR old_hash = ?) + (SELECT count(*) FROM old_secrets WHERE hash = ?)`, []any{h, h, h}, &taken); err != nil {
			return err
		}
		if taken > 0 {
			return &sandbox.Error{Class: sandbox.AlreadyExists, Msg: "there is a key with the same secret already"}
		}
		// Each secret keeps its own grace, but none outlives this one: a rotation
		// with no grace ends them all. What a month of grace cannot have left is dropped.
		for _, q := range []struct {
			sql  string
			args []any
		}{
			{`INSERT INTO old_secrets (hash, key_id, until) SELECT old_hash, id, old_until FROM api_keys WHERE id = ? AND ? IN (tenant, '*') AND old_hash <> ''`, []any{id, who}},
			{`UPDATE old_secrets SET until = min(until, ?) WHERE key_id = ? AND EXISTS (SELECT 1 FROM api_keys WHERE id = key_id AND ? IN (tenant, '*'))`, []any{nanos(oldUntil), id, who}},
			{`DELETE FROM old_secrets WHERE until < ?`, []any{nanos(oldUntil.Add(-store.LongestGrace))}},
		} {
			if _, err := t.exec(q.sql, q.args...); err != nil {
				return err
			}
		}
		n, err := t.exec(`UPDATE api_keys SET old_hash = hash, old_until = ?, hash = ? WHERE id = ? AND ? IN (tenant, '*')`, nanos(oldUntil), h, id, who)
		if err != nil {
			return err
		}
		if n == 0 {
			return noKey(id)
		}
		k, err = scanKey(func(dest ...any) error { return t.row(keyColumns+` WHERE id = ?`, []any{id}, dest...) })
		return err
	})
	if err != nil {
		return store.Key{}, err
	}
	return k, nil
}

// TouchKey implements store.Keys. A touch within a minute of the last one is
// answered by a read.
func (s *Store) TouchKey(ctx context.Context, id string, at time.Time) error {
	who, err := whose(ctx)
	if err != nil {
		return err
	}
	var last int64
	err = s.readRow(ctx, `SELECT last_used_at FROM api_keys WHERE id = ? AND ? IN (tenant, '*')`, []any{id, who}, &last)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return noKey(id)
	case err != nil:
		return s.fault(ctx, "touch_key", err)
	case last != 0 && nanos(at) < last+int64(touchEvery):
		return nil
	}
	return s.write(ctx, "touch_key", func(t *tx) error {
		// Backwards never: of two touches that race, the later time stays.
		// A key revoked meanwhile needs none.
		_, err := t.exec(`UPDATE api_keys SET last_used_at = ? WHERE id = ? AND last_used_at < ?`, nanos(at), id, nanos(at))
		return err
	})
}

func scanKey(row scanner) (k store.Key, err error) {
	var hash, oldHash, role, scopes string
	var created, used, expires, oldUntil int64
	if err := row(&k.ID, &hash, &k.Name, &created, &used, &k.Tenant, &role, &scopes, &expires, &oldHash, &oldUntil); err != nil {
		return store.Key{}, err
	}
	if k.Hash, err = hex.DecodeString(hash); err != nil {
		return store.Key{}, damaged("key", k.ID, err)
	}
	if k.OldHash, err = hex.DecodeString(oldHash); err != nil {
		return store.Key{}, damaged("key", k.ID, err)
	}
	k.Role = sandbox.Role(role)
	if scopes != "" {
		k.Scopes = strings.Fields(scopes)
	}
	if len(k.OldHash) == 0 {
		k.OldHash = nil
	}
	k.CreatedAt, k.LastUsedAt, k.ExpiresAt, k.OldUntil = instant(created), instant(used), instant(expires), instant(oldUntil)
	return k, nil
}

func noKey(id string) error {
	return &sandbox.Error{Class: sandbox.NotFound, Msg: "no key " + id}
}
