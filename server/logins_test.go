package server

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
	"github.com/cove-sandbox/cove/wire"
)

// pullAs pulls and says who the registry saw.
func (s *shared) pullAs(c *wire.Client, m *covev1.PullImageRequest) sandbox.RegistryAccess {
	s.Helper()
	st, err := c.Images.Pull(s.Context(), connect.NewRequest(m))
	if err != nil {
		s.Fatal(err)
	}
	defer st.Close()
	for st.Receive() {
		continue
	}
	_ = st.Err() // the fake has one registry; who was asked as is what counts
	s.node.lib.mu.Lock()
	defer s.node.lib.mu.Unlock()
	return s.node.lib.pulledAs[len(s.node.lib.pulledAs)-1]
}

func login(t *testing.T, c *wire.Client, registry, username, password string) {
	t.Helper()
	r, err := c.Images.Login(t.Context(), connect.NewRequest(&covev1.LoginRegistryRequest{Registry: registry, Username: username, Password: password}))
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(r.Msg.String(), password) {
		t.Errorf("the answer has the password: %v", r.Msg)
	}
}

// A pull that names nobody is the tenant's own login or nobody, never another
// tenant's, and the operator's with a root key alone.
func TestEveryTenantPullsAsItself(t *testing.T) {
	s := newShared(t)
	login(t, s.red, "ghcr.io", "red", "red-token")
	login(t, s.blue, "GHCR.io", "blue", "blue-token")
	login(t, s.red, "docker.io", "redhub", "hub-token")
	nobody, operator := sandbox.RegistryAccess{}, sandbox.RegistryAccess{Operator: true}
	for _, c := range []struct {
		who  *wire.Client
		ref  string
		want sandbox.RegistryAccess
	}{
		{s.red, "ghcr.io/org/a:1", sandbox.RegistryAccess{Username: "red", Password: "red-token"}},
		{s.blue, "ghcr.io/org/a:1", sandbox.RegistryAccess{Username: "blue", Password: "blue-token"}},
		{s.red, "python:3", sandbox.RegistryAccess{Username: "redhub", Password: "hub-token"}},
		{s.blue, "python:3", nobody},
		{s.blue, "redreg.test/x", nobody},
		{s.red, "ghcr.io:444/org/a:1", nobody},
		{s.red, "ghcr.io.evil.test/org/a:1", nobody},
		{s.client, "ghcr.io/org/a:1", operator},
		{s.client, "redreg.test/x", operator},
	} {
		if got := s.pullAs(c.who, &covev1.PullImageRequest{Reference: c.ref}); got != c.want {
			t.Errorf("%s was pulled as %+v, want %+v", c.ref, got, c.want)
		}
	}

	// What a pull names comes first; what an admin of the installation keeps comes
	// before the Docker file; what is logged out of is gone.
	if got := s.pullAs(s.red, &covev1.PullImageRequest{Reference: "ghcr.io/org/a:1", Username: "other", Password: "p"}); got.Username != "other" {
		t.Errorf("pulled as %+v", got)
	}
	login(t, s.client, "ghcr.io", "root", "root-token")
	if got := s.pullAs(s.client, &covev1.PullImageRequest{Reference: "ghcr.io/org/a:1"}); got.Username != "root" || got.Operator {
		t.Errorf("pulled as %+v", got)
	}
	login(t, s.red, "ghcr.io", "red2", "red-token-2")
	list, err := s.red.Images.Logins(t.Context(), connect.NewRequest(&covev1.ListLoginsRequest{}))
	if err != nil || len(list.Msg.Logins) != 3 || list.Msg.Logins[0].Username != "red2" || list.Msg.Logins[1].Registry != "index.docker.io" {
		t.Errorf("%v, %v", list, err)
	}
	if _, err := s.red.Images.Logout(t.Context(), connect.NewRequest(&covev1.LogoutRegistryRequest{Registry: "ghcr.io"})); err != nil {
		t.Fatal(err)
	}
	_, err = s.red.Images.Logout(t.Context(), connect.NewRequest(&covev1.LogoutRegistryRequest{Registry: "ghcr.io"}))
	wantError(t, err, sandbox.ErrNotFound)
	if got := s.pullAs(s.red, &covev1.PullImageRequest{Reference: "ghcr.io/org/a:1"}); got != nobody {
		t.Errorf("pulled as %+v", got)
	}
}

// A password is in no file and no log, and a row that was moved or changed opens
// nothing.
func TestLoginsAreSealed(t *testing.T) {
	s := newShared(t)
	login(t, s.red, "ghcr.io", "red", "red-token-in-clear")
	red, blue := store.In(t.Context(), s.tenants["red"]), store.In(t.Context(), s.tenants["blue"])
	l, err := s.store.GetLogin(red, "ghcr.io")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.store.PutLogin(blue, l); err != nil {
		t.Fatal(err)
	}
	other := l
	other.Registry = "evil.test"
	if err := s.store.PutLogin(red, other); err != nil {
		t.Fatal(err)
	}
	for who, ref := range map[*wire.Client]string{s.blue: "ghcr.io/a/b", s.red: "evil.test/a/b"} {
		st, err := who.Images.Pull(t.Context(), connect.NewRequest(&covev1.PullImageRequest{Reference: ref}))
		if err != nil {
			t.Fatal(err)
		}
		for st.Receive() {
			continue
		}
		wantError(t, st.Err(), sandbox.ErrCorrupt)
		_ = st.Close()
	}
	files, _ := filepath.Glob(filepath.Join(s.dir, "*"))
	for _, f := range files {
		if b, err := os.ReadFile(f); err == nil && bytes.Contains(b, []byte("red-token-in-clear")) {
			t.Errorf("%s has the password", f)
		}
	}
	if strings.Contains(s.log.String(), "red-token-in-clear") {
		t.Error("the log has the password")
	}
}

// Who may not change whom the tenant pulls as is refused, and so is what is no
// registry.
func TestWhoMayLogIn(t *testing.T) {
	s := newShared(t)
	ask := func(c *wire.Client, registry, username, password string) error {
		_, err := c.Images.Login(t.Context(), connect.NewRequest(&covev1.LoginRegistryRequest{Registry: registry, Username: username, Password: password}))
		return err
	}
	developer := s.dial(s.key(s.red, &covev1.CreateKeyRequest{Name: "dev", Role: "developer"}))
	scoped := s.dial(s.key(s.red, &covev1.CreateKeyRequest{Name: "scoped", Role: "admin", Scopes: []string{"sandboxes", "images:read"}}))
	for _, c := range []*wire.Client{developer, scoped} {
		wantError(t, ask(c, "ghcr.io", "me", "pw"), sandbox.ErrDenied)
		_, err := c.Images.Logout(t.Context(), connect.NewRequest(&covev1.LogoutRegistryRequest{Registry: "redreg.test"}))
		wantError(t, err, sandbox.ErrDenied)
		if list, err := c.Images.Logins(t.Context(), connect.NewRequest(&covev1.ListLoginsRequest{})); err != nil || len(list.Msg.Logins) != 1 {
			t.Errorf("%v, %v", list, err)
		}
	}
	for _, bad := range []string{"", "https://ghcr.io", "ghcr.io/org", "user@ghcr.io", "a b", strings.Repeat("a", 300)} {
		wantError(t, ask(s.red, bad, "me", "pw"), sandbox.ErrInvalid)
	}
	wantError(t, ask(s.red, "ghcr.io", "", "pw"), sandbox.ErrInvalid)
	wantError(t, ask(s.red, "ghcr.io", "me", ""), sandbox.ErrInvalid)
}
