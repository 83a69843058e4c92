package agent

import (
	"context"
	"fmt"
	"testing"

	"go.uber.org/goleak"

	"github.com/cove-sandbox/cove/runtime/fake"
	"github.com/cove-sandbox/cove/sandbox"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// What the node itself adds to a create with a warm kernel: admission, the
// pool and one fsync.
func BenchmarkCreate(b *testing.B) {
	n, err := Open(context.Background(), Config{Dir: b.TempDir(), Name: "n1", Images: testImages{},
		Limits:  Limits{MilliCPU: 1 << 40, Memory: 1 << 50, Disk: 1 << 50, MaxSandboxes: 1 << 30},
		Classes: []Class{{Driver: fake.NewHost("", fake.Options{Bare: true}).Open(), Pool: PoolSettings{Min: 64, Max: 64, Background: 8}}}})
	if err != nil {
		b.Fatal(err)
	}
	defer n.Shutdown(context.Background(), true)
	for _, held := range []int{0, 1000} {
		b.Run(fmt.Sprintf("beside_%d", held), func(b *testing.B) {
			for i := range held {
				if _, err := n.Create(context.Background(), smallBox(fmt.Sprintf("held%d", i)), baseImage); err != nil {
					b.Fatal(err)
				}
			}
			for i := 0; b.Loop(); i++ {
				id := fmt.Sprintf("b%dx%d", held, i)
				if _, err := n.Create(context.Background(), smallBox(id), baseImage); err != nil {
					b.Fatal(err)
				}
				b.StopTimer()
				if err := n.Kill(context.Background(), id, sandbox.End{Cause: sandbox.KilledByUser}); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
		})
	}
}
