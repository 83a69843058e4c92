package server

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
	"github.com/cove-sandbox/cove/wire"
)

func (s *shared) make(c *wire.Client) (*covev1.Sandbox, error) {
	r, err := c.Sandboxes.Create(s.Context(), connect.NewRequest(&covev1.CreateSandboxRequest{}))
	if err != nil {
		return nil, err
	}
	return r.Msg.Sandbox, nil
}

func (s *shared) quota(tenant string, q *covev1.Quota) {
	s.Helper()
	if _, err := s.client.Tenants.SetQuota(s.Context(), connect.NewRequest(&covev1.SetQuotaRequest{Name: tenant, Quota: q})); err != nil {
		s.Fatal(err)
	}
}

func TestQuotas(t *testing.T) {
	now := time.Now()
	var mu sync.Mutex
	clock := func() time.Time { mu.Lock(); defer mu.Unlock(); return now }
	s := newShared(t, func(c *Config) { c.Clock = clock })
	ctx := t.Context()

	s.quota("blue", &covev1.Quota{Sandboxes: 2})
	first, err := s.make(s.blue)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.make(s.blue); err != nil {
		t.Fatal(err)
	}
	_, err = s.make(s.blue)
	if e := wantError(t, err, sandbox.ErrQuotaExceeded, "sandboxes", "2"); e.RetryAfter == 0 {
		t.Error("no time to come back")
	}
	if _, err := s.make(s.red); err != nil {
		t.Errorf("another tenant is not bound: %v", err)
	}
	// Over HTTP: 429 with Retry-After.
	resp, _ := s.http("POST", "/cove.v1.Sandboxes/Create", strings.NewReader("{}"), "Authorization", "Bearer "+s.keys["blue"], "Content-Type", "application/json")
	if resp.StatusCode != 429 || resp.Header.Get("Retry-After") == "" {
		t.Errorf("%d, Retry-After %q", resp.StatusCode, resp.Header.Get("Retry-After"))
	}
	// A fork is no way around.
	fork, err := s.blue.Sandboxes.Fork(ctx, connect.NewRequest(&covev1.ForkRequest{Id: first.Id, Count: 2, MinReady: 1}))
	wantError(t, err, sandbox.ErrQuotaExceeded)
	_ = fork
	// An end gives the place back, however it comes.
	if _, err := s.blue.Sandboxes.Kill(ctx, connect.NewRequest(&covev1.KillRequest{Id: first.Id})); err != nil {
		t.Fatal(err)
	}
	second, err := s.make(s.blue)
	if err != nil {
		t.Fatal(err)
	}
	s.node.die(second.Id, sandbox.OOM)
	if _, ok := s.server.awaitEnd(s.all(), second.Id, time.Minute); !ok {
		t.Fatal("no end")
	}
	if _, err := s.make(s.blue); err != nil {
		t.Fatal(err)
	}
	// A create that fails holds nothing.
	s.quota("blue", &covev1.Quota{Sandboxes: 3})
	s.node.onCreate = func(context.Context, sandbox.Sandbox) error { return errors.New("broken") }
	for range 5 {
		if _, err := s.make(s.blue); sandbox.ClassOf(err) == sandbox.QuotaExceeded {
			t.Fatal(err)
		}
	}
	s.node.onCreate = nil
	if _, err := s.make(s.blue); err != nil {
		t.Error(err)
	}
	used, err := s.blue.Tenants.Get(ctx, connect.NewRequest(&covev1.GetTenantRequest{}))
	if err != nil || used.Msg.Tenant.Used.Sandboxes != 3 || used.Msg.Tenant.Used.Cpu != 3 {
		t.Errorf("%v, %v", used, err)
	}
	// What is counted is what the store says, also after a start.
	if err := s.server.Reconcile(ctx); err != nil {
		t.Fatal(err)
	}
	if u := s.server.reservations.usage(s.tenants["blue"]); u.Sandboxes != 3 {
		t.Errorf("counted anew: %+v", u)
	}

	s.quota("blue", &covev1.Quota{Disk: 35 << 30}) // three sandboxes of 10 GiB
	if _, err := s.blue.Volumes.Create(ctx, connect.NewRequest(&covev1.CreateVolumeRequest{Name: "v", Size: 4 << 30})); err != nil {
		t.Error(err)
	}
	_, err = s.blue.Volumes.Resize(ctx, connect.NewRequest(&covev1.ResizeVolumeRequest{Name: "v", Size: 6 << 30}))
	wantError(t, err, sandbox.ErrQuotaExceeded, "disk")
	_, err = s.blue.Volumes.Clone(ctx, connect.NewRequest(&covev1.CloneVolumeRequest{Name: "v", NewName: "w"}))
	wantError(t, err, sandbox.ErrQuotaExceeded, "disk")
	_, err = s.make(s.blue)
	wantError(t, err, sandbox.ErrQuotaExceeded, "disk")

	s.quota("red", &covev1.Quota{SnapshotBytes: 1})
	ev, err := s.red.Snapshots.Create(ctx, connect.NewRequest(&covev1.CreateSnapshotRequest{Sandbox: s.box}))
	if err == nil {
		for ev.Receive() {
		}
		err = ev.Err()
		_ = ev.Close()
	}
	wantError(t, err, sandbox.ErrQuotaExceeded, "snapshot")

	s.quota("blue", &covev1.Quota{CreatesPerSecond: 2})
	for range 2 {
		if _, err := s.make(s.blue); err != nil {
			t.Fatal(err)
		}
	}
	_, err = s.make(s.blue)
	e := wantError(t, err, sandbox.ErrQuotaExceeded, "creates per second")
	mu.Lock()
	now = now.Add(e.RetryAfter + time.Millisecond)
	mu.Unlock()
	if _, err := s.make(s.blue); err != nil {
		t.Errorf("after %s: %v", e.RetryAfter, err)
	}
}

// A fork wider than its tenant's rate has all its children; whoever comes next
// waits for them, and comes back when told to.
func TestForkUnderARate(t *testing.T) {
	now := time.Now()
	var mu sync.Mutex
	s := newShared(t, func(c *Config) { c.Clock = func() time.Time { mu.Lock(); defer mu.Unlock(); return now } })
	pass := func(d time.Duration) { mu.Lock(); now = now.Add(d); mu.Unlock() }
	fork := func(count, ready int32) (int, error) {
		r, err := s.red.Sandboxes.Fork(t.Context(), connect.NewRequest(&covev1.ForkRequest{Id: s.box, Count: count, MinReady: ready}))
		if err != nil {
			return 0, err
		}
		n := 0
		for _, c := range r.Msg.Results {
			if c.Sandbox != nil {
				n++
			}
		}
		return n, nil
	}
	s.quota("red", &covev1.Quota{CreatesPerSecond: 2})
	for range 3 {
		if n, err := fork(4, 0); n != 4 || err != nil {
			t.Fatalf("%d children, %v", n, err)
		}
		_, err := fork(4, 0)
		e := wantError(t, err, sandbox.ErrQuotaExceeded, "creates per second")
		if e.RetryAfter != 2*time.Second {
			t.Errorf("come back after %s", e.RetryAfter)
		}
		pass(e.RetryAfter)
	}
	// One whose children cannot be is refused before, and takes nothing.
	live := int64(s.node.liveCount())
	s.quota("red", &covev1.Quota{CreatesPerSecond: 2, Sandboxes: live + 1})
	_, err := fork(4, 0)
	wantError(t, err, sandbox.ErrQuotaExceeded, "sandboxes")
	if n, err := fork(4, 1); n != 1 || err != nil {
		t.Errorf("%d children, %v", n, err)
	}
}

// What no node of this size ever has room for is said on its first turn, also
// when others wait: it must not hold up its tenant, nor be told to come again.
func TestWhatNeverFitsDoesNotWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r createQueue
		r.init(func(context.Context) (sandbox.Capacity, error) {
			all := sandbox.Resources{MilliCPU: 1000, Memory: 1 << 30, Disk: 1 << 30}
			return sandbox.Capacity{Total: all, Used: all}, nil
		})
		full := &sandbox.Error{Class: sandbox.NoCapacity}
		waits := make(chan error, 1)
		go func() {
			waits <- r.enter(t.Context(), place{tenant: "a", wait: 10 * time.Second, want: sandbox.Resources{Memory: 1}, count: 1}, func() error { return full })
		}()
		synctest.Wait()
		for _, want := range []sandbox.Resources{{Memory: 2 << 30}, {MilliCPU: 1001}, {Disk: 2 << 30}, {Memory: -1}} {
			start := time.Now()
			err := r.enter(t.Context(), place{tenant: "a", wait: 10 * time.Second, want: want, count: 1}, func() error { return sandbox.InvalidField("memory", "too large") })
			if !errors.Is(err, sandbox.ErrInvalid) || time.Since(start) > 2*time.Second {
				t.Errorf("%+v: %v after %v", want, err, time.Since(start))
			}
		}
		if err := <-waits; !errors.Is(err, sandbox.ErrNoCapacity) {
			t.Errorf("who waited for room: %v", err)
		}
	})
}

// In the waiting room, with virtual time: a node with one place that is free
// every 100 ms is shared in turn, whoever does not get one in time leaves with
// no_capacity, and nobody is left behind.
func TestCreateQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r createQueue
		var mu sync.Mutex // guards what follows
		free, served, order := int64(0), map[string]int{}, ""
		const places = 100
		r.init(func(context.Context) (sandbox.Capacity, error) {
			mu.Lock()
			defer mu.Unlock()
			return sandbox.Capacity{MaxSandboxes: places, Sandboxes: places - free}, nil
		})
		full := &sandbox.Error{Class: sandbox.NoCapacity}
		enter := func(tenant string) error {
			return r.enter(t.Context(), place{tenant: tenant, weight: 0, wait: 3 * time.Second, want: sandbox.Resources{}, count: 1}, func() error {
				mu.Lock()
				defer mu.Unlock()
				if free == 0 {
					return full
				}
				free--
				served[tenant]++
				order += tenant
				return nil
			})
		}
		var wg sync.WaitGroup
		failed := 0
		for i := range 60 {
			tenant := "a"
			if i >= 50 {
				tenant = "b"
			}
			wg.Go(func() {
				if err := enter(tenant); err != nil {
					if !errors.Is(err, sandbox.ErrNoCapacity) {
						t.Error(err)
					}
					mu.Lock()
					failed++
					mu.Unlock()
				}
			})
			synctest.Wait() // in this order
		}
		for range 29 {
			time.Sleep(100 * time.Millisecond)
			mu.Lock()
			free++
			mu.Unlock()
			r.wake()
			synctest.Wait()
		}
		wg.Wait()
		if want := strings.Repeat("ab", 10) + strings.Repeat("a", 9); order != want || failed != 31 {
			t.Errorf("served in the order %s, want %s; %d failed, want 31", order, want, failed)
		}
		if r.mu.queue.Len() != 0 || len(r.mu.turns) != 0 {
			t.Errorf("%d are left", r.mu.queue.Len())
		}
		// One that asks for too much does not hold up another tenant, and one
		// whose caller leaves goes.
		ctx, cancel := context.WithCancel(t.Context())
		wg.Go(func() {
			if err := r.enter(ctx, place{tenant: "big", weight: 0, wait: time.Hour, want: sandbox.Resources{}, count: 1}, func() error { return full }); !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
		})
		synctest.Wait()
		wg.Go(func() {
			if err := enter("c"); err != nil {
				t.Error(err)
			}
		})
		synctest.Wait()
		mu.Lock()
		free++
		mu.Unlock()
		time.Sleep(time.Second) // without a wake: it looks itself
		synctest.Wait()
		if served["c"] != 1 {
			t.Error("held up by one that does not fit")
		}
		cancel()
		wg.Wait()
		if r.mu.queue.Len() != 0 || len(r.mu.turns) != 0 {
			t.Errorf("%d are left", r.mu.queue.Len())
		}
	})
}

// A create on a full node is served when something ends.
func TestCreateWaitsForCapacity(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.QueueWait = time.Minute })
	first := w.create(nil)
	var mu sync.Mutex
	tried := make(chan struct{}, 100)
	full := true
	w.node.onCreate = func(context.Context, sandbox.Sandbox) error {
		tried <- struct{}{}
		mu.Lock()
		defer mu.Unlock()
		if full {
			return &sandbox.Error{Class: sandbox.NoCapacity, Msg: "full", RetryAfter: time.Second}
		}
		return nil
	}
	done := make(chan *covev1.Sandbox, 1)
	go func() {
		r, err := w.client.Sandboxes.Create(w.Context(), connect.NewRequest(&covev1.CreateSandboxRequest{}))
		if err != nil {
			t.Error(err)
		}
		done <- r.Msg.Sandbox
	}()
	<-tried
	mu.Lock()
	full = false
	mu.Unlock()
	w.kill(first.Id)
	if sb := <-done; w.get(sb.Id).State != covev1.SandboxState_SANDBOX_STATE_RUNNING {
		t.Error(sb)
	}
}

func TestKeyRights(t *testing.T) {
	now := time.Now()
	var mu sync.Mutex
	s := newShared(t, func(c *Config) { c.Clock = func() time.Time { mu.Lock(); defer mu.Unlock(); return now } })
	pass := func(d time.Duration) { mu.Lock(); now = now.Add(d); mu.Unlock() }
	ctx := t.Context()
	get := func(c *wire.Client) error {
		_, err := c.Sandboxes.Get(ctx, connect.NewRequest(&covev1.GetSandboxRequest{Id: s.box}))
		return err
	}
	kill := func(c *wire.Client) error {
		_, err := c.Sandboxes.Kill(ctx, connect.NewRequest(&covev1.KillRequest{Id: "nosuchone"}))
		return err
	}
	images := func(c *wire.Client) error {
		_, err := c.Images.List(ctx, connect.NewRequest(&covev1.ListImagesRequest{}))
		return err
	}

	dev := s.dial(s.key(s.red, &covev1.CreateKeyRequest{Name: "dev", Role: "developer"}))
	if err := get(dev); err != nil {
		t.Error(err)
	}
	_, err := dev.Keys.Create(ctx, connect.NewRequest(&covev1.CreateKeyRequest{Name: "x"}))
	wantError(t, err, sandbox.ErrDenied, "admin", "developer")

	scoped := s.dial(s.key(s.red, &covev1.CreateKeyRequest{Name: "scoped", Role: "admin", Scopes: []string{"sandboxes:read", "images", "keys"}}))
	if err := get(scoped); err != nil {
		t.Error(err)
	}
	if err := images(scoped); err != nil {
		t.Error(err)
	}
	wantError(t, kill(scoped), sandbox.ErrDenied, "scopes")
	if resp, _ := s.http("GET", "/v1/sandboxes/"+s.box+"/files?path=/redfile", nil, "Authorization", "Bearer "+s.keys["red"]); resp.StatusCode != 200 {
		t.Error(resp.StatusCode)
	}
	_, err = scoped.Keys.Create(ctx, connect.NewRequest(&covev1.CreateKeyRequest{Name: "wider", Scopes: []string{"sandboxes"}}))
	wantError(t, err, sandbox.ErrDenied, "scopes")
	k, err := scoped.Keys.Create(ctx, connect.NewRequest(&covev1.CreateKeyRequest{Name: "heir"}))
	if err != nil || strings.Join(k.Msg.Key.Scopes, " ") != "sandboxes:read images keys" {
		t.Error(k, err)
	}

	short := s.dial(s.key(s.red, &covev1.CreateKeyRequest{Name: "short", Expires: durationpb.New(time.Hour)}))
	if err := get(short); err != nil {
		t.Error(err)
	}
	_, err = short.Keys.Create(ctx, connect.NewRequest(&covev1.CreateKeyRequest{Name: "longer"}))
	wantError(t, err, sandbox.ErrDenied, "expires")
	pass(time.Hour)
	wantError(t, get(short), sandbox.ErrUnauthenticated, "expired")

	// Rotation: both secrets for the grace, then the new one.
	old := s.key(s.red, &covev1.CreateKeyRequest{Name: "rotated"})
	id := s.keyID
	if err := get(s.dial(old)); err != nil {
		t.Error(err)
	}
	r, err := s.red.Keys.Rotate(ctx, connect.NewRequest(&covev1.RotateKeyRequest{Id: id, Grace: durationpb.New(time.Minute)}))
	if err != nil || r.Msg.Key.OldSecretUntil == nil {
		t.Fatal(r, err)
	}
	for _, secret := range []string{old, r.Msg.Secret} {
		if err := get(s.dial(secret)); err != nil {
			t.Error(err)
		}
	}
	pass(time.Minute)
	wantError(t, get(s.dial(old)), sandbox.ErrUnauthenticated, "rotated")
	if err := get(s.dial(r.Msg.Secret)); err != nil {
		t.Error(err)
	}
	if _, err := s.red.Keys.Rotate(ctx, connect.NewRequest(&covev1.RotateKeyRequest{Id: id, Grace: durationpb.New(0)})); err != nil {
		t.Error(err)
	}
	wantError(t, get(s.dial(r.Msg.Secret)), sandbox.ErrUnauthenticated)

	// A tenant that is gone takes its keys along.
	s.tenant("gone")
	gone := s.dial(s.keys["gone"])
	if err := images(gone); err != nil {
		t.Fatal(err)
	}
	if _, err := s.client.Tenants.Delete(ctx, connect.NewRequest(&covev1.DeleteTenantRequest{Name: "gone"})); err != nil {
		t.Fatal(err)
	}
	wantError(t, images(gone), sandbox.ErrUnauthenticated)
	_, err = s.client.Tenants.Delete(ctx, connect.NewRequest(&covev1.DeleteTenantRequest{Name: "red"}))
	wantError(t, err, sandbox.ErrPrecondition)
}

// Names an installation's admin shares are everybody's to use and nobody else's
// to move.
func TestSharedImageNames(t *testing.T) {
	s := newShared(t)
	if resp, body := s.http("PUT", "/v1/images?name=torch&shared=true", strings.NewReader("torch")); resp.StatusCode != 200 {
		t.Fatal(body)
	}
	for who, c := range map[string]*wire.Client{"red": s.red, "blue": s.blue} {
		if _, err := c.Sandboxes.Create(t.Context(), connect.NewRequest(&covev1.CreateSandboxRequest{Spec: &covev1.SandboxSpec{Image: "torch"}})); err != nil {
			t.Error(who, err)
		}
	}
	_, err := s.blue.Images.Remove(t.Context(), connect.NewRequest(&covev1.RemoveImageRequest{Name: "torch"}))
	wantError(t, err, sandbox.ErrDenied)
	if _, err := s.client.Images.Remove(t.Context(), connect.NewRequest(&covev1.RemoveImageRequest{Name: "torch"})); err != nil {
		t.Error(err)
	}
}

func (s *shared) auditLog(c *wire.Client, m *covev1.AuditRequest) []*covev1.AuditEntry {
	s.Helper()
	st, err := c.System.Audit(s.Context(), connect.NewRequest(m))
	if err != nil {
		s.Fatal(err)
	}
	defer st.Close()
	var out []*covev1.AuditEntry
	for st.Receive() {
		out = append(out, st.Msg())
	}
	if err := st.Err(); err != nil {
		s.Fatal(err)
	}
	return out
}

func TestAudit(t *testing.T) {
	s := newShared(t)
	ctx := t.Context()
	if _, err := s.red.Sandboxes.Get(ctx, connect.NewRequest(&covev1.GetSandboxRequest{Id: s.box})); err != nil {
		t.Fatal(err)
	}
	reader := s.dial(s.keys["reader"])
	_, err := reader.Sandboxes.Kill(ctx, connect.NewRequest(&covev1.KillRequest{Id: s.box}))
	wantError(t, err, sandbox.ErrDenied)
	_, err = s.blue.Sandboxes.Kill(ctx, connect.NewRequest(&covev1.KillRequest{Id: s.box}))
	wantError(t, err, sandbox.ErrNotFound)

	has := func(log []*covev1.AuditEntry, op, thing, outcome string) bool {
		for _, e := range log {
			if e.Op == op && e.Outcome == outcome && (thing == "" || strings.Contains(strings.Join(e.Things, " "), thing)) && e.Remote == "127.0.0.1" && e.KeyName != "" && e.At != nil {
				return true
			}
		}
		return false
	}
	red, blue := s.auditLog(s.red, &covev1.AuditRequest{}), s.auditLog(s.blue, &covev1.AuditRequest{})
	for _, want := range [][3]string{{"sandbox.create", "sandbox:" + s.box, "ok"}, {"process.start", "sandbox:" + s.box, "ok"}, {"snapshot.create", "sandbox:" + s.box, "ok"},
		{"file.write", "sandbox:" + s.box, "ok"}, {"volume.upload", "id:data", "ok"}, {"image.import", "name:mine", "ok"}, {"key.create", "key:" + s.keyID, "ok"}, {"sandbox.kill", "", "permission_denied"}} {
		if !has(red, want[0], want[1], want[2]) {
			t.Errorf("nothing about %s %s %s in %v", want[0], want[1], want[2], red)
		}
	}
	if !has(blue, "sandbox.kill", s.box, "not_found") || has(blue, "sandbox.create", "", "ok") {
		t.Errorf("blue's log: %v", blue)
	}
	if has(red, "sandbox.get", "", "ok") {
		t.Error("looking is in the log")
	}
	all := s.auditLog(s.client, &covev1.AuditRequest{All: true})
	var chain []sandbox.AuditEntry
	text := ""
	for _, e := range all {
		chain = append(chain, sandbox.AuditEntry{Seq: e.Seq, At: e.At.AsTime(), Tenant: e.Tenant, Key: e.Key, KeyName: e.KeyName, Remote: e.Remote, Op: e.Op, Things: e.Things, Outcome: e.Outcome, Prev: e.Prev, Hash: e.Hash})
		text += fmt.Sprint(e)
	}
	if err := store.CheckAudit(chain); err != nil || len(all) != len(red)+len(blue)+4 { // two tenants and their keys were made by root
		t.Errorf("%d of %d and %d, %v", len(all), len(red), len(blue), err)
	}
	for _, secret := range []string{"redsecret", "cove_", "TOKEN", "sleep"} {
		if strings.Contains(text, secret) {
			t.Errorf("%q is in the log", secret)
		}
	}

	// Following goes on with what is added.
	st, err := s.red.System.Audit(ctx, connect.NewRequest(&covev1.AuditRequest{Follow: true, After: all[len(all)-1].Seq}))
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	if _, err := s.red.Sandboxes.Reset(ctx, connect.NewRequest(&covev1.ResetRequest{Id: s.box})); err != nil {
		t.Fatal(err)
	}
	if !st.Receive() || st.Msg().Op != "sandbox.reset" {
		t.Error(st.Msg(), st.Err())
	}
}

// A store that fails for a while loses no entry.
func TestAuditSurvivesTheStore(t *testing.T) {
	w := newWorld(t)
	w.store.failing("AppendAudit", errStore)
	for range 3 {
		w.create(nil)
	}
	w.server.audit.flush(t.Context())
	w.store.failing("AppendAudit", nil)
	for !w.server.audit.flush(t.Context()) {
		<-tick()
	}
	entries, err := w.store.ListAudit(w.all(), 0, time.Time{}, 100)
	if err != nil || len(entries) != 3 {
		t.Errorf("%d entries, %v", len(entries), err)
	}
}

// Volumes asked for at once get no more of the quota than one after the other.
func TestVolumesAtOnceStayInTheQuota(t *testing.T) {
	s := newShared(t)
	const size = 64 << 20
	s.quota("blue", &covev1.Quota{Disk: 3*size + size/2})
	var wg sync.WaitGroup
	var made, refused atomic.Int64
	for i := range 16 {
		wg.Go(func() {
			_, err := s.blue.Volumes.Create(t.Context(), connect.NewRequest(&covev1.CreateVolumeRequest{Name: fmt.Sprintf("v%d", i), Size: size}))
			switch {
			case err == nil:
				made.Add(1)
			case errors.Is(wire.FromConnect(err), sandbox.ErrQuotaExceeded):
				refused.Add(1)
			default:
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if made.Load() != 3 || refused.Load() != 13 {
		t.Errorf("%d made, %d refused; three fit", made.Load(), refused.Load())
	}
}
