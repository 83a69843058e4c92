package wire

import (
	"context"
	"crypto/x509"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

// echo is a server that knows one sandbox.
type echo struct {
	proto string
	auth  string
}

func (e *echo) Get(_ context.Context, r *connect.Request[covev1.GetSandboxRequest]) (*connect.Response[covev1.GetSandboxResponse], error) {
	e.auth = r.Header().Get("Authorization")
	if r.Msg.Id != "a" {
		return nil, ToConnect(sandbox.Errorf(sandbox.NotFound, "sandbox.get", "no sandbox %q", r.Msg.Id))
	}
	return connect.NewResponse(&covev1.GetSandboxResponse{Sandbox: &covev1.Sandbox{Id: "a"}}), nil
}

func (e *echo) Attach(_ context.Context, r *connect.Request[covev1.AttachProcessRequest], s *connect.ServerStream[covev1.ProcessEvent]) error {
	if err := s.Send(KeepAlive()); err != nil {
		return err
	}
	if r.Msg.ExecId == "broken" {
		return ToConnect(&sandbox.Error{Class: sandbox.Ended, Msg: "over"})
	}
	return nil
}

// Each service takes the one method it needs; the rest stay unimplemented.
type getSandbox struct {
	covev1.UnimplementedSandboxesHandler
	*echo
}

func (s getSandbox) Get(ctx context.Context, r *connect.Request[covev1.GetSandboxRequest]) (*connect.Response[covev1.GetSandboxResponse], error) {
	return s.echo.Get(ctx, r)
}

type attachProcess struct {
	covev1.UnimplementedProcessesHandler
	*echo
}

func (s attachProcess) Attach(ctx context.Context, r *connect.Request[covev1.AttachProcessRequest], st *connect.ServerStream[covev1.ProcessEvent]) error {
	return s.echo.Attach(ctx, r, st)
}

func serve(t *testing.T, e *echo) string {
	mux := http.NewServeMux()
	mux.Handle(covev1.NewSandboxesHandler(getSandbox{echo: e}))
	mux.Handle(covev1.NewProcessesHandler(attachProcess{echo: e}))
	mux.HandleFunc("PUT /v1/sandboxes/{id}/files", func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		if string(b) != "hello" || r.URL.Query().Get("mode") != "0755" || r.URL.Query().Get("atomic") != "true" {
			WriteError(w, r, sandbox.InvalidField("path", "got %q %s", b, r.URL.RawQuery))
			return
		}
	})
	mux.HandleFunc("GET /v1/sandboxes/{id}/files", func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, r.Header.Get("Range"))
	})
	var p http.Protocols
	p.SetHTTP1(true)
	p.SetUnencryptedHTTP2(true)
	srv := &http.Server{Protocols: &p, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		e.proto = r.Proto
		mux.ServeHTTP(w, r)
	})}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() { defer close(done); _ = srv.Serve(l) }()
	t.Cleanup(func() { _ = srv.Close(); <-done })
	return "http://" + l.Addr().String()
}

func TestClient(t *testing.T) {
	e := &echo{}
	c := NewClient(serve(t, e)+"/", "cove_k", Options{})
	defer c.Close()
	ctx := t.Context()

	r, err := c.Sandboxes.Get(ctx, connect.NewRequest(&covev1.GetSandboxRequest{Id: "a"}))
	if err != nil || r.Msg.Sandbox.Id != "a" {
		t.Fatal(r, err)
	}
	if e.auth != "Bearer cove_k" || e.proto != "HTTP/2.0" {
		t.Errorf("the server saw auth %q over %s", e.auth, e.proto)
	}
	if _, err := c.Sandboxes.Get(ctx, connect.NewRequest(&covev1.GetSandboxRequest{Id: "b"})); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("got %v", err)
	}

	for exec, want := range map[string]*sandbox.Error{"fine": nil, "broken": sandbox.ErrEnded} {
		s, err := c.Processes.Attach(ctx, connect.NewRequest(&covev1.AttachProcessRequest{ExecId: exec}))
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for s.Receive() {
			n++
		}
		if err := s.Err(); n != 1 || (want == nil) != (err == nil) || want != nil && !errors.Is(err, want) {
			t.Errorf("%s: %d events, then %v", exec, n, err)
		}
		_ = s.Close()
	}

	if err := c.Upload(ctx, "a", "/f", strings.NewReader("hello"), -1, sandbox.WriteOptions{Mode: 0o755, Atomic: true}); err != nil {
		t.Error(err)
	}
	if err := c.Upload(ctx, "a", "/f", strings.NewReader("hell"), 4, sandbox.WriteOptions{}); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("got %v", err)
	}
	for want, rng := range map[string][2]int64{"": {}, "bytes=5-": {5, 0}, "bytes=5-14": {5, 10}, "bytes=0-0": {0, 1}} {
		body, _, err := c.Download(ctx, "a", "/f", rng[0], rng[1])
		if err != nil {
			t.Fatal(err)
		}
		if b, _ := io.ReadAll(body); string(b) != want {
			t.Errorf("range %v asks for %q", rng, b)
		}
		_ = body.Close()
	}
}

func TestNobodyListens(t *testing.T) {
	c := NewClient("http://127.0.0.1:1", "", Options{})
	_, err := c.Sandboxes.Get(t.Context(), connect.NewRequest(&covev1.GetSandboxRequest{}))
	for _, err := range []error{err, c.Upload(t.Context(), "a", "/f", strings.NewReader("x"), 1, sandbox.WriteOptions{})} {
		var e *sandbox.Error
		if !errors.As(err, &e) || e.Class != sandbox.Unavailable || !strings.Contains(e.Hint, "cove serve") {
			t.Errorf("got %v", err)
		}
	}
}

// A server that is there and not believed is not one that is not running.
func TestACertificateThatIsNotBelieved(t *testing.T) {
	srv := httptest.NewUnstartedServer(http.NotFoundHandler())
	srv.Config.ErrorLog = log.New(io.Discard, "", 0) // handshakes given up, which is the point
	srv.EnableHTTP2 = true
	srv.StartTLS()
	defer srv.Close()
	_, port, _ := net.SplitHostPort(srv.Listener.Addr().String())
	pool := x509.NewCertPool()
	pool.AddCert(srv.Certificate())
	for _, c := range []struct {
		url  string
		ca   *x509.CertPool
		hint string
	}{
		{srv.URL, nil, "COVE_CA"},
		{srv.URL, x509.NewCertPool(), "COVE_CA"},
		{"https://localhost:" + port, pool, "as its certificate does"},
		{"https://" + strings.TrimPrefix(serve(t, &echo{}), "http://"), nil, "http://"},
	} {
		cl := NewClient(c.url, "", Options{CA: c.ca})
		defer cl.Close()
		_, err := cl.System.Info(t.Context(), connect.NewRequest(&covev1.InfoRequest{}))
		for _, err := range []error{err, cl.Upload(t.Context(), "a", "/f", strings.NewReader("x"), 1, sandbox.WriteOptions{})} {
			var e *sandbox.Error
			if !errors.As(err, &e) || e.Class != sandbox.Unavailable || !strings.Contains(e.Hint, c.hint) {
				t.Errorf("%s: %v (hint %q), want a hint of %q", c.url, err, e.Hint, c.hint)
			}
		}
	}
}
