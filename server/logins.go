package server

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
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

// LoginRegistry keeps who the tenant is to a registry.
func (s *Server) LoginRegistry(ctx context.Context, registry string, who sandbox.RegistryAccess) (l sandbox.RegistryLogin, err error) {
	ctx, call, err := s.begin(ctx, "image.login", about("registry", registry))
	if err != nil {
		return l, err
	}
	defer call.end(&err)
	registry, err = registryNamed(registry)
	if err == nil {
		err = who.Validate()
	}
	if err == nil && who.Username == "" {
		err = sandbox.InvalidField("username", "is missing")
	}
	if err != nil {
		return l, err
	}
	have, err := s.store.ListLogins(ctx)
	if err != nil {
		return l, err
	}
	known := slices.ContainsFunc(have, func(l store.SealedLogin) bool { return l.Registry == registry })
	if len(have) >= maxLogins && !known {
		return l, &sandbox.Error{Class: sandbox.Precondition, Msg: fmt.Sprintf("there are %d logins, the most a tenant may have", len(have)), Hint: "log out of some first"}
	}
	l = sandbox.RegistryLogin{Tenant: store.ScopeOf(ctx).Tenant(), Registry: registry, Username: who.Username, UpdatedAt: s.cfg.Clock().UTC()}
	sealed, err := s.vault.sealValue(sandbox.NewSecretValue(who.Password), loginContext(l))
	if err == nil {
		err = s.store.PutLogin(ctx, store.SealedLogin{RegistryLogin: l, Sealed: sealed})
	}
	return l, err
}

// RegistryLogins lists them, without passwords.
func (s *Server) RegistryLogins(ctx context.Context) (list []sandbox.RegistryLogin, err error) {
	ctx, call, err := s.begin(ctx, "image.logins")
	if err != nil {
		return nil, err
	}
	defer call.end(&err)
	have, err := s.store.ListLogins(ctx)
	for _, l := range have {
		list = append(list, l.RegistryLogin)
	}
	return list, err
}

// LogoutRegistry forgets who the tenant is to a registry.
func (s *Server) LogoutRegistry(ctx context.Context, registry string) (err error) {
	ctx, call, err := s.begin(ctx, "image.logout", about("registry", registry))
	if err != nil {
		return err
	}
	defer call.end(&err)
	registry, err = registryNamed(registry)
	if err == nil {
		err = s.store.DeleteLogin(ctx, registry)
	}
	if errors.Is(err, sandbox.ErrNotFound) {
		err = &sandbox.Error{Class: sandbox.NotFound, Field: "registry", Msg: "no login to " + registry, Hint: `"cove registry ls" lists them`}
	}
	return err
}

// loginContext binds a password to whose it is and where it may go. It has more
// parts than that of a secret, so that neither stands in for the other.
func loginContext(l sandbox.RegistryLogin) []byte {
	return []byte("registry\x00" + l.Tenant + "\x00" + l.Registry + "\x00" + l.Username)
}

// accessTo is who the caller is to the registry of a reference if the pull names
// nobody: who its tenant logged in as, else the operator for root, else nobody.
func (s *Server) accessTo(ctx context.Context, ref string) (sandbox.RegistryAccess, error) {
	return s.accessAs(ctx, ref, isRoot(ctx))
}

// accessAs is accessTo for who may or may not go by the operator's logins.
func (s *Server) accessAs(ctx context.Context, ref string, operator bool) (sandbox.RegistryAccess, error) {
	others := sandbox.RegistryAccess{Operator: operator}
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
