package node

import (
	"github.com/cove-sandbox/cove/egress/proxy"
	"github.com/cove-sandbox/cove/sandbox"
)

// interception is what is to be done with a sandbox's requests; nil = nothing.
func (n *Node) interception(sb sandbox.Sandbox) (*proxy.Interception, error) {
	if !taped(sb.Spec.Network) {
		return nil, nil
	}
	i := &proxy.Interception{}
	n.tapes.get(sb.ID).through(i)
	i.All = false // until there is an authority
	return i, nil
}
