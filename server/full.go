package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// holdersShown are named to an operator; who holds less is counted.
const holdersShown = 3

// byWhom adds to the refusal of a full node who holds it: to a tenant how much of it
// is its own, to an operator the tenants that hold most. What others hold is not a
// tenant's to know.
func (s *Server) byWhom(ctx context.Context, err error) error {
	var e *sandbox.Error
	if !errors.As(err, &e) || e.Class != sandbox.NoCapacity {
		return err
	}
	said := *e
	if isRoot(ctx) {
		said.Msg += s.holders()
	} else if n := s.reservations.usage(store.ScopeOf(ctx).Tenant()).Sandboxes; n > 0 {
		said.Msg += fmt.Sprintf("; %d of its sandboxes are yours", n)
	}
	return &said
}

// holders names the tenants whose sandboxes are most, with their number.
func (s *Server) holders() string {
	type holder struct {
		tenant string
		n      int64
	}
	var all []holder
	var sum int64
	for tenant, u := range s.reservations.usages() {
		if u.Sandboxes > 0 {
			all, sum = append(all, holder{tenant, u.Sandboxes}), sum+u.Sandboxes
		}
	}
	if sum == 0 {
		return "; no sandbox is on it"
	}
	slices.SortFunc(all, func(a, b holder) int { return cmp.Or(cmp.Compare(b.n, a.n), cmp.Compare(a.tenant, b.tenant)) })
	var names []string
	for _, h := range all[:min(len(all), holdersShown)] {
		names = append(names, fmt.Sprintf("%d of tenant %s", h.n, h.tenant))
	}
	return fmt.Sprintf("; it holds %d sandboxes, %s", sum, strings.Join(names, ", "))
}
