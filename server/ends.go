package server

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// endBook is how the parts of the server learn that a sandbox is over, and
// where work waits that must not be lost because a store or node failed once.
type endBook struct {
	nudge    chan struct{} // capacity 1: something to settle
	settling sync.Mutex    // one settles at a time, so that "nothing left" means it

	mu      sync.Mutex
	waiters map[string]*endWaiter
	resets  map[string]uint64 // how often a sandbox was reset since this server started
	debts   []debt
}

type endWaiter struct {
	ended chan struct{}
	count int
}

// debt is work promised to be done, tried again until it succeeds. It lives in
// memory: what a crash forgets, Reconcile finds.
type debt struct {
	what string
	pay  func(context.Context) error
}

func (b *endBook) init() {
	b.nudge = make(chan struct{}, 1)
	b.waiters, b.resets = map[string]*endWaiter{}, map[string]uint64{}
}

func (b *endBook) poke() {
	select {
	case b.nudge <- struct{}{}:
	default:
	}
}

// watch returns a channel that is closed when the sandbox's end is on record.
func (b *endBook) watch(id string) (ended <-chan struct{}, stop func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	w := b.waiters[id]
	if w == nil {
		w = &endWaiter{ended: make(chan struct{})}
		b.waiters[id] = w
	}
	w.count++
	return w.ended, func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		if w.count--; w.count == 0 && b.waiters[id] == w {
			delete(b.waiters, id)
		}
	}
}

func (b *endBook) announce(id string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.resets, id)
	if w := b.waiters[id]; w != nil {
		delete(b.waiters, id)
		close(w.ended)
	}
}

func (b *endBook) resetCount(id string) uint64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.resets[id]
}

func (b *endBook) noteReset(id string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.resets[id]++
}

func (b *endBook) forgetResets(id string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.resets, id)
}

// owe does a piece of undoing now if it can, and otherwise as soon as it can.
// The caller's own context does not bound it: it has often just ended.
func (s *Server) owe(what string, pay func(context.Context) error) {
	ctx, cancel := context.WithTimeout(asServer(context.Background()), undoTimeout)
	defer cancel()
	err := pay(ctx)
	if err == nil {
		return
	}
	s.log.Warn("will be tried again", "what", what, "err", err)
	s.ends.mu.Lock()
	s.ends.debts = append(s.ends.debts, debt{what, pay})
	s.ends.mu.Unlock()
	s.ends.poke()
}

// recordEnd makes an end durable and wakes those who wait for it. It returns
// the record with the first end there was.
func (s *Server) recordEnd(ctx context.Context, id string, end sandbox.End) (sandbox.Sandbox, error) {
	sb, err := s.store.EndSandbox(ctx, id, end)
	if err != nil {
		return sb, err
	}
	s.images.free(sb.ImageID)
	s.ends.announce(id)
	return sb, nil
}

// receiveEnds keeps the node's channel empty, whatever the store is doing.
func (s *Server) receiveEnds(ctx context.Context) {
	ended := s.node.Ended()
	for {
		select {
		case <-ctx.Done():
			return
		case _, ok := <-ended:
			if !ok {
				ended = nil // the node has closed; nothing ends any more
				continue
			}
			s.ends.poke()
		}
	}
}

// settleLoop records what ended on the node and pays debts, at once when
// something happens, with growing pauses while it fails, and every 30 s in
// case a notice was lost.
func (s *Server) settleLoop(ctx context.Context) {
	const firstPause, longestPause, sweep = 50 * time.Millisecond, 5 * time.Second, 30 * time.Second
	pause := time.Duration(0)
	for {
		wait := sweep
		if pause > 0 {
			wait = pause
		}
		timer := time.NewTimer(wait)
		nudge := s.ends.nudge
		if pause > 0 {
			nudge = nil // it is failing: more of it will not help
		}
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-nudge:
		case <-timer.C:
		}
		timer.Stop()
		if s.settle(ctx) {
			pause = 0
		} else {
			pause = min(longestPause, max(firstPause, pause*2))
		}
	}
}

// settle says whether nothing is left to do.
func (s *Server) settle(ctx context.Context) (done bool) {
	ctx = asServer(ctx)
	s.ends.settling.Lock()
	defer s.ends.settling.Unlock()
	done = s.payDebts(ctx)
	ends, err := s.node.Ends(ctx)
	if err != nil {
		if ctx.Err() == nil {
			s.log.Warn("cannot ask the node what ended", "err", err)
		}
		return false
	}
	for id, end := range ends {
		if s.creates.pending(id) != nil {
			done = false // its record is just being written
			continue
		}
		if err := s.settleEnd(ctx, id, end); err != nil {
			if ctx.Err() == nil {
				s.log.Warn("cannot record an end; it will be tried again", "sandbox", id, "end", end.String(), "err", err)
			}
			done = false
		}
	}
	return done
}

// settleEnd moves one end from the node's record to the store's. The node
// keeps it until the store has it.
func (s *Server) settleEnd(ctx context.Context, id string, end sandbox.End) error {
	_, err := s.recordEnd(ctx, id, end)
	if err != nil && !errors.Is(err, sandbox.ErrNotFound) { // not on record: taken back or forgotten
		return err
	}
	return s.node.AckEnd(ctx, id)
}

func (s *Server) payDebts(ctx context.Context) (done bool) {
	s.ends.mu.Lock()
	debts := s.ends.debts
	s.ends.debts = nil
	s.ends.mu.Unlock()
	var left []debt
	for _, d := range debts {
		if err := d.pay(ctx); err != nil {
			s.log.Warn("will be tried again", "what", d.what, "err", err)
			left = append(left, d)
		}
	}
	s.ends.mu.Lock()
	defer s.ends.mu.Unlock()
	s.ends.debts = append(left, s.ends.debts...)
	return len(left) == 0
}

// awaitEnd waits until the sandbox's end is known, at most max. ok is false if
// it lives, as far as anybody knows.
//
// A connection into a sandbox breaks a moment before its end is on record, so
// whoever saw it break asks here why.
func (s *Server) awaitEnd(ctx context.Context, id string, most time.Duration) (end sandbox.End, ok bool) {
	ended, stop := s.ends.watch(id)
	defer stop()
	if sb, err := s.store.GetSandbox(ctx, id); err != nil || sb.End != nil {
		return endOf(sb)
	}
	s.ends.poke() // the notice may not have reached us
	timer := time.NewTimer(most)
	defer timer.Stop()
	select {
	case <-ended:
	case <-timer.C:
	case <-ctx.Done():
		return sandbox.End{}, false
	}
	sb, err := s.store.GetSandbox(ctx, id)
	if err != nil {
		return sandbox.End{}, false
	}
	return endOf(sb)
}

func endOf(sb sandbox.Sandbox) (sandbox.End, bool) {
	if sb.End == nil {
		return sandbox.End{}, false
	}
	return *sb.End, true
}
