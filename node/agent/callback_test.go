//go:build !race

package agent_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/guest/wire"
	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/sandbox"
)

// host answers the calls of a sandbox: each waits for what answers gives it.
type host struct {
	l       net.Listener
	asked   chan string // path and body of each request
	answers chan string
	broken  chan error // a caller that left before its answer
	ended   chan error
}

func (m *machine) callbacks(id string) *host {
	m.t.Helper()
	l, err := node.Listen(m.t.Context(), m.Node, id, 80)
	if err != nil {
		m.t.Fatal(err)
	}
	h := &host{l: l, asked: make(chan string, 10), answers: make(chan string), broken: make(chan error, 10), ended: make(chan error, 1)}
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p, _ := io.ReadAll(r.Body)
		h.asked <- r.URL.Path + " " + string(p)
		select {
		case a := <-h.answers:
			io.WriteString(w, a)
		case <-r.Context().Done():
			h.broken <- r.Context().Err()
		}
	})}
	go func() { h.ended <- srv.Serve(l) }()
	m.t.Cleanup(func() { srv.Close(); l.Close() })
	return h
}

// ask runs a request inside and says what came of it; nothing if its exec goes
// with its container.
func (m *machine) ask(id, path string) <-chan string {
	m.t.Helper()
	g, release, err := m.Guest(m.t.Context(), id)
	if err != nil {
		m.t.Fatal(err)
	}
	m.execs++
	spec := sandbox.ProcessSpec{ExecID: fmt.Sprint("e", m.execs), Command: python("http://cove.internal" + path), User: "root"}
	got := make(chan string, 1)
	go func() {
		defer release()
		var out strings.Builder
		if err := g.Start(m.t.Context(), spec, 0, func(e sandbox.ProcessEvent) error {
			if e.Output != nil {
				out.Write(e.Output.Data)
			}
			return nil
		}); err == nil {
			got <- strings.TrimSpace(out.String())
		}
	}()
	return got
}

func python(url string) string {
	return `python3 -c 'import urllib.request, urllib.error
try: print(urllib.request.urlopen("` + url + `", b"body").read().decode())
except urllib.error.HTTPError as e: print(e.code, e.read().decode())
except Exception as e: print("failed:", e)'`
}

func within[T any](t *testing.T, what string, c <-chan T) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(time.Minute):
		t.Fatalf("%s: nothing after a minute", what)
		panic("unreachable")
	}
}

// A call made before a standby of any depth is answered after it.
func TestCallbackSleepsOnGVisor(t *testing.T) {
	m := newMachine(t)
	m.create("a")
	h := m.callbacks("a")
	for i, cold := range []bool{false, true, false, true} {
		got := m.ask("a", fmt.Sprint("/", i))
		if asked := within(t, "the call", h.asked); asked != fmt.Sprintf("/%d body", i) {
			t.Fatalf("asked %q", asked)
		}
		if err := m.Pause(t.Context(), "a", cold); err != nil {
			t.Fatal(err)
		}
		if i >= 2 { // the answer is given while it sleeps, and waits
			h.answers <- fmt.Sprint("answer ", i)
			if st := m.StandbyNow()["a"]; st == sandbox.Awake {
				t.Error("a write woke it; that is its caller's to decide")
			}
		}
		if _, err := m.Resume(t.Context(), "a"); err != nil {
			t.Fatal(err)
		}
		if i < 2 {
			h.answers <- fmt.Sprint("answer ", i)
		}
		if out := within(t, "the answer", got); out != fmt.Sprint("answer ", i) {
			t.Errorf("cold %v: got %q", cold, out)
		}
	}
	// What a memory snapshot is taken of goes on, and its copy is told.
	got := m.ask("a", "/snap")
	within(t, "the call", h.asked)
	m.sh("a", "true")
	snap := m.snapshot("a", sandbox.MemorySnapshot, "")
	if _, err := m.CreateFrom(t.Context(), sandbox.Sandbox{ID: "b", Spec: spec()}, m.img, snap); err != nil {
		t.Fatal(err)
	}
	h.answers <- "to the parent"
	if out := within(t, "the answer", got); out != "to the parent" {
		t.Errorf("got %q", out)
	}
	g, release, err := m.Guest(t.Context(), "b")
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	var out strings.Builder
	if err := g.Attach(t.Context(), fmt.Sprint("e", m.execs-1), 0, func(e sandbox.ProcessEvent) error {
		if e.Output != nil {
			out.Write(e.Output.Data)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(out.String(), "502 ") || !strings.Contains(out.String(), "handler_gone") {
		t.Errorf("the copy got %q", out.String())
	}
	if out := m.sh("b", python("http://cove.internal/x")); !strings.Contains(out, "refused") {
		t.Errorf("and then %q", out)
	}
	// Restored in place, the route is there again.
	m.ask("a", "/lost")
	within(t, "the call", h.asked)
	if _, _, err := m.Restore(t.Context(), "a", m.img, snap); err != nil {
		t.Fatal(err)
	}
	within(t, "the host's side of it", h.broken)
	got = m.ask("a", "/restored")
	if asked := within(t, "the call after the restore", h.asked); asked != "/restored body" {
		t.Errorf("asked %q", asked)
	}
	h.answers <- "again"
	if out := within(t, "the answer", got); out != "again" {
		t.Errorf("got %q", out)
	}
	// The end of the sandbox is the listener's.
	if err := m.Kill(t.Context(), "a", sandbox.End{Cause: sandbox.KilledByUser}); err != nil {
		t.Fatal(err)
	}
	if err := within(t, "the listener's end", h.ended); !errors.Is(err, sandbox.ErrEnded) {
		t.Errorf("ended with %v", err)
	}
}

// A reset takes the calls and leaves the route, also where the image has no
// /etc/hosts or the code inside wrote its own.
func TestCallbackAndResetOnGVisor(t *testing.T) {
	m := newMachine(t)
	m.create("a")
	h := m.callbacks("a")
	for i, before := range []string{"true", "rm /etc/hosts", "echo 127.0.0.1 mine >/etc/hosts"} {
		m.ask("a", "/under-way")
		within(t, "the call", h.asked)
		m.sh("a", before)
		if _, _, err := m.Reset(t.Context(), "a"); err != nil {
			t.Fatal(err)
		}
		within(t, "the end of the call", h.broken)
		got := m.ask("a", fmt.Sprint("/", i))
		within(t, "the call", h.asked)
		h.answers <- "hello"
		if out := within(t, "the answer", got); out != "hello" {
			t.Errorf("after %q and a reset: %q", before, out)
		}
	}
	// A second host ends the first; closed, the port is free.
	h2 := m.callbacks("a")
	if err := within(t, "the first one's end", h.ended); !errors.Is(err, sandbox.ErrConflict) {
		t.Errorf("the first ended with %v", err)
	}
	if err := h2.l.Close(); err != nil {
		t.Error(err)
	}
	if out := m.sh("a", python("http://cove.internal/x")); !strings.Contains(out, "refused") {
		t.Errorf("after Close: %q", out)
	}
	// No file to name us in: one is made. One that is no file: an error that says so.
	m.sh("a", "rm /etc/hosts")
	h = m.callbacks("a")
	got := m.ask("a", "/named")
	within(t, "the call", h.asked)
	h.answers <- "hello"
	if out := within(t, "the answer", got); out != "hello" {
		t.Errorf("without /etc/hosts: %q", out)
	}
	if err := h.l.Close(); err != nil {
		t.Error(err)
	}
	m.sh("a", "rm /etc/hosts; mkfifo /etc/hosts")
	if _, err := node.Listen(t.Context(), m.Node, "a", 80); !errors.Is(err, sandbox.ErrPrecondition) || !strings.Contains(err.Error(), "/etc/hosts") {
		t.Errorf("with a FIFO for /etc/hosts: %v", err)
	}
}

// Port 80 of other addresses stays free for programs inside. One on all
// addresses runs beside ours too, if both let it (SO_REUSEADDR, as servers do),
// and ours is the one that cove.internal leads to.
func TestCallbackPortsOnGVisor(t *testing.T) {
	m := newMachine(t)
	m.create("a")
	listen := func(addr string, reuse int) string {
		return m.sh("a", fmt.Sprintf(`python3 -c 'import socket
s = socket.socket()
s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, %d)
try: s.bind(("%s", 80)); s.listen(); print("ok")
except OSError as e: print(e.strerror)'`, reuse, addr))
	}
	const server = `nohup python3 -m http.server 80 --bind 0.0.0.0 >/dev/null 2>&1 & until python3 -c 'import socket; socket.create_connection(("127.0.0.1", 80))' 2>/dev/null; do sleep 0.05; done`
	called := func(h *host) {
		t.Helper()
		got := m.ask("a", "/beside")
		within(t, "the call", h.asked)
		h.answers <- "ours"
		if out := within(t, "the answer", got); out != "ours" {
			t.Errorf("cove.internal leads to %q", out)
		}
		if out := m.sh("a", python("http://127.0.0.1/")); !strings.Contains(out, "Unsupported method") {
			t.Errorf("127.0.0.1 leads to %q", out)
		}
	}
	h := m.callbacks("a")
	for addr, want := range map[string][2]string{
		"127.0.0.1": {"ok", "ok"}, "127.0.0.2": {"ok", "ok"},
		"0.0.0.0":         {"Address already in use", "ok"},
		wire.CallbackAddr: {"Address already in use", "Address already in use"},
	} {
		for reuse := range want {
			if out := listen(addr, reuse); out != want[reuse] {
				t.Errorf("%s:80 beside ours, reuse %d: %s", addr, reuse, out)
			}
		}
	}
	m.sh("a", server)
	called(h)
	if _, _, err := m.Reset(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	if err := h.l.Close(); err != nil {
		t.Fatal(err)
	}
	m.sh("a", server) // before us, this time
	called(m.callbacks("a"))

	if _, _, err := m.Reset(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	m.sh("a", `nohup python3 -c 'import socket, time; s = socket.socket(); s.bind(("0.0.0.0", 8081)); s.listen(); open("/tmp/up", "w"); time.sleep(1000)' >/dev/null 2>&1 & until [ -e /tmp/up ]; do sleep 0.05; done`)
	if _, err := node.Listen(t.Context(), m.Node, "a", 8081); !errors.Is(err, sandbox.ErrPortTaken) {
		t.Errorf("with a server inside that shares its port with nobody: %v", err)
	}
	if _, err := node.Listen(t.Context(), m.Node, "nobody", 80); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("of no sandbox: %v", err)
	}
}
