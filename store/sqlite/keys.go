package sqlite

import (
	"context"
	"database/sql"
	"encoding/hex"
	"errors"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// touchEvery is how far behind the truth LastUsedAt may be. Every request
// touches its key; without this each would cost an fsync.
const touchEvery = time.Minute

// CreateKey implements store.Keys.
func (s *Store) CreateKey(ctx context.Context, k store.Key) error {
	if k.ID == "" || len(k.Hash) == 0 {
		return sandbox.InvalidField("key", "a key has an id and a hash")
	}
	return s.write(ctx, "create_key", func(t *tx) error {
		n, err := t.exec(`INSERT INTO api_keys (id, hash, name, created_at, last_used_at) VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING`,
			k.ID, hex.EncodeToString(k.Hash), k.Name, nanos(k.CreatedAt), nanos(k.LastUsedAt))
		if err == nil && n == 0 {
			return &sandbox.Error{Class: sandbox.AlreadyExists, Msg: "there is a key " + k.ID + " or one with the same secret already"}
		}
		return err
	})
}

const keyColumns = `SELECT id, hash, name, created_at, last_used_at FROM api_keys`

// KeyByHash implements store.Keys.
func (s *Store) KeyByHash(ctx context.Context, hash []byte) (store.Key, error) {
	st, err := s.stmt(ctx, keyColumns+` WHERE hash = ?`)
	if err != nil {
		return store.Key{}, s.fault(ctx, "key_by_hash", err)
	}
	k, err := scanKey(st.QueryRowContext(ctx, hex.EncodeToString(hash)))
	if errors.Is(err, sql.ErrNoRows) {
		return store.Key{}, &sandbox.Error{Class: sandbox.NotFound, Msg: "no such key"}
	}
	return k, s.fault(ctx, "key_by_hash", err)
}

// ListKeys implements store.Keys, oldest first.
func (s *Store) ListKeys(ctx context.Context) ([]store.Key, error) {
	keys, err := s.listKeys(ctx)
	return keys, s.fault(ctx, "list_keys", err)
}

func (s *Store) listKeys(ctx context.Context) ([]store.Key, error) {
	st, err := s.stmt(ctx, keyColumns+` ORDER BY created_at, id`)
	if err != nil {
		return nil, err
	}
	rows, err := st.QueryContext(ctx)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var keys []store.Key
	for rows.Next() {
		k, err := scanKey(rows)
		if err != nil {
			return nil, err
		}
		keys = append(keys, k)
	}
	return keys, rows.Err()
}

// RevokeKey implements store.Keys.
func (s *Store) RevokeKey(ctx context.Context, id string) error {
	return s.write(ctx, "revoke_key", func(t *tx) error {
		n, err := t.exec(`DELETE FROM api_keys WHERE id = ?`, id)
		if err == nil && n == 0 {
			return noKey(id)
		}
		return err
	})
}

// TouchKey implements store.Keys. A touch within a minute of the last one is
// answered by a read.
func (s *Store) TouchKey(ctx context.Context, id string, at time.Time) error {
	var last int64
	err := s.readRow(ctx, `SELECT last_used_at FROM api_keys WHERE id = ?`, []any{id}, &last)
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

func scanKey(row interface{ Scan(...any) error }) (k store.Key, err error) {
	var hash string
	var created, used int64
	if err := row.Scan(&k.ID, &hash, &k.Name, &created, &used); err != nil {
		return store.Key{}, err
	}
	if k.Hash, err = hex.DecodeString(hash); err != nil {
		return store.Key{}, damaged("key", k.ID, err)
	}
	k.CreatedAt, k.LastUsedAt = instant(created), instant(used)
	return k, nil
}

func noKey(id string) error {
	return &sandbox.Error{Class: sandbox.NotFound, Msg: "no key " + id}
}
