package server

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// leaseBook is the leases there are, when each expires and which sandboxes end
// with it. A heartbeat changes a number in here and nothing on disk: see
// store.Leases.
type leaseBook struct {
	wake chan struct{} // capacity 1: one may expire sooner than was thought

	mu struct {
		sync.Mutex
		byID map[string]*heldLease
		of   map[string]string // sandbox → its lease
	}
}

type heldLease struct {
	sandbox.Lease
	run   *sandbox.Run // whose lease it is; nil = of a client without one
	boxes map[string]struct{}
	end   *sandbox.End // set when it is over: it takes nobody in and cannot be renewed
}

func (b *leaseBook) init() {
	b.wake = make(chan struct{}, 1)
	b.empty()
}

func (b *leaseBook) empty() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.mu.byID, b.mu.of = map[string]*heldLease{}, map[string]string{}
}

func (b *leaseBook) poke() {
	select {
	case b.wake <- struct{}{}:
	default:
	}
}

func (b *leaseBook) add(l sandbox.Lease) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.mu.byID[l.ID] = &heldLease{Lease: l, boxes: map[string]struct{}{}}
	b.poke()
}

// addRun adds the lease of a run, unless it is there.
func (b *leaseBook) addRun(run sandbox.Run, now time.Time) {
	l := run.Lease()
	l.ExpiresAt = now.Add(run.TTL)
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mu.byID[l.ID] == nil {
		b.mu.byID[l.ID] = &heldLease{Lease: l, run: &run, boxes: map[string]struct{}{}}
		b.poke()
	}
}

// seeRun calls f with the lease of a run in scope that lasts.
func (b *leaseBook) seeRun(ctx context.Context, id string, f func(*heldLease)) (found bool) {
	err := b.see(ctx, id, func(l *heldLease) {
		if found = l.run != nil; found {
			f(l)
		}
	})
	return err == nil && found
}

// isOver says that a lease is over and not all of its sandboxes are gone.
func (b *leaseBook) isOver(id string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	l := b.mu.byID[id]
	return l != nil && l.end != nil
}

// endRun ends the lease of a run, if it lasts, and says which sandboxes end with it.
func (b *leaseBook) endRun(id string, end sandbox.End) []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	l := b.mu.byID[id]
	if l == nil || l.end != nil {
		return nil
	}
	l.end = &end
	return slices.Sorted(maps.Keys(l.boxes))
}

// bind says which lease a sandbox ends with; "" = none, or it has ended.
func (b *leaseBook) bind(id, lease string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	was := b.mu.of[id]
	if was == lease {
		return
	}
	if l := b.mu.byID[was]; l != nil {
		delete(l.boxes, id)
	}
	delete(b.mu.of, id)
	if l := b.mu.byID[lease]; l != nil {
		b.mu.of[id] = lease
		l.boxes[id] = struct{}{}
	}
}

// takes is nil if a tenant's sandbox can be made with a lease; "" is none.
func (b *leaseBook) takes(tenant, id string) error {
	if id == "" {
		return nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if l := b.mu.byID[id]; l == nil || l.end != nil || l.Tenant != tenant {
		return sandbox.NoSuchLease("spec.lease", id)
	}
	return nil
}

// see calls f with a lease in scope that lasts.
func (b *leaseBook) see(ctx context.Context, id string, f func(*heldLease)) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	l := b.mu.byID[id]
	if l == nil || l.end != nil || !store.ScopeOf(ctx).Sees(l.Tenant) {
		return sandbox.NoSuchLease("id", id)
	}
	f(l)
	return nil
}

// count is how many leases a tenant has.
func (b *leaseBook) count(tenant string) (n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, l := range b.mu.byID {
		if l.Tenant == tenant {
			n++
		}
	}
	return n
}

// list is the leases in a scope that last, the oldest first.
func (b *leaseBook) list(scope store.Scope) (out []LeaseStatus) {
	b.mu.Lock()
	for _, l := range b.mu.byID {
		if l.end == nil && scope.Sees(l.Tenant) {
			out = append(out, l.status())
		}
	}
	b.mu.Unlock()
	slices.SortFunc(out, func(a, b LeaseStatus) int {
		return cmp.Or(a.CreatedAt.Compare(b.CreatedAt), cmp.Compare(a.ID, b.ID))
	})
	return out
}

// due marks what has expired as over and returns it, with what was over before
// and is still there, and when the next one expires (zero: none will).
func (b *leaseBook) due(now time.Time) (over []*heldLease, next time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, l := range b.mu.byID {
		if l.end == nil && !now.Before(l.ExpiresAt) {
			end := l.ExpiredEnd(now)
			if l.run != nil {
				end = l.run.LostEnd(now)
			}
			l.end = &end
		}
		if l.end != nil {
			over = append(over, l)
		} else if next.IsZero() || l.ExpiresAt.Before(next) {
			next = l.ExpiresAt
		}
	}
	return over, next
}

// left is the sandboxes of leases that are over, but for those that nothing may
// end now.
func (b *leaseBook) left(over []*heldLease, busy *busyBook) (ids []string, ends map[string]sandbox.End) {
	b.mu.Lock()
	defer b.mu.Unlock()
	ends = map[string]sandbox.End{}
	for _, l := range over {
		for id := range l.boxes {
			if busy.get(id) == nil {
				ids, ends[id] = append(ids, id), *l.end
			}
		}
	}
	return ids, ends
}

// forget drops a lease that is over if no sandbox is left of it.
func (b *leaseBook) forget(l *heldLease) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(l.boxes) == 0 {
		delete(b.mu.byID, l.ID)
	}
	return len(l.boxes) == 0
}

// loadLeases gives every lease on record its whole time again: while the server
// was away nobody heard their heartbeats. A sandbox whose lease is not on record
// any more was to end with it.
func (s *Server) loadLeases(ctx context.Context, live []sandbox.Sandbox) error {
	leases, err := s.store.ListLeases(ctx)
	if err != nil {
		return err
	}
	now := s.cfg.Clock().UTC()
	known := map[string]bool{}
	for _, l := range leases {
		l.ExpiresAt = now.Add(l.TTL)
		s.leases.add(l)
		known[l.ID] = true
	}
	runs, err := s.store.ListRuns(ctx, false)
	if err != nil {
		return err
	}
	for _, r := range runs {
		s.leases.addRun(r, now)
		known[r.ID] = true
	}
	for _, sb := range live {
		s.members.put(sb)
		if id := sb.Spec.Lease; id != "" && !known[id] {
			s.leases.add(sandbox.Lease{ID: id, Tenant: sb.Tenant, ExpiresAt: now})
			known[id] = true
		}
		s.leases.bind(sb.ID, sb.Spec.Lease)
	}
	return nil
}

// leaseRetry is when a sandbox that could not be ended with its lease is tried
// again.
const leaseRetry = time.Second

// leaseLoop ends leases as they expire. One timer does for all: heartbeats only
// move expiries away, so nothing is due before the earliest that was seen.
func (s *Server) leaseLoop(ctx context.Context) {
	for {
		next, ok := s.reapLeases(ctx)
		wait := time.Hour
		if !next.IsZero() {
			wait = max(0, next.Sub(s.cfg.Clock()))
		}
		if !ok {
			wait = min(wait, leaseRetry)
		}
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-s.leases.wake:
		case <-timer.C:
		}
		timer.Stop()
	}
}

// reapLeases ends the sandboxes of leases that are over, then the leases. It says
// when the next one expires, and whether all that was over is gone.
func (s *Server) reapLeases(ctx context.Context) (next time.Time, ok bool) {
	over, next := s.leases.due(s.cfg.Clock().UTC())
	if len(over) == 0 {
		return next, true
	}
	ids, ends := s.leases.left(over, &s.busy)
	err := inParallel(ctx, killWidth, ids, func(id string) error {
		_, err := s.endWith(asServer(ctx), id, ends[id])
		if sandbox.ClassOf(err) == sandbox.NotFound {
			s.leases.bind(id, "") // forgotten meanwhile
			return nil
		}
		return err
	})
	ok = err == nil
	for _, l := range over {
		if !s.leases.forget(l) {
			ok = false // one was just made with it
			continue
		}
		s.untilDone("forget lease "+l.ID, func(ctx context.Context) error { return s.leaseGone(ctx, l) })
	}
	if len(ids) > 0 {
		s.log.Info("sandboxes ended with their lease", "leases", len(over), "sandboxes", len(ids), "err", err)
	}
	return next, ok
}

// leaseGone puts the end of a lease on record, and of its run.
func (s *Server) leaseGone(ctx context.Context, l *heldLease) error {
	if l.run == nil {
		return s.store.DeleteLease(ctx, l.ID)
	}
	s.plans.drop(l.ID)
	_, err := s.store.UpdateRun(ctx, l.ID, func(r *sandbox.Run) error {
		r.State, r.End, r.Steps, r.Plan = sandbox.RunEnded, l.end, max(r.Steps, s.steps.count(r.ID)), nil
		return nil
	})
	if sandbox.ClassOf(err) == sandbox.NotFound {
		return nil
	}
	return err
}

// LeaseStatus is a lease and how many sandboxes end with it.
type LeaseStatus struct {
	sandbox.Lease
	Sandboxes int
}

func (l *heldLease) status() LeaseStatus { return LeaseStatus{l.Lease, len(l.boxes)} }

// CreateLease makes a lease that expires ttl after its last heartbeat; 0 is the
// default.
func (s *Server) CreateLease(ctx context.Context, name string, ttl time.Duration) (l LeaseStatus, err error) {
	ctx, call, err := s.begin(ctx, "lease.create", about("name", name))
	if err != nil {
		return l, err
	}
	defer call.end(&err)
	ttl = cmp.Or(ttl, sandbox.DefaultLease)
	if err := sandbox.ValidateLease(ttl, name); err != nil {
		return l, err
	}
	tenant := store.ScopeOf(ctx).Tenant()
	if s.leases.count(tenant) >= sandbox.MaxLeases {
		return l, &sandbox.Error{Class: sandbox.QuotaExceeded, Msg: "the tenant has as many leases as there may be", RetryAfter: time.Minute,
			Hint: "one lease serves any number of sandboxes; \"cove lease ls\" lists them"}
	}
	l.Lease = sandbox.Lease{ID: sandbox.NewID(s.cfg.Rand), Tenant: tenant, Name: name, TTL: ttl, CreatedAt: s.cfg.Clock().UTC()}
	if err := s.store.CreateLease(ctx, l.Lease); err != nil {
		return l, err
	}
	l.ExpiresAt = s.cfg.Clock().UTC().Add(ttl)
	s.leases.add(l.Lease)
	call.concerns("lease", l.ID)
	return l, nil
}

// RenewLease is a heartbeat: the lease has its whole time again.
func (s *Server) RenewLease(ctx context.Context, id string) (l LeaseStatus, err error) {
	ctx, call, err := s.begin(ctx, "lease.heartbeat", about("id", id))
	if err != nil {
		return l, err
	}
	defer call.end(&err)
	err = s.leases.see(ctx, id, func(held *heldLease) {
		held.ExpiresAt = s.cfg.Clock().UTC().Add(held.TTL)
		l = held.status()
	})
	return l, err
}

// GetLease finds a lease that lasts.
func (s *Server) GetLease(ctx context.Context, id string) (l LeaseStatus, err error) {
	ctx, call, err := s.begin(ctx, "lease.get", about("id", id))
	if err != nil {
		return l, err
	}
	defer call.end(&err)
	err = s.leases.see(ctx, id, func(held *heldLease) { l = held.status() })
	return l, err
}

// ListLeases lists those that last, the oldest first.
func (s *Server) ListLeases(ctx context.Context) (list []LeaseStatus, err error) {
	ctx, call, err := s.begin(ctx, "lease.list")
	if err != nil {
		return nil, err
	}
	defer call.end(&err)
	return s.leases.list(store.ScopeOf(ctx)), nil
}

// EndLease ends a lease and its sandboxes, and says which. It is finished once
// begun, whether or not the caller waits. One that is over already has none.
func (s *Server) EndLease(ctx context.Context, id string) (ended []string, err error) {
	ctx, call, err := s.begin(ctx, "lease.end", about("id", id))
	if err != nil {
		return nil, err
	}
	defer call.end(&err)
	if s.leases.see(ctx, id, func(l *heldLease) {
		end := l.EndedEnd(s.cfg.Clock().UTC())
		if l.run != nil {
			end = l.run.FinishedEnd(s.cfg.Clock().UTC(), "")
		}
		l.end = &end
		ended = slices.Sorted(maps.Keys(l.boxes))
	}) != nil {
		return nil, nil // it is over
	}
	for _, id := range ended {
		call.concerns("id", id)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), createTimeout)
	defer cancel()
	if _, ok := s.reapLeases(ctx); !ok {
		s.leases.poke() // what is left is tried again
	}
	return ended, nil
}

// SetLease has a sandbox end with another lease; "" = with none. It changes the
// record alone: the node knows nothing of leases.
func (s *Server) SetLease(ctx context.Context, id, lease string) (sb sandbox.Sandbox, err error) {
	ctx, call, err := s.begin(ctx, "sandbox.set_lease", about("id", id), about("lease", lease), about("sandbox", id))
	if err != nil {
		return sb, err
	}
	defer call.end(&err)
	if err := validID("id", id); err != nil {
		return sb, err
	}
	aged := false
	now := s.cfg.Clock().UTC()
	sb, err = s.store.UpdateSandbox(ctx, id, func(sb *sandbox.Sandbox) error {
		aged = false
		if s.leases.takes(sb.Tenant, lease) != nil {
			return sandbox.NoSuchLease("lease", lease)
		}
		sb.Spec.Lease = lease
		if with := sb.Spec.WithEnd(s.cfg.Defaults); with.Timeout != sb.Spec.Timeout {
			sb.Spec, sb.ExpiresAt, aged = with, now.Add(with.Timeout), true
		}
		return nil
	})
	if err == nil && aged {
		err = s.setExpiry(ctx, sb.ID, sb.ExpiresAt)
	}
	if err != nil {
		return sb, s.explain(ctx, id, err)
	}
	return s.asItIs(ctx, sb), nil
}
