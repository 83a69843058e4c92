package agent

import (
	"context"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// stepClock is the clock of day inside a deterministic sandbox. It starts at a fixed time
// and runs, for what waits for it to move must not wait for ever; each exec that begins
// while no other runs begins at a whole minute, the first after all that ran before. So
// commands see the same time again, however long their caller thought in between, if
// they look within a minute of their start to the minute, within a second to the second.
//
// nil is the host's clock.
type stepClock struct {
	start time.Time

	// setting is held while an exec begins, which asks the guest and the kernel: neither may
	// hold up who reads the clock, some of whom hold the node's lock.
	setting sync.Mutex
	mu      struct {
		sync.Mutex
		clockMark
		reached time.Time       // by the end of the last exec
		running map[string]bool // execs
		known   map[string]bool // those that ran too: starting one again starts nothing
		adopted bool            // an earlier process had it: what ran and runs is the guest's to say
	}
}

// clockMark is what a clock was set to, and when by ours. The journal has it: a kernel that
// outlives its node runs on by it. A machine that restarts has no such kernels.
type clockMark struct {
	At  time.Time `json:"at"`
	Set time.Time `json:"set"`
}

const clockStep = time.Minute

func newStepClock(d *sandbox.Deterministic) *stepClock {
	if d == nil {
		return nil
	}
	c := &stepClock{start: d.Clock}
	c.restart(d.Clock)
	return c
}

// restart has it begin again, for an episode or a kernel that goes on from somewhere.
func (c *stepClock) restart(at time.Time) {
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.clockMark, c.mu.reached, c.mu.adopted = clockMark{at, time.Now()}, at, false
	c.mu.running, c.mu.known = map[string]bool{}, map[string]bool{}
}

// rewind has a kernel begin a new episode at the fixed time.
func (c *stepClock) rewind(ctx context.Context, k runtime.Kernel) error {
	clocked, ok := k.(runtime.Clocked)
	if c == nil || !ok {
		return nil
	}
	c.restart(c.start)
	return clocked.SetClock(ctx, c.start)
}

// adopt has it go on from what the journal says of it; nil is a kernel in which nothing has
// been started yet, or whose node did not write such marks.
func (c *stepClock) adopt(m *clockMark) {
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if m != nil {
		c.mu.clockMark, c.mu.reached = *m, m.At
	}
	c.mu.adopted = true
}

// mark is for the journal.
func (c *stepClock) mark() *clockMark {
	if c == nil {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	m := c.mu.clockMark
	return &m
}

// learn asks the guest for the execs of an earlier process. Their times are by this clock.
func (c *stepClock) learn(ctx context.Context, k runtime.Kernel) error {
	c.mu.Lock()
	adopted := c.mu.adopted
	c.mu.Unlock()
	if !adopted {
		return nil
	}
	procs, _, err := k.Guest().Processes(ctx)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.mu.adopted { // it began again meanwhile
		return nil
	}
	for _, p := range procs {
		c.mu.known[p.ExecID] = true
		at := p.StartedAt
		if p.End == nil {
			c.mu.running[p.ExecID] = true
		} else {
			at = p.End.At
		}
		if at.After(c.mu.reached) {
			c.mu.reached = at
		}
	}
	c.mu.adopted = false
	return nil
}

// reading is what the clock inside reads now.
func (c *stepClock) reading() time.Time {
	if c == nil {
		return time.Now()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.readingLocked()
}

func (c *stepClock) readingLocked() time.Time { return c.mu.At.Add(time.Since(c.mu.Set)) }

// begin sets the clock for an exec that begins, if it is alone, and says to what.
func (c *stepClock) begin(ctx context.Context, k runtime.Kernel, exec string) (*clockMark, error) {
	if c == nil {
		return nil, nil
	}
	clocked, ok := k.(runtime.Clocked)
	if !ok {
		return nil, nil // its driver refused to make it deterministic
	}
	c.setting.Lock()
	defer c.setting.Unlock()
	if err := c.learn(ctx, k); err != nil {
		return nil, err
	}
	c.mu.Lock()
	again, alone := c.mu.known[exec], len(c.mu.running) == 0
	c.mu.known[exec] = true
	if !again {
		c.mu.running[exec] = true
	}
	m := clockMark{At: c.mu.reached.Truncate(clockStep).Add(clockStep)}
	c.mu.Unlock()
	if again || !alone {
		return nil, nil
	}
	err := clocked.SetClock(ctx, m.At)
	m.Set = time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil {
		delete(c.mu.running, exec)
		delete(c.mu.known, exec)
		return nil, err
	}
	c.mu.clockMark = m
	return &m, nil
}

// end notes how far the clock came with an exec.
func (c *stepClock) end(exec string) {
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.mu.running, exec)
	if len(c.mu.running) == 0 {
		c.mu.reached = c.readingLocked()
	}
}

// sink notes the end of an exec.
func (c *stepClock) sink(exec string, next func(sandbox.ProcessEvent) error) func(sandbox.ProcessEvent) error {
	if c == nil {
		return next
	}
	return func(ev sandbox.ProcessEvent) error {
		if ev.End != nil {
			c.end(exec)
		}
		return next(ev)
	}
}

// beginExec sets the clock of a sandbox for an exec that begins. The exec waits for the
// journal: a node that is killed meanwhile would give the next the same time.
func (n *Node) beginExec(ctx context.Context, id, exec string) (*stepClock, error) {
	n.mu.Lock()
	b := n.mu.live[id]
	if b == nil || b.clock == nil {
		n.mu.Unlock()
		return nil, nil
	}
	clock, k, episode := b.clock, b.kernel, b.sb.Episode
	n.mu.Unlock()
	m, err := clock.begin(ctx, k, exec)
	if err != nil || m == nil {
		return clock, err
	}
	if err := n.journal.appendFact(record{Kind: recClock, ID: id, Episode: episode, Clock: m}); err != nil {
		n.log.Warn("a clock is not yet in the journal", "sandbox", id, "err", err)
	}
	return clock, nil
}

func (n *Node) clockOf(id string) *stepClock {
	n.mu.Lock()
	defer n.mu.Unlock()
	if b := n.mu.live[id]; b != nil {
		return b.clock
	}
	return nil
}
