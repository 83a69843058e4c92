package server

import (
	"cmp"
	"context"
	"errors"
	"time"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
	"github.com/cove-sandbox/cove/wire"
)

type keyService struct{ *Server }

// defaultGrace is how long the secret before a rotation is good; longestGrace
// is the most it may be.
const (
	defaultGrace = time.Hour
	longestGrace = store.LongestGrace
)

// Create makes a key of the caller's tenant, or of any for an installation's
// admin. Nobody makes a key that may more than their own.
func (s keyService) Create(ctx context.Context, r *connect.Request[covev1.CreateKeyRequest]) (*connect.Response[covev1.CreateKeyResponse], error) {
	m, me := r.Msg, callerOf(ctx).key
	k := store.Key{Name: m.Name, Role: cmp.Or(sandbox.Role(m.Role), me.Role), Scopes: m.Scopes, Tenant: me.Tenant}
	expires, err := wire.DurationFrom("expires", m.Expires)
	err = firstError(err, sandbox.ValidateName("name", m.Name), sandbox.ValidateRole("role", k.Role), sandbox.ValidateScopes("scopes", k.Scopes),
		sandbox.ValidateTimeout("expires", expires, s.cfg.Limits.MaxTimeout))
	if err != nil {
		return nil, err
	}
	if m.Tenant != "" {
		tn, err := s.findTenant(ctx, "tenant", m.Tenant)
		if err != nil {
			return nil, err
		}
		k.Tenant = tn.ID
		if m.Role == "" && tn.ID != me.Tenant {
			k.Role = sandbox.AdminRole // the first key of a tenant is mostly its admin's
		}
	}
	if len(k.Scopes) == 0 {
		k.Scopes = me.Scopes
	}
	if expires > 0 {
		k.ExpiresAt = s.cfg.Clock().UTC().Add(expires)
	}
	if err := mayHandOut(me, k); err != nil {
		return nil, err
	}
	if k.Role == sandbox.RootRole && k.Tenant != sandbox.DefaultTenant {
		return nil, sandbox.InvalidField("role", "an installation's admin is of the default tenant")
	}
	k, secret, err := s.createKey(store.In(ctx, k.Tenant), k)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&covev1.CreateKeyResponse{Key: protoKey(k), Secret: secret}), nil
}

// mayHandOut is nil if whoever holds me may make k, and so may be given its
// secret anew or remove it: k may nothing, and lives no longer, than me. Whose
// tenant k is has been decided by then.
func mayHandOut(me, k store.Key) error {
	denied := func(field, msg string) error { return &sandbox.Error{Class: sandbox.Denied, Field: field, Msg: msg} }
	if !me.Role.AtLeast(k.Role) {
		return denied("role", "a key with the role "+string(me.Role)+" has no say over one with the role "+string(k.Role))
	}
	if len(me.Scopes) > 0 && len(k.Scopes) == 0 {
		return denied("scopes", "a key with scopes has no say over one without")
	}
	for _, sc := range k.Scopes {
		if len(me.Scopes) > 0 && !covers(me.Scopes, sc) {
			return denied("scopes", "'"+sc+"' is outside the scopes of the key that asks")
		}
	}
	if !me.ExpiresAt.IsZero() && (k.ExpiresAt.IsZero() || k.ExpiresAt.After(me.ExpiresAt)) {
		return &sandbox.Error{Class: sandbox.Denied, Field: "expires", Msg: "a key that expires has no say over one that lives longer",
			Hint: "this one's time is " + me.ExpiresAt.UTC().Format(time.RFC3339)}
	}
	return nil
}

// managedKey is a key the caller names to rotate or revoke. What mayHandOut asks
// about never changes while a key lives, so the answer still holds when the
// store is told.
func (s keyService) managedKey(ctx context.Context, id string) error {
	if !sandbox.ValidID(id) {
		return sandbox.InvalidField("id", "%.80q is no key id", id).WithHint(`"cove key ls" lists them; the secret itself is not an id`)
	}
	keys, err := s.store.ListKeys(keyScope(ctx))
	if err != nil {
		return err
	}
	for _, k := range keys {
		if k.ID == id {
			var e *sandbox.Error
			if errors.As(mayHandOut(callerOf(ctx).key, k), &e) {
				e.Field = "id"
				return e
			}
			return nil
		}
	}
	return noKey(id, sandbox.ErrNotFound)
}

// covers says whether scopes allow what one more would.
func covers(scopes []string, one string) bool {
	for _, s := range scopes {
		if s == one || s+":read" == one {
			return true
		}
	}
	return false
}

// keyScope is whose keys a caller manages: an installation's admin everybody's.
func keyScope(ctx context.Context) context.Context {
	if isRoot(ctx) {
		return asServer(ctx)
	}
	return ctx
}

func (s keyService) List(ctx context.Context, r *connect.Request[covev1.ListKeysRequest]) (*connect.Response[covev1.ListKeysResponse], error) {
	keys, err := s.store.ListKeys(keyScope(ctx))
	if err != nil {
		return nil, err
	}
	used := s.keys.lastUsed()
	out := &covev1.ListKeysResponse{}
	for _, k := range keys {
		if at := used[k.ID]; at.After(k.LastUsedAt) {
			k.LastUsedAt = at
		}
		out.Keys = append(out.Keys, protoKey(k))
	}
	return connect.NewResponse(out), nil
}

func (s keyService) Revoke(ctx context.Context, r *connect.Request[covev1.RevokeKeyRequest]) (*connect.Response[covev1.RevokeKeyResponse], error) {
	if err := s.managedKey(ctx, r.Msg.Id); err != nil {
		return nil, err
	}
	err := s.store.RevokeKey(keyScope(ctx), r.Msg.Id)
	// Even a failed revocation may have happened; asking the store again costs nothing.
	s.keys.forget(r.Msg.Id)
	if err != nil {
		return nil, noKey(r.Msg.Id, err)
	}
	return connect.NewResponse(&covev1.RevokeKeyResponse{}), nil
}

func (s keyService) Rotate(ctx context.Context, r *connect.Request[covev1.RotateKeyRequest]) (*connect.Response[covev1.RotateKeyResponse], error) {
	if err := s.managedKey(ctx, r.Msg.Id); err != nil {
		return nil, err
	}
	grace := defaultGrace
	if r.Msg.Grace != nil {
		var err error
		if grace, err = wire.DurationFrom("grace", r.Msg.Grace); err != nil {
			return nil, err
		}
		if grace < 0 || grace > longestGrace {
			return nil, sandbox.InvalidField("grace", "%s is not accepted; 0 to %s is", grace, longestGrace)
		}
	}
	secret, hash, err := newSecret(s.cfg.Rand)
	if err != nil {
		return nil, err
	}
	k, err := s.store.RotateKey(keyScope(ctx), r.Msg.Id, hash[:], s.cfg.Clock().UTC().Add(grace))
	s.keys.forget(r.Msg.Id)
	if err != nil {
		return nil, noKey(r.Msg.Id, err)
	}
	if s.cfg.KeyRotated != nil {
		s.cfg.KeyRotated(k.OldHash, secret)
	}
	s.log.Info("rotated an API key", "key", k.ID, "name", k.Name, "grace", grace)
	return connect.NewResponse(&covev1.RotateKeyResponse{Key: protoKey(k), Secret: secret}), nil
}

func noKey(id string, err error) error {
	if errors.Is(err, sandbox.ErrNotFound) {
		return (&sandbox.Error{Class: sandbox.NotFound, Msg: "no key '" + id + "'"}).WithHint(`"cove key ls" lists them`)
	}
	return err
}

// EnsureFirstKey makes an installation's admin's key if there is none at all, as
// on a first start. The secret is returned this once only; the caller keeps it
// where only the owner of the machine can read it.
func (s *Server) EnsureFirstKey(ctx context.Context) (secret string, created bool, err error) {
	ctx = asServer(ctx)
	keys, err := s.store.ListKeys(ctx)
	if err != nil || len(keys) > 0 {
		return "", false, err
	}
	_, secret, err = s.createKey(ctx, store.Key{Name: "first", Role: sandbox.RootRole, Tenant: sandbox.DefaultTenant})
	return secret, err == nil, err
}

func (s *Server) createKey(ctx context.Context, key store.Key) (store.Key, string, error) {
	secret, hash, err := newSecret(s.cfg.Rand)
	if err != nil {
		return store.Key{}, "", err
	}
	key.ID, key.Hash, key.CreatedAt = sandbox.NewID(s.cfg.Rand), hash[:], s.cfg.Clock().UTC()
	if err := s.store.CreateKey(ctx, key); err != nil {
		return store.Key{}, "", err
	}
	s.log.Info("made an API key", "key", key.ID, "name", key.Name, "tenant", key.Tenant, "role", key.Role)
	return key, secret, nil
}

func protoKey(k store.Key) *covev1.Key {
	p := &covev1.Key{Id: k.ID, Name: k.Name, CreatedAt: wire.Time(k.CreatedAt), LastUsedAt: wire.Time(k.LastUsedAt),
		Tenant: k.Tenant, Role: string(k.Role), Scopes: k.Scopes, ExpiresAt: wire.Time(k.ExpiresAt)}
	if len(k.OldHash) > 0 {
		p.OldSecretUntil = wire.Time(k.OldUntil)
	}
	return p
}
