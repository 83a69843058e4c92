package wire

import (
	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

// RegistryLogin is that a tenant has credentials for a registry, without them.
func RegistryLogin(l sandbox.RegistryLogin) *covev1.RegistryLogin {
	return &covev1.RegistryLogin{Registry: l.Registry, Username: l.Username, UpdatedAt: Time(l.UpdatedAt)}
}
