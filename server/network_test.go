package server

import (
	"context"
	"net/netip"
	"testing"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

func TestNetworkOfASandbox(t *testing.T) {
	w := newWorld(t)
	allow := func(d string) *covev1.NetworkRule { return &covev1.NetworkRule{Action: "allow", Domain: d} }
	sb := w.create(nil)
	if sb.Spec.Network.GetMode() != "none" || sb.NetworkGeneration != 1 {
		t.Errorf("by default: %v", sb)
	}
	if sb := w.create(&covev1.SandboxSpec{Network: &covev1.Network{Rules: []*covev1.NetworkRule{allow("a.org")}}}); sb.Spec.Network.GetMode() != "rules" {
		t.Errorf("rules without a mode: %v", sb)
	}
	_, err := w.createWith(t.Context(), "", &covev1.SandboxSpec{Network: &covev1.Network{Rules: []*covev1.NetworkRule{allow("a.org"), allow("a..org")}}})
	if e := wantError(t, err, sandbox.ErrInvalid, "not a valid domain name"); e.Field != "spec.network.rules[1].domain" {
		t.Errorf("field %q", e.Field)
	}
	set := func(id string, n *covev1.Network) (*connect.Response[covev1.SetNetworkResponse], error) {
		return w.client.Sandboxes.SetNetwork(t.Context(), connect.NewRequest(&covev1.SetNetworkRequest{Id: id, Network: n}))
	}
	r, err := set(sb.Id, &covev1.Network{Rules: []*covev1.NetworkRule{allow("a.org")}})
	if err != nil || r.Msg.Generation != 2 || r.Msg.Network.Mode != "rules" {
		t.Fatalf("%v, %v", r, err)
	}
	if got := w.get(sb.Id); got.NetworkGeneration != 2 || len(got.Spec.Network.GetRules()) != 1 {
		t.Errorf("afterwards: %v", got)
	}
	w.node.onStatus = func(st *sandbox.NetworkStatus) {
		st.Denied, st.Flows = 2, []sandbox.NetworkFlow{{Name: "a.org", Address: netip.MustParseAddr("203.0.113.5"), Port: 443, Protocol: sandbox.TCP, Sent: 7, Allowed: true, Reason: "rule"}}
	}
	g, err := w.client.Sandboxes.GetNetwork(t.Context(), connect.NewRequest(&covev1.GetNetworkRequest{Id: sb.Id, Flows: 10}))
	if err != nil || g.Msg.Generation != 2 || g.Msg.Denied != 2 || len(g.Msg.Flows) != 1 || g.Msg.Flows[0].Address != "203.0.113.5" {
		t.Errorf("%v, %v", g, err)
	}
	for field, n := range map[string]*covev1.Network{
		"network":                   nil,
		"network.mode":              {Mode: "all"},
		"network.rules[0].ports[0]": {Rules: []*covev1.NetworkRule{{Action: "allow", Ports: []*covev1.PortRange{{From: 70000}}}}},
		"network.rules[0].cidr":     {Rules: []*covev1.NetworkRule{{Action: "deny", Cidr: "10.0.0.1/8"}}},
	} {
		_, err := set(sb.Id, n)
		if e := wantError(t, err, sandbox.ErrInvalid, ""); e.Field != field {
			t.Errorf("field %q, want %q", e.Field, field)
		}
	}
	_, err = set("nosuch", &covev1.Network{Mode: "none"})
	wantError(t, err, sandbox.ErrNotFound, "no sandbox")
	w.kill(sb.Id)
	_, err = set(sb.Id, &covev1.Network{Mode: "none"})
	wantError(t, err, sandbox.ErrEnded, "has ended")
}

func networkScenarios() []scenario {
	set := func(id string, n *covev1.Network) func(context.Context, *world) error {
		return func(ctx context.Context, w *world) error {
			_, err := w.client.Sandboxes.SetNetwork(ctx, connect.NewRequest(&covev1.SetNetworkRequest{Id: id, Network: n}))
			return err
		}
	}
	get := func(id string, flows int32) func(context.Context, *world) error {
		return func(ctx context.Context, w *world) error {
			_, err := w.client.Sandboxes.GetNetwork(ctx, connect.NewRequest(&covev1.GetNetworkRequest{Id: id, Flows: flows}))
			return err
		}
	}
	public := &covev1.Network{Mode: "public"}
	return []scenario{
		{"Sandboxes/SetNetwork", "good", set(live, public), nil, "", ""},
		{"Sandboxes/SetNetwork", "no network", set(live, nil), sandbox.ErrInvalid, "network", "missing"},
		{"Sandboxes/SetNetwork", "bad mode", set(live, &covev1.Network{Mode: "some"}), sandbox.ErrInvalid, "network.mode", "public"},
		{"Sandboxes/SetNetwork", "bad id", set("A!", public), sandbox.ErrInvalid, "id", ""},
		{"Sandboxes/SetNetwork", "ended", set(dead, public), sandbox.ErrEnded, "", "oom"},
		{"Sandboxes/SetNetwork", "unknown", set(none, public), sandbox.ErrNotFound, "", ""},
		{"Sandboxes/GetNetwork", "good", get(live, 512), nil, "", ""},
		{"Sandboxes/GetNetwork", "too many", get(live, 513), sandbox.ErrInvalid, "flows", "512"},
		{"Sandboxes/GetNetwork", "ended", get(dead, 1), sandbox.ErrEnded, "", "oom"},
		{"Sandboxes/GetNetwork", "unknown", get(none, 1), sandbox.ErrNotFound, "", ""},
	}
}
