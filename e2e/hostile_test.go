package e2e

import (
	"slices"
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
	runHostile(t, world.Options{}, slices.Concat(bombs, processTricks, fileTricks, escapes, resets, output))
}

// TestHostileOrigins runs the ways out, and over the limit of memory, in the children of a checkpoint and in kernels that
// were used before; "make soak-origins" runs everything there.
func TestHostileOrigins(t *testing.T) {
	quick := []scenario{{"memory bomb", memoryBomb}, {"memory bomb in a child", memoryBombChild}}
	for _, s := range escapes {
		switch s.name {
		case "garbage for the guest's port", "thousands of connections to the guest's port", "taking over the guest's port",
			"a process of the guest before it executes", "out of the group of its exec":
			// wait for seconds
		default:
			quick = append(quick, s)
		}
	}
	for _, o := range []world.Origin{world.Child, world.Reused} {
		t.Run(string(o), func(t *testing.T) { runHostile(t, world.Options{Origin: o}, quick) })
	}
}

func runHostile(t *testing.T, o world.Options, scenarios []scenario) {
	w := world.New(t, o)
	n := w.Neighbour(t)
	for _, s := range scenarios {
		t.Run(s.name, func(t *testing.T) {
			t.Cleanup(func() { w.AssertReconciled(t) }) // after the sandboxes of the scenario are killed
			n.During(t)
			s.run(t, w)
		})
	}
}
