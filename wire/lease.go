package wire

import (
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

// Lease with how many sandboxes end with it.
func Lease(l sandbox.Lease, sandboxes int) *covev1.Lease {
	return &covev1.Lease{Id: l.ID, Name: l.Name, Ttl: durationpb.New(l.TTL), CreatedAt: Time(l.CreatedAt), ExpiresAt: Time(l.ExpiresAt), Sandboxes: int32(sandboxes)}
}
