package agent

import (
	"context"
	"slices"
	"time"
)

const (
	// Ends that nobody acknowledged are kept for a week, and not more than
	// this many: a server that lost its store never asks for them.
	endsKept    = 7 * 24 * time.Hour
	endsMost    = 10_000
	sweepBudget = 30 * time.Second
)

// collect compares what runs with what should, now and then.
func (n *Node) collect() {
	var sweep <-chan time.Time
	if n.cfg.SweepEvery > 0 {
		t := time.NewTicker(n.cfg.SweepEvery)
		defer t.Stop()
		sweep = t.C
	}
	skipped := 0
	for {
		select {
		case <-n.ctx.Done():
			return
		case <-sweep:
			// A sweep stops boots, which creators in the queue would feel;
			// but a node that is never idle must be swept too.
			if slices.ContainsFunc(n.classes, func(c *kernelClass) bool { return c.pool.busy() }) && skipped < 5 {
				skipped++
				continue
			}
			skipped = 0
			n.sweep()
			n.forgetOldEnds(time.Now())
		}
	}
}

// sweep removes kernels that a driver has and nobody knows. There should be
// none: each one is a defect worth a line in the log. A class that was disabled
// because its driver could not be swept at the start is of use again once it was.
func (n *Node) sweep() {
	for _, d := range n.drivers() {
		ctx, cancel := context.WithTimeout(n.ctx, sweepBudget)
		err := d.quiesced(ctx, func() error {
			removed, err := d.Sweep(ctx, n.kernels.snapshot())
			if len(removed) > 0 {
				n.log.Error("gc: removed kernels nobody knew", "runtime", d.Name(), "kernels", removed)
			}
			return err
		})
		cancel()
		switch {
		case err == nil:
			for _, c := range d.classes {
				if c.pool.enable() {
					n.log.Info("a class of kernels works again", "class", c.Name)
				}
			}
		case n.ctx.Err() == nil:
			n.log.Error("gc: sweep failed", "runtime", d.Name(), "err", err)
		}
	}
}

// quiesced runs f while no kernel of a driver is being made.
func (d driverClasses) quiesced(ctx context.Context, f func() error) error {
	for _, c := range d.classes {
		inner := f
		f = func() error {
			return c.pool.quiesce(ctx, func() error { return c.blanks.exclusively(inner) })
		}
	}
	return f()
}

// forgetOldEnds bounds what an absent server can make the node remember.
func (n *Node) forgetOldEnds(now time.Time) {
	n.mu.Lock()
	var old []string
	for id, end := range n.mu.ends {
		if now.Sub(end.At) > endsKept || len(n.mu.ends)-len(old) > endsMost {
			old = append(old, id)
		}
	}
	for _, id := range old {
		delete(n.mu.ends, id)
		n.notices.forget(id)
	}
	n.mu.Unlock()
	for _, id := range old {
		if err := n.journal.appendFact(record{Kind: recForgot, ID: id}); err != nil {
			n.log.Warn("a forgotten end is not yet out of the journal", "sandbox", id, "err", err)
		}
	}
}
