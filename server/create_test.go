package server

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

var storeNoKey = store.Idempotency{}

func (w *world) createWith(ctx context.Context, key string, spec *covev1.SandboxSpec) (*covev1.CreateSandboxResponse, error) {
	r, err := w.client.Sandboxes.Create(ctx, connect.NewRequest(&covev1.CreateSandboxRequest{Spec: spec, IdempotencyKey: key}))
	if err != nil {
		return nil, err
	}
	return r.Msg, nil
}

func TestCreateFillsDefaultsAndIsRunning(t *testing.T) {
	w := newWorld(t)
	sb := w.create(&covev1.SandboxSpec{Timeout: durationpb.New(time.Hour), Labels: map[string]string{"a": "b"}})
	for _, got := range []*covev1.Sandbox{sb, w.get(sb.Id)} {
		if got.State != covev1.SandboxState_SANDBOX_STATE_RUNNING || got.Episode != 1 || got.ImageId != "sha256:base" || got.Node != "n1" ||
			got.Spec.Image != "base" || got.Spec.Resources.Cpu != 1 || got.Spec.Resources.Memory != 512<<20 || got.Spec.Resources.MemoryLimit != 512<<20 ||
			got.Spec.Labels["a"] != "b" || got.ExpiresAt.AsTime().Sub(got.CreatedAt.AsTime()) != time.Hour {
			t.Errorf("got %v", got)
		}
	}
	// Names are resolved once.
	before := w.store.gets.Load()
	w.create(nil)
	if w.store.gets.Load() != before {
		t.Error("a known image was looked up again")
	}
}

func TestIdempotentCreate(t *testing.T) {
	w := newWorld(t)
	spec := &covev1.SandboxSpec{Labels: map[string]string{"b": "2", "a": "1"}}
	first, err := w.createWith(t.Context(), "k", spec)
	if err != nil || first.Existed {
		t.Fatal(first, err)
	}
	again, err := w.createWith(t.Context(), "k", spec)
	if err != nil || !again.Existed || again.Sandbox.Id != first.Sandbox.Id {
		t.Fatalf("got %v, %v", again, err)
	}
	_, err = w.createWith(t.Context(), "k", &covev1.SandboxSpec{Env: map[string]string{"X": "y"}})
	e := wantError(t, err, sandbox.ErrAlreadyExists, "another spec")
	if e.Field != "idempotency_key" {
		t.Errorf("field %q", e.Field)
	}
	// Even after it ended, and with its image gone.
	w.kill(first.Sandbox.Id)
	if _, err := w.client.Images.Remove(t.Context(), connect.NewRequest(&covev1.RemoveImageRequest{Name: "base"})); err != nil {
		t.Fatal(err)
	}
	again, err = w.createWith(t.Context(), "k", spec)
	if err != nil || again.Sandbox.Id != first.Sandbox.Id || again.Sandbox.End.GetCause() != "killed_by_user" {
		t.Fatalf("got %v, %v", again, err)
	}
	if w.node.saw().created != 1 {
		t.Errorf("the node made %d", w.node.saw().created)
	}
}

func TestConcurrentCreatesWithOneKey(t *testing.T) {
	w := newWorld(t)
	gate, reached := make(chan struct{}), make(chan struct{}, 100)
	w.node.onCreate = func(context.Context, sandbox.Sandbox) error { reached <- struct{}{}; <-gate; return nil }
	const n = 20
	var wg sync.WaitGroup
	got := make([]*covev1.CreateSandboxResponse, n)
	for i := range n {
		wg.Go(func() {
			var err error
			if got[i], err = w.createWith(t.Context(), "k", nil); err != nil {
				t.Error(err)
			}
		})
	}
	<-reached
	wg.Go(func() { // waits for the first, too, and then learns that it asked for something else
		_, err := w.createWith(t.Context(), "k", &covev1.SandboxSpec{Image: "other"})
		wantError(t, err, sandbox.ErrAlreadyExists)
	})
	close(gate)
	wg.Wait()
	created := 0
	for _, r := range got {
		if r == nil {
			continue
		}
		if r.Sandbox.Id != got[0].Sandbox.Id || r.Sandbox.State != covev1.SandboxState_SANDBOX_STATE_RUNNING {
			t.Errorf("got %v", r)
		}
		if !r.Existed {
			created++
		}
	}
	if created != 1 || w.node.saw().created != 1 || len(w.records()) != 1 {
		t.Errorf("%d callers created, the node %d, records %v", created, w.node.saw().created, w.records())
	}
}

// A failed create leaves no sandbox, no record and no key.
func TestFailedCreateLeavesNothing(t *testing.T) {
	full := &sandbox.Error{Class: sandbox.NoCapacity, Msg: "no memory left", RetryAfter: 3 * time.Second}
	for _, key := range []string{"", "k"} {
		for name, fail := range map[string]func(*world) (heal func()){
			"node": func(w *world) func() {
				w.node.onCreate = func(context.Context, sandbox.Sandbox) error { return full }
				return func() { w.node.onCreate = nil }
			},
			"store": func(w *world) func() {
				w.store.failing("CreateSandbox", errStore)
				return func() { w.store.failing("CreateSandbox", nil) }
			},
			"node, and the undoing": func(w *world) func() {
				w.node.onCreate = func(context.Context, sandbox.Sandbox) error { return full }
				w.store.failing("ForgetSandbox", errStore)
				return func() { w.node.onCreate = nil; w.store.failing("ForgetSandbox", nil); settled(w) }
			},
			"both": func(w *world) func() {
				w.node.onCreate = func(context.Context, sandbox.Sandbox) error { return full }
				w.store.failing("CreateSandbox", errStore)
				return func() { w.node.onCreate = nil; w.store.failing("CreateSandbox", nil) }
			},
		} {
			t.Run(name+"/key="+key, func(t *testing.T) {
				w := newWorld(t)
				heal := fail(w)
				_, err := w.createWith(t.Context(), key, nil)
				if name == "store" {
					wantError(t, err, sandbox.ErrUnavailable)
				} else if e := wantError(t, err, sandbox.ErrNoCapacity, "no memory"); e.RetryAfter != 3*time.Second {
					t.Errorf("retry after %s", e.RetryAfter)
				}
				heal()
				if n := w.node.liveCount(); n != 0 {
					t.Errorf("%d sandboxes left on the node", n)
				}
				if ids := w.records(); len(ids) != 0 {
					t.Errorf("records left: %v", ids)
				}
				if r, err := w.createWith(t.Context(), key, nil); err != nil || r.Existed {
					t.Errorf("the retry got %v, %v", r, err)
				}
			})
		}
	}
}

// settled waits until the server owes nothing.
func settled(w *world) {
	for !w.server.settle(w.Context()) {
		select {
		case <-w.Context().Done():
			w.Fatal("never settled")
		case <-time.After(time.Millisecond):
		}
	}
	w.server.ends.mu.Lock()
	defer w.server.ends.mu.Unlock()
	if len(w.server.ends.mu.unfinished) > 0 {
		w.Fatal("a sandbox is still to be taken back")
	}
}

func TestNoCapacitySaysWhen(t *testing.T) {
	w := newWorld(t)
	w.node.onCreate = func(context.Context, sandbox.Sandbox) error {
		return &sandbox.Error{Class: sandbox.NoCapacity, Msg: "full", RetryAfter: 1500 * time.Millisecond}
	}
	resp, body := w.http("POST", covev1.SandboxesCreateProcedure, jsonBody(`{}`), "Content-Type", "application/json")
	if resp.StatusCode != 429 || resp.Header.Get("Retry-After") != "2" {
		t.Errorf("%d, Retry-After %q: %s", resp.StatusCode, resp.Header.Get("Retry-After"), body)
	}
}

// Nobody knows the id of a sandbox whose creator left, with a key or without.
func TestCallerLeavesDuringCreate(t *testing.T) {
	for _, key := range []string{"", "k"} {
		t.Run("key="+key, func(t *testing.T) {
			w := newWorld(t)
			left := make(chan struct{})
			w.onCall = func(ctx context.Context) { afterAll(ctx, func() { close(left) }) }
			reached, gate := make(chan struct{}), make(chan struct{})
			w.node.onCreated = func() { // the node was done before it heard
				close(reached)
				<-gate
			}
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error)
			go func() { _, err := w.createWith(ctx, key, nil); done <- err }()
			<-reached
			cancel()
			wantError(t, <-done, sandbox.ErrCanceled)
			<-left // the server has seen it, too
			close(gate)
			w.server.Drain(t.Context()) // waits for the handler
			settled(w)
			if w.node.saw().created != 1 || w.node.liveCount() != 0 || len(w.records()) != 0 {
				t.Errorf("created %d, live %d, records %v", w.node.saw().created, w.node.liveCount(), w.records())
			}
		})
	}
}

// The server died between the two records: the retry gets a living sandbox.
func TestKeyOfALostSandboxMakesANewOne(t *testing.T) {
	w := newWorld(t)
	first, err := w.createWith(t.Context(), "k", nil)
	if err != nil {
		t.Fatal(err)
	}
	w.node.lose(t, first.Sandbox.Id)
	if err := w.server.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	again, err := w.createWith(t.Context(), "k", nil)
	if err != nil || again.Existed || again.Sandbox.Id == first.Sandbox.Id {
		t.Fatalf("got %v, %v", again, err)
	}
	third, err := w.createWith(t.Context(), "k", nil)
	if err != nil || !third.Existed || third.Sandbox.Id != again.Sandbox.Id {
		t.Fatalf("got %v, %v", third, err)
	}
}

func TestManyCreatesAtOnce(t *testing.T) {
	w := newWorld(t)
	var wg sync.WaitGroup
	for i := range 100 {
		wg.Go(func() {
			if _, err := w.createWith(t.Context(), fmt.Sprint("k", i%50), nil); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if w.node.liveCount() != 50 || len(w.records()) != 50 {
		t.Errorf("live %d, records %d", w.node.liveCount(), len(w.records()))
	}
	ids, err := w.client.Sandboxes.KillByLabel(t.Context(), connect.NewRequest(&covev1.KillByLabelRequest{Labels: map[string]string{"no": "one"}}))
	if err != nil || len(ids.Msg.Ids) != 0 {
		t.Error(ids, err)
	}
}

// A sandbox that dies while its record is still being written ends properly.
func TestEndDuringCreate(t *testing.T) {
	w := newWorld(t)
	gate := make(chan struct{})
	recording := w.store.holdCreates(gate)
	done := make(chan error)
	go func() { _, err := w.createWith(t.Context(), "", nil); done <- err }()
	sb := <-recording
	w.until("the node is faster than the store", func() bool { return w.node.saw().created == 1 })
	w.node.die(sb.ID, sandbox.OOM)
	w.until("it has ended", func() bool { return w.node.sandbox(sb.ID) == nil })
	if w.server.settle(t.Context()) {
		t.Error("nothing can be settled yet")
	}
	close(gate)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if end := w.ended(sb.ID); end.Cause != sandbox.OOM {
		t.Errorf("ended with %s", end)
	}
}

func TestDrainRefusesCreates(t *testing.T) {
	w := newWorld(t)
	if left := w.server.Drain(t.Context()); left != 0 {
		t.Fatal(left)
	}
	_, err := w.createWith(t.Context(), "", nil)
	if e := wantError(t, err, sandbox.ErrUnavailable, "stopping"); e.RetryAfter == 0 {
		t.Error("does not say when to come back")
	}
	if resp, body := w.http("GET", "/healthz", nil); resp.StatusCode != 503 || body != "draining\n" {
		t.Errorf("healthz: %d %q", resp.StatusCode, body)
	}
}
