package egress_test

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/egress"
	"github.com/cove-sandbox/cove/egress/egresstest"
	"github.com/cove-sandbox/cove/egress/netns"
	"github.com/cove-sandbox/cove/egress/policy"
	"github.com/cove-sandbox/cove/sandbox"
)

// Networks in use outlive the process, spares do not, and what no kernel has is
// swept.
func TestNetworksAcrossProcesses(t *testing.T) {
	w := egresstest.NewWorld(t)
	dir := t.TempDir()
	open := func() *egress.Networks {
		n, err := egress.Open(egress.Config{Dir: dir, Upstream: w.Upstream(), Spare: 2})
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	names := func() (out []string) {
		ents, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range ents {
			out = append(out, e.Name())
		}
		return out
	}
	p, err := policy.Compile(sandbox.Network{Mode: sandbox.NetworkPublic})
	if err != nil {
		t.Fatal(err)
	}
	n := open()
	for _, id := range []string{"a", "b", "c"} {
		d, err := n.Take(t.Context(), id, p, 1, nil)
		if err != nil {
			t.Fatal(err)
		}
		d.File.Close()
	}
	if _, err := n.Take(t.Context(), "a", p, 1, nil); !errors.Is(err, sandbox.ErrUnavailable) {
		t.Errorf("a second network for one kernel: %v", err)
	}
	if n.Box("a") == nil || n.Box("x") != nil {
		t.Error("boxes")
	}
	if err := n.Remove("c"); err != nil {
		t.Error(err)
	}
	if err := errors.Join(n.Remove("c"), n.Remove("never")); err != nil {
		t.Errorf("removing what is not there: %v", err)
	}
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(names(), " "); got != "a b" {
		t.Errorf("after Close: %q", got)
	}
	// What a process that was killed leaves.
	if _, err := netns.Make(dir, "spare-9"); err != nil {
		t.Fatal(err)
	}
	n = open()
	if err := n.Adopt(t.Context(), "a", p, 4, nil); err != nil {
		t.Fatal(err)
	}
	if s := n.Box("a").Status(0); s.Generation != 4 {
		t.Errorf("adopted: %+v", s)
	}
	if err := n.Adopt(t.Context(), "z", p, 1, nil); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("adopting what is not there: %v", err)
	}
	if removed, err := n.Sweep(map[string]bool{"a": true}); err != nil || strings.Join(removed, " ") != "b" {
		t.Errorf("swept %q, %v", removed, err)
	}
	if _, err := n.Sweep(nil); err != nil {
		t.Error(err)
	}
	if err := n.Close(); err != nil {
		t.Error(err)
	}
	if left := names(); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

// A namespace that cannot be made is no network.
func TestTakeFailsClosed(t *testing.T) {
	w := egresstest.NewWorld(t)
	n, err := egress.Open(egress.Config{Dir: t.TempDir() + "/gone", Upstream: w.Upstream(), Spare: -1})
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	p, err := policy.Compile(sandbox.Network{Mode: sandbox.NetworkPublic})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := n.Take(t.Context(), "../escape/x", p, 1, nil); !errors.Is(err, sandbox.ErrUnavailable) {
		t.Errorf("a name that cannot be made: %v", err)
	}
}
