package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// CreateRun implements store.Runs.
func (s *Store) CreateRun(ctx context.Context, r sandbox.Run) error {
	if _, err := whose(ctx); err != nil {
		return err
	}
	if err := store.CheckRun(r); err != nil {
		return err
	}
	r.Tenant = store.ScopeOf(ctx).Owner(r.Tenant)
	record, err := encodeRun(r)
	if err != nil {
		return err
	}
	return s.write(ctx, "create_run", func(t *tx) error {
		if err := t.wantTenant(r.Tenant); err != nil {
			return err
		}
		n, err := t.exec(`INSERT INTO runs (id, tenant, name, ended, created_at, record) VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING`,
			r.ID, r.Tenant, r.Name, runEnded(r), nanos(r.CreatedAt), record)
		if err == nil && n == 0 {
			return &sandbox.Error{Class: sandbox.AlreadyExists, Field: "name", Msg: "there is a run '" + r.Name + "' already"}
		}
		return err
	})
}

// GetRun implements store.Runs.
func (s *Store) GetRun(ctx context.Context, nameOrID string) (sandbox.Run, error) {
	who, err := whose(ctx)
	if err != nil {
		return sandbox.Run{}, err
	}
	r, err := scanRun(s.scan(ctx, `SELECT id, record FROM runs WHERE id = ? AND ? IN (tenant, '*') OR tenant = ? AND name = ? ORDER BY id = ? DESC LIMIT 1`,
		nameOrID, who, store.ScopeOf(ctx).Owner(""), nameOrID, nameOrID))
	if errors.Is(err, sql.ErrNoRows) {
		return r, sandbox.NoSuchRun("run", nameOrID)
	}
	return r, s.fault(ctx, "get_run", err)
}

// ListRuns implements store.Runs.
func (s *Store) ListRuns(ctx context.Context, ended bool) ([]sandbox.Run, error) {
	who, err := whose(ctx)
	if err != nil {
		return nil, err
	}
	most := 0
	if ended {
		most = 1
	}
	out, err := each(ctx, s, scanRun, `SELECT id, record FROM runs WHERE ended <= ? AND ? IN (tenant, '*') ORDER BY created_at DESC, id DESC`, most, who)
	return out, s.fault(ctx, "list_runs", err)
}

// UpdateRun implements store.Runs. Changes of runs are rare, so f runs in the
// transaction.
func (s *Store) UpdateRun(ctx context.Context, id string, f func(*sandbox.Run) error) (out sandbox.Run, err error) {
	who, err := whose(ctx)
	if err != nil {
		return out, err
	}
	err = s.write(ctx, "update_run", func(t *tx) error {
		var record string
		err := t.row(`SELECT record FROM runs WHERE id = ? AND ? IN (tenant, '*')`, []any{id, who}, &record)
		if errors.Is(err, sql.ErrNoRows) {
			return sandbox.NoSuchRun("run", id)
		}
		if err != nil {
			return err
		}
		old, err := decodeRun(id, record)
		if err != nil {
			return err
		}
		next, _ := decodeRun(id, record) // again: f owns the maps of its argument
		if err := f(&next); err != nil {
			return refusal(err)
		}
		if err := store.CheckRunUpdate(old, next); err != nil {
			return err
		}
		if record, err = encodeRun(next); err != nil {
			return err
		}
		if out, err = decodeRun(id, record); err != nil {
			return err
		}
		_, err = t.exec(`UPDATE runs SET ended = ?, record = ? WHERE id = ?`, runEnded(next), record, id)
		return err
	})
	return out, err
}

// refusal has an error of a caller's function leave the others of its batch alone.
func refusal(err error) error { return sandbox.AsError(err) }

// DeleteRun implements store.Runs.
func (s *Store) DeleteRun(ctx context.Context, id string) error {
	return s.changeSeen(ctx, "delete_run", nil, `DELETE FROM runs WHERE id = ? AND ? IN (tenant, '*')`, id)
}

// PutCheckpoint implements store.Runs.
func (s *Store) PutCheckpoint(ctx context.Context, run string, c sandbox.Checkpoint, ifVersion *int64, keep int) (sandbox.Checkpoint, error) {
	who, err := whose(ctx)
	if err != nil {
		return c, err
	}
	c.Size, c.CreatedAt = int64(len(c.Doc)), c.CreatedAt.UTC()
	err = s.write(ctx, "put_checkpoint", func(t *tx) error {
		var latest int64
		err := t.row(`SELECT coalesce((SELECT max(version) FROM run_checkpoints WHERE run = r.id), 0) FROM runs r WHERE r.id = ? AND ? IN (r.tenant, '*')`,
			[]any{run, who}, &latest)
		switch {
		case errors.Is(err, sql.ErrNoRows):
			return sandbox.NoSuchRun("run", run)
		case err != nil:
			return err
		case ifVersion != nil && *ifVersion != latest:
			return sandbox.WrongVersion(*ifVersion, latest)
		}
		c.Version = latest + 1
		if _, err := t.exec(`INSERT INTO run_checkpoints (run, version, created_at, size, doc) VALUES (?, ?, ?, ?, ?)`,
			run, c.Version, nanos(c.CreatedAt), c.Size, c.Doc); err != nil {
			return err
		}
		_, err = t.exec(`DELETE FROM run_checkpoints WHERE run = ? AND version <= ?`, run, c.Version-int64(keep))
		return err
	})
	return c, err
}

const checkpointRow = `FROM run_checkpoints c JOIN runs r ON r.id = c.run WHERE c.run = ? AND ? IN (r.tenant, '*')`

// GetCheckpoint implements store.Runs.
func (s *Store) GetCheckpoint(ctx context.Context, run string, version int64) (c sandbox.Checkpoint, err error) {
	who, err := whose(ctx)
	if err != nil {
		return c, err
	}
	var created int64
	err = s.readRow(ctx, `SELECT c.version, c.created_at, c.size, c.doc `+checkpointRow+` AND (? = 0 OR c.version = ?) ORDER BY c.version DESC LIMIT 1`,
		[]any{run, who, version, version}, &c.Version, &created, &c.Size, &c.Doc)
	if errors.Is(err, sql.ErrNoRows) {
		return c, &sandbox.Error{Class: sandbox.NotFound, Field: "version", Msg: "the run has no such checkpoint", Hint: "the last versions are kept: list them"}
	}
	c.CreatedAt = instant(created)
	return c, s.fault(ctx, "get_checkpoint", err)
}

// ListCheckpoints implements store.Runs.
func (s *Store) ListCheckpoints(ctx context.Context, run string) ([]sandbox.Checkpoint, error) {
	who, err := whose(ctx)
	if err != nil {
		return nil, err
	}
	out, err := each(ctx, s, func(row scanner) (c sandbox.Checkpoint, err error) {
		var created int64
		err = row(&c.Version, &created, &c.Size)
		c.CreatedAt = instant(created)
		return c, err
	}, `SELECT c.version, c.created_at, c.size `+checkpointRow+` ORDER BY c.version DESC`, run, who)
	return out, s.fault(ctx, "list_checkpoints", err)
}

func runEnded(r sandbox.Run) int {
	if r.State == sandbox.RunEnded {
		return 1
	}
	return 0
}

func encodeRun(r sandbox.Run) (string, error) {
	r.CreatedAt, r.ExpiresAt = r.CreatedAt.UTC(), time.Time{}
	if r.End != nil {
		end := *r.End
		end.At = end.At.UTC()
		r.End = &end
	}
	b, err := json.Marshal(r)
	if err != nil {
		return "", &sandbox.Error{Class: sandbox.Invalid, Msg: "the run cannot be recorded", Err: err}
	}
	return string(b), nil
}

func decodeRun(id, record string) (r sandbox.Run, err error) {
	if err := json.Unmarshal([]byte(record), &r); err != nil {
		return r, damaged("run", id, err)
	}
	return r, nil
}

func scanRun(row scanner) (sandbox.Run, error) {
	var id, record string
	if err := row(&id, &record); err != nil {
		return sandbox.Run{}, err
	}
	return decodeRun(id, record)
}
