package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/wire"
)

// PortGate is what shows ports to the outside.
type PortGate interface {
	// URL of a port: absolute, or a path below the API's own address.
	URL(id string, port int) string
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

type portService struct{ *Server }

const (
	defaultPortTTL, longestPortTTL = time.Hour, 24 * time.Hour
	defaultSSHTTL, longestSSHTTL   = 5 * time.Minute, 24 * time.Hour
	maxPublicPorts                 = 64
)

func validPort(port int32) error {
	if port < 1 || port > 65535 {
		return sandbox.InvalidField("port", "%d is no TCP port; 1 to 65535 are accepted", port)
	}
	return nil
}

// lifetime reads how long something given out is to be good.
func lifetime(d *durationpb.Duration, normal, longest time.Duration) (time.Duration, error) {
	ttl, err := wire.DurationFrom("ttl", d)
	if err != nil {
		return 0, err
	}
	if ttl == 0 {
		return normal, nil
	}
	if ttl < time.Second || ttl > longest {
		return 0, sandbox.InvalidField("ttl", "%s is not accepted; 1s to %s is, or 0 for %s", ttl, longest, normal)
	}
	return ttl, nil
}

func (s portService) Url(ctx context.Context, r *connect.Request[covev1.PortUrlRequest]) (*connect.Response[covev1.PortUrlResponse], error) {
	m := r.Msg
	if err := validPort(m.Port); err != nil {
		return nil, err
	}
	ttl, err := lifetime(m.Ttl, defaultPortTTL, longestPortTTL)
	if err != nil {
		return nil, err
	}
	sb, err := s.live(ctx, m.SandboxId)
	if err != nil {
		return nil, err
	}
	if s.cfg.Ports == nil {
		return nil, &sandbox.Error{Class: sandbox.Unsupported, Msg: "this server has no gateway"}
	}
	port := int(m.Port)
	key := callerOf(ctx).key
	until := s.cfg.Clock().Add(ttl).Truncate(time.Second)
	if end := key.ExpiresAt; !end.IsZero() && end.Before(until) {
		until = end.Truncate(time.Second)
	}
	return connect.NewResponse(&covev1.PortUrlResponse{
		Url: s.cfg.Ports.URL(sb.ID, port), Token: s.cfg.Ports.Token(sb.ID, port, key.ID, until),
		ExpiresAt: wire.Time(until), Public: slices.Contains(sb.PublicPorts, port),
	}), nil
}

func (s portService) Set(ctx context.Context, r *connect.Request[covev1.SetPortRequest]) (*connect.Response[covev1.SetPortResponse], error) {
	m := r.Msg
	if err := firstError(validID("sandbox_id", m.SandboxId), validPort(m.Port)); err != nil {
		return nil, err
	}
	port := int(m.Port)
	sb, err := s.store.UpdateSandbox(ctx, m.SandboxId, func(sb *sandbox.Sandbox) error {
		at, have := slices.BinarySearch(sb.PublicPorts, port)
		switch {
		case m.Public && !have && len(sb.PublicPorts) >= maxPublicPorts:
			return sandbox.InvalidField("port", "the sandbox has %d public ports; at most that many are accepted", maxPublicPorts)
		case m.Public && !have:
			sb.PublicPorts = slices.Insert(slices.Clone(sb.PublicPorts), at, port)
		case !m.Public && have:
			sb.PublicPorts = slices.Delete(slices.Clone(sb.PublicPorts), at, at+1)
		}
		return nil
	})
	if err != nil {
		return nil, s.explain(ctx, m.SandboxId, err)
	}
	return connect.NewResponse(&covev1.SetPortResponse{Sandbox: wire.Sandbox(s.asItIs(sb))}), nil
}

func (s portService) WaitReady(ctx context.Context, r *connect.Request[covev1.WaitReadyRequest]) (*connect.Response[covev1.WaitReadyResponse], error) {
	m := r.Msg
	timeout, err := wire.DurationFrom("timeout", m.Timeout)
	if err != nil {
		return nil, err
	}
	ready := sandbox.Readiness{Command: m.Command, Port: int(m.Port), Timeout: timeout}
	if err := ready.Validate(); err != nil {
		var e *sandbox.Error
		if errors.As(err, &e) { // a template's fields begin with it, this call's do not
			c := *e
			c.Field = strings.TrimPrefix(e.Field, "ready_")
			return nil, &c
		}
		return nil, err
	}
	if ready.Command == "" && ready.Port == 0 {
		return nil, sandbox.InvalidField("port", "either a port or a command must be set")
	}
	if timeout == 0 {
		timeout = sandbox.DefaultReady
	}
	what := "the command did not succeed"
	if ready.Port != 0 {
		what = fmt.Sprintf("nothing listens on port %d", ready.Port)
	}
	began := time.Now()
	err = s.withGuest(ctx, m.SandboxId, func(g Guest) error {
		ctx, cancel := context.WithTimeoutCause(ctx, timeout,
			&sandbox.Error{Class: sandbox.DeadlineReached, Msg: fmt.Sprintf("%s after %s", what, timeout)})
		defer cancel()
		return readiness{ready, "ready-" + sandbox.NewID(s.cfg.Rand) + "-"}.await(ctx, g, nil)
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&covev1.WaitReadyResponse{Waited: durationpb.New(time.Since(began))}), nil
}

func (s portService) SignSsh(ctx context.Context, r *connect.Request[covev1.SignSshRequest]) (*connect.Response[covev1.SignSshResponse], error) {
	ttl, err := lifetime(r.Msg.Ttl, defaultSSHTTL, longestSSHTTL)
	if err != nil {
		return nil, err
	}
	sb, err := s.live(ctx, r.Msg.SandboxId)
	if err != nil {
		return nil, err
	}
	if s.cfg.SSH == nil {
		return nil, (&sandbox.Error{Class: sandbox.Unsupported, Msg: "this server has no SSH"}).WithHint("'cove serve --ssh ADDRESS' turns it on")
	}
	until := s.cfg.Clock().Add(ttl).Truncate(time.Second)
	cert, err := s.cfg.SSH.Sign(sb.ID, callerOf(ctx).key.ID, r.Msg.PublicKey, until)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&covev1.SignSshResponse{Certificate: cert, User: sb.ID, HostKey: s.cfg.SSH.HostKey(),
		Port: int32(s.cfg.SSH.Port()), ExpiresAt: wire.Time(until)}), nil
}

// tcpProtocol is what a connection to a port is upgraded to: bytes.
const tcpProtocol = "cove-tcp"

// connectPort is GET /v1/sandboxes/{id}/connect?port=P: after its 101 the
// connection is the stream, each half of it closed by its own side.
func (s *Server) connectPort(w http.ResponseWriter, r *http.Request) error {
	port, err := strconv.ParseInt(r.URL.Query().Get("port"), 10, 32)
	if err != nil {
		return sandbox.InvalidField("port", "%.20q is no TCP port; 1 to 65535 are accepted", r.URL.Query().Get("port"))
	}
	id := r.PathValue("id")
	if err := firstError(validID("id", id), validPort(int32(port))); err != nil {
		return err
	}
	if _, err := s.live(r.Context(), id); err != nil {
		return err
	}
	if r.ProtoMajor != 1 || !strings.EqualFold(r.Header.Get("Upgrade"), tcpProtocol) {
		return sandbox.InvalidField("upgrade", "the request must be HTTP/1.1 with Connection: Upgrade and Upgrade: %s", tcpProtocol)
	}
	ctx := r.Context()
	inside, release, err := s.node.Dial(ctx, id, int(port))
	if err != nil {
		return s.explain(ctx, id, err)
	}
	defer release()
	defer inside.Close()
	client, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return sandbox.Errorf(sandbox.Unsupported, "", "this connection cannot be upgraded: %w", err)
	}
	defer client.Close()
	defer context.AfterFunc(ctx, func() { client.Close(); inside.Close() })()
	if _, err := io.WriteString(client, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: "+tcpProtocol+"\r\n\r\n"); err != nil {
		return nil // the client left
	}
	_ = client.SetDeadline(time.Time{})
	// What the client sent right behind its request is in net/http's buffer.
	early, _ := buffered.Reader.Peek(buffered.Reader.Buffered())
	join(client, io.MultiReader(strings.NewReader(string(early)), client), inside)
	return nil
}

// join copies both ways until both have ended or one has failed, which the other
// side then sees as what it is.
func join(client net.Conn, from io.Reader, inside net.Conn) {
	var wg sync.WaitGroup
	wg.Go(func() {
		if _, err := io.Copy(inside, from); err != nil || closeWrite(inside) != nil {
			client.Close() // if it is there, it gets what it was sent
			breakOff(inside)
		}
	})
	wg.Go(func() {
		if _, err := io.Copy(client, inside); err != nil || closeWrite(client) != nil {
			breakOff(client)
			breakOff(inside)
		}
	})
	wg.Wait()
}

// breakOff closes a connection so that its other end does not take it for an end
// in order.
func breakOff(c net.Conn) {
	switch c := c.(type) {
	case *net.TCPConn:
		_ = c.SetLinger(0)
	case interface{ Abort(why error) error }:
		_ = c.Abort(nil)
	}
	c.Close()
}

func closeWrite(c net.Conn) error {
	if cw, ok := c.(interface{ CloseWrite() error }); ok {
		return cw.CloseWrite()
	}
	return c.Close()
}
