package server

import (
	"context"
	"maps"
	"sync"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/snapshot"
	"github.com/cove-sandbox/cove/store"
)

// What a snapshot adds is told by what its tenant already holds, never by what is
// in the content store: that is everybody's, and a snapshot that adds nothing to
// it would tell its owner that another tenant has the same.

// holdings knows in how many snapshots of a tenant each blob is, so that to take
// or delete one costs as much as it has blobs and not as much as there are
// snapshots. A tenant's are read when they are first needed after a start.
type holdings struct {
	store store.Snapshots
	blobs func(ctx context.Context, manifests []string) (map[string][]snapshot.Blob, error)

	most int // blobs that are remembered, of tenants of whom nobody asks now

	mu struct {
		sync.Mutex
		of    map[string]*tenantHoldings // by tenant
		asked int64                      // counts look-ups
	}
}

// mostHeld blobs take some 100 MiB. To read a tenant's again costs as much as it has
// snapshots.
const mostHeld = 1 << 20

// tenantHoldings is one tenant's. Its lock is held over the deletion of a record, so
// that the first look sees a snapshot on record or gone, and not both.
type tenantHoldings struct {
	// Guarded by holdings.mu.
	users int   // who count in it now: without them it can be read again
	asked int64 // when it was last needed
	blobs int   // that it had then

	mu struct {
		sync.Mutex
		read      bool
		held      snapshot.Holding
		manifests map[string]int // in how many snapshots content is
	}
}

func (h *holdings) init(st store.Snapshots, blobs func(context.Context, []string) (map[string][]snapshot.Blob, error)) {
	h.store, h.blobs, h.most = st, blobs, mostHeld
	h.mu.of = map[string]*tenantHoldings{}
}

// use is a tenant's until done.
func (h *holdings) use(id string) (t *tenantHoldings, done func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if t = h.mu.of[id]; t == nil {
		t = &tenantHoldings{}
		h.mu.of[id] = t
	}
	h.mu.asked++
	t.asked = h.mu.asked
	t.users++
	return t, func() {
		t.mu.Lock()
		blobs := t.mu.held.Len()
		t.mu.Unlock()
		h.mu.Lock()
		defer h.mu.Unlock()
		t.blobs = blobs
		t.users--
		h.boundLocked(t)
	}
}

// boundLocked forgets those of whom nobody has asked for longest, while there are too
// many blobs, but not the last.
func (h *holdings) boundLocked(last *tenantHoldings) {
	all := 0
	for _, t := range h.mu.of {
		all += t.blobs
	}
	for all > h.most {
		oldest := ""
		for id, t := range h.mu.of {
			if t.users == 0 && t != last && (oldest == "" || t.asked < h.mu.of[oldest].asked) {
				oldest = id
			}
		}
		if oldest == "" {
			return
		}
		all -= h.mu.of[oldest].blobs
		delete(h.mu.of, oldest)
	}
}

// forget has a tenant's read again when they are next needed.
func (h *holdings) forget(tenant string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.mu.of, tenant)
}

// needs is all content that a snapshot is in.
func needs(c sandbox.Content) []string { return append([]string{c.Manifest}, c.Needs...) }

// content is the blobs of each manifest. What the node cannot read counts with
// the size of what was frozen, which tells nothing of others.
func (h *holdings) content(ctx context.Context, c sandbox.Content) (map[string][]snapshot.Blob, error) {
	found, err := h.blobs(ctx, needs(c))
	if err != nil {
		return nil, err
	}
	found = maps.Clone(found)
	if _, ok := found[c.Manifest]; !ok {
		found[c.Manifest] = unread(c.Manifest, c.Size)
	}
	return found, nil
}

// add counts content of a tenant and has record make the record of it, with the bytes
// of it that the tenant did not hold.
func (h *holdings) add(ctx context.Context, tenant string, c sandbox.Content, record func(fresh int64) error) error {
	ctx = store.In(ctx, tenant)
	blobs, err := h.content(ctx, c)
	if err != nil {
		return err
	}
	t, done := h.use(tenant)
	defer done()
	fresh, err := func() (int64, error) {
		t.mu.Lock()
		defer t.mu.Unlock()
		if err := h.readLocked(ctx, t); err != nil {
			return 0, err
		}
		return t.addLocked(needs(c), blobs), nil
	}()
	if err != nil {
		return err
	}
	if err = record(fresh); err != nil {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.dropLocked(needs(c), blobs)
	}
	return err
}

// remove has forgotten delete a record of a tenant and says how many bytes of its
// content the tenant holds no longer.
func (h *holdings) remove(ctx context.Context, snap sandbox.Snapshot, forgotten func() error) (freed int64, err error) {
	ctx = store.In(ctx, snap.Tenant)
	blobs, err := h.content(ctx, snap.Content) // while it is there
	if err != nil {
		return 0, err
	}
	t, done := h.use(snap.Tenant)
	defer done()
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := h.readLocked(ctx, t); err != nil {
		return 0, err
	}
	if err := forgotten(); err != nil {
		return 0, err
	}
	return t.dropLocked(needs(snap.Content), blobs), nil
}

// readLocked counts what is on record, once.
func (h *holdings) readLocked(ctx context.Context, t *tenantHoldings) error {
	if t.mu.read {
		return nil
	}
	var all []sandbox.Snapshot
	for _, hidden := range []bool{false, true} {
		snaps, err := listAll(ctx, h.store, store.SnapshotFilter{Hidden: hidden})
		if err != nil {
			return err
		}
		all = append(all, snaps...)
	}
	t.mu.held, t.mu.manifests = snapshot.Holding{}, map[string]int{}
	for _, snap := range all {
		blobs, err := h.content(ctx, snap.Content)
		if err != nil {
			return err
		}
		t.addLocked(needs(snap.Content), blobs)
	}
	t.mu.read = true
	return nil
}

func (t *tenantHoldings) addLocked(manifests []string, blobs map[string][]snapshot.Blob) (fresh int64) {
	had := t.mu.held.Bytes()
	for _, m := range manifests {
		if t.mu.manifests[m]++; t.mu.manifests[m] == 1 {
			t.mu.held.Add(blobs[m])
		}
	}
	return t.mu.held.Bytes() - had
}

func (t *tenantHoldings) dropLocked(manifests []string, blobs map[string][]snapshot.Blob) (freed int64) {
	had := t.mu.held.Bytes()
	for _, m := range manifests {
		if t.mu.manifests[m]--; t.mu.manifests[m] == 0 {
			delete(t.mu.manifests, m)
			t.mu.held.Drop(blobs[m])
		}
	}
	return had - t.mu.held.Bytes()
}

func (c counted) CreateSnapshot(ctx context.Context, snap sandbox.Snapshot) (sandbox.Snapshot, error) {
	err := c.holdings.add(ctx, store.ScopeOf(ctx).Owner(snap.Tenant), snap.Content, func(fresh int64) (err error) {
		snap.Content.Stored = fresh
		snap, err = c.Store.CreateSnapshot(ctx, snap)
		return err
	})
	return snap, err
}

func (c counted) CreateTemplateVersion(ctx context.Context, t sandbox.Template, snap sandbox.Snapshot) (sandbox.Template, error) {
	err := c.holdings.add(ctx, store.ScopeOf(ctx).Owner(snap.Tenant), snap.Content, func(fresh int64) (err error) {
		snap.Content.Stored = fresh
		t, err = c.Store.CreateTemplateVersion(ctx, t, snap)
		return err
	})
	return t, err
}

func (c counted) DeleteTemplate(ctx context.Context, name string, version int64) ([]sandbox.Template, error) {
	gone, err := c.Store.DeleteTemplate(ctx, name, version)
	if err == nil {
		c.holdings.forget(store.ScopeOf(ctx).Owner("")) // rare
	}
	return gone, err
}
