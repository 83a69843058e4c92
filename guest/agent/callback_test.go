package agent_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/guest/wire"
	"github.com/cove-sandbox/cove/internal/testport"
	"github.com/cove-sandbox/cove/sandbox"
)

// callbacks listens inside; call connects as code inside does.
func callbacks(t *testing.T, b *box) (l *guest.Listener, call func() *net.TCPConn) {
	t.Helper()
	l, err := b.Listen(t.Context(), testport.Free(t, wire.CallbackAddr))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l, func() *net.TCPConn {
		t.Helper()
		c, err := net.Dial("tcp4", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		bounded(t, c)
		return c.(*net.TCPConn)
	}
}

func accept(t *testing.T, l *guest.Listener) net.Conn {
	t.Helper()
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// Every byte arrives once and in order, both ways, however often the
// connections to the guest are cut, as a checkpoint does.
func TestCallbackSurvivesCuts(t *testing.T) {
	b := newBox(t)
	l, call := callbacks(t, b)
	in := call()
	out := accept(t, l)
	go func() { // a host asks on: what nobody asks for lives 10 s, which may be too short for the bytes
		for {
			if _, err := l.Accept(); err != nil {
				return
			}
		}
	}()
	want := randomBytes(8 << 20)
	ctx, stop := context.WithCancel(t.Context())
	parked := make(chan int, 1)
	go func() {
		n := 0
		for ctx.Err() == nil {
			if err := b.Park(t.Context()); err != nil {
				t.Error(err)
			}
			n++
			b.Release()
			select {
			case <-ctx.Done():
			case <-time.After(time.Millisecond):
			}
		}
		parked <- n
	}()
	go func() {
		_, _ = in.Write(want)
		_ = in.CloseWrite()
	}()
	go func() { // the host's side echoes
		_, _ = io.Copy(out, out)
		_ = out.(interface{ CloseWrite() error }).CloseWrite()
	}()
	got, err := io.ReadAll(in)
	stop()
	if n := <-parked; n < 3 {
		t.Errorf("cut %d times only", n)
	}
	if err != nil || !bytes.Equal(got, want) {
		t.Fatalf("%d of %d bytes came back, equal %v, %v", len(got), len(want), bytes.Equal(got, want), err)
	}
}

// net/http serves on the listener: connections are used again, bodies stream.
func TestCallbackServesHTTP(t *testing.T) {
	b := newBox(t)
	l, _ := callbacks(t, b)
	conns := 0
	srv := &http.Server{
		ConnState: func(_ net.Conn, s http.ConnState) {
			if s == http.StateNew {
				conns++
			}
		},
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			p, _ := io.ReadAll(r.Body)
			fmt.Fprintf(w, "%s %d", r.URL.Path, len(p))
		}),
	}
	done := make(chan error, 1)
	go func() { done <- srv.Serve(l) }()
	tr := &http.Transport{}
	client := http.Client{Transport: tr, Timeout: time.Minute}
	for i := range 20 {
		resp, err := client.Post(fmt.Sprintf("http://%s/p%d", l.Addr(), i), "", bytes.NewReader(make([]byte, i*10_000)))
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if want := fmt.Sprintf("/p%d %d", i, i*10_000); err != nil || string(got) != want {
			t.Fatalf("got %q %v, want %q", got, err, want)
		}
	}
	tr.CloseIdleConnections()
	srv.Close()
	<-done
	if conns != 1 {
		t.Errorf("%d connections for requests one after another", conns)
	}
}

// Of a restored kernel: whose sandbox it was goes on, another's is told.
func TestCallbackAfterRekey(t *testing.T) {
	b := newBox(t)
	l, call := callbacks(t, b)
	in := call()
	out := accept(t, l)
	fmt.Fprint(in, "GET / HTTP/1.1\r\n\r\n")
	if _, err := out.Read(make([]byte, 100)); err != nil {
		t.Fatal(err)
	}
	same := []byte("another secret of 32 bytes at all")
	if err := b.Rekey(t.Context(), same, guest.Container{}, true); err != nil {
		t.Fatal(err)
	}
	fmt.Fprint(out, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
	got := make([]byte, 40)
	if _, err := io.ReadFull(in, got); err != nil || !strings.HasSuffix(string(got), "ok") {
		t.Fatalf("%q %v", got, err)
	}

	idle := call()
	_ = accept(t, l)
	fmt.Fprint(in, "GET /again HTTP/1.1\r\n\r\n")
	if _, err := out.Read(make([]byte, 100)); err != nil {
		t.Fatal(err)
	}
	if err := b.Rekey(t.Context(), append(same, '2'), guest.Container{}, false); err != nil {
		t.Fatal(err)
	}
	told, err := io.ReadAll(in)
	if err != nil || !strings.HasPrefix(string(told), "HTTP/1.1 502 ") || !strings.Contains(string(told), "handler_gone") {
		t.Errorf("who waited for an answer got %q, %v", told, err)
	}
	if rest, err := io.ReadAll(idle); len(rest) > 0 || err != nil {
		t.Errorf("who had asked nothing got %q, %v", rest, err)
	}
	if _, err := l.Accept(); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("the listener of the other sandbox: %v", err)
	}
	if c, err := net.Dial("tcp4", l.Addr().String()); err == nil {
		c.Close()
		t.Error("the port is still open")
	}
}

// A reset ends what was under way; the next episode calls as before.
func TestCallbackAfterReset(t *testing.T) {
	b := newBox(t)
	l, call := callbacks(t, b)
	in := call()
	out := accept(t, l)
	if err := b.Enter(t.Context(), guest.Container{WorkingDir: "/work"}); err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 1)); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("the host's side of an ended call: %v", err)
	}
	if _, err := io.ReadAll(in); err != nil && !strings.Contains(err.Error(), "reset") {
		t.Error(err)
	}
	in = call()
	fmt.Fprint(in, "x")
	p := make([]byte, 1)
	if _, err := accept(t, l).Read(p); err != nil || p[0] != 'x' {
		t.Errorf("%q %v", p, err)
	}
}

func TestCallbackPortTaken(t *testing.T) {
	b := newBox(t)
	taken, err := net.Listen("tcp4", wire.CallbackAddr+":0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	if _, err := b.Listen(t.Context(), taken.Addr().(*net.TCPAddr).Port); !errors.Is(err, sandbox.ErrPortTaken) {
		t.Errorf("got %v", err)
	}
	if _, err := b.Listen(t.Context(), 70000); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("got %v", err)
	}
}

// A new host takes the listener over, as after a restart of the server: those
// who wait for an answer of the old one are told, and the port stays open.
func TestCallbackTakeover(t *testing.T) {
	b := newBox(t)
	old, call := callbacks(t, b)
	in := call()
	out := accept(t, old)
	fmt.Fprint(in, "GET / HTTP/1.1\r\n\r\n")
	if _, err := out.Read(make([]byte, 100)); err != nil {
		t.Fatal(err)
	}
	next, err := b.Listen(t.Context(), old.Addr().(*net.TCPAddr).Port)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { next.Close() })
	if told, err := io.ReadAll(in); err != nil || !strings.HasPrefix(string(told), "HTTP/1.1 502 ") {
		t.Errorf("got %q, %v", told, err)
	}
	old.Close() // is not the listener's owner any more
	fmt.Fprint(call(), "y")
	p := make([]byte, 1)
	if _, err := accept(t, next).Read(p); err != nil || p[0] != 'y' {
		t.Errorf("%q %v", p, err)
	}
}

// A flood stays in the kernel's queue; who leaves makes room.
func TestCallbackFlood(t *testing.T) {
	b := newBox(t)
	l, call := callbacks(t, b)
	const most = 512
	got := make(chan net.Conn, most) // it is asked for all the time, as a host does: else the listener ends after 10 s
	go func() {
		defer close(got)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			got <- c
		}
	}()
	for range most {
		call()
	}
	var conns []net.Conn
	for range most {
		c, ok := <-got
		if !ok {
			t.Fatalf("the listener ended after %d", len(conns))
		}
		conns = append(conns, c)
	}
	fmt.Fprint(call(), "late")
	select {
	case <-got:
		t.Error("one more than there is room for")
	case <-time.After(20 * time.Millisecond):
	}
	conns[7].Close()
	late, ok := <-got
	if !ok {
		t.Fatal("the listener ended")
	}
	p := make([]byte, 4)
	if _, err := io.ReadFull(late, p); err != nil || string(p) != "late" {
		t.Errorf("%q %v", p, err)
	}
	for _, c := range conns {
		c.Close()
	}
}
