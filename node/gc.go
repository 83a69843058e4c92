package node

import (
	"context"
	"time"
)

const (
	// Ends that nobody acknowledged are kept for a week, and not more than
	// this many: a server that lost its store never asks for them.
	endsKept    = 7 * 24 * time.Hour
	endsMost    = 10_000
	sweepBudget = 30 * time.Second
	diskEvery   = 5 * time.Second
)

// collect compares what runs with what should, now and then, and watches the
// host's disk.
func (n *Node) collect() {
	disk := time.NewTicker(diskEvery)
	defer disk.Stop()
	var sweep <-chan time.Time
	if n.cfg.SweepEvery > 0 {
		t := time.NewTicker(n.cfg.SweepEvery)
		defer t.Stop()
		sweep = t.C
	}
	n.checkDisk()
	skipped := 0
	for {
		select {
		case <-n.ctx.Done():
			return
		case <-disk.C:
			n.checkDisk()
			n.relieve()
		case <-sweep:
			// A sweep stops boots, which creators in the queue would feel;
			// but a node that is never idle must be swept too.
			if n.pool.busy() && skipped < 5 {
				skipped++
				continue
			}
			skipped = 0
			n.sweep()
			n.forgetOldEnds(time.Now())
		}
	}
}

// sweep removes kernels that the driver has and nobody knows. There should be
// none: each one is a defect worth a line in the log.
func (n *Node) sweep() {
	ctx, cancel := context.WithTimeout(n.ctx, sweepBudget)
	defer cancel()
	err := n.pool.quiesce(ctx, func() error {
		return n.blanks.exclusively(func() error {
			removed, err := n.cfg.Driver.Sweep(ctx, n.kernels.snapshot())
			if len(removed) > 0 {
				n.log.Error("gc: removed kernels nobody knew", "kernels", removed)
			}
			return err
		})
	})
	if err != nil && n.ctx.Err() == nil {
		n.log.Error("gc: sweep failed", "err", err)
	}
}

// checkDisk stops admission while the host is short of disk.
func (n *Node) checkDisk() {
	free, err := n.cfg.freeDisk()
	if err != nil {
		n.log.Error("gc: cannot tell the free disk space", "err", err)
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	low := free < n.ledger.limits.DiskReserve
	if low != n.ledger.lowDisk {
		n.log.Warn("disk space", "low", low, "free", amount(free, "B"))
	}
	n.ledger.SetLowDisk(low)
}

// forgetOldEnds bounds what an absent server can make the node remember.
func (n *Node) forgetOldEnds(now time.Time) {
	n.mu.Lock()
	var old []string
	for id, end := range n.ends {
		if now.Sub(end.At) > endsKept || len(n.ends)-len(old) > endsMost {
			old = append(old, id)
		}
	}
	for _, id := range old {
		delete(n.ends, id)
	}
	n.mu.Unlock()
	for _, id := range old {
		if err := n.journal.appendFact(record{Kind: recForgot, ID: id}); err != nil {
			n.log.Warn("a forgotten end is not yet out of the journal", "sandbox", id, "err", err)
		}
	}
}

// freeAboveReserve is the memory warm kernels may still take: what is
// available less a tenth of the machine.
func freeAboveReserve(total int64) int64 {
	_, available, err := hostMemory()
	if err != nil {
		return 0
	}
	return available - total/10
}
