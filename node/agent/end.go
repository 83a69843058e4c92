package agent

import (
	"context"
	"fmt"
	"maps"
	"time"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// Kill ends a sandbox and returns when nothing is left of it. The first cause
// wins: killing what is ending waits for that, killing what has ended does
// nothing until the end is acknowledged. Its end is in Ends afterwards, like
// any other. sandbox.ErrNotFound if the node does not have it.
func (n *Node) Kill(ctx context.Context, id string, end sandbox.End) error {
	if err := n.call(); err != nil {
		return err
	}
	defer n.calls.Done()
	b, err := n.find(ctx, id)
	if err != nil {
		if sandbox.ClassOf(err) == sandbox.Ended {
			return nil
		}
		return err
	}
	n.mu.Lock()
	n.endLocked(b, end, false)
	n.mu.Unlock()
	select {
	case <-b.gone:
		return nil
	case <-b.stuck:
		return &sandbox.Error{Class: sandbox.Unavailable, Op: "node.kill", Msg: "the sandbox has ended but its kernel resists removal",
			Hint: "removal goes on; the node's log has the reason"}
	case <-ctx.Done():
		return contextError("node.kill", ctx)
	}
}

// evictAll ends every sandbox and waits until they are gone.
func (n *Node) evictAll(ctx context.Context) error {
	n.mu.Lock()
	boxes := make([]*box, 0, len(n.mu.live))
	for _, b := range n.mu.live {
		boxes = append(boxes, b)
	}
	n.mu.Unlock()
	for _, b := range boxes {
		select {
		case <-b.ready:
		case <-ctx.Done():
			return contextError("node.shutdown", ctx)
		}
		n.mu.Lock()
		n.endLocked(b, sandbox.End{Cause: sandbox.Evicted, Detail: "the node was shut down"}, true)
		n.mu.Unlock()
	}
	for _, b := range boxes {
		select {
		case <-b.gone:
		case <-ctx.Done():
			return contextError("node.shutdown", ctx)
		}
	}
	return nil
}

// endLocked begins the end of a running sandbox. Later calls change nothing.
// own says that nobody outside asked for it, so they must be told.
func (n *Node) endLocked(b *box, end sandbox.End, own bool) {
	if b.end != nil || n.mu.live[b.id] != b {
		return
	}
	if end.At.IsZero() {
		end.At = time.Now()
	}
	if n.goLocked(func() { n.teardown(b, end, own) }) {
		b.end = &end
		b.sb.State = sandbox.Ending
		b.cancel(endedError(b.id, end))
	}
}

// teardown records the end, then makes it true: in the other order a crash in
// between would lose the cause. A journal that cannot be written does not keep
// a sandbox alive.
func (n *Node) teardown(b *box, end sandbox.End, own bool) {
	end.Usage = n.usageOf(b)
	if err := n.journal.appendFact(record{Kind: recEnded, ID: b.id, End: &end}); err != nil {
		n.log.Error("an end is not yet in the journal", "sandbox", b.id, "end", end, "err", err)
	}
	b.op <- struct{}{} // never given back: there is no kernel after this
	n.mu.Lock()
	k := b.kernel // none in cold standby
	if b.cold != nil {
		n.litter.Store(true)
		n.abandonLocked(b, nil)
	}
	n.mu.Unlock()
	if k != nil && !n.vacate(b, k, end) && n.destroy(k) != nil {
		close(b.stuck)
		if !n.destroyUntilGone(k, 1) {
			return // closing; the next Open sweeps it
		}
	}
	n.timers.remove(b.id)
	n.detachVolumes(b)
	n.endRecording(b)
	n.mu.Lock()
	delete(n.mu.live, b.id)
	n.releaseLocked(b)
	n.mu.ends[b.id] = end
	n.mu.Unlock()
	n.sweepSealed()
	close(b.gone)
	n.log.Info("sandbox ended", "sandbox", b.id, "end", end)
	if own {
		n.notices.ring(b.id)
	}
}

// lastLook bounds what is waited for to learn what a sandbox used that ends.
const lastLook = 200 * time.Millisecond

// usageOf is what a sandbox of a run used, if that can still be seen.
func (n *Node) usageOf(b *box) *sandbox.Usage {
	n.mu.Lock()
	k, run := b.kernel, b.sb.Spec.Rollout.Run
	n.mu.Unlock()
	if k == nil || run == "" {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), lastLook)
	defer cancel()
	st, err := k.Stats(ctx)
	if err != nil {
		return nil
	}
	u := &sandbox.Usage{CPUTime: st.CPUTime, Memory: st.Memory, DiskUsed: st.DiskUsed}
	u.Sent, u.Received = n.traffic(k)
	return u
}

// watch ends a sandbox whose kernel stops serving, unless that is no longer its
// kernel.
func (n *Node) watch(b *box, k runtime.Kernel) {
	select {
	case <-k.Done():
	case <-b.ctx.Done():
		return
	case <-n.ctx.Done():
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if b.kernel == k {
		n.endLocked(b, endOf(k.Exit()), true)
	}
}

// endOf is the end of a sandbox whose kernel exited by itself.
func endOf(x runtime.Exit) sandbox.End {
	end := sandbox.End{Cause: x.Cause, Detail: x.Detail, At: x.At}
	switch x.Cause {
	case sandbox.OOM, sandbox.InitKilled, sandbox.Infra, sandbox.NoDisk:
	case "":
		end.Cause, end.Detail = sandbox.Infra, "the kernel is gone and did not say why"
	default: // e.g. destroyed behind our back
		end.Cause, end.Detail = sandbox.Infra, fmt.Sprintf("the kernel is gone: %s %s", x.Cause, x.Detail)
	}
	return end
}

// Live lists the sandboxes here that have not ended.
func (n *Node) Live(context.Context) ([]sandbox.Sandbox, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	out := make([]sandbox.Sandbox, 0, len(n.mu.live))
	for _, b := range n.mu.live {
		out = append(out, b.sb)
	}
	return out, nil
}

// Ends lists the ends that nobody has acknowledged yet.
func (n *Node) Ends(context.Context) (map[string]sandbox.End, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return maps.Clone(n.mu.ends), nil
}

// AckEnd forgets an end that is now recorded elsewhere. Forgetting what is
// not there succeeds.
func (n *Node) AckEnd(_ context.Context, id string) error {
	if err := n.call(); err != nil {
		return err
	}
	defer n.calls.Done()
	n.mu.Lock()
	_, ok := n.mu.ends[id]
	delete(n.mu.ends, id)
	n.notices.forget(id)
	n.mu.Unlock()
	if !ok {
		return nil
	}
	return n.journal.appendFact(record{Kind: recForgot, ID: id})
}

func endedError(id string, end sandbox.End) *sandbox.Error {
	return &sandbox.Error{Class: sandbox.Ended, Op: "node", Msg: fmt.Sprintf("sandbox %s has ended: %s", id, end),
		Hint: "create another sandbox"}
}
