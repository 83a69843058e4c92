package agent

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

const (
	adoptParallel = 16
	adoptTimeout  = 30 * time.Second
	adoptTries    = 3
)

// recover makes the node's memory and the machine agree with the journal: it
// adopts what lives, records the end of what does not, and sweeps the rest,
// warm kernels of the last process included. It runs before anything else
// does.
func (n *Node) recover(ctx context.Context, was *state) error {
	if err := n.knowsClasses(was); err != nil {
		return err
	}
	rebooted := was.boot != "" && was.boot != n.cfg.bootID
	var todo []*entry
	for id, e := range was.entries {
		if e.End != nil {
			n.mu.ends[id] = *e.End
			continue
		}
		todo = append(todo, e)
	}
	if err := n.journal.appendFact(record{Kind: recOpened, Boot: n.cfg.bootID}); err != nil {
		n.log.Warn("the start is not yet in the journal", "err", err)
	}

	var wg sync.WaitGroup
	slots := make(chan struct{}, adoptParallel)
	for _, e := range todo {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			n.takeBack(ctx, e, rebooted)
		})
	}
	wg.Wait()
	if ctx.Err() != nil { // no sweep on what was not looked at
		return contextError("node.open", ctx)
	}
	removed, err := n.sweepAtStart(ctx)
	if err != nil {
		return err
	}
	if n.cfg.Networks != nil {
		nets, err := n.cfg.Networks.Sweep(n.kernels.snapshot())
		if err != nil {
			return sandbox.Errorf(sandbox.Unavailable, "node.open", "remove networks that are left: %w", err)
		}
		removed = append(removed, nets...)
	}
	n.sweepSealed()
	if err := n.settleRecordings(); err != nil {
		n.log.Error("recordings that nobody goes on with are still open", "err", err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.log.Info("recovered", "adopted", len(n.mu.live), "gone", len(todo)-len(n.mu.live), "swept", len(removed), "machine_restarted", rebooted)
	return nil
}

// knowsClasses refuses a journal with sandboxes of classes that are not
// configured: nobody would look after their kernels. Nothing is lost by it, the
// operator configures the class again.
func (n *Node) knowsClasses(was *state) error {
	for id, e := range was.entries {
		if e.End != nil {
			continue
		}
		c, err := n.class(e.Sandbox.Spec.KernelClass)
		if err != nil {
			return sandbox.Errorf(sandbox.Precondition, "node.open", "sandbox %s is here and its kernel class %q is not configured", id, e.Sandbox.Spec.KernelClass).
				WithHint("configure the class again, end its sandboxes, then remove it")
		}
		if has := e.Kernel.Driver; e.Cold == nil && has != "" && has != c.Driver.Name() {
			return sandbox.Errorf(sandbox.Precondition, "node.open", "sandbox %s is here in a kernel of runtime %s and its kernel class %q is now of runtime %s", id, has, c.Name, c.Driver.Name()).
				WithHint("configure the class as it was, end its sandboxes, then change it")
		}
	}
	return nil
}

// sweepAtStart removes what nobody knows from every driver. The classes of one
// that fails are of no use until a later sweep succeeds, because kernels may be
// there that are not counted; the others serve. If all fail the node does not
// start.
func (n *Node) sweepAtStart(ctx context.Context) (removed []string, err error) {
	drivers, failed := n.drivers(), 0
	for _, d := range drivers {
		gone, serr := d.Sweep(ctx, n.kernels.snapshot())
		removed = append(removed, gone...)
		if serr == nil {
			continue
		}
		failed++
		err = sandbox.Errorf(sandbox.Unavailable, "node.open", "remove leftovers: %w", serr).
			WithHint("the node does not start beside kernels it does not know; run cove doctor")
		for _, c := range d.classes {
			n.log.Error("a class of kernels does not work", "class", c.Name, "err", serr)
			c.pool.disable(serr)
		}
	}
	if failed == len(drivers) {
		return nil, err
	}
	return removed, nil
}

// takeBack adopts one sandbox or records what became of it. A context that
// ends in between leaves it as it is.
func (n *Node) takeBack(ctx context.Context, e *entry, rebooted bool) {
	id := e.Sandbox.ID
	class, err := n.class(e.Sandbox.Spec.KernelClass)
	if err != nil { // knowsClasses has looked
		n.lost(id, sandbox.End{Cause: sandbox.Infra, Detail: err.Error()})
		return
	}
	if e.Cold != nil {
		n.takeBackCold(ctx, class, e)
		return
	}
	k, err := n.adopt(ctx, class.Driver, e.Kernel)
	switch {
	case ctx.Err() != nil:
		return
	case err != nil && sandbox.ClassOf(err) == sandbox.NotFound:
		end := sandbox.End{Cause: sandbox.NodeLost, Detail: "its kernel died while no node was running"}
		if rebooted {
			end.Detail = "the machine restarted"
		}
		n.lost(id, end)
		return
	case err != nil:
		n.lost(id, sandbox.End{Cause: sandbox.Infra, Detail: "could not be taken back after a restart of the node: " + err.Error()})
		return
	case isDone(k):
		n.lost(id, endOf(k.Exit()))
		return
	}

	path, pathErr := n.cfg.Images.Path(e.Sandbox.ImageID)
	b := n.newBox(class, e.Sandbox, e.Image, path)
	b.needs = e.Needs
	b.clock.adopt(e.Clock)
	if err := n.attachVolumes(ctx, b); err != nil {
		n.log.Error("an adopted sandbox is without its volumes", "sandbox", id, "err", err)
	}
	n.takeRecording(ctx, b.sb)
	n.adoptNetwork(ctx, b, k.ID())
	hot := false // a guest that stands still does not answer
	if p, ok := k.(runtime.Pauser); ok {
		hot = p.Paused()
	}
	in, err := inside{attached: true}, error(nil)
	if !hot {
		in, err = n.cfg.inspect(ctx, k)
	}
	switch {
	case ctx.Err() != nil:
		return
	case err != nil: // busy or sick; what is wrong with it will show
		n.log.Warn("adopted a sandbox whose guest does not answer", "sandbox", id, "err", err)
	case !in.attached && e.Sandbox.Episode <= 1: // its create never returned
		if err := n.journal.appendFact(record{Kind: recForgot, ID: id}); err != nil {
			n.log.Warn("an undone create is not yet out of the journal", "sandbox", id, "err", err)
		}
		return
	case !in.attached:
		if pathErr == nil {
			rctx, cancel := context.WithTimeout(ctx, resetTimeout)
			defer cancel()
			if pathErr = k.Reset(rctx, b.container); pathErr == nil {
				pathErr = n.trust(rctx, b.sb, b.image, k)
			}
			if pathErr == nil {
				pathErr = b.clock.rewind(rctx, k)
			}
		}
		if pathErr != nil {
			n.lost(id, sandbox.End{Cause: sandbox.Infra, Detail: fmt.Sprintf("a reset was cut off by a restart of the node and could not be finished: %v", pathErr)})
			return
		}
	}
	n.kernels.add(k.ID())
	n.mu.Lock()
	n.mu.reservations.Hold(class.Name, b.resources)
	b.held = true
	n.mu.live[id] = b
	n.mu.Unlock()
	n.run(b, k)
	if hot {
		n.mu.Lock()
		// Who paused it is not known any more: as if it had been idle, if that
		// is what it does then.
		n.setStandbyLocked(b, sandbox.Hot, b.sb.Spec.OnIdle == sandbox.IdlePause || b.sb.Spec.OnTimeout == sandbox.IdlePause)
		n.mu.Unlock()
	}
}

// takeBackCold takes back a sandbox that has no kernel. A restart of the machine does
// not touch it.
func (n *Node) takeBackCold(ctx context.Context, class *kernelClass, e *entry) {
	path, err := n.cfg.Images.Path(e.Sandbox.ImageID)
	if err != nil {
		n.log.Warn("the image of a sandbox in cold standby is not here", "sandbox", e.Sandbox.ID, "err", err)
	}
	b := n.newBox(class, e.Sandbox, e.Image, path)
	b.cold, b.parked, b.needs = e.Cold, e.Parked, e.Needs
	if e.Cold != nil && !e.Cold.Clock.IsZero() {
		b.clock.restart(e.Cold.Clock)
	}
	if err := n.attachVolumes(ctx, b); err != nil {
		n.log.Error("a sandbox in cold standby is without its volumes", "sandbox", b.id, "err", err)
	}
	n.takeRecording(ctx, b.sb)
	n.mu.Lock()
	defer n.mu.Unlock()
	b.sb.State = sandbox.Running
	n.mu.live[b.id] = b
	close(b.ready)
	n.setStandbyLocked(b, sandbox.Cold, false)
}

// adopt asks the driver for a kernel, more than once if it fails for another
// reason than that the kernel is gone: a sandbox is not given up for a hiccup.
func (n *Node) adopt(ctx context.Context, d runtime.Driver, h runtime.Handle) (k runtime.Kernel, err error) {
	for try := 1; ; try++ {
		actx, cancel := context.WithTimeout(ctx, adoptTimeout)
		k, err = d.Adopt(actx, h)
		cancel()
		if err == nil || sandbox.ClassOf(err) == sandbox.NotFound || try == adoptTries {
			return k, err
		}
		select {
		case <-ctx.Done():
			return nil, contextError("node.open", ctx)
		case <-time.After(backoff(try)):
		}
	}
}

// lost records the end of a sandbox that did not survive.
func (n *Node) lost(id string, end sandbox.End) {
	if end.At.IsZero() {
		end.At = time.Now()
	}
	if err := n.journal.appendFact(record{Kind: recEnded, ID: id, End: &end}); err != nil {
		n.log.Error("an end is not yet in the journal", "sandbox", id, "end", end, "err", err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.mu.ends[id] = end
	n.log.Warn("sandbox lost", "sandbox", id, "end", end)
}
