package store

import (
	"context"
	"slices"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// Key is an API key; the secret itself is never stored.
type Key struct {
	ID         string
	Name       string
	Hash       []byte // SHA-256 of the secret, which is 256 random bits
	CreatedAt  time.Time
	LastUsedAt time.Time // kept to about a minute
	Tenant     string
	Role       sandbox.Role
	Scopes     []string  // nil = all that the role may
	ExpiresAt  time.Time // zero = never

	// OldHash is of the secret before the last rotation, good until OldUntil.
	OldHash  []byte
	OldUntil time.Time
}

// LongestGrace is the most that a secret stays good after a rotation.
const LongestGrace = 30 * 24 * time.Hour

// Keys are API keys, listed oldest first.
type Keys interface {
	// CreateKey is sandbox.ErrAlreadyExists where the id or the hash is taken,
	// sandbox.ErrNotFound where there is no such tenant.
	CreateKey(ctx context.Context, k Key) error
	// KeyByHash finds by the hash or the old one, expired or not. Who calls it
	// does not know a tenant yet: it wants the installation's scope.
	KeyByHash(ctx context.Context, hash []byte) (Key, error)
	ListKeys(ctx context.Context) ([]Key, error)
	RevokeKey(ctx context.Context, id string) error
	// RotateKey makes hash the key's and the one it had its old one, good until
	// oldUntil, at most LongestGrace from now. Older ones stay good for their own
	// time, but for no longer than that: KeyByHash answers for each with it as OldHash.
	RotateKey(ctx context.Context, id string, hash []byte, oldUntil time.Time) (Key, error)
	TouchKey(ctx context.Context, id string, at time.Time) error
}

// Tenants are who shares the installation. The default one is always there.
// A tenant sees itself; all but GetTenant want the installation's scope.
type Tenants interface {
	// CreateTenant is sandbox.ErrAlreadyExists where id or name is taken.
	CreateTenant(ctx context.Context, t sandbox.Tenant) error
	// GetTenant finds by id or name; the id wins.
	GetTenant(ctx context.Context, nameOrID string) (sandbox.Tenant, error)
	ListTenants(ctx context.Context) ([]sandbox.Tenant, error) // by name
	SetQuota(ctx context.Context, id string, q sandbox.Quota) (sandbox.Tenant, error)
	// DeleteTenant forgets a tenant with its keys, secrets, names of images and ended
	// sandboxes. While it has live sandboxes, snapshots, templates, volumes or
	// recordings it is sandbox.ErrPrecondition, which says what is left. The default one stays.
	DeleteTenant(ctx context.Context, id string) error
	// SnapshotContents is the manifests that snapshots in scope need, hidden ones
	// too, each with the most that one of them added to the content store.
	SnapshotContents(ctx context.Context) (map[string]int64, error)
}

// Audit is the log of who did what. Entries are appended and, when they are
// older than the retention, dropped from the old end; nothing changes one.
type Audit interface {
	// AppendAudit numbers the entries, chains their hashes and records them.
	AppendAudit(ctx context.Context, entries []sandbox.AuditEntry) error
	// ListAudit is the entries in scope after a number and not before a time,
	// oldest first.
	ListAudit(ctx context.Context, after int64, since time.Time, limit int) ([]sandbox.AuditEntry, error)
	// ForgetAudit drops entries from before a time, at most limit, and says how
	// many.
	ForgetAudit(ctx context.Context, before time.Time, limit int) (int, error)
}

// CheckKey is what every implementation asks of a new key.
func CheckKey(k Key) error {
	switch {
	case k.ID == "" || len(k.Hash) == 0:
		return sandbox.InvalidField("key", "a key has an id and a hash")
	case !slices.Contains(sandbox.Roles, k.Role):
		return sandbox.InvalidField("role", "%.40q is no role", k.Role)
	}
	return nil
}
