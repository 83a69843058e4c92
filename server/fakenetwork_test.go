package server

import (
	"context"
	"net/netip"

	"github.com/cove-sandbox/cove/egress/tape"
	"github.com/cove-sandbox/cove/sandbox"
)

// fakeNetworks remembers what was set.
type fakeNetworks struct {
	networks   map[string]sandbox.NetworkStatus
	recordings *tape.Library // a real one: it is files and nothing more
}

func (n *fakeNode) Recordings() RecordingSet { return n.recordings }

func (n *fakeNode) SetNetwork(_ context.Context, id string, s sandbox.Network) (int64, error) {
	if _, err := n.find(id); err != nil {
		return 0, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.networks == nil {
		n.networks = map[string]sandbox.NetworkStatus{}
	}
	st := sandbox.NetworkStatus{Network: s, Generation: max(n.networks[id].Generation, 1) + 1, Allowed: 1, Denied: 2,
		Flows: []sandbox.NetworkFlow{{Name: "a.org", Address: netip.MustParseAddr("203.0.113.5"), Port: 443, Protocol: sandbox.TCP, Sent: 7, Allowed: true, Reason: "rule"}}}
	n.networks[id] = st
	return st.Generation, nil
}

func (n *fakeNode) NetworkStatus(_ context.Context, id string, flows int) (sandbox.NetworkStatus, error) {
	if _, err := n.find(id); err != nil {
		return sandbox.NetworkStatus{}, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	st := n.networks[id]
	st.Flows = st.Flows[:min(len(st.Flows), flows)]
	return st, nil
}
