package sqlite

import (
	"context"
	"encoding/hex"
	"encoding/json"
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
	taken := &sandbox.Error{Class: sandbox.AlreadyExists, Msg: fmt.Sprintf("there is a secret '%.80s' already", sec.Name)}
	return s.change(ctx, "create_secret", taken, `INSERT INTO secrets (tenant, name, updated_at, sealed, record) VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING`,
		sec.Tenant, sec.Name, nanos(sec.UpdatedAt), hex.EncodeToString(sec.Sealed), record)
}

const secretRow = `SELECT sealed, record FROM secrets`

// GetSecret implements store.Secrets.
func (s *Store) GetSecret(ctx context.Context, name string) (store.SealedSecret, error) {
	tenant, err := names(ctx)
	if err != nil {
		return store.SealedSecret{}, err
	}
	return one(ctx, s, "get_secret", scanSecret, missing("secret", name), secretRow+` WHERE tenant = ? AND name = ?`, tenant, name)
}

// ListSecrets implements store.Secrets.
func (s *Store) ListSecrets(ctx context.Context) ([]store.SealedSecret, error) {
	return listed(ctx, s, "list_secrets", scanSecret, secretRow+` WHERE ? IN (tenant, '*') ORDER BY tenant, name`)
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
			return missing("secret", sec.Name)
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
	return s.change(ctx, "delete_secret", missing("secret", name), `DELETE FROM secrets WHERE tenant = ? AND name = ?`, tenant, name)
}

func encodeSecret(sec store.SealedSecret) (string, error) {
	if err := store.CheckSecret(sec); err != nil {
		return "", err
	}
	sec.CreatedAt, sec.UpdatedAt = sec.CreatedAt.UTC(), sec.UpdatedAt.UTC()
	return encoded("secret", sec.Secret)
}

func scanSecret(row scanner) (sec store.SealedSecret, err error) {
	var sealed, record string
	if err := row(&sealed, &record); err != nil {
		return sec, err
	}
	if err := json.Unmarshal([]byte(record), &sec.Secret); err != nil {
		return store.SealedSecret{}, damaged("secret", "", err)
	}
	if sec.Sealed, err = hex.DecodeString(sealed); err != nil {
		return store.SealedSecret{}, damaged("secret", sec.Name, err)
	}
	return sec, nil
}
