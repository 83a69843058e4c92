package server

import (
	"errors"
	"testing"

	"github.com/cove-sandbox/cove/sandbox"
)

// What a dialect vouches for acts as the key that is named, and ends with it.
func TestVouchedActsAsItsKey(t *testing.T) {
	w := newWorld(t)
	ctx, err := w.server.Authenticate(t.Context(), w.secret, "")
	if err != nil {
		t.Fatal(err)
	}
	k, _, err := w.server.CreateKey(ctx, KeyRequest{Name: "sdk"})
	if err != nil {
		t.Fatal(err)
	}
	as, err := w.server.Vouched(t.Context(), k.ID, "192.0.2.1:1")
	if err != nil || CallerKey(as) != k.ID {
		t.Fatalf("acts as %q, %v; want %q", CallerKey(as), err, k.ID)
	}
	if err := w.server.RevokeKey(ctx, k.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := w.server.Vouched(t.Context(), k.ID, ""); !errors.Is(err, sandbox.ErrUnauthenticated) {
		t.Errorf("a revoked key is %v", err)
	}
	if _, err := w.server.Vouched(t.Context(), "", ""); !errors.Is(err, sandbox.ErrUnauthenticated) {
		t.Errorf("no key is %v", err)
	}
}
