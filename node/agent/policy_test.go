package agent

import (
	"testing"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// A policy is compiled when it is set, by a create or by SetNetwork, and every
// network that is made for the sandbox later takes that.
func TestAPolicyIsCompiledOnce(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		b, err := w.Node.admit(smallBox("a"), baseImage, time.Now())
		if err != nil {
			t.Fatal(err)
		}
		defer w.Node.undo(b)
		compiled := b.policy
		if compiled == nil {
			t.Fatal("a create does not keep the policy that it compiled")
		}
		for range 3 {
			if p, err := w.Node.policyOf(b); err != nil || p != compiled {
				t.Errorf("compiled again: %v", err)
			}
		}
	})
	inWorld(t, func(t *testing.T, w *world) {
		w.create("a")
		if _, err := w.SetNetwork(t.Context(), "a", sandbox.Network{Mode: sandbox.NetworkNone, Limits: sandbox.NetworkLimits{Connections: 7}}); err != nil {
			t.Fatal(err)
		}
		w.Node.mu.Lock()
		b := w.Node.mu.live["a"]
		p := b.policy
		w.Node.mu.Unlock()
		if got, err := w.Node.policyOf(b); err != nil || got != p || got.Spec().Limits.Connections != 7 {
			t.Errorf("%+v, %v", got.Spec(), err)
		}
	})
}
