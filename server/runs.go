package server

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// A run is a lease by its own id (see leaseBook), with a record that stays. What
// is to end with it has that lease; a run that keeps its sandboxes gives it to
// none.

// memberBook is which run every live sandbox is of, so that an exec asks no store.
type memberBook struct {
	mu struct {
		sync.RWMutex
		of   map[string]member              // by sandbox
		runs map[string]map[string]struct{} // its sandboxes, by run
	}
}

type member struct {
	sandbox.Rollout
	tenant string
	reset  int64 // the sandbox's episode
}

func (b *memberBook) init() {
	b.mu.of, b.mu.runs = map[string]member{}, map[string]map[string]struct{}{}
}

func (b *memberBook) put(sb sandbox.Sandbox) {
	run := sb.Spec.Rollout.Run
	if run == "" {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.mu.of[sb.ID] = member{sb.Spec.Rollout, sb.Tenant, sb.Episode}
	if b.mu.runs[run] == nil {
		b.mu.runs[run] = map[string]struct{}{}
	}
	b.mu.runs[run][sb.ID] = struct{}{}
}

func (b *memberBook) drop(id string) (was bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	m, was := b.mu.of[id]
	run := m.Run
	delete(b.mu.of, id)
	if delete(b.mu.runs[run], id); len(b.mu.runs[run]) == 0 {
		delete(b.mu.runs, run)
	}
	return was
}

func (b *memberBook) get(id string) (m member, ok bool) {
	b.mu.RLock()
	defer b.mu.RUnlock()
	m, ok = b.mu.of[id]
	return m, ok
}

// list is the live sandboxes of a run.
func (b *memberBook) list(run string) (ids []string) {
	b.mu.RLock()
	defer b.mu.RUnlock()
	for id := range b.mu.runs[run] {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}

// all is every live sandbox of a run.
func (b *memberBook) all() (ids []string) {
	b.mu.RLock()
	defer b.mu.RUnlock()
	for id := range b.mu.of {
		ids = append(ids, id)
	}
	return ids
}

func (b *memberBook) count(run string) int {
	b.mu.RLock()
	defer b.mu.RUnlock()
	return len(b.mu.runs[run])
}

// RunRequest asks for a run.
type RunRequest struct {
	Name   string
	Labels map[string]string
	TTL    time.Duration // 0 = the default
	Keep   bool
	Output sandbox.OutputRule
	Steps  []sandbox.StepDetail // what steps say besides
	Resume bool                 // one of that name is as good, active or ended
	Key    string               // makes it idempotent
}

// RunStatus is a run with what only a running server knows.
type RunStatus struct {
	sandbox.Run
	Sandboxes  int // of it that live
	Steps      int64
	Checkpoint int64
}

// CreateRun begins a run, or one that has ended again.
func (s *Server) CreateRun(ctx context.Context, r RunRequest) (out RunStatus, existed bool, err error) {
	ctx, call, err := s.begin(ctx, "run.create", about("name", r.Name))
	if err != nil {
		return out, false, err
	}
	defer call.end(&err)
	run := sandbox.Run{ID: sandbox.NewID(s.cfg.Rand), Tenant: store.ScopeOf(ctx).Tenant(), Name: r.Name, Labels: r.Labels,
		TTL: cmp.Or(r.TTL, sandbox.DefaultLease), Keep: r.Keep, Output: cmp.Or(r.Output, sandbox.KeepEnds), Details: r.Steps, State: sandbox.RunActive,
		CreatedAt: s.cfg.Clock().UTC(), Key: r.Key}
	if err := firstError(sandbox.ValidateRun(run), sandbox.ValidateIdempotencyKey("idempotency_key", r.Key)); err != nil {
		return out, false, err
	}
	if s.leases.count(run.Tenant) >= sandbox.MaxRuns {
		return out, false, &sandbox.Error{Class: sandbox.QuotaExceeded, Msg: "the tenant has as many runs and leases as there may be", RetryAfter: time.Minute,
			Hint: "\"cove runs ls\" and \"cove lease ls\" list them"}
	}
	s.runTurn.Lock()
	defer s.runTurn.Unlock()
	// Begun is begun: what is on record must have its lease.
	ctx = context.WithoutCancel(ctx)
	err = s.store.CreateRun(ctx, run)
	if errors.Is(err, sandbox.ErrAlreadyExists) {
		run, existed, err = s.resume(ctx, run, r)
	}
	if err != nil {
		return out, false, err
	}
	s.leases.addRun(run, s.cfg.Clock().UTC())
	call.concerns("run", run.ID)
	out, err = s.status(ctx, run)
	return out, existed, err
}

// resume finds the run of a name that is taken, if the request may have it.
func (s *Server) resume(ctx context.Context, asked sandbox.Run, r RunRequest) (run sandbox.Run, existed bool, err error) {
	if run, err = s.store.GetRun(ctx, asked.Name); err != nil {
		return run, false, err
	}
	same := r.Key != "" && run.Key == r.Key
	switch {
	case run.Name != asked.Name: // an id that reads like the name
		return run, false, sandbox.InvalidField("name", "it is the id of another run; another name is accepted")
	case same && run.State == sandbox.RunActive:
		return run, true, nil
	case !r.Resume:
		hint := "choose another name, or go on with it: resume=True in Python, \"resume\": true in Runs/Create"
		return run, false, &sandbox.Error{Class: sandbox.AlreadyExists, Field: "name", Msg: "there is a run '" + run.Name + "', which is " + string(run.State), Hint: hint}
	case run.State == sandbox.RunActive:
		if s.leases.isOver(run.ID) {
			return run, false, &sandbox.Error{Class: sandbox.Unavailable, Msg: "run '" + run.Name + "' is just ending", RetryAfter: time.Second, Hint: "ask again"}
		}
		return run, true, nil
	}
	run, err = s.store.UpdateRun(ctx, run.ID, func(r *sandbox.Run) error {
		r.State, r.Resumed, r.Key = sandbox.RunActive, r.Resumed+1, asked.Key
		r.TTL, r.Keep, r.Output, r.Details = asked.TTL, asked.Keep, asked.Output, asked.Details
		if asked.Labels != nil {
			r.Labels = asked.Labels
		}
		return nil
	})
	return run, true, err
}

// status adds what a record does not have.
func (s *Server) status(ctx context.Context, run sandbox.Run) (RunStatus, error) {
	out := RunStatus{Run: run, Sandboxes: s.members.count(run.ID), Steps: max(run.Steps, s.steps.count(run.ID))}
	if run.State == sandbox.RunActive {
		_ = s.leases.see(ctx, run.ID, func(l *heldLease) { out.ExpiresAt = l.ExpiresAt })
	}
	list, err := s.store.ListCheckpoints(ctx, run.ID)
	if len(list) > 0 {
		out.Checkpoint = list[0].Version
	}
	return out, err
}

func (s *Server) run(ctx context.Context, ref string) (sandbox.Run, error) {
	if ref == "" {
		return sandbox.Run{}, sandbox.InvalidField("run", "is missing; a run's id or name is accepted")
	}
	return s.store.GetRun(ctx, ref)
}

// GetRun finds a run by id or name.
func (s *Server) GetRun(ctx context.Context, ref string) (out RunStatus, err error) {
	ctx, call, err := s.begin(ctx, "run.get", about("run", ref))
	if err != nil {
		return out, err
	}
	defer call.end(&err)
	run, err := s.run(ctx, ref)
	if err != nil {
		return out, err
	}
	return s.status(ctx, run)
}

// ListRuns lists them, newest first; those that have ended if asked for.
func (s *Server) ListRuns(ctx context.Context, ended bool, labels map[string]string) (out []RunStatus, err error) {
	ctx, call, err := s.begin(ctx, "run.list")
	if err != nil {
		return nil, err
	}
	defer call.end(&err)
	if err := sandbox.ValidateLabels("labels", labels); err != nil {
		return nil, err
	}
	runs, err := s.store.ListRuns(ctx, ended)
	if err != nil {
		return nil, err
	}
	for _, run := range runs {
		if !hasLabels(run.Labels, labels) {
			continue
		}
		st, err := s.status(ctx, run)
		if err != nil {
			return nil, err
		}
		out = append(out, st)
	}
	return out, nil
}

func hasLabels(has, want map[string]string) bool {
	for k, v := range want {
		if got, ok := has[k]; !ok || got != v {
			return false
		}
	}
	return true
}

// RenewRun is a heartbeat: the run has its whole time again.
func (s *Server) RenewRun(ctx context.Context, ref string) (out RunStatus, err error) {
	ctx, call, err := s.begin(ctx, "run.heartbeat", about("run", ref))
	if err != nil {
		return out, err
	}
	defer call.end(&err)
	now := s.cfg.Clock().UTC()
	renew := func(l *heldLease) {
		l.ExpiresAt = now.Add(l.TTL)
		if l.run != nil {
			out.Run = *l.run
			out.ExpiresAt = l.ExpiresAt
		}
	}
	if !s.leases.seeRun(ctx, ref, renew) { // by its id, which asks no store
		run, err := s.run(ctx, ref)
		if err != nil {
			return out, err
		}
		if !s.leases.seeRun(ctx, run.ID, renew) {
			return out, sandbox.RunOver("run", run)
		}
	}
	// Not while the leases are locked: who begins a step asks them.
	out.Sandboxes, out.Steps = s.members.count(out.ID), s.steps.count(out.ID)
	return out, nil
}

// EndRun ends a run with the sandboxes that are to end with it, and says which.
func (s *Server) EndRun(ctx context.Context, ref, detail string) (out RunStatus, ended []string, err error) {
	ctx, call, err := s.begin(ctx, "run.end", about("run", ref))
	if err != nil {
		return out, nil, err
	}
	defer call.end(&err)
	if detail != "" {
		if err := sandbox.ValidateName("detail", detail); err != nil {
			return out, nil, err
		}
	}
	return s.finishRun(ctx, call, ref, func(r sandbox.Run) sandbox.End { return r.FinishedEnd(s.cfg.Clock().UTC(), detail) }, false)
}

// ReapRun ends a run with all its sandboxes, those that were kept too.
func (s *Server) ReapRun(ctx context.Context, ref string) (out RunStatus, ended []string, err error) {
	ctx, call, err := s.begin(ctx, "run.reap", about("run", ref))
	if err != nil {
		return out, nil, err
	}
	defer call.end(&err)
	return s.finishRun(ctx, call, ref, func(r sandbox.Run) sandbox.End { return r.ReapedEnd(s.cfg.Clock().UTC()) }, true)
}

// finishRun is finished once begun, whether or not the caller waits.
func (s *Server) finishRun(ctx context.Context, call *call, ref string, how func(sandbox.Run) sandbox.End, kept bool) (out RunStatus, ended []string, err error) {
	run, err := s.run(ctx, ref)
	if err != nil {
		return out, nil, err
	}
	call.concerns("run", run.ID)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), createTimeout)
	defer cancel()
	end := how(run)
	ended = s.leases.endRun(run.ID, end)
	if kept {
		ended = s.members.list(run.ID)
	}
	for _, id := range ended {
		call.concerns("id", id)
	}
	if kept {
		err = inParallel(ctx, killWidth, ended, func(id string) error {
			_, err := s.endWith(ctx, id, end)
			if sandbox.ClassOf(err) == sandbox.NotFound {
				return nil
			}
			return err
		})
	}
	if _, ok := s.reapLeases(asServer(ctx)); !ok {
		s.leases.poke() // what is left is tried again
	}
	if err != nil {
		return out, nil, err
	}
	if run, err = s.store.GetRun(ctx, run.ID); err != nil {
		return out, nil, err
	}
	out, err = s.status(ctx, run)
	return out, ended, err
}

// DeleteRun forgets a run that has ended, with all that is kept of it. One that is
// not there is no error.
func (s *Server) DeleteRun(ctx context.Context, ref string) (err error) {
	ctx, call, err := s.begin(ctx, "run.delete", about("run", ref))
	if err != nil {
		return err
	}
	defer call.end(&err)
	run, err := s.run(ctx, ref)
	switch {
	case errors.Is(err, sandbox.ErrNoRun):
		return nil
	case err != nil:
		return err
	}
	call.concerns("run", run.ID)
	return s.forgetRun(ctx, run)
}

// mayForget says why a run must stay, with its steps; nil = it may go once its
// shipments have them.
func (s *Server) mayForget(run sandbox.Run) error {
	switch {
	case run.State == sandbox.RunActive:
		return &sandbox.Error{Class: sandbox.Precondition, Msg: "run '" + run.Name + "' is active", Hint: "end it first: cove runs reap " + run.ID}
	case s.members.count(run.ID) > 0:
		return &sandbox.Error{Class: sandbox.Precondition, Msg: "run '" + run.Name + "' has sandboxes that were kept", Hint: "end them first: cove runs reap " + run.ID}
	}
	return nil
}

// forgetRun deletes a run with all that is kept of it.
func (s *Server) forgetRun(ctx context.Context, run sandbox.Run) error {
	if err := s.mayForget(run); err != nil {
		return err
	}
	if err := s.ships.settle(ctx, run, s.cfg.ShipWait); err != nil {
		return err
	}
	s.runTurn.Lock()
	defer s.runTurn.Unlock()
	now, err := s.store.GetRun(ctx, run.ID) // it may have been begun again
	switch {
	case errors.Is(err, sandbox.ErrNoRun):
		return nil
	case err == nil:
		err = s.mayForget(now)
	}
	if err != nil {
		return err
	}
	if err := s.store.DeleteRun(ctx, run.ID); err != nil {
		return err
	}
	return s.forgetSteps(run)
}

// forgetRuns deletes runs that ended longer ago than they are kept. One that must
// stay, or that a shipment has yet to deliver, is looked at again an hour later.
func (s *Server) forgetRuns(ctx context.Context) {
	if s.cfg.RunRetention < 0 {
		return
	}
	runs, err := s.store.ListRuns(ctx, true)
	before, gone := s.cfg.Clock().Add(-s.cfg.RunRetention), 0
	for _, run := range runs {
		if err != nil || ctx.Err() != nil {
			break
		}
		if run.End == nil || !run.End.At.Before(before) {
			continue
		}
		if err = s.forgetRun(ctx, run); err == nil {
			gone++
		} else if sandbox.ClassOf(err) == sandbox.Precondition {
			err = nil
		}
	}
	if err != nil && ctx.Err() == nil {
		s.log.Warn("cannot forget old runs", "err", err)
	}
	if gone > 0 {
		s.log.Info("forgot old runs with their steps", "count", gone, "ended_before", before)
	}
}

// inRun says what a sandbox is part of by the id of its run, and has it end with
// the run. keep = it is not to.
func (s *Server) inRun(ctx context.Context, spec sandbox.Spec, keep bool) (sandbox.Spec, error) {
	const field = "spec.rollout.run"
	ref := spec.Rollout.Run
	if ref == "" {
		if spec.Rollout != (sandbox.Rollout{}) {
			return spec, sandbox.InvalidField(field, "is missing; a group and an episode are of a run")
		}
		return spec, nil
	}
	var run sandbox.Run
	if !s.leases.seeRun(ctx, ref, func(l *heldLease) { run = *l.run }) {
		var err error
		if run, err = s.store.GetRun(ctx, ref); err != nil {
			return spec, atField(field, err)
		}
		if !s.leases.seeRun(ctx, run.ID, func(*heldLease) {}) {
			return spec, sandbox.RunOver(field, run)
		}
	}
	spec.Rollout.Run = run.ID
	switch {
	case spec.Lease != "" && spec.Lease != run.ID:
		return spec, sandbox.InvalidField("spec.lease", "a sandbox of a run ends with the run and has no other lease").
			WithHint("leave lease out; SetLease gives it another, or none, afterwards")
	case !run.Keep && !keep:
		spec.Lease = run.ID
	}
	return spec, nil
}

// atField says which field of a request an error is about.
func atField(field string, err error) error {
	var e *sandbox.Error
	if !errors.As(err, &e) || e.Class != sandbox.NotFound {
		return err
	}
	c := *e
	c.Field = field
	return &c
}

// runLasts is nil while sandboxes can be made in a run; "" is none.
func (s *Server) runLasts(ctx context.Context, id string) error {
	if id == "" || s.leases.seeRun(ctx, id, func(*heldLease) {}) {
		return nil
	}
	return sandbox.RunOver("spec.rollout.run", sandbox.Run{ID: id})
}

// PutCheckpoint makes the next version of a run's document.
func (s *Server) PutCheckpoint(ctx context.Context, ref string, doc []byte, ifVersion *int64) (c sandbox.Checkpoint, err error) {
	ctx, call, err := s.begin(ctx, "run.put_checkpoint", about("run", ref))
	if err != nil {
		return c, err
	}
	defer call.end(&err)
	if err := sandbox.ValidateCheckpoint(doc); err != nil {
		return c, err
	}
	run, err := s.run(ctx, ref)
	if err != nil {
		return c, err
	}
	return s.store.PutCheckpoint(ctx, run.ID, sandbox.Checkpoint{Doc: doc, CreatedAt: s.cfg.Clock().UTC()}, ifVersion, sandbox.KeptCheckpoints)
}

// GetCheckpoint finds a version of a run's document; 0 = the latest.
func (s *Server) GetCheckpoint(ctx context.Context, ref string, version int64) (c sandbox.Checkpoint, err error) {
	ctx, call, err := s.begin(ctx, "run.get_checkpoint", about("run", ref))
	if err != nil {
		return c, err
	}
	defer call.end(&err)
	run, err := s.run(ctx, ref)
	if err != nil {
		return c, err
	}
	return s.store.GetCheckpoint(ctx, run.ID, version)
}

// ListCheckpoints lists the versions that are kept, newest first.
func (s *Server) ListCheckpoints(ctx context.Context, ref string) (list []sandbox.Checkpoint, err error) {
	ctx, call, err := s.begin(ctx, "run.list_checkpoints", about("run", ref))
	if err != nil {
		return nil, err
	}
	defer call.end(&err)
	run, err := s.run(ctx, ref)
	if err != nil {
		return nil, err
	}
	return s.store.ListCheckpoints(ctx, run.ID)
}
