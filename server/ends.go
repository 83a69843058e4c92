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

	mu struct {
		sync.Mutex
		waiters    map[string]*endWaiter
		resets     map[string]uint64 // how often a sandbox was reset since this server started
		unfinished []unfinished
	}
}

type endWaiter struct {
	ended chan struct{}
	count int
}

// unfinished is work that failed and is tried again until it succeeds. It lives
// in memory: what a crash forgets, Reconcile finds.
type unfinished struct {
	what string
	do   func(context.Context) error
}

func (b *endBook) init() {
	b.nudge = make(chan struct{}, 1)
	b.mu.waiters, b.mu.resets = map[string]*endWaiter{}, map[string]uint64{}
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
	w := b.mu.waiters[id]
	if w == nil {
		w = &endWaiter{ended: make(chan struct{})}
		b.mu.waiters[id] = w
	}
	w.count++
	return w.ended, func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		if w.count--; w.count == 0 && b.mu.waiters[id] == w {
			delete(b.mu.waiters, id)
		}
	}
}

func (b *endBook) announce(id string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.mu.resets, id)
	if w := b.mu.waiters[id]; w != nil {
		delete(b.mu.waiters, id)
		close(w.ended)
	}
}

func (b *endBook) resetCount(id string) uint64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.mu.resets[id]
}

// resetSince says whether a sandbox was reset since it had been so often. The end of
// one takes its count away: less than there was is no reset.
func (b *endBook) resetSince(id string, count uint64) bool { return b.resetCount(id) > count }

func (b *endBook) noteReset(id string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.mu.resets[id]++
}

func (b *endBook) forgetResets(id string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.mu.resets, id)
}

// untilDone does a piece of work, mostly of undoing, now if it can, and otherwise
// again and again until it succeeds. The caller's own context does not bound it:
// it has often just ended.
func (s *Server) untilDone(what string, do func(context.Context) error) {
	ctx, cancel := context.WithTimeout(asServer(context.Background()), undoTimeout)
	defer cancel()
	err := do(ctx)
	if err == nil {
		return
	}
	s.log.Warn("will be tried again", "what", what, "err", err)
	s.ends.mu.Lock()
	s.ends.mu.unfinished = append(s.ends.mu.unfinished, unfinished{what, do})
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

// overNews is how often one who waits for an end looks whether it is still to come.
const overNews = 50 * time.Millisecond

// listenPause is how long after a node could not be listened to it is again.
const listenPause = time.Second

// receiveEnds has ends recorded as the node tells of them.
func (s *Server) receiveEnds(ctx context.Context) {
	for ctx.Err() == nil {
		for _, err := range s.node.Ended(ctx) {
			if err != nil {
				s.log.Debug("the node tells no ends", "err", err) // it is closing, or we are
				break
			}
			s.ends.poke()
		}
		select {
		case <-ctx.Done():
		case <-time.After(listenPause):
		}
	}
}

// settleLoop records what ended on the node and finishes what failed before, at once when
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
	done = s.retryUnfinished(ctx)
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

func (s *Server) retryUnfinished(ctx context.Context) (done bool) {
	s.ends.mu.Lock()
	all := s.ends.mu.unfinished
	s.ends.mu.unfinished = nil
	s.ends.mu.Unlock()
	var left []unfinished
	for _, u := range all {
		if err := u.do(ctx); err != nil {
			s.log.Warn("will be tried again", "what", u.what, "err", err)
			left = append(left, u)
		}
	}
	s.ends.mu.Lock()
	defer s.ends.mu.Unlock()
	s.ends.mu.unfinished = append(left, s.ends.mu.unfinished...)
	return len(left) == 0
}

// awaitEnd waits until the sandbox's end is known, at most max. ok is false if
// it lives, as far as anybody knows.
//
// A connection into a sandbox breaks a moment before its end is on record, so
// whoever saw it break asks here why.
func (s *Server) awaitEnd(ctx context.Context, id string, most time.Duration) (end sandbox.End, ok bool) {
	return s.awaitEndUnless(ctx, id, most, func() bool { return false })
}

// awaitEndUnless is awaitEnd for one who has nothing to wait for once over is so,
// which is looked at often and must not cost anything: hundreds wait at once.
func (s *Server) awaitEndUnless(ctx context.Context, id string, most time.Duration, over func() bool) (end sandbox.End, ok bool) {
	ended, stop := s.ends.watch(id)
	defer stop()
	if sb, err := s.store.GetSandbox(ctx, id); err != nil || sb.End != nil {
		return endOf(sb)
	}
	s.ends.poke() // the notice may not have reached us
	timer := time.NewTimer(most)
	defer timer.Stop()
	looks := time.NewTicker(overNews)
	defer looks.Stop()
	for waits := true; waits; {
		select {
		case <-ended:
			waits = false
		case <-timer.C:
			waits = false
		case <-ctx.Done():
			return sandbox.End{}, false
		case <-looks.C:
			s.ends.poke()
			waits = !over()
		}
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
