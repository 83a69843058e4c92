package cli

import (
	"strings"
	"testing"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
)

func TestRegistry(t *testing.T) {
	f := newFakeAPI(t)
	got := f.cove(t, settings{stdin: strings.NewReader("hunter2\n")}, "registry", "login", "ghcr.io", "--username", "me", "--password-stdin")
	got.want(t, 0, "ghcr.io\n")
	f.sent(t, &covev1.LoginRegistryRequest{Registry: "ghcr.io", Username: "me", Password: "hunter2"})
	f.cove(t, settings{stdin: strings.NewReader("x")}, "registry", "login", "ghcr.io", "--password-stdin").want(t, 2, "", "--username is missing")
	f.cove(t, settings{stdin: strings.NewReader("x")}, "registry", "login", "ghcr.io", "--username", "me").want(t, 2, "", "--password-stdin")
	f.cove(t, settings{}, "registry", "ls").want(t, 0, "REGISTRY  USERNAME  UPDATED\nghcr.io   me        2d ago\n")
	if got := f.cove(t, settings{}, "registry", "ls", "--json"); got.code != 0 || !strings.Contains(got.stdout, `"username": "me"`) || strings.Contains(got.stdout, "assword") {
		t.Errorf("%+v", got)
	}
	f.cove(t, settings{}, "registry", "logout", "ghcr.io").want(t, 0, "ghcr.io\n")
	f.sent(t, &covev1.LogoutRegistryRequest{Registry: "ghcr.io"})
}
