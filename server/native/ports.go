package native

import (
	"context"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/server"
	"github.com/cove-sandbox/cove/wire"
)

type ports struct{ *server.Server }

func (s ports) Url(ctx context.Context, r *connect.Request[covev1.PortUrlRequest]) (*connect.Response[covev1.PortUrlResponse], error) {
	ttl, err := wire.DurationFrom("ttl", r.Msg.Ttl)
	if err != nil {
		return nil, err
	}
	a, err := s.PortURL(ctx, r.Msg.SandboxId, int(r.Msg.Port), ttl)
	return answer(&covev1.PortUrlResponse{Url: a.URL, Token: a.Token, ExpiresAt: wire.Time(a.ExpiresAt), Public: a.Public}, err)
}

func (s ports) Set(ctx context.Context, r *connect.Request[covev1.SetPortRequest]) (*connect.Response[covev1.SetPortResponse], error) {
	sb, err := s.SetPort(ctx, r.Msg.SandboxId, int(r.Msg.Port), r.Msg.Public)
	return answer(&covev1.SetPortResponse{Sandbox: wire.Sandbox(sb)}, err)
}

func (s ports) WaitReady(ctx context.Context, r *connect.Request[covev1.WaitReadyRequest]) (*connect.Response[covev1.WaitReadyResponse], error) {
	timeout, err := wire.DurationFrom("timeout", r.Msg.Timeout)
	if err != nil {
		return nil, err
	}
	waited, err := s.Server.WaitReady(ctx, r.Msg.SandboxId, sandbox.Readiness{Command: r.Msg.Command, Port: int(r.Msg.Port), Timeout: timeout})
	return answer(&covev1.WaitReadyResponse{Waited: durationpb.New(waited)}, err)
}

func (s ports) SignSsh(ctx context.Context, r *connect.Request[covev1.SignSshRequest]) (*connect.Response[covev1.SignSshResponse], error) {
	ttl, err := wire.DurationFrom("ttl", r.Msg.Ttl)
	if err != nil {
		return nil, err
	}
	l, err := s.SignSSH(ctx, r.Msg.SandboxId, r.Msg.PublicKey, ttl)
	return answer(&covev1.SignSshResponse{Certificate: l.Certificate, User: l.User, HostKey: l.HostKey, Port: int32(l.Port), ExpiresAt: wire.Time(l.ExpiresAt)}, err)
}

// tcpProtocol is what a connection to a port is upgraded to: bytes.
const tcpProtocol = "cove-tcp"

// connectPort is GET /v1/sandboxes/{id}/connect?port=P: after its 101 the
// connection is the stream, each half of it closed by its own side.
func (d *dialect) connectPort(w http.ResponseWriter, r *http.Request) error {
	port, err := strconv.ParseInt(r.URL.Query().Get("port"), 10, 32)
	if err != nil {
		return sandbox.InvalidField("port", "%.20q is no TCP port; 1 to 65535 are accepted", r.URL.Query().Get("port"))
	}
	if r.ProtoMajor != 1 || !strings.EqualFold(r.Header.Get("Upgrade"), tcpProtocol) {
		if err := d.server.ConnectPort(r.Context(), r.PathValue("id"), int(port), nil); err != nil {
			return err
		}
		return sandbox.InvalidField("upgrade", "the request must be HTTP/1.1 with Connection: Upgrade and Upgrade: %s", tcpProtocol)
	}
	return d.server.ConnectPort(r.Context(), r.PathValue("id"), int(port), func(ctx context.Context, inside net.Conn) error {
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
	})
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
