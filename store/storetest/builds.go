package storetest

import (
	"slices"
	"testing"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

func newBuilt(key, manifest string, minutes int) store.Built {
	return store.Built{Key: key, Record: `{"a":1}`, Manifest: manifest, Size: 7, UsedAt: at(minutes)}
}

var buildCases = []scenario{
	{"what was built is kept as it is, and the next replaces it", func(t *testing.T, st store.Store) {
		for i := range 2 {
			want := newBuilt("k", "m", i)
			if err := st.PutBuilt(t.Context(), want); err != nil {
				t.Fatal(err)
			}
			got, err := st.GetBuilt(t.Context(), "k")
			if err != nil || got.Record != want.Record || got.Manifest != "m" || got.Size != 7 || !got.UsedAt.Equal(want.UsedAt) {
				t.Errorf("%+v, %v", got, err)
			}
		}
		_, err := st.GetBuilt(t.Context(), "other")
		fails(t, "another", err, sandbox.ErrNotFound)
	}},
	{"what was built keeps its content until it is forgotten", func(t *testing.T, st store.Store) {
		all := store.Installation(t.Context())
		for i, key := range []string{"b", "a"} {
			if err := st.PutBuilt(t.Context(), newBuilt(key, "manifest-"+key, i)); err != nil {
				t.Fatal(err)
			}
		}
		if err := st.PutBuilt(t.Context(), newBuilt("none", "", 3)); err != nil {
			t.Fatal(err)
		}
		if m, err := st.Manifests(all); err != nil || !slices.Equal(m, []string{"manifest-a", "manifest-b"}) {
			t.Error(m, err)
		}
		list, err := st.ListBuilt(t.Context())
		if err != nil || len(list) != 3 || list[0].Key != "b" || list[1].Key != "a" {
			t.Error("oldest first:", list, err)
		}
		if err := st.DeleteBuilt(t.Context(), "a", at(0)); err != nil {
			t.Error(err)
		}
		if _, err := st.GetBuilt(t.Context(), "a"); err != nil {
			t.Error("it was used since:", err)
		}
		for range 2 {
			if err := st.DeleteBuilt(t.Context(), "a", at(1)); err != nil {
				t.Error(err)
			}
		}
		if m, err := st.Manifests(all); err != nil || !slices.Equal(m, []string{"manifest-b"}) {
			t.Error(m, err)
		}
	}},
	{"what one tenant built is nothing to another", func(t *testing.T, st store.Store) {
		if err := st.PutBuilt(t.Context(), newBuilt("k", "m", 0)); err != nil {
			t.Fatal(err)
		}
		other := store.In(t.Context(), "other")
		_, err := st.GetBuilt(other, "k")
		fails(t, "another tenant's", err, sandbox.ErrNotFound)
		if list, err := st.ListBuilt(other); err != nil || len(list) != 0 {
			t.Error(list, err)
		}
		if err := st.DeleteBuilt(other, "k", at(9)); err != nil {
			t.Error(err)
		}
		if _, err := st.GetBuilt(t.Context(), "k"); err != nil {
			t.Error(err)
		}
	}},
}
