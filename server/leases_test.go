package server

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

// leased is a world whose time the test moves, with one lease of a minute.
func leased(t *testing.T, change ...func(*Config)) (w *world, pass func(time.Duration), lease string) {
	var mu sync.Mutex
	now := time.Now()
	clock := func() time.Time { mu.Lock(); defer mu.Unlock(); return now }
	w = newWorld(t, append(change, func(c *Config) { c.Clock = clock })...)
	pass = func(d time.Duration) { mu.Lock(); now = now.Add(d); mu.Unlock() }
	return w, pass, w.lease(time.Minute)
}

func (w *world) lease(ttl time.Duration) string {
	r, err := w.client.Leases.Create(w.Context(), connect.NewRequest(&covev1.CreateLeaseRequest{Ttl: durationpb.New(ttl), Name: "trainer"}))
	if err != nil {
		w.Fatal(err)
	}
	return r.Msg.Lease.Id
}

func (w *world) beat(lease string) error {
	_, err := w.client.Leases.Heartbeat(w.Context(), connect.NewRequest(&covev1.HeartbeatRequest{Id: lease}))
	return err
}

func (w *world) reap() {
	w.Helper()
	if _, ok := w.server.reapLeases(w.Context()); !ok {
		w.Error("not all was reaped")
	}
}

func TestSandboxesEndWithTheirLease(t *testing.T) {
	w, pass, lease := leased(t)
	sb, other := w.create(&covev1.SandboxSpec{Lease: lease}), w.create(nil)
	kids, err := w.client.Sandboxes.Fork(t.Context(), connect.NewRequest(&covev1.ForkRequest{Id: sb.Id, Count: 2}))
	if err != nil {
		t.Fatal(err)
	}
	kept, err := w.client.Sandboxes.Fork(t.Context(), connect.NewRequest(&covev1.ForkRequest{Id: sb.Id, Count: 1, Lease: new("")}))
	if err != nil {
		t.Fatal(err)
	}
	if sb.Spec.Lease != lease || sb.ExpiresAt != nil || other.ExpiresAt == nil || kids.Msg.Results[1].Sandbox.Spec.Lease != lease {
		t.Errorf("%v %v %v", sb, other, kids.Msg)
	}
	if k := kept.Msg.Results[0].Sandbox; k.Spec.Lease != "" || k.ExpiresAt == nil {
		t.Errorf("one without a lease has the default timeout: %v", k)
	}
	if _, err := w.client.Sandboxes.Pause(t.Context(), connect.NewRequest(&covev1.PauseRequest{Id: kids.Msg.Results[0].Sandbox.Id, Cold: true})); err != nil {
		t.Fatal(err)
	}
	for range 5 {
		pass(50 * time.Second)
		if err := w.beat(lease); err != nil {
			t.Fatal(err)
		}
		w.reap()
	}
	list, err := w.client.Leases.List(t.Context(), connect.NewRequest(&covev1.ListLeasesRequest{}))
	if err != nil || len(list.Msg.Leases) != 1 || list.Msg.Leases[0].Sandboxes != 3 || list.Msg.Leases[0].Name != "trainer" {
		t.Fatal(list, err)
	}
	pass(time.Minute)
	w.reap()
	for _, id := range []string{sb.Id, kids.Msg.Results[0].Sandbox.Id, kids.Msg.Results[1].Sandbox.Id} {
		end := w.get(id).End
		if end.GetCause() != "lease_expired" || !strings.Contains(end.GetDetail(), lease) || !strings.Contains(end.GetDetail(), "keep=True") {
			t.Errorf("ended with %v", end)
		}
	}
	for _, id := range []string{other.Id, kept.Msg.Results[0].Sandbox.Id} {
		if end := w.get(id).End; end != nil {
			t.Errorf("another's ended: %v", end)
		}
	}
	wantError(t, w.beat(lease), sandbox.ErrNoLease)
	_, err = w.createWith(t.Context(), "", &covev1.SandboxSpec{Lease: lease})
	if e := wantError(t, err, sandbox.ErrNoLease); e.Field != "spec.lease" {
		t.Errorf("field %q", e.Field)
	}
	if left, err := w.store.ListLeases(w.all()); err != nil || len(left) != 0 {
		t.Errorf("records left: %v %v", left, err)
	}
}

func TestEndLease(t *testing.T) {
	w, _, lease := leased(t)
	sb := w.create(&covev1.SandboxSpec{Lease: lease})
	for i := range 2 { // the second time it is over
		r, err := w.client.Leases.End(t.Context(), connect.NewRequest(&covev1.EndLeaseRequest{Id: lease}))
		if err != nil || len(r.Msg.Ids) != 1-i {
			t.Fatal(r, err)
		}
		if end := w.get(sb.Id).End; end.GetCause() != "client_ended" || !strings.Contains(end.GetDetail(), "was ended by its client") {
			t.Errorf("ended with %v", end)
		}
	}
}

// A lease that ends while a sandbox is made with it takes that along.
func TestLeaseEndsDuringCreate(t *testing.T) {
	w, pass, lease := leased(t)
	reached, gate := make(chan struct{}), make(chan struct{})
	w.node.onCreate = func(context.Context, sandbox.Sandbox) error { close(reached); <-gate; return nil }
	done := make(chan error, 1)
	go func() { _, err := w.createWith(t.Context(), "k", &covev1.SandboxSpec{Lease: lease}); done <- err }()
	<-reached
	pass(time.Minute)
	reaped := make(chan struct{})
	go func() { defer close(reaped); w.server.reapLeases(w.Context()) }()
	close(gate)
	wantError(t, <-done, sandbox.ErrNoLease)
	<-reaped
	w.server.reapLeases(w.Context())
	settled(w)
	if w.node.liveCount() != 0 {
		t.Errorf("%d live", w.node.liveCount())
	}
}

// After a restart a lease has its whole time again; one without a record does not.
func TestLeasesSurviveARestart(t *testing.T) {
	w, pass, lease := leased(t)
	sb := w.create(&covev1.SandboxSpec{Lease: lease})
	lost := w.lease(time.Minute)
	orphan := w.create(&covev1.SandboxSpec{Lease: lost})
	if err := w.store.DeleteLease(w.all(), lost); err != nil {
		t.Fatal(err)
	}
	pass(time.Hour) // it was away
	w.server.leases.empty()
	if err := w.server.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.reap()
	if w.get(sb.Id).End != nil || w.get(orphan.Id).End.GetCause() != "lease_expired" {
		t.Errorf("%v %v", w.get(sb.Id).End, w.get(orphan.Id).End)
	}
	pass(59 * time.Second)
	if err := w.beat(lease); err != nil {
		t.Error(err)
	}
	pass(time.Minute)
	w.reap()
	if w.get(sb.Id).End.GetCause() != "lease_expired" {
		t.Error(w.get(sb.Id))
	}
}

func TestSetLease(t *testing.T) {
	w, pass, lease := leased(t)
	sb := w.create(&covev1.SandboxSpec{Lease: lease})
	set := func(lease string) (*covev1.Sandbox, error) {
		r, err := w.client.Sandboxes.SetLease(t.Context(), connect.NewRequest(&covev1.SetLeaseRequest{Id: sb.Id, Lease: lease}))
		if err != nil {
			return nil, err
		}
		return r.Msg.Sandbox, nil
	}
	_, err := set("nosuch")
	if e := wantError(t, err, sandbox.ErrNoLease); e.Field != "lease" {
		t.Errorf("field %q", e.Field)
	}
	got, err := set("")
	if err != nil || got.Spec.Lease != "" || got.ExpiresAt == nil {
		t.Fatalf("kept, it has the default timeout: %v %v", got, err)
	}
	pass(time.Hour)
	w.reap()
	if w.get(sb.Id).End != nil {
		t.Error(w.get(sb.Id))
	}
	next := w.lease(time.Minute)
	if _, err := set(next); err != nil {
		t.Fatal(err)
	}
	pass(time.Minute)
	w.reap()
	if w.get(sb.Id).End.GetCause() != "lease_expired" {
		t.Error(w.get(sb.Id))
	}
}

// A tenant's leases are its own.
func TestForeignLease(t *testing.T) {
	s := newShared(t)
	ctx := t.Context()
	r, err := s.red.Leases.Create(ctx, connect.NewRequest(&covev1.CreateLeaseRequest{}))
	if err != nil || r.Msg.Lease.Ttl.AsDuration() != 5*time.Minute {
		t.Fatal(r, err)
	}
	id := r.Msg.Lease.Id
	_, err = s.blue.Leases.Heartbeat(ctx, connect.NewRequest(&covev1.HeartbeatRequest{Id: id}))
	wantError(t, err, sandbox.ErrNoLease)
	_, err = s.blue.Leases.Get(ctx, connect.NewRequest(&covev1.GetLeaseRequest{Id: id}))
	wantError(t, err, sandbox.ErrNoLease)
	_, err = s.blue.Sandboxes.Create(ctx, connect.NewRequest(&covev1.CreateSandboxRequest{Spec: &covev1.SandboxSpec{Lease: id}}))
	wantError(t, err, sandbox.ErrNoLease)
	if _, err = s.blue.Leases.End(ctx, connect.NewRequest(&covev1.EndLeaseRequest{Id: id})); err != nil {
		t.Error(err)
	}
	if _, err = s.red.Leases.Get(ctx, connect.NewRequest(&covev1.GetLeaseRequest{Id: id})); err != nil {
		t.Error(err)
	}
	for _, ttl := range []time.Duration{-time.Second, time.Millisecond, 8 * 24 * time.Hour} {
		_, err = s.red.Leases.Create(ctx, connect.NewRequest(&covev1.CreateLeaseRequest{Ttl: durationpb.New(ttl)}))
		wantError(t, err, sandbox.ErrInvalid, "1s")
	}
}

// What says nothing about its end has the server's default; what does has not.
func TestDefaultTimeout(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Defaults = sandbox.StandardDefaults(); c.Defaults.Timeout = 2 * time.Hour })
	lives := func(s *covev1.SandboxSpec) time.Duration {
		sb := w.create(s)
		if sb.ExpiresAt == nil {
			return 0
		}
		return sb.ExpiresAt.AsTime().Sub(sb.CreatedAt.AsTime())
	}
	for name, c := range map[string]struct {
		spec *covev1.SandboxSpec
		want time.Duration
	}{
		"nothing":  {nil, 2 * time.Hour},
		"a time":   {&covev1.SandboxSpec{Timeout: durationpb.New(time.Minute)}, time.Minute},
		"never":    {&covev1.SandboxSpec{Timeout: durationpb.New(0)}, 0},
		"idleness": {&covev1.SandboxSpec{IdleTimeout: durationpb.New(time.Minute)}, 2 * time.Hour}, // a process keeps it away for ever
		"sleep":    {&covev1.SandboxSpec{IdleTimeout: durationpb.New(time.Minute), OnIdle: "pause"}, 0},
		"a lease":  {&covev1.SandboxSpec{Lease: w.lease(time.Minute)}, 0},
	} {
		if got := lives(c.spec); got != c.want {
			t.Errorf("%s: lives %s, want %s", name, got, c.want)
		}
	}
	never := w.create(&covev1.SandboxSpec{Timeout: durationpb.New(0)})
	if never.Spec.Timeout == nil {
		t.Error("never is said")
	}
	kids, err := w.client.Sandboxes.Fork(t.Context(), connect.NewRequest(&covev1.ForkRequest{Id: never.Id, Count: 1}))
	if err != nil || kids.Msg.Results[0].Sandbox.ExpiresAt != nil {
		t.Error("a child of one that never ends does not either", kids, err)
	}
}
