package egress_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/egress"
	"github.com/cove-sandbox/cove/egress/egresstest"
	"github.com/cove-sandbox/cove/egress/policy"
	"github.com/cove-sandbox/cove/sandbox"
)

// Take with a spare ready, and all that a network costs with its removal.
func BenchmarkTake(b *testing.B) {
	w := egresstest.NewWorld(b)
	n, err := egress.Open(egress.Config{Dir: b.TempDir(), Upstream: w.Upstream()})
	if err != nil {
		b.Fatal(err)
	}
	defer n.Close()
	p, err := policy.Compile(sandbox.Network{Mode: sandbox.NetworkPublic})
	if err != nil {
		b.Fatal(err)
	}
	var take, remove time.Duration
	i := 0
	for b.Loop() {
		time.Sleep(150 * time.Millisecond)
		i++
		id := fmt.Sprintf("k%d", i)
		start := time.Now()
		d, err := n.Take(b.Context(), id, p, 1, nil)
		if err != nil {
			b.Fatal(err)
		}
		take += time.Since(start)
		d.File.Close()
		start = time.Now()
		if err := n.Remove(id); err != nil {
			b.Fatal(err)
		}
		remove += time.Since(start)
	}
	b.ReportMetric(float64(take.Microseconds())/float64(i)/1000, "take-ms")
	b.ReportMetric(float64(remove.Microseconds())/float64(i)/1000, "remove-ms")
}
