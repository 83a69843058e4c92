package server

import (
	"context"
	"errors"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// leaveStep is for who followed a step: the last one that leaves before its end
// has the server follow it, unless nothing has come to run.
func (s *Server) leaveStep(st *step, err error) {
	st.mu.Lock()
	st.mu.followers--
	alone, started, over := st.mu.followers == 0, st.mu.started, st.mu.over
	st.mu.Unlock()
	switch {
	case over || !alone:
	case !started && neverStarted(err):
		s.endStep(st, stepVoid, sandbox.ProcessEnd{End: sandbox.End{Cause: sandbox.Infra, Detail: "it was never started", At: s.cfg.Clock().UTC()}})
	default:
		s.followStep(st)
	}
}

// neverStarted says that an error means that a process was not started.
func neverStarted(err error) bool {
	switch sandbox.ClassOf(err) {
	case sandbox.Invalid, sandbox.NotFound, sandbox.Denied, sandbox.Precondition, sandbox.TooLarge, sandbox.Unsupported, sandbox.Ended:
		return true
	}
	return false
}

// stepRetry is when a step that could not be followed is again.
const stepRetry = time.Second

// followStep follows a step to its end, for nobody.
func (s *Server) followStep(st *step) {
	ctx := s.steps.context()
	s.steps.work.Go(func() {
		st.mu.Lock()
		id, exec := st.mu.Sandbox, st.mu.ExecID
		st.mu.Unlock()
		for ctx.Err() == nil {
			if s.followOnce(ctx, st, id, exec) {
				return
			}
			select {
			case <-ctx.Done():
			case <-time.After(stepRetry):
			}
		}
	})
}

// followOnce says whether the step is over.
func (s *Server) followOnce(ctx context.Context, st *step, id, exec string) bool {
	if s.asleep(ctx, id) {
		return false // nothing of it moves, and to look would wake it
	}
	st.mu.Lock()
	offset, over := st.mu.offset, st.mu.over
	st.mu.Unlock()
	if over {
		return true
	}
	var err error
	for ev, ferr := range s.node.Attach(ctx, id, exec, offset) {
		if err = ferr; err != nil {
			break
		}
		if st.take(s, ev) {
			return true
		}
	}
	ended := func(end sandbox.End) bool {
		s.endStep(st, stepEnded, sandbox.ProcessEnd{End: end, Duration: s.cfg.Clock().Sub(st.begunAt())})
		return true
	}
	switch {
	case ctx.Err() != nil:
		return false
	case errors.Is(err, sandbox.ErrNoSandbox) || errors.Is(err, sandbox.ErrEnded):
		sb, gerr := s.store.GetSandbox(ctx, id)
		switch {
		case gerr == nil && sb.End != nil:
			return ended(*sb.End)
		case gerr == nil:
			if end, ok := s.awaitEnd(ctx, id, s.cfg.EndWait); ok {
				return ended(end)
			}
			return false
		case errors.Is(gerr, sandbox.ErrNotFound):
			return ended(sandbox.End{Cause: sandbox.NodeLost, Detail: "its sandbox is gone, and how the step ended is not known", At: s.cfg.Clock().UTC()})
		}
		return false
	case errors.Is(err, sandbox.ErrNotFound): // the guest has no such process
		if end, ok := s.endOfProcess(ctx, id, st.resets, 0); ok {
			return ended(end)
		}
		if m, ok := s.members.get(id); ok && m.reset != st.episode() {
			return ended(sandbox.End{Cause: sandbox.ResetCause, At: s.cfg.Clock().UTC()})
		}
		if !s.giveStepUp(st) {
			return false
		}
		return ended(sandbox.End{Cause: sandbox.Infra, Detail: "it had begun when the server stopped, and nothing is known of its end", At: s.cfg.Clock().UTC()})
	case broken(err):
		if end, ok := s.endOfProcess(ctx, id, st.resets, s.cfg.EndWait); ok {
			return ended(end)
		}
	}
	return false
}

// giveStepUp says whether nobody will start a step that the guest does not know. A
// server that died after it had put the beginning on record may have had no time to
// start the process; whoever asked for it asks again by the same id, and joins it. Who
// comes later begins another step.
func (s *Server) giveStepUp(st *step) bool {
	now := s.cfg.Clock()
	st.of.mu.Lock()
	defer st.of.mu.Unlock()
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.mu.unknownSince.IsZero() || st.mu.followers > 0 {
		st.mu.unknownSince = now
	}
	if now.Sub(st.mu.unknownSince) < 2*s.cfg.EndWait {
		return false
	}
	key := keyOf(st.mu.Sandbox, st.mu.Reset, st.mu.ExecID)
	delete(st.of.mu.open, key)
	delete(st.of.boxLocked(st.mu.Sandbox, st.mu.Reset).known, key.exec)
	return true
}

func (st *step) episode() int64 {
	st.mu.Lock()
	defer st.mu.Unlock()
	return st.mu.Reset
}

func (st *step) begunAt() time.Time {
	st.mu.Lock()
	defer st.mu.Unlock()
	return st.mu.StartedAt
}

func (s *Server) asleep(ctx context.Context, id string) bool {
	return s.standby(ctx)[id] != sandbox.Awake
}
