package server

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"net/http"
	"slices"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
	"github.com/cove-sandbox/cove/wire"
)

type snapshotService struct{ *Server }

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

// Create takes a snapshot while its caller waits. One that leaves before it is on
// record leaves nothing, and the sandbox as it was: nobody was told an id. From
// the record on it is finished, the end of a sandbox that stops with it too.
func (s snapshotService) Create(ctx context.Context, r *connect.Request[covev1.CreateSnapshotRequest], out *connect.ServerStream[covev1.CreateSnapshotEvent]) error {
	if s.calls.isDraining() {
		return stopping()
	}
	m := r.Msg
	t := taking{kind: sandbox.SnapshotKind(m.Kind), path: m.Path, name: m.Name, labels: m.Labels, stop: m.Stop}
	if t.kind == "" {
		t.kind = sandbox.MemorySnapshot
	}
	if m.IdempotencyKey != "" {
		t.id = keyedID(store.ScopeOf(ctx).Tenant(), m.IdempotencyKey)
	}
	err := firstError(sandbox.ValidateIdempotencyKey("idempotency_key", m.IdempotencyKey), validID("sandbox", m.Sandbox), sandbox.ValidateSnapshotKind(t.kind, t.path), sandbox.ValidateLabels("labels", t.labels))
	if err == nil {
		t.ttl, err = wire.DurationFrom("ttl", m.Ttl)
	}
	if err == nil {
		err = sandbox.ValidateSnapshotTTL(t.ttl)
	}
	if err == nil && t.name != "" {
		err = sandbox.ValidateSnapshotName("name", t.name)
	}
	if err != nil {
		return err
	}

	if snap, found, err := s.taken(ctx, m.Sandbox, t); err != nil {
		return err
	} else if found {
		return out.Send(&covev1.CreateSnapshotEvent{Step: "done", Done: snap.Content.Size, Total: snap.Content.Size, Snapshot: wire.Snapshot(snap)})
	}

	// The call is counted until the work is done, so that a drain waits for it;
	// a drain that has waited long enough ends it.
	work, cancel := context.WithTimeout(ctx, snapshotTimeout)
	defer cancel()
	defer context.AfterFunc(s.calls.cut, cancel)()
	var progress latest
	progress.init()
	type result struct {
		snap      sandbox.Snapshot
		unchanged bool
		paused    time.Duration
		err       error
	}
	finished := make(chan result, 1)
	go func() {
		var res result
		res.snap, res.unchanged, res.paused, res.err = s.takeSnapshot(work, m.Sandbox, t, progress.report)
		finished <- res
	}()
	done := func(res result) error {
		if res.err != nil {
			return res.err
		}
		c := res.snap.Content
		return out.Send(&covev1.CreateSnapshotEvent{Step: "done", Done: c.Size, Total: c.Size, Snapshot: wire.Snapshot(res.snap),
			Unchanged: res.unchanged, Paused: durationpb.New(res.paused)})
	}
	for {
		p, changed := progress.look()
		if p.Step != "" && p.Step != "done" && ctx.Err() == nil { // the last event is ours, with the snapshot
			_ = out.Send(wire.SnapshotEvent(p)) // whoever left is noticed by ctx
		}
		pause := time.NewTimer(pullEvery)
		select {
		case <-pause.C:
		case res := <-finished:
			pause.Stop()
			return done(res)
		}
		select {
		case <-changed:
		case res := <-finished:
			return done(res)
		}
	}
}

// latest is the newest progress of something, for one who looks now and then.
type latest struct {
	mu      sync.Mutex
	last    sandbox.Progress
	changed chan struct{} // closed and replaced on each progress
}

func (l *latest) init() { l.changed = make(chan struct{}) }

func (l *latest) report(p sandbox.Progress) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last = p
	close(l.changed)
	l.changed = make(chan struct{})
}

func (l *latest) look() (sandbox.Progress, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.last, l.changed
}

// takeSnapshot makes content and its record, or neither. Where nothing happened
// since an earlier snapshot, that one is the answer.
func (s *Server) takeSnapshot(ctx context.Context, id string, t taking, progress func(sandbox.Progress)) (snap sandbox.Snapshot, unchanged bool, paused time.Duration, err error) {
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
	r := SnapshotRequest{Kind: t.kind, Path: t.path, Stop: t.stop, Keep: true, Progress: progress}
	recorded := false
	record := func(c sandbox.Content) (err error) {
		work, cancel, err := onRecord(ctx)
		if err != nil {
			return err
		}
		defer cancel()
		snap, unchanged, err = s.recordSnapshot(work, sb, t, c)
		recorded = err == nil
		return err
	}
	if t.stop {
		r.Commit = record // before the sandbox is gone: a crash in between leaves both
	}
	c, paused, err := s.node.Snapshot(ctx, id, r)
	switch {
	case err != nil && recorded:
		return snap, false, 0, s.explain(context.WithoutCancel(ctx), id, err)
	case err != nil:
		return snap, false, 0, s.gaveUp(ctx, id, err)
	case !recorded:
		if err := record(c); err != nil {
			s.letGo(c)
			return snap, false, paused, err
		}
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
	if s.node.Litter() {
		s.content.want()
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return s.explain(ctx, id, err)
}

// letGo has content collected that will have no record.
func (s *Server) letGo(c sandbox.Content) {
	s.owe("release "+c.Manifest, func(ctx context.Context) error {
		if err := s.node.Release(ctx, c); err != nil {
			return err
		}
		s.content.want()
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
		Node:      s.node.Name(),
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
	s.owe("lineage of "+sb.ID, func(ctx context.Context) error {
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

func (s snapshotService) Get(ctx context.Context, r *connect.Request[covev1.GetSnapshotRequest]) (*connect.Response[covev1.GetSnapshotResponse], error) {
	if err := sandbox.ValidateSnapshotRef("id", r.Msg.Id); err != nil {
		return nil, err
	}
	snap, err := s.findSnapshot(ctx, r.Msg.Id)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&covev1.GetSnapshotResponse{Snapshot: wire.Snapshot(snap)}), nil
}

func (s snapshotService) List(ctx context.Context, r *connect.Request[covev1.ListSnapshotsRequest]) (*connect.Response[covev1.ListSnapshotsResponse], error) {
	m := r.Msg
	if m.PageSize < 0 || m.PageSize > maxPage {
		return nil, sandbox.InvalidField("page_size", "%d is not accepted; 1 to %d is, or 0 for 100", m.PageSize, maxPage)
	}
	f := store.SnapshotFilter{Labels: m.Labels, Sandbox: m.Sandbox, Kind: sandbox.SnapshotKind(m.Kind), PageSize: int(m.PageSize), PageToken: m.PageToken}
	err := sandbox.ValidateLabels("labels", m.Labels)
	if err == nil && m.Sandbox != "" {
		err = validID("sandbox", m.Sandbox)
	}
	switch f.Kind {
	case "", sandbox.MemorySnapshot, sandbox.FilesystemSnapshot, sandbox.DirectorySnapshot:
	default:
		err = firstError(err, sandbox.ValidateSnapshotKind(f.Kind, ""))
	}
	if err != nil {
		return nil, err
	}
	snaps, next, err := s.store.ListSnapshots(ctx, f)
	if err != nil {
		if m.PageToken != "" && errors.Is(err, sandbox.ErrInvalid) {
			err = sandbox.InvalidField("page_token", "not one of ours; the next_page_token of a List with the same filter is accepted")
		}
		return nil, err
	}
	out := &covev1.ListSnapshotsResponse{NextPageToken: next}
	for _, snap := range snaps {
		out.Snapshots = append(out.Snapshots, wire.Snapshot(snap))
	}
	return connect.NewResponse(out), nil
}

// Delete forgets the record and has the content removed.
func (s snapshotService) Delete(ctx context.Context, r *connect.Request[covev1.DeleteSnapshotRequest]) (*connect.Response[covev1.DeleteSnapshotResponse], error) {
	if err := sandbox.ValidateSnapshotRef("id", r.Msg.Id); err != nil {
		return nil, err
	}
	snap, err := s.findSnapshot(ctx, r.Msg.Id)
	if err == nil {
		err = s.deleteSnapshot(ctx, snap)
	}
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&covev1.DeleteSnapshotResponse{Freed: s.collectSoon(ctx)}), nil
}

// deleteSnapshot forgets a snapshot; its content and the image prepared of it go
// with a collection, the image not before the last sandbox that runs from it.
func (s *Server) deleteSnapshot(ctx context.Context, snap sandbox.Snapshot) error {
	_, err := s.store.DeleteSnapshot(ctx, snap.ID)
	if errors.Is(err, sandbox.ErrNotFound) {
		_, err = s.findSnapshot(ctx, snap.ID) // with its hint
	}
	return err
}

// expireSnapshots deletes snapshots whose time is over, as their owner could.
// They are found in turn: what cannot be deleted is left for the next time.
func (s *Server) expireSnapshots(ctx context.Context) {
	ctx = asServer(ctx)
	snaps, err := s.allSnapshots(ctx, store.SnapshotFilter{ExpiredAt: s.cfg.Clock()})
	gone := 0
	for _, snap := range snaps {
		e := s.deleteSnapshot(ctx, snap)
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

func (s snapshotService) Mount(ctx context.Context, r *connect.Request[covev1.MountSnapshotRequest]) (*connect.Response[covev1.MountSnapshotResponse], error) {
	m := r.Msg
	if err := firstError(validID("sandbox", m.Sandbox), sandbox.ValidateSnapshotRef("snapshot", m.Snapshot)); err != nil {
		return nil, err
	}
	if m.Path != "" {
		check := sandbox.ValidateMountPath
		if m.Unpack {
			check = sandbox.ValidatePath
		}
		if err := check("path", m.Path); err != nil {
			return nil, err
		}
	}
	snap, release, err := s.useSnapshot(ctx, m.Snapshot)
	if err != nil {
		return nil, err
	}
	defer release()
	if snap.Kind != sandbox.DirectorySnapshot {
		return nil, sandbox.InvalidField("snapshot", "'%s' is of kind %s; one of kind directory is accepted", nameOf(snap), snap.Kind).
			WithHint("start a sandbox from it instead: cove create --snapshot %s", nameOf(snap))
	}
	path := m.Path
	if path == "" {
		path = snap.Path
	}
	if err := s.node.Mount(ctx, m.Sandbox, snap, path, m.Unpack); err != nil {
		return nil, s.explain(ctx, m.Sandbox, err)
	}
	return connect.NewResponse(&covev1.MountSnapshotResponse{}), nil
}

func (s snapshotService) Verify(ctx context.Context, r *connect.Request[covev1.VerifySnapshotRequest]) (*connect.Response[covev1.VerifySnapshotResponse], error) {
	if err := sandbox.ValidateSnapshotRef("id", r.Msg.Id); err != nil {
		return nil, err
	}
	snap, release, err := s.useSnapshot(ctx, r.Msg.Id)
	if err != nil {
		return nil, err
	}
	defer release()
	n, err := s.node.Verify(ctx, snap.Content)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&covev1.VerifySnapshotResponse{Bytes: n}), nil
}

// getSnapshotTar is GET /v1/snapshots/{id}/tar.
func (s *Server) getSnapshotTar(w http.ResponseWriter, r *http.Request) error {
	id := r.PathValue("id")
	if err := sandbox.ValidateSnapshotRef("id", id); err != nil {
		return err
	}
	snap, release, err := s.useSnapshot(r.Context(), id)
	if err != nil {
		return err
	}
	defer release()
	if snap.Kind == sandbox.MemorySnapshot {
		return sandbox.InvalidField("id", "'%s' is of kind memory, which is no tar; filesystem and directory are", nameOf(snap))
	}
	w.Header().Set("Content-Type", "application/x-tar")
	if r.Method == http.MethodHead {
		return nil
	}
	body := &firstByte{ResponseWriter: w}
	if err := s.node.Tar(r.Context(), snap.Content, body); err != nil {
		if !body.sent {
			w.Header().Del("Content-Type")
			return err
		}
		s.log.Warn("a snapshot's tar broke off", "snapshot", snap.ID, "err", err)
		panic(http.ErrAbortHandler) // no client takes a broken body for a whole one
	}
	return nil
}

// firstByte knows whether anything was sent: up to then an error can be
// answered.
type firstByte struct {
	http.ResponseWriter
	sent bool
}

func (w *firstByte) Write(p []byte) (int, error) {
	w.sent = w.sent || len(p) > 0
	return w.ResponseWriter.Write(p)
}
