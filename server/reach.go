package server

import (
	"context"
	"errors"
	"net"
	"slices"

	"github.com/cove-sandbox/cove/sandbox"
)

// Reach is how the gateway and the SSH server come into sandboxes: they know the
// server by this much. They have checked a token or a certificate, both of one
// sandbox, or asked AllowKey; from there on they act as the server.
type Reach struct{ s *Server }

// Reach returns it.
func (s *Server) Reach() Reach { return Reach{s} }

// Public says whether a port needs no token; false where there is no such
// sandbox: who has no token is told nothing about what exists.
func (r Reach) Public(ctx context.Context, id string, port int) (bool, error) {
	sb, err := r.s.store.GetSandbox(asServer(ctx), id)
	if errors.Is(err, sandbox.ErrNotFound) {
		return false, nil
	}
	return err == nil && slices.Contains(sb.PublicPorts, port), err
}

// AllowKey is nil if an API key may reach into a sandbox: one of its tenant, with
// the rights of somebody who may run things there. Another's is not found.
func (r Reach) AllowKey(ctx context.Context, secret, id string) error {
	use, err := r.s.keys.find(ctx, secret)
	if errors.Is(err, sandbox.ErrNotFound) {
		return &sandbox.Error{Class: sandbox.Unauthenticated, Msg: "the API key is wrong or was revoked"}
	}
	if err != nil {
		return err
	}
	if err := good(use.key, use.hash[:], r.s.cfg.Clock()); err != nil {
		return err
	}
	if err := (need{sandbox.DeveloperRole, "ports"}).allows(use.key, "a port of a sandbox"); err != nil {
		return err
	}
	use.last.Store(r.s.cfg.Clock().UnixNano())
	_, err = r.s.store.GetSandbox(withCaller(ctx, caller{key: use.key}), id)
	return err
}

// Login notes a login by SSH with a certificate that an API key had signed, and
// refuses it if that key is no longer one that could: a certificate may be good
// for longer than who asked for it. remote is the address it came from, with or
// without a port.
func (r Reach) Login(ctx context.Context, id, key, remote string) (err error) {
	k, err := r.s.keys.ofID(ctx, key)
	if errors.Is(err, sandbox.ErrNotFound) {
		err = &sandbox.Error{Class: sandbox.Unauthenticated, Msg: "the API key that the certificate was signed for was revoked"}
	}
	k.ID = key
	if sb, gerr := r.s.store.GetSandbox(asServer(ctx), id); err != nil && gerr == nil {
		k.Tenant = sb.Tenant // whose log shall have it
	}
	ctx = withCaller(ctx, caller{key: k, remote: hostOf(remote)})
	if err == nil {
		err = firstError(good(k, k.Hash, r.s.cfg.Clock()), (need{sandbox.DeveloperRole, "ports"}).allows(k, "SSH into a sandbox"),
			allowsAll(k, "SSH into a sandbox", sshParts))
	}
	if err == nil {
		_, err = r.s.store.GetSandbox(ctx, id)
	}
	r.s.audit.note(ctx, "ssh.login", []string{"sandbox:" + id}, err)
	return err
}

// KeyLives is nil if the API key that a token was made with could still make it:
// a token may be good for longer than who asked for it. A rotation is no end: the
// key is the same. It costs a look into a map.
func (r Reach) KeyLives(ctx context.Context, key string) error {
	k, err := r.s.keys.ofID(ctx, key)
	if errors.Is(err, sandbox.ErrNotFound) {
		return &sandbox.Error{Class: sandbox.Unauthenticated, Msg: "the API key that the token was made with was revoked"}
	}
	if err != nil {
		return err
	}
	return good(k, k.Hash, r.s.cfg.Clock())
}

// Hold keeps a sandbox active until release. It wakes one on standby, or is
// sandbox.ErrAsleep where wake is false.
func (r Reach) Hold(ctx context.Context, id string, wake bool) (release func(), err error) {
	if !wake {
		if st := r.s.node.Standby()[id]; st != sandbox.Awake {
			return nil, &sandbox.Error{Class: sandbox.Precondition, Reason: sandbox.Asleep,
				Msg:  "sandbox " + id + " is on standby (" + string(st) + "), and the request would not have it woken",
				Hint: "the same request without X-Cove-Wake: no wakes it"}
		}
	}
	_, release, err = r.s.guest(asServer(ctx), id)
	return release, err
}

// Dial opens a stream to a port inside. It does not keep the sandbox active.
func (r Reach) Dial(ctx context.Context, id string, port int) (net.Conn, error) {
	c, release, err := r.s.node.Dial(asServer(ctx), id, port)
	if err != nil {
		return nil, r.s.explain(asServer(ctx), id, err)
	}
	release()
	return c, nil
}

// Guest is the machine inside; the sandbox is active until release.
func (r Reach) Guest(ctx context.Context, id string) (g Guest, release func(), err error) {
	return r.s.guest(asServer(ctx), id)
}
