package agent

import (
	"time"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// meter counts what the processor did for one exec of a sandbox of a run, from
// outside: all that its kernel used meanwhile, if no other exec ran beside it.
// Otherwise what the guest says of the exec's own processes stays, which is exact to
// 10 ms. One read of a file at each end, about 10 µs.
type meter struct {
	n      *Node
	b      *box
	kernel runtime.Kernel
	of     runtime.CPUMeter
	before time.Duration
	others uint64 // of the box when it began
	alone  bool
	over   bool
}

// meterOf begins to count; nil where nobody wants it or it cannot be.
func (n *Node) meterOf(id string) *meter {
	n.mu.Lock()
	b := n.mu.live[id]
	if b == nil || b.sb.Spec.Rollout.Run == "" {
		n.mu.Unlock()
		return nil
	}
	kernel := b.kernel
	n.mu.Unlock()
	of, ok := kernel.(runtime.CPUMeter)
	if !ok {
		return nil
	}
	before, ok := of.CPUTime() // a file of the host, read without the lock
	if !ok {
		return nil
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	m := &meter{n: n, b: b, kernel: kernel, of: of, before: before, alone: b.metered == 0}
	if b.metered++; !m.alone {
		b.overlaps++
	}
	m.others = b.overlaps
	return m
}

// sink has the end say what was counted. One that leaves before the end leaves a
// process behind, beside which none is alone.
func (m *meter) sink(next func(sandbox.ProcessEvent) error) func(sandbox.ProcessEvent) error {
	if m == nil {
		return next
	}
	return func(ev sandbox.ProcessEvent) error {
		switch {
		case ev.Started != nil && ev.Started.Replayed:
			m.alone = false // it began before we looked
		case ev.End != nil:
			after, ok := m.of.CPUTime()
			if m.close() && ok {
				end := *ev.End
				end.CPUTime = after - m.before
				ev.End = &end
			}
		}
		return next(ev)
	}
}

// close says whether all that was counted is the exec's.
func (m *meter) close() bool {
	m.n.mu.Lock()
	defer m.n.mu.Unlock()
	if m.over {
		return false
	}
	m.over = true
	m.b.metered--
	return m.alone && m.b.overlaps == m.others && m.b.kernel == m.kernel
}
