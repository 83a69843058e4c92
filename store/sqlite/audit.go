package sqlite

import (
	"context"
	"encoding/json"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// AppendAudit implements store.Audit.
func (s *Store) AppendAudit(ctx context.Context, entries []sandbox.AuditEntry) error {
	if err := store.ScopeOf(ctx).CheckAll(); err != nil || len(entries) == 0 {
		return err
	}
	return s.write(ctx, "append_audit", func(t *tx) error {
		var seq int64
		var prev string
		if err := t.row(`SELECT seq, hash FROM audit_head WHERE one = 1`, nil, &seq, &prev); err != nil {
			return err
		}
		for _, e := range entries {
			seq++
			e.Seq, e.At, e.Prev = seq, e.At.UTC(), prev
			e.Hash = store.AuditHash(e)
			prev = e.Hash
			b, err := json.Marshal(e)
			if err != nil {
				return err
			}
			if _, err := t.exec(`INSERT INTO audit (seq, at, tenant, record) VALUES (?, ?, ?, ?)`, e.Seq, nanos(e.At), e.Tenant, string(b)); err != nil {
				return err
			}
		}
		_, err := t.exec(`UPDATE audit_head SET seq = ?, hash = ? WHERE one = 1`, seq, prev)
		return err
	})
}

// ListAudit implements store.Audit.
func (s *Store) ListAudit(ctx context.Context, after int64, since time.Time, limit int) ([]sandbox.AuditEntry, error) {
	who, err := whose(ctx)
	if err != nil {
		return nil, err
	}
	records, err := s.column(ctx, "list_audit", `SELECT record FROM audit WHERE seq > ? AND at >= ? AND ? IN (tenant, '*') ORDER BY seq LIMIT ?`,
		after, nanos(since), who, limit)
	if err != nil {
		return nil, err
	}
	out := make([]sandbox.AuditEntry, len(records))
	for i, r := range records {
		if err := json.Unmarshal([]byte(r), &out[i]); err != nil {
			return nil, damaged("audit entry", "", err)
		}
	}
	return out, nil
}

// ForgetAudit implements store.Audit. It goes by number, not by time alone: what
// is left is always one piece of the chain, also when a clock went back.
func (s *Store) ForgetAudit(ctx context.Context, before time.Time, limit int) (int, error) {
	if err := store.ScopeOf(ctx).CheckAll(); err != nil || limit <= 0 {
		return 0, err
	}
	var gone int64
	err := s.write(ctx, "forget_audit", func(t *tx) error {
		var first int64 // that stays
		if err := t.row(`SELECT coalesce((SELECT min(seq) FROM audit WHERE at >= ?), (SELECT seq + 1 FROM audit_head WHERE one = 1))`, []any{nanos(before)}, &first); err != nil {
			return err
		}
		var err error
		gone, err = t.exec(`DELETE FROM audit WHERE seq IN (SELECT seq FROM audit WHERE seq < ? ORDER BY seq LIMIT ?)`, first, limit)
		return err
	})
	return int(gone), err
}
