package server

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
	"github.com/cove-sandbox/cove/wire"
)

// leaseBook is the leases there are, when each expires and which sandboxes end
// with it. A heartbeat changes a number in here and nothing on disk: see
// store.Leases.
type leaseBook struct {
	wake chan struct{} // capacity 1: one may expire sooner than was thought

	mu   sync.Mutex
	byID map[string]*heldLease
	of   map[string]string // sandbox → its lease
}

type heldLease struct {
	sandbox.Lease
	boxes map[string]struct{}
	end   *sandbox.End // set when it is over: it takes nobody in and cannot be renewed
}

func (b *leaseBook) init() {
	b.wake, b.byID, b.of = make(chan struct{}, 1), map[string]*heldLease{}, map[string]string{}
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
	b.byID[l.ID] = &heldLease{Lease: l, boxes: map[string]struct{}{}}
	b.poke()
}

// bind says which lease a sandbox ends with; "" = none, or it has ended.
func (b *leaseBook) bind(id, lease string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	was := b.of[id]
	if was == lease {
		return
	}
	if l := b.byID[was]; l != nil {
		delete(l.boxes, id)
	}
	delete(b.of, id)
	if l := b.byID[lease]; l != nil {
		b.of[id] = lease
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
	if l := b.byID[id]; l == nil || l.end != nil || l.Tenant != tenant {
		return sandbox.NoSuchLease("spec.lease", id)
	}
	return nil
}

// see calls f with a lease in scope that lasts.
func (b *leaseBook) see(ctx context.Context, id string, f func(*heldLease)) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	l := b.byID[id]
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
	for _, l := range b.byID {
		if l.Tenant == tenant {
			n++
		}
	}
	return n
}

// due marks what has expired as over and returns it, with what was over before
// and is still there, and when the next one expires (zero: none will).
func (b *leaseBook) due(now time.Time) (over []*heldLease, next time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, l := range b.byID {
		if l.end == nil && !now.Before(l.ExpiresAt) {
			end := l.ExpiredEnd(now)
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

// left is the sandboxes of leases that are over.
func (b *leaseBook) left(over []*heldLease) (ids []string, ends map[string]sandbox.End) {
	b.mu.Lock()
	defer b.mu.Unlock()
	ends = map[string]sandbox.End{}
	for _, l := range over {
		for id := range l.boxes {
			ids, ends[id] = append(ids, id), *l.end
		}
	}
	return ids, ends
}

// forget drops a lease that is over if no sandbox is left of it.
func (b *leaseBook) forget(l *heldLease) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(l.boxes) == 0 {
		delete(b.byID, l.ID)
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
	for _, sb := range live {
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
	ids, ends := s.leases.left(over)
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
		s.owe("forget lease "+l.ID, func(ctx context.Context) error { return s.store.DeleteLease(ctx, l.ID) })
	}
	if len(ids) > 0 {
		s.log.Info("sandboxes ended with their lease", "leases", len(over), "sandboxes", len(ids), "err", err)
	}
	return next, ok
}

type leaseService struct{ *Server }

func (s leaseService) Create(ctx context.Context, r *connect.Request[covev1.CreateLeaseRequest]) (*connect.Response[covev1.CreateLeaseResponse], error) {
	if s.calls.isDraining() {
		return nil, stopping()
	}
	ttl, err := wire.DurationFrom("ttl", r.Msg.Ttl)
	if err != nil {
		return nil, err
	}
	ttl = cmp.Or(ttl, sandbox.DefaultLease)
	if err := sandbox.ValidateLease(ttl, r.Msg.Name); err != nil {
		return nil, err
	}
	tenant := store.ScopeOf(ctx).Tenant()
	if s.leases.count(tenant) >= sandbox.MaxLeases {
		return nil, &sandbox.Error{Class: sandbox.QuotaExceeded, Msg: "the tenant has as many leases as there may be", RetryAfter: time.Minute,
			Hint: "one lease serves any number of sandboxes; \"cove lease ls\" lists them"}
	}
	now := s.cfg.Clock().UTC()
	l := sandbox.Lease{ID: sandbox.NewID(s.cfg.Rand), Tenant: tenant, Name: r.Msg.Name, TTL: ttl, CreatedAt: now}
	if err := s.store.CreateLease(ctx, l); err != nil {
		return nil, err
	}
	l.ExpiresAt = s.cfg.Clock().UTC().Add(ttl)
	s.leases.add(l)
	return connect.NewResponse(&covev1.CreateLeaseResponse{Lease: wire.Lease(l, 0)}), nil
}

func (s leaseService) Heartbeat(ctx context.Context, r *connect.Request[covev1.HeartbeatRequest]) (*connect.Response[covev1.HeartbeatResponse], error) {
	out := &covev1.HeartbeatResponse{}
	err := s.leases.see(ctx, r.Msg.Id, func(l *heldLease) {
		l.ExpiresAt = s.cfg.Clock().UTC().Add(l.TTL)
		out.Lease = wire.Lease(l.Lease, len(l.boxes))
	})
	return answer(out, err)
}

func (s leaseService) Get(ctx context.Context, r *connect.Request[covev1.GetLeaseRequest]) (*connect.Response[covev1.GetLeaseResponse], error) {
	out := &covev1.GetLeaseResponse{}
	err := s.leases.see(ctx, r.Msg.Id, func(l *heldLease) { out.Lease = wire.Lease(l.Lease, len(l.boxes)) })
	return answer(out, err)
}

func (s leaseService) List(ctx context.Context, r *connect.Request[covev1.ListLeasesRequest]) (*connect.Response[covev1.ListLeasesResponse], error) {
	scope := store.ScopeOf(ctx)
	out := &covev1.ListLeasesResponse{}
	b := &s.leases
	b.mu.Lock()
	for _, l := range b.byID {
		if l.end == nil && scope.Sees(l.Tenant) {
			out.Leases = append(out.Leases, wire.Lease(l.Lease, len(l.boxes)))
		}
	}
	b.mu.Unlock()
	slices.SortFunc(out.Leases, func(a, b *covev1.Lease) int {
		return cmp.Or(a.CreatedAt.AsTime().Compare(b.CreatedAt.AsTime()), cmp.Compare(a.Id, b.Id))
	})
	return connect.NewResponse(out), nil
}

// End is finished once begun, whether or not the caller waits.
func (s leaseService) End(ctx context.Context, r *connect.Request[covev1.EndLeaseRequest]) (*connect.Response[covev1.EndLeaseResponse], error) {
	out := &covev1.EndLeaseResponse{}
	err := s.leases.see(ctx, r.Msg.Id, func(l *heldLease) {
		end := l.EndedEnd(s.cfg.Clock().UTC())
		l.end = &end
		for id := range l.boxes {
			out.Ids = append(out.Ids, id)
		}
	})
	if err != nil {
		return connect.NewResponse(out), nil // it is over
	}
	slices.Sort(out.Ids)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), createTimeout)
	defer cancel()
	if _, ok := s.reapLeases(ctx); !ok {
		s.leases.poke() // what is left is tried again
	}
	return connect.NewResponse(out), nil
}

// SetLease changes the record alone: the node knows nothing of leases.
func (s sandboxService) SetLease(ctx context.Context, r *connect.Request[covev1.SetLeaseRequest]) (*connect.Response[covev1.SetLeaseResponse], error) {
	if err := validID("id", r.Msg.Id); err != nil {
		return nil, err
	}
	lease, aged := r.Msg.Lease, false
	now := s.cfg.Clock().UTC()
	sb, err := s.store.UpdateSandbox(ctx, r.Msg.Id, func(sb *sandbox.Sandbox) error {
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
		err = s.node.SetExpiry(ctx, sb.ID, sb.ExpiresAt)
	}
	if err != nil {
		return nil, s.explain(ctx, r.Msg.Id, err)
	}
	return connect.NewResponse(&covev1.SetLeaseResponse{Sandbox: wire.Sandbox(s.asItIs(sb))}), nil
}
