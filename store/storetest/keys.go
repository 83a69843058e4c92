package storetest

import (
	"crypto/sha256"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

func newKey(id string, minutes int) store.Key {
	hash := sha256.Sum256([]byte("secret of " + id))
	return store.Key{ID: id, Name: "key " + id, Hash: hash[:], CreatedAt: at(minutes), Role: sandbox.DeveloperRole}
}

func addKey(t *testing.T, st store.Store, k store.Key) {
	t.Helper()
	if err := st.CreateKey(t.Context(), k); err != nil {
		t.Fatal(err)
	}
}

// lastUsed is a key's LastUsedAt, and checks that both ways to read agree.
func lastUsed(t *testing.T, st store.Store, k store.Key) time.Time {
	t.Helper()
	got, err := st.KeyByHash(t.Context(), k.Hash)
	if err != nil {
		t.Fatal(err)
	}
	return got.LastUsedAt
}

// usedAbout checks LastUsedAt to the minute that the contract allows.
func usedAbout(t *testing.T, got, want time.Time) {
	t.Helper()
	if d := want.Sub(got); d < -time.Minute || d > time.Minute {
		t.Errorf("last used %v, want about %v", got, want)
	}
}

var keyCases = []scenario{
	{"a key is found by its hash only", func(t *testing.T, st store.Store) {
		k := newKey("k1", 0)
		addKey(t, st, k)
		got, err := st.KeyByHash(t.Context(), k.Hash)
		if err != nil {
			t.Fatal(err)
		}
		same(t, "by hash", got, k)
		if !got.LastUsedAt.IsZero() {
			t.Errorf("a fresh key was used at %v", got.LastUsedAt)
		}
		for _, hash := range [][]byte{nil, {}, k.Hash[:31], []byte("k1"), newKey("k2", 0).Hash} {
			_, err := st.KeyByHash(t.Context(), hash)
			fails(t, "a wrong hash", err, sandbox.ErrNotFound)
		}
	}},

	{"an id and a hash are taken once", func(t *testing.T, st store.Store) {
		k := newKey("k1", 0)
		addKey(t, st, k)
		other := newKey("k2", 0)
		other.ID = "k1"
		fails(t, "the same id", st.CreateKey(t.Context(), other), sandbox.ErrAlreadyExists)
		other = newKey("k1", 0)
		other.ID = "k2"
		fails(t, "the same hash", st.CreateKey(t.Context(), other), sandbox.ErrAlreadyExists)
		same2 := newKey("k3", 0)
		same2.Name = k.Name
		addKey(t, st, same2) // names are free
		keys, err := st.ListKeys(t.Context())
		if len(keys) != 2 || err != nil {
			t.Errorf("%v, %v", keys, err)
		}
	}},

	{"a key without id or hash is refused", func(t *testing.T, st store.Store) {
		k := newKey("k1", 0)
		k.Hash = nil
		fails(t, "no hash", st.CreateKey(t.Context(), k), sandbox.ErrInvalid)
		k = newKey("", 0)
		fails(t, "no id", st.CreateKey(t.Context(), k), sandbox.ErrInvalid)
	}},

	{"keys are listed oldest first", func(t *testing.T, st store.Store) {
		for _, k := range []store.Key{newKey("b", 1), newKey("c", 0), newKey("a", 1)} {
			addKey(t, st, k)
		}
		keys, err := st.ListKeys(t.Context())
		if err != nil || len(keys) != 3 {
			t.Fatalf("%v, %v", keys, err)
		}
		for i, want := range []store.Key{newKey("c", 0), newKey("a", 1), newKey("b", 1)} {
			same(t, "entry", keys[i], want)
		}
	}},

	{"a revoked key is gone", func(t *testing.T, st store.Store) {
		k, other := newKey("k1", 0), newKey("k2", 0)
		addKey(t, st, k)
		addKey(t, st, other)
		if err := st.RevokeKey(t.Context(), "k1"); err != nil {
			t.Fatal(err)
		}
		_, err := st.KeyByHash(t.Context(), k.Hash)
		fails(t, "by hash", err, sandbox.ErrNotFound)
		fails(t, "revoke again", st.RevokeKey(t.Context(), "k1"), sandbox.ErrNotFound)
		fails(t, "touch", st.TouchKey(t.Context(), "k1", at(1)), sandbox.ErrNotFound)
		if _, err := st.KeyByHash(t.Context(), other.Hash); err != nil {
			t.Errorf("the other key: %v", err)
		}
	}},

	{"a touch is kept to about a minute and never goes back", func(t *testing.T, st store.Store) {
		k := newKey("k1", 0)
		addKey(t, st, k)
		touch := func(when time.Time) {
			t.Helper()
			if err := st.TouchKey(t.Context(), "k1", when); err != nil {
				t.Fatal(err)
			}
		}
		touch(at(10))
		usedAbout(t, lastUsed(t, st, k), at(10))
		for s := range 300 { // a key in constant use
			touch(at(10).Add(time.Duration(s) * time.Second))
		}
		usedAbout(t, lastUsed(t, st, k), at(15))
		touch(at(2))
		usedAbout(t, lastUsed(t, st, k), at(15))
		keys, err := st.ListKeys(t.Context())
		if err != nil || len(keys) != 1 {
			t.Fatalf("%v, %v", keys, err)
		}
		usedAbout(t, keys[0].LastUsedAt, at(15))
	}},
}
