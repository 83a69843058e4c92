package e2e

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/e2e/world"
	"github.com/cove-sandbox/cove/internal/testbin"
	"github.com/cove-sandbox/cove/sandbox"
)

// program builds one of the repository's commands, static.
func program(t *testing.T, name string) string {
	t.Helper()
	out := filepath.Join(t.TempDir(), name)
	c := exec.CommandContext(t.Context(), "go", "build", "-o", out, "./bench/"+name)
	c.Dir, c.Env = testbin.Root(t), append(os.Environ(), "CGO_ENABLED=0")
	if b, err := c.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, b)
	}
	return out
}

// withServer is a sandbox with portserver, up: HTTP on port 8080, an echo on 9090.
func withServer(t *testing.T, w *world.World, spec sandbox.Spec) *world.Box {
	t.Helper()
	b := w.Create(t, spec)
	bin, err := os.Open(program(t, "portserver"))
	if err != nil {
		t.Fatal(err)
	}
	defer bin.Close()
	if err := w.Client().Upload(t.Context(), b.ID, "/portserver", bin, -1, sandbox.WriteOptions{Mode: 0o755}); err != nil {
		t.Fatal(err)
	}
	b.Must(t, "nohup /portserver 8080 9090 >/tmp/log 2>&1 &")
	ready(t, w, b.ID, 8080)
	return b
}

func ready(t *testing.T, w *world.World, id string, port int) {
	t.Helper()
	if _, err := w.Client().Ports.WaitReady(t.Context(), connect.NewRequest(&covev1.WaitReadyRequest{SandboxId: id, Port: int32(port)})); err != nil {
		t.Fatal(err)
	}
}

func portURL(t *testing.T, w *world.World, id string, port int) string {
	t.Helper()
	r, err := w.Client().Ports.Url(t.Context(), connect.NewRequest(&covev1.PortUrlRequest{SandboxId: id, Port: int32(port)}))
	if err != nil {
		t.Fatal(err)
	}
	return w.Client().PortURL(r.Msg)
}

// fetch is one request; the token of url stays.
func fetch(t *testing.T, method, url, path string, body io.Reader, header ...string) (*http.Response, []byte) {
	t.Helper()
	base, query, _ := strings.Cut(url, "?")
	req, err := http.NewRequestWithContext(t.Context(), method, strings.TrimSuffix(base, "/")+path, body)
	if err != nil {
		t.Fatal(err)
	}
	if query != "" {
		req.Header.Set("X-Cove-Token", strings.TrimPrefix(query, "cove_token="))
	}
	for _, h := range header {
		k, v, _ := strings.Cut(h, ": ")
		req.Header.Set(k, v)
		if k == "Host" {
			req.Host = v
		}
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return res, b
}

// portForward runs "cove port-forward" until ctx ends and returns where it
// listens.
func portForward(ctx context.Context, t *testing.T, w *world.World, id string, port int) (addr string) {
	t.Helper()
	c := exec.CommandContext(ctx, testbin.Cove(t), "port-forward", id, "0:"+strconv.Itoa(port))
	c.Env = append(os.Environ(), "COVE_URL="+w.URL(), "COVE_KEY="+w.Key())
	c.Cancel = func() error { return c.Process.Signal(os.Interrupt) }
	stderr, err := c.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Wait() })
	line, err := bufio.NewReader(stderr).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	addr, _, _ = strings.Cut(line, " ")
	return addr
}

// TestGateway reaches servers in real sandboxes.
func TestGateway(t *testing.T) {
	w := world.New(t, world.Options{Flags: []string{"--gateway-domain", "cove.test"}})
	b := withServer(t, w, world.Small())
	prefix := w.URL() + "/p/" + b.ID + "/8080/"
	full := portURL(t, w, b.ID, 8080)
	if want := "http://8080-" + b.ID + ".cove.test:"; !strings.HasPrefix(full, want) {
		t.Fatalf("%s", full)
	}
	_, token, _ := strings.Cut(full, "cove_token=")
	url := prefix + "?cove_token=" + token

	t.Run("both addresses", func(t *testing.T) {
		if res, body := fetch(t, "GET", url, "/", nil); res.StatusCode != 200 || string(body) != "hello\n" {
			t.Errorf("%d %q", res.StatusCode, body)
		}
		if res, body := fetch(t, "GET", w.URL(), "/", nil, "Host: 8080-"+b.ID+".cove.test", "X-Cove-Token: "+token); res.StatusCode != 200 || string(body) != "hello\n" {
			t.Errorf("%d %q", res.StatusCode, body)
		}
		if res, body := fetch(t, "GET", prefix, "/", nil, "Authorization: Bearer "+w.Key()); res.StatusCode != 200 || string(body) != "hello\n" {
			t.Errorf("with the API key: %d %q", res.StatusCode, body)
		}
	})
	t.Run("private until public", func(t *testing.T) {
		if res, _ := fetch(t, "GET", prefix, "/", nil); res.StatusCode != 401 {
			t.Errorf("%d", res.StatusCode)
		}
		open := strings.TrimSpace(ran(w.CLI(t, "url", "--public", b.ID, "8080")).want(t, 0).Stdout)
		if strings.Contains(open, "token") {
			t.Errorf("a public port has a token: %s", open)
		}
		if res, _ := fetch(t, "GET", prefix, "/", nil); res.StatusCode != 200 {
			t.Errorf("public: %d", res.StatusCode)
		}
		ran(w.CLI(t, "url", "--private", b.ID, "8080")).want(t, 0)
		if res, _ := fetch(t, "GET", prefix, "/", nil); res.StatusCode != 401 {
			t.Errorf("private again: %d", res.StatusCode)
		}
	})
	t.Run("100 MiB both ways", func(t *testing.T) {
		body := make([]byte, 100<<20)
		_, _ = rand.NewChaCha8([32]byte{3}).Read(body)
		began := time.Now()
		_, got := fetch(t, "PUT", url, "/sum", bytes.NewReader(body))
		up := time.Since(began)
		if want := fmt.Sprintf("%d %x\n", len(body), sha256.Sum256(body)); string(got) != want {
			t.Errorf("%s, want %s", got, want)
		}
		began = time.Now()
		_, got = fetch(t, "GET", url, "/zeros?n=104857600", nil)
		if len(got) != 100<<20 || bytes.Count(got, []byte{0}) != len(got) {
			t.Errorf("%d bytes", len(got))
		}
		t.Logf("up %.0f MB/s, down %.0f MB/s", 104.86/up.Seconds(), 104.86/time.Since(began).Seconds())
	})
	t.Run("pages", func(t *testing.T) {
		if res, body := fetch(t, "GET", w.URL()+"/p/"+b.ID+"/8081/", "/", nil, "Authorization: Bearer "+w.Key()); res.StatusCode != 502 || !bytes.Contains(body, []byte("0.0.0.0")) {
			t.Errorf("closed port: %d %s", res.StatusCode, body)
		}
		if res, _ := fetch(t, "GET", w.URL()+"/p/nosuchsandbox/80/", "/", nil, "Authorization: Bearer "+w.Key()); res.StatusCode != 404 {
			t.Errorf("no sandbox: %d", res.StatusCode)
		}
		gone := w.Create(t, world.Small())
		if _, err := gone.TryKill(t.Context()); err != nil {
			t.Fatal(err)
		}
		if res, body := fetch(t, "GET", w.URL()+"/p/"+gone.ID+"/80/", "/", nil, "Authorization: Bearer "+w.Key()); res.StatusCode != 410 || !bytes.Contains(body, []byte("killed_by_user")) {
			t.Errorf("ended: %d %s", res.StatusCode, body)
		}
	})
	for _, cold := range []bool{false, true} {
		t.Run(fmt.Sprintf("a request wakes, cold %v", cold), func(t *testing.T) {
			if _, err := w.Client().Sandboxes.Pause(t.Context(), connect.NewRequest(&covev1.PauseRequest{Id: b.ID, Cold: cold})); err != nil {
				t.Fatal(err)
			}
			if res, body := fetch(t, "GET", url, "/", nil, "X-Cove-Wake: no"); res.StatusCode != 503 || res.Header.Get("X-Cove-Error") != "asleep" {
				t.Errorf("%d %s", res.StatusCode, body)
			}
			began := time.Now()
			if res, body := fetch(t, "GET", url, "/", nil); res.StatusCode != 200 || string(body) != "hello\n" {
				t.Errorf("%d %s", res.StatusCode, body)
			}
			t.Logf("woken and answered in %s", time.Since(began).Round(time.Millisecond))
		})
	}
	t.Run("port-forward", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		addr := portForward(ctx, t, w, b.ID, 8080)
		if res, body := fetch(t, "GET", "http://"+addr, "/", nil); res.StatusCode != 200 || string(body) != "hello\n" {
			t.Errorf("%d %s", res.StatusCode, body)
		}
		// A half that is closed stays half.
		nc, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		_, _ = io.WriteString(nc, "GET / HTTP/1.0\r\n\r\n")
		_ = nc.(*net.TCPConn).CloseWrite()
		if got, err := io.ReadAll(nc); err != nil || !bytes.HasSuffix(got, []byte("hello\n")) {
			t.Errorf("%q %v", got, err)
		}
	})
	t.Run("readiness", func(t *testing.T) {
		_, err := w.Client().Ports.WaitReady(t.Context(), connect.NewRequest(&covev1.WaitReadyRequest{SandboxId: b.ID, Port: 9, Timeout: durationpb.New(200 * time.Millisecond)}))
		if !errors.Is(err, sandbox.ErrDeadline) {
			t.Errorf("%v", err)
		}
		ran(w.CLI(t, "wait", b.ID, "-c", "test -x /portserver")).want(t, 0)
	})
}

// TestGatewayLoad holds idle WebSockets and measures requests beside clients
// that do not read. COVE_TEST_WEBSOCKETS is how many, 2000 for the full figure.
func TestGatewayLoad(t *testing.T) {
	n := 200
	if s := os.Getenv("COVE_TEST_WEBSOCKETS"); s != "" {
		n, _ = strconv.Atoi(s)
	}
	w := world.New(t, world.Options{})
	spec := world.Small()
	spec.Resources.Memory = 512 * sandbox.MiB
	b := withServer(t, w, spec)
	url := portURL(t, w, b.ID, 8080)
	load := program(t, "portload")

	run := func(args ...string) (perSec, p99 float64) {
		t.Helper()
		out, err := exec.CommandContext(t.Context(), load, append(args, url)...).Output()
		if err != nil {
			t.Fatalf("portload %v: %v", args, err)
		}
		var r struct {
			PerSecond float64 `json:"per_second"`
			P99       float64 `json:"p99_ms"`
			Errors    int
		}
		if err := json.Unmarshal(out, &r); err != nil || r.Errors > 0 {
			t.Fatalf("%v %s", err, out)
		}
		t.Logf("portload %v: %s", args, out)
		return r.PerSecond, r.P99
	}
	long := fmt.Sprintf("%ds", times(5, 1))
	run("-for", "1s") // warm
	run("-for", long, "-clients", "16")
	run("-for", long, "-clients", "16", "-slow", "20")

	before := b.Stats(t).Memory
	host := residentKiB(t, w.PID())
	c := exec.CommandContext(t.Context(), load, "-websockets", strconv.Itoa(n), url)
	in, _ := c.StdinPipe()
	out, _ := c.StdoutPipe()
	c.Stderr = os.Stderr
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewReader(out)
	if line, err := lines.ReadString('\n'); err != nil || line != "open\n" {
		t.Fatalf("%q %v", line, err)
	}
	t.Logf("%d WebSockets: %.1f KiB each in the sandbox, %.1f KiB each in the server", n,
		float64(b.Stats(t).Memory-before)/1024/float64(n), float64(residentKiB(t, w.PID())-host)/float64(n))
	run("-for", "1s") // beside them
	in.Close()
	rest, _ := io.ReadAll(lines)
	if err := c.Wait(); err != nil {
		t.Fatalf("%v %s", err, rest)
	}
	t.Logf("%s", rest)
}

func residentKiB(t *testing.T, pid int) int {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "VmRSS:" {
			n, _ := strconv.Atoi(f[1])
			return n
		}
	}
	t.Fatal("no VmRSS")
	return 0
}
