package sqlite

import (
	"context"
	"fmt"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
	"github.com/cove-sandbox/cove/store/storetest"
)

func open(t testing.TB) *Store {
	t.Helper()
	s, err := Open(everywhere(), filepath.Join(t.TempDir(), "cove.db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func TestConformance(t *testing.T) {
	storetest.Run(t, func(t *testing.T) store.Store { return open(t) })
}

func TestCrash(t *testing.T) {
	storetest.Crash(t, func(dir string) (store.Store, error) {
		return Open(everywhere(), filepath.Join(dir, "cove.db"))
	})
}

// BenchmarkCreate measures durable creates with an idempotency key and three
// labels, alone and with 64 creators at once, who share fsyncs.
func BenchmarkCreate(b *testing.B) {
	for _, creators := range []int{1, 64} {
		b.Run(fmt.Sprintf("creators=%d", creators), func(b *testing.B) {
			s := open(b)
			var n atomic.Int64
			b.SetParallelism(creators) // times GOMAXPROCS, which -cpu=1 makes exact
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					i := n.Add(1)
					sb := sandbox.Sandbox{ID: fmt.Sprintf("sb%d", i), State: sandbox.Creating, Episode: 1,
						Spec: sandbox.Spec{Image: "base", Labels: map[string]string{"run": "r1", "group": fmt.Sprint(i / 8), "user": "me"},
							Env: map[string]string{"A": "b"}}.WithDefaults(sandbox.StandardDefaults()),
						ImageID: "sha256:0", Node: "local", CreatedAt: time.Unix(1700000000, i)}
					if _, _, err := s.CreateSandbox(everywhere(), sb, store.Idempotency{Key: fmt.Sprint("key", i), Hash: "h"}); err != nil {
						b.Error(err)
						return
					}
				}
			})
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "creates/s")
		})
	}
}

// everywhere is what the tests of the file itself see.
func everywhere() context.Context { return store.Installation(context.Background()) }
