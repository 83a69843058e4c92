package server

import (
	"context"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/internal/notify"
	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// planBook is the plans that are being staged: one of a run, on record with it, so
// that a server that starts stages it again.
type planBook struct {
	work sync.WaitGroup

	mu struct {
		sync.Mutex
		of      map[string]*stagedPlan // by run
		stopped bool
	}
}

func (b *planBook) init() { b.mu.of = map[string]*stagedPlan{} }

func (b *planBook) get(run string) *stagedPlan {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.mu.of[run]
}

// put replaces the plan of a run; nil = by none.
func (b *planBook) put(run string, p *stagedPlan) (accepted bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if old := b.mu.of[run]; old != nil {
		old.cancel()
		delete(b.mu.of, run)
	}
	if p == nil || b.mu.stopped {
		return false
	}
	b.mu.of[run] = p
	b.work.Add(1)
	return true
}

// drop ends the plan of a run.
func (b *planBook) drop(run string) { b.put(run, nil) }

// stop ends all of them; their records stay.
func (b *planBook) stop() {
	b.mu.Lock()
	b.mu.stopped = true
	for _, p := range b.mu.of {
		p.cancel()
	}
	b.mu.Unlock()
	b.work.Wait()
}

// took counts a sandbox of a run: what was made is not expected any more.
func (b *planBook) took(run string) {
	if run == "" {
		return
	}
	if p := b.get(run); p != nil {
		p.mu.Lock()
		p.mu.taken++
		p.mu.Unlock()
		p.poke()
	}
}

// PlanState is how far a plan is, or an item of one.
type PlanState string

const (
	PlanNone    PlanState = "none"    // the run has no plan
	PlanWaiting PlanState = "waiting" // of an item: others are before it
	PlanStaging PlanState = "staging"
	PlanReady   PlanState = "ready"
	PlanFailed  PlanState = "failed" // nothing is under way, and not all is ready
)

// PlanStatus is a plan and what of it is ready.
type PlanStatus struct {
	sandbox.Plan // Version 0: there is none
	State        PlanState
	Items        []PlanItemStatus

	// Kernels that the sandboxes of the plan will take, and are not taken yet: how
	// many, how many of them the node heats to within its memory, and how many are
	// warm. They are shared with all who create.
	Kernels, KernelsAim, KernelsReady int
}

// PlanItemStatus is an item and how far it is.
type PlanItemStatus struct {
	sandbox.PlanItem
	State    PlanState
	Progress sandbox.Progress // of a pull
	Err      *sandbox.Error   // why it failed, or why it is tried again
}

const (
	planWidth   = 2                // items at a time: pulls and unpacking are the machine's, not one run's
	planLook    = time.Second      // between two looks at what is not ready
	planRenew   = 30 * time.Second // between two of what is
	planTTL     = 2 * time.Minute  // after which the node forgets a server that is gone
	planRetry   = 2 * time.Second  // after the first failure of an item; doubles up to planRetries
	planRetries = time.Minute
	maxPlanWait = time.Minute
)

// stagedPlan is a plan at work.
type stagedPlan struct {
	run    sandbox.Run
	plan   sandbox.Plan
	cancel context.CancelFunc
	wake   chan struct{} // capacity 1
	slots  chan struct{} // planWidth
	status notify.Latest[PlanStatus]

	mu struct {
		sync.Mutex
		items  []PlanItemStatus
		states []*sandbox.Content // of items from memory snapshots; nil = not of one, or not known yet
		ahead  []node.Ahead       // what is created from those
		held   []func()
		taken  int // sandboxes that the run has made since
	}
}

func (p *stagedPlan) poke() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// set changes what is known of an item.
func (p *stagedPlan) set(i int, f func(*PlanItemStatus)) {
	p.mu.Lock()
	f(&p.mu.items[i])
	p.mu.Unlock()
	p.poke()
}

// SetPlan replaces what a run says it will start from; no items = it says nothing
// any more. The node gets it ready from then on.
func (s *Server) SetPlan(ctx context.Context, ref string, items []sandbox.PlanItem) (out PlanStatus, err error) {
	ctx, call, err := s.begin(ctx, "run.set_plan", about("run", ref))
	if err != nil {
		return out, err
	}
	defer call.end(&err)
	if err := firstError(sandbox.ValidatePlan(items), call.needs(partsOfPlan(items)...)); err != nil {
		return out, err
	}
	run, err := s.run(ctx, ref)
	if err != nil {
		return out, err
	}
	call.concerns("run", run.ID)
	if !s.leases.seeRun(ctx, run.ID, func(*heldLease) {}) {
		return out, sandbox.RunOver("run", run)
	}
	s.runTurn.Lock() // two plans are staged in the order of their records
	defer s.runTurn.Unlock()
	ctx = context.WithoutCancel(ctx)
	run, err = s.store.UpdateRun(ctx, run.ID, func(r *sandbox.Run) error {
		if r.State != sandbox.RunActive {
			return sandbox.RunOver("run", *r)
		}
		r.Plans++
		r.Plan = nil
		if len(items) > 0 {
			r.Plan = &sandbox.Plan{Version: r.Plans, Items: items, CreatedAt: s.cfg.Clock().UTC(), Operator: isRoot(ctx)}
		}
		return nil
	})
	switch {
	case err != nil:
		return out, err
	case run.Plan == nil:
		s.plans.drop(run.ID)
	default:
		s.stagePlan(run, *run.Plan)
		if s.leases.isOver(run.ID) {
			s.plans.drop(run.ID) // it ended meanwhile
		}
	}
	return s.stagedPlan(run.ID), nil
}

// partsOfPlan is what a plan needs besides the right to make sandboxes. An image
// that is not there is pulled.
func partsOfPlan(items []sandbox.PlanItem) (ps []part) {
	for i, it := range items {
		field := "items[" + strconv.Itoa(i) + "]."
		switch {
		case it.Template != "":
			ps = append(ps, reads(field+"template", "templates"))
		case it.Snapshot != "":
			ps = append(ps, reads(field+"snapshot", "snapshots"))
		case it.Image != sandbox.StandardDefaults().Image:
			ps = append(ps, writes(field+"image", "images"))
		}
	}
	return ps
}

// GetPlan says what of a run's plan is ready. With wait it answers at the next
// change, or after that time; at once where nothing is under way.
func (s *Server) GetPlan(ctx context.Context, ref string, wait time.Duration) (out PlanStatus, err error) {
	ctx, call, err := s.begin(ctx, "run.get_plan", about("run", ref))
	if err != nil {
		return out, err
	}
	defer call.end(&err)
	if wait < 0 || wait > maxPlanWait {
		return out, sandbox.InvalidField("wait", "%s is not accepted; up to %s is", wait, maxPlanWait)
	}
	run, err := s.run(ctx, ref)
	if err != nil {
		return out, err
	}
	p := s.plans.get(run.ID)
	if p == nil {
		return PlanStatus{State: PlanNone}, nil
	}
	out, changed := p.status.Get()
	if wait > 0 && out.State == PlanStaging {
		timer := time.NewTimer(wait)
		defer timer.Stop()
		select {
		case <-changed:
		case <-timer.C:
		case <-ctx.Done():
			return out, ctx.Err()
		}
	}
	return s.stagedPlan(run.ID), nil
}

func (s *Server) stagedPlan(run string) PlanStatus {
	p := s.plans.get(run)
	if p == nil {
		return PlanStatus{State: PlanNone}
	}
	out, _ := p.status.Get()
	return out
}

// stagePlan has the node get ready what a plan says, until it is replaced or its run
// is over.
func (s *Server) stagePlan(run sandbox.Run, plan sandbox.Plan) {
	ctx, cancel := context.WithCancel(store.In(context.Background(), run.Tenant))
	p := &stagedPlan{run: run, plan: plan, cancel: cancel, wake: make(chan struct{}, 1), slots: make(chan struct{}, planWidth)}
	p.mu.states = make([]*sandbox.Content, len(plan.Items))
	for _, it := range plan.Items {
		p.mu.items = append(p.mu.items, PlanItemStatus{PlanItem: it, State: PlanWaiting})
	}
	p.status.Set(PlanStatus{Plan: plan, State: PlanStaging, Items: slices.Clone(p.mu.items)})
	if !s.plans.put(run.ID, p) {
		cancel()
		return
	}
	go func() {
		defer s.plans.work.Done()
		s.runPlan(ctx, p)
	}()
}

// stagePlans stages what is on record, once what is there is known: after Reconcile.
func (s *Server) stagePlans() {
	s.untilDone("stage the plans on record", func(ctx context.Context) error {
		s.runTurn.Lock()
		defer s.runTurn.Unlock()
		runs, err := s.store.ListRuns(ctx, false)
		for _, r := range runs {
			if r.Plan != nil && s.plans.get(r.ID) == nil && s.leases.seeRun(ctx, r.ID, func(*heldLease) {}) {
				s.stagePlan(r, *r.Plan)
			}
		}
		return err
	})
}

// runPlan stages the items and keeps telling the node what is left to come.
func (s *Server) runPlan(ctx context.Context, p *stagedPlan) {
	var items sync.WaitGroup
	name := p.run.ID + "." + strconv.FormatInt(p.plan.Version, 10)
	defer func() {
		items.Wait()
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		if _, err := s.node.Expect(last, name, node.Expectation{}); err != nil {
			s.log.Warn("cannot tell the node that a plan is over; it forgets it by itself", "run", p.run.ID, "err", err)
		}
		for _, release := range p.mu.held {
			release()
		}
	}()
	for i := range p.plan.Items {
		items.Go(func() { s.stageItem(ctx, p, i) })
	}
	for {
		wait := planLook
		st, err := s.tellNode(ctx, p, name)
		if err != nil && ctx.Err() == nil {
			s.log.Warn("cannot tell the node what a plan expects", "run", p.run.ID, "err", err)
		}
		if err == nil {
			p.status.Set(st)
			if st.State != PlanStaging {
				wait = planRenew
			}
		}
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
		case <-p.wake: // at most once per look: a group of 256 is as many calls otherwise
			select {
			case <-ctx.Done():
			case <-time.After(planLook / 10):
			}
		}
		timer.Stop()
	}
}

// tellNode says what is left to come, within the tenant's quota, and what is ready.
func (s *Server) tellNode(ctx context.Context, p *stagedPlan, name string) (PlanStatus, error) {
	q, err := s.quotas.of(ctx, p.run.Tenant)
	if err != nil {
		return PlanStatus{}, err
	}
	e := node.Expectation{TTL: planTTL}
	p.mu.Lock()
	st := PlanStatus{Plan: p.plan, Items: slices.Clone(p.mu.items)}
	left, all := -p.mu.taken, 0
	for i, it := range p.plan.Items {
		all += it.Count
		if c := p.mu.states[i]; c != nil {
			e.Restores += it.Count
			if !slices.ContainsFunc(e.States, func(o sandbox.Content) bool { return o.Manifest == c.Manifest }) {
				e.States = append(e.States, *c)
			}
			continue
		}
		left += it.Count
	}
	if all > p.mu.taken { // which of its items were taken is not known, that all were is
		e.Ahead = slices.Clone(p.mu.ahead)
	}
	states := slices.Clone(p.mu.states)
	p.mu.Unlock()
	if q.Sandboxes > 0 { // no more than it may have beside those it has
		left = min(left, int(q.Sandboxes-s.reservations.usage(p.run.Tenant).Sandboxes))
	}
	e.Kernels = max(left, 0)
	got, err := s.node.Expect(ctx, name, e)
	if err != nil {
		return st, err
	}
	st.Kernels, st.KernelsAim, st.KernelsReady = e.Kernels, min(got.Aim, e.Kernels), min(got.Kernels, e.Kernels)
	for i := range st.Items {
		it := &st.Items[i]
		j := slices.IndexFunc(got.States, func(x node.ExpectedState) bool { return states[i] != nil && x.Manifest == states[i].Manifest })
		switch {
		case j < 0 || it.State != PlanReady:
		case got.States[j].Err != nil: // it starts all the same, only not as quickly
			it.Err = got.States[j].Err
		case !got.States[j].Ready:
			it.State = PlanStaging
		}
	}
	st.State = stateOfPlan(st)
	return st, nil
}

// stateOfPlan is that of its items, and of the kernels that are to be warm.
func stateOfPlan(st PlanStatus) PlanState {
	failed := false
	for _, it := range st.Items {
		switch it.State {
		case PlanWaiting, PlanStaging:
			return PlanStaging
		case PlanFailed:
			failed = true
		}
	}
	switch {
	case failed:
		return PlanFailed
	case st.KernelsReady < st.KernelsAim:
		return PlanStaging
	}
	return PlanReady
}

// stageItem has the origin of an item on the node and holds it. What may pass is
// tried again.
func (s *Server) stageItem(ctx context.Context, p *stagedPlan, i int) {
	for wait := planRetry; ; wait = min(2*wait, planRetries) {
		select {
		case p.slots <- struct{}{}:
		case <-ctx.Done():
			return
		}
		p.set(i, func(it *PlanItemStatus) { it.State = PlanStaging })
		spec, o, err := s.stageOrigin(ctx, p, i)
		<-p.slots
		if ctx.Err() != nil {
			if err == nil {
				o.release()
			}
			return
		}
		if err == nil {
			p.mu.Lock()
			p.mu.held = append(p.mu.held, o.release)
			if o.from != nil {
				p.mu.states[i] = &o.from.Content
				p.mu.ahead = append(p.mu.ahead, node.Ahead{Tenant: p.run.Tenant, Spec: spec, Image: o.img, From: o.from.Content, Count: p.plan.Items[i].Count})
			}
			p.mu.Unlock()
			p.set(i, func(it *PlanItemStatus) { it.State, it.Err = PlanReady, nil })
			return
		}
		e := sandbox.AsError(err)
		passes := e.Class == sandbox.Unavailable || e.Class == sandbox.NoCapacity || e.Class == sandbox.QuotaExceeded || e.Class == sandbox.DiskFull
		p.set(i, func(it *PlanItemStatus) {
			it.Err, it.State = e, PlanFailed
			if passes {
				it.State = PlanWaiting
			}
		})
		if !passes {
			return
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return
		}
	}
}

// stageOrigin finds what an item starts from, as a create would; an image that is
// not there is pulled.
func (s *Server) stageOrigin(ctx context.Context, p *stagedPlan, i int) (sandbox.Spec, origin, error) {
	it := p.plan.Items[i]
	asked := sandbox.Spec{Image: it.Image, Template: it.Template, Snapshot: it.Snapshot}
	spec, o, err := s.resolve(ctx, asked)
	if it.Image == "" || sandbox.ClassOf(err) != sandbox.ImageNotFound {
		return spec, o, err
	}
	if err := s.admitImage(ctx); err != nil {
		return spec, o, err
	}
	as, err := s.accessAs(ctx, it.Image, p.plan.Operator)
	if err != nil {
		return spec, o, err
	}
	_, err = s.pullAs(ctx, ctx, PullRequest{Reference: it.Image, As: as}, it.Image, func(pr sandbox.Progress) error {
		p.set(i, func(it *PlanItemStatus) { it.Progress = pr })
		return ctx.Err()
	})
	if err != nil {
		return spec, o, err
	}
	return s.resolve(ctx, asked)
}
