package server

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/ship"
	"github.com/cove-sandbox/cove/steplog"
)

// stepBook is the steps under way and the logs of those that were.
type stepBook struct {
	logs atomic.Pointer[steplog.Store] // nil = none are kept; a test that restarts has another
	stop context.CancelFunc            // ends context()
	work sync.WaitGroup                // those that are followed for nobody

	mu struct {
		sync.Mutex
		ctx  context.Context // a test that restarts has another, too
		runs map[string]*runSteps
	}
}

// runSteps is one run's.
type runSteps struct {
	run    string
	tenant string

	turn struct {
		sync.Mutex // whoever reads it does so once, and holds up no other run
		log        *steplog.Log
		used       time.Time // when it was last asked for
	}

	mu struct {
		sync.Mutex
		last  int64               // seq of the last one begun
		ended int64               // how many have
		open  map[stepKey]*step   // begun and not ended
		boxes map[string]*stepBox // of sandboxes that live
		late  []lateEnd           // ends that could not be written yet
		over  map[string]int64    // the last episode of each sandbox whose end is on record
	}
}

func (b *stepBook) init(dir string, appended func(tenant, run string, end int64)) {
	if dir != "" {
		b.logs.Store(steplog.NewStore(dir, appended))
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.mu.ctx, b.stop = context.WithCancel(asServer(context.Background()))
	b.mu.runs = map[string]*runSteps{}
}

// context ends when the server stops.
func (b *stepBook) context() context.Context {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.mu.ctx
}

// opened is a run's steps with the log they are in.
type opened struct {
	*runSteps
	log *steplog.Log
}

// of is the steps of a run, read once. left and spent are what was found when it was
// read: steps that have not ended, and the last look at what each sandbox used.
func (b *stepBook) of(tenant, run string, now time.Time, live func(sandbox string) bool) (o opened, left []sandbox.Step, spent map[string]sandbox.Spent, err error) {
	if b.logs.Load() == nil {
		return o, nil, nil, &sandbox.Error{Class: sandbox.Unsupported, Msg: "this server keeps no steps"}
	}
	for {
		b.mu.Lock()
		r := b.mu.runs[run]
		if r == nil {
			r = &runSteps{run: run, tenant: tenant}
			r.mu.open, r.mu.boxes, r.mu.over = map[stepKey]*step{}, map[string]*stepBox{}, map[string]int64{}
			b.mu.runs[run] = r
		}
		b.mu.Unlock()
		r.turn.Lock()
		b.mu.Lock()
		stale := b.mu.runs[run] != r // it was put away while this one waited
		b.mu.Unlock()
		if stale {
			r.turn.Unlock()
			continue
		}
		defer r.turn.Unlock()
		r.turn.used = now
		if r.turn.log == nil {
			if left, spent, err = r.readTurnHeld(b.logs.Load(), live); err != nil {
				return o, nil, nil, err
			}
		}
		return opened{r, r.turn.log}, left, spent, nil
	}
}

func (r *runSteps) readTurnHeld(logs *steplog.Store, live func(sandbox string) bool) (left []sandbox.Step, spent map[string]sandbox.Spent, err error) {
	log, err := logs.Open(r.tenant, r.run)
	if err != nil {
		return nil, nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mu.last, r.mu.ended = 0, 0
	spent = map[string]sandbox.Spent{}
	begun := map[stepKey]sandbox.Step{}
	var bad error
	_, err = log.Read(0, func(record []byte, _ int64) bool {
		kind, seq, key, body, err := decodeRecord(record)
		if err != nil {
			bad = err
			return false
		}
		switch kind {
		case stepBegun:
			r.mu.last = max(r.mu.last, seq)
			var st sandbox.Step
			if bad = json.Unmarshal(body, &st); bad != nil {
				return false
			}
			begun[key] = st
			if live(key.sandbox) {
				r.boxLocked(st.Sandbox, st.Reset).add(key, seq)
			}
		case episodeBegun:
			var e episodeRecord
			if bad = json.Unmarshal(body, &e); bad != nil {
				return false
			}
			if live(key.sandbox) {
				r.boxLocked(e.Sandbox, e.Reset).noted = true
			}
		case stepEnded, stepVoid:
			delete(begun, key)
			if kind == stepEnded {
				r.mu.ended++
			}
		case usedUp:
			var sp sandbox.Spent
			if bad = json.Unmarshal(body, &sp); bad != nil {
				return false
			}
			spent[sp.Sandbox] = sp
		case episodeOver:
			var e ship.Episode
			if bad = json.Unmarshal(body, &e); bad != nil {
				return false
			}
			r.mu.over[e.Sandbox] = max(r.mu.over[e.Sandbox], e.Reset)
		}
		return true
	})
	if err := errors.Join(err, bad); err != nil {
		return nil, nil, err
	}
	for _, st := range begun {
		left = append(left, st)
	}
	r.turn.log = log
	return left, spent, nil
}

// stepsRest is how long the steps of a run that is over are held in memory after
// somebody asked for them. Nobody holds them for longer: who follows a run leaves
// with its end.
const stepsRest = 10 * time.Minute

// putAway forgets the steps of runs that are over, as far as memory and open files
// go; over says so of a run.
func (b *stepBook) putAway(now time.Time, over func(run string) bool) error {
	b.mu.Lock()
	runs := slices.Collect(maps.Values(b.mu.runs))
	b.mu.Unlock()
	var failed error
	for _, r := range runs {
		if !over(r.run) || !r.turn.TryLock() {
			continue
		}
		r.mu.Lock()
		idle := len(r.mu.open)+len(r.mu.late) == 0 && now.Sub(r.turn.used) >= stepsRest
		r.mu.Unlock()
		if idle {
			b.mu.Lock()
			delete(b.mu.runs, r.run)
			b.mu.Unlock()
			failed = cmp.Or(failed, b.logs.Load().PutAway(r.run))
		}
		r.turn.Unlock()
	}
	return failed
}

// has says whether an exec is a step already.
func (r *runSteps) has(k stepKey, reset int64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	_, known := r.boxLocked(k.sandbox, reset).known[k.exec]
	return known
}

// stepBox is what is known of the episode that a sandbox is in.
type stepBox struct {
	reset int64
	noted bool                // what it began with is on record
	last  int64               // seq of the last step begun
	known map[string]struct{} // execs that have a step
	kept  int64               // bytes of files that were changed beside steps
}

func (b *stepBox) add(k stepKey, seq int64) { b.known[k.exec], b.last = struct{}{}, seq }

// boxLocked is that of an episode; one that a reset has ended is known no more.
func (r *runSteps) boxLocked(id string, reset int64) *stepBox {
	b := r.mu.boxes[id]
	if b == nil || b.reset != reset {
		late := b != nil && b.reset > reset
		b = &stepBox{reset: reset, known: map[string]struct{}{}}
		if !late {
			r.mu.boxes[id] = b
		}
	}
	return b
}

// stepsOf is the steps of a run; those that an earlier server left under way are
// followed from now on.
func (s *Server) stepsOf(tenant, run string) (opened, error) {
	live := func(id string) bool { _, ok := s.members.get(id); return ok }
	r, left, spent, err := s.steps.of(tenant, run, s.cfg.Clock(), live)
	if err != nil {
		return r, err
	}
	for id, sp := range spent {
		if _, live := s.members.get(id); live {
			s.spends.load(sp)
		}
	}
	for _, begun := range left {
		st := &step{of: r, resets: s.ends.resetCount(begun.Sandbox)}
		st.mu.Step, st.mu.started = begun, true
		st.mu.out, st.mu.errOut = sandbox.NewStepCapture(s.outputRule(run)), sandbox.NewStepCapture(s.outputRule(run))
		if begun.Stdin {
			st.mu.NotKept = append(st.mu.NotKept, "late: the server was started again while it was written to")
		}
		r.mu.Lock()
		r.mu.open[keyOf(begun.Sandbox, begun.Reset, begun.ExecID)] = st
		r.mu.Unlock()
		s.followStep(st)
	}
	return r, nil
}

// resumeSteps goes on with what an earlier server left under way in runs that last
// or have sandboxes.
func (s *Server) resumeSteps(ctx context.Context) error {
	if s.steps.logs.Load() == nil {
		return nil
	}
	runs, err := s.store.ListRuns(ctx, true)
	if err != nil {
		return err
	}
	for _, r := range runs {
		if r.State == sandbox.RunActive || s.members.count(r.ID) > 0 {
			if _, err := s.stepsOf(r.Tenant, r.ID); err != nil {
				s.log.Error("the steps of a run cannot be read", "run", r.ID, "err", err)
				continue
			}
			if err := s.logEpisodes(ctx, r); err != nil {
				return err
			}
		}
	}
	return s.logGrades(ctx)
}

// forgetSteps removes the log of a run that is deleted.
func (s *Server) forgetSteps(run sandbox.Run) error {
	if s.steps.logs.Load() == nil {
		return nil
	}
	s.steps.mu.Lock()
	delete(s.steps.mu.runs, run.ID)
	s.steps.mu.Unlock()
	s.ships.forget(run)
	return s.steps.logs.Load().Delete(run.Tenant, run.ID)
}

// sandboxGone forgets which execs of a sandbox had steps: it has no more.
func (b *stepBook) sandboxGone(sb sandbox.Sandbox) {
	b.mu.Lock()
	r := b.mu.runs[sb.Spec.Rollout.Run]
	b.mu.Unlock()
	if r != nil {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.mu.boxes, sb.ID)
	}
}
