package store

import (
	"context"

	"github.com/cove-sandbox/cove/sandbox"
)

// Scope is whose things a call may see and change. It travels with the context,
// set once where a caller is known (a key was checked, the server's own work
// begins), so that no method can be called with the wrong one by mistake. A
// context without one sees nothing and changes nothing: to forget it is an
// error of class internal, not somebody else's sandbox.
//
// A parameter of every method was the other way. It makes forgetting a compile
// error, and every call in between carry what only its two ends care about.
type Scope struct {
	tenant string
	all    bool
}

type scopeKey struct{}

// In limits ctx to the things of a tenant.
func In(ctx context.Context, tenant string) context.Context {
	return context.WithValue(ctx, scopeKey{}, Scope{tenant: tenant})
}

// Installation lets ctx see everything: for the server's own work and for
// nothing that a caller chooses. What is made with it belongs to the tenant its
// record names; names without one are the default tenant's, and an image's name
// is everybody's.
func Installation(ctx context.Context) context.Context {
	return context.WithValue(ctx, scopeKey{}, Scope{all: true})
}

// ScopeOf is the scope of a context.
func ScopeOf(ctx context.Context) Scope {
	s, _ := ctx.Value(scopeKey{}).(Scope)
	return s
}

// Tenant is the only one in sight, or "" for all or none.
func (s Scope) Tenant() string { return s.tenant }

// All says whether the scope is the whole installation.
func (s Scope) All() bool { return s.all }

// Sees says whether a thing of the tenant is in sight.
func (s Scope) Sees(tenant string) bool { return s.all || tenant != "" && tenant == s.tenant }

// Owner is the tenant of something new that says it is of the tenant given: the
// scope's own, whatever was said; for the installation's what was said, or the
// default.
func (s Scope) Owner(said string) string {
	switch {
	case !s.all:
		return s.tenant
	case said == "":
		return sandbox.DefaultTenant
	}
	return said
}

// Check refuses a context that was never given a scope.
func (s Scope) Check() error {
	if !s.all && s.tenant == "" {
		return &sandbox.Error{Class: sandbox.Internal, Op: "store.scope", Msg: "a call without a tenant"}
	}
	return nil
}

// CheckAll refuses every scope but the installation's.
func (s Scope) CheckAll() error {
	if s.all {
		return nil
	}
	if err := s.Check(); err != nil {
		return err
	}
	return &sandbox.Error{Class: sandbox.Denied, Msg: "this is the installation's, not a tenant's"}
}
