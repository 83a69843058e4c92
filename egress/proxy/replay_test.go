package proxy_test

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/miekg/dns"

	"github.com/cove-sandbox/cove/egress/egresstest"
	"github.com/cove-sandbox/cove/egress/proxy"
	"github.com/cove-sandbox/cove/egress/recording"
	"github.com/cove-sandbox/cove/sandbox"
)

// fickle never answers twice alike.
func fickle() http.Handler {
	var calls atomic.Int64
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n := calls.Add(1)
		w.Header().Set("X-Call", fmt.Sprint(n))
		switch strings.TrimPrefix(r.URL.Path, "/h2") { // which tells requests over HTTP/2 apart
		case "/echo":
			b, _ := io.ReadAll(r.Body) // HTTP/1 breaks off what answers while it reads
			fmt.Fprintf(w, "call %d: %s", n, b)
		case "/chunks":
			w.Header().Set("Trailer", "X-Sum")
			for i := range 4 {
				fmt.Fprintf(w, "data: event %d of %d\n\n", i, n)
				w.(http.Flusher).Flush()
			}
			w.Header().Set("X-Sum", fmt.Sprint(n))
		case "/grpc": // trailers that nobody announced
			io.Copy(w, r.Body)
			w.(http.Flusher).Flush()
			w.Header().Set(http.TrailerPrefix+"Grpc-Status", fmt.Sprint(n))
		case "/large":
			b := make([]byte, 3<<20)
			rand.Read(b)
			w.Write(b)
		case "/stream", "/upgrade":
			api.ServeHTTP(w, r)
		default:
			fmt.Fprintf(w, "call %d over %s: %s %s", n, r.Proto, r.Host, r.URL.RequestURI())
		}
	})
}

func TestARecordedEpisodeIsReplayedWithTheWorldGone(t *testing.T) {
	w := egresstest.NewWorld(t)
	w.HTTPS(t, egresstest.Good+apiPort, fickle())
	plain, err := w.Listen(egresstest.Good + ":8081")
	if err != nil {
		t.Fatal(err)
	}
	site := &http.Server{Handler: fickle()}
	go site.Serve(plain)
	t.Cleanup(func() { site.Close() })
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

	type client struct {
		*http.Client
		base string
	}
	clients := func(x *egresstest.Attacker) []client {
		h1 := x.Client(t, egresstest.Good+apiPort, ca.PEM())
		h1.Transport.(*http.Transport).ForceAttemptHTTP2 = false
		return []client{
			{x.Client(t, egresstest.Good+apiPort, ca.PEM()), "https://good.test" + apiPort + "/h2"}, // HTTP/2
			{h1, "https://good.test" + apiPort},
			{x.Client(t, egresstest.Good+":8081", nil), "http://good.test:8081"},
			{x.Client(t, egresstest.Good+":8081", nil), "http://" + egresstest.Good + ":8081"}, // by address
		}
	}
	do := func(c client, method, path, body string) string {
		t.Helper()
		req, err := http.NewRequest(method, c.base+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		res, err := c.Do(req)
		if err != nil {
			return "error: " + err.Error()
		}
		defer res.Body.Close()
		b, err := io.ReadAll(res.Body)
		if res.Header.Get("Cove-Egress") != "" {
			res.Header.Del("Date") // of our own answers it is when they were given
		}
		return fmt.Sprintf("%s %d %v %v %v %s", res.Proto, res.StatusCode, res.Header, res.Trailer, err, b)
	}
	episode := func(x *egresstest.Attacker) (out []string) {
		for _, c := range clients(x) {
			out = append(out, do(c, "GET", "/", ""), do(c, "GET", "/", ""), do(c, "GET", "/?a=1&b=2", ""), do(c, "POST", "/echo", "one"),
				do(c, "POST", "/echo", "two"), do(c, "GET", "/chunks", ""), do(c, "POST", "/grpc", "call"), do(c, "GET", "/large", ""), do(c, "HEAD", "/", ""), do(c, "PUT", "/echo", strings.Repeat("x", 300_000)))
		}
		// At once, over one connection of HTTP/2, where order is nobody's.
		h2 := clients(x)[0]
		answers := map[string]string{}
		var mu sync.Mutex
		var wg sync.WaitGroup
		for i := range 32 {
			wg.Go(func() {
				path := fmt.Sprintf("/at-once?i=%d", i)
				got := do(h2, "GET", path, "")
				mu.Lock()
				defer mu.Unlock()
				answers[path] = got
			})
		}
		wg.Wait()
		for _, k := range slices.Sorted(maps.Keys(answers)) {
			out = append(out, k, answers[k])
		}
		// And what the policy denied is denied again.
		return append(out, do(client{x.Client(t, egresstest.Evil+":80", nil), "http://evil.test"}, "GET", "/", ""))
	}

	x := egresstest.NewAttacker(t, w, network(t, "public", "deny "+egresstest.Evil))
	x.Box.Intercept(&proxy.Interception{Authority: ca, All: true, Recording: rec.Over, Unfound: rec.Unfound})
	want := episode(x)
	if reached, _ := w.Hits(); len(reached) > 1 {
		t.Errorf("reached %q", reached)
	}
	if !strings.Contains(want[6], "Grpc-Status:[") {
		t.Errorf("no trailer: %s", want[6])
	}
	for i, s := range want {
		if strings.HasPrefix(s, "reset") || strings.HasPrefix(s, "error") {
			t.Fatalf("%d: %.200s", i, s)
		}
	}
	// Under way both ways at once, and what is not HTTP, while it records.
	t.Run("an upgrade while recording", func(t *testing.T) {
		if got := x.Raw(egresstest.Good+":8081", "GET /upgrade HTTP/1.1\r\nHost: good.test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"); !strings.HasPrefix(got, "HTTP/1.1 101") {
			t.Errorf("%q", got)
		}
	})
	if got := x.Line(egresstest.Good + ":22"); got != "hello from "+egresstest.Good+"\n" {
		t.Errorf("a server that speaks first: %q", got)
	}
	// What could not be looked into keeps to what can; what was not there is remembered.
	if got := x.UDP(egresstest.Good+":443", "\xc0\x00\x00\x00\x01"); got != "timeout" {
		t.Errorf("QUIC: %q", got)
	}
	if got := x.UDP(egresstest.Good+":9999", "x"); got != egresstest.Good+" x" {
		t.Errorf("other UDP: %q", got)
	}
	for range 2 {
		if got := x.Ask("udp", "10.200.0.1", "nowhere.test", dns.TypeA); got != "NXDOMAIN" {
			t.Errorf("a name that is not: %q", got)
		}
	}
	if err := lib.Finish("abc"); err != nil {
		t.Fatal(err)
	}

	p, err := lib.Play(t.Context(), "box", "abc", recording.RulesOf(sandbox.NetworkReplay{}), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	y := egresstest.NewAttacker(t, w, network(t, "none"))
	y.Box.Intercept(&proxy.Interception{Authority: ca, All: true, Recording: p.Over, Replay: p})
	w.Hits()
	got := episode(y)
	if len(got) != len(want) {
		t.Fatalf("%d answers, want %d", len(got), len(want))
	}
	for i := range got {
		if got[i] != want[i] {
			t.Errorf("%d:\n got %.300s\nwant %.300s", i, got[i], want[i])
		}
	}
	if st := p.Status(); st.Missed != 0 || st.Unused != 1 { // the upgrade
		t.Errorf("%+v", st)
	}

	if got := y.Ask("udp", "10.200.0.1", "nowhere.test", dns.TypeA); got != "NXDOMAIN" {
		t.Errorf("a name that was not: %q", got)
	}
	if st := y.Box.Status(0); st.Missed != 0 || st.Denied != 0 {
		t.Errorf("%d missed, %d denied", st.Missed, st.Denied)
	}
	t.Run("misses", func(t *testing.T) {
		h2 := clients(y)[0]
		res, err := h2.Get(h2.base + "/never")
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		var miss struct{ Code, Method, URL, Hint string }
		if err := json.NewDecoder(res.Body).Decode(&miss); err != nil || res.StatusCode != 424 || res.Header.Get("Cove-Replay") != "miss" ||
			miss.Code != "replay_miss" || miss.Method != "GET" || miss.URL != "https://good.test:8443/h2/never" || !strings.Contains(miss.Hint, "the path") {
			t.Errorf("%d %v %+v %v", res.StatusCode, res.Header, miss, err)
		}
		if got := y.Raw(egresstest.Good+":8081", "GET /upgrade HTTP/1.1\r\nHost: good.test\r\nConnection: close\r\n\r\n"); !strings.Contains(got, "Cove-Replay: truncated") {
			t.Errorf("an upgrade: %q", got)
		}
		st := y.Box.Status(10)
		if st.Missed != 2 || st.Denied != 0 {
			t.Errorf("%d missed, %d denied", st.Missed, st.Denied)
		}
		if f := st.Flows[len(st.Flows)-2]; f.Reason != "replay_miss" || f.Allowed || f.Name != "good.test" {
			t.Errorf("%+v", f)
		}
	})
	t.Run("nothing else", func(t *testing.T) {
		for _, c := range []struct{ what, got, want string }{
			{"a name on the recording", y.Ask("udp", "10.200.0.1", "good.test", dns.TypeA), "NOERROR 198.18.0.1"},
			{"the same over IPv6", y.Ask("tcp", egresstest.PublicDNS, "good.test", dns.TypeAAAA), "NOERROR 2001:db8::c0e"},
			{"another kind of record", y.Ask("udp", "10.200.0.1", "good.test", dns.TypeTXT), "NOERROR"},
			{"a name that is not", y.Ask("udp", egresstest.PublicDNS, "other.test", dns.TypeA), "NXDOMAIN"},
			{"a name below one", y.Ask("udp", "10.200.0.1", "data.good.test", dns.TypeA), "NXDOMAIN"},
			{"UDP", y.UDP(egresstest.Good+":9999", "x"), "timeout"},
			{"a server that speaks first", y.Line(egresstest.Good + ":22"), "reset"},
			{"something else", y.Raw(egresstest.Good+":22", "\x00\x01"), "reset"},
			{"TLS without a name", y.HTTPS(egresstest.Good+":443", "", "good.test"), "reset"},
		} {
			if c.got != c.want {
				t.Errorf("%s: got %q, want %q", c.what, c.got, c.want)
			}
		}
	})
	if reached, asked := w.Hits(); len(reached) > 0 || len(asked) > 0 {
		t.Errorf("something left: %q, %q", reached, asked)
	}
	if used := p.Used(); len(used) != int(p.Status().Answered)+1 {
		t.Errorf("%d used, %d answered", len(used), p.Status().Answered)
	}
	var har bytes.Buffer
	if err := lib.Export(t.Context(), "abc", true, &har); err != nil || !json.Valid(har.Bytes()) {
		t.Errorf("HAR: %v", err)
	}
}
