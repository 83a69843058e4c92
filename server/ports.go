package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// PortGate is what shows ports to the outside.
type PortGate interface {
	// URL of a port: absolute, or a path below the API's own address.
	URL(id string, port int) string
	// Domain is below what ports have hosts, as a URL without a path; "" for none.
	Domain() string
	// Token opens a private port until then, as long as the API key with the id
	// key is good: see Reach.KeyLives.
	Token(id string, port int, key string, until time.Time) string
}

// SSHSigner makes the certificates that the SSH server takes.
type SSHSigner interface {
	// Sign certifies a public key for one sandbox; sandbox.ErrInvalid for a key
	// that is none.
	Sign(id, by, publicKey string, until time.Time) (certificate string, err error)
	// HostKey is the server's, as known_hosts has it; Port where it listens.
	HostKey() string
	Port() int
}

const (
	defaultPortTTL, longestPortTTL = time.Hour, 24 * time.Hour
	defaultSSHTTL, longestSSHTTL   = 5 * time.Minute, 24 * time.Hour
	maxPublicPorts                 = 64
)

func validPort(port int) error {
	if port < 1 || port > 65535 {
		return sandbox.InvalidField("port", "%d is no TCP port; 1 to 65535 are accepted", port)
	}
	return nil
}

// lifetime is how long something given out is to be good.
func lifetime(ttl, normal, longest time.Duration) (time.Duration, error) {
	if ttl == 0 {
		return normal, nil
	}
	if ttl < time.Second || ttl > longest {
		return 0, sandbox.InvalidField("ttl", "%s is not accepted; 1s to %s is, or 0 for %s", ttl, longest, normal)
	}
	return ttl, nil
}

// PortAddress is where a port is shown.
type PortAddress struct {
	URL, Token string
	ExpiresAt  time.Time // of the token
	Public     bool      // it needs none
}

// PortURL says where a port is shown, with a token that is good for ttl; 0 is an
// hour.
func (s *Server) PortURL(ctx context.Context, id string, port int, ttl time.Duration) (a PortAddress, err error) {
	ctx, call, err := s.begin(ctx, "port.url", about("sandbox", id))
	if err != nil {
		return a, err
	}
	defer call.end(&err)
	if err := validPort(port); err != nil {
		return a, err
	}
	if ttl, err = lifetime(ttl, defaultPortTTL, longestPortTTL); err != nil {
		return a, err
	}
	sb, err := s.live(ctx, id)
	if err != nil {
		return a, err
	}
	if s.cfg.Ports == nil {
		return a, &sandbox.Error{Class: sandbox.Unsupported, Msg: "this server has no gateway"}
	}
	key := callerOf(ctx).key
	until := s.cfg.Clock().Add(ttl).Truncate(time.Second)
	if end := key.ExpiresAt; !end.IsZero() && end.Before(until) {
		until = end.Truncate(time.Second)
	}
	return PortAddress{URL: s.cfg.Ports.URL(sb.ID, port), Token: s.cfg.Ports.Token(sb.ID, port, key.ID, until),
		ExpiresAt: until, Public: sb.Door(port).Public}, nil
}

// SetPort says whether a port needs a token.
func (s *Server) SetPort(ctx context.Context, id string, port int, public bool) (sb sandbox.Sandbox, err error) {
	ctx, call, err := s.begin(ctx, "port.set", about("sandbox", id))
	if err != nil {
		return sb, err
	}
	defer call.end(&err)
	if err := firstError(validID("sandbox_id", id), validPort(port)); err != nil {
		return sb, err
	}
	sb, err = s.store.UpdateSandbox(ctx, id, func(sb *sandbox.Sandbox) error {
		at, have := slices.BinarySearch(sb.PublicPorts, port)
		switch {
		case public && !have && len(sb.PublicPorts) >= maxPublicPorts:
			return sandbox.InvalidField("port", "the sandbox has %d public ports; at most that many are accepted", maxPublicPorts)
		case public && !have:
			sb.PublicPorts = slices.Insert(slices.Clone(sb.PublicPorts), at, port)
		case !public && have:
			sb.PublicPorts = slices.Delete(slices.Clone(sb.PublicPorts), at, at+1)
		}
		return nil
	})
	if err != nil {
		return sb, s.explain(ctx, id, err)
	}
	call.concerns("sandbox", sb.ID)
	return s.asItIs(ctx, sb), nil
}

// WaitReady waits until something listens on a port, or a command succeeds, and
// says how long that took.
func (s *Server) WaitReady(ctx context.Context, id string, ready sandbox.Readiness) (waited time.Duration, err error) {
	ctx, call, err := s.begin(ctx, "port.wait_ready", about("sandbox", id))
	if err != nil {
		return 0, err
	}
	defer call.end(&err)
	if ready.Command != "" {
		if err := call.needs(writes("command", "processes")); err != nil {
			return 0, err
		}
	}
	if err := ready.Validate(); err != nil {
		var e *sandbox.Error
		if errors.As(err, &e) { // a template's fields begin with it, this call's do not
			c := *e
			c.Field = strings.TrimPrefix(e.Field, "ready_")
			return 0, &c
		}
		return 0, err
	}
	if ready.Command == "" && ready.Port == 0 {
		return 0, sandbox.InvalidField("port", "either a port or a command must be set")
	}
	timeout := cmp.Or(ready.Timeout, sandbox.DefaultReady)
	what := "the command did not succeed"
	if ready.Port != 0 {
		what = fmt.Sprintf("nothing listens on port %d", ready.Port)
	}
	began := time.Now()
	err = s.inside(ctx, id, func() error {
		ctx, cancel := context.WithTimeoutCause(ctx, timeout,
			&sandbox.Error{Class: sandbox.DeadlineReached, Msg: fmt.Sprintf("%s after %s", what, timeout)})
		defer cancel()
		return readiness{ready, "ready-" + sandbox.NewID(s.cfg.Rand) + "-"}.await(ctx, s.node, id, nil)
	})
	return time.Since(began), err
}

// SSHLogin is how to log into a sandbox by SSH.
type SSHLogin struct {
	Certificate, User, HostKey string
	Port                       int
	ExpiresAt                  time.Time
}

// SignSSH certifies a public key for one sandbox, for ttl; 0 is five minutes.
func (s *Server) SignSSH(ctx context.Context, id, publicKey string, ttl time.Duration) (l SSHLogin, err error) {
	ctx, call, err := s.begin(ctx, "port.sign_ssh", about("sandbox", id))
	if err != nil {
		return l, err
	}
	defer call.end(&err)
	if err := call.needs(sshParts...); err != nil {
		return l, err
	}
	if ttl, err = lifetime(ttl, defaultSSHTTL, longestSSHTTL); err != nil {
		return l, err
	}
	sb, err := s.live(ctx, id)
	if err != nil {
		return l, err
	}
	if s.cfg.SSH == nil {
		return l, (&sandbox.Error{Class: sandbox.Unsupported, Msg: "this server has no SSH"}).WithHint("'cove serve --ssh ADDRESS' turns it on")
	}
	until := s.cfg.Clock().Add(ttl).Truncate(time.Second)
	cert, err := s.cfg.SSH.Sign(sb.ID, callerOf(ctx).key.ID, publicKey, until)
	if err != nil {
		return l, err
	}
	return SSHLogin{Certificate: cert, User: sb.ID, HostKey: s.cfg.SSH.HostKey(), Port: s.cfg.SSH.Port(), ExpiresAt: until}, nil
}

// ConnectPort opens a stream to a port inside and hands it over. The sandbox is
// active while it is used; ctx ends when the caller leaves or the server stops.
// Without use it only says whether there is such a sandbox.
func (s *Server) ConnectPort(ctx context.Context, id string, port int, use func(ctx context.Context, inside net.Conn) error) (err error) {
	ctx, call, err := s.begin(ctx, "port.connect", about("id", id))
	if err != nil {
		return err
	}
	defer call.end(&err)
	if err := firstError(validID("id", id), validPort(port)); err != nil {
		return err
	}
	if _, err := s.live(ctx, id); err != nil || use == nil {
		return err
	}
	release, err := s.active(ctx, id)
	if err != nil {
		return err
	}
	defer release()
	inside, err := s.node.Dial(ctx, id, port)
	if err != nil {
		return s.explain(ctx, id, err)
	}
	defer inside.Close()
	return use(ctx, inside)
}
