package e2e

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/cove-sandbox/cove/e2e/world"
	"github.com/cove-sandbox/cove/sandbox"
)

// lineClient asks the echo of portserver, which counts the lines of a connection.
type lineClient struct {
	net.Conn
	in *bufio.Reader
	n  int
}

func newLineClient(t *testing.T, addr string) *lineClient {
	t.Helper()
	nc, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { nc.Close() })
	_ = nc.SetDeadline(time.Now().Add(3 * time.Minute))
	return &lineClient{Conn: nc, in: bufio.NewReader(nc)}
}

func (c *lineClient) ask(t *testing.T, line string) {
	t.Helper()
	began := time.Now()
	c.n++
	if _, err := io.WriteString(c, line+"\n"); err != nil {
		t.Fatalf("line %d, %s: %v", c.n, line, err)
	}
	got, err := c.in.ReadString('\n')
	if want := fmt.Sprintf("%d %s\n", c.n, line); err != nil || got != want {
		t.Fatalf("%q, %v; want %q", got, err, want)
	}
	t.Logf("%s: %s", line, time.Since(began).Round(100*time.Microsecond))
}

// TestConnectionsFromOutsideLiveOn keeps a client of a server inside over all
// that stops the sandbox for a while.
func TestConnectionsFromOutsideLiveOn(t *testing.T) {
	w := world.New(t, world.Options{Flags: []string{"--ssh", "127.0.0.1:0"}})
	b := withServer(t, w, world.Small())
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	c := newLineClient(t, portForward(ctx, t, w, b.ID, 9090))
	c.ask(t, "at first")

	url, token, _ := strings.Cut(portURL(t, w, b.ID, 8080), "?cove_token=")
	ws, _, err := websocket.Dial(t.Context(), url+"ws", &websocket.DialOptions{HTTPHeader: http.Header{"X-Cove-Token": {token}}})
	if err != nil {
		t.Fatal(err)
	}
	defer ws.CloseNow()
	talk := func(msg string) {
		t.Helper()
		wctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := ws.Write(wctx, websocket.MessageText, []byte(msg)); err != nil {
			t.Fatalf("WebSocket, %s: %v", msg, err)
		}
		if _, got, err := ws.Read(wctx); err != nil || string(got) != msg {
			t.Fatalf("WebSocket, %s: %q %v", msg, got, err)
		}
	}
	talk("at first")

	dir := t.TempDir()
	ran(w.CLI(t, "ssh", "--write", dir, b.ID)).want(t, 0)
	sh := exec.CommandContext(t.Context(), "ssh", "-F", filepath.Join(dir, "config"), b.ID, "n=0; while read line; do n=$((n+1)); echo $n $line; done")
	shIn, err := sh.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	shOut, err := sh.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := sh.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewReader(shOut)
	typed := 0
	typeLine := func(line string) {
		t.Helper()
		typed++
		if _, err := io.WriteString(shIn, line+"\n"); err != nil {
			t.Fatalf("SSH, %s: %v", line, err)
		}
		if got, err := lines.ReadString('\n'); err != nil || got != fmt.Sprintf("%d %s\n", typed, line) {
			t.Fatalf("SSH, %s: %q %v", line, got, err)
		}
	}
	typeLine("at first")

	for _, step := range []struct {
		name string
		do   func()
	}{
		{"after a snapshot", func() { b.Snapshot(t, world.Take{Kind: sandbox.MemorySnapshot}) }},
		{"after a second snapshot", func() { b.Snapshot(t, world.Take{Kind: sandbox.MemorySnapshot}) }},
		{"after a hot pause", func() { b.Pause(t, false) }},
		{"after a cold pause", func() { b.Pause(t, true) }},
		{"after a cold pause of a hot one", func() { b.Pause(t, false); b.Pause(t, true) }},
		{"after a fork", func() {
			kids, err := b.TryFork(t.Context(), 1, nil)
			if err != nil {
				t.Fatal(err)
			}
			// The child has the server and none of its clients.
			kid := newLineClient(t, portForward(ctx, t, w, kids[0].ID, 9090))
			kid.ask(t, "the child's own")
			// The sockets of the source's clients are closed or on their way out.
			world.Eventually(t, 10*time.Second, "the child lets the source's clients go", func() bool {
				// Ours and no other: 9090 is 2382 there, and 01 is established.
				return strings.TrimSpace(kids[0].Must(t, `grep -c ':2382 .* 01 ' /proc/net/tcp || true`)) <= "1"
			})
		}},
	} {
		step.do()
		c.ask(t, step.name)
		step.do()
		talk(step.name)
		step.do()
		typeLine(step.name)
	}
	_ = shIn.Close()
	if err := sh.Wait(); err != nil {
		t.Errorf("ssh: %v", err)
	}
	// Its end reaches the client too.
	b.Reset(t)
	if got, err := c.in.ReadString('\n'); err == nil {
		t.Errorf("after a reset: %q", got)
	}
}

// TestConnectionsFromOutsideEndWithTheServer: who is outside is gone when the
// server dies, and the program inside is told.
func TestConnectionsFromOutsideEndWithTheServer(t *testing.T) {
	t.Parallel() // it waits until the guest notices
	w := world.New(t, world.Options{})
	b := withServer(t, w, world.Small())
	s, err := w.Client().ConnectPort(t.Context(), b.ID, 9090)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if _, err := io.WriteString(s, "hello\n"); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(s, make([]byte, len("1 hello\n"))); err != nil {
		t.Fatal(err)
	}
	open := func() string { return strings.TrimSpace(b.Must(t, `grep -c ':2382 .* 01 ' /proc/net/tcp || true`)) }
	if got := open(); got == "0" {
		t.Fatal("the test does not see the connection inside")
	}
	w.Kill(t)
	w.Start(t)
	world.Eventually(t, 30*time.Second, "the server inside sees its client gone", func() bool { return open() == "0" })
}
