package secret_test

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/cove-sandbox/cove/egress/authority"
	"github.com/cove-sandbox/cove/egress/egresstest"
	"github.com/cove-sandbox/cove/egress/policy"
	"github.com/cove-sandbox/cove/egress/proxy"
	"github.com/cove-sandbox/cove/egress/secret"
	"github.com/cove-sandbox/cove/sandbox"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	value       = "sk-live-fedcba9876543210"
	placeholder = "cove-secret-api-0123456789abcdef"
	port        = ":8443"
)

// echo is a server that gives back what it got, in every way there is.
type echo struct {
	mu   sync.Mutex
	seen []string
	kept string // the key it was sent last
}

func (e *echo) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	key := r.Header.Get("X-Key")
	e.mu.Lock()
	e.seen = append(e.seen, r.Host+" "+key)
	if key != "" {
		e.kept = key
	}
	kept := e.kept
	e.mu.Unlock()
	w.Header().Set("X-Echo", key)
	switch r.URL.Path {
	case "/redirect":
		http.Redirect(w, r, "https://other.test"+port+"/?k="+key, http.StatusFound)
	case "/events": // of which each is half of the value
		w.Header().Set("Content-Type", "text/event-stream")
		for _, half := range []string{"data: " + key[:10], key[10:] + "\n\n", "data: end\n\n"} {
			io.WriteString(w, half)
			w.(http.Flusher).Flush()
		}
	case "/early":
		w.Header().Set("Link", key)
		w.WriteHeader(http.StatusEarlyHints)
		w.WriteHeader(200)
	case "/gzip":
		w.Header().Set("Content-Encoding", "gzip")
		z := gzip.NewWriter(w)
		fmt.Fprintf(z, "packed %s", key)
		z.Close()
	case "/br":
		w.Header().Set("Content-Encoding", "br")
		io.WriteString(w, key)
	case "/part":
		w.WriteHeader(http.StatusPartialContent)
		io.WriteString(w, key[:6])
	case "/trailer":
		w.Header().Set("Trailer", "X-Trailer")
		io.WriteString(w, "body")
		w.(http.Flusher).Flush()
		w.Header().Set("X-Trailer", key)
	case "/socket":
		c, buf, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer c.Close()
		io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		line, _ := buf.ReadString('\n')
		io.WriteString(c, line+key+"\n")
	default:
		b, _ := io.ReadAll(r.Body)
		fmt.Fprintf(w, "%s %s %s", r.Host, key, b)
		if r.TLS == nil {
			fmt.Fprintf(w, " kept %s", kept)
		}
	}
}

func (e *echo) last() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.seen) == 0 {
		return ""
	}
	s := e.seen[len(e.seen)-1]
	e.seen = nil
	return s
}

// A sandbox behind a Box, in front of the world: values reach the host they are
// bound to and no other, and never come back.
func TestSecretsInTheWorld(t *testing.T) {
	w := egresstest.NewWorld(t)
	site := &echo{}
	for _, a := range []string{egresstest.Good, egresstest.Other, egresstest.Evil} {
		w.HTTPS(t, a+port, site)
	}
	m, err := authority.New(bytes.Repeat([]byte{1}, authority.MasterSize))
	if err != nil {
		t.Fatal(err)
	}
	ca, err := m.Authority("abc")
	if err != nil {
		t.Fatal(err)
	}
	is := sandbox.Secret{Name: "api", Hosts: []string{"good.test"}, Header: "X-Key", Body: true, Placeholder: placeholder, Value: sandbox.NewSecretValue(value)}
	use := func(x *egresstest.Attacker, is sandbox.Secret) {
		t.Helper()
		set, err := secret.Compile([]sandbox.Secret{is})
		if err != nil {
			t.Fatal(err)
		}
		x.Box.Intercept(&proxy.Interception{Authority: ca, Names: set.Covers, Secrets: set.Wrap})
	}
	network := func(rules ...string) sandbox.Network {
		n := sandbox.Network{Mode: sandbox.NetworkRules}
		for _, l := range rules {
			r, err := policy.ParseRule(l)
			if err != nil {
				t.Fatal(err)
			}
			n.Rules = append(n.Rules, r)
		}
		return n
	}
	x := egresstest.NewAttacker(t, w, network("allow good.test", "allow other.test"))
	use(x, is)
	h2 := x.Client(t, egresstest.Good+port, ca.PEM())
	get := func(c *http.Client, path, body string) (*http.Response, string) {
		t.Helper()
		r, err := http.NewRequest("POST", "https://good.test"+port+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		res, err := c.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		b, err := io.ReadAll(res.Body)
		if err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		if all := fmt.Sprint(res.Header, res.Trailer, res.Status, string(b)); strings.Contains(all, value) || strings.Contains(all, value[8:]) {
			t.Errorf("%s: the value came back: %s", path, all)
		}
		return res, string(b)
	}

	res, body := get(h2, "/", "body "+placeholder)
	if res.ProtoMajor != 2 || site.last() != "good.test:8443 "+value || body != "good.test:8443 "+placeholder+" body "+placeholder || res.Header.Get("X-Echo") != placeholder {
		t.Errorf("%s %q %v", res.Proto, body, res.Header)
	}
	if res, _ := get(h2, "/redirect", ""); res.Header.Get("Location") != "https://other.test"+port+"/?k="+placeholder {
		t.Errorf("leads to %s", res.Header.Get("Location"))
	}
	site.last()
	if got := x.HTTPS(egresstest.Other+port, "other.test", "other.test"); site.last() != "other.test " || !strings.HasPrefix(got, "other.test ") {
		t.Errorf("the next request, elsewhere: %q", got)
	}
	if _, body := get(h2, "/events", ""); body != "data: "+placeholder+"\n\ndata: end\n\n" {
		t.Errorf("events %q", body)
	}
	var early []string
	trace := &httptrace.ClientTrace{Got1xxResponse: func(code int, h textproto.MIMEHeader) error {
		early = append(early, fmt.Sprint(code, h["Link"]))
		return nil
	}}
	r, _ := http.NewRequestWithContext(httptrace.WithClientTrace(t.Context(), trace), "GET", "https://good.test"+port+"/early", nil)
	if res, err := h2.Do(r); err != nil {
		t.Fatal(err)
	} else {
		res.Body.Close()
	}
	if got := strings.Join(early, " "); got != "103 ["+placeholder+"]" {
		t.Errorf("before the answer: %q", got)
	}
	if _, body := get(h2, "/gzip", ""); body != "packed "+placeholder {
		t.Errorf("packed %q", body)
	}
	if res, body := get(h2, "/br", ""); res.StatusCode != 502 || !strings.Contains(body, "br") {
		t.Errorf("%s %q", res.Status, body)
	}
	if res, body := get(h2, "/part", ""); res.StatusCode != 502 || !strings.Contains(body, "part") {
		t.Errorf("%s %q", res.Status, body)
	}
	if res, _ := get(h2, "/trailer", ""); res.Trailer.Get("X-Trailer") != placeholder {
		t.Errorf("trailer %v", res.Trailer)
	}
	t.Run("inside the connection, another host gets nothing", func(t *testing.T) {
		r, _ := http.NewRequest("GET", "https://good.test"+port+"/", nil)
		r.Host = "other.test"
		res, err := h2.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
		if got := site.last(); got != "other.test " {
			t.Errorf("other.test got %q", got)
		}
		r.Host = "evil.test"
		if res, err = h2.Do(r); err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
		if got := site.last(); res.StatusCode != 403 || got != "" {
			t.Errorf("evil.test: %s, got %q", res.Status, got)
		}
	})
	t.Run("a socket", func(t *testing.T) {
		c, err := x.Dial("tcp", egresstest.Good+port)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		roots := x509.NewCertPool()
		roots.AppendCertsFromPEM(ca.PEM())
		tc := tls.Client(c, &tls.Config{ServerName: "good.test", RootCAs: roots})
		fmt.Fprint(tc, "GET /socket HTTP/1.1\r\nHost: good.test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		r := bufio.NewReader(tc)
		if res, err := http.ReadResponse(r, nil); err != nil || res.StatusCode != 101 {
			t.Fatalf("%v %v", res, err)
		}
		io.WriteString(tc, "said\n")
		b, _ := io.ReadAll(r)
		if string(b) != "said\n"+strings.Repeat("*", len(value))+"\n" || site.last() != "good.test "+value {
			t.Errorf("%q", b)
		}
	})
	t.Run("plain HTTP", func(t *testing.T) {
		l, err := w.Listen(egresstest.Good + ":8081")
		if err != nil {
			t.Fatal(err)
		}
		srv := &http.Server{Handler: site}
		go srv.Serve(l)
		t.Cleanup(func() { srv.Close() })
		// An address that the sandbox may reach, and that is not the name's.
		evil, err := w.Listen(egresstest.Evil + ":8081")
		if err != nil {
			t.Fatal(err)
		}
		bad := &http.Server{Handler: site}
		go bad.Serve(evil)
		t.Cleanup(func() { bad.Close() })
		got := x.HTTP(egresstest.Good+":8081", "good.test")
		if site.last() != "good.test " || strings.Contains(got, value) || !strings.Contains(got, "kept "+placeholder) {
			t.Errorf("in the clear: %q", got)
		}
		open := is
		open.AllowHTTP = true
		use(x, open)
		if got := x.HTTP(egresstest.Good+":8081", "good.test"); strings.Contains(got, value) || site.last() != "good.test "+value {
			t.Errorf("in the clear, which is allowed: %q", got)
		}
		p, err := policy.Compile(network("allow good.test", "allow 203.0.113.0/24"))
		if err != nil {
			t.Fatal(err)
		}
		x.Box.Set(p, 2)
		bad.Close()
		if got := x.HTTP(egresstest.Evil+":8081", "good.test"); !strings.HasPrefix(got, "good.test") {
			t.Errorf("at an address of its own choice: %q", got)
		}
	})
	t.Run("another value", func(t *testing.T) {
		next := is
		next.Value = sandbox.NewSecretValue("sk-next-0123456789abcdef")
		use(x, next)
		get(h2, "/", "")
		if got := site.last(); got != "good.test:8443 sk-next-0123456789abcdef" {
			t.Errorf("on a connection that was open: %q", got)
		}
	})
}
