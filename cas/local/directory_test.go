package local

import (
	"errors"
	"sync"
	"testing"
)

// A sync is done once for all that it covers, again for what is named after it began,
// and tried by everybody when it fails.
func TestADirectoryIsSyncedOnceForAll(t *testing.T) {
	var d directory
	var mu sync.Mutex
	syncs := 0
	count := func() error { mu.Lock(); defer mu.Unlock(); syncs++; return nil }
	want := func(what string, n int) {
		t.Helper()
		if err := d.sync(count); err != nil || syncs != n {
			t.Fatalf("%s: %d syncs, %v; want %d", what, syncs, err, n)
		}
	}
	want("what an earlier process left", 1)
	want("nothing new", 1)
	name := func() {
		t.Helper()
		if err := d.name(func() error { return nil }); err != nil {
			t.Fatal(err)
		}
	}
	name()
	if err := d.name(func() error { return errors.New("no rename") }); err == nil {
		t.Fatal("a rename that failed passes")
	}
	want("one name", 2)

	// Named while a sync runs: that one does not count for it, and one more does for all that wait.
	name()
	began, goOn := make(chan struct{}), make(chan struct{})
	first := make(chan error, 1)
	go func() { first <- d.sync(func() error { close(began); <-goOn; return count() }) }()
	<-began
	name()
	var wg sync.WaitGroup
	errs := make(chan error, 8)
	for range 8 {
		wg.Go(func() { errs <- d.sync(count) })
	}
	close(goOn)
	wg.Wait()
	if err := <-first; err != nil {
		t.Fatal(err)
	}
	for range 8 {
		if err := <-errs; err != nil {
			t.Fatal(err)
		}
	}
	if syncs != 4 {
		t.Errorf("%d syncs, want 4: two of before, the one under way and one for all eight", syncs)
	}

	name()
	bad := errors.New("no disk")
	if err := d.sync(func() error { return bad }); !errors.Is(err, bad) {
		t.Errorf("%v", err)
	}
	want("after a failure", 5)
}
