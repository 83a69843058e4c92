package node

import (
	"context"
	"maps"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/runtime"
)

// destroyTimeout bounds one attempt; a destroy takes 2 ms, on a machine that
// thrashes seconds.
const destroyTimeout = 30 * time.Second

// kernelSet is every kernel this node knows of: warm, in use or being
// destroyed. What the driver has beyond it is a leftover.
type kernelSet struct {
	mu  sync.Mutex
	ids map[string]bool
}

func newKernelSet() *kernelSet { return &kernelSet{ids: map[string]bool{}} }

func (s *kernelSet) add(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ids[id] = true
}

func (s *kernelSet) remove(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.ids, id)
}

func (s *kernelSet) snapshot() map[string]bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.ids)
}

// boot is Driver.Boot with the kernel known from before it exists, or the
// second half of it where a blank kernel is ready.
func (n *Node) boot(ctx context.Context, id string) (runtime.Kernel, error) {
	if b := n.blanks.take(); b != nil {
		k, err := b.Start(ctx)
		if err != nil {
			n.kernels.remove(b.ID())
		}
		return k, err
	}
	n.kernels.add(id)
	k, err := n.cfg.Driver.Boot(ctx, id)
	if err != nil {
		n.kernels.remove(id)
		return nil, err
	}
	return k, nil
}

// destroy is one attempt, finished even if whoever asked has left.
func (n *Node) destroy(k runtime.Kernel) error {
	ctx, cancel := context.WithTimeout(context.Background(), destroyTimeout)
	defer cancel()
	if err := k.Destroy(ctx); err != nil {
		n.log.Error("destroy failed", "kernel", k.ID(), "err", err)
		return err
	}
	if n.cfg.Networks != nil {
		if err := n.cfg.Networks.Remove(k.ID()); err != nil {
			n.log.Error("the network of a kernel that is gone stays", "kernel", k.ID(), "err", err)
			return err
		}
	}
	n.kernels.remove(k.ID())
	return nil
}

// discard destroys a kernel that belongs to nobody. Where that fails it keeps
// trying in the background; at the latest the next Open sweeps it.
func (n *Node) discard(k runtime.Kernel) {
	if n.destroy(k) == nil {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.goLocked(func() { n.destroyUntilGone(k, 1) })
}

// destroyUntilGone tries again with backoff and says whether it succeeded
// before the node closed.
func (n *Node) destroyUntilGone(k runtime.Kernel, failures int) bool {
	for ; ; failures++ {
		select {
		case <-n.ctx.Done():
			return false
		case <-time.After(backoff(failures)):
		}
		if n.destroy(k) == nil {
			return true
		}
	}
}
