package storetest

import (
	"bytes"
	"testing"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

func newSecret(name string, minutes int) store.SealedSecret {
	return store.SealedSecret{Sealed: []byte("sealed " + name + "\x00\xff"), Secret: sandbox.Secret{
		Name: name, Hosts: []string{"api.example.com", "*.example.org"}, Header: "Authorization", Format: "Bearer {}", URL: true, Body: true,
		AllowHTTP: true, Env: "API_KEY", Placeholder: "cove-secret-" + name, CreatedAt: at(minutes), UpdatedAt: at(minutes)}}
}

func addSecret(t *testing.T, st store.Store, s store.SealedSecret) {
	t.Helper()
	if err := st.CreateSecret(t.Context(), s); err != nil {
		t.Fatal(err)
	}
}

func sameSecret(t *testing.T, what string, got, want store.SealedSecret) {
	t.Helper()
	got.Tenant, want.Tenant = "", ""
	got.CreatedAt, got.UpdatedAt, want.CreatedAt, want.UpdatedAt = got.CreatedAt.UTC(), got.UpdatedAt.UTC(), want.CreatedAt.UTC(), want.UpdatedAt.UTC()
	same(t, what, got.Secret, want.Secret)
	if !bytes.Equal(got.Sealed, want.Sealed) {
		t.Errorf("%s: sealed %q, want %q", what, got.Sealed, want.Sealed)
	}
}

var secretCases = []scenario{
	{"a secret is kept as it is", func(t *testing.T, st store.Store) {
		want := newSecret("a", 0)
		addSecret(t, st, want)
		got, err := st.GetSecret(t.Context(), "a")
		if err != nil {
			t.Fatal(err)
		}
		sameSecret(t, "got", got, want)
		fails(t, "again", st.CreateSecret(t.Context(), want), sandbox.ErrAlreadyExists)
		_, err = st.GetSecret(t.Context(), "b")
		fails(t, "another", err, sandbox.ErrNotFound)
	}},
	{"a value that is not sealed is not kept", func(t *testing.T, st store.Store) {
		s := newSecret("a", 0)
		s.Value = sandbox.NewSecretValue("the value")
		fails(t, "in clear", st.CreateSecret(t.Context(), s), sandbox.ErrInternal)
		s = newSecret("a", 0)
		s.Sealed = nil
		fails(t, "none", st.CreateSecret(t.Context(), s), sandbox.ErrInternal)
		fails(t, "no name", st.CreateSecret(t.Context(), newSecret("", 0)), sandbox.ErrInvalid)
	}},
	{"secrets are listed by name", func(t *testing.T, st store.Store) {
		for _, n := range []string{"c", "a", "b"} {
			addSecret(t, st, newSecret(n, 0))
		}
		list, err := st.ListSecrets(t.Context())
		if err != nil || len(list) != 3 {
			t.Fatalf("%v, %v", list, err)
		}
		for i, n := range []string{"a", "b", "c"} {
			sameSecret(t, n, list[i], newSecret(n, 0))
		}
	}},
	{"of two who change a secret one is told", func(t *testing.T, st store.Store) {
		addSecret(t, st, newSecret("a", 0))
		one, two := newSecret("a", 1), newSecret("a", 2)
		one.Sealed = []byte("other")
		if err := st.ReplaceSecret(t.Context(), one, at(0)); err != nil {
			t.Fatal(err)
		}
		fails(t, "the second", st.ReplaceSecret(t.Context(), two, at(0)), sandbox.ErrConflict)
		got, err := st.GetSecret(t.Context(), "a")
		if err != nil {
			t.Fatal(err)
		}
		sameSecret(t, "got", got, one)
		fails(t, "one that is not there", st.ReplaceSecret(t.Context(), newSecret("b", 1), at(0)), sandbox.ErrNotFound)
	}},
	{"a deleted secret is gone", func(t *testing.T, st store.Store) {
		addSecret(t, st, newSecret("a", 0))
		if err := st.DeleteSecret(t.Context(), "a"); err != nil {
			t.Fatal(err)
		}
		fails(t, "again", st.DeleteSecret(t.Context(), "a"), sandbox.ErrNotFound)
		_, err := st.GetSecret(t.Context(), "a")
		fails(t, "get", err, sandbox.ErrNotFound)
		addSecret(t, st, newSecret("a", 1))
	}},
}
