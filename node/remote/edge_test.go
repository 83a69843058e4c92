package remote_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"net"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/node/remote"
	"github.com/cove-sandbox/cove/pki"
	"github.com/cove-sandbox/cove/sandbox"
)

// stub is a node that does what a test says; of the rest nothing is asked.
type stub struct {
	node.Node
	info   func(ctx context.Context) (node.Info, error)
	put    func(secrets []sandbox.Secret)
	ended  func(ctx context.Context) iter.Seq2[node.Ended, error]
	upload func(ctx context.Context, r io.Reader) error
}

func (s *stub) Info(ctx context.Context) (node.Info, error) { return s.info(ctx) }
func (s *stub) PutSecrets(_ context.Context, _ string, secrets []sandbox.Secret) error {
	s.put(secrets)
	return nil
}
func (s *stub) Ended(ctx context.Context) iter.Seq2[node.Ended, error] { return s.ended(ctx) }
func (s *stub) Upload(ctx context.Context, _ string, _ node.Upload, r io.Reader) error {
	return s.upload(ctx, r)
}
func (s *stub) Volumes() node.Volumes       { return node.NoVolumes{} }
func (s *stub) Recordings() node.Recordings { return node.NoRecordings{} }
func (s *stub) Images() node.Images         { return struct{ node.Images }{} }

// serve shows a node as n1.
func serve(t *testing.T, ca *pki.InstallationCA, n node.Node) (address string, stop func()) {
	t.Helper()
	own, err := ca.Renewing(pki.Node, "n1")
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := remote.Server(n, ca.MutualTLS(own, pki.Server), slog.New(slog.DiscardHandler))
	done := make(chan struct{})
	go func() { _ = srv.ServeTLS(ln, "", ""); close(done) }()
	stop = func() { _ = srv.Close(); <-done }
	t.Cleanup(stop)
	return ln.Addr().String(), stop
}

func named(context.Context) (node.Info, error) { return node.Info{Name: "n1"}, nil }

// Only a server of the installation is served, and only by the node it means.
func TestStrangersAreRefused(t *testing.T) {
	ca, own := installation(t)
	other, foreign := installation(t)
	asNode, err := ca.Renewing(pki.Node, "n2")
	if err != nil {
		t.Fatal(err)
	}
	address, _ := serve(t, ca, &stub{info: func(context.Context) (node.Info, error) {
		return node.Info{Name: "n1"}, nil
	}})
	for _, c := range []struct {
		what   string
		config remote.Config
		want   *sandbox.Error
	}{
		{"a server of it", remote.Config{Name: "n1", TLS: ca.MutualTLS(own, pki.Node)}, nil},
		{"one that means another node", remote.Config{Name: "n3", TLS: ca.MutualTLS(own, pki.Node)}, sandbox.ErrDenied},
		{"a node of it", remote.Config{Name: "n1", TLS: ca.MutualTLS(asNode, pki.Node)}, sandbox.ErrUnauthenticated},
		{"a server of another, which trusts nobody here", remote.Config{Name: "n1", TLS: other.MutualTLS(foreign, pki.Node)}, sandbox.ErrUnauthenticated},
		{"a server of another", remote.Config{Name: "n1", TLS: blind(ca, foreign)}, sandbox.ErrUnauthenticated},
		{"somebody without a certificate", remote.Config{Name: "n1", TLS: &tls.Config{InsecureSkipVerify: true}}, sandbox.ErrUnauthenticated},
	} {
		c.config.Address = address
		client := remote.Dial(c.config)
		_, err := client.Info(t.Context())
		client.Close()
		// In TLS 1.3 a client's certificate is refused after its handshake: what it
		// hears first may be the alert or the end of the connection.
		refused := c.want == sandbox.ErrUnauthenticated && errors.Is(err, sandbox.ErrUnavailable)
		if c.want == nil && err != nil || c.want != nil && !errors.Is(err, c.want) && !refused {
			t.Errorf("%s: %v", c.what, err)
		}
	}
}

// blind shows a certificate and accepts any.
func blind(_ *pki.InstallationCA, own *pki.Renewing) *tls.Config {
	c := own.ServerTLS()
	return &tls.Config{InsecureSkipVerify: true, GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return c.GetCertificate(nil) }}
}

// A handler that somebody put behind a plain listener serves nobody.
func TestAHandlerLooksWhoCalls(t *testing.T) {
	h := remote.Handler(&stub{info: named})
	var h2 http.Protocols
	h2.SetUnencryptedHTTP2(true)
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: h, Protocols: &h2}
	done := make(chan struct{})
	go func() { _ = srv.Serve(ln); close(done) }()
	defer func() { srv.Close(); <-done }()
	client := &http.Transport{Protocols: &h2}
	defer client.CloseIdleConnections()
	req, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+ln.Addr().String()+"/node/v1/Info", strings.NewReader("v\x00\x00\x00\x02[]"))
	resp, err := client.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if b, _ := io.ReadAll(resp.Body); !strings.Contains(string(b), string(sandbox.Unauthenticated)) {
		t.Errorf("%s %q", resp.Status, b)
	}
}

// The table is the contract: what has a shape that nobody can serve is a mistake
// here and not on a fleet.
func TestEveryMethodIsServed(t *testing.T) {
	served := remote.Served(&stub{})
	for prefix, contract := range map[string]reflect.Type{"": reflect.TypeFor[node.Node](), "Volumes.": reflect.TypeFor[node.Volumes](),
		"Recordings.": reflect.TypeFor[node.Recordings](), "Images.": reflect.TypeFor[node.Images]()} {
		for i := range contract.NumMethod() {
			m := contract.Method(i)
			if m.Type.NumIn() == 0 { // a collection
				continue
			}
			if name := prefix + m.Name; !slices.Contains(served, name) {
				t.Errorf("%s %v is served to nobody", name, m.Type)
			}
		}
	}
	if len(served) < 70 {
		t.Errorf("%d methods", len(served))
	}
}

// Values of secrets show themselves to no encoder but this one.
func TestSecretsCross(t *testing.T) {
	ca, own := installation(t)
	var got []sandbox.Secret
	address, _ := serve(t, ca, &stub{put: func(s []sandbox.Secret) { got = s }})
	c := dial(t, ca, own, "n1", address)
	want := sandbox.Secret{Name: "a", Hosts: []string{"h"}, Value: sandbox.NewSecretValue("\xffvalue\x00"), Placeholder: "p"}
	want.Value = sandbox.NewSecretValue("välue")
	if err := c.PutSecrets(t.Context(), "t", []sandbox.Secret{want}); err != nil {
		t.Fatal(err)
	}
	if len(got) != 1 || got[0].Value.Reveal() != "välue" || got[0].Name != "a" || got[0].Hosts[0] != "h" {
		t.Errorf("%+v", got)
	}
}

// All that callers act on is there at the other end, and the time that is left.
func TestErrorsAndDeadlinesCross(t *testing.T) {
	ca, own := installation(t)
	want := &sandbox.Error{Class: sandbox.Precondition, Reason: sandbox.PortClosed, Op: "some.op", Field: "f", Msg: "why", Hint: "do that", RetryAfter: time.Second,
		Err: fmt.Errorf("below: %w", io.ErrUnexpectedEOF)}
	var left time.Duration
	s := &stub{info: func(ctx context.Context) (node.Info, error) {
		by, ok := ctx.Deadline()
		if left = time.Until(by); !ok {
			left = 0
		}
		return node.Info{}, want
	}}
	address, _ := serve(t, ca, s)
	c := dial(t, ca, own, "n1", address)
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	_, err := c.Info(ctx)
	var e *sandbox.Error
	if !errors.As(err, &e) || !errors.Is(err, sandbox.ErrPortClosed) || e.Op != "some.op" || e.Field != "f" || e.Hint != "do that" || e.RetryAfter != time.Second ||
		e.Error() != want.Error() {
		t.Errorf("%#v", err)
	}
	if left < 59*time.Minute || left > time.Hour {
		t.Errorf("%s are left", left)
	}
	s.info = func(ctx context.Context) (node.Info, error) { return node.Info{}, errors.New("a defect") }
	if _, err := c.Info(ctx); !errors.Is(err, sandbox.ErrInternal) || !strings.Contains(err.Error(), "a defect") {
		t.Errorf("%v", err)
	}
}

// A caller that leaves ends its call on the node, whatever the shape of it.
func TestLeavingReachesTheNode(t *testing.T) {
	ca, own := installation(t)
	began, over := make(chan struct{}), make(chan error, 1)
	wait := func(ctx context.Context) {
		began <- struct{}{}
		<-ctx.Done()
		over <- ctx.Err()
	}
	s := &stub{
		info: func(ctx context.Context) (node.Info, error) { wait(ctx); return node.Info{}, ctx.Err() },
		ended: func(ctx context.Context) iter.Seq2[node.Ended, error] {
			return func(yield func(node.Ended, error) bool) {
				yield(node.Ended{ID: "one"}, nil)
				wait(ctx)
			}
		},
		upload: func(ctx context.Context, r io.Reader) error {
			began <- struct{}{}
			_, err := io.Copy(io.Discard, r)
			over <- err
			return err
		},
	}
	address, _ := serve(t, ca, s)
	c := dial(t, ca, own, "n1", address)
	pr, pw := io.Pipe()
	defer pw.Close()
	for name, call := range map[string]func(ctx context.Context) error{
		"a call": func(ctx context.Context) error { _, err := c.Info(ctx); return err },
		"a stream": func(ctx context.Context) (err error) {
			for _, err = range c.Ended(ctx) {
			}
			return err
		},
		"an upload": func(ctx context.Context) error { return c.Upload(ctx, "", node.Upload{}, pr) },
	} {
		ctx, leave := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- call(ctx) }()
		<-began
		leave()
		if err := <-done; !errors.Is(err, sandbox.ErrCanceled) {
			t.Errorf("%s: %v", name, err)
		}
		if err := <-over; err == nil {
			t.Errorf("%s: on the node it ended in order", name)
		}
	}
	// And who stops ranging.
	for range c.Ended(t.Context()) {
		break
	}
	<-began
	<-over
}

// A node that dies is unavailable, never an end of what it was telling.
func TestANodeThatDies(t *testing.T) {
	ca, own := installation(t)
	s := &stub{info: named, ended: func(ctx context.Context) iter.Seq2[node.Ended, error] {
		return func(yield func(node.Ended, error) bool) {
			yield(node.Ended{ID: "one"}, nil)
			<-ctx.Done()
		}
	}}
	address, stop := serve(t, ca, s)
	c := dial(t, ca, own, "n1", address)
	var err error
	for _, err = range c.Ended(t.Context()) {
		if err == nil {
			stop()
		}
	}
	if !errors.Is(err, sandbox.ErrUnavailable) {
		t.Errorf("amid a stream: %v", err)
	}
	if _, err := c.Info(t.Context()); !errors.Is(err, sandbox.ErrUnavailable) {
		t.Errorf("afterwards: %v", err)
	}
}

// Frames that are none end their call and nothing else.
func TestBadFrames(t *testing.T) {
	ca, own := installation(t)
	address, _ := serve(t, ca, &stub{info: named})
	cfg := ca.MutualTLS(own, pki.Node)
	cfg.NextProtos = []string{"h2"}
	var h2 http.Protocols
	h2.SetHTTP2(true)
	raw := &http.Transport{TLSClientConfig: cfg, Protocols: &h2}
	defer raw.CloseIdleConnections()
	for _, body := range []string{"", "v", "v\x00\x00\x00\x05[]", "v\xff\xff\xff\xff", "v\x00\x00\x00\x02no", "v\x00\x00\x00\x03[1]", "x\x00\x00\x00\x00", "d\x00\x00\x00\x02[]", strings.Repeat("\x00", 1<<20)} {
		for _, method := range []string{"Info", "Upload", "none", "", "../v1/Info", "Volumes.List"} {
			req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "https://"+address+"/node/v1/"+method, strings.NewReader(body))
			if err != nil {
				t.Fatal(err)
			}
			resp, err := raw.RoundTrip(req)
			if err != nil {
				t.Fatalf("%q to %s: %v", body, method, err)
			}
			b, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
			resp.Body.Close()
			if len(b) == 0 || b[0] != 'f' {
				t.Errorf("%.20q to %s: %s %.100q", body, method, resp.Status, b)
			}
		}
	}
	if _, err := dial(t, ca, own, "n1", address).Info(t.Context()); err != nil {
		t.Error(err)
	}
}
