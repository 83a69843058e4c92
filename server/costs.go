package server

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/ship"
	"github.com/cove-sandbox/cove/store"
)

// What the sandboxes of runs use is looked at now and then and when they end, and
// put into the log of their run as what was used since the look before. A server
// that was away counts on from the last look on record.

// lookEvery is how often. Memory between two looks is taken to be what it was at
// the second.
const lookEvery = 30 * time.Second

// spendBook is the last look at each live sandbox of a run.
type spendBook struct {
	mu struct {
		sync.Mutex
		of map[string]*spending
	}
}

type spending struct {
	turn sync.Mutex // one looks at a time
	last sandbox.Spent
	over bool
}

func (b *spendBook) init() { b.mu.of = map[string]*spending{} }

func (b *spendBook) get(id string) *spending {
	b.mu.Lock()
	defer b.mu.Unlock()
	e := b.mu.of[id]
	if e == nil {
		e = &spending{}
		b.mu.of[id] = e
	}
	return e
}

// load is what the log of a run says of a sandbox.
func (b *spendBook) load(s sandbox.Spent) {
	e := b.get(s.Sandbox)
	e.turn.Lock()
	defer e.turn.Unlock()
	if s.Until.After(e.last.Until) {
		e.last = s
	}
}

func (b *spendBook) drop(id string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.mu.of, id)
}

// spendLoop looks at the sandboxes of runs.
func (s *Server) spendLoop(ctx context.Context) {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			s.lookAtAll(ctx)
			if err := s.putStepsAway(); err != nil {
				s.log.Warn("the steps of a run that is over cannot be put away; it will be tried again", "err", err)
			}
		}
	}
}

func (s *Server) putStepsAway() error {
	if s.steps.logs.Load() == nil {
		return nil
	}
	return s.steps.putAway(s.cfg.Clock(), func(run string) bool {
		return s.members.count(run) == 0 && !s.leases.seeRun(asServer(context.Background()), run, func(*heldLease) {})
	})
}

func (s *Server) lookAtAll(ctx context.Context) {
	standby := s.standby(ctx)
	for _, id := range s.members.all() {
		sb, err := s.store.GetSandbox(ctx, id)
		if err != nil || sb.End != nil {
			continue // its end is looked at with it
		}
		s.lookAt(ctx, sb, standby)
	}
}

func (s *Server) lookAt(ctx context.Context, sb sandbox.Sandbox, standby map[string]sandbox.Standby) {
	sb.Standby = standby[sb.ID]
	st, err := s.node.Stats(ctx, sb.ID)
	if err != nil {
		return // it is ending
	}
	s.spent(sb, sandbox.Usage{CPUTime: st.CPUTime, Memory: st.Memory, DiskUsed: st.DiskUsed, Sent: st.EgressSent, Received: st.EgressReceived}, s.cfg.Clock().UTC(), false)
}

// lookBeforeReset has what a sandbox of a run used so far be its episode's that ends. Which of them are
// on standby is not asked for this: a look at all of them would cost every reset.
func (s *Server) lookBeforeReset(ctx context.Context, id string) {
	if m, ok := s.members.get(id); !ok || s.steps.logs.Load() == nil || !store.ScopeOf(ctx).Sees(m.tenant) {
		return
	}
	if sb, err := s.store.GetSandbox(ctx, id); err == nil && sb.End == nil {
		s.lookAt(ctx, sb, nil)
	}
}

// leftRun has a sandbox of a run go: the last look at it was the node's, when it
// ended it.
func (s *Server) leftRun(sb sandbox.Sandbox) {
	s.steps.sandboxGone(sb)
	if sb.End == nil || s.steps.logs.Load() == nil {
		return
	}
	u := sandbox.Usage{}
	if sb.End.Usage != nil {
		u = *sb.End.Usage
	}
	s.spent(sb, u, sb.End.At.UTC(), true)
	s.spends.drop(sb.ID)
	s.endEpisodes(sb, sb.Episode, *sb.End, true)
}

// spent puts a look on record. One that cannot be is made up for by the next: it
// counts from the last one on record.
func (s *Server) spent(sb sandbox.Sandbox, u sandbox.Usage, now time.Time, last bool) {
	r, err := s.stepsOf(sb.Tenant, sb.Spec.Rollout.Run)
	if err != nil {
		return // told where steps are
	}
	e := s.spends.get(sb.ID)
	e.turn.Lock()
	defer e.turn.Unlock()
	if e.over {
		return
	}
	e.over = last
	if last && u == (sandbox.Usage{}) { // the machine went: nothing more is known of the processor
		u.CPUTime = e.last.Total
	}
	spent := sandbox.SpentSince(sb, e.last, u, now)
	record, err := encodeRecord(usedUp, 0, stepKey{sandbox: sb.ID}, spent)
	if err == nil {
		_, err = r.log.Append(record)
	}
	if err != nil {
		s.log.Warn("what a sandbox used is not on record", "sandbox", sb.ID, "err", err)
		return
	}
	e.last = spent
}

// CostRequest asks what was used.
type CostRequest struct {
	By  string // run, group, episode, sandbox, step or tenant
	Run string // only of this one
}

// Cost sums what runs used, the most expensive first (by processor time), and all
// together.
func (s *Server) Cost(ctx context.Context, r CostRequest) (costs []sandbox.Cost, total sandbox.Cost, err error) {
	ctx, call, err := s.begin(ctx, "run.cost", about("run", r.Run))
	if err != nil {
		return nil, total, err
	}
	defer call.end(&err)
	by := cmp.Or(r.By, "run")
	if !slices.Contains([]string{"run", "group", "episode", "sandbox", "step", "tenant"}, by) {
		return nil, total, sandbox.InvalidField("by", "%.40q is not accepted; run, group, episode, sandbox, step and tenant are", by)
	}
	if by == "step" && r.Run == "" {
		return nil, total, sandbox.InvalidField("run", "is missing; of one run there may be a hundred thousand steps")
	}
	var runs []sandbox.Run
	if r.Run != "" {
		run, err := s.run(ctx, r.Run)
		if err != nil {
			return nil, total, err
		}
		runs = []sandbox.Run{run}
	} else if runs, err = s.store.ListRuns(ctx, true); err != nil {
		return nil, total, err
	}
	snaps, err := listAll(ctx, s.store, store.SnapshotFilter{})
	if err != nil {
		return nil, total, err
	}
	ledger := map[sandbox.Cost]*sandbox.Cost{} // by what names an entry
	for _, run := range runs {
		if err := s.addCosts(ctx, run, by, snaps, ledger, &total); err != nil {
			return nil, total, err
		}
	}
	for _, c := range ledger {
		costs = append(costs, *c)
	}
	slices.SortFunc(costs, func(a, b sandbox.Cost) int {
		return cmp.Or(cmp.Compare(b.CPU+b.StepCPU, a.CPU+a.StepCPU), cmp.Compare(a.Run, b.Run), cmp.Compare(a.Group, b.Group), cmp.Compare(a.Episode, b.Episode), cmp.Compare(a.Sandbox, b.Sandbox), cmp.Compare(a.Reset, b.Reset), cmp.Compare(a.Step, b.Step))
	})
	return costs, total, nil
}

// entryOf is what an entry is called, by what is summed.
func entryOf(by, tenant string, r sandbox.Rollout, box string, reset int64, step string) sandbox.Cost {
	switch by {
	case "tenant":
		return sandbox.Cost{Tenant: tenant}
	case "run":
		return sandbox.Cost{Tenant: tenant, Rollout: sandbox.Rollout{Run: r.Run}}
	case "group":
		return sandbox.Cost{Tenant: tenant, Rollout: sandbox.Rollout{Run: r.Run, Group: r.Group}}
	case "episode":
		return sandbox.Cost{Tenant: tenant, Rollout: r, Sandbox: box, Reset: max(1, reset)}
	case "sandbox":
		return sandbox.Cost{Tenant: tenant, Rollout: r, Sandbox: box}
	}
	return sandbox.Cost{Tenant: tenant, Rollout: r, Sandbox: box, Step: step}
}

func (s *Server) addCosts(ctx context.Context, run sandbox.Run, by string, snaps []sandbox.Snapshot, ledger map[sandbox.Cost]*sandbox.Cost, total *sandbox.Cost) error {
	entry := func(r sandbox.Rollout, box string, reset int64, step string) *sandbox.Cost {
		name := entryOf(by, run.Tenant, r, box, reset, step)
		c := ledger[name]
		if c == nil {
			c = &sandbox.Cost{}
			*c, ledger[name] = name, c
		}
		return c
	}
	r, err := s.stepsOf(run.Tenant, run.ID)
	if errors.Is(err, sandbox.ErrUnsupported) {
		return err
	}
	if err != nil {
		return err
	}
	type episode struct {
		sandbox string
		reset   int64
	}
	seen := map[episode]bool{}
	ends := map[string][]time.Time{}  // of the episodes of a sandbox
	reserved := map[string]float64{}  // GiB of a sandbox
	steps := map[*sandbox.Cost]bool{} // by step: the entries
	var bad error
	_, err = r.log.Read(0, func(record []byte, _ int64) bool {
		kind, _, _, body, err := decodeRecord(record)
		if bad = err; bad != nil {
			return false
		}
		switch kind {
		case usedUp:
			var sp sandbox.Spent
			if bad = json.Unmarshal(body, &sp); bad != nil {
				return false
			}
			if by != "step" {
				entry(sp.Rollout, sp.Sandbox, sp.Reset, "").AddSpent(sp)
				total.AddSpent(sp)
			}
			if sp.Seconds > 0 && sp.Reserved > 0 {
				reserved[sp.Sandbox] = sp.Reserved / sp.Seconds
			}
		case episodeOver:
			var e ship.Episode
			if bad = json.Unmarshal(body, &e); bad == nil {
				ends[e.Sandbox] = append(ends[e.Sandbox], e.End.At)
			}
		case stepEnded:
			var st sandbox.Step
			if bad = json.Unmarshal(body, &st); bad == nil {
				c := entry(st.Rollout, st.Sandbox, st.Reset, st.ID)
				c.AddStep(st)
				total.AddStep(st)
				if by == "step" {
					c.AddStepUse(st)
					total.AddStepUse(st)
					steps[c] = true
				}
				if e := (episode{st.Sandbox, st.Reset}); !seen[e] {
					seen[e] = true
					c.Episodes++
					total.Episodes++
				}
			}
		}
		return bad == nil && ctx.Err() == nil
	})
	for c := range steps {
		c.Reserved = reserved[c.Sandbox] * c.Seconds
		total.Reserved += c.Reserved
	}
	for _, snap := range snaps {
		if snap.Spec.Rollout.Run == run.ID && by != "step" {
			gib := float64(snap.Content.Stored) / float64(sandbox.GiB)
			reset := int64(1) // the first that had not ended when it was taken
			for _, end := range ends[snap.Sandbox] {
				if end.Before(snap.CreatedAt) {
					reset++
				}
			}
			entry(snap.Spec.Rollout, snap.Sandbox, reset, "").Snapshots += gib
			total.Snapshots += gib
		}
	}
	return cmp.Or(err, bad, ctx.Err())
}
