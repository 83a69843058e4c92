package server

import (
	"context"
	"net"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// caller is who a call came from.
type caller struct {
	key    store.Key
	remote string // address, for the audit log
}

type callerContext struct{}

// withCaller gives a context to a caller: from here on it sees its tenant and
// nothing else, whatever is called with it.
func withCaller(ctx context.Context, c caller) context.Context {
	return store.In(context.WithValue(ctx, callerContext{}, c), c.key.Tenant)
}

func callerOf(ctx context.Context) caller {
	c, _ := ctx.Value(callerContext{}).(caller)
	return c
}

// isRoot says whether the caller may act for the installation. The server's own
// work has no caller.
func isRoot(ctx context.Context) bool { return callerOf(ctx).key.Role == sandbox.RootRole }

// asServer is for the server's own work, which is about every tenant: recording
// ends, collecting content, checking keys. Nothing that a caller names is looked
// up with it.
func asServer(ctx context.Context) context.Context { return store.Installation(ctx) }

// hostOf is a remote address without its port, which says nothing of who it was.
func hostOf(addr string) string {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return addr
	}
	return host
}

func expired() *sandbox.Error {
	return &sandbox.Error{Class: sandbox.Unauthenticated, Msg: "the API key has expired", Hint: `an admin of the tenant makes a new one with "cove key create"`}
}

// good says whether a key may be used now, with a secret that has the hash.
func good(k store.Key, hash []byte, now time.Time) error {
	switch {
	case !k.ExpiresAt.IsZero() && !now.Before(k.ExpiresAt):
		return expired()
	case string(hash) != string(k.Hash) && !now.Before(k.OldUntil):
		return &sandbox.Error{Class: sandbox.Unauthenticated, Msg: "the API key was rotated", Hint: "use the secret the rotation printed"}
	}
	return nil
}
