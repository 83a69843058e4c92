package server

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// A full node says whose it is: to a tenant how much is its own, and nothing of
// others; to an operator the largest holders.
func TestAFullNodeSaysByWhom(t *testing.T) {
	s := &Server{}
	s.reservations.init()
	for tenant, n := range map[string]int{"red": 5, "blue": 9, "green": 1, "grey": 2} {
		for range n {
			if _, err := s.reservations.reserve(tenant, sandbox.Quota{}, sandbox.Resources{}, true, time.Now()); err != nil {
				t.Fatal(err)
			}
		}
	}
	as := func(tenant string, role sandbox.Role) string {
		ctx := withCaller(store.In(t.Context(), tenant), caller{key: store.Key{Tenant: tenant, Role: role}})
		err := s.byWhom(ctx, &sandbox.Error{Class: sandbox.NoCapacity, Msg: "the node is full: of memory", Hint: "h"})
		var e *sandbox.Error
		if !errors.As(err, &e) || e.Hint != "h" || !strings.HasPrefix(e.Msg, "the node is full: of memory") {
			t.Fatalf("%v", err)
		}
		return strings.TrimPrefix(e.Msg, "the node is full: of memory")
	}
	for _, c := range []struct {
		tenant string
		role   sandbox.Role
		want   string
	}{
		{"red", sandbox.DeveloperRole, "; 5 of its sandboxes are yours"},
		{"none", sandbox.AdminRole, ""},
		{"red", sandbox.RootRole, "; it holds 17 sandboxes, 9 of tenant blue, 5 of tenant red, 2 of tenant grey"},
	} {
		if got := as(c.tenant, c.role); got != c.want {
			t.Errorf("%s %s: %q, want %q", c.tenant, c.role, got, c.want)
		}
	}
	other := &sandbox.Error{Class: sandbox.QuotaExceeded, Msg: "quota"}
	if got := s.byWhom(t.Context(), other); got != error(other) {
		t.Errorf("another error became %v", got)
	}
}

// A refusal by what the node last said is the node's own: what there is too little
// of, how much was asked for, and what would help.
func TestARefusalSaysWhatWouldHelp(t *testing.T) {
	const gib = 1 << 30
	p := place{want: sandbox.Resources{Memory: 14 * gib, MemoryLimit: 14 * gib}, count: 1}
	has := sandbox.Capacity{Total: sandbox.Resources{Memory: 16 * gib}, Used: sandbox.Resources{Memory: 14 * gib}, MaxSandboxes: 9}
	for _, c := range []struct {
		change    func(*sandbox.Capacity)
		say, hint string
	}{
		{func(*sandbox.Capacity) {}, "for 14GiB", "without --memory-limit"},
		{func(c *sandbox.Capacity) { c.Sandboxes = 9 }, "maximum of 9", "cove doctor"},
		{func(c *sandbox.Capacity) { c.Full, c.FullHint = "no disk", "free some" }, "no disk", "free some"},
	} {
		now := has
		c.change(&now)
		var e *sandbox.Error
		if err := lacks(now, p); !errors.As(err, &e) || e.Class != sandbox.NoCapacity || !strings.Contains(e.Msg, c.say) || !strings.Contains(e.Hint, c.hint) || e.RetryAfter == 0 {
			t.Errorf("%+v, want %q and %q", e, c.say, c.hint)
		}
	}
}
