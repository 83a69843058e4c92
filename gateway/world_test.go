package gateway_test

import (
	"bufio"
	"context"
	"crypto/sha256"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/cove-sandbox/cove/gateway"
	"github.com/cove-sandbox/cove/internal/strangers"
	"github.com/cove-sandbox/cove/sandbox"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	box    = "abcdef0123456789"
	ghost  = "nosuchsandbox000"
	apiKey = "cove_0123456789012345678901234567890123456789012"
)

// backend has one sandbox, whose loopback is this machine's.
type backend struct {
	mu     sync.Mutex
	public map[int]bool
	door   sandbox.Door // beside that
	ended  bool
	asleep bool
	wakes  int
	held   int
	dials  int
	gone   map[string]error // keys that make no tokens any more
}

// keyID is of the API key that tokens are made with.
const keyID = "keykeykeykeykey0"

func (b *backend) KeyLives(_ context.Context, key string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.gone[key]; err != nil || key == keyID {
		return err
	}
	return &sandbox.Error{Class: sandbox.Unauthenticated, Msg: "no such key"}
}

func (b *backend) Door(_ context.Context, id string, port int) (sandbox.Door, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if id != box {
		return sandbox.Door{}, nil
	}
	d := b.door
	d.Public = d.Public || b.public[port]
	return d, nil
}

func (b *backend) AllowKey(_ context.Context, secret, id string) (string, error) {
	if secret != apiKey {
		return "", &sandbox.Error{Class: sandbox.Unauthenticated, Msg: "the API key is wrong"}
	}
	return keyID, nil
}

func (b *backend) Hold(_ context.Context, id string, wake bool) (func(), error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case id != box:
		return nil, &sandbox.Error{Class: sandbox.NotFound, Msg: "no sandbox '" + id + "'"}
	case b.ended:
		return nil, &sandbox.Error{Class: sandbox.Ended, Msg: "sandbox " + id + " ended: oom"}
	case b.asleep && !wake:
		return nil, &sandbox.Error{Class: sandbox.Precondition, Reason: sandbox.Asleep, Msg: "asleep"}
	case b.asleep:
		b.asleep = false
		b.wakes++
	}
	b.held++
	return sync.OnceFunc(func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.held--
	}), nil
}

func (b *backend) Dial(ctx context.Context, id string, port int) (net.Conn, error) {
	b.mu.Lock()
	b.dials++
	b.mu.Unlock()
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", "127.0.0.1:"+strconv.Itoa(port))
	if err != nil {
		return nil, &sandbox.Error{Class: sandbox.Precondition, Reason: sandbox.PortClosed, Err: err}
	}
	return c, nil
}

// world is a gateway on a loopback listener before a sandbox with a server.
type world struct {
	*backend
	t      *testing.T
	tokens *gateway.Tokens
	addr   string // of the listener
	port   int    // of the server inside
}

func newWorld(t *testing.T, inside http.Handler) *world {
	t.Helper()
	return newWorldOn(t, inside, gateway.Config{})
}

func newWorldOn(t *testing.T, inside http.Handler, cfg gateway.Config) *world {
	t.Helper()
	return newWorldFor(t, inside, cfg, strangers.Limits{})
}

func newWorldFor(t *testing.T, inside http.Handler, cfg gateway.Config, limits strangers.Limits) *world {
	t.Helper()
	w := &world{backend: &backend{public: map[int]bool{}}, t: t}
	var p http.Protocols
	p.SetHTTP1(true)
	p.SetUnencryptedHTTP2(true)
	srv := httptest.NewUnstartedServer(inside)
	srv.Config.Protocols = &p
	srv.Start()
	t.Cleanup(srv.Close)
	w.port = srv.Listener.Addr().(*net.TCPAddr).Port

	w.tokens = gateway.NewTokens([]byte(strings.Repeat("k", 32)), nil)
	if cfg.Domain.Name == "" {
		cfg.Domain = withDomain("cove.test").Domain
	}
	cfg.Backend, cfg.Tokens = w.backend, w.tokens
	g := gateway.New(cfg)
	api := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(http.StatusTeapot) })
	wrapped := g.Wrap(api)
	front := httptest.NewUnstartedServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Admitted") != "" { // as a dialect does that has tokens of its own
			g.Serve(rw, r, gateway.Target{Sandbox: box, Port: w.port}, keyID)
			return
		}
		wrapped.ServeHTTP(rw, r)
	}))
	front.Config.Protocols = &p
	strangers.New(limits).Guard(front.Config)
	front.Start()
	t.Cleanup(front.Close)
	t.Cleanup(g.Close)
	w.addr = front.Listener.Addr().String()
	return w
}

func withDomain(s string) gateway.Config {
	d, err := gateway.ParseDomain(s, "http", "")
	if err != nil {
		panic(err)
	}
	return gateway.Config{Domain: d}
}

func (w *world) token() string { return w.mint(box, w.port, time.Now().Add(time.Hour)) }

func (w *world) mint(id string, port int, until time.Time) string {
	return w.tokens.Mint(gateway.Target{Sandbox: id, Port: port}, keyID, until)
}

func (w *world) host() string { return strconv.Itoa(w.port) + "-" + box + ".cove.test" }

// client takes every name for the gateway's listener.
func (w *world) client(h2 bool) *http.Client {
	var p http.Protocols
	p.SetHTTP1(!h2)
	p.SetUnencryptedHTTP2(h2)
	tr := &http.Transport{Protocols: &p, DisableCompression: true,
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, network, w.addr)
		}}
	w.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: 2 * time.Minute,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// get asks for a path of the port, with header lines "Name: value".
func (w *world) get(url string, header ...string) (*http.Response, string) {
	w.t.Helper()
	return w.do(http.MethodGet, url, header...)
}

func (w *world) do(method, url string, header ...string) (*http.Response, string) {
	w.t.Helper()
	if strings.HasPrefix(url, "/") {
		url = "http://" + w.host() + url
	}
	req, err := http.NewRequestWithContext(w.t.Context(), method, url, nil)
	if err != nil {
		w.t.Fatal(err)
	}
	for _, h := range header {
		name, value, _ := strings.Cut(h, ": ")
		req.Header.Add(name, value)
	}
	res, err := w.client(false).Do(req)
	if err != nil {
		w.t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		w.t.Fatal(err)
	}
	return res, string(b)
}

// raw sends bytes as they are and returns the whole answer.
func (w *world) raw(request string) string {
	w.t.Helper()
	c, err := net.Dial("tcp", w.addr)
	if err != nil {
		w.t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	if _, err := io.WriteString(c, request); err != nil {
		w.t.Fatal(err)
	}
	b, _ := io.ReadAll(bufio.NewReader(c)) // a reset is an end too
	return string(b)
}

func sum(b []byte) [32]byte { return sha256.Sum256(b) }
