package server

import (
	"context"
	"errors"
	"maps"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// prepareTimeout bounds making the image of a filesystem snapshot. It is copied
// through once: seconds, on a slow disk with gigabytes of it minutes.
const prepareTimeout = 15 * time.Minute

// origin is what a sandbox is made from, held until release: an image, or a
// snapshot with the image it is over.
type origin struct {
	img     sandbox.Image
	from    *sandbox.Snapshot // a memory snapshot to go on from; nil = start fresh from img
	lineage sandbox.Lineage   // of what is made
	release func()
}

// resolve finds what a spec starts from and fills the spec with what comes from
// there. The spec has passed ValidateSource.
func (s *Server) resolve(ctx context.Context, spec sandbox.Spec) (sandbox.Spec, origin, error) {
	ref := spec.Snapshot
	if spec.Template != "" {
		tpl, err := s.findTemplate(ctx, "spec.template", spec.Template)
		if err != nil {
			return spec, origin{}, err
		}
		ref, spec.Template = tpl.Snapshot, tpl.Ref() // the record says which version it was
	}
	if ref == "" {
		spec = spec.WithDefaults(s.cfg.Defaults)
		if err := sandbox.ValidateImageName("spec.image", spec.Image); err != nil {
			return spec, origin{}, err
		}
		img, release, err := s.images.acquire(ctx, spec.Image)
		return spec, origin{img: img, release: release}, err
	}
	snap, release, err := s.useSnapshot(ctx, ref)
	if err != nil {
		return spec, origin{}, err
	}
	defer func() {
		if err != nil {
			release()
		}
	}()
	if spec, err = inherit(spec, snap); err != nil {
		return spec, origin{}, err
	}
	o, err := s.originOf(ctx, "spec.snapshot", snap)
	if err != nil {
		return spec, origin{}, err
	}
	image := o.release
	o.release = func() { image(); release() }
	return spec.WithDefaults(s.cfg.Defaults), o, nil
}

// inherit fills a spec from the snapshot it starts from: resources left zero,
// variables and labels below the request's own, and of a memory snapshot the
// volumes, which its processes have open.
func inherit(spec sandbox.Spec, snap sandbox.Snapshot) (sandbox.Spec, error) {
	from := snap.Spec
	if has := diskFrom(snap, spec.Resources.Disk); spec.Resources.Disk != 0 && spec.Resources.Disk != has {
		return spec, sandbox.InvalidField("spec.resources.disk", "%s is not accepted: the writable layer of memory snapshot '%s' has %s and keeps them",
			sandbox.FormatSize(spec.Resources.Disk), nameOf(snap), sandbox.FormatSize(has)).
			WithHint("leave it out, or start from a filesystem snapshot")
	}
	spec.Image = from.Image
	fill := func(p *int64, v int64) {
		if *p == 0 {
			*p = v
		}
	}
	r := &spec.Resources
	if r.Memory == 0 && r.MemoryLimit == 0 {
		r.Memory, r.MemoryLimit, r.Reserve = from.Resources.Memory, from.Resources.MemoryLimit, from.Resources.Reserve
	}
	fill(&r.MilliCPU, from.Resources.MilliCPU)
	fill(&r.Disk, from.Resources.Disk)
	fill(&r.Pids, from.Resources.Pids)
	spec.Env, spec.Labels = over(from.Env, spec.Env), over(from.Labels, spec.Labels)
	if snap.Kind == sandbox.MemorySnapshot && len(spec.Volumes) == 0 {
		spec.Volumes = from.Volumes
	}
	spec.Network = spec.Network.From(from.Network)
	if len(spec.Secrets) == 0 {
		spec.Secrets = from.Secrets
	}
	spec.Authority = from.Authority
	if snap.Kind == sandbox.MemorySnapshot {
		if spec.Deterministic != nil && from.Deterministic == nil {
			return spec, sandbox.InvalidField("spec.deterministic", "memory snapshot '%s' is of a sandbox that was not: what runs in it has seen another clock", nameOf(snap)).
				WithHint("start from an image, a filesystem snapshot, or a memory snapshot of a deterministic sandbox")
		}
		spec.Deterministic = from.Deterministic
	}
	return spec, nil
}

// over is a copy of below with the entries of above put over it.
func over(below, above map[string]string) map[string]string {
	if len(below) == 0 {
		return above
	}
	out := maps.Clone(below)
	maps.Copy(out, above)
	return out
}

// originOf says how to start from a snapshot that the caller holds. field is
// what named it, for the refusal of a directory.
func (s *Server) originOf(ctx context.Context, field string, snap sandbox.Snapshot) (origin, error) {
	lineage := snap.Lineage.Below(snap.ID)
	switch snap.Kind {
	case sandbox.MemorySnapshot:
		img, release, err := s.images.acquire(asServer(ctx), snap.ImageID) // the snapshot is the caller's, and so what it needs
		return origin{img: img, from: &snap, lineage: lineage, release: release}, err
	case sandbox.FilesystemSnapshot:
		img, release, err := s.prepared(ctx, snap)
		return origin{img: img, lineage: lineage, release: release}, err
	}
	return origin{}, sandbox.InvalidField(field, "'%s' is a snapshot of the directory %s; one of kind memory or filesystem is accepted", nameOf(snap), snap.Path).
		WithHint("create the sandbox from an image and mount it there: cove snapshot mount %s SANDBOX", nameOf(snap))
}

// useSnapshot finds a snapshot and keeps its content until release.
func (s *Server) useSnapshot(ctx context.Context, ref string) (snap sandbox.Snapshot, release func(), err error) {
	snap, err = s.findSnapshot(ctx, ref)
	if err != nil {
		return snap, nil, err
	}
	release = s.content.use(snap.Content)
	// Again, now that it is held: it may have been deleted in between.
	if snap, err = s.findSnapshot(ctx, snap.ID); err != nil {
		release()
		return snap, nil, err
	}
	return snap, release, nil
}

// preparing is one making of a snapshot's image; img, drop and err are set
// before done is closed.
type preparing struct {
	done chan struct{}
	img  sandbox.Image
	drop func() // of the image: it is held until all who waited have let go of it
	err  error

	holders int // its maker and who waits; guarded by prepareBook.mu
}

// prepareBook shares what is being prepared.
type prepareBook struct {
	mu struct {
		sync.Mutex
		byID map[string]*preparing // by snapshot
	}
}

func (b *prepareBook) leave(p *preparing) {
	b.mu.Lock()
	p.holders--
	last := p.holders == 0
	b.mu.Unlock()
	if last && p.drop != nil {
		p.drop()
	}
}

func (b *prepareBook) init() { b.mu.byID = map[string]*preparing{} }

// prepared holds the image that sandboxes from a filesystem snapshot start
// from, making it if it is not there: once, however many ask at the same time,
// and to the end, whoever leaves.
func (s *Server) prepared(ctx context.Context, snap sandbox.Snapshot) (img sandbox.Image, release func(), err error) {
	if snap.Content.Image != "" {
		img, release, err = s.images.acquire(asServer(ctx), snap.Content.Image)
		if err == nil || !errors.Is(err, sandbox.ErrImageNotFound) {
			return img, release, err
		}
	}
	return s.prepare(ctx, snap)
}

func (s *Server) prepare(ctx context.Context, snap sandbox.Snapshot) (img sandbox.Image, release func(), err error) {
	b := &s.prepares
	b.mu.Lock()
	p := b.mu.byID[snap.ID]
	if p == nil {
		p = &preparing{done: make(chan struct{}), holders: 1}
		b.mu.byID[snap.ID] = p
		// Whoever waits may leave; the content stays held for as long as it takes.
		release := s.content.use(snap.Content)
		go func() {
			defer release()
			p.img, p.drop, p.err = s.makeImage(snap)
			b.mu.Lock()
			delete(b.mu.byID, snap.ID)
			b.mu.Unlock()
			b.leave(p) // before those who wait, which hold it, go on
			close(p.done)
		}()
	}
	p.holders++
	b.mu.Unlock()
	release = sync.OnceFunc(func() { b.leave(p) })
	select {
	case <-p.done:
		err = p.err
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err != nil {
		release()
		return sandbox.Image{}, nil, err
	}
	return p.img, release, nil
}

// prepareTries is how often an image is made that is removed before it is held:
// another snapshot may have had the same.
const prepareTries = 3

// makeImage makes a snapshot's image and holds it.
func (s *Server) makeImage(snap sandbox.Snapshot) (img sandbox.Image, drop func(), err error) {
	ctx, cancel := context.WithTimeout(asServer(context.Background()), prepareTimeout)
	defer cancel()
	defer context.AfterFunc(s.calls.cut, cancel)()
	baseID := snap.Content.Base
	if baseID == "" {
		baseID = snap.ImageID
	}
	base, release, err := s.images.acquire(ctx, baseID)
	if err != nil {
		return img, nil, err
	}
	defer release()
	for try := 1; ; try++ {
		img, drop, err = s.makeImageOnce(ctx, snap, base)
		if try == prepareTries || !errors.Is(err, errContentGone) && !errors.Is(err, sandbox.ErrImageNotFound) {
			break
		}
	}
	if err != nil {
		return img, nil, err
	}
	err = s.store.SetSnapshotImage(ctx, snap.ID, img.ID)
	gone := errors.Is(err, sandbox.ErrNotFound) // deleted meanwhile; those who wait for the image still hold it
	if err != nil || s.about.Sealed {
		s.images.setLoose(map[string]bool{img.ID: true})
	}
	if err != nil && !gone {
		drop()
		return img, nil, err
	}
	return img, drop, nil
}

func (s *Server) makeImageOnce(ctx context.Context, snap sandbox.Snapshot, base sandbox.Image) (img sandbox.Image, drop func(), err error) {
	if img, err = s.node.PrepareImage(ctx, snap, base, ""); err != nil {
		return img, nil, err
	}
	if err = s.images.reserve(ctx, img.ID); err != nil { // until acquire holds it
		return img, nil, err
	}
	defer s.images.drop(img.ID)
	if _, err = s.images.publish(ctx, img, ""); err == nil {
		return s.images.acquire(ctx, img.ID)
	}
	if !errors.Is(err, errContentGone) {
		// Without a record no collection would find it.
		s.untilDone("remove image "+img.ID, func(ctx context.Context) error {
			_, err := s.images.collect(ctx, img.ID, false)
			return err
		})
	}
	return img, nil, err
}

// plan is a sandbox to be made.
type plan struct {
	spec     sandbox.Spec // complete
	img      sandbox.Image
	from     *sandbox.Snapshot
	lineage  sandbox.Lineage
	hasTurn  bool            // for room on the node: it waits no more
	begun    bool            // admitted with others alike: see admitAll
	wanted   context.Context // ends when nobody waits for it any more
	numbered bool            // of several in a run, each is an episode of its own
	fork     string          // id of the running sandbox it is a copy of
	// unclaimed: its id is told to nobody until claim.
	unclaimed bool
}

// origin is what the sandbox of a plan begins with.
func (b plan) origin() sandbox.Origin {
	switch {
	case b.fork != "":
		return sandbox.Origin{Fork: b.fork}
	case b.from != nil:
		return sandbox.Origin{Snapshot: b.from.ID, Kind: b.from.Kind}
	case b.lineage.Parent != "":
		return sandbox.Origin{Snapshot: b.lineage.Parent, Kind: sandbox.FilesystemSnapshot}
	}
	return sandbox.Origin{}
}

// makeSandbox makes a sandbox within its tenant's quota. Where the node is full it waits
// its turn, if the server is told to let creates wait.
func (s *Server) makeSandbox(ctx context.Context, b plan, idem store.Idempotency) (sb sandbox.Sandbox, took time.Duration, err error) {
	if len(b.spec.Secrets) > 0 {
		if err := s.checkSecrets(ctx, "spec.secrets", b.spec.Secrets, b.spec.Network); err != nil {
			return sb, 0, err
		}
	}
	tenant := store.ScopeOf(ctx).Tenant()
	lasts := func() error {
		return firstError(s.runLasts(ctx, b.spec.Rollout.Run), s.leases.takes(tenant, b.spec.Lease))
	}
	if err := lasts(); err != nil {
		return sb, 0, err
	}
	waiting, stop := withWanted(ctx, b.wanted)
	defer stop()
	back, q, err := s.admit(ctx, tenant, b.spec.Resources, b.begun)
	if err != nil {
		return sb, 0, err
	}
	attempt := func() error {
		err := waiting.Err() // its turn, and nobody there
		if err == nil {
			sb, took, err = s.makeOnce(ctx, b, idem)
		}
		return err
	}
	if b.hasTurn {
		err = attempt()
	} else {
		err = s.queue.enter(waiting, place{tenant: tenant, weight: q.Weight, wait: s.cfg.QueueWait, want: b.spec.Resources, count: 1}, attempt)
	}
	if err != nil {
		back()
		return sb, took, err
	}
	if err := lasts(); err != nil { // it ended meanwhile, and did not know of this one
		s.takeBack(sb.ID)
		return sandbox.Sandbox{}, took, err
	}
	return sb, took, nil
}

// withWanted is ctx until wanted ends, too.
func withWanted(ctx, wanted context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	if wanted == nil {
		return ctx, cancel
	}
	stop := context.AfterFunc(wanted, cancel)
	return ctx, func() { stop(); cancel() }
}

// makeOnce makes a sandbox on the node and in the store, or in neither.
//
// The record says running from the start: one write instead of two. Should the
// server die between the two records, Reconcile ends the one (node_lost) or
// kills the other.
func (s *Server) makeOnce(ctx context.Context, b plan, idem store.Idempotency) (sandbox.Sandbox, time.Duration, error) {
	now := s.cfg.Clock().UTC()
	sb := sandbox.Sandbox{
		ID:        sandbox.NewID(s.cfg.Rand),
		Tenant:    store.ScopeOf(ctx).Tenant(),
		Spec:      b.spec,
		ImageID:   b.img.ID,
		Node:      s.about.Name,
		State:     sandbox.Running,
		Episode:   1,
		CreatedAt: now,
		Lineage:   b.lineage,

		NetworkGeneration: 1,
		Unclaimed:         b.unclaimed,
		Origin:            b.origin(),
	}
	sb.Spec = sb.Spec.WithAuthority(sb.ID)
	if b.spec.Timeout > 0 {
		sb.ExpiresAt = now.Add(b.spec.Timeout)
	}
	var err error
	if sb.Spec.Network, err = s.resolveRecordings(ctx, "spec.network", sb.ID, sb.Spec.Network); err != nil {
		return sandbox.Sandbox{}, 0, err
	}
	defer s.creates.begin(sb.ID)()

	recorded := make(chan error, 1)
	go func() {
		got, existed, err := s.store.CreateSandbox(ctx, sb, idem)
		if err == nil && existed {
			// Only another server on the same store could have been faster.
			err = sandbox.Errorf(sandbox.Conflict, "", "sandbox %s was just created with the same key", got.ID).WithHint("ask again")
		}
		recorded <- err
	}()
	var took time.Duration
	var nodeErr error
	if b.from != nil {
		took, nodeErr = s.node.CreateFrom(ctx, sb, b.img, *b.from)
		nodeErr = s.wayOut(ctx, *b.from, nodeErr)
	} else {
		// Most of a create is waiting for a kernel, in line with others: who left
		// is no longer in line. A restore is not begun in vain, and runs to its end.
		making, stop := withWanted(ctx, b.wanted)
		took, nodeErr = s.node.Create(making, sb, b.img)
		stop()
	}
	storeErr := <-recorded

	switch {
	case nodeErr == nil && storeErr == nil:
		s.reservations.bind(sb.ID, sb.Tenant, sb.Spec.Resources) // no end is recorded before creates.begin's is called
		return sb, took, nil
	case nodeErr == nil:
		s.untilDone("kill "+sb.ID, func(ctx context.Context) error {
			err := s.killOnNode(ctx, sb.ID, "its record could not be written")
			s.images.free(sb.ImageID)
			if r := sb.Spec.Network.Record; err == nil && r != nil {
				err = s.dropRecording(ctx, r.ID)
			}
			return err
		})
		return sandbox.Sandbox{}, took, storeErr
	}
	if r := sb.Spec.Network.Record; r != nil {
		s.giveUpRecording(r.ID)
	}
	if !errors.Is(storeErr, sandbox.ErrConflict) {
		// Also after a failed write: it may have happened all the same.
		s.untilDone("forget "+sb.ID, func(ctx context.Context) error {
			err := s.store.ForgetSandbox(ctx, sb.ID)
			s.images.free(sb.ImageID)
			return err
		})
	}
	return sandbox.Sandbox{}, took, nodeErr
}

// wayOut adds to a refusal to restore memory (another machine, another build)
// what still works: the newest filesystem snapshot of the same sandbox, or that
// there is none.
func (s *Server) wayOut(ctx context.Context, from sandbox.Snapshot, err error) error {
	var e *sandbox.Error
	if !errors.As(err, &e) || e.Reason != sandbox.RestoreRefused {
		return err // whose own hint is the right one
	}
	hint := "memory goes only where it came from; a filesystem snapshot starts anywhere, but there is none of sandbox " + from.Sandbox
	snaps, _, lerr := s.store.ListSnapshots(ctx, store.SnapshotFilter{Sandbox: from.Sandbox, Kind: sandbox.FilesystemSnapshot, PageSize: 1})
	switch {
	case lerr != nil || from.Sandbox == "":
		hint = "memory goes only where it came from; a filesystem snapshot of the same sandbox starts anywhere"
	case len(snaps) > 0:
		hint = "memory goes only where it came from; the filesystem snapshot of the same sandbox still starts: cove create --snapshot " + nameOf(snaps[0])
	}
	return e.WithHint("%s", hint)
}
