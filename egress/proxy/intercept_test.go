package proxy_test

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/egress/authority"
	"github.com/cove-sandbox/cove/egress/egresstest"
	"github.com/cove-sandbox/cove/egress/policy"
	"github.com/cove-sandbox/cove/egress/proxy"
)

func newAuthority(t testing.TB, id string) *authority.Authority {
	t.Helper()
	m, err := authority.New(bytes.Repeat([]byte{7}, authority.MasterSize))
	if err != nil {
		t.Fatal(err)
	}
	a, err := m.Authority(id)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// noted is a piece of the chain that marks what went through it.
type noted struct {
	name string
	next http.RoundTripper
}

func (n noted) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Add("Through", n.name)
	res, err := n.next.RoundTrip(r)
	if err == nil {
		res.Header.Add("Back", n.name)
	}
	return res, err
}

func note(name string) func(http.RoundTripper) http.RoundTripper {
	return func(next http.RoundTripper) http.RoundTripper { return noted{name, next} }
}

func names(of ...string) func(string) bool {
	return func(name string) bool {
		for _, n := range of {
			if n == name {
				return true
			}
		}
		return false
	}
}

// api tells what it was asked.
var api = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
	switch r.URL.Path {
	case "/stream": // each line when the one before was read and answered
		w.WriteHeader(200)
		http.NewResponseController(w).EnableFullDuplex()
		in := bufio.NewReader(r.Body)
		for {
			line, err := in.ReadString('\n')
			if err != nil {
				return
			}
			io.WriteString(w, "got "+line)
			w.(http.Flusher).Flush()
		}
	case "/upgrade":
		c, buf, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer c.Close()
		io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		for {
			line, err := buf.ReadString('\n')
			if err != nil {
				return
			}
			io.WriteString(c, "up "+line)
		}
	default:
		w.Header().Set("Alt-Svc", `h3=":443"`)
		fmt.Fprintf(w, "%s %s %s through %s", r.Proto, r.Host, r.URL.RequestURI(), r.Header["Through"])
	}
})

const apiPort = ":8443"

func TestInterception(t *testing.T) {
	w := egresstest.NewWorld(t)
	for _, a := range []string{egresstest.Good, egresstest.Other, egresstest.Evil} {
		w.HTTPS(t, a+apiPort, api)
	}
	ca := newAuthority(t, "abc")
	x := egresstest.NewAttacker(t, w, network(t, "rules", "allow good.test", "allow other.test", "allow rebind.good.test"))
	x.Box.Intercept(&proxy.Interception{Authority: ca, Names: names("good.test", "rebind.good.test"), Recording: note("recording"), Secrets: note("secrets")})
	client := x.Client(t, egresstest.Good+apiPort, ca.PEM())
	get := func(c *http.Client, url, host string) string {
		r, err := http.NewRequest("GET", url, nil)
		if err != nil {
			t.Fatal(err)
		}
		if host != "" {
			r.Host = host
		}
		res, err := c.Do(r)
		if err != nil {
			return "error: " + err.Error()
		}
		defer res.Body.Close()
		b, err := io.ReadAll(res.Body)
		if err != nil {
			return "error: " + err.Error()
		}
		if m := res.Header.Get("Cove-Egress"); m != "" {
			return fmt.Sprint(res.StatusCode, " ", m, " ", string(b))
		}
		return string(b) + fmt.Sprint(" back ", res.Header["Back"]) + res.Header.Get("Alt-Svc")
	}
	https := "https://good.test" + apiPort

	t.Run("HTTP/2, through the chain in its order", func(t *testing.T) {
		want := "HTTP/2.0 good.test:8443 /a;b?c=%20;d through [recording secrets] back [secrets recording]"
		if got := get(client, https+"/a;b?c=%20;d", ""); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	})
	t.Run("HTTP/1.1", func(t *testing.T) {
		tr := client.Transport.(*http.Transport).Clone()
		tr.ForceAttemptHTTP2 = false
		tr.TLSNextProto = map[string]func(string, *tls.Conn) http.RoundTripper{}
		tr.TLSClientConfig.NextProtos = nil
		defer tr.CloseIdleConnections()
		// Upstream it is HTTP/2 all the same.
		if got := get(&http.Client{Transport: tr}, https+"/", ""); !strings.HasPrefix(got, "HTTP/2.0 good.test:8443 /") {
			t.Errorf("got %q", got)
		}
	})
	t.Run("at an address of its choice it still reaches the name", func(t *testing.T) {
		w.Hits()
		if got := get(x.Client(t, egresstest.Evil+apiPort, ca.PEM()), https+"/", ""); !strings.HasPrefix(got, "HTTP/2.0 good.test") {
			t.Errorf("got %q", got)
		}
	})
	t.Run("a sandbox that does not trust the authority is not served", func(t *testing.T) {
		if got := get(x.Client(t, egresstest.Good+apiPort, newAuthority(t, "other").PEM()), https+"/", ""); !strings.Contains(got, "certificate") {
			t.Errorf("got %q", got)
		}
	})
	t.Run("other names pass as they are", func(t *testing.T) {
		if got := x.HTTPS(egresstest.Other+apiPort, "other.test", "other.test"); got != "HTTP/1.1 other.test / through []" {
			t.Errorf("got %q", got)
		}
	})
	t.Run("another host inside is decided on its own", func(t *testing.T) {
		if got := get(client, https+"/", "other.test"); !strings.HasPrefix(got, "HTTP/2.0 other.test / through [recording secrets]") {
			t.Errorf("allowed: %q", got)
		}
		w.Hits()
		for _, host := range []string{"evil.test", "rebind.good.test", egresstest.Evil, egresstest.Metadata, "[2001:db8::66]:443"} {
			if got := get(client, https+"/", host); !strings.HasPrefix(got, "403 denied") {
				t.Errorf("%s: %q", host, got)
			}
		}
		if reached, _ := w.Hits(); len(reached) > 0 {
			t.Errorf("reached %q", reached)
		}
	})
}

func TestStreamsThroughInterception(t *testing.T) {
	w := egresstest.NewWorld(t)
	w.HTTPS(t, egresstest.Good+apiPort, api)
	ca := newAuthority(t, "abc")
	x := egresstest.NewAttacker(t, w, network(t, "public"))
	x.Box.Intercept(&proxy.Interception{Authority: ca, Names: names("good.test")})
	client := x.Client(t, egresstest.Good+apiPort, ca.PEM())
	t.Run("both ways at once", func(t *testing.T) {
		r, in := io.Pipe()
		req, _ := http.NewRequest("POST", "https://good.test"+apiPort+"/stream", r)
		go io.WriteString(in, "0\n")
		res, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		out := bufio.NewReader(res.Body)
		for i := range 5 {
			if line, err := out.ReadString('\n'); line != fmt.Sprintf("got %d\n", i) {
				t.Fatalf("%q %v", line, err)
			}
			fmt.Fprintf(in, "%d\n", i+1)
		}
		in.Close()
	})
	t.Run("an upgrade", func(t *testing.T) {
		c, err := x.Dial("tcp", egresstest.Good+apiPort)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		roots := x509.NewCertPool()
		roots.AppendCertsFromPEM(ca.PEM())
		tc := tls.Client(c, &tls.Config{ServerName: "good.test", RootCAs: roots})
		fmt.Fprint(tc, "GET /upgrade HTTP/1.1\r\nHost: good.test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		r := bufio.NewReader(tc)
		res, err := http.ReadResponse(r, nil)
		if err != nil || res.StatusCode != 101 {
			t.Fatalf("%v %v", res, err)
		}
		for i := range 3 {
			fmt.Fprintf(tc, "%d\n", i)
			if line, err := r.ReadString('\n'); line != fmt.Sprintf("up %d\n", i) {
				t.Fatalf("%q %v", line, err)
			}
		}
		// A policy that denies it ends it.
		p, err := policy.Compile(network(t, "public", "deny good.test"))
		if err != nil {
			t.Fatal(err)
		}
		x.Box.Set(p, 2)
		if line, err := r.ReadString('\n'); err == nil {
			t.Errorf("goes on with %q", line)
		}
	})
}

// Without rules by domain nothing had to be read of a connection; with an
// interception it is, and what is none of its business passes as before.
func TestInterceptionUnderPublic(t *testing.T) {
	w := egresstest.NewWorld(t)
	ca := newAuthority(t, "abc")
	x := egresstest.NewAttacker(t, w, network(t, "public"))
	open, err := x.Dial("tcp", egresstest.Good+":443")
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()
	before := tls.Client(open, &tls.Config{ServerName: "good.test", RootCAs: w.CA})
	x.Ask("udp", "10.200.0.1", "good.test", 1) // by which the flow has its name
	second, err := x.Dial("tcp", egresstest.Good+":443")
	if err != nil {
		t.Fatal(err)
	}
	defer second.Close()
	for _, c := range []*tls.Conn{before, tls.Client(second, &tls.Config{ServerName: "good.test", RootCAs: w.CA})} {
		if err := c.Handshake(); err != nil {
			t.Fatal(err)
		}
	}
	x.Box.Intercept(&proxy.Interception{Authority: ca, Names: names("good.test"), Secrets: note("secrets")})
	if _, err := second.Read(make([]byte, 1)); err == nil {
		t.Error("a connection that would be intercepted goes on as it is")
	}
	for _, c := range []struct{ what, got, want string }{
		{"a server that speaks first", x.Line(egresstest.Good + ":22"), "hello from " + egresstest.Good + "\n"},
		{"a made-up host", x.HTTP(egresstest.Evil+":80", "made.up"), "made.up at " + egresstest.Evil},
		{"a covered host at another's address", x.HTTP(egresstest.Evil+":80", "good.test"), "good.test at " + egresstest.Good},
		{"no name", x.HTTPS(egresstest.Evil+":443", "", "evil.test"), "evil.test at " + egresstest.Evil},
		{"something else", x.Raw(egresstest.Good+":22", "\x00\x01"), "hello from " + egresstest.Good + "\n\x00\x01"},
	} {
		if c.got != c.want {
			t.Errorf("%s: got %q, want %q", c.what, c.got, c.want)
		}
	}
}

// While it is not known what to look into nothing passes; when it is, what
// waited goes on.
func TestAPendingInterceptionHoldsConnections(t *testing.T) {
	w := egresstest.NewWorld(t)
	ca := newAuthority(t, "abc")
	x := egresstest.NewAttacker(t, w, network(t, "public"))
	x.Box.Intercept(&proxy.Interception{Pending: true})
	var wg sync.WaitGroup
	results := make(chan string, 2)
	wg.Go(func() { results <- x.HTTP(egresstest.Good+":80", "good.test") })
	wg.Go(func() { results <- x.HTTPS(egresstest.Other+":443", "other.test", "other.test") })
	select {
	case got := <-results:
		t.Errorf("passed with %q", got)
	case <-time.After(300 * time.Millisecond):
	}
	if reached, _ := w.Hits(); len(reached) > 0 {
		t.Errorf("reached %q", reached)
	}
	x.Box.Intercept(&proxy.Interception{Authority: ca, Names: names("good.test")})
	wg.Wait()
	for range 2 {
		if got := <-results; !strings.Contains(got, " at ") {
			t.Errorf("got %q", got)
		}
	}
}

// Clients that are slow, speak something else, or send more than anybody needs.
func TestHostileClientsOfInterception(t *testing.T) {
	w := egresstest.NewWorld(t)
	w.HTTPS(t, egresstest.Good+apiPort, api)
	ca := newAuthority(t, "abc")
	x := egresstest.NewAttacker(t, w, network(t, "rules", "allow good.test"))
	x.Box.Intercept(&proxy.Interception{Authority: ca, Names: names("good.test")})
	send := func(text string) string {
		c, err := x.Dial("tcp", egresstest.Good+apiPort)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		roots := x509.NewCertPool()
		roots.AppendCertsFromPEM(ca.PEM())
		tc := tls.Client(c, &tls.Config{ServerName: "good.test", RootCAs: roots})
		go func() {
			io.WriteString(tc, text)
			tc.CloseWrite()
		}()
		b, _ := io.ReadAll(tc)
		line, _, _ := strings.Cut(string(b), "\r\n")
		return line
	}
	for _, c := range []struct{ name, text, want string }{
		{"a header without end", "GET / HTTP/1.1\r\nHost: good.test\r\nX: " + strings.Repeat("x", 1<<20), "HTTP/1.1 431 Request Header Fields Too Large"},
		{"two lengths", "POST / HTTP/1.1\r\nHost: good.test\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx", "HTTP/1.1 400 Bad Request"},
		{"a tunnel", "CONNECT good.test:443 HTTP/1.1\r\nHost: good.test\r\n\r\n", "HTTP/1.1 403 Forbidden"},
		{"a whole URL", "GET http://evil.test/ HTTP/1.1\r\nHost: good.test\r\n\r\n", "HTTP/1.1 403 Forbidden"},
		{"no host", "GET / HTTP/1.0\r\n\r\n", "HTTP/1.0 403 Forbidden"},
		{"not HTTP", "\x00\x01\x02\x03\r\n\r\n", "HTTP/1.1 400 Bad Request"},
		{"well-behaved", "GET / HTTP/1.1\r\nHost: good.test\r\nConnection: close\r\n\r\n", "HTTP/1.1 200 OK"},
	} {
		if got := send(c.text); got != c.want {
			t.Errorf("%s: got %q, want %q", c.name, got, c.want)
		}
	}
}

// listenRaw answers every TLS connection at an address with what answer says.
func listenRaw(t *testing.T, w *egresstest.World, address string, answer func(net.Conn)) {
	t.Helper()
	l, err := w.Listen(address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				tc := w.TLS(c)
				if _, err := http.ReadRequest(bufio.NewReader(tc)); err == nil {
					answer(tc)
					tc.CloseWrite()
				}
			}()
		}
	}()
}

func TestHostileServersOfInterception(t *testing.T) {
	w := egresstest.NewWorld(t)
	ca := newAuthority(t, "abc")
	x := egresstest.NewAttacker(t, w, network(t, "rules", "allow good.test", "allow wrong.test"))
	x.Box.Intercept(&proxy.Interception{Authority: ca, Names: names("good.test", "wrong.test")})
	w.Name("wrong.test", egresstest.Good) // for which the world has no certificate
	get := func(name, address string) (int, string) {
		res, err := x.Client(t, address, ca.PEM()).Get("https://" + name + "/")
		if err != nil {
			return 0, err.Error()
		}
		defer res.Body.Close()
		b, err := io.ReadAll(res.Body)
		if err != nil {
			return res.StatusCode, "broken"
		}
		return res.StatusCode, string(b)
	}
	listenRaw(t, w, egresstest.Good+":9001", func(c net.Conn) {
		io.WriteString(c, "HTTP/1.1 200 OK\r\nX: ")
		for range 2000 {
			if _, err := io.WriteString(c, strings.Repeat("x", 1024)); err != nil {
				return
			}
		}
	})
	listenRaw(t, w, egresstest.Good+":9002", func(c net.Conn) { io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort") })
	listenRaw(t, w, egresstest.Good+":9003", func(c net.Conn) { io.WriteString(c, "nonsense\r\n\r\n") })
	for _, c := range []struct {
		what, name, port string
		status           int
		body             string
	}{
		{"a header without end", "good.test", "9001", 502, "cove: "},
		{"an answer that stops", "good.test", "9002", 200, "broken"},
		{"not HTTP", "good.test", "9003", 502, "cove: "},
		{"another's certificate", "wrong.test", "443", 502, "cove: "},
	} {
		status, body := get(c.name, egresstest.Good+":"+c.port)
		if status != c.status || !strings.HasPrefix(body, c.body) {
			t.Errorf("%s: %d %q", c.what, status, body)
		}
	}
}
