package sqlite

import (
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// CreateSandbox implements store.Sandboxes.
func (s *Store) CreateSandbox(ctx context.Context, sb sandbox.Sandbox, idem store.Idempotency) (got sandbox.Sandbox, existed bool, err error) {
	if err := store.CheckNew(sb); err != nil {
		return got, false, err
	}
	if _, err := whose(ctx); err != nil {
		return got, false, err
	}
	sb.Tenant = store.ScopeOf(ctx).Owner(sb.Tenant)
	record, err := encodeSandbox(sb)
	if err != nil {
		return got, false, err
	}
	err = s.write(ctx, "create_sandbox", func(t *tx) error {
		existed = false
		if idem.Key != "" {
			first, err := sandboxOfKey(sb.Tenant, idem, t.row)
			if err == nil {
				got, existed = first, true
			}
			if !errors.Is(err, sql.ErrNoRows) {
				return err
			}
		}
		n, err := t.exec(`INSERT INTO sandboxes (id, tenant, ended, state, image_id, created_at, ended_at, run, version, record)
			VALUES (?, ?, ?, ?, ?, ?, ?, ?, 1, ?) ON CONFLICT DO NOTHING`,
			sb.ID, sb.Tenant, endedInt(sb), string(sb.State), sb.ImageID, nanos(sb.CreatedAt), endedAt(sb), sb.Spec.Rollout.Run, record)
		if err != nil {
			return err
		}
		if n == 0 {
			return &sandbox.Error{Class: sandbox.AlreadyExists, Msg: "there is a sandbox " + sb.ID + " already"}
		}
		if idem.Key != "" {
			if _, err := t.exec(`INSERT INTO idempotency_keys (tenant, idem_key, hash, sandbox_id) VALUES (?, ?, ?, ?)`, sb.Tenant, idem.Key, idem.Hash, sb.ID); err != nil {
				return err
			}
		}
		got = sb
		if err := t.insertLineage(sb.ID, sb.Lineage); err != nil {
			return err
		}
		return t.insertLabels(sb)
	})
	if err != nil {
		return sandbox.Sandbox{}, false, err
	}
	if !existed {
		// What was stored, not what was given: no map is shared with the
		// caller and times are as a later read has them.
		got, err = decodeSandbox(sb.ID, record)
	}
	return got, existed, err
}

// SandboxByKey implements store.Sandboxes.
func (s *Store) SandboxByKey(ctx context.Context, idem store.Idempotency) (sandbox.Sandbox, error) {
	tenant, err := names(ctx)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	sb, err := sandboxOfKey(tenant, idem, func(query string, args []any, dest ...any) error {
		return s.readRow(ctx, query, args, dest...)
	})
	if errors.Is(err, sql.ErrNoRows) {
		return sandbox.Sandbox{}, &sandbox.Error{Class: sandbox.NotFound, Msg: "no sandbox was created with this idempotency key"}
	}
	return sb, s.fault(ctx, "sandbox_by_key", err)
}

// sandboxOfKey finds what was first created with an idempotency key;
// sql.ErrNoRows if nothing was.
func sandboxOfKey(tenant string, idem store.Idempotency, row func(query string, args []any, dest ...any) error) (sandbox.Sandbox, error) {
	var hash, id, record string
	err := row(`SELECT k.hash, s.id, s.record FROM idempotency_keys k JOIN sandboxes s ON s.id = k.sandbox_id WHERE k.tenant = ? AND k.idem_key = ?`,
		[]any{tenant, idem.Key}, &hash, &id, &record)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	if idem.Hash != "" && hash != idem.Hash {
		return sandbox.Sandbox{}, &sandbox.Error{Class: sandbox.AlreadyExists, Field: "idempotency_key",
			Msg: "the key was used for sandbox " + id + " with another request", Hint: "use a fresh key for a different request"}
	}
	return decodeSandbox(id, record)
}

// GetSandbox implements store.Sandboxes.
func (s *Store) GetSandbox(ctx context.Context, id string) (sandbox.Sandbox, error) {
	sb, _, _, err := s.loadSandbox(ctx, id)
	return sb, s.fault(ctx, "get_sandbox", err)
}

func (s *Store) loadSandbox(ctx context.Context, id string) (sb sandbox.Sandbox, record string, version int64, err error) {
	who, err := whose(ctx)
	if err != nil {
		return sb, "", 0, err
	}
	err = s.readRow(ctx, `SELECT record, version FROM sandboxes WHERE id = ? AND ? IN (tenant, '*')`, []any{id, who}, &record, &version)
	if errors.Is(err, sql.ErrNoRows) {
		return sb, "", 0, noSandbox(id)
	}
	if err != nil {
		return sb, "", 0, err
	}
	sb, err = decodeSandbox(id, record)
	return sb, record, version, err
}

// UpdateSandbox implements store.Sandboxes by compare-and-set: f runs in the
// caller's goroutine on a copy, and again if somebody else was faster. Each
// lost round means that another update was made, so it ends.
func (s *Store) UpdateSandbox(ctx context.Context, id string, f func(*sandbox.Sandbox) error) (sandbox.Sandbox, error) {
	const op = "update_sandbox"
	for {
		old, oldRecord, version, err := s.loadSandbox(ctx, id)
		if err != nil {
			return old, s.fault(ctx, op, err)
		}
		if old.State == sandbox.EndedState {
			return sandbox.Sandbox{}, old.Usable()
		}
		// Decoded again rather than copied: f owns every map of its argument.
		next, err := decodeSandbox(id, oldRecord)
		if err != nil {
			return next, err
		}
		if err := f(&next); err != nil {
			return sandbox.Sandbox{}, err
		}
		if err := store.CheckUpdate(old, next); err != nil {
			return sandbox.Sandbox{}, err
		}
		record, err := encodeSandbox(next)
		if err != nil {
			return sandbox.Sandbox{}, err
		}
		if record == oldRecord {
			return old, nil
		}
		var won bool
		err = s.write(ctx, op, func(t *tx) error {
			n, err := t.exec(`UPDATE sandboxes SET state = ?, image_id = ?, record = ?, version = version + 1 WHERE id = ? AND version = ?`,
				string(next.State), next.ImageID, record, id, version)
			if won = n == 1; err != nil || !won {
				return err
			}
			if !slices.Equal(old.Lineage.Ancestors, next.Lineage.Ancestors) {
				if err := t.moveLineage(id, next.Lineage); err != nil {
					return err
				}
			}
			if maps.Equal(old.Spec.Labels, next.Spec.Labels) {
				return nil
			}
			if _, err := t.exec(`DELETE FROM sandbox_labels WHERE sandbox_id = ?`, id); err != nil {
				return err
			}
			return t.insertLabels(next)
		})
		if err != nil {
			return sandbox.Sandbox{}, err
		}
		if won {
			return decodeSandbox(id, record)
		}
	}
}

// EndSandbox implements store.Sandboxes.
func (s *Store) EndSandbox(ctx context.Context, id string, end sandbox.End) (sb sandbox.Sandbox, err error) {
	if end.Cause == "" {
		return sb, &sandbox.Error{Class: sandbox.Invalid, Field: "end.cause", Msg: "an end has a cause"}
	}
	who, err := whose(ctx)
	if err != nil {
		return sb, err
	}
	err = s.write(ctx, "end_sandbox", func(t *tx) error {
		var record string
		err := t.row(`SELECT record FROM sandboxes WHERE id = ? AND ? IN (tenant, '*')`, []any{id, who}, &record)
		if errors.Is(err, sql.ErrNoRows) {
			return noSandbox(id)
		}
		if err != nil {
			return err
		}
		if sb, err = decodeSandbox(id, record); err != nil {
			return err
		}
		if !sb.Finish(end) {
			return nil
		}
		if record, err = encodeSandbox(sb); err != nil {
			return err
		}
		if sb, err = decodeSandbox(id, record); err != nil {
			return err
		}
		if _, err := t.exec(`UPDATE sandboxes SET ended = 1, state = ?, ended_at = ?, record = ?, version = version + 1 WHERE id = ?`,
			string(sb.State), endedAt(sb), record, id); err != nil {
			return err
		}
		_, err = t.exec(`UPDATE sandbox_labels SET ended = 1 WHERE sandbox_id = ?`, id)
		return err
	})
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	return sb, nil
}

// ForgetSandbox implements store.Sandboxes.
func (s *Store) ForgetSandbox(ctx context.Context, id string) error {
	who, err := whose(ctx)
	if err != nil {
		return err
	}
	return s.write(ctx, "forget_sandbox", func(t *tx) error {
		n, err := t.exec(`DELETE FROM sandboxes WHERE id = ? AND ? IN (tenant, '*')`, id, who)
		if err != nil || n == 0 {
			return err
		}
		_, err = t.exec(`DELETE FROM lineage WHERE node_id = ?`, id)
		return err
	})
}

// ForgetEnded implements store.Sandboxes. Labels and idempotency keys go with
// their sandbox. Other writers wait meanwhile, so callers keep limit to some
// thousands.
func (s *Store) ForgetEnded(ctx context.Context, before time.Time, limit int) (int, error) {
	if err := store.ScopeOf(ctx).CheckAll(); err != nil || limit <= 0 {
		return 0, err
	}
	var gone int64
	err := s.write(ctx, "forget_ended", func(t *tx) (err error) {
		if _, err := t.exec(`DELETE FROM lineage WHERE node_id IN
			(SELECT id FROM sandboxes WHERE ended = 1 AND ended_at < ? ORDER BY ended_at, id LIMIT ?)`, nanos(before), limit); err != nil {
			return err
		}
		gone, err = t.exec(`DELETE FROM sandboxes WHERE id IN
			(SELECT id FROM sandboxes WHERE ended = 1 AND ended_at < ? ORDER BY ended_at, id LIMIT ?)`, nanos(before), limit)
		return err
	})
	if err != nil {
		return 0, err
	}
	return int(gone), nil
}

func (t *tx) insertLabels(sb sandbox.Sandbox) error {
	for name, value := range sb.Spec.Labels {
		if _, err := t.exec(`INSERT INTO sandbox_labels (sandbox_id, name, value, ended, created_at) VALUES (?, ?, ?, ?, ?)`,
			sb.ID, name, value, endedInt(sb), nanos(sb.CreatedAt)); err != nil {
			return err
		}
	}
	return nil
}

func noSandbox(id string) error {
	return &sandbox.Error{Class: sandbox.NotFound, Reason: sandbox.NoSandbox, Msg: "no sandbox " + id,
		Hint: "it never was, or its record was removed after its end"}
}

func encodeSandbox(sb sandbox.Sandbox) (string, error) {
	sb.CreatedAt, sb.ExpiresAt = sb.CreatedAt.UTC(), sb.ExpiresAt.UTC()
	sb.Standby = "" // what the node says now is no record
	if sb.End != nil {
		end := *sb.End
		end.At = end.At.UTC()
		sb.End = &end
	}
	b, err := json.Marshal(sb)
	if err != nil {
		return "", &sandbox.Error{Class: sandbox.Invalid, Msg: "the sandbox cannot be recorded", Err: err}
	}
	return string(b), nil
}

func decodeSandbox(id, record string) (sb sandbox.Sandbox, err error) {
	if err := json.Unmarshal([]byte(record), &sb); err != nil {
		return sandbox.Sandbox{}, damaged("sandbox", id, err)
	}
	sb.Tenant = cmp.Or(sb.Tenant, sandbox.DefaultTenant) // from before there were tenants
	return sb, nil
}

func endedInt(sb sandbox.Sandbox) int {
	if sb.State == sandbox.EndedState {
		return 1
	}
	return 0
}

func endedAt(sb sandbox.Sandbox) int64 {
	if sb.End == nil {
		return 0
	}
	return nanos(sb.End.At)
}

// nanos orders times in the database; the exact time is in the record. The zero
// time has no such number and comes before all others.
func nanos(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}

// instant is the time of a column that has no record beside it.
func instant(n int64) time.Time {
	if n == 0 {
		return time.Time{}
	}
	return time.Unix(0, n).UTC()
}
