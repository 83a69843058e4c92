package server

import (
	"context"
	"testing"
	"time"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

func idsOf(r *covev1.ForkResponse) (ids []string) {
	for _, res := range r.Results {
		ids = append(ids, res.Sandbox.GetId())
	}
	return ids
}

// The same key gives the same children, also from a server that has forgotten
// that it made them, and never half of them.
func TestForkOnce(t *testing.T) {
	w := newWorld(t)
	a := w.create(nil)
	m := &covev1.ForkRequest{Id: a.Id, Count: 3, IdempotencyKey: "k"}
	first, err := w.fork(m)
	if err != nil || first.Existed {
		t.Fatal(first, err)
	}
	again := func(what string) {
		t.Helper()
		r, err := w.fork(m)
		if err != nil || !r.Existed || len(r.Results) != 3 || w.node.liveCount() != 4 {
			t.Fatalf("%s: %v, %v, %d live", what, r, err, w.node.liveCount())
		}
		for i, id := range idsOf(r) {
			if id != idsOf(first)[i] {
				t.Errorf("%s: child %d is %s, was %s", what, i, id, idsOf(first)[i])
			}
		}
	}
	again("in the same process")
	w.server.forks.mu.byKey = nil // as after a restart
	again("by the record")
	_, err = w.fork(&covev1.ForkRequest{Id: a.Id, Count: 2, IdempotencyKey: "k"})
	wantError(t, err, sandbox.ErrAlreadyExists, "'k' was used for a fork of "+a.Id+" into 3")
	w.server.forks.mu.byKey = nil
	_, err = w.fork(&covev1.ForkRequest{Id: a.Id, Count: 2, IdempotencyKey: "k"})
	wantError(t, err, sandbox.ErrAlreadyExists, "'k' was used for other sandboxes, such as "+idsOf(first)[0])

	// A server died amid the fork: one child is not there.
	w.server.forks.mu.byKey = nil
	ctx := asServer(t.Context())
	if err := w.server.killOnNode(ctx, idsOf(first)[1], "test"); err != nil {
		t.Fatal(err)
	}
	if err := w.server.store.ForgetSandbox(ctx, idsOf(first)[1]); err != nil {
		t.Fatal(err)
	}
	r, err := w.fork(m)
	if err != nil || r.Existed || len(r.Results) != 3 || w.node.liveCount() != 4 {
		t.Fatalf("%v, %v, %d live", r, err, w.node.liveCount())
	}
}

// Children of a caller that left wait for it to ask again, and go if it does
// not.
func TestForkWhoseCallerLeaves(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.ForkGrace = time.Millisecond })
	a := w.create(nil)
	ctx, leave := context.WithCancel(w.Context())
	left := make(chan struct{})
	w.onCall = func(ctx context.Context) { afterAll(ctx, func() { close(left) }) }
	w.node.onCreateFrom = func(sandbox.Sandbox) error {
		leave()
		<-left // the server has heard of it
		return nil
	}
	if _, err := w.client.Sandboxes.Fork(ctx, connect.NewRequest(&covev1.ForkRequest{Id: a.Id, Count: 2, IdempotencyKey: "k"})); err == nil {
		t.Fatal("it heard the answer")
	}
	w.until("those that nobody knows of are gone", func() bool { return w.node.liveCount() == 1 })
}

// until asks for 20 s whether something has come about.
func (w *world) until(what string, ok func() bool) {
	w.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			w.Fatalf("not so: %s", what)
		}
	}
}

// A server that dies between the fork and its answer leaves children that nobody
// learned of. The next one ends them, unless they are asked for.
func TestForkWhoseServerDies(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.ForkGrace = 3 * time.Second }) // for asking again, however slow the machine
	a := w.create(nil)
	for _, k := range []string{"asked for", "forgotten"} {
		r := ForkRequest{Sandbox: a.Id, Count: 2, Key: k}
		key := func(i int) store.Idempotency { return childKey(k, forkHash(r), i) }
		if _, err := w.server.fork(w.own(), r, key); err != nil { // all of it but the answer
			t.Fatal(err)
		}
	}
	if err := w.server.Reconcile(t.Context()); err != nil { // as the next server does
		t.Fatal(err)
	}
	if n := w.node.liveCount(); n != 5 {
		t.Fatalf("%d live after the start", n)
	}
	again, err := w.fork(&covev1.ForkRequest{Id: a.Id, Count: 2, IdempotencyKey: "asked for"})
	if err != nil || !again.Existed || len(again.Results) != 2 {
		t.Fatal(again, err)
	}
	for _, id := range idsOf(again) {
		sb, err := w.store.GetSandbox(w.own(), id)
		if err != nil || sb.Unclaimed {
			t.Fatalf("%+v, %v", sb, err)
		}
	}
	w.until("those that nobody asks for are gone", func() bool { return w.node.liveCount() == 3 })
	w.until("and forgotten", func() bool { return len(w.records()) == 3 })
	for _, id := range idsOf(again) {
		if sb := w.get(id); sb.State != covev1.SandboxState_SANDBOX_STATE_RUNNING {
			t.Errorf("one that was asked for is %s", sb.State)
		}
	}
}

func TestSnapshotOnce(t *testing.T) {
	w := newWorld(t)
	a := w.create(nil)
	w.write(a.Id, "/f", "one")
	m := &covev1.CreateSnapshotRequest{Sandbox: a.Id, IdempotencyKey: "k", Stop: true}
	first := w.mustSnapshot(m)
	if again := w.mustSnapshot(m); again.Id != first.Id {
		t.Errorf("asked again it is %s, was %s", again.Id, first.Id)
	}
	b := w.create(nil)
	if other := w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: b.Id, IdempotencyKey: "l"}); other.Id == first.Id {
		t.Error("another key gives the same snapshot")
	}
}

// A defect in the middle of a fork is told, and leaves its key free.
func TestForkThatPanics(t *testing.T) {
	w := newWorld(t)
	a := w.create(nil)
	w.node.onSnapshot = func(context.Context, node.SnapshotRequest) error { panic("a defect of this test") }
	m := &covev1.ForkRequest{Id: a.Id, Count: 2, IdempotencyKey: "k"}
	_, err := w.fork(m)
	wantError(t, err, &sandbox.Error{Class: sandbox.Internal})
	w.node.onSnapshot = nil
	if r, err := w.fork(m); err != nil || r.Existed || len(r.Results) != 2 {
		t.Errorf("again: %v, %v", r, err)
	}
}
