package server

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/cove-sandbox/cove/internal/notify"
	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// progressEvery is the shortest time between two reports of progress.
const progressEvery = 100 * time.Millisecond

// snapshotTimeout bounds taking a snapshot.
const snapshotTimeout = 30 * time.Minute

// nameOf is what people call a snapshot.
func nameOf(snap sandbox.Snapshot) string {
	if snap.Name != "" {
		return snap.Name
	}
	return snap.ID
}

// findSnapshot asks the store, and on a miss says what was probably meant.
func (s *Server) findSnapshot(ctx context.Context, ref string) (sandbox.Snapshot, error) {
	snap, err := s.store.GetSnapshot(ctx, ref)
	if !errors.Is(err, sandbox.ErrNotFound) {
		return snap, err
	}
	e := &sandbox.Error{Class: sandbox.NotFound, Msg: "no snapshot '" + ref + "'", Hint: `"cove snapshot ls" lists them`}
	var names []string
	if snaps, _, lerr := s.store.ListSnapshots(ctx, store.SnapshotFilter{PageSize: maxPage}); lerr == nil {
		for _, snap := range snaps {
			if snap.Name != "" {
				names = append(names, snap.Name)
			}
		}
	}
	slices.Sort(names)
	if did := sandbox.DidYouMean(ref, names); did != "" {
		e.Msg += "; " + did
	}
	return sandbox.Snapshot{}, e
}

// taking is a snapshot to be taken.
type taking struct {
	id     string // that it will have; "" = any
	kind   sandbox.SnapshotKind
	path   string
	name   string
	labels map[string]string
	stop   bool
	ttl    time.Duration // 0 = it does not expire
}

// CreateSnapshotRequest asks for a snapshot of a sandbox.
type CreateSnapshotRequest struct {
	Sandbox string
	Kind    sandbox.SnapshotKind // "" = memory
	Path    string               // of a directory
	Name    string
	Labels  map[string]string
	Stop    bool          // the sandbox ends with it
	TTL     time.Duration // 0 = it does not expire
	Key     string        // makes it idempotent
}

// TakenSnapshot is a snapshot that was taken.
type TakenSnapshot struct {
	Snapshot  sandbox.Snapshot
	Unchanged bool          // nothing happened since an earlier one, which this is
	Paused    time.Duration // how long the sandbox stood still
}

// CreateSnapshot takes a snapshot while its caller waits, and tells it how far it
// is. One that leaves before it is on record leaves nothing, and the sandbox as it
// was: nobody was told an id. From the record on it is finished, the end of a
// sandbox that stops with it too.
func (s *Server) CreateSnapshot(ctx context.Context, r CreateSnapshotRequest, progress func(sandbox.Progress)) (out TakenSnapshot, err error) {
	ctx, call, err := s.begin(ctx, "snapshot.create", about("sandbox", r.Sandbox), about("name", r.Name))
	if err != nil {
		return out, err
	}
	defer call.end(&err)
	if r.Stop {
		err = call.needs(writes("stop", "sandboxes"))
	}
	t := taking{kind: cmp.Or(r.Kind, sandbox.MemorySnapshot), path: r.Path, name: r.Name, labels: r.Labels, stop: r.Stop, ttl: r.TTL}
	if r.Key != "" {
		t.id = keyedID(store.ScopeOf(ctx).Tenant(), r.Key)
	}
	err = firstError(err, sandbox.ValidateIdempotencyKey("idempotency_key", r.Key), validID("sandbox", r.Sandbox), sandbox.ValidateSnapshotKind(t.kind, t.path),
		sandbox.ValidateLabels("labels", t.labels), sandbox.ValidateSnapshotTTL(t.ttl))
	if err == nil && t.name != "" {
		err = sandbox.ValidateSnapshotName("name", t.name)
	}
	if err != nil {
		return out, err
	}
	if snap, found, err := s.taken(ctx, r.Sandbox, t); err != nil || found {
		return TakenSnapshot{Snapshot: snap}, err
	}

	work, cancel := context.WithTimeout(ctx, snapshotTimeout)
	defer cancel()
	var steps notify.Latest[sandbox.Progress]
	finished := make(chan error, 1)
	op := sandbox.NewID(s.cfg.Rand)
	go func() {
		var err error
		out.Snapshot, out.Unchanged, out.Paused, err = s.takeSnapshot(work, r.Sandbox, t, op)
		finished <- err
	}()
	go follow(work, s.node, op, steps.Set)
	for {
		p, changed := steps.Get()
		if p.Step != "" && p.Step != "done" && ctx.Err() == nil { // the last one is the snapshot
			call.begun()
			progress(p)
		}
		pause := time.NewTimer(progressEvery)
		select {
		case <-pause.C:
		case err := <-finished:
			pause.Stop()
			return out, err
		}
		select {
		case <-changed:
		case err := <-finished:
			return out, err
		}
	}
}

// takeSnapshot makes content and its record, or neither. Where nothing happened
// since an earlier snapshot, that one is the answer.
func (s *Server) takeSnapshot(ctx context.Context, id string, t taking, op string) (snap sandbox.Snapshot, unchanged bool, paused time.Duration, err error) {
	sb, err := s.get(ctx, id)
	if err == nil {
		err = sb.Usable()
	}
	if err != nil {
		return snap, false, 0, err
	}
	if err := s.admitSnapshot(ctx); err != nil {
		return snap, false, 0, err
	}
	end, err := s.content.begin(ctx)
	if err != nil {
		return snap, false, 0, err
	}
	defer end()
	r := node.SnapshotRequest{Kind: t.kind, Path: t.path, Stop: t.stop, Keep: true, Op: op}
	paused, recorded, err := s.stage(ctx, id, r, func(work context.Context, c sandbox.Content) (err error) {
		snap, unchanged, err = s.recordSnapshot(work, sb, t, c)
		return err
	})
	switch {
	case err != nil && recorded:
		return snap, false, 0, s.explain(context.WithoutCancel(ctx), id, err)
	case err != nil:
		return snap, false, paused, s.gaveUp(ctx, id, err)
	}
	work, cancel := context.WithTimeout(context.WithoutCancel(ctx), createTimeout)
	defer cancel()
	if t.stop {
		return snap, unchanged, paused, s.stopped(work, sb)
	}
	if unchanged {
		s.returned(sb, snap)
	}
	return snap, unchanged, paused, nil
}

// stage takes a snapshot in two steps: it has the content made, has it recorded,
// and only then lets the sandbox end that is to stop with it. A crash in between
// leaves both. What is not recorded is let go.
func (s *Server) stage(ctx context.Context, id string, r node.SnapshotRequest, record func(work context.Context, c sandbox.Content) error) (paused time.Duration, recorded bool, err error) {
	p, err := s.node.PrepareSnapshot(ctx, id, r)
	if err != nil {
		return 0, false, err
	}
	work, cancel, err := onRecord(ctx)
	if err == nil {
		defer cancel()
		err = record(work, p.Content)
	}
	if err != nil {
		s.untilDone("abort the snapshot of "+id, func(ctx context.Context) error {
			if err := s.node.AbortSnapshot(ctx, p.Token); err != nil {
				return err
			}
			s.content.want()
			return nil
		})
		return p.Paused, false, err
	}
	return p.Paused, true, s.node.CommitSnapshot(work, p.Token)
}

// onRecord is the last moment at which a caller that left, or a drain, stops a
// snapshot. What is begun with the context it gives is finished.
func onRecord(ctx context.Context) (work context.Context, cancel context.CancelFunc, err error) {
	if err := ctx.Err(); err != nil {
		return nil, nil, err
	}
	work, cancel = context.WithTimeout(context.WithoutCancel(ctx), createTimeout)
	return work, cancel, nil
}

// gaveUp is the error of a snapshot that was not made. What there is of it is
// collected.
func (s *Server) gaveUp(ctx context.Context, id string, err error) error {
	if s.littered(ctx) {
		s.content.want()
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return s.explain(ctx, id, err)
}

// letGo has content collected that will have no record.
func (s *Server) letGo(c sandbox.Content) {
	s.untilDone("release "+c.Manifest, func(ctx context.Context) error {
		if err := s.node.Release(ctx, c); err != nil {
			return err
		}
		if c.Manifest != "" { // else it was never in the store, which a collection lists whole: 2.6 ms beside each grade's command
			s.content.want()
		}
		return nil
	})
}

// recordSnapshot makes the record of content that was just made of sb, unless
// there is one that it could be no other than.
func (s *Server) recordSnapshot(ctx context.Context, sb sandbox.Sandbox, t taking, c sandbox.Content) (snap sandbox.Snapshot, unchanged bool, err error) {
	if c.Same != "" {
		old, found, err := s.recordOf(ctx, sb.ID, t, c.Same)
		if err != nil {
			return snap, false, err
		}
		if found && t.ttl == 0 && old.ExpiresAt.IsZero() && (t.name == "" || t.name == old.Name) && (len(t.labels) == 0 || maps.Equal(t.labels, old.Labels)) {
			return old, true, nil
		}
		// A name, labels or an end of its own were asked for, or the old record was
		// deleted and its content not collected yet (it cannot be while we are
		// here): a record of its own, of the same content, which costs nothing.
		unchanged = found
	}
	snap, err = s.store.CreateSnapshot(ctx, s.newSnapshot(sb, t, c))
	return snap, unchanged, err
}

// recordOf finds the newest record of some content that a sandbox was frozen
// into before. Another sandbox's may have the same content by chance, and
// another image under it.
func (s *Server) recordOf(ctx context.Context, id string, t taking, manifest string) (snap sandbox.Snapshot, found bool, err error) {
	f := store.SnapshotFilter{Sandbox: id, Kind: t.kind}
	for {
		page, next, err := s.store.ListSnapshots(ctx, f)
		if err != nil {
			return snap, false, err
		}
		for _, snap := range page {
			if snap.Content.Manifest == manifest && snap.Path == t.path {
				return snap, true, nil
			}
		}
		if next == "" {
			return snap, false, nil
		}
		f.PageToken = next
	}
}

// newSnapshot is a record of content that was just made of sb.
func (s *Server) newSnapshot(sb sandbox.Sandbox, t taking, c sandbox.Content) sandbox.Snapshot {
	c.Same = ""
	sb.Spec.Lease = "" // what comes of it later ends with its own maker
	snap := sandbox.Snapshot{
		ID:        cmp.Or(t.id, sandbox.NewID(s.cfg.Rand)),
		Tenant:    sb.Tenant,
		Name:      t.name,
		Kind:      t.kind,
		Labels:    t.labels,
		Sandbox:   sb.ID,
		Lineage:   sb.Lineage,
		Spec:      sb.Spec,
		ImageID:   sb.ImageID,
		Path:      t.path,
		Node:      s.about.Name,
		CreatedAt: s.cfg.Clock().UTC(),
		Content:   c,
	}
	if t.ttl > 0 {
		snap.ExpiresAt = snap.CreatedAt.Add(t.ttl)
	}
	return snap
}

// stopped records the end of a sandbox that was stopped into a snapshot.
func (s *Server) stopped(ctx context.Context, sb sandbox.Sandbox) error {
	_, err := s.recordKill(ctx, sb.ID, sandbox.End{Cause: sandbox.KilledByUser, Detail: "stopped by a snapshot", At: s.cfg.Clock().UTC()}, false)
	return err
}

// returned moves a sandbox below a snapshot that it is again; below a new one it
// came with the record.
func (s *Server) returned(sb sandbox.Sandbox, snap sandbox.Snapshot) {
	if snap.Kind == sandbox.DirectorySnapshot {
		return // a part of it is no point to return to
	}
	s.untilDone("lineage of "+sb.ID, func(ctx context.Context) error {
		_, err := s.store.UpdateSandbox(ctx, sb.ID, func(sb *sandbox.Sandbox) error {
			sb.Lineage = snap.Lineage.Below(snap.ID)
			return nil
		})
		if errors.Is(err, sandbox.ErrEnded) || errors.Is(err, sandbox.ErrNotFound) {
			return nil
		}
		return err
	})
}

// GetSnapshot finds a snapshot by its name or id.
func (s *Server) GetSnapshot(ctx context.Context, ref string) (snap sandbox.Snapshot, err error) {
	ctx, call, err := s.begin(ctx, "snapshot.get", about("id", ref))
	if err != nil {
		return snap, err
	}
	defer call.end(&err)
	if err := sandbox.ValidateSnapshotRef("id", ref); err != nil {
		return snap, err
	}
	return s.findSnapshot(ctx, ref)
}

// ListSnapshots lists one page, and where the next one begins: "" after the last.
func (s *Server) ListSnapshots(ctx context.Context, f store.SnapshotFilter) (page []sandbox.Snapshot, next string, err error) {
	ctx, call, err := s.begin(ctx, "snapshot.list", about("sandbox", f.Sandbox))
	if err != nil {
		return nil, "", err
	}
	defer call.end(&err)
	err = firstError(validPage(f.PageSize), sandbox.ValidateLabels("labels", f.Labels))
	if err == nil && f.Sandbox != "" {
		err = validID("sandbox", f.Sandbox)
	}
	switch f.Kind {
	case "", sandbox.MemorySnapshot, sandbox.FilesystemSnapshot, sandbox.DirectorySnapshot:
	default:
		err = firstError(err, sandbox.ValidateSnapshotKind(f.Kind, ""))
	}
	if err != nil {
		return nil, "", err
	}
	page, next, err = s.store.ListSnapshots(ctx, f)
	return page, next, wrongToken(f.PageToken, err)
}

// DeleteSnapshot forgets the record and has the content removed. It says how much
// that freed, if that is known soon.
func (s *Server) DeleteSnapshot(ctx context.Context, ref string) (freed int64, err error) {
	ctx, call, err := s.begin(ctx, "snapshot.delete", about("id", ref))
	if err != nil {
		return 0, err
	}
	defer call.end(&err)
	if err := sandbox.ValidateSnapshotRef("id", ref); err != nil {
		return 0, err
	}
	snap, err := s.findSnapshot(ctx, ref)
	if err != nil {
		return 0, err
	}
	if freed, err = s.deleteSnapshot(ctx, snap); err != nil {
		return 0, err
	}
	s.collectSoon(ctx)
	return freed, nil
}

// deleteSnapshot forgets a snapshot; its content and the image prepared of it go
// with a collection, the image not before the last sandbox that runs from it.
// freed is what its tenant holds no longer.
func (s *Server) deleteSnapshot(ctx context.Context, snap sandbox.Snapshot) (freed int64, err error) {
	freed, err = s.holdings.remove(ctx, snap, func() error {
		_, err := s.store.DeleteSnapshot(ctx, snap.ID)
		return err
	})
	if errors.Is(err, sandbox.ErrNotFound) {
		_, err = s.findSnapshot(ctx, snap.ID) // with its hint
	}
	return freed, err
}

// expireSnapshots deletes snapshots whose time is over, as their owner could.
// They are found in turn: what cannot be deleted is left for the next time.
func (s *Server) expireSnapshots(ctx context.Context) {
	ctx = asServer(ctx)
	snaps, err := s.allSnapshots(ctx, store.SnapshotFilter{ExpiredAt: s.cfg.Clock()})
	gone := 0
	for _, snap := range snaps {
		_, e := s.deleteSnapshot(ctx, snap)
		switch {
		case e == nil:
			gone++
		case !errors.Is(e, sandbox.ErrNotFound):
			err = firstError(err, e)
		}
	}
	if gone > 0 {
		s.content.want()
		s.log.Info("snapshots expired", "count", gone)
	}
	if err != nil && ctx.Err() == nil {
		s.log.Warn("cannot delete expired snapshots", "err", err)
	}
}

// MountSnapshot puts the snapshot of a directory into a sandbox, as a mount or
// with unpack as files; path "" is where it was taken.
func (s *Server) MountSnapshot(ctx context.Context, id, ref, path string, unpack bool) (err error) {
	ctx, call, err := s.begin(ctx, "snapshot.mount", about("sandbox", id), about("snapshot", ref))
	if err != nil {
		return err
	}
	defer call.end(&err)
	if err := firstError(call.needs(writes("path", "files")), validID("sandbox", id), sandbox.ValidateSnapshotRef("snapshot", ref)); err != nil {
		return err
	}
	if path != "" {
		check := sandbox.ValidateMountPath
		if unpack {
			check = sandbox.ValidatePath
		}
		if err := check("path", path); err != nil {
			return err
		}
	}
	snap, release, err := s.useSnapshot(ctx, ref)
	if err != nil {
		return err
	}
	defer release()
	if snap.Kind != sandbox.DirectorySnapshot {
		return sandbox.InvalidField("snapshot", "'%s' is of kind %s; one of kind directory is accepted", nameOf(snap), snap.Kind).
			WithHint("start a sandbox from it instead: cove create --snapshot %s", nameOf(snap))
	}
	if err := s.node.Mount(ctx, id, snap, cmp.Or(path, snap.Path), unpack); err != nil {
		return s.explain(ctx, id, err)
	}
	return nil
}

// VerifySnapshot reads all content of a snapshot, and says how much that was.
func (s *Server) VerifySnapshot(ctx context.Context, ref string) (bytes int64, err error) {
	ctx, call, err := s.begin(ctx, "snapshot.verify", about("id", ref))
	if err != nil {
		return 0, err
	}
	defer call.end(&err)
	if err := sandbox.ValidateSnapshotRef("id", ref); err != nil {
		return 0, err
	}
	snap, release, err := s.useSnapshot(ctx, ref)
	if err != nil {
		return 0, err
	}
	defer release()
	return s.node.Verify(ctx, snap.Content)
}

// DownloadSnapshot sends the files of a snapshot as a tar; with headOnly it only
// looks whether it could.
func (s *Server) DownloadSnapshot(ctx context.Context, ref string, headOnly bool, to Sending) (err error) {
	ctx, call, err := s.begin(ctx, "snapshot.download_tar", about("id", ref))
	if err != nil {
		return err
	}
	defer call.end(&err)
	if err := sandbox.ValidateSnapshotRef("id", ref); err != nil {
		return err
	}
	snap, release, err := s.useSnapshot(ctx, ref)
	if err != nil {
		return err
	}
	defer release()
	if snap.Kind == sandbox.MemorySnapshot {
		return sandbox.InvalidField("id", "'%s' is of kind memory, which is no tar; filesystem and directory are", nameOf(snap))
	}
	body := &firstWrite{to: to, what: FileContent{Length: -1}}
	if !headOnly {
		err = s.node.Tar(ctx, snap.Content, body)
	}
	return body.finish(err)
}
