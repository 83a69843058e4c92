package proxy_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/textproto"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/cove-sandbox/cove/egress/egresstest"
	"github.com/cove-sandbox/cove/egress/proxy"
	"github.com/cove-sandbox/cove/egress/recording"
	"github.com/cove-sandbox/cove/sandbox"
)

// listenPlain hands every connection at an address to serve.
func listenPlain(t *testing.T, w *egresstest.World, address string, serve func(net.Conn)) {
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
				serve(c)
			}()
		}
	}()
}

// An answer has the headers it came with and no others, whoever gives it.
func TestHeadersThatAreNotThereAreNotMadeUp(t *testing.T) {
	w := egresstest.NewWorld(t)
	answers := map[string]string{
		"/page":    "HTTP/1.1 200 OK\r\nContent-Length: 13\r\nX-A: 1\r\n\r\n<html></html>",
		"/chunked": "HTTP/1.1 404 Not Found\r\nTransfer-Encoding: chunked\r\nX-A: 2\r\n\r\nd\r\n<html></html>\r\n0\r\n\r\n",
		"/nothing": "HTTP/1.1 204 No Content\r\nX-A: 3\r\n\r\n",
		"/empty":   "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
		"/dated":   "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Type: x/y\r\nDate: Thu, 01 Jan 1970 00:00:00 GMT\r\n\r\n{}",
		"/typed":   "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Type: \r\n\r\n{}",
	}
	listenPlain(t, w, egresstest.Good+":9010", func(c net.Conn) {
		if r, err := http.ReadRequest(bufio.NewReader(c)); err == nil {
			io.WriteString(c, answers[r.URL.Path])
		}
	})
	// As far as it is told in front, of which no recording has anything.
	listenPlain(t, w, egresstest.Good+":9011", func(c net.Conn) {
		if _, err := http.ReadRequest(bufio.NewReader(c)); err == nil {
			io.WriteString(c, "HTTP/1.1 103 Early Hints\r\nLink: <x>\r\n\r\n"+answers["/page"])
		}
	})
	listenRaw(t, w, egresstest.Good+":9012", func(c net.Conn) { io.WriteString(c, answers["/page"]) })
	lib, err := recording.OpenLibrary(recording.Config{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { lib.Close() })
	rec, err := lib.Record(recording.Header{ID: "abc", Tenant: "t"})
	if err != nil {
		t.Fatal(err)
	}
	ca := newAuthority(t, "abc")
	ask := func(x *egresstest.Attacker, path string) string {
		return x.Raw(egresstest.Good+":9010", "GET "+path+" HTTP/1.1\r\nHost: good.test\r\nConnection: close\r\n\r\n")
	}
	overHTTP2 := func(x *egresstest.Attacker) string {
		res, err := x.Client(t, egresstest.Good+":9012", ca.PEM()).Get("https://good.test:9012/")
		if err != nil {
			return err.Error()
		}
		defer res.Body.Close()
		b, err := io.ReadAll(res.Body)
		return fmt.Sprint(res.Proto, " ", res.Header, " ", string(b), " ", err)
	}
	const wantHTTP2 = "HTTP/2.0 map[Content-Length:[13] X-A:[1]] <html></html> <nil>"

	live := egresstest.NewAttacker(t, w, network(t, "rules", "allow good.test"))
	recorded := egresstest.NewAttacker(t, w, network(t, "rules", "allow good.test"))
	recorded.Box.Intercept(&proxy.Interception{Authority: ca, All: true, Recording: rec.Over})
	want := map[string]string{}
	for path, answer := range answers {
		got := ask(live, path)
		want[path] = got
		// The connection's own header aside, and the order of them.
		is, err := http.ReadResponse(bufio.NewReader(strings.NewReader(got)), nil)
		if err != nil {
			t.Fatalf("%s: %q", path, got)
		}
		was, err := http.ReadResponse(bufio.NewReader(strings.NewReader(answer)), nil)
		if err != nil {
			t.Fatal(err)
		}
		if is.Header.Del("Connection"); is.Status != was.Status || fmt.Sprint(is.Header) != fmt.Sprint(was.Header) {
			t.Errorf("%s: got %q, was %q", path, got, answer)
		}
		if again := ask(recorded, path); again != got {
			t.Errorf("%s: recorded %q, else %q", path, again, got)
		}
	}
	if got := live.Raw(egresstest.Good+":9011", "GET / HTTP/1.1\r\nHost: good.test\r\nConnection: close\r\n\r\n"); !strings.HasPrefix(got, "HTTP/1.1 103 ") || strings.Contains(got, "Date") || strings.Contains(got, "Content-Type") {
		t.Errorf("after hints: %q", got)
	}
	if got := overHTTP2(recorded); got != wantHTTP2 {
		t.Errorf("recorded over HTTP/2: %q", got)
	}
	if err := lib.Finish("abc"); err != nil {
		t.Fatal(err)
	}
	p, err := lib.Play(t.Context(), "box", "abc", recording.RulesOf(sandbox.NetworkReplay{}), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	replayed := egresstest.NewAttacker(t, w, network(t, "none"))
	replayed.Box.Intercept(&proxy.Interception{Authority: ca, All: true, Recording: p.Over, Replay: p})
	for path := range answers {
		if got := ask(replayed, path); got != want[path] {
			t.Errorf("%s: replayed %q, live %q", path, got, want[path])
		}
	}
	if got := overHTTP2(replayed); got != wantHTTP2 {
		t.Errorf("replayed over HTTP/2: %q", got)
	}
}

// Where a request ends is said in one way upstream, whatever the sandbox said.
func TestARequestLeavesWithOneLength(t *testing.T) {
	w := egresstest.NewWorld(t)
	var mu sync.Mutex
	var bodies []string
	listenPlain(t, w, egresstest.Good+":9020", func(c net.Conn) {
		for r := bufio.NewReader(c); ; {
			// By no reader that forgives: each header as it came.
			tp := textproto.NewReader(r)
			if _, err := tp.ReadLine(); err != nil {
				return
			}
			h, err := tp.ReadMIMEHeader()
			if err != nil {
				return
			}
			if lengths, codings := h["Content-Length"], h["Transfer-Encoding"]; len(lengths)+len(codings) > 1 || len(codings) == 1 && codings[0] != "chunked" {
				t.Errorf("arrived with %q and %q", lengths, codings)
			}
			var body io.Reader = strings.NewReader("")
			if len(h["Transfer-Encoding"]) > 0 {
				body = httputil.NewChunkedReader(r)
			} else if n, err := strconv.ParseInt(h.Get("Content-Length"), 10, 64); err == nil {
				body = io.LimitReader(r, n)
			}
			b, err := io.ReadAll(body)
			if err != nil {
				t.Error(err)
			}
			if len(h["Transfer-Encoding"]) > 0 {
				tp.ReadLine() // no trailers
			}
			mu.Lock()
			bodies = append(bodies, h.Get("Host")+" "+string(b))
			mu.Unlock()
			io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
		}
	})
	x := egresstest.NewAttacker(t, w, network(t, "rules", "allow good.test"))
	const smuggled = "GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n"
	const chunked = "5\r\nhello\r\n0\r\n\r\n" + smuggled
	for _, c := range []struct {
		name, head, body string
		status           string // of the first answer
		arrives          string
	}{
		{"a length and chunks", "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n", chunked, "200", "hello"},
		{"chunks and a length", "Transfer-Encoding: chunked\r\nContent-Length: 4\r\n", chunked, "200", "hello"},
		{"no length and chunks", "Content-Length: 0\r\nTransfer-Encoding: chunked\r\n", chunked, "200", "hello"},
		{"chunks twice", "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", chunked, "", ""},
		{"chunks and something else", "Transfer-Encoding: chunked, identity\r\n", chunked, "", ""},
		{"something else", "Content-Length: 5\r\nTransfer-Encoding: xchunked\r\n", "hello" + smuggled, "", ""},
		{"a space before the colon", "Content-Length: 5\r\nTransfer-Encoding : chunked\r\n", chunked, "", ""},
		{"two lengths", "Content-Length: 5\r\nContent-Length: 6\r\n", "hello" + smuggled, "", ""},
		{"a length with a sign", "Content-Length: +5\r\n", "hello" + smuggled, "", ""},
		{"a length", "Content-Length: 5\r\n", "hello" + smuggled, "200", "hello"},
	} {
		mu.Lock()
		bodies = nil
		mu.Unlock()
		got := x.Raw(egresstest.Good+":9020", "POST / HTTP/1.1\r\nHost: good.test\r\n"+c.head+"\r\n"+c.body)
		mu.Lock()
		arrived := strings.Join(bodies, " | ")
		mu.Unlock()
		want := ""
		if c.arrives != "" {
			want = "good.test " + c.arrives
		}
		if status := strings.TrimPrefix(got, "HTTP/1.1 "); arrived != want || c.status != "" && !strings.HasPrefix(status, c.status) || c.status == "" && status[0] < '4' {
			t.Errorf("%s: %q; arrived: %q", c.name, got, arrived)
		}
		if c.status == "200" && strings.Count(got, "HTTP/1.1 403") != 1 {
			t.Errorf("%s: what was in its body: %q", c.name, got)
		}
	}
}
