package e2e

import (
	"testing"

	"github.com/cove-sandbox/cove/e2e/world"
)

// scenario is one thing hostile code does, as root in a sandbox of its own.
type scenario struct {
	name string
	run  func(*testing.T, *world.World)
}

// TestHostile runs code that means harm, one scenario after the other on one
// server. All through each, a neighbour and the host must answer; after each,
// the host must hold what the record says and nothing else.
func TestHostile(t *testing.T) {
	w := world.New(t, world.Options{})
	n := w.Neighbour(t)
	for _, group := range [][]scenario{bombs, processTricks, fileTricks, escapes, resets, output} {
		for _, s := range group {
			t.Run(s.name, func(t *testing.T) {
				t.Cleanup(func() { w.AssertReconciled(t) }) // after the sandboxes of the scenario are killed
				n.During(t)
				s.run(t, w)
			})
		}
	}
}
