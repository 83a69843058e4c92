package sandbox

import (
	"slices"
	"strings"
	"time"
)

// Tenant is a team or project that shares an installation with others and sees
// nothing of them.
type Tenant struct {
	ID        string            `json:"id"`
	Name      string            `json:"name"` // unique
	Quota     Quota             `json:"quota"`
	Labels    map[string]string `json:"labels,omitempty"`
	CreatedAt time.Time         `json:"created_at"`
}

// DefaultTenant is the id and name of the tenant that is always there.
// Everything made before there were tenants is its.
const DefaultTenant = "default"

// Quota bounds what a tenant holds at a time. 0 is no bound.
type Quota struct {
	Sandboxes        int64   `json:"sandboxes,omitempty"`
	MilliCPU         int64   `json:"milli_cpu,omitempty"`
	Memory           int64   `json:"memory,omitempty"` // requests, as admission counts
	Disk             int64   `json:"disk,omitempty"`   // writable layers and volumes
	SnapshotBytes    int64   `json:"snapshot_bytes,omitempty"`
	ImageBytes       int64   `json:"image_bytes,omitempty"` // of images it has a name of its own for
	CreatesPerSecond float64 `json:"creates_per_second,omitempty"`
	Weight           int32   `json:"weight,omitempty"` // share of a full node against other tenants; 0 = 1
}

// Role is what a key may do in its tenant.
type Role string

const (
	// RootRole is an admin's who may also manage tenants and everything else
	// of the installation.
	RootRole      Role = "root"
	AdminRole     Role = "admin"     // a developer who manages the tenant's keys
	DeveloperRole Role = "developer" // everything but keys
	ReadonlyRole  Role = "readonly"  // looks and downloads, changes nothing
)

// Roles lists every role, each may what those after it may.
var Roles = []Role{RootRole, AdminRole, DeveloperRole, ReadonlyRole}

// AtLeast says whether r may what other may. A role that is none may nothing.
func (r Role) AtLeast(other Role) bool {
	have, want := slices.Index(Roles, r), slices.Index(Roles, other)
	return have >= 0 && want >= 0 && have <= want
}

// AuditEntry is one thing that was done.
type AuditEntry struct {
	Seq     int64     `json:"seq"`
	At      time.Time `json:"at"`
	Tenant  string    `json:"tenant"`
	Key     string    `json:"key"`
	KeyName string    `json:"key_name"`
	Remote  string    `json:"remote"`
	Op      string    `json:"op"`
	Things  []string  `json:"things,omitempty"` // "sandbox:ID"; never content
	Outcome string    `json:"outcome"`          // "ok" or the class of the error
	Prev    string    `json:"prev"`             // Hash of the entry before
	Hash    string    `json:"hash"`
}

// ScopeNames are what a key's scopes may name: the services of the API, each
// alone or as "name:read".
var ScopeNames = []string{"callbacks", "files", "grades", "images", "keys", "ports", "processes", "recordings", "sandboxes", "secrets", "shipments", "snapshots", "system", "templates", "tenants", "volumes"}

// ValidateScopes checks the scopes of a key.
func ValidateScopes(field string, scopes []string) error {
	if len(scopes) > 2*len(ScopeNames) {
		return InvalidField(field, "%d scopes; at most %d are accepted", len(scopes), 2*len(ScopeNames))
	}
	for _, s := range scopes {
		if name := strings.TrimSuffix(s, ":read"); !slices.Contains(ScopeNames, name) {
			return InvalidField(field, "%q is no scope; %s are accepted, each also with :read", clip(s), strings.Join(ScopeNames, ", "))
		}
	}
	return nil
}

// ValidateRole checks the role of a new key.
func ValidateRole(field string, r Role) error {
	if !slices.Contains(Roles, r) {
		return InvalidField(field, "%q is no role; root, admin, developer and readonly are", clip(string(r)))
	}
	return nil
}

// ValidateTenantName checks a name, or an id, of a tenant.
func ValidateTenantName(field, s string) error {
	if !volumeName().MatchString(s) {
		return InvalidField(field, "%q is no name of a tenant; 1 to 63 of lower-case letters, digits, '.', '_' and '-' are accepted, with a letter or digit first and last", clip(s))
	}
	return nil
}

// Validate checks a quota.
func (q Quota) Validate(field string) error {
	for _, f := range []struct {
		name string
		bad  bool
	}{
		{"sandboxes", q.Sandboxes < 0}, {"cpu", q.MilliCPU < 0}, {"memory", q.Memory < 0}, {"disk", q.Disk < 0},
		{"snapshot_bytes", q.SnapshotBytes < 0}, {"image_bytes", q.ImageBytes < 0}, {"weight", q.Weight < 0 || q.Weight > 1000},
		// Also what is no number at all.
		{"creates_per_second", !(q.CreatesPerSecond >= 0 && q.CreatesPerSecond <= 1e6)},
	} {
		if f.bad {
			return InvalidField(field+"."+f.name, "a bound is not negative (0 is none), creates per second are at most 1,000,000 and a weight at most 1,000")
		}
	}
	return nil
}
