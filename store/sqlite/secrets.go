package sqlite

import (
	"context"
	"database/sql"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// CreateSecret implements store.Secrets.
func (s *Store) CreateSecret(ctx context.Context, sec store.SealedSecret) error {
	if _, err := whose(ctx); err != nil {
		return err
	}
	sec.Tenant = store.ScopeOf(ctx).Owner(sec.Tenant)
	record, err := encodeSecret(sec)
	if err != nil {
		return err
	}
	return s.write(ctx, "create_secret", func(t *tx) error {
		n, err := t.exec(`INSERT INTO secrets (tenant, name, updated_at, sealed, record) VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING`,
			sec.Tenant, sec.Name, nanos(sec.UpdatedAt), hex.EncodeToString(sec.Sealed), record)
		if err == nil && n == 0 {
			return &sandbox.Error{Class: sandbox.AlreadyExists, Msg: fmt.Sprintf("there is a secret '%.80s' already", sec.Name)}
		}
		return err
	})
}

const secretRow = `SELECT sealed, record FROM secrets`

// GetSecret implements store.Secrets.
func (s *Store) GetSecret(ctx context.Context, name string) (store.SealedSecret, error) {
	tenant, err := names(ctx)
	if err != nil {
		return store.SealedSecret{}, err
	}
	var sealed, record string
	err = s.readRow(ctx, secretRow+` WHERE tenant = ? AND name = ?`, []any{tenant, name}, &sealed, &record)
	if errors.Is(err, sql.ErrNoRows) {
		return store.SealedSecret{}, noSecret(name)
	}
	if err != nil {
		return store.SealedSecret{}, s.fault(ctx, "get_secret", err)
	}
	return decodeSecret(sealed, record)
}

// ListSecrets implements store.Secrets.
func (s *Store) ListSecrets(ctx context.Context) ([]store.SealedSecret, error) {
	out, err := s.listSecrets(ctx)
	return out, s.fault(ctx, "list_secrets", err)
}

func (s *Store) listSecrets(ctx context.Context) (out []store.SealedSecret, err error) {
	who, err := whose(ctx)
	if err != nil {
		return nil, err
	}
	st, err := s.stmt(ctx, secretRow+` WHERE ? IN (tenant, '*') ORDER BY tenant, name`)
	if err != nil {
		return nil, err
	}
	rows, err := st.QueryContext(ctx, who)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var sealed, record string
		if err := rows.Scan(&sealed, &record); err != nil {
			return nil, err
		}
		sec, err := decodeSecret(sealed, record)
		if err != nil {
			return nil, err
		}
		out = append(out, sec)
	}
	return out, rows.Err()
}

// ReplaceSecret implements store.Secrets.
func (s *Store) ReplaceSecret(ctx context.Context, sec store.SealedSecret, was time.Time) error {
	tenant, err := names(ctx)
	if err != nil {
		return err
	}
	sec.Tenant = tenant
	record, err := encodeSecret(sec)
	if err != nil {
		return err
	}
	return s.write(ctx, "replace_secret", func(t *tx) error {
		n, err := t.exec(`UPDATE secrets SET updated_at = ?, sealed = ?, record = ? WHERE tenant = ? AND name = ? AND updated_at = ?`,
			nanos(sec.UpdatedAt), hex.EncodeToString(sec.Sealed), record, tenant, sec.Name, nanos(was))
		if err != nil || n > 0 {
			return err
		}
		var known int
		if err := t.row(`SELECT count(*) FROM secrets WHERE tenant = ? AND name = ?`, []any{tenant, sec.Name}, &known); err != nil {
			return err
		}
		if known == 0 {
			return noSecret(sec.Name)
		}
		return &sandbox.Error{Class: sandbox.Conflict, Msg: fmt.Sprintf("secret '%.80s' was changed by somebody else", sec.Name), Hint: "ask again"}
	})
}

// DeleteSecret implements store.Secrets.
func (s *Store) DeleteSecret(ctx context.Context, name string) error {
	tenant, err := names(ctx)
	if err != nil {
		return err
	}
	return s.write(ctx, "delete_secret", func(t *tx) error {
		n, err := t.exec(`DELETE FROM secrets WHERE tenant = ? AND name = ?`, tenant, name)
		if err == nil && n == 0 {
			return noSecret(name)
		}
		return err
	})
}

func noSecret(name string) error {
	return &sandbox.Error{Class: sandbox.NotFound, Msg: fmt.Sprintf("no secret '%.80s'", name)}
}

func encodeSecret(sec store.SealedSecret) (string, error) {
	if err := store.CheckSecret(sec); err != nil {
		return "", err
	}
	sec.CreatedAt, sec.UpdatedAt = sec.CreatedAt.UTC(), sec.UpdatedAt.UTC()
	b, err := json.Marshal(sec.Secret)
	if err != nil {
		return "", &sandbox.Error{Class: sandbox.Invalid, Msg: "the secret cannot be recorded", Err: err}
	}
	return string(b), nil
}

func decodeSecret(sealed, record string) (sec store.SealedSecret, err error) {
	if err := json.Unmarshal([]byte(record), &sec.Secret); err != nil {
		return store.SealedSecret{}, damaged("secret", "", err)
	}
	if sec.Sealed, err = hex.DecodeString(sealed); err != nil {
		return store.SealedSecret{}, damaged("secret", sec.Name, err)
	}
	return sec, nil
}
