package proxy_test

import (
	"testing"

	"github.com/cove-sandbox/cove/egress/egresstest"
)

// A connection to a server that speaks first, until it has spoken.
func BenchmarkConnect(b *testing.B) {
	w := egresstest.NewWorld(b)
	x := egresstest.NewAttacker(b, w, network(b, "public"))
	for b.Loop() {
		if got := x.Line(egresstest.Good + ":22"); len(got) < 5 {
			b.Fatal(got)
		}
	}
}
