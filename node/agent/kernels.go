package agent

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
	mu struct {
		sync.Mutex
		ids map[string]bool
	}
}

func newKernelSet() *kernelSet {
	s := &kernelSet{}
	s.mu.ids = map[string]bool{}
	return s
}

func (s *kernelSet) add(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.ids[id] = true
}

func (s *kernelSet) remove(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.mu.ids, id)
}

func (s *kernelSet) snapshot() map[string]bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.mu.ids)
}

// bootOf boots kernels of a class: Driver.Boot with the kernel known from before
// it exists, or the second half of it where a blank kernel is ready.
func (n *Node) bootOf(c *kernelClass) func(ctx context.Context, id string) (runtime.Kernel, error) {
	return func(ctx context.Context, id string) (runtime.Kernel, error) {
		if b := c.blanks.take(); b != nil {
			k, err := b.Start(ctx)
			if err != nil {
				n.kernels.remove(b.ID())
			}
			return k, err
		}
		n.kernels.add(id)
		k, err := c.Driver.Boot(ctx, id, c.Class.Class)
		if err != nil {
			n.kernels.remove(id)
			return nil, err
		}
		return k, nil
	}
}

// anyKernel is a kernel, also one that is nobody's yet (runtime.Held).
type anyKernel interface {
	ID() string
	Destroy(ctx context.Context) error
}

// destroy is one attempt, finished even if whoever asked has left.
func (n *Node) destroy(k anyKernel) error {
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
func (n *Node) discard(k anyKernel) {
	if n.destroy(k) == nil {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.goLocked(func() { n.destroyUntilGone(k, 1) })
}

// removeNetwork removes what network a kernel has that did not come to be.
func (n *Node) removeNetwork(kernel string) {
	if n.cfg.Networks == nil {
		return
	}
	if err := n.cfg.Networks.Remove(kernel); err != nil {
		n.log.Error("the network of a kernel that is gone stays", "kernel", kernel, "err", err)
	}
}

// destroyUntilGone tries again with backoff and says whether it succeeded
// before the node closed.
func (n *Node) destroyUntilGone(k anyKernel, failures int) bool {
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
