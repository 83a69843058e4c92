package main

import (
	"context"
	"crypto/tls"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/cli"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/server/native"
	"github.com/cove-sandbox/cove/wire"
)

var quiet = slog.New(slog.DiscardHandler)

func TestTLSFlags(t *testing.T) {
	at := places{t.TempDir()}
	for name, c := range map[string]struct {
		cfg  cli.ServeConfig
		want sandbox.Class
	}{
		"none":             {cli.ServeConfig{Listen: "127.0.0.1:0"}, ""},
		"two ways":         {cli.ServeConfig{TLSSelf: true, TLSACME: "a.example"}, sandbox.Invalid},
		"half a pair":      {cli.ServeConfig{TLSCert: "x"}, sandbox.Invalid},
		"no such file":     {cli.ServeConfig{TLSCert: "/nosuch", TLSKey: "/nosuch"}, sandbox.Precondition},
		"a wildcard":       {cli.ServeConfig{TLSACME: "*.example.com"}, sandbox.Invalid},
		"no domain at all": {cli.ServeConfig{TLSACME: "host"}, sandbox.Invalid},
	} {
		if _, _, err := publicTLS(c.cfg, at, quiet); sandbox.ClassOf(err) != c.want {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Without an ACME server: we would answer its challenge, ask for our own domain
// only, and speak nothing below 1.3. TestACME has one.
func TestACMEWiring(t *testing.T) {
	at := places{t.TempDir()}
	cfg, host, err := publicTLS(cli.ServeConfig{TLSACME: "cove.example.com"}, at, quiet)
	if err != nil || host != "cove.example.com" || cfg.MinVersion != tls.VersionTLS13 || !slices.Contains(cfg.NextProtos, "acme-tls/1") || !slices.Contains(cfg.NextProtos, "h2") {
		t.Fatal(cfg, host, err)
	}
	for _, name := range []string{"", "evil.example.com"} {
		if _, err := cfg.GetCertificate(&tls.ClientHelloInfo{ServerName: name}); err == nil {
			t.Errorf("asks for a certificate of %q", name)
		}
	}
}

// With --tls-self a client that has the authority's file gets through, by HTTP/2
// and HTTP/1.1; one that has not, or that speaks TLS 1.2, does not.
func TestSelfTLS(t *testing.T) {
	at := places{t.TempDir()}
	cfg, _, err := publicTLS(cli.ServeConfig{TLSSelf: true, Listen: "127.0.0.1:0"}, at, quiet)
	if err != nil {
		t.Fatal(err)
	}
	protos := make(chan string, 10)
	mux := http.NewServeMux()
	mux.Handle(covev1.NewSystemHandler(infoOnly{}))
	web := native.HTTPServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { protos <- r.Proto; mux.ServeHTTP(w, r) }))
	web.TLSConfig, web.ErrorLog = cfg, slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- web.ServeTLS(ln, "", "") }()
	defer func() { _ = web.Close(); <-done }()
	url := "https://" + ln.Addr().String()

	pool, err := wire.LoadCA(filepath.Join(at.tls(), "ca.crt"))
	if err != nil {
		t.Fatal(err)
	}
	c := wire.NewClient(url, "", wire.Options{CA: pool})
	defer c.Close()
	r, err := c.System.Info(t.Context(), connect.NewRequest(&covev1.InfoRequest{}))
	if err != nil || r.Msg.Version != "tls" {
		t.Fatal(r, err)
	}
	if p := <-protos; p != "HTTP/2.0" {
		t.Error(p)
	}
	stranger := wire.NewClient(url, "", wire.Options{})
	defer stranger.Close()
	if _, err := stranger.System.Info(t.Context(), connect.NewRequest(&covev1.InfoRequest{})); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Error("without the authority:", err)
	}
	if conn, err := tls.Dial("tcp", ln.Addr().String(), &tls.Config{RootCAs: pool, MaxVersion: tls.VersionTLS12}); err == nil {
		conn.Close()
		t.Error("TLS 1.2 is spoken")
	}
	if _, err := wire.LoadCA(filepath.Join(at.tls(), "ca.key")); sandbox.ClassOf(err) != sandbox.Invalid {
		t.Error(err)
	}
}

type infoOnly struct {
	covev1.UnimplementedSystemHandler
}

func (infoOnly) Info(context.Context, *connect.Request[covev1.InfoRequest]) (*connect.Response[covev1.InfoResponse], error) {
	return connect.NewResponse(&covev1.InfoResponse{Version: "tls"}), nil
}
