package server

import (
	"slices"
	"strings"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// need is what is asked of a key: a role at least, and the scope that covers it.
type need struct {
	role  sandbox.Role
	scope string
}

func (r rule) allows(k store.Key, what string) error { return need{r.role, r.scope}.allows(k, what) }

// allows is nil or a *sandbox.Error of its own.
func (n need) allows(k store.Key, what string) error {
	if !k.Role.AtLeast(n.role) {
		e := &sandbox.Error{Class: sandbox.Denied, Msg: what + " needs the role " + string(n.role) + "; this key has " + string(k.Role)}
		if n.role == "" {
			e.Msg = what + " is not open to anybody"
		}
		return e.WithHint("an admin of the tenant makes keys with other roles: cove key create --role")
	}
	if len(k.Scopes) > 0 && !slices.Contains(k.Scopes, n.scope) &&
		(n.role != sandbox.ReadonlyRole || !slices.Contains(k.Scopes, n.scope+":read")) {
		return &sandbox.Error{Class: sandbox.Denied, Msg: what + " is outside the scopes of this key: " + strings.Join(k.Scopes, ", "),
			Hint: "it needs " + n.wanted() + "; an admin of the tenant makes keys with other scopes: cove key create --scope"}
	}
	return nil
}

// wanted is the least scope that would do.
func (n need) wanted() string {
	if n.role == sandbox.ReadonlyRole {
		return n.scope + ":read"
	}
	return n.scope
}

// notRoot refuses a part of a call that only an installation's admin may ask for.
func notRoot(field string) error {
	return &sandbox.Error{Class: sandbox.Denied, Field: field, Msg: "only an installation's admin may"}
}
