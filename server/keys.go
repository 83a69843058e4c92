package server

import (
	"context"
	"errors"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
	"github.com/cove-sandbox/cove/wire"
)

type keyService struct{ *Server }

func (s keyService) Create(ctx context.Context, r *connect.Request[covev1.CreateKeyRequest]) (*connect.Response[covev1.CreateKeyResponse], error) {
	if err := sandbox.ValidateName("name", r.Msg.Name); err != nil {
		return nil, err
	}
	key, secret, err := s.createKey(ctx, r.Msg.Name)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&covev1.CreateKeyResponse{Key: protoKey(key), Secret: secret}), nil
}

func (s keyService) List(ctx context.Context, r *connect.Request[covev1.ListKeysRequest]) (*connect.Response[covev1.ListKeysResponse], error) {
	keys, err := s.store.ListKeys(ctx)
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
	if !sandbox.ValidID(r.Msg.Id) {
		return nil, sandbox.InvalidField("id", "%.80q is no key id", r.Msg.Id).WithHint(`"cove key ls" lists them; the secret itself is not an id`)
	}
	err := s.store.RevokeKey(ctx, r.Msg.Id)
	// Even a failed revocation may have happened; asking the store again costs nothing.
	s.keys.forget(r.Msg.Id)
	if errors.Is(err, sandbox.ErrNotFound) {
		return nil, (&sandbox.Error{Class: sandbox.NotFound, Msg: "no key '" + r.Msg.Id + "'"}).WithHint(`"cove key ls" lists them`)
	}
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&covev1.RevokeKeyResponse{}), nil
}

// EnsureFirstKey makes a key if there is none at all, as on a first start. The
// secret is returned this once only; the caller keeps it where only the owner
// of the machine can read it.
func (s *Server) EnsureFirstKey(ctx context.Context) (secret string, created bool, err error) {
	keys, err := s.store.ListKeys(ctx)
	if err != nil || len(keys) > 0 {
		return "", false, err
	}
	_, secret, err = s.createKey(ctx, "first")
	return secret, err == nil, err
}

func (s *Server) createKey(ctx context.Context, name string) (store.Key, string, error) {
	secret, hash, err := newSecret(s.cfg.Rand)
	if err != nil {
		return store.Key{}, "", err
	}
	key := store.Key{ID: sandbox.NewID(s.cfg.Rand), Name: name, Hash: hash[:], CreatedAt: s.cfg.Clock().UTC()}
	if err := s.store.CreateKey(ctx, key); err != nil {
		return store.Key{}, "", err
	}
	s.log.Info("made an API key", "key", key.ID, "name", name)
	return key, secret, nil
}

func protoKey(k store.Key) *covev1.Key {
	return &covev1.Key{Id: k.ID, Name: k.Name, CreatedAt: wire.Time(k.CreatedAt), LastUsedAt: wire.Time(k.LastUsedAt)}
}
