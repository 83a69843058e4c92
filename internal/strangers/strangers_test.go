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

const key = "Bearer good"

// serve runs a server that knows one key and refuses the rest at length.
func serve(t *testing.T, l Limits) (addr string, table *Table, busy *atomic.Int64) {
	table, busy = New(l), &atomic.Int64{}
	var p http.Protocols
	p.SetHTTP1(true)
	p.SetUnencryptedHTTP2(true)
	s := &http.Server{Protocols: &p, HTTP2: &http.HTTP2Config{MaxConcurrentStreams: 100_000},
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			busy.Add(1)
			defer busy.Add(-1)
			if r.Header.Get("Authorization") == key {
				Known(r.Context())
				_, _ = io.WriteString(w, "welcome")
				return
			}
			if r.URL.Path == "/public" {
				LetIn(r.Context())
				_, _ = io.WriteString(w, "look")
				return
			}
			w.WriteHeader(http.StatusUnauthorized)
			_, _ = w.Write(bytes.Repeat([]byte("no"), 10_000))
		})}
	table.Guard(s)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(ln) }()
	t.Cleanup(func() { s.Close(); <-done })
	return ln.Addr().String(), table, busy
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
	for _, first := range []string{"/", "/public"} {
		t.Run(first, func(t *testing.T) { pinsNoHandlers(t, first) })
	}
}

// pinsNoHandlers asks for a page first, which may be anybody's.
func pinsNoHandlers(t *testing.T, first string) {
	addr, table, busy := serve(t, Limits{PerConn: 100})
	c, ask := unwilling(t, addr)
	if ask(1, first) != nil {
		t.Fatal("cut at once")
	}
	if first != "/" {
		eventually(t, "let in", func() bool { conns, n := table.count(); return conns == 0 && n == 0 })
	}
	for id := uint32(3); id < 20_000; id += 2 {
		if ask(id, "/") != nil {
			break // cut: what this is about
		}
	}
	_ = c.SetReadDeadline(time.Now().Add(20 * time.Second))
	if _, err := io.Copy(io.Discard, c); isTimeout(err) {
		t.Fatal("the connection is still open")
	}
	eventually(t, "no handler, no count", func() bool {
		conns, requests := table.count()
		return busy.Load() == 0 && conns == 0 && requests == 0
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
	addr, table, busy := serve(t, Limits{Write: 50 * time.Millisecond})
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
	eventually(t, "no handler", func() bool { _, n := table.count(); return busy.Load() == 0 && n == 0 })
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
