package server

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/internal/seal"
	"github.com/cove-sandbox/cove/node/agent/agenttest"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
	"github.com/cove-sandbox/cove/store/sqlite"
	"github.com/cove-sandbox/cove/wire"
)

// The tests write to memory: nearly all of what they take on a disk is its syncs.
func TestMain(m *testing.M) {
	if err := unix.Access("/dev/shm", unix.W_OK); err == nil && os.Getenv("TMPDIR") == "" {
		os.Setenv("TMPDIR", "/dev/shm")
	}
	goleak.VerifyTestMain(m)
}

// What speaks Cove's own dialect in tests of this package; native_test.go sets them,
// because native imports this package.
var (
	nativeHandler    func(*Server, *slog.Logger) http.Handler
	nativeHTTPServer func(http.Handler) *http.Server
	nativeRoutes     func(*Server) map[string]Operation
	nativeProcedures map[string]Operation
)

// SpeakNative has the tests of this package go through a dialect.
func SpeakNative(handler func(*Server, *slog.Logger) http.Handler, web func(http.Handler) *http.Server, routes func(*Server) map[string]Operation, procedures map[string]Operation) {
	nativeHandler, nativeHTTPServer, nativeRoutes, nativeProcedures = handler, web, routes, procedures
}

// ShowPort shows a port of a sandbox to who was admitted with an API key, or to anybody.
type ShowPort = func(w http.ResponseWriter, r *http.Request, id string, port int, key string)

var e2bHandler func(*Server, ShowPort) http.Handler

// SpeakE2B has the tests of this package go through the other dialect.
func SpeakE2B(handler func(*Server, ShowPort) http.Handler) { e2bHandler = handler }

// world is a server on a double of a node and a real store, with a client.
type world struct {
	testing.TB
	dir    string // of the database
	node   *double
	store  *faultyStore
	server *Server
	client *wire.Client
	url    string
	secret string
	log    *syncBuffer
	onCall func(context.Context) // sees the context of each Connect call; set before the call
}

// afterAll calls f when ctx is done and all that was derived of it has been told:
// the lock that Cause takes is held until then. AfterFunc alone may come first.
func afterAll(ctx context.Context, f func()) {
	context.AfterFunc(ctx, func() {
		_ = context.Cause(ctx)
		f()
	})
}

// faultyStore fails the methods a test names.
type faultyStore struct {
	store.Store
	mu   sync.Mutex
	fail map[string]error
	slow func(sandbox.Sandbox) // runs before a sandbox is recorded
	read func(store.Key)       // runs after a key was looked up
	gets atomic.Int64          // image look-ups
	keys atomic.Int64          // key look-ups

	lists atomic.Int64 // of keys
}

func (f *faultyStore) failing(method string, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fail[method] = err
}

// holdCreates makes every record wait for gate, and says which one does.
func (f *faultyStore) holdCreates(gate chan struct{}) (reached chan sandbox.Sandbox) {
	reached = make(chan sandbox.Sandbox, 1)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.slow = func(sb sandbox.Sandbox) { reached <- sb; <-gate }
	return reached
}

func (f *faultyStore) err(method string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.fail[method]
}

func (f *faultyStore) CreateSandbox(ctx context.Context, sb sandbox.Sandbox, idem store.Idempotency) (sandbox.Sandbox, bool, error) {
	if err := f.err("CreateSandbox"); err != nil {
		return sandbox.Sandbox{}, false, err
	}
	f.mu.Lock()
	slow := f.slow
	f.mu.Unlock()
	if slow != nil {
		slow(sb)
	}
	return f.Store.CreateSandbox(ctx, sb, idem)
}

func (f *faultyStore) EndSandbox(ctx context.Context, id string, end sandbox.End) (sandbox.Sandbox, error) {
	if err := f.err("EndSandbox"); err != nil {
		return sandbox.Sandbox{}, err
	}
	return f.Store.EndSandbox(ctx, id, end)
}

func (f *faultyStore) ForgetSandbox(ctx context.Context, id string) error {
	if err := f.err("ForgetSandbox"); err != nil {
		return err
	}
	return f.Store.ForgetSandbox(ctx, id)
}

func (f *faultyStore) CreateSnapshot(ctx context.Context, snap sandbox.Snapshot) (sandbox.Snapshot, error) {
	if err := f.err("CreateSnapshot"); err != nil {
		return sandbox.Snapshot{}, err
	}
	return f.Store.CreateSnapshot(ctx, snap)
}

func (f *faultyStore) CreateTemplateVersion(ctx context.Context, t sandbox.Template, snap sandbox.Snapshot) (sandbox.Template, error) {
	if err := f.err("CreateTemplateVersion"); err != nil {
		return sandbox.Template{}, err
	}
	return f.Store.CreateTemplateVersion(ctx, t, snap)
}

func (f *faultyStore) UpdateSandbox(ctx context.Context, id string, change func(*sandbox.Sandbox) error) (sandbox.Sandbox, error) {
	if err := f.err("UpdateSandbox"); err != nil {
		return sandbox.Sandbox{}, err
	}
	return f.Store.UpdateSandbox(ctx, id, change)
}

func (f *faultyStore) GetImage(ctx context.Context, name string) (sandbox.Image, error) {
	f.gets.Add(1)
	return f.Store.GetImage(ctx, name)
}

func (f *faultyStore) PutPosition(ctx context.Context, shipment string, p sandbox.ShipmentPosition) error {
	if err := f.err("PutPosition"); err != nil && (p.Pending == 0) {
		return err
	}
	if err := f.err("PutPending"); err != nil && p.Pending != 0 {
		return err
	}
	return f.Store.PutPosition(ctx, shipment, p)
}

func (f *faultyStore) KeyByHash(ctx context.Context, hash []byte) (store.Key, error) {
	f.keys.Add(1)
	k, err := f.Store.KeyByHash(ctx, hash)
	f.mu.Lock()
	read := f.read
	f.mu.Unlock()
	if err == nil && read != nil {
		read(k)
	}
	return k, err
}

func (f *faultyStore) ListKeys(ctx context.Context) ([]store.Key, error) {
	f.lists.Add(1)
	return f.Store.ListKeys(ctx)
}

func (f *faultyStore) AppendAudit(ctx context.Context, entries []sandbox.AuditEntry) error {
	if err := f.err("AppendAudit"); err != nil {
		return err
	}
	return f.Store.AppendAudit(ctx, entries)
}

var errStore = sandbox.Errorf(sandbox.Unavailable, "store", "disk on fire")

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}
func (b *syncBuffer) String() string { b.mu.Lock(); defer b.mu.Unlock(); return b.b.String() }

func newWorld(t testing.TB, change ...func(*Config)) *world {
	t.Helper()
	dir := t.TempDir()
	st, err := sqlite.Open(t.Context(), filepath.Join(dir, "cove.db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = st.Close() })
	w := &world{TB: t, dir: dir, node: newDouble(t), store: &faultyStore{Store: st, fail: map[string]error{}}, log: &syncBuffer{}}
	cfg := Config{Store: w.store, Node: w.node, Version: "test", SecretKeys: seal.NewKeyring(seal.NewKey()),
		Logger: slog.New(slog.NewTextHandler(w.log, &slog.HandlerOptions{Level: slog.LevelDebug}))}
	for _, f := range change {
		f(&cfg)
	}
	if w.server, err = New(cfg); err != nil {
		t.Fatal(err)
	}
	if _, err := w.server.PublishImage(t.Context(), agenttest.Image, "base"); err != nil {
		t.Fatal(err)
	}
	var created bool
	if w.secret, created, err = w.server.EnsureFirstKey(t.Context()); err != nil || !created {
		t.Fatal(created, err)
	}

	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = w.server.Run(ctx) })
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	api := nativeHandler(w.server, cfg.Logger)
	web := nativeHTTPServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if w.onCall != nil {
			w.onCall(r.Context())
		}
		api.ServeHTTP(rw, r)
	}))
	web.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	wg.Go(func() { _ = web.Serve(l) })
	w.url = "http://" + l.Addr().String()
	w.client = wire.NewClient(w.url, w.secret, wire.Options{})
	t.Cleanup(func() {
		now, stop := context.WithCancel(context.Background())
		stop()
		if left := w.server.Drain(now); left != 0 {
			t.Errorf("%d calls are stuck", left)
		}
		w.client.Close()
		_ = web.Close()
		cancel()
		wg.Wait()
		if c := w.node.saw(); c.held+c.holds != 0 {
			t.Errorf("%d calls are not over, %d holds not released", c.held, c.holds)
		}
	})
	return w
}

// all sees everything, own what the default tenant has.
func (w *world) all() context.Context { return store.Installation(w.Context()) }
func (w *world) own() context.Context { return store.In(w.Context(), sandbox.DefaultTenant) }

func (w *world) create(spec *covev1.SandboxSpec) *covev1.Sandbox {
	w.Helper()
	r, err := w.client.Sandboxes.Create(w.Context(), connect.NewRequest(&covev1.CreateSandboxRequest{Spec: spec}))
	if err != nil {
		w.Fatal(err)
	}
	return r.Msg.Sandbox
}

func (w *world) get(id string) *covev1.Sandbox {
	w.Helper()
	r, err := w.client.Sandboxes.Get(w.Context(), connect.NewRequest(&covev1.GetSandboxRequest{Id: id}))
	if err != nil {
		w.Fatal(err)
	}
	return r.Msg.Sandbox
}

func (w *world) kill(id string) *covev1.Sandbox {
	w.Helper()
	r, err := w.client.Sandboxes.Kill(w.Context(), connect.NewRequest(&covev1.KillRequest{Id: id}))
	if err != nil {
		w.Fatal(err)
	}
	return r.Msg.Sandbox
}

// start begins a command and returns its stream after the Started event.
func (w *world) start(id, execID, command string) *connect.ServerStreamForClient[covev1.ProcessEvent] {
	w.Helper()
	s, err := w.client.Processes.Start(w.Context(), connect.NewRequest(&covev1.StartProcessRequest{SandboxId: id,
		Process: &covev1.ProcessSpec{ExecId: execID, Command: command}}))
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() { _ = s.Close() })
	ok := s.Receive()
	for ok && s.Msg().GetKeepAlive() != nil { // a start may take longer than a stream is quiet for
		ok = s.Receive()
	}
	if !ok || s.Msg().GetStarted() == nil {
		w.Fatalf("no start: %v, %v", s.Msg(), s.Err())
	}
	return s
}

// rest reads a stream to its end.
func rest(s *connect.ServerStreamForClient[covev1.ProcessEvent]) (out string, end *covev1.ProcessEnd, err error) {
	for s.Receive() {
		out += string(s.Msg().GetOutput().GetData())
		if e := s.Msg().GetEnd(); e != nil {
			end = e
		}
	}
	return out, end, s.Err()
}

// ended waits until the store has a sandbox's end.
func (w *world) ended(id string) sandbox.End {
	w.Helper()
	end, ok := w.server.awaitEnd(w.own(), id, time.Minute)
	if !ok {
		w.Fatalf("sandbox %s did not end", id)
	}
	return end
}

// http sends a plain request with the key and returns status, headers, body.
func (w *world) http(method, path string, body io.Reader, headers ...string) (*http.Response, string) {
	w.Helper()
	req, err := http.NewRequestWithContext(w.Context(), method, w.url+path, body)
	if err != nil {
		w.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+w.secret)
	for i := 0; i < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	resp, err := plainHTTP.Do(req)
	if err != nil {
		w.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		w.Fatal(err)
	}
	return resp, string(b)
}

// plainHTTP keeps no connections, so that none outlives a test.
var plainHTTP = &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DisableCompression: true}}

func wantError(t testing.TB, err error, class *sandbox.Error, words ...string) *sandbox.Error {
	t.Helper()
	var e *sandbox.Error
	if !errors.As(err, &e) || !errors.Is(err, class) {
		t.Fatalf("want %s, got %v", class.Class, err)
	}
	for _, word := range words {
		if !strings.Contains(e.Error()+" "+e.Hint, word) {
			t.Errorf("%q (hint %q) does not say %q", e, e.Hint, word)
		}
	}
	return e
}

func all[T any](t *testing.T, list func(context.Context) ([]T, error)) []T {
	t.Helper()
	out, err := list(store.Installation(t.Context()))
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// small is what a sandbox asks for at least.
var small = sandbox.Spec{Image: "base"}.WithDefaults(sandbox.StandardDefaults())

// place puts a sandbox on the node, in its episode, behind the server's back.
func (w *world) place(sb sandbox.Sandbox) {
	w.Helper()
	_, err := w.node.Machine.Create(w.Context(), sb, agenttest.Image)
	for range sb.Episode - 1 {
		if err == nil {
			_, _, err = w.node.Machine.Reset(w.Context(), sb.ID)
		}
	}
	if err != nil {
		w.Fatal(err)
	}
}

// die ends a sandbox, as its kernel would or the node.
func (w *world) die(id string, cause sandbox.Cause) {
	w.Helper()
	switch cause {
	case sandbox.OOM, sandbox.InitKilled, sandbox.Infra:
		w.node.die(id, cause)
	default:
		if err := w.node.Kill(w.Context(), id, sandbox.End{Cause: cause}); err != nil {
			w.Fatal(err)
		}
		w.server.ends.poke() // a node tells of what it ended by itself
	}
}

// records is every sandbox in the store, ended ones too.
func (w *world) records() (ids []string) {
	w.Helper()
	sbs, _, err := w.store.ListSandboxes(w.all(), store.Filter{States: sandbox.States, PageSize: 1000})
	if err != nil {
		w.Fatal(err)
	}
	for _, sb := range sbs {
		ids = append(ids, sb.ID)
	}
	slices.Sort(ids)
	return ids
}

// tick is the pause between two looks at something that has no event.
func tick() <-chan time.Time { return time.After(time.Millisecond) }
