package agent

import (
	"context"
	"iter"
	"sync"

	"github.com/cove-sandbox/cove/internal/notify"
	"github.com/cove-sandbox/cove/node"
)

// notices wake who waits for ends. Nobody is waited for.
type notices struct {
	mu struct {
		sync.Mutex
		changed notify.Change
		own     map[string]bool // sandboxes that nobody was asked to end
	}
}

func newNotices() *notices {
	s := &notices{}
	s.mu.own = map[string]bool{}
	return s
}

// ring says that a sandbox has ended by itself.
func (s *notices) ring(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.own[id] = true
	s.mu.changed.Tell()
}

func (s *notices) forget(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.mu.own, id)
}

func (s *notices) rung(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.own[id]
}

func (s *notices) wait() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.changed.Next()
}

// Ended tells of ends: first of all that nobody acknowledged, then of each that
// comes by itself.
func (n *Node) Ended(ctx context.Context) iter.Seq2[node.Ended, error] {
	return func(yield func(node.Ended, error) bool) {
		told := map[string]bool{}
		for first := true; ; first = false {
			changed := n.notices.wait() // before looking: what comes after is a change
			for _, e := range n.untold(told, first) {
				if !yield(e, nil) {
					return
				}
			}
			select {
			case <-changed:
			case <-ctx.Done():
				yield(node.Ended{}, contextError("node.ended", ctx))
				return
			case <-n.ctx.Done():
				yield(node.Ended{}, errClosing)
				return
			}
		}
	}
}

// untold adds to told what it returns and forgets there what was acknowledged.
func (n *Node) untold(told map[string]bool, all bool) (ends []node.Ended) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for id := range told {
		if _, ok := n.mu.ends[id]; !ok {
			delete(told, id)
		}
	}
	for id, end := range n.mu.ends {
		if !told[id] && (all || n.notices.rung(id)) {
			told[id] = true
			ends = append(ends, node.Ended{ID: id, End: end})
		}
	}
	return ends
}
