package server

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"connectrpc.com/connect"
	"github.com/google/go-containerregistry/pkg/name"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
	"github.com/cove-sandbox/cove/wire"
)

// maxLogins of a tenant: beyond any use, and a bound.
const maxLogins = 100

// registryNamed is a registry as references name it: "docker.io" is Docker's own
// under its real name, and capitals mean nothing in a host.
func registryNamed(s string) (string, error) {
	if len(s) > 255 {
		return "", sandbox.InvalidField("registry", "is longer than 255 bytes")
	}
	r, err := name.NewRegistry(strings.ToLower(s), name.StrictValidation)
	if err != nil || strings.ContainsAny(s, "/@") {
		return "", sandbox.InvalidField("registry", "%q is no host of a registry; ghcr.io or registry.lan:5000 would be", s)
	}
	return r.RegistryStr(), nil
}

func (s imageService) Login(ctx context.Context, r *connect.Request[covev1.LoginRegistryRequest]) (*connect.Response[covev1.LoginRegistryResponse], error) {
	m := r.Msg
	registry, err := registryNamed(m.Registry)
	if err == nil {
		err = sandbox.RegistryAccess{Username: m.Username, Password: m.Password}.Validate()
	}
	if err == nil && m.Username == "" {
		err = sandbox.InvalidField("username", "is missing")
	}
	if err != nil {
		return nil, err
	}
	have, err := s.store.ListLogins(ctx)
	if err != nil {
		return nil, err
	}
	known := slices.ContainsFunc(have, func(l store.SealedLogin) bool { return l.Registry == registry })
	if len(have) >= maxLogins && !known {
		return nil, &sandbox.Error{Class: sandbox.Precondition, Msg: fmt.Sprintf("there are %d logins, the most a tenant may have", len(have)), Hint: "log out of some first"}
	}
	l := sandbox.RegistryLogin{Tenant: store.ScopeOf(ctx).Tenant(), Registry: registry, Username: m.Username, UpdatedAt: s.cfg.Clock().UTC()}
	sealed, err := s.vault.sealValue(sandbox.NewSecretValue(m.Password), loginContext(l))
	if err == nil {
		err = s.store.PutLogin(ctx, store.SealedLogin{RegistryLogin: l, Sealed: sealed})
	}
	return answer(&covev1.LoginRegistryResponse{Login: wire.RegistryLogin(l)}, err)
}

func (s imageService) Logins(ctx context.Context, r *connect.Request[covev1.ListLoginsRequest]) (*connect.Response[covev1.ListLoginsResponse], error) {
	list, err := s.store.ListLogins(ctx)
	if err != nil {
		return nil, err
	}
	out := &covev1.ListLoginsResponse{}
	for _, l := range list {
		out.Logins = append(out.Logins, wire.RegistryLogin(l.RegistryLogin))
	}
	return connect.NewResponse(out), nil
}

func (s imageService) Logout(ctx context.Context, r *connect.Request[covev1.LogoutRegistryRequest]) (*connect.Response[covev1.LogoutRegistryResponse], error) {
	registry, err := registryNamed(r.Msg.Registry)
	if err == nil {
		err = s.store.DeleteLogin(ctx, registry)
	}
	if errors.Is(err, sandbox.ErrNotFound) {
		err = &sandbox.Error{Class: sandbox.NotFound, Field: "registry", Msg: "no login to " + registry, Hint: `"cove registry ls" lists them`}
	}
	return answer(&covev1.LogoutRegistryResponse{}, err)
}

// loginContext binds a password to whose it is and where it may go. It has more
// parts than that of a secret, so that neither stands in for the other.
func loginContext(l sandbox.RegistryLogin) []byte {
	return []byte("registry\x00" + l.Tenant + "\x00" + l.Registry + "\x00" + l.Username)
}

// accessTo is who the caller is to the registry of a reference if the pull names
// nobody: who its tenant logged in as, else the operator for root, else nobody.
func (s *Server) accessTo(ctx context.Context, ref string) (sandbox.RegistryAccess, error) {
	others := sandbox.RegistryAccess{Operator: isRoot(ctx)}
	parsed, err := name.ParseReference(ref)
	if err != nil {
		return others, nil // which the pull says better
	}
	l, err := s.store.GetLogin(ctx, strings.ToLower(parsed.Context().RegistryStr()))
	if errors.Is(err, sandbox.ErrNotFound) {
		return others, nil
	}
	if err != nil {
		return sandbox.RegistryAccess{}, err
	}
	password, err := s.vault.openValue("the login to "+l.Registry, l.Sealed, loginContext(l.RegistryLogin))
	return sandbox.RegistryAccess{Username: l.Username, Password: password.Reveal()}, err
}
