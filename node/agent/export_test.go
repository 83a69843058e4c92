package agent

import (
	"context"
	"time"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// Guest is the machine inside of a sandbox that is held until release.
func (n *Node) Guest(ctx context.Context, id string) (*guest.Client, func(), error) {
	b, release, err := n.hold(ctx, id)
	if err != nil {
		return nil, nil, err
	}
	return n.inside(b).Guest(), release, nil
}

// Take prepares a snapshot and commits it.
func (n *Node) Take(ctx context.Context, id string, r node.SnapshotRequest) (sandbox.Content, time.Duration, error) {
	p, err := n.PrepareSnapshot(ctx, id, r)
	if err == nil {
		err = n.CommitSnapshot(ctx, p.Token)
	}
	return p.Content, p.Paused, err
}

func (n *Node) StandbyNow() map[string]sandbox.Standby {
	s, _ := n.Standby(context.Background())
	return s
}

func (n *Node) CapacityNow() sandbox.Capacity {
	c, _ := n.Capacity(context.Background())
	return c
}

// OnMachine has a node believe that its machine has so much memory, of which its
// sandboxes really use what they use, and nobody else anything.
func (c *Config) OnMachine(memory, kept int64, of func() *Node) {
	c.Limits.Memory, c.Limits.MemoryReserve = memory, kept
	c.host = func() (Host, error) {
		h := Host{Memory: memory, Disk: 100 << 30}
		n := of()
		if n == nil {
			return h, nil
		}
		n.mu.Lock()
		var meters []runtime.Meter
		for _, b := range n.mu.live {
			if m, ok := b.kernel.(runtime.Meter); ok {
				meters = append(meters, m)
			}
		}
		n.mu.Unlock()
		for _, m := range meters {
			if use, err := m.MemoryUse(); err == nil {
				h.Memory -= use
			}
		}
		return h, nil
	}
}
