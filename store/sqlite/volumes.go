package sqlite

import (
	"context"
	"encoding/json"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// CreateVolume implements store.Volumes.
func (s *Store) CreateVolume(ctx context.Context, v sandbox.Volume) error {
	if _, err := whose(ctx); err != nil {
		return err
	}
	if err := store.CheckVolume(v); err != nil {
		return err
	}
	v.Tenant, v.CreatedAt = store.ScopeOf(ctx).Owner(v.Tenant), v.CreatedAt.UTC()
	record, err := encoded("volume", v)
	if err != nil {
		return err
	}
	return s.write(ctx, "create_volume", func(t *tx) error {
		if err := t.wantTenant(v.Tenant); err != nil {
			return err
		}
		n, err := t.exec(`INSERT INTO volumes (id, tenant, name, size, state, record) VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING`,
			v.ID, v.Tenant, v.Name, v.Size, string(v.State), record)
		if err == nil && n == 0 {
			return &sandbox.Error{Class: sandbox.AlreadyExists, Msg: "there is a volume '" + v.Name + "' already"}
		}
		return err
	})
}

const volumeRow = `SELECT id, size, state, record FROM volumes`

// GetVolume implements store.Volumes.
func (s *Store) GetVolume(ctx context.Context, nameOrID string) (sandbox.Volume, error) {
	who, err := whose(ctx)
	if err != nil {
		return sandbox.Volume{}, err
	}
	owner := store.ScopeOf(ctx).Owner("")
	return one(ctx, s, "get_volume", scanVolume, missing("volume", nameOrID), volumeRow+` WHERE id = ? AND ? IN (tenant, '*') OR tenant = ? AND name = ? ORDER BY id = ? DESC LIMIT 1`,
		nameOrID, who, owner, nameOrID, nameOrID)
}

// ListVolumes implements store.Volumes.
func (s *Store) ListVolumes(ctx context.Context) ([]sandbox.Volume, error) {
	return listed(ctx, s, "list_volumes", scanVolume, volumeRow+` WHERE ? IN (tenant, '*') ORDER BY tenant, name`)
}

// MoveVolume implements store.Volumes.
func (s *Store) MoveVolume(ctx context.Context, id string, from, to sandbox.VolumeState) error {
	return s.move(ctx, "volume", id, `UPDATE volumes SET state = ? WHERE id = ? AND state = ? AND ? IN (tenant, '*')`,
		`SELECT state FROM volumes WHERE id = ? AND ? IN (tenant, '*')`, string(from), string(to), missing("volume", id))
}

// ResizeVolume implements store.Volumes.
func (s *Store) ResizeVolume(ctx context.Context, id string, size int64) error {
	return s.changeSeen(ctx, "resize_volume", missing("volume", id), `UPDATE volumes SET size = ? WHERE id = ? AND ? IN (tenant, '*')`, size, id)
}

// DeleteVolume implements store.Volumes.
func (s *Store) DeleteVolume(ctx context.Context, id string) error {
	return s.changeSeen(ctx, "delete_volume", nil, `DELETE FROM volumes WHERE id = ? AND ? IN (tenant, '*')`, id)
}

func scanVolume(row scanner) (v sandbox.Volume, err error) {
	var id, state, record string
	var size int64
	if err := row(&id, &size, &state, &record); err != nil {
		return v, err
	}
	if err := json.Unmarshal([]byte(record), &v); err != nil {
		return sandbox.Volume{}, damaged("volume", id, err)
	}
	v.Size, v.State = size, sandbox.VolumeState(state)
	return v, nil
}
