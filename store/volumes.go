package store

import (
	"context"

	"github.com/cove-sandbox/cove/sandbox"
)

// Volumes are records of what nodes keep under the same id. A record comes before
// its content and goes after it, and its state says so: what is not ready has
// its name and its size, and is nobody's to use.
type Volumes interface {
	// CreateVolume is sandbox.ErrAlreadyExists where the name is taken in the
	// tenant, whatever the state of the one that has it, or the id anywhere.
	CreateVolume(ctx context.Context, v sandbox.Volume) error
	// GetVolume finds by name or id, in every state; the id wins.
	GetVolume(ctx context.Context, nameOrID string) (sandbox.Volume, error)
	// ListVolumes lists those in scope, in every state, by tenant and name.
	ListVolumes(ctx context.Context) ([]sandbox.Volume, error)
	// MoveVolume takes a volume from one state to another; sandbox.ErrConflict if
	// it is in a third.
	MoveVolume(ctx context.Context, id string, from, to sandbox.VolumeState) error
	// ResizeVolume records another size.
	ResizeVolume(ctx context.Context, id string, size int64) error
	// DeleteVolume forgets a record. One that is not there is no error.
	DeleteVolume(ctx context.Context, id string) error
}

// Recordings are records of what nodes keep under the same id, as Volumes are.
// While one is open, the node knows how much is on it.
type Recordings interface {
	// CreateRecording is sandbox.ErrAlreadyExists where the name is taken in the
	// tenant, or the id anywhere. A recording may have no name.
	CreateRecording(ctx context.Context, r sandbox.Recording) error
	// GetRecording finds by name or id, in every state; the id wins.
	GetRecording(ctx context.Context, nameOrID string) (sandbox.Recording, error)
	// ListRecordings lists those in scope, in every state, newest first
	// (CreatedAt, then ID).
	ListRecordings(ctx context.Context) ([]sandbox.Recording, error)
	// FinishRecording records how a recording that was being made or open ended:
	// state, time and counts. One in another state, or none, is left as it is.
	FinishRecording(ctx context.Context, r sandbox.Recording) error
	// MoveRecording is MoveVolume of a recording.
	MoveRecording(ctx context.Context, id string, from, to sandbox.RecordingState) error
	// DeleteRecording forgets a record. One that is not there is no error.
	DeleteRecording(ctx context.Context, id string) error
}

// CheckVolume is what every implementation asks of a new record. What it breaks
// is a defect of the caller.
func CheckVolume(v sandbox.Volume) error {
	switch {
	case !sandbox.ValidID(v.ID):
		return sandbox.InvalidField("id", "%.80q is no id of a volume", v.ID)
	case v.Name == "":
		return sandbox.InvalidField("name", "a volume has a name")
	case v.Size <= 0:
		return sandbox.InvalidField("size", "a volume has a size")
	case v.State != sandbox.VolumeMaking && v.State != sandbox.VolumeReady:
		return sandbox.InvalidField("state", "%.40q is no state of a new volume", v.State)
	}
	return nil
}

// CheckRecording is what every implementation asks of a new record. What it
// breaks is a defect of the caller.
func CheckRecording(r sandbox.Recording) error {
	switch {
	case !sandbox.ValidID(r.ID):
		return sandbox.InvalidField("id", "%.80q is no id of a recording", r.ID)
	case r.State == "" || r.State == sandbox.RecordingDeleting:
		return sandbox.InvalidField("state", "%.40q is no state of a new recording", r.State)
	}
	return nil
}
