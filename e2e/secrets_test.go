package e2e

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/miekg/dns"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/cas"
	"github.com/cove-sandbox/cove/cas/local"
	"github.com/cove-sandbox/cove/e2e/world"
	"github.com/cove-sandbox/cove/sandbox"
)

// bank is a server on the internet: HTTPS with a certificate of an authority that
// only the test knows, and a resolver that has its name.
type bank struct {
	ip, port, roots, resolver string

	stop func() // ends it before the test does

	mu   sync.Mutex
	seen []string // what Authorization requests came with
}

const bankName = "api.bank.test"

func newBank(t *testing.T) *bank {
	t.Helper()
	b := &bank{ip: ownAddress(t), roots: filepath.Join(t.TempDir(), "roots.pem")}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	cert := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "bank"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature, DNSNames: []string{bankName}}
	der, err := x509.CreateCertificate(rand.Reader, cert, cert, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(b.roots, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", b.ip+":0")
	if err != nil {
		t.Fatal(err)
	}
	_, b.port, _ = net.SplitHostPort(l.Addr().String())
	srv := &http.Server{Handler: b, ErrorLog: log.New(io.Discard, "", 0), TLSConfig: &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}}
	go srv.ServeTLS(l, "", "")
	t.Cleanup(func() { srv.Close() })
	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b.resolver = pc.LocalAddr().String()
	names := &dns.Server{PacketConn: pc, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		r := new(dns.Msg)
		r.SetReply(q)
		if q.Question[0].Qtype == dns.TypeA {
			r.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 60}, A: net.ParseIP(b.ip)}}
		}
		w.WriteMsg(r)
	})}
	go names.ActivateAndServe()
	t.Cleanup(func() { names.Shutdown() })
	b.stop = func() {
		srv.Close()
		names.Shutdown()
	}
	return b
}

// ServeHTTP echoes what it should not.
func (b *bank) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	auth := r.Header.Get("Authorization")
	b.mu.Lock()
	b.seen = append(b.seen, auth)
	b.mu.Unlock()
	w.Header().Set("X-Echo", auth)
	body, _ := io.ReadAll(r.Body)
	fmt.Fprintf(w, "you are %s and said %s\n", auth, body)
}

// last is what the last request came with, and forgets it.
func (b *bank) last() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.seen) == 0 {
		return "no request"
	}
	s := b.seen[len(b.seen)-1]
	b.seen = nil
	return s
}

func (b *bank) spec() sandbox.Spec {
	s := world.Small()
	s.Secrets = []string{"bank"}
	s.Network = sandbox.Network{Mode: sandbox.NetworkRules, Rules: []sandbox.NetworkRule{
		{Action: sandbox.NetworkAllow, Domain: bankName}, {Action: sandbox.NetworkAllow, CIDR: b.ip}}} // it is the machine's own, which only an address opens
	return s
}

// The server gets the value; nothing of the sandbox, of its state or of ours has
// it anywhere.
func TestSecretsStayOutside(t *testing.T) {
	bank := newBank(t)
	w := world.New(t, world.Options{Flags: []string{"--dns", bank.resolver, "--egress-roots", bank.roots, "--log-level", "debug"}})
	value := "sk-live-" + rand.Text()
	rotated := "sk-next-" + rand.Text()
	url := "https://" + net.JoinHostPort(bankName, bank.port) + "/"
	setSecret := func(v string) {
		t.Helper()
		r := w.CLIWith(t, strings.NewReader(v+"\n"), "secret", "set", "bank", "--host", bankName, "--header", "Authorization", "--format", "Bearer {}", "--env", "BANK_KEY", "--body")
		if r.Code != 0 || !strings.HasPrefix(r.Stdout, "cove-secret-bank-") {
			t.Fatalf("%+v", r)
		}
	}
	setSecret(value)
	b := w.Create(t, bank.spec())
	placeholder := b.Must(t, "echo $BANK_KEY")
	if !strings.HasPrefix(placeholder, "cove-secret-bank-") {
		t.Fatalf("the variable holds %q", placeholder)
	}
	check := func(what string, b *world.Box, want string) {
		t.Helper()
		for program, line := range map[string]string{
			"curl":   "curl -sS -i -d \"body $BANK_KEY\" " + url,
			"python": "python3 -c 'import urllib.request as u; r = u.urlopen(u.Request(\"" + url + "\", b\"body \" + __import__(\"os\").environ[\"BANK_KEY\"].encode())); print(r.headers[\"X-Echo\"], r.read().decode())'",
		} {
			out := b.Must(t, line)
			if got := bank.last(); got != "Bearer "+want {
				t.Errorf("%s: %s sent %q", what, program, got)
			}
			if strings.Contains(out, want) || strings.Count(out, "Bearer "+placeholder) != 2 || !strings.Contains(out, "body "+placeholder) {
				t.Errorf("%s: %s received %q", what, program, out)
			}
		}
	}
	check("at first", b, value)

	// Everything that the value could be in is made while it is used.
	control := "control-" + rand.Text()
	b.Write(t, "/tmp/control", []byte(control))
	b.Must(t, "nohup sh -c 'x=$(cat /tmp/control); while :; do curl -sS -d \"$BANK_KEY $x\" "+url+" >>/tmp/answers 2>&1; sleep 0.1; done' >/dev/null 2>&1 &")
	b.Must(t, "sleep 1; test -s /tmp/answers")
	memory := b.Snapshot(t, world.Take{Kind: sandbox.MemorySnapshot})
	files := b.Snapshot(t, world.Take{Kind: sandbox.FilesystemSnapshot})
	// Searched out here: whoever looks for it inside brings it in.
	inside := b.Must(t, "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline | tr '\\0' '\\n'; env; cat /tmp/answers")
	for _, dir := range []string{"/etc", "/root", "/tmp", "/var", "/usr/local", "/run"} {
		r, err := w.Client().DownloadTar(t.Context(), b.ID, dir)
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(r)
		r.Close()
		if err != nil {
			t.Fatal(err)
		}
		inside += string(content)
	}
	if strings.Contains(inside, value) || !strings.Contains(inside, control) || !strings.Contains(inside, placeholder) {
		t.Errorf("inside, the value is there: %v, the control: %v", strings.Contains(inside, value), strings.Contains(inside, control))
	}

	kids, err := b.TryFork(t.Context(), 1, nil)
	if err != nil {
		t.Fatal(err)
	}
	check("in a fork", kids[0], value)
	kids[0].Pause(t, true)
	fromMemory, fromFiles := w.Create(t, world.From(memory.ID)), w.Create(t, world.From(files.ID))
	check("from memory", fromMemory, value)
	check("from files", fromFiles, value)
	for _, k := range []*world.Box{fromMemory, fromFiles} {
		if _, err := k.TryKill(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	check("in a fork that woke", kids[0], value)
	kids[0].Pause(t, true)
	b.Reset(t)
	check("after a reset", b, value)

	setSecret(rotated)
	check("after a rotation", b, rotated)
	w.Kill(t)
	w.Start(t)
	check("after kill -9", b, rotated)

	late := bank.spec()
	late.Secrets = nil
	c := w.Create(t, late)
	if _, err := w.Client().Sandboxes.SetSecrets(t.Context(), connect.NewRequest(&covev1.SetSecretsRequest{Id: c.ID, Secrets: []string{"bank"}})); err != nil {
		t.Fatal(err)
	}
	check("given to a running sandbox", c, rotated)

	// What we print and answer.
	said := w.CLI(t, "secret", "ls", "--json").Stdout + w.CLI(t, "inspect", b.ID).Stdout + w.CLI(t, "net", "flows", b.ID, "--json").Stdout + w.CLI(t, "audit").Stdout + w.Logs()
	bad := w.CLIWith(t, strings.NewReader(value+"\x01\n"), "secret", "set", "bank")
	if bad.Code == 0 || !strings.Contains(bad.Stderr, "control character") {
		t.Errorf("a bad value: %+v", bad)
	}
	for _, v := range []string{value, rotated} {
		if strings.Contains(said+bad.Stderr+bad.Stdout, v) {
			t.Errorf("we said %s", v[:7])
		}
	}
	look := func(what, dir string) {
		t.Helper()
		for _, v := range []string{value, rotated} {
			for _, f := range holders(t, dir, v) {
				t.Errorf("%s: %s... is in %s", what, v[:7], f)
			}
		}
	}
	look("running", w.Dir)
	w.Stop(t)
	look("stopped", w.Dir)
	// The content store packs what it keeps: unpacked, the control is there and
	// the values are not.
	found := 0
	st, err := local.Open(filepath.Join(w.Dir, "state"), local.Options{})
	if err != nil {
		t.Fatal(err)
	}
	eachBlob(t, st, func(id string, content []byte) {
		for _, v := range []string{value, rotated} {
			if bytes.Contains(content, []byte(v)) {
				t.Errorf("%s... is in blob %s", v[:7], id)
			}
		}
		if bytes.Contains(content, []byte(control)) {
			found++
		}
	})
	if found < 2 { // the memory of a process, and a file
		t.Errorf("the control was found in %d blobs: the search shows nothing", found)
	}
	if err := st.Close(); err != nil {
		t.Fatal(err)
	}
	w.Start(t)
	for _, k := range append(kids, b, c) {
		if _, err := k.TryKill(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	w.AssertNoLitter(t)
}

// eachBlob unpacks all that a content store has.
func eachBlob(t *testing.T, st *local.Store, f func(id string, content []byte)) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	err := st.List(ctx, func(i cas.Info) error {
		r, err := st.Open(ctx, i.ID)
		if err != nil {
			return err
		}
		defer r.Close()
		b, err := io.ReadAll(r)
		if err == nil {
			f(string(i.ID), b)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}
