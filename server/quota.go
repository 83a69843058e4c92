package server

import (
	"context"
	"maps"
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

	mu struct {
		sync.Mutex
		known map[string]knownTenant
	}
}

type knownTenant struct {
	tenant sandbox.Tenant
	at     time.Time
}

func (b *quotaBook) init(st store.Tenants, clock func() time.Time) {
	b.store, b.clock, b.mu.known = st, clock, map[string]knownTenant{}
}

func (b *quotaBook) of(ctx context.Context, tenant string) (sandbox.Quota, error) {
	now := b.clock()
	b.mu.Lock()
	k, ok := b.mu.known[tenant]
	b.mu.Unlock()
	if age := now.Sub(k.at); ok && age >= 0 && age < quotaFresh {
		return k.tenant.Quota, nil
	}
	tn, err := b.store.GetTenant(asServer(ctx), tenant)
	if err != nil {
		return sandbox.Quota{}, err
	}
	b.mu.Lock()
	b.mu.known[tenant] = knownTenant{tn, now}
	b.mu.Unlock()
	return tn.Quota, nil
}

func (b *quotaBook) forget(tenant string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.mu.known, tenant)
}

// reservations is what each tenant's sandboxes and volumes hold. It is counted, not queried: a sum
// over thousands of records per create would cost more than the create. Reconcile
// fills it from the store, which stays the truth.
type reservations struct {
	mu struct {
		sync.Mutex
		used    map[string]quota.Usage
		buckets map[string]quota.Bucket
		held    map[string]holding // by sandbox
		volumes map[string]volumeHolding
	}
}

type volumeHolding struct {
	tenant   string
	size     int64
	changing bool // what size it will have is not settled
}

type holding struct {
	tenant string
	res    sandbox.Resources
}

func (l *reservations) init() {
	l.mu.used, l.mu.buckets, l.mu.held = map[string]quota.Usage{}, map[string]quota.Bucket{}, map[string]holding{}
	l.mu.volumes = map[string]volumeHolding{}
}

// load counts the sandboxes and volumes there are.
func (l *reservations) load(live []sandbox.Sandbox, volumes []sandbox.Volume) {
	l.mu.Lock()
	defer l.mu.Unlock()
	clear(l.mu.used)
	clear(l.mu.held)
	for _, sb := range live {
		h := holding{sb.Tenant, sb.Spec.Resources}
		l.mu.held[sb.ID], l.mu.used[h.tenant] = h, l.mu.used[h.tenant].Plus(h.res)
	}
	clear(l.mu.volumes)
	for _, v := range volumes {
		l.volumeLocked(v.ID, v.Tenant, v.Size)
	}
}

// begin takes n creates alike from a tenant's rate, if least of them fit into
// its quota.
func (l *reservations) begin(tenant string, q sandbox.Quota, res sandbox.Resources, least, n int, now time.Time) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.beginLocked(tenant, q, res, least, n, now)
}

func (l *reservations) beginLocked(tenant string, q sandbox.Quota, res sandbox.Resources, least, n int, now time.Time) error {
	bucket, err := quota.Create(q, l.mu.used[tenant], l.mu.buckets[tenant], res, least, n, now)
	l.mu.buckets[tenant] = bucket
	return err
}

// reserve takes room for one sandbox under a quota; begun says that its create is
// taken from the rate already. It is a sandbox's with bind or given back with the
// returned function.
func (l *reservations) reserve(tenant string, q sandbox.Quota, res sandbox.Resources, begun bool, now time.Time) (back func(), err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if begun {
		err = quota.Fits(q, l.mu.used[tenant], res, 1)
	} else {
		err = l.beginLocked(tenant, q, res, 1, 1, now)
	}
	if err != nil {
		return nil, err
	}
	l.mu.used[tenant] = l.mu.used[tenant].Plus(res)
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.mu.used[tenant] = l.mu.used[tenant].Minus(res)
	}, nil
}

// bind makes a reservation a sandbox's: it is given back with its end.
func (l *reservations) bind(id, tenant string, res sandbox.Resources) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.held[id] = holding{tenant, res}
}

// resize has a sandbox hold another size of disk, if its tenant may: more at
// once, less when settle says that it has come to it.
func (l *reservations) resize(id string, q sandbox.Quota, disk int64) (settle func(done bool), err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	h, ok := l.mu.held[id]
	if !ok {
		return func(bool) {}, nil // it has ended
	}
	was := h.res.Disk
	if err := quota.Disk(q, l.mu.used[h.tenant], disk-was); err != nil {
		return nil, err
	}
	l.diskLocked(id, max(was, disk))
	return func(done bool) {
		l.mu.Lock()
		defer l.mu.Unlock()
		switch {
		case done:
			l.diskLocked(id, disk)
		case l.mu.held[id].res.Disk == max(was, disk): // nobody else has changed it
			l.diskLocked(id, was)
		}
	}, nil
}

func (l *reservations) diskLocked(id string, disk int64) {
	h, ok := l.mu.held[id]
	if !ok {
		return
	}
	used := l.mu.used[h.tenant]
	used.Disk += disk - h.res.Disk
	h.res.Disk = disk
	l.mu.held[id], l.mu.used[h.tenant] = h, used
}

// holdVolume has a volume count with a size, if its tenant may have that much,
// until settle says whether it came to it. One that did not counts as it did
// before.
func (l *reservations) holdVolume(id, tenant string, q sandbox.Quota, size int64) (settle func(done bool), err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	was := l.mu.volumes[id]
	if was.changing {
		return nil, &sandbox.Error{Class: sandbox.Conflict, Msg: "the volume is being resized", Hint: "try again when that is over"}
	}
	if err := quota.Disk(q, l.mu.used[tenant], size-was.size); err != nil {
		return nil, err
	}
	l.volumeLocked(id, tenant, max(size, was.size))
	h := l.mu.volumes[id]
	h.changing = true
	l.mu.volumes[id] = h
	return func(done bool) {
		l.mu.Lock()
		defer l.mu.Unlock()
		if _, there := l.mu.volumes[id]; !there {
			return // deleted meanwhile
		}
		if !done {
			size = was.size
		}
		l.volumeLocked(id, tenant, size)
	}, nil
}

// volumeLocked has a volume count with a size; 0 = it is gone.
func (l *reservations) volumeLocked(id, tenant string, size int64) {
	used := l.mu.used[tenant]
	used.Disk += size - l.mu.volumes[id].size
	l.mu.used[tenant] = used
	if size == 0 {
		delete(l.mu.volumes, id)
		return
	}
	l.mu.volumes[id] = volumeHolding{tenant: tenant, size: size}
}

// volumeGone gives back what a volume held, once.
func (l *reservations) volumeGone(id string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if h, ok := l.mu.volumes[id]; ok {
		l.volumeLocked(id, h.tenant, 0)
	}
}

// ended gives back what a sandbox held, once.
func (l *reservations) ended(id string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	h, ok := l.mu.held[id]
	if !ok {
		return
	}
	delete(l.mu.held, id)
	l.mu.used[h.tenant] = l.mu.used[h.tenant].Minus(h.res)
}

// usages is what every tenant's are.
func (l *reservations) usages() map[string]quota.Usage {
	l.mu.Lock()
	defer l.mu.Unlock()
	return maps.Clone(l.mu.used)
}

func (l *reservations) usage(tenant string) quota.Usage {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.mu.used[tenant]
}

// counted is the store with the reservations and the leases' sandboxes kept beside it:
// whatever makes, ends or forgets a sandbox passes here.
type counted struct {
	store.Store
	reservations *reservations
	queue        *createQueue
	leases       *leaseBook
	members      *memberBook
	left         func(sandbox.Sandbox) // told once of each sandbox of a run that has ended
	took         func(run string)      // told once of each that was made
	holdings     *holdings
}

func (c counted) CreateSandbox(ctx context.Context, sb sandbox.Sandbox, idem store.Idempotency) (sandbox.Sandbox, bool, error) {
	got, existed, err := c.Store.CreateSandbox(ctx, sb, idem)
	if err == nil && !existed {
		c.leases.bind(got.ID, got.Spec.Lease)
		c.members.put(got)
		c.took(got.Spec.Rollout.Run)
	}
	return got, existed, err
}

func (c counted) UpdateSandbox(ctx context.Context, id string, f func(*sandbox.Sandbox) error) (sandbox.Sandbox, error) {
	sb, err := c.Store.UpdateSandbox(ctx, id, f)
	if err == nil {
		c.leases.bind(id, sb.Spec.Lease)
		c.members.put(sb)
	}
	return sb, err
}

func (c counted) EndSandbox(ctx context.Context, id string, end sandbox.End) (sandbox.Sandbox, error) {
	sb, err := c.Store.EndSandbox(ctx, id, end)
	if err == nil {
		c.reservations.ended(id)
		c.leases.bind(id, "")
		if c.members.drop(id) {
			c.left(sb)
		}
		c.queue.wake()
	}
	return sb, err
}

func (c counted) ForgetSandbox(ctx context.Context, id string) error {
	err := c.Store.ForgetSandbox(ctx, id)
	if err == nil {
		c.reservations.ended(id)
		c.leases.bind(id, "")
		c.members.drop(id)
		c.queue.wake()
	}
	return err
}

func (c counted) DeleteVolume(ctx context.Context, id string) error {
	err := c.Store.DeleteVolume(ctx, id)
	if err == nil {
		c.reservations.volumeGone(id)
	}
	return err
}

// admit reserves a sandbox's room in its tenant's quota.
func (s *Server) admit(ctx context.Context, tenant string, res sandbox.Resources, begun bool) (back func(), q sandbox.Quota, err error) {
	if q, err = s.quotaOf(ctx, tenant, sandboxQuota); err != nil {
		return nil, q, err
	}
	back, err = s.reservations.reserve(tenant, q, res, begun, s.cfg.Clock())
	return back, q, err
}

// admitAll takes n creates alike from the rate of the caller's tenant before the
// first of them is made: asked for one by one, a fork wider than the rate would
// never have all its children. Least of them must fit into the quota.
func (s *Server) admitAll(ctx context.Context, res sandbox.Resources, least, n int) error {
	tenant := store.ScopeOf(ctx).Tenant()
	q, err := s.quotaOf(ctx, tenant, sandboxQuota)
	if err != nil {
		return err
	}
	return s.reservations.begin(tenant, q, res, least, n, s.cfg.Clock())
}

// resizeDisk reserves another size of disk for a sandbox. See reservations.resize.
func (s *Server) resizeDisk(ctx context.Context, sb sandbox.Sandbox, disk int64) (settle func(done bool), err error) {
	if disk == sb.Spec.Resources.Disk {
		return func(bool) {}, nil
	}
	q, err := s.quotaOf(ctx, sb.Tenant, diskQuota)
	if err != nil {
		return nil, err
	}
	return s.reservations.resize(sb.ID, q, disk)
}

// admitSnapshot refuses a snapshot of a tenant whose snapshots take all they may.
func (s *Server) admitSnapshot(ctx context.Context) error {
	q, err := s.quotaOf(ctx, store.ScopeOf(ctx).Tenant(), snapshotQuota)
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

// admitVolume reserves a size for a volume. See reservations.holdVolume.
func (s *Server) admitVolume(ctx context.Context, id, tenant string, size int64) (settle func(done bool), err error) {
	q, err := s.quotaOf(ctx, tenant, diskQuota)
	if err != nil {
		return nil, err
	}
	return s.reservations.holdVolume(id, tenant, q, size)
}
