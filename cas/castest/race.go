package castest

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"

	"pgregory.net/rapid"

	"github.com/cove-sandbox/cove/cas"
	"github.com/cove-sandbox/cove/sandbox"
)

var raceCases = []scenario{
	{"Race of Puts of the same", func(t *testing.T, s cas.Store) {
		for _, n := range []int{100, 5 << 20} {
			content := Content(uint64(n), n)
			var wg sync.WaitGroup
			var mu sync.Mutex
			fresh := 0
			for range 8 {
				wg.Go(func() {
					info, err := s.Put(t.Context(), bytes.NewReader(content))
					if err != nil || info.ID != idOf(content) {
						t.Errorf("put: %+v, %v", info, err)
					}
					mu.Lock()
					defer mu.Unlock()
					if info.New {
						fresh++
					}
				})
			}
			wg.Wait()
			has(t, s, content)
			if fresh != 1 {
				t.Errorf("%d of 8 say that theirs was new", fresh)
			}
		}
		if l := list(t, s); len(l) != 2 {
			t.Errorf("%d blobs", len(l))
		}
	}},
	{"Race of Put, Delete and Open", func(t *testing.T, s cas.Store) {
		contents := [][]byte{Content(1, 10), Content(2, 300<<10), text(5 << 20)}
		var wg sync.WaitGroup
		for worker := range 4 {
			wg.Go(func() {
				random := rand.New(rand.NewPCG(uint64(worker), 0))
				for range 40 {
					content := contents[random.IntN(len(contents))]
					switch random.IntN(3) {
					case 0:
						if _, err := s.Put(t.Context(), bytes.NewReader(content)); err != nil {
							t.Errorf("put: %v", err)
						}
					case 1:
						if err := s.Delete(t.Context(), idOf(content)); err != nil {
							t.Errorf("delete: %v", err)
						}
					case 2:
						got, err := read(t.Context(), s, idOf(content))
						if !errors.Is(err, sandbox.ErrNotFound) && (err != nil || !bytes.Equal(got, content)) {
							t.Errorf("open: %d of %d bytes, %v", len(got), len(content), err)
						}
					}
				}
			})
		}
		wg.Wait()
		for _, content := range contents {
			put(t, s, content)
			has(t, s, content)
		}
	}},
}

// model compares the store with a set of strings.
func model(t *testing.T, open func(t *testing.T) cas.Store) {
	contents := [][]byte{nil, []byte("a"), []byte("b"), text(1000), Content(1, 300<<10)}
	s := open(t)
	rapid.Check(t, func(rt *rapid.T) {
		for _, info := range list(t, s) {
			if err := s.Delete(t.Context(), info.ID); err != nil {
				rt.Fatal(err)
			}
		}
		there := map[cas.ID][]byte{}
		steps := rapid.IntRange(1, 20).Draw(rt, "steps")
		for range steps {
			content := rapid.SampledFrom(contents).Draw(rt, "content")
			id := idOf(content)
			switch rapid.SampledFrom([]string{"put", "delete", "open"}).Draw(rt, "verb") {
			case "put":
				info, err := s.Put(t.Context(), bytes.NewReader(content))
				if _, was := there[id]; err != nil || info.New == was {
					rt.Fatalf("put: %+v, %v; was there: %v", info, err, was)
				}
				there[id] = content
			case "delete":
				if err := s.Delete(t.Context(), id); err != nil {
					rt.Fatalf("delete: %v", err)
				}
				delete(there, id)
			case "open":
				got, err := read(t.Context(), s, id)
				want, ok := there[id]
				if ok && (err != nil || !bytes.Equal(got, want)) || !ok && !errors.Is(err, sandbox.ErrNotFound) {
					rt.Fatalf("open: %d bytes, %v; there: %v", len(got), err, ok)
				}
			}
			if got := list(t, s); len(got) != len(there) {
				rt.Fatalf("%d listed, %d there", len(got), len(there))
			}
		}
	})
}
