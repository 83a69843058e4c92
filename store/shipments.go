package store

import (
	"context"

	"github.com/cove-sandbox/cove/sandbox"
)

// Shipments are what carries records of runs out, and how far each is.
type Shipments interface {
	// CreateShipment is sandbox.ErrAlreadyExists where the tenant has one of that
	// name.
	CreateShipment(ctx context.Context, s sandbox.Shipment) error
	// GetShipment finds by id or by name; the id wins.
	GetShipment(ctx context.Context, nameOrID string) (sandbox.Shipment, error)
	// ListShipments lists those in scope, newest first (CreatedAt, then ID).
	ListShipments(ctx context.Context) ([]sandbox.Shipment, error)
	// UpdateShipment changes a record by f, which must not change ID, Tenant, Name,
	// Run or CreatedAt, and may be called more than once.
	UpdateShipment(ctx context.Context, id string, f func(*sandbox.Shipment) error) (sandbox.Shipment, error)
	// DeleteShipment forgets one with its positions. Deleting what is not there is no
	// error.
	DeleteShipment(ctx context.Context, id string) error

	// PutPosition says how far a shipment is in a run; sandbox.ErrNotFound where one
	// of the two is gone. The positions of a run go with it.
	PutPosition(ctx context.Context, shipment string, p sandbox.ShipmentPosition) error
	ListPositions(ctx context.Context, shipment string) ([]sandbox.ShipmentPosition, error)
}

// CheckShipment is what every implementation asks of a record. What it breaks is a
// defect of the caller.
func CheckShipment(s sandbox.Shipment) error {
	switch {
	case !sandbox.ValidID(s.ID):
		return sandbox.InvalidField("id", "%.80q is no id of a shipment", s.ID)
	case s.Name == "":
		return sandbox.InvalidField("name", "a shipment has a name")
	}
	return nil
}

// CheckShipmentUpdate is what every implementation asks of a change.
func CheckShipmentUpdate(old, next sandbox.Shipment) error {
	if old.ID != next.ID || old.Tenant != next.Tenant || old.Name != next.Name || old.Run != next.Run || !old.CreatedAt.Equal(next.CreatedAt) {
		return sandbox.InvalidField("shipment", "its id, tenant, name, run and time of creation do not change")
	}
	return CheckShipment(next)
}
