package main

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/cove-sandbox/cove/cli"
	"github.com/cove-sandbox/cove/internal/testport"
	"github.com/cove-sandbox/cove/pki"
)

// acmeServer is Pebble, Let's Encrypt's own server for tests: it checks the
// challenge at tlsPort of whatever a name says, and every name says 127.0.0.1.
func acmeServer(t *testing.T, tlsPort int) (directory, ca string, roots *x509.CertPool) {
	t.Helper()
	bin, err := filepath.Abs("../../.cache/tools/pebble")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(bin); err != nil {
		t.Fatalf("%v: 'make .cache/tools/pebble' installs it", err)
	}
	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	names := &dns.Server{PacketConn: pc, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		m := new(dns.Msg).SetReply(q)
		if q.Question[0].Qtype == dns.TypeA {
			m.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 1}, A: net.IPv4(127, 0, 0, 1)}}
		}
		_ = w.WriteMsg(m)
	})}
	go func() { _ = names.ActivateAndServe() }()
	t.Cleanup(func() { _ = names.Shutdown() })

	dir := t.TempDir()
	own, err := pki.Open(filepath.Join(dir, "ca"), nil)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := own.Issue(pki.Server, "pebble", "127.0.0.1")
	if err != nil {
		t.Fatal(err)
	}
	key, err := x509.MarshalPKCS8PrivateKey(cert.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	chain := &bytes.Buffer{}
	for _, der := range cert.Certificate {
		_ = pem.Encode(chain, &pem.Block{Type: "CERTIFICATE", Bytes: der})
	}
	api, management := testport.Free(t, "127.0.0.1"), testport.Free(t, "127.0.0.1")
	conf, err := json.Marshal(map[string]any{"pebble": map[string]any{
		"listenAddress": fmt.Sprint("127.0.0.1:", api), "managementListenAddress": fmt.Sprint("127.0.0.1:", management),
		"certificate": filepath.Join(dir, "crt"), "privateKey": filepath.Join(dir, "key"),
		"httpPort": testport.Free(t, "127.0.0.1"), "tlsPort": tlsPort, "ocspResponderURL": "", "externalAccountBindingRequired": false}})
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string][]byte{"crt": chain.Bytes(), "key": pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key}), "conf": conf} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var log bytes.Buffer
	cmd := exec.Command(bin, "-config", filepath.Join(dir, "conf"), "-dnsserver", pc.LocalAddr().String())
	cmd.Env = append(os.Environ(), "PEBBLE_VA_NOSLEEP=1", "PEBBLE_WFE_NONCEREJECT=0")
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("pebble: %s", log.Bytes())
		}
	})
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: own.Pool()}}}
	get := func(url string) []byte { // it takes a moment to listen
		for until := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) {
			if r, err := client.Get(url); err == nil {
				b, err := io.ReadAll(r.Body)
				r.Body.Close()
				if err == nil && r.StatusCode == http.StatusOK {
					return b
				}
			}
			if time.Now().After(until) {
				t.Fatalf("pebble does not answer: %s", log.Bytes())
			}
		}
	}
	directory = fmt.Sprintf("https://127.0.0.1:%d/dir", api)
	get(directory)
	roots = x509.NewCertPool()
	if !roots.AppendCertsFromPEM(get(fmt.Sprintf("https://127.0.0.1:%d/roots/0", management))) {
		t.Fatal("pebble has no root")
	}
	return directory, own.CertFile(), roots
}

// The first client of our domain makes the server get a certificate; the next
// server has it from the data directory, the ACME server being gone or not. For
// another name none is asked for.
func TestACME(t *testing.T) {
	at := places{t.TempDir()}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	directory, ca, roots := acmeServer(t, ln.Addr().(*net.TCPAddr).Port)
	conf := cli.ServeConfig{TLSACME: "cove.example.com", TLSACMEFrom: directory, TLSACMECA: ca}
	serve := func(ln net.Listener) (stop func()) {
		cfg, _, err := publicTLS(conf, at, quiet)
		if err != nil {
			t.Fatal(err)
		}
		web := &http.Server{TLSConfig: cfg, Handler: http.NotFoundHandler()}
		done := make(chan error, 1)
		go func() { done <- web.ServeTLS(ln, "", "") }()
		return func() { _ = web.Close(); <-done }
	}
	dial := func(addr, name string) (*x509.Certificate, error) {
		c, err := tls.DialWithDialer(&net.Dialer{Timeout: time.Minute}, "tcp", addr, &tls.Config{ServerName: name, RootCAs: roots})
		if err != nil {
			return nil, err
		}
		defer c.Close()
		return c.ConnectionState().PeerCertificates[0], nil
	}
	stop := serve(ln)
	first, err := dial(ln.Addr().String(), "cove.example.com")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := dial(ln.Addr().String(), "evil.example.com"); err == nil {
		t.Error("a certificate for another name")
	}
	stop()

	conf.TLSACMEFrom = "https://127.0.0.1:1/gone"
	again, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer serve(again)()
	second, err := dial(again.Addr().String(), "cove.example.com")
	if err != nil || !first.Equal(second) {
		t.Errorf("after a restart: %v", err)
	}
}
