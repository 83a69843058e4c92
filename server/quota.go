package server

import (
	"context"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/quota"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// quotaFresh is how long a tenant's quota is believed without asking the store.
// A change through this server is seen at once.
const quotaFresh = 5 * time.Second

// quotaBook remembers tenants, so that a create asks no store for its quota.
type quotaBook struct {
	store store.Tenants
	clock func() time.Time

	mu    sync.Mutex
	known map[string]knownTenant
}

type knownTenant struct {
	tenant sandbox.Tenant
	at     time.Time
}

func (b *quotaBook) init(st store.Tenants, clock func() time.Time) {
	b.store, b.clock, b.known = st, clock, map[string]knownTenant{}
}

func (b *quotaBook) of(ctx context.Context, tenant string) (sandbox.Quota, error) {
	now := b.clock()
	b.mu.Lock()
	k, ok := b.known[tenant]
	b.mu.Unlock()
	if age := now.Sub(k.at); ok && age >= 0 && age < quotaFresh {
		return k.tenant.Quota, nil
	}
	tn, err := b.store.GetTenant(asServer(ctx), tenant)
	if err != nil {
		return sandbox.Quota{}, err
	}
	b.mu.Lock()
	b.known[tenant] = knownTenant{tn, now}
	b.mu.Unlock()
	return tn.Quota, nil
}

func (b *quotaBook) forget(tenant string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.known, tenant)
}

// ledger is what each tenant's sandboxes hold. It is counted, not queried: a sum
// over thousands of records per create would cost more than the create. Reconcile
// fills it from the store, which stays the truth.
type ledger struct {
	mu      sync.Mutex
	used    map[string]quota.Usage
	buckets map[string]quota.Bucket
	held    map[string]holding // by sandbox
}

type holding struct {
	tenant string
	res    sandbox.Resources
}

func (l *ledger) init() {
	l.used, l.buckets, l.held = map[string]quota.Usage{}, map[string]quota.Bucket{}, map[string]holding{}
}

// load counts the sandboxes there are.
func (l *ledger) load(live []sandbox.Sandbox) {
	l.mu.Lock()
	defer l.mu.Unlock()
	clear(l.used)
	clear(l.held)
	for _, sb := range live {
		h := holding{sb.Tenant, sb.Spec.Resources}
		l.held[sb.ID], l.used[h.tenant] = h, l.used[h.tenant].Plus(h.res)
	}
}

// begin takes n creates alike from a tenant's rate, if least of them fit into
// its quota.
func (l *ledger) begin(tenant string, q sandbox.Quota, volumes int64, res sandbox.Resources, least, n int, now time.Time) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.beginLocked(tenant, q, volumes, res, least, n, now)
}

func (l *ledger) beginLocked(tenant string, q sandbox.Quota, volumes int64, res sandbox.Resources, least, n int, now time.Time) error {
	used := l.used[tenant]
	used.Disk += volumes
	bucket, err := quota.Create(q, used, l.buckets[tenant], res, least, n, now)
	l.buckets[tenant] = bucket
	return err
}

// reserve takes room for one sandbox under a quota; begun says that its create is
// taken from the rate already. It is a sandbox's with bind or given back with the
// returned function.
func (l *ledger) reserve(tenant string, q sandbox.Quota, volumes int64, res sandbox.Resources, begun bool, now time.Time) (back func(), err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if begun {
		used := l.used[tenant]
		used.Disk += volumes
		err = quota.Room(q, used, res, 1)
	} else {
		err = l.beginLocked(tenant, q, volumes, res, 1, 1, now)
	}
	if err != nil {
		return nil, err
	}
	l.used[tenant] = l.used[tenant].Plus(res)
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.used[tenant] = l.used[tenant].Minus(res)
	}, nil
}

// bind makes a reservation a sandbox's: it is given back with its end.
func (l *ledger) bind(id, tenant string, res sandbox.Resources) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.held[id] = holding{tenant, res}
}

// resize has a sandbox hold another size of disk, if its tenant may: more at
// once, less when settle says that it has come to it.
func (l *ledger) resize(id string, q sandbox.Quota, volumes, disk int64) (settle func(done bool), err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	h, ok := l.held[id]
	if !ok {
		return func(bool) {}, nil // it has ended
	}
	used := l.used[h.tenant]
	used.Disk += volumes
	was := h.res.Disk
	if err := quota.Disk(q, used, disk-was); err != nil {
		return nil, err
	}
	l.diskLocked(id, max(was, disk))
	return func(done bool) {
		l.mu.Lock()
		defer l.mu.Unlock()
		switch {
		case done:
			l.diskLocked(id, disk)
		case l.held[id].res.Disk == max(was, disk): // nobody else has changed it
			l.diskLocked(id, was)
		}
	}, nil
}

func (l *ledger) diskLocked(id string, disk int64) {
	h, ok := l.held[id]
	if !ok {
		return
	}
	used := l.used[h.tenant]
	used.Disk += disk - h.res.Disk
	h.res.Disk = disk
	l.held[id], l.used[h.tenant] = h, used
}

// growing counts bytes of volumes that are being made, until back is called.
func (l *ledger) growing(tenant string, more int64) (back func()) {
	add := func(n int64) {
		l.mu.Lock()
		defer l.mu.Unlock()
		used := l.used[tenant]
		used.Disk += n
		l.used[tenant] = used
	}
	add(more)
	return sync.OnceFunc(func() { add(-more) })
}

// ended gives back what a sandbox held, once.
func (l *ledger) ended(id string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	h, ok := l.held[id]
	if !ok {
		return
	}
	delete(l.held, id)
	l.used[h.tenant] = l.used[h.tenant].Minus(h.res)
}

func (l *ledger) usage(tenant string) quota.Usage {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.used[tenant]
}

// counted is the store with the ledger and the leases' sandboxes kept beside it:
// whatever makes, ends or forgets a sandbox passes here.
type counted struct {
	store.Store
	ledger *ledger
	room   *waitingRoom
	leases *leaseBook
}

func (c counted) CreateSandbox(ctx context.Context, sb sandbox.Sandbox, idem store.Idempotency) (sandbox.Sandbox, bool, error) {
	got, existed, err := c.Store.CreateSandbox(ctx, sb, idem)
	if err == nil && !existed {
		c.leases.bind(got.ID, got.Spec.Lease)
	}
	return got, existed, err
}

func (c counted) UpdateSandbox(ctx context.Context, id string, f func(*sandbox.Sandbox) error) (sandbox.Sandbox, error) {
	sb, err := c.Store.UpdateSandbox(ctx, id, f)
	if err == nil {
		c.leases.bind(id, sb.Spec.Lease)
	}
	return sb, err
}

func (c counted) EndSandbox(ctx context.Context, id string, end sandbox.End) (sandbox.Sandbox, error) {
	sb, err := c.Store.EndSandbox(ctx, id, end)
	if err == nil {
		c.ledger.ended(id)
		c.leases.bind(id, "")
		c.room.wake()
	}
	return sb, err
}

func (c counted) ForgetSandbox(ctx context.Context, id string) error {
	err := c.Store.ForgetSandbox(ctx, id)
	if err == nil {
		c.ledger.ended(id)
		c.leases.bind(id, "")
		c.room.wake()
	}
	return err
}

// volumeBytes is what the volumes in scope may hold.
func (s *Server) volumeBytes(ctx context.Context) (n int64, err error) {
	set := s.node.Volumes()
	if set == nil {
		return 0, nil
	}
	vols, err := set.List(ctx)
	for _, v := range vols {
		n += v.Size
	}
	return n, err
}

// admit reserves a sandbox's room in its tenant's quota.
func (s *Server) admit(ctx context.Context, tenant string, res sandbox.Resources, begun bool) (back func(), q sandbox.Quota, err error) {
	q, volumes, err := s.bounds(ctx, tenant)
	if err != nil {
		return nil, q, err
	}
	back, err = s.ledger.reserve(tenant, q, volumes, res, begun, s.cfg.Clock())
	return back, q, err
}

// admitAll takes n creates alike from the rate of the caller's tenant before the
// first of them is made: asked for one by one, a fork wider than the rate would
// never have all its children. Least of them must fit into the quota.
func (s *Server) admitAll(ctx context.Context, res sandbox.Resources, least, n int) error {
	tenant := store.ScopeOf(ctx).Tenant()
	q, volumes, err := s.bounds(ctx, tenant)
	if err != nil {
		return err
	}
	return s.ledger.begin(tenant, q, volumes, res, least, n, s.cfg.Clock())
}

// bounds is a tenant's quota and, where it bounds them, the bytes of its volumes.
func (s *Server) bounds(ctx context.Context, tenant string) (q sandbox.Quota, volumes int64, err error) {
	if q, err = s.quotas.of(ctx, tenant); err == nil && q.Disk > 0 {
		volumes, err = s.volumeBytes(store.In(ctx, tenant))
	}
	return q, volumes, err
}

// resizeDisk reserves another size of disk for a sandbox. See ledger.resize.
func (s *Server) resizeDisk(ctx context.Context, sb sandbox.Sandbox, disk int64) (settle func(done bool), err error) {
	if disk == sb.Spec.Resources.Disk {
		return func(bool) {}, nil
	}
	q, volumes, err := s.bounds(ctx, sb.Tenant)
	if err != nil {
		return nil, err
	}
	return s.ledger.resize(sb.ID, q, volumes, disk)
}

// admitSnapshot refuses a snapshot of a tenant whose snapshots take all they may.
func (s *Server) admitSnapshot(ctx context.Context) error {
	q, err := s.quotas.of(ctx, store.ScopeOf(ctx).Tenant())
	if err != nil || q.SnapshotBytes == 0 {
		return err
	}
	n, err := s.snapshotBytes(ctx)
	if err != nil {
		return err
	}
	recordings, err := s.recordingBytes(ctx)
	if err != nil {
		return err
	}
	n += recordings
	return quota.Snapshot(q, quota.Usage{SnapshotBytes: n})
}

// admitVolume reserves more bytes of volumes, if the tenant may have them; settle
// once the node has them, or does not. Two that fit alone and not together are
// not both let through: what is reserved is read before what is there, so one
// that another has just made is in the one or in the other.
func (s *Server) admitVolume(ctx context.Context, more int64) (settle func(), err error) {
	tenant := store.ScopeOf(ctx).Tenant()
	q, err := s.quotas.of(ctx, tenant)
	if err != nil || q.Disk == 0 || more <= 0 {
		return func() {}, err
	}
	s.volumeTurn.Lock()
	defer s.volumeTurn.Unlock()
	used := s.ledger.usage(tenant)
	n, err := s.volumeBytes(ctx)
	if err != nil {
		return nil, err
	}
	used.Disk += n
	if err := quota.Disk(q, used, more); err != nil {
		return nil, err
	}
	return s.ledger.growing(tenant, more), nil
}
