package server

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// defaultGrace is how long the secret before a rotation is good; longestGrace
// is the most it may be.
const (
	defaultGrace = time.Hour
	longestGrace = store.LongestGrace
)

// KeyRequest asks for a key.
type KeyRequest struct {
	Name    string
	Tenant  string        // "" = the caller's
	Role    sandbox.Role  // "" = the caller's, or an admin's of another tenant
	Scopes  []string      // none = the caller's
	Expires time.Duration // from now; 0 = never
}

// CreateKey makes a key of the caller's tenant, or of any for an installation's
// admin, and gives its secret this once. Nobody makes a key that may more than
// their own.
func (s *Server) CreateKey(ctx context.Context, r KeyRequest) (k store.Key, secret string, err error) {
	ctx, call, err := s.begin(ctx, "key.create", about("name", r.Name), about("tenant", r.Tenant), about("role", string(r.Role)))
	if err != nil {
		return k, "", err
	}
	defer call.end(&err)
	me := callerOf(ctx).key
	k = store.Key{Name: r.Name, Role: cmp.Or(r.Role, me.Role), Scopes: r.Scopes, Tenant: me.Tenant}
	err = firstError(sandbox.ValidateName("name", r.Name), sandbox.ValidateRole("role", k.Role), sandbox.ValidateScopes("scopes", k.Scopes),
		sandbox.ValidateTimeout("expires", r.Expires, s.cfg.Limits.MaxTimeout))
	if err != nil {
		return k, "", err
	}
	if r.Tenant != "" {
		tn, err := s.findTenant(ctx, "tenant", r.Tenant)
		if err != nil {
			return k, "", err
		}
		k.Tenant = tn.ID
		if r.Role == "" && tn.ID != me.Tenant {
			k.Role = sandbox.AdminRole // the first key of a tenant is mostly its admin's
		}
	}
	if len(k.Scopes) == 0 {
		k.Scopes = me.Scopes
	}
	if r.Expires > 0 {
		k.ExpiresAt = s.cfg.Clock().UTC().Add(r.Expires)
	}
	if err := mayHandOut(me, k); err != nil {
		return k, "", err
	}
	if k.Role == sandbox.RootRole && k.Tenant != sandbox.DefaultTenant {
		return k, "", sandbox.InvalidField("role", "an installation's admin is of the default tenant")
	}
	k, secret, err = s.createKey(store.In(ctx, k.Tenant), k)
	call.concerns("key", k.ID)
	return k, secret, err
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
func (s *Server) managedKey(ctx context.Context, id string) error {
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

// ListKeys lists the keys that the caller manages.
func (s *Server) ListKeys(ctx context.Context) (keys []store.Key, err error) {
	ctx, call, err := s.begin(ctx, "key.list")
	if err != nil {
		return nil, err
	}
	defer call.end(&err)
	if keys, err = s.store.ListKeys(keyScope(ctx)); err != nil {
		return nil, err
	}
	used := s.keys.lastUsed()
	for i, k := range keys {
		if at := used[k.ID]; at.After(k.LastUsedAt) {
			keys[i].LastUsedAt = at
		}
	}
	return keys, nil
}

// RevokeKey ends a key: the next call with it is refused, and those under way end.
func (s *Server) RevokeKey(ctx context.Context, id string) (err error) {
	ctx, call, err := s.begin(ctx, "key.revoke", about("id", id))
	if err != nil {
		return err
	}
	defer call.end(&err)
	if err := s.managedKey(ctx, id); err != nil {
		return err
	}
	err = s.store.RevokeKey(keyScope(ctx), id)
	// Even a failed revocation may have happened; asking the store again costs nothing.
	s.keys.forget(id)
	if err == nil {
		s.calls.endKeys(ctx, func(k store.Key) bool { return k.ID == id })
	}
	return noKey(id, err)
}

// RotateKey gives a key a new secret. The old one is good for grace longer; nil is
// an hour.
func (s *Server) RotateKey(ctx context.Context, id string, grace *time.Duration) (k store.Key, secret string, err error) {
	ctx, call, err := s.begin(ctx, "key.rotate", about("id", id))
	if err != nil {
		return k, "", err
	}
	defer call.end(&err)
	if err := s.managedKey(ctx, id); err != nil {
		return k, "", err
	}
	longer := defaultGrace
	if grace != nil {
		longer = *grace
	}
	if longer < 0 || longer > longestGrace {
		return k, "", sandbox.InvalidField("grace", "%s is not accepted; 0 to %s is", longer, longestGrace)
	}
	secret, hash, err := newSecret(s.cfg.Rand)
	if err != nil {
		return k, "", err
	}
	k, err = s.store.RotateKey(keyScope(ctx), id, hash[:], s.cfg.Clock().UTC().Add(longer))
	s.keys.forget(id)
	if err != nil {
		return k, "", noKey(id, err)
	}
	call.concerns("key", k.ID)
	if s.cfg.KeyRotated != nil {
		s.cfg.KeyRotated(k.OldHash, secret)
	}
	s.log.Info("rotated an API key", "key", k.ID, "name", k.Name, "grace", longer)
	return k, secret, nil
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
