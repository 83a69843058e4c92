package strangers

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// handlers that ran, and run.
type handlers struct{ begun, busy atomic.Int64 }

const key = "Bearer good"

// serve runs a server that knows one key, has a page for anybody (/public,
// and /public/stream that goes on), one for a token of it alone (/token), and refuses the rest: in a few bytes, which net/http holds back until the
// handler has returned, or at length (/long).
func serve(t *testing.T, l Limits) (addr string, table *Table, ran *handlers) {
	table, ran = New(l), &handlers{}
	var p http.Protocols
	p.SetHTTP1(true)
	p.SetUnencryptedHTTP2(true)
	s := &http.Server{Protocols: &p, HTTP2: &http.HTTP2Config{MaxConcurrentStreams: 100_000},
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			ran.begun.Add(1)
			ran.busy.Add(1)
			defer ran.busy.Add(-1)
			if r.Header.Get("Authorization") == key {
				Known(r.Context())
				_, _ = io.WriteString(w, "welcome")
				return
			}
			switch r.URL.Path {
			case "/token":
				LetIn(r.Context())
				_, _ = io.WriteString(w, "come in")
				return
			case "/public", "/public/stream":
				w, ok := Visit(r.Context(), w)
				if !ok {
					w.WriteHeader(http.StatusServiceUnavailable)
					return
				}
				_, _ = io.WriteString(w, "look")
				if r.URL.Path == "/public/stream" {
					_ = http.NewResponseController(w).Flush()
					<-r.Context().Done()
				}
				return
			}
			w.WriteHeader(http.StatusUnauthorized)
			n := 50
			if r.URL.Path == "/long" {
				n = 10_000
			}
			_, _ = w.Write(bytes.Repeat([]byte("no"), n))
		})}
	table.Guard(s)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(ln) }()
	t.Cleanup(func() { s.Close(); <-done })
	return ln.Addr().String(), table, ran
}

func (t *Table) count() (conns, requests int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.mu.order.Len(), t.mu.requests
}

func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for until := time.Now().Add(20 * time.Second); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			t.Fatal("not in 20 s: " + what)
		}
	}
}

// A connection that reads nothing and asks without end is cut, and none of its
// handlers stays.
func TestOneConnectionPinsNoHandlers(t *testing.T) {
	for _, refused := range []string{"/", "/long"} {
		for _, first := range []string{"/", "/public", "/public/stream", "/token"} {
			t.Run(first+" then "+refused, func(t *testing.T) { pinsNoHandlers(t, first, refused) })
		}
	}
}

// pinsNoHandlers asks for a page first, which may be anybody's.
func pinsNoHandlers(t *testing.T, first, refused string) {
	addr, table, ran := serve(t, Limits{PerConn: 100})
	c, ask := unwilling(t, addr)
	if ask(1, first) != nil {
		t.Fatal("cut at once")
	}
	eventually(t, "served", func() bool { return ran.begun.Load() == 1 })
	for id := uint32(3); id < 2_000 && table.open(); id += 2 {
		if ask(id, refused) != nil {
			break // cut: what this is about
		}
		// One after another: it is those that were answered that must count.
		eventually(t, "served or cut", func() bool { return ran.begun.Load() > int64(id)/2 || !table.open() })
	}
	_ = c.SetReadDeadline(time.Now().Add(20 * time.Second))
	if _, err := io.Copy(io.Discard, c); isTimeout(err) {
		t.Fatal("the connection is still open")
	}
	eventually(t, "no handler, no count", func() bool {
		conns, requests := table.count()
		return ran.busy.Load() == 0 && conns == 0 && requests == 0
	})
}

// unwilling is an HTTP/2 connection that takes not a byte of any answer.
func unwilling(t *testing.T, addr string) (c net.Conn, ask func(stream uint32, path string) error) {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	f := http2.NewFramer(c, nil)
	if _, err := io.WriteString(c, http2.ClientPreface); err != nil {
		t.Fatal(err)
	}
	if err := f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0}); err != nil {
		t.Fatal(err)
	}
	var head bytes.Buffer
	enc := hpack.NewEncoder(&head)
	return c, func(stream uint32, path string) error {
		head.Reset()
		for _, h := range [][2]string{{":method", "GET"}, {":scheme", "http"}, {":authority", "x"}, {":path", path}} {
			_ = enc.WriteField(hpack.HeaderField{Name: h[0], Value: h[1]})
		}
		return f.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: head.Bytes(), EndStream: true, EndHeaders: true})
	}
}

func isTimeout(err error) bool {
	ne, ok := err.(net.Error)
	return ok && ne.Timeout()
}

// Refusals that nobody reads end by themselves.
func TestRefusalsHaveTheirTime(t *testing.T) {
	addr, table, ran := serve(t, Limits{Write: 50 * time.Millisecond})
	c, ask := unwilling(t, addr)
	if err := ask(1, "/"); err != nil {
		t.Fatal(err)
	}
	f := http2.NewFramer(io.Discard, c)
	for { // the stream is reset, the connection stays
		fr, err := f.ReadFrame()
		if err != nil {
			t.Fatal(err)
		}
		if _, ok := fr.(*http2.RSTStreamFrame); ok {
			break
		}
	}
	eventually(t, "no handler", func() bool { _, n := table.count(); return ran.busy.Load() == 0 && n == 0 })
}

// Who is known is not bounded, and the newest stranger takes the oldest's place.
func TestStrangersMakeRoomForStrangers(t *testing.T) {
	addr, table, _ := serve(t, Limits{Conns: 4})
	ask := func(c net.Conn, auth string) string {
		t.Helper()
		req, _ := http.NewRequestWithContext(context.Background(), "GET", "http://"+addr+"/", nil)
		if auth != "" {
			req.Header.Set("Authorization", auth)
		}
		if err := req.Write(c); err != nil {
			t.Fatal(err)
		}
		resp, err := http.ReadResponse(bufio.NewReader(c), req)
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(resp.Body)
		return string(b)
	}
	var friends, others []net.Conn
	for range 8 {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		if got := ask(c, key); got != "welcome" {
			t.Fatal(got)
		}
		friends = append(friends, c)
	}
	for range 10 {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		ask(c, "")
		others = append(others, c)
	}
	if conns, _ := table.count(); conns != 4 {
		t.Errorf("%d strangers, want 4", conns)
	}
	_ = others[0].SetReadDeadline(time.Now().Add(20 * time.Second))
	if _, err := others[0].Read(make([]byte, 1)); err == nil || isTimeout(err) {
		t.Errorf("the first stranger is still there: %v", err)
	}
	ask(others[9], "")
	for _, c := range friends {
		if got := ask(c, key); got != "welcome" {
			t.Error(got)
		}
	}
}

// Visits are bounded in number, and those that nobody reads in time. The connection is
// a stranger's again when they have ended.
func TestVisitsAreBounded(t *testing.T) {
	addr, table, ran := serve(t, Limits{VisitsPerAddress: 3, Write: 100 * time.Millisecond})
	_, ask := unwilling(t, addr)
	for id := uint32(1); id < 200; id += 2 {
		if err := ask(id, "/public"); err != nil {
			t.Fatal(err)
		}
		if _, visits := table.visitors(); visits > 3 {
			t.Fatalf("%d visits", visits)
		}
	}
	eventually(t, "all have ended, the connection is a stranger's", func() bool {
		conns, requests := table.count()
		inside, visits := table.visitors()
		return ran.busy.Load() == 0 && conns == 1 && requests == 0 && inside == 0 && visits == 0
	})
}

// A visit that is read, and has nothing to say for longer than a write may take, goes
// on, its connection is nobody's to make room with, and others get no more of them
// than there are.
func TestAVisitGoesOn(t *testing.T) {
	addr, table, _ := serve(t, Limits{Conns: 2, Visits: 1, Write: 20 * time.Millisecond})
	for _, h2 := range []bool{false, true} {
		var p http.Protocols
		p.SetHTTP1(!h2)
		p.SetUnencryptedHTTP2(h2)
		client := &http.Client{Transport: &http.Transport{Protocols: &p}}
		t.Cleanup(client.CloseIdleConnections)
		ctx, leave := context.WithCancel(t.Context())
		get := func(ctx context.Context, path string) *http.Response {
			t.Helper()
			req, _ := http.NewRequestWithContext(ctx, "GET", "http://"+addr+path, nil)
			resp, err := client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { resp.Body.Close() })
			return resp
		}
		stream := get(ctx, "/public/stream")
		if _, err := io.ReadFull(stream.Body, make([]byte, 4)); err != nil {
			t.Fatal(err)
		}
		for range 5 { // as many strangers come as would take its place
			c, err := net.Dial("tcp", addr)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { c.Close() })
		}
		done := make(chan error, 1)
		go func() { _, err := stream.Body.Read(make([]byte, 1)); done <- err }()
		select {
		case err := <-done:
			t.Fatalf("HTTP/2 %v: ended: %v", h2, err)
		case <-time.After(200 * time.Millisecond): // ten times what a write may take
		}
		if resp := get(t.Context(), "/public"); resp.StatusCode != http.StatusServiceUnavailable {
			t.Errorf("a second visit is %d", resp.StatusCode)
		}
		leave()
		eventually(t, "no visit", func() bool { inside, visits := table.visitors(); return inside == 0 && visits == 0 })
	}
}

func (t *Table) open() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.mu.byConn) > 0
}

func (t *Table) visitors() (conns, visits int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, c := range t.mu.byConn {
		if c.inside > 0 {
			conns++
		}
	}
	return conns, t.mu.visits
}
