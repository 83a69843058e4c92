package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// CreateRecording implements store.Recordings.
func (s *Store) CreateRecording(ctx context.Context, r sandbox.Recording) error {
	if _, err := whose(ctx); err != nil {
		return err
	}
	if err := store.CheckRecording(r); err != nil {
		return err
	}
	r.Tenant = store.ScopeOf(ctx).Owner(r.Tenant)
	record, err := encodeRecording(r)
	if err != nil {
		return err
	}
	return s.write(ctx, "create_recording", func(t *tx) error {
		if err := t.wantTenant(r.Tenant); err != nil {
			return err
		}
		n, err := t.exec(`INSERT INTO recordings (id, tenant, name, state, created_at, record) VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING`,
			r.ID, r.Tenant, sql.NullString{String: r.Name, Valid: r.Name != ""}, string(r.State), nanos(r.CreatedAt), record)
		if err == nil && n == 0 {
			return (&sandbox.Error{Class: sandbox.AlreadyExists, Msg: "there is a recording '" + r.Name + "' already"}).
				WithHint("cove recording rm %s, or choose another name", r.Name)
		}
		return err
	})
}

const recordingRow = `SELECT id, state, record FROM recordings`

// GetRecording implements store.Recordings.
func (s *Store) GetRecording(ctx context.Context, nameOrID string) (sandbox.Recording, error) {
	who, err := whose(ctx)
	if err != nil {
		return sandbox.Recording{}, err
	}
	owner := store.ScopeOf(ctx).Owner("")
	return one(ctx, s, "get_recording", scanRecording, missing("recording", nameOrID), recordingRow+` WHERE id = ? AND ? IN (tenant, '*') OR tenant = ? AND name = ? ORDER BY id = ? DESC LIMIT 1`,
		nameOrID, who, owner, nameOrID, nameOrID)
}

// ListRecordings implements store.Recordings.
func (s *Store) ListRecordings(ctx context.Context) ([]sandbox.Recording, error) {
	return listed(ctx, s, "list_recordings", scanRecording, recordingRow+` WHERE ? IN (tenant, '*') ORDER BY created_at DESC, id DESC`)
}

// FinishRecording implements store.Recordings.
func (s *Store) FinishRecording(ctx context.Context, r sandbox.Recording) error {
	who, err := whose(ctx)
	if err != nil {
		return err
	}
	return s.write(ctx, "finish_recording", func(t *tx) error {
		was, err := scanRecording(func(dest ...any) error {
			return t.row(recordingRow+` WHERE id = ? AND ? IN (tenant, '*')`, []any{r.ID, who}, dest...)
		})
		if errors.Is(err, sql.ErrNoRows) || err == nil && was.State != sandbox.RecordingMaking && was.State != sandbox.RecordingOpen {
			return nil
		}
		if err != nil {
			return err
		}
		was.State, was.FinishedAt, was.Exchanges, was.Bytes, was.Truncated, was.Dropped = r.State, r.FinishedAt, r.Exchanges, r.Bytes, r.Truncated, r.Dropped
		record, err := encodeRecording(was)
		if err != nil {
			return err
		}
		_, err = t.exec(`UPDATE recordings SET state = ?, record = ? WHERE id = ?`, string(was.State), record, r.ID)
		return err
	})
}

// MoveRecording implements store.Recordings.
func (s *Store) MoveRecording(ctx context.Context, id string, from, to sandbox.RecordingState) error {
	return s.move(ctx, "recording", id, `UPDATE recordings SET state = ? WHERE id = ? AND state = ? AND ? IN (tenant, '*')`,
		`SELECT state FROM recordings WHERE id = ? AND ? IN (tenant, '*')`, string(from), string(to), missing("recording", id))
}

// DeleteRecording implements store.Recordings.
func (s *Store) DeleteRecording(ctx context.Context, id string) error {
	return s.changeSeen(ctx, "delete_recording", nil, `DELETE FROM recordings WHERE id = ? AND ? IN (tenant, '*')`, id)
}

func encodeRecording(r sandbox.Recording) (string, error) {
	r.CreatedAt, r.FinishedAt = r.CreatedAt.UTC(), r.FinishedAt.UTC()
	return encoded("recording", r)
}

func scanRecording(row scanner) (r sandbox.Recording, err error) {
	var id, state, record string
	if err := row(&id, &state, &record); err != nil {
		return r, err
	}
	if err := json.Unmarshal([]byte(record), &r); err != nil {
		return sandbox.Recording{}, damaged("recording", id, err)
	}
	r.State = sandbox.RecordingState(state)
	return r, nil
}
