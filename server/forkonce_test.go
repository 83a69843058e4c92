package server

import (
	"context"
	"testing"
	"time"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
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
	w.server.forks.byKey = nil // as after a restart
	again("by the record")
	_, err = w.fork(&covev1.ForkRequest{Id: a.Id, Count: 2, IdempotencyKey: "k"})
	wantError(t, err, sandbox.ErrAlreadyExists, "was used for another fork")

	// A server died amid the fork: one child is not there.
	w.server.forks.byKey = nil
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
	w.node.onCreateFrom = func(sandbox.Sandbox) error {
		leave()
		time.Sleep(100 * time.Millisecond) // until the server has heard of it, which it tells nobody
		return nil
	}
	if _, err := w.client.Sandboxes.Fork(ctx, connect.NewRequest(&covev1.ForkRequest{Id: a.Id, Count: 2, IdempotencyKey: "k"})); err == nil {
		t.Fatal("it heard the answer")
	}
	for end := time.Now().Add(20 * time.Second); w.node.liveCount() != 1; {
		if time.Now().After(end) {
			t.Fatalf("%d are live, of which nobody knows", w.node.liveCount())
		}
		time.Sleep(time.Millisecond)
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
