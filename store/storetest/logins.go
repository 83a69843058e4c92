package storetest

import (
	"fmt"
	"testing"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

func newLogin(registry, username string, minutes int) store.SealedLogin {
	return store.SealedLogin{Sealed: []byte("sealed " + username + "\x00\xff"),
		RegistryLogin: sandbox.RegistryLogin{Registry: registry, Username: username, UpdatedAt: at(minutes)}}
}

// loginText is a login as one line; times as instants.
func loginText(l store.SealedLogin) string {
	return fmt.Sprintf("%s %s %q %d", l.Registry, l.Username, l.Sealed, l.UpdatedAt.UnixNano())
}

var loginCases = []scenario{
	{"a login is kept as it is, and the next replaces it", func(t *testing.T, st store.Store) {
		for i, user := range []string{"me", "you"} {
			want := newLogin("ghcr.io", user, i)
			if err := st.PutLogin(t.Context(), want); err != nil {
				t.Fatal(err)
			}
			if got, err := st.GetLogin(t.Context(), "ghcr.io"); err != nil || loginText(got) != loginText(want) {
				t.Errorf("got %s, %v; want %s", loginText(got), err, loginText(want))
			}
		}
		_, err := st.GetLogin(t.Context(), "ghcr.io:444")
		fails(t, "another", err, sandbox.ErrNotFound)
	}},
	{"logins are listed by registry, and gone when deleted", func(t *testing.T, st store.Store) {
		for _, r := range []string{"c", "a", "b"} {
			if err := st.PutLogin(t.Context(), newLogin(r, "me", 0)); err != nil {
				t.Fatal(err)
			}
		}
		if err := st.DeleteLogin(t.Context(), "b"); err != nil {
			t.Fatal(err)
		}
		fails(t, "again", st.DeleteLogin(t.Context(), "b"), sandbox.ErrNotFound)
		list, err := st.ListLogins(t.Context())
		if err != nil || len(list) != 2 || list[0].Registry != "a" || list[1].Registry != "c" {
			t.Errorf("%v, %v", list, err)
		}
	}},
	{"what is no login is refused", func(t *testing.T, st store.Store) {
		fails(t, "no registry", st.PutLogin(t.Context(), newLogin("", "me", 0)), sandbox.ErrInvalid)
		fails(t, "nobody", st.PutLogin(t.Context(), newLogin("a", "", 0)), sandbox.ErrInvalid)
		l := newLogin("a", "me", 0)
		l.Sealed = nil
		fails(t, "no password", st.PutLogin(t.Context(), l), sandbox.ErrInternal)
	}},
}
