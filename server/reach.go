package server

import (
	"context"
	"errors"
	"net"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// Reach is how the gateway and the SSH server come to ports of sandboxes: they know
// the server by this much. They have checked a token or a certificate, both of one
// sandbox, or asked AllowKey; to hold that sandbox and to dial they act as the
// server. What SSH runs there it runs by the operations, as the key of Login.
type Reach struct{ s *Server }

// Reach returns it.
func (s *Server) Reach() Reach { return Reach{s} }

// Door is how a port is shown; the zero value where there is no such sandbox: who
// has no token is told nothing about what exists.
func (r Reach) Door(ctx context.Context, id string, port int) (sandbox.Door, error) {
	sb, err := r.s.store.GetSandbox(asServer(ctx), id)
	if errors.Is(err, sandbox.ErrNotFound) {
		return sandbox.Door{}, nil
	}
	return sb.Door(port), err
}

// Labels of a sandbox, one that has ended too: a dialect knows its own by them, and
// refuses visitors in its own words.
func (r Reach) Labels(ctx context.Context, id string) map[string]string {
	sb, err := r.s.store.GetSandbox(asServer(ctx), id)
	if err != nil {
		return nil
	}
	return sb.Spec.Labels
}

// AllowKey is the id of an API key that may reach into a sandbox: one of its tenant,
// with the rights of somebody who may run things there. Another's is not found.
func (r Reach) AllowKey(ctx context.Context, secret, id string) (key string, err error) {
	ctx, err = r.s.Authenticate(ctx, secret, "")
	if err != nil {
		return "", err
	}
	return callerOf(ctx).key.ID, r.s.ReachPort(ctx, id)
}

// ReachPort says whether the caller may reach into ports of a sandbox that are not
// public. A dialect with tokens of its own asks it for each visit.
func (s *Server) ReachPort(ctx context.Context, id string) (err error) {
	ctx, call, err := s.begin(ctx, "port.reach", about("sandbox", id))
	if err != nil {
		return err
	}
	defer call.end(&err)
	_, err = s.store.GetSandbox(ctx, id)
	return err
}

// Login is a login by SSH with a certificate that an API key had signed. What is
// done with the context it returns is done as that key. It is refused if that key
// is no longer one that could have it signed: a certificate may be good for longer
// than who asked for it. remote is the address it came from, with or without a port.
func (r Reach) Login(ctx context.Context, id, key, remote string) (context.Context, error) {
	k, err := r.s.keys.ofID(ctx, key)
	if errors.Is(err, sandbox.ErrNotFound) {
		err = &sandbox.Error{Class: sandbox.Unauthenticated, Msg: "the API key that the certificate was signed for was revoked"}
	}
	if err == nil {
		err = good(k, k.Hash, r.s.cfg.Clock())
	}
	if err == nil {
		ctx = withCaller(ctx, caller{key: k, remote: hostOf(remote)})
		return ctx, r.s.login(ctx, id)
	}
	k.ID = key
	if sb, gerr := r.s.store.GetSandbox(asServer(ctx), id); gerr == nil {
		k.Tenant = sb.Tenant // whose log shall have it
	}
	r.s.audit.note(withCaller(ctx, caller{key: k, remote: hostOf(remote)}), "ssh.login", []thing{about("sandbox", id)}, err)
	return ctx, err
}

func (s *Server) login(ctx context.Context, id string) (err error) {
	ctx, call, err := s.begin(ctx, "ssh.login", about("sandbox", id))
	if err != nil {
		return err
	}
	defer call.end(&err)
	if err := call.needs(sshParts...); err != nil {
		return err
	}
	_, err = s.store.GetSandbox(ctx, id)
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
		if st := r.s.standby(asServer(ctx))[id]; st != sandbox.Awake {
			return nil, &sandbox.Error{Class: sandbox.Precondition, Reason: sandbox.Asleep,
				Msg:  "sandbox " + id + " is on standby (" + string(st) + "), and the request would not have it woken",
				Hint: "the same request without X-Cove-Wake: no wakes it"}
		}
	}
	return r.s.active(asServer(ctx), id)
}

// Dial opens a stream to a port inside. It does not keep the sandbox active.
func (r Reach) Dial(ctx context.Context, id string, port int) (net.Conn, error) {
	c, err := r.s.node.Dial(asServer(ctx), id, port)
	if err != nil {
		return nil, r.s.explain(asServer(ctx), id, err)
	}
	return c, nil
}

// Holder is a sandbox, and the ids of the keys that could have been given a token of it.
type Holder struct {
	Sandbox string
	Keys    []string
}

// Holders is the holder of a sandbox, none if it is not there or has ended, or with id ""
// those of all that live. A dialect that is shown what was signed with a token, and not the
// token, tries theirs. It tells nothing to a caller: whoever signed is Vouched.
func (r Reach) Holders(ctx context.Context, id string) (out []Holder, err error) {
	ctx = asServer(ctx)
	var live []sandbox.Sandbox
	if id != "" {
		sb, err := r.s.store.GetSandbox(ctx, id)
		if errors.Is(err, sandbox.ErrNotFound) || errors.Is(err, sandbox.ErrInvalid) || err == nil && sb.State == sandbox.EndedState {
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		live = append(live, sb)
	}
	f := store.Filter{PageSize: 1000}
	for more := id == ""; more; more = f.PageToken != "" {
		var page []sandbox.Sandbox
		if page, f.PageToken, err = r.s.store.ListSandboxes(ctx, f); err != nil {
			return nil, err
		}
		live = append(live, page...)
	}
	keys, err := r.s.store.ListKeys(ctx)
	if err != nil {
		return nil, err
	}
	of := map[string][]string{}
	for _, k := range keys {
		of[k.Tenant] = append(of[k.Tenant], k.ID)
	}
	for _, sb := range live {
		out = append(out, Holder{sb.ID, of[sb.Tenant]})
	}
	return out, nil
}
