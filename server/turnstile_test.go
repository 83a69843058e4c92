package server

import (
	"context"
	"errors"
	"testing"
)

// So many at a time, in turn between tenants; who leaves is passed over.
func TestTurnstile(t *testing.T) {
	var ts turnstile
	ts.init(1)
	leave, err := ts.enter(t.Context(), "a", 1)
	if err != nil {
		t.Fatal(err)
	}
	order := make(chan string, 4)
	queue := func(tenant, name string) {
		before := waiting(&ts)
		go func() {
			leave, err := ts.enter(t.Context(), tenant, 1)
			if err == nil {
				order <- name
				leave()
			}
		}()
		for waiting(&ts) == before {
			<-tick()
		}
	}
	queue("a", "a1")
	queue("a", "a2")
	queue("b", "b1")
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := ts.enter(gone, "b", 1); !errors.Is(err, context.Canceled) {
		t.Errorf("who left: %v", err)
	}
	leave()
	leave() // the second time does nothing
	got := []string{<-order, <-order, <-order}
	if got[2] != "a2" {
		t.Errorf("%v: b had to wait for all of a", got)
	}
	one, err := ts.enter(t.Context(), "a", 1)
	if err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { _, err := ts.enter(short, "a", 1); done <- err }()
	for waiting(&ts) == 0 {
		<-tick()
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("a second is let in: %v", err)
	}
	one()
	ts.mu.Lock()
	defer ts.mu.Unlock()
	if ts.mu.free != 1 || len(ts.mu.waiting) != 0 || ts.mu.queue.Len() != 0 {
		t.Errorf("left behind: %+v", ts.mu.free)
	}
}

func waiting(ts *turnstile) int {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	return len(ts.mu.waiting)
}
