package server

import (
	"context"
	"errors"

	"github.com/cove-sandbox/cove/sandbox"
)

// CallerKey is the id of the API key that a context acts as; "" for none. A
// dialect puts it into tokens of its own, for Vouched.
func CallerKey(ctx context.Context) string { return callerOf(ctx).key.ID }

// CallerTenant is whose the caller of a context is, for what a dialect keeps itself.
func CallerTenant(ctx context.Context) string { return callerOf(ctx).key.Tenant }

// Vouched finds the caller of a token that a dialect has checked and that names
// the API key it was made with. The token is as good as that key is now: one that
// was revoked or has expired ends it. A rotation does not: the key is the same.
// remote is the address it came from, with or without a port.
func (s *Server) Vouched(ctx context.Context, key, remote string) (context.Context, error) {
	k, err := s.keys.ofID(ctx, key)
	if errors.Is(err, sandbox.ErrNotFound) {
		err = &sandbox.Error{Class: sandbox.Unauthenticated, Msg: "the API key that the token was made with was revoked"}
	}
	if err == nil {
		err = good(k, k.Hash, s.cfg.Clock())
	}
	if err != nil {
		return ctx, sandbox.WithOp("auth", err)
	}
	return withCaller(ctx, caller{key: k, remote: hostOf(remote)}), nil
}
