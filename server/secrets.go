package server

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/cove-sandbox/cove/egress/secret"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// maxSecrets of a tenant, and of a sandbox.
const (
	maxSecrets        = 1000
	maxSandboxSecrets = 32
)

// CreateSecret keeps a secret of the caller's tenant; without a placeholder it gets
// one.
func (s *Server) CreateSecret(ctx context.Context, sec sandbox.Secret) (_ sandbox.Secret, err error) {
	ctx, call, err := s.begin(ctx, "secret.create", about("name", sec.Name))
	if err != nil {
		return sec, err
	}
	defer call.end(&err)
	sec.Tenant, sec.CreatedAt = store.ScopeOf(ctx).Tenant(), s.cfg.Clock().UTC()
	sec.UpdatedAt, sec.Version = sec.CreatedAt, 1
	if sec.Placeholder == "" {
		sec.Placeholder = newPlaceholder(sec.Name)
	}
	if err := firstError(secret.Validate(sec), sandbox.ValidateLabels("labels", sec.Labels)); err != nil {
		return sec, err
	}
	err = s.changeSecrets(ctx, func(ctx context.Context) error {
		have, err := s.store.ListSecrets(ctx)
		if err != nil {
			return err
		}
		if len(have) >= maxSecrets {
			return &sandbox.Error{Class: sandbox.Precondition, Msg: fmt.Sprintf("there are %d secrets, the most a tenant may have", len(have)), Hint: "delete some first"}
		}
		// The value of one must not be changed by what stands for another.
		if i := slices.IndexFunc(have, func(h store.SealedSecret) bool { return h.Placeholder == sec.Placeholder && h.Name != sec.Name }); i >= 0 {
			return sandbox.InvalidField("placeholder", "is that of secret '%s'", have[i].Name)
		}
		sealed, err := s.vault.seal(sec)
		if err != nil {
			return err
		}
		return s.store.CreateSecret(ctx, sealedOf(sec, sealed))
	})
	if errors.Is(err, sandbox.ErrAlreadyExists) {
		err = &sandbox.Error{Class: sandbox.AlreadyExists, Field: "name", Msg: "there is a secret '" + sec.Name + "' already", Hint: "update it, which running sandboxes notice at once"}
	}
	return sec, err
}

func sealedOf(sec sandbox.Secret, sealed []byte) store.SealedSecret {
	sec.Value = sandbox.SecretValue{}
	return store.SealedSecret{Secret: sec, Sealed: sealed}
}

// ListSecrets lists the tenant's secrets, without their values.
func (s *Server) ListSecrets(ctx context.Context) (list []sandbox.Secret, err error) {
	ctx, call, err := s.begin(ctx, "secret.list")
	if err != nil {
		return nil, err
	}
	defer call.end(&err)
	have, err := s.store.ListSecrets(ctx)
	for _, sec := range have {
		list = append(list, sec.Secret)
	}
	return list, err
}

// UpdateSecret changes a secret, which running sandboxes notice at once.
func (s *Server) UpdateSecret(ctx context.Context, name string, u sandbox.SecretUpdate) (sec sandbox.Secret, err error) {
	ctx, call, err := s.begin(ctx, "secret.update", about("name", name))
	if err != nil {
		return sec, err
	}
	defer call.end(&err)
	if err := secret.ValidateName("name", name); err != nil {
		return sec, err
	}
	err = s.changeSecrets(ctx, func(ctx context.Context) error {
		have, err := s.store.GetSecret(ctx, name)
		if err != nil {
			return s.noSecret(ctx, "name", name, err)
		}
		if sec = have.Secret; u.Value == nil { // a new value needs no old one
			if sec, err = s.vault.open(sec, have.Sealed); err != nil {
				return err
			}
		}
		sec = u.Apply(sec)
		if sec.UpdatedAt = s.cfg.Clock().UTC(); !sec.UpdatedAt.After(have.UpdatedAt) {
			sec.UpdatedAt = have.UpdatedAt.Add(1) // the store tells versions apart by it
		}
		if err := firstError(secret.Validate(sec), sandbox.ValidateLabels("labels", sec.Labels)); err != nil {
			return err
		}
		sealed, err := s.vault.seal(sec)
		if err != nil {
			return err
		}
		return s.store.ReplaceSecret(ctx, sealedOf(sec, sealed), have.UpdatedAt)
	})
	return sec, err
}

// DeleteSecret removes a secret. What used it goes on without.
func (s *Server) DeleteSecret(ctx context.Context, name string) (err error) {
	ctx, call, err := s.begin(ctx, "secret.delete", about("name", name))
	if err != nil {
		return err
	}
	defer call.end(&err)
	if err := secret.ValidateName("name", name); err != nil {
		return err
	}
	return s.changeSecrets(ctx, func(ctx context.Context) error {
		return s.noSecret(ctx, "name", name, s.store.DeleteSecret(ctx, name))
	})
}

// SetSecrets says which secrets a sandbox may use. It goes to the node first: what
// is in force there is the truth, and Reconcile takes its word.
func (s *Server) SetSecrets(ctx context.Context, id string, names []string) (err error) {
	ctx, call, err := s.begin(ctx, "sandbox.set_secrets", about("id", id))
	if err != nil {
		return err
	}
	defer call.end(&err)
	if len(names) > 0 {
		err = call.needs(reads("secrets", "secrets"))
	}
	if err := firstError(err, validID("id", id)); err != nil {
		return err
	}
	sb, err := s.live(ctx, id)
	if err == nil && len(names) > 0 {
		err = s.checkSecrets(ctx, "secrets", names, sb.Spec.Network)
	}
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), createTimeout)
	defer cancel()
	authority, err := s.node.UseSecrets(ctx, id, names)
	if err == nil {
		_, err = s.store.UpdateSandbox(ctx, id, func(sb *sandbox.Sandbox) error {
			sb.Spec.Secrets, sb.Spec.Authority = names, authority
			return nil
		})
	}
	if err != nil {
		return s.explain(ctx, id, err)
	}
	return nil
}

// checkSecrets says whether a sandbox with that network may have these secrets.
func (s *Server) checkSecrets(ctx context.Context, field string, names []string, n sandbox.Network) error {
	if len(names) > maxSandboxSecrets {
		return sandbox.InvalidField(field, "%d secrets; at most %d", len(names), maxSandboxSecrets)
	}
	have, err := s.store.ListSecrets(ctx)
	if err != nil {
		return err
	}
	env := map[string]string{}
	for i, name := range names {
		at := fmt.Sprintf("%s[%d]", field, i)
		if err := secret.ValidateName(at, name); err != nil {
			return err
		}
		if slices.Contains(names[:i], name) {
			return sandbox.InvalidField(at, "'%s' is named twice", name)
		}
		j := slices.IndexFunc(have, func(sec store.SealedSecret) bool { return sec.Name == name })
		if j < 0 {
			return s.noSecret(ctx, at, name, &sandbox.Error{Class: sandbox.NotFound})
		}
		if e := have[j].Env; e != "" {
			if other := env[e]; other != "" {
				return sandbox.InvalidField(at, "'%s' and '%s' both have their placeholder in %s", other, name, e)
			}
			env[e] = name
		}
	}
	if n.Mode == sandbox.NetworkNone && n.Replay == nil { // of a replay the variables matter: they are part of what was asked
		return sandbox.InvalidField(field, "a sandbox without a network makes no requests that secrets could be put into").
			WithHint("give it one that reaches their hosts: --network public, or --allow HOST")
	}
	return nil
}

// noSecret says of an error that a secret is not there which was meant.
func (s *Server) noSecret(ctx context.Context, field, name string, err error) error {
	if !errors.Is(err, sandbox.ErrNotFound) {
		return err
	}
	e := &sandbox.Error{Class: sandbox.NotFound, Field: field, Msg: "no secret '" + name + "'", Hint: `"cove secret ls" lists them`}
	have, lerr := s.store.ListSecrets(ctx)
	if lerr != nil {
		return e
	}
	var names []string
	for _, sec := range have {
		names = append(names, sec.Name)
	}
	if did := sandbox.DidYouMean(name, names); did != "" {
		e.Msg += "; " + did
	}
	return e
}

// changeSecrets makes a change in the store and then on the node, whoever leaves
// meanwhile.
func (s *Server) changeSecrets(ctx context.Context, change func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), createTimeout)
	defer cancel()
	tenant := store.ScopeOf(ctx).Tenant()
	s.secretTurn.Lock()
	err := change(ctx)
	var late error
	if err == nil {
		late = s.handOver(ctx, tenant)
	}
	s.secretTurn.Unlock()
	if late == nil {
		return err
	}
	s.untilDone("secrets of "+tenant, func(ctx context.Context) error {
		s.secretTurn.Lock()
		defer s.secretTurn.Unlock()
		return s.handOver(ctx, tenant)
	})
	return sandbox.Errorf(sandbox.Unavailable, "", "it is recorded, and in force as soon as the node takes it: %w", late)
}

// handOver gives the node the secrets of a tenant; secretTurn is held. One that
// cannot be opened is left out: what used it fails, as if it were deleted.
func (s *Server) handOver(ctx context.Context, tenant string) error {
	list, err := s.store.ListSecrets(store.In(ctx, tenant))
	if err != nil {
		return err
	}
	return s.node.PutSecrets(store.In(ctx, tenant), tenant, s.opened(list))
}

func (s *Server) opened(list []store.SealedSecret) (out []sandbox.Secret) {
	for _, sealed := range list {
		sec, err := s.vault.open(sealed.Secret, sealed.Sealed)
		if err == nil {
			err = secret.Validate(sec) // by rules that may be newer than the secret
		}
		if err != nil {
			s.log.Error("a secret cannot be used", "secret", sealed.Name, "tenant", sealed.Tenant, "err", err)
			continue
		}
		out = append(out, sec)
	}
	return out
}

// handOverAll tells a node that has just started about every tenant that has
// secrets, or sandboxes that wait to hear of them.
func (s *Server) handOverAll(ctx context.Context, live []sandbox.Sandbox) error {
	s.secretTurn.Lock()
	defer s.secretTurn.Unlock()
	list, err := s.store.ListSecrets(ctx)
	if err != nil {
		return err
	}
	tenants := map[string]bool{}
	for _, sec := range list {
		tenants[sec.Tenant] = true
	}
	for _, sb := range live {
		if len(sb.Spec.Secrets) > 0 {
			tenants[sb.Tenant] = true
		}
	}
	for tenant := range tenants {
		of := slices.DeleteFunc(slices.Clone(list), func(sec store.SealedSecret) bool { return sec.Tenant != tenant })
		if err := s.node.PutSecrets(ctx, tenant, s.opened(of)); err != nil {
			return err
		}
	}
	return nil
}
