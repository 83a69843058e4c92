package castest

import (
	"bytes"
	"errors"
	"io"
	"sync"
	"testing"
	"testing/iotest"
	"time"

	"github.com/cove-sandbox/cove/cas"
	"github.com/cove-sandbox/cove/sandbox"
)

func begin(t *testing.T, s cas.Store) cas.Batch {
	t.Helper()
	b, err := cas.Begin(s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Abort() })
	return b
}

var batchCases = []scenario{
	{"Batch is seen at its Commit", func(t *testing.T, s cas.Store) {
		_, real := s.(cas.Batcher)
		old := put(t, s, []byte("old"))
		b := begin(t, s)
		contents := [][]byte{Content(1, 10), Content(2, 1<<20), text(5 << 20)}
		for _, content := range contents {
			if info := put(t, b, content); !info.New {
				t.Error("not new")
			}
			if info := put(t, b, content); info.New {
				t.Error("new twice")
			}
			if real {
				hasNot(t, s, idOf(content))
			}
		}
		if info := put(t, b, []byte("old")); info.New || info.ID != old.ID {
			t.Errorf("%+v", info)
		}
		if err := b.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
		for _, content := range append(contents, []byte("old")) {
			has(t, s, content)
		}
		if l := list(t, s); len(l) != 4 {
			t.Errorf("%d blobs", len(l))
		}
		if err := b.Commit(t.Context()); !errors.Is(err, sandbox.ErrPrecondition) {
			t.Errorf("second commit: %v", err)
		}
		if _, err := b.Put(t.Context(), bytes.NewReader(nil)); !errors.Is(err, sandbox.ErrPrecondition) {
			t.Errorf("put after commit: %v", err)
		}
		if err := b.Abort(); err != nil {
			t.Errorf("abort after commit: %v", err)
		}
		has(t, s, contents[0])
	}},
	{"Batch that is aborted leaves nothing", func(t *testing.T, s cas.Store) {
		if _, ok := s.(cas.Batcher); !ok {
			t.Skip("the store has no batches of its own")
		}
		b := begin(t, s)
		put(t, b, Content(1, 10))
		put(t, b, Content(2, 5<<20))
		if err := b.Abort(); err != nil {
			t.Fatal(err)
		}
		if err := b.Commit(t.Context()); !errors.Is(err, sandbox.ErrPrecondition) {
			t.Errorf("commit after abort: %v", err)
		}
		if l := list(t, s); len(l) != 0 {
			t.Errorf("left: %v", l)
		}
	}},
	{"Batch outlives a Put that fails", func(t *testing.T, s cas.Store) {
		b := begin(t, s)
		if _, err := b.Put(t.Context(), io.MultiReader(bytes.NewReader(Content(1, 5<<20)), iotest.ErrReader(errStop))); !errors.Is(err, errStop) {
			t.Fatalf("put: %v", err)
		}
		put(t, b, []byte("good"))
		if err := b.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
		if l := list(t, s); len(l) != 1 {
			t.Errorf("%d blobs", len(l))
		}
	}},
	{"Batches beside each other", func(t *testing.T, s cas.Store) {
		var wg sync.WaitGroup
		for worker := range 4 {
			wg.Go(func() {
				b, err := cas.Begin(s)
				if err != nil {
					t.Error(err)
					return
				}
				var puts sync.WaitGroup
				for i := range 20 {
					puts.Go(func() { // the upper half is shared by all workers
						seed := uint64(i)
						if i < 10 {
							seed += uint64(100 * (worker + 1))
						}
						if _, err := b.Put(t.Context(), bytes.NewReader(Content(seed, 1000+i*5000))); err != nil {
							t.Errorf("put: %v", err)
						}
					})
				}
				puts.Wait()
				if err := b.Commit(t.Context()); err != nil {
					t.Errorf("commit: %v", err)
				}
			})
		}
		wg.Wait()
		if l := list(t, s); len(l) != 50 {
			t.Errorf("%d blobs, want 50", len(l))
		}
		has(t, s, Content(15, 1000+15*5000))
	}},
}

// sweepCases need no clock of the store's own: before is the caller's.
var sweepCases = []scenario{
	{"Sweep takes the old and leaves the young", func(t *testing.T, s cas.Store) {
		sw, ok := s.(cas.Sweeper)
		if !ok {
			t.Skip("the store cannot sweep")
		}
		sweep := func(id cas.ID, before time.Time, want bool) {
			t.Helper()
			if got, err := sw.Sweep(t.Context(), id, before); err != nil || got != want {
				t.Errorf("sweep: %v, %v; want %v", got, err, want)
			}
		}
		info := put(t, s, []byte("a"))
		sweep(info.ID, info.At.Add(-time.Hour), false)
		has(t, s, []byte("a"))
		later := info.At.Add(time.Hour)
		b := begin(t, s)
		put(t, b, []byte("a"))
		sweep(info.ID, later, false) // the batch counts on it
		if err := b.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
		sweep(info.ID, later, true)
		hasNot(t, s, info.ID)
		sweep(info.ID, later, false)
		if _, err := sw.Sweep(t.Context(), "sha256:x", later); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("%v", err)
		}
	}},
	// A Put in a batch that found the blob there has it there after the Commit,
	// whenever a sweep runs.
	{"Race of Sweep and Batch", func(t *testing.T, s cas.Store) {
		sw, ok := s.(cas.Sweeper)
		if !ok {
			t.Skip("the store cannot sweep")
		}
		contents := [][]byte{Content(1, 10), Content(2, 10), Content(3, 300<<10)}
		for range 30 {
			stop := make(chan struct{})
			var sweeper sync.WaitGroup
			sweeper.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
					}
					for _, content := range contents {
						if _, err := sw.Sweep(t.Context(), idOf(content), time.Now().Add(time.Hour)); err != nil {
							t.Errorf("sweep: %v", err)
						}
					}
				}
			})
			b := begin(t, s)
			for _, content := range contents {
				put(t, b, content)
			}
			// Before the batch is over nothing of it may go, so the sweeper is
			// stopped first: what is checked is the time from Put to Commit.
			close(stop)
			sweeper.Wait()
			if err := b.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
			for _, content := range contents {
				has(t, s, content)
			}
		}
	}},
}
