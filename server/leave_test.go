package server

import (
	"context"
	"testing"
	"time"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

// creating starts a create of its own client's and returns when the node works
// on it; leave ends the client, and returns when the server knows.
func creating(w *world, key string, at <-chan struct{}) (leave func(), done chan error) {
	left := make(chan struct{})
	w.onCall = func(ctx context.Context) { afterAll(ctx, func() { close(left) }) }
	ctx, cancel := context.WithCancel(w.Context())
	done = make(chan error, 1)
	go func() { _, err := w.createWith(ctx, key, nil); done <- err }()
	<-at
	w.onCall = nil
	return func() { cancel(); <-done; <-left }, done
}

// The retry of a create whose connection broke finds the first still at work.
func TestRetryTakesOverACreate(t *testing.T) {
	w := newWorld(t)
	reached, gate := make(chan struct{}, 2), make(chan struct{})
	w.node.onCreate = func(context.Context, sandbox.Sandbox) error { reached <- struct{}{}; <-gate; return nil }
	leave, _ := creating(w, "k", reached)
	again := make(chan *covev1.CreateSandboxResponse, 1)
	go func() {
		r, err := w.createWith(t.Context(), "k", nil)
		if err != nil {
			t.Error(err)
		}
		again <- r
	}()
	for joined := false; !joined; <-tick() {
		w.server.creates.mu.Lock()
		for _, cr := range w.server.creates.mu.byKey {
			joined = cr.callers == 2
		}
		w.server.creates.mu.Unlock()
	}
	leave()
	close(gate)
	if r := <-again; r == nil || w.node.liveCount() != 1 || w.node.saw().created != 1 || w.get(r.Sandbox.Id).End != nil {
		t.Errorf("got %v; the node made %d, %d live", r, w.node.saw().created, w.node.liveCount())
	}
}

// One that comes when the first was given up makes its own, and is never given
// the one that goes.
func TestRetryAfterACreateWasTakenBack(t *testing.T) {
	w := newWorld(t)
	reached, gate := make(chan struct{}, 2), make(chan struct{})
	w.node.onCreate = func(context.Context, sandbox.Sandbox) error { reached <- struct{}{}; <-gate; return nil }
	leave, _ := creating(w, "k", reached)
	leave()
	close(gate)
	r, err := w.createWith(t.Context(), "k", nil)
	if err != nil {
		t.Fatal(err)
	}
	settled(w)
	if w.node.liveCount() != 1 || len(w.records()) != 1 || w.get(r.Sandbox.Id).End != nil {
		t.Errorf("%d live, records %v, %v", w.node.liveCount(), w.records(), w.get(r.Sandbox.Id))
	}
}

// Who waits for a kernel leaves the line.
func TestCallerLeavesTheNodesLine(t *testing.T) {
	for _, key := range []string{"", "k"} {
		w := newWorld(t)
		reached := make(chan struct{}, 1)
		w.node.onCreate = func(ctx context.Context, _ sandbox.Sandbox) error {
			reached <- struct{}{}
			<-ctx.Done()
			return ctx.Err()
		}
		leave, _ := creating(w, key, reached)
		leave()
		w.server.Drain(t.Context())
		settled(w)
		if w.node.liveCount() != 0 || len(w.records()) != 0 {
			t.Errorf("key %q: %d live, records %v", key, w.node.liveCount(), w.records())
		}
	}
}

// On a full node a client that has gone gets nothing when there is room at last.
func TestCallerLeavesTheQueue(t *testing.T) {
	for _, key := range []string{"", "k"} {
		w := newWorld(t, func(c *Config) { c.QueueWait = time.Hour })
		tried := make(chan struct{}, 100)
		w.node.onCreate = func(context.Context, sandbox.Sandbox) error {
			select {
			case tried <- struct{}{}:
			default:
			}
			return &sandbox.Error{Class: sandbox.NoCapacity, Msg: "full", RetryAfter: time.Second}
		}
		leave, _ := creating(w, key, tried)
		leave()
		w.server.Drain(t.Context()) // it is waited for, so it is over
		w.server.queue.mu.Lock()
		if n := w.server.queue.mu.queue.Len(); n != 0 {
			t.Errorf("key %q: %d wait", key, n)
		}
		w.server.queue.mu.Unlock()
		settled(w)
		if w.node.liveCount() != 0 || len(w.records()) != 0 {
			t.Errorf("key %q: %d live, records %v", key, w.node.liveCount(), w.records())
		}
	}
}

// A client that does not know what came of its create ends it by its key.
func TestKillByKey(t *testing.T) {
	w := newWorld(t)
	kill := func(m *covev1.KillRequest) error {
		_, err := w.client.Sandboxes.Kill(t.Context(), connect.NewRequest(m))
		return err
	}
	wantError(t, kill(&covev1.KillRequest{IdempotencyKey: "k"}), sandbox.ErrNoSandbox)
	wantError(t, kill(&covev1.KillRequest{IdempotencyKey: "k", Id: "abc"}), sandbox.ErrInvalid, "both")
	r, err := w.createWith(t.Context(), "k", &covev1.SandboxSpec{Labels: map[string]string{"a": "b"}})
	if err != nil {
		t.Fatal(err)
	}
	if err := kill(&covev1.KillRequest{IdempotencyKey: "k"}); err != nil || w.get(r.Sandbox.Id).End.GetCause() != "killed_by_user" {
		t.Error(err, w.get(r.Sandbox.Id))
	}
	// The key of a fork ends all its children.
	kids, err := w.fork(&covev1.ForkRequest{Id: w.create(nil).Id, Count: 3, IdempotencyKey: "f"})
	if err != nil {
		t.Fatal(err)
	}
	if err := kill(&covev1.KillRequest{IdempotencyKey: "f"}); err != nil {
		t.Error(err)
	}
	for _, id := range idsOf(kids) {
		if got := w.get(id).End.GetCause(); got != "killed_by_user" {
			t.Errorf("child %s: %q", id, got)
		}
	}
	// One under way is waited for.
	reached, gate := make(chan struct{}, 1), make(chan struct{})
	w.node.onCreate = func(context.Context, sandbox.Sandbox) error { reached <- struct{}{}; <-gate; return nil }
	made := make(chan string, 1)
	go func() {
		r, err := w.createWith(t.Context(), "k2", nil)
		if err != nil {
			t.Error(err)
		}
		made <- r.GetSandbox().GetId()
	}()
	<-reached
	killed := make(chan error, 1)
	go func() { killed <- kill(&covev1.KillRequest{IdempotencyKey: "k2"}) }()
	close(gate)
	id := <-made
	if err := <-killed; err != nil || w.get(id).End.GetCause() != "killed_by_user" {
		t.Error(err, w.get(id))
	}
}
