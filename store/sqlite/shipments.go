package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// CreateShipment implements store.Shipments.
func (s *Store) CreateShipment(ctx context.Context, sh sandbox.Shipment) error {
	if _, err := whose(ctx); err != nil {
		return err
	}
	if err := store.CheckShipment(sh); err != nil {
		return err
	}
	sh.Tenant = store.ScopeOf(ctx).Owner(sh.Tenant)
	record, err := encodeShipment(sh)
	if err != nil {
		return err
	}
	return s.write(ctx, "create_shipment", func(t *tx) error {
		if err := t.wantTenant(sh.Tenant); err != nil {
			return err
		}
		n, err := t.exec(`INSERT INTO shipments (id, tenant, name, created_at, record) VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING`,
			sh.ID, sh.Tenant, sh.Name, nanos(sh.CreatedAt), record)
		if err == nil && n == 0 {
			return &sandbox.Error{Class: sandbox.AlreadyExists, Field: "name", Msg: "there is a shipment '" + sh.Name + "' already", Hint: "choose another name, or delete it first"}
		}
		return err
	})
}

// GetShipment implements store.Shipments.
func (s *Store) GetShipment(ctx context.Context, nameOrID string) (sandbox.Shipment, error) {
	who, err := whose(ctx)
	if err != nil {
		return sandbox.Shipment{}, err
	}
	sh, err := scanShipment(s.scan(ctx, `SELECT id, record FROM shipments WHERE id = ? AND ? IN (tenant, '*') OR tenant = ? AND name = ? ORDER BY id = ? DESC LIMIT 1`,
		nameOrID, who, store.ScopeOf(ctx).Owner(""), nameOrID, nameOrID))
	if errors.Is(err, sql.ErrNoRows) {
		return sh, sandbox.NoSuchShipment(nameOrID)
	}
	return sh, s.fault(ctx, "get_shipment", err)
}

// ListShipments implements store.Shipments.
func (s *Store) ListShipments(ctx context.Context) ([]sandbox.Shipment, error) {
	who, err := whose(ctx)
	if err != nil {
		return nil, err
	}
	out, err := each(ctx, s, scanShipment, `SELECT id, record FROM shipments WHERE ? IN (tenant, '*') ORDER BY created_at DESC, id DESC`, who)
	return out, s.fault(ctx, "list_shipments", err)
}

// UpdateShipment implements store.Shipments. Changes are rare, so f runs in the
// transaction.
func (s *Store) UpdateShipment(ctx context.Context, id string, f func(*sandbox.Shipment) error) (out sandbox.Shipment, err error) {
	who, err := whose(ctx)
	if err != nil {
		return out, err
	}
	err = s.write(ctx, "update_shipment", func(t *tx) error {
		var record string
		err := t.row(`SELECT record FROM shipments WHERE id = ? AND ? IN (tenant, '*')`, []any{id, who}, &record)
		if errors.Is(err, sql.ErrNoRows) {
			return sandbox.NoSuchShipment(id)
		}
		if err != nil {
			return err
		}
		old, err := decodeShipment(id, record)
		if err != nil {
			return err
		}
		out = old
		if err := f(&out); err != nil {
			return refusal(err)
		}
		if err := store.CheckShipmentUpdate(old, out); err != nil {
			return err
		}
		if record, err = encodeShipment(out); err != nil {
			return err
		}
		_, err = t.exec(`UPDATE shipments SET record = ? WHERE id = ?`, record, id)
		return err
	})
	return out, err
}

// DeleteShipment implements store.Shipments.
func (s *Store) DeleteShipment(ctx context.Context, id string) error {
	return s.changeSeen(ctx, "delete_shipment", nil, `DELETE FROM shipments WHERE id = ? AND ? IN (tenant, '*')`, id)
}

// PutPosition implements store.Shipments.
func (s *Store) PutPosition(ctx context.Context, shipment string, p sandbox.ShipmentPosition) error {
	who, err := whose(ctx)
	if err != nil {
		return err
	}
	return s.write(ctx, "put_position", func(t *tx) error {
		n, err := t.exec(`INSERT INTO shipment_positions (shipment, run, at, pending, records)
			SELECT s.id, r.id, ?, ?, ? FROM shipments s, runs r WHERE s.id = ? AND ? IN (s.tenant, '*') AND r.id = ? AND r.tenant = s.tenant
			ON CONFLICT (shipment, run) DO UPDATE SET at = excluded.at, pending = excluded.pending, records = excluded.records`,
			p.At, p.Pending, p.Records, shipment, who, p.Run)
		if err == nil && n == 0 {
			return sandbox.NoSuchShipment(shipment)
		}
		return err
	})
}

// ListPositions implements store.Shipments.
func (s *Store) ListPositions(ctx context.Context, shipment string) ([]sandbox.ShipmentPosition, error) {
	who, err := whose(ctx)
	if err != nil {
		return nil, err
	}
	out, err := each(ctx, s, func(row scanner) (p sandbox.ShipmentPosition, err error) {
		err = row(&p.Run, &p.At, &p.Pending, &p.Records)
		return p, err
	}, `SELECT p.run, p.at, p.pending, p.records FROM shipment_positions p JOIN shipments s ON s.id = p.shipment
		WHERE p.shipment = ? AND ? IN (s.tenant, '*') ORDER BY p.run`, shipment, who)
	return out, s.fault(ctx, "list_positions", err)
}

func encodeShipment(sh sandbox.Shipment) (string, error) {
	sh.CreatedAt = sh.CreatedAt.UTC()
	b, err := json.Marshal(sh)
	if err != nil {
		return "", &sandbox.Error{Class: sandbox.Invalid, Msg: "the shipment cannot be recorded", Err: err}
	}
	return string(b), nil
}

func decodeShipment(id, record string) (sh sandbox.Shipment, err error) {
	if err := json.Unmarshal([]byte(record), &sh); err != nil {
		return sh, damaged("shipment", id, err)
	}
	return sh, nil
}

func scanShipment(row scanner) (sandbox.Shipment, error) {
	var id, record string
	if err := row(&id, &record); err != nil {
		return sandbox.Shipment{}, err
	}
	return decodeShipment(id, record)
}
