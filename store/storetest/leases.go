package storetest

import (
	"context"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

func newLease(id string, minutes int) sandbox.Lease {
	return sandbox.Lease{ID: id, Name: "it's " + id, TTL: 90 * time.Second, CreatedAt: at(minutes)}
}

var leaseCases = []scenario{
	{"a lease is there until it is deleted, oldest first", func(t *testing.T, st store.Store) {
		young, old := newLease("young", 5), newLease("old", 1)
		young.ExpiresAt = at(9) // not kept
		for _, l := range []sandbox.Lease{young, old} {
			if err := st.CreateLease(t.Context(), l); err != nil {
				t.Fatal(err)
			}
		}
		fails(t, "the same id again", st.CreateLease(t.Context(), old), sandbox.ErrAlreadyExists)
		fails(t, "no id", st.CreateLease(t.Context(), sandbox.Lease{ID: "../x"}), sandbox.ErrInvalid)
		young.ExpiresAt = time.Time{}
		sameLeases(t, st, t.Context(), old, young)
		for range 2 { // the second time it is not there
			if err := st.DeleteLease(t.Context(), "old"); err != nil {
				t.Fatal(err)
			}
		}
		sameLeases(t, st, t.Context(), young)
	}},
}

func sameLeases(t *testing.T, st store.Store, ctx context.Context, want ...sandbox.Lease) {
	t.Helper()
	got, err := st.ListLeases(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != len(want) {
		t.Fatalf("%d leases, want %d: %v", len(got), len(want), got)
	}
	for i := range got {
		if got[i].Tenant == "" {
			t.Errorf("%s is nobody's", got[i].ID)
		}
		if !got[i].CreatedAt.Equal(want[i].CreatedAt) {
			t.Errorf("%s was created %s, want %s", got[i].ID, got[i].CreatedAt, want[i].CreatedAt)
		}
		got[i].CreatedAt, got[i].Tenant = want[i].CreatedAt, want[i].Tenant
		if got[i] != want[i] {
			t.Errorf("got %+v, want %+v", got[i], want[i])
		}
	}
}

// foreignLeases: a tenant neither sees nor deletes another's.
func foreignLeases(t *testing.T, st store.Store, red, blue context.Context) {
	l := newLease("redlease", 0)
	l.Tenant = "blue" // what a record says is not what it is
	if err := st.CreateLease(red, l); err != nil {
		t.Fatal(err)
	}
	if err := st.DeleteLease(blue, "redlease"); err != nil {
		t.Fatal(err)
	}
	sameLeases(t, st, blue)
	l.Tenant = ""
	sameLeases(t, st, red, l)
	sameLeases(t, st, all(t.Context()), l)
}
