package agent

import (
	"context"
	"io"
	"os"
	"slices"
	"time"

	"github.com/cove-sandbox/cove/cas"
	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/snapshot"
)

// unchanged is the last snapshot of a kind and what had happened until then.
// Nothing has since if nothing was asked of the sandbox and no process was in
// it that could have done something by itself.
type unchanged map[sandbox.SnapshotKind]mark

type mark struct {
	touched int64
	path    string
	content sandbox.Content
}

// PrepareSnapshot makes the content of a snapshot, complete and durable, or
// nothing. With Stop the sandbox stands still until its commit or abort, so that
// nothing happens between the state and the end.
func (n *Node) PrepareSnapshot(ctx context.Context, id string, r node.SnapshotRequest) (p node.Prepared, err error) {
	const op = "node.snapshot"
	if err := n.call(); err != nil {
		return p, err
	}
	defer n.calls.Done()
	if n.states == nil {
		return p, sandbox.Errorf(sandbox.Unsupported, op, "this node keeps no state")
	}
	if r.TTL < 0 || r.TTL > node.MaxHold {
		return p, sandbox.InvalidField("ttl", "%s is not accepted; at most %s is", r.TTL, node.MaxHold)
	}
	report, over := n.progress.begin(r.Op)
	defer over()
	b, err := n.find(ctx, id)
	if err != nil {
		return p, err
	}
	stand := &stand{n: n, b: b}
	if r.Kind == sandbox.MemorySnapshot {
		p.Content, p.Paused, err = n.snapshotMemory(ctx, stand, r, report)
	} else {
		p.Content, p.Paused, err = n.snapshotFiles(ctx, stand, r, report)
	}
	if err == nil && r.Stop && ctx.Err() != nil {
		err = contextError(op, ctx)
	}
	if err != nil || !r.Stop {
		stand.leave(true)
	}
	if err != nil {
		n.letGo(p.Content)
		return node.Prepared{}, sandbox.WithOp(op, err)
	}
	report(sandbox.Progress{Step: "done", Done: p.Content.Size, Total: p.Content.Size})
	n.stage(&p, stand, r)
	return p, nil
}

// snapshotMemory leaves a sandbox on standby where it is.
func (n *Node) snapshotMemory(ctx context.Context, s *stand, r node.SnapshotRequest, report func(sandbox.Progress)) (c sandbox.Content, paused time.Duration, err error) {
	b := s.b
	if s.giveBack, err = n.own(ctx, b); err != nil {
		return c, 0, err
	}
	n.mu.Lock()
	k, cold, was := b.kernel, b.cold, b.sb.Standby
	n.mu.Unlock()
	if cold != nil { // it is its own snapshot
		c = *cold
		c.Stored = 0
		n.states.hold(cas.ID(c.Manifest)) // also if it wakes before the caller has named it
		return c, 0, nil
	}
	if r.Keep && !r.Stop {
		if m, ok := n.sameAs(ctx, b, r, 0); ok {
			return m, 0, nil
		}
	}
	touched, quiet := n.quiet(ctx, b, k, 0)
	if r.Stop && was == sandbox.Awake {
		if err := s.freeze(); err != nil {
			return c, 0, err
		}
	}
	report(sandbox.Progress{Step: "freeze"})
	// The caller may leave: what is frozen is thawed all the same.
	c, paused, err = n.checkpoint(ctx, b, k, r.Keep, false, report)
	if err != nil {
		return c, 0, n.explain(b, k, err)
	}
	if r.Keep && quiet && !r.Stop {
		n.remember(b, r, mark{touched: touched, content: c})
	}
	return c, paused, nil
}

// checkpoint writes the state of a kernel to a directory and, with keep, from
// there to the store, of which it tells: the sandbox runs on by then. The
// directory stays as long as it pays. soon says that somebody will wait for it to be
// restored.
func (n *Node) checkpoint(ctx context.Context, b *box, k runtime.Kernel, keep, soon bool, tell func(sandbox.Progress)) (c sandbox.Content, paused time.Duration, err error) {
	ck, ok := k.(runtime.Checkpointer)
	if !ok {
		return c, 0, b.class.unsupported("save memory")
	}
	dir, undo, err := n.states.scratch()
	if err != nil {
		return c, 0, err
	}
	offered := false
	defer func() {
		if !offered {
			undo()
		}
	}()
	position := n.recordings.get(b.id).position() // what is under way now breaks off in what is made of it
	var opt runtime.CheckpointOptions
	var of *lineage
	if opt.Follow = keep; keep { // children of a fork have one directory, which is whole
		var done func()
		if of, done = n.since(ctx, b, k, soon); of != nil {
			opt.Since = &of.pages
		}
		defer done()
	}
	start := time.Now()
	cp, err := ck.Checkpoint(ctx, dir, opt)
	paused = time.Since(start)
	if err != nil {
		return c, 0, err
	}
	cp.Class = b.class.Name
	if err := describe(dir, cp); err != nil {
		return c, 0, err
	}
	if !keep {
		if n.states.cfg.Sealed {
			if err := ownPages(dir); err != nil {
				return c, 0, asDiskError(err)
			}
		}
		c = sandbox.Content{Plain: "fork-" + n.states.next(), Size: sizeOf(dir), Build: cp.Build}
		n.states.offer(c.Plain, dir, cp, true)
		offered = true
	} else {
		tell(sandbox.Progress{Step: "store", Total: sizeOf(dir)})
		since := of.continued(cp)
		if c, err = n.states.store(ctx, dir, cp, since); err != nil {
			n.litter.Store(true) // what is there of it serves nobody
			return c, 0, err
		}
		n.descend(b, k, cp, c.Manifest)
		// Of a sleeper too: the next use may be in a year, but is more often in
		// a minute, and reading it back takes 10 ms for 10 MiB, 60 for 100.
		if since == nil || n.states.cfg.KeepPlain >= 0 && n.states.extend(of, dir, cp) {
			n.states.offer(c.Manifest, dir, cp, false)
			offered = true
		}
	}
	n.mu.Lock()
	c.KernelClass, c.Base, c.Needs, c.Replay = cp.Class, b.sb.ImageID, slices.Clone(b.needs), position
	if b.clock != nil {
		c.Clock = b.clock.reading()
	}
	n.mu.Unlock()
	return c, paused, nil
}

// snapshotFiles wakes the sandbox: what is asked for is inside.
func (n *Node) snapshotFiles(ctx context.Context, s *stand, r node.SnapshotRequest, report func(sandbox.Progress)) (c sandbox.Content, paused time.Duration, err error) {
	b := s.b
	if _, s.release, err = n.hold(ctx, b.id); err != nil {
		return c, 0, err
	}
	if s.giveBack, err = n.own(ctx, b); err != nil {
		return c, 0, err
	}
	// A directory may be on a volume, or lead there, and others write to those.
	n.mu.Lock()
	shared := r.Kind == sandbox.DirectorySnapshot && len(b.sb.Spec.Volumes) > 0
	n.mu.Unlock()
	passing := !r.Keep && !r.Stop && r.Kind == sandbox.FilesystemSnapshot
	if !r.Stop && !shared && !passing {
		if m, ok := n.sameAs(ctx, b, r, 1); ok {
			return m, 0, nil
		}
	}
	n.mu.Lock()
	k, base, user := b.kernel, b.sb.ImageID, b.image.User
	n.mu.Unlock()
	touched, quiet := int64(0), false
	if !passing { // which nothing is remembered of
		touched, quiet = n.quiet(ctx, b, k, 1)
	}
	f, err := n.states.spool()
	if err != nil {
		return c, 0, err
	}
	defer func() {
		if c.Plain == "" {
			f.Close()
		}
	}()
	report(sandbox.Progress{Step: "freeze"})
	start := time.Now()
	switch r.Kind {
	case sandbox.FilesystemSnapshot:
		d, ok := k.(runtime.Differ)
		if !ok {
			return c, 0, b.class.unsupported("tell what a sandbox changed")
		}
		err = d.Diff(ctx, f, r.Most)
		paused = time.Since(start)
	case sandbox.DirectorySnapshot:
		err = k.Bulk(ctx, guest.BulkOp{Kind: "tar", Path: r.Path, User: user}, nil, f)
		base = ""
	default:
		return c, 0, sandbox.InvalidField("kind", "%q is not memory, filesystem or directory", r.Kind)
	}
	if err != nil {
		return c, 0, n.explain(b, k, asDiskError(err))
	}
	if passing {
		return n.states.offerFiles(f, base), paused, nil
	}
	if r.Stop {
		if err := s.freeze(); err != nil {
			return c, 0, err
		}
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return c, 0, err
	}
	report(sandbox.Progress{Step: "store", Total: fileSize(f)})
	c, err = n.states.pack(sandbox.Content{Base: base}, func() (snapshot.Manifest, error) {
		return snapshot.Filesystem{SpoolDir: n.states.cfg.Plain}.Pack(ctx, n.states.cfg.Store, f)
	})
	if err != nil {
		n.litter.Store(true)
		return c, 0, err
	}
	if quiet && !shared && !r.Stop {
		n.remember(b, r, mark{touched: touched, content: c})
	}
	return c, paused, nil
}

// quiet says whether nothing but a new call can change the sandbox from now on,
// and how many may have until now. One under way, beside our own, still can.
// Who cannot say does not know.
func (n *Node) quiet(ctx context.Context, b *box, k runtime.Kernel, own int) (touched int64, quiet bool) {
	n.mu.Lock()
	touched = b.touched
	quiet = b.active <= own && b.sb.Standby == sandbox.Awake
	n.mu.Unlock()
	if !quiet {
		return touched, false
	}
	ctx, cancel := context.WithTimeout(ctx, inspectTimeout)
	defer cancel()
	procs, tasks, err := k.Guest().Processes(ctx)
	if err != nil || len(tasks) > 1 { // init is there for ever
		return touched, false
	}
	for _, p := range procs {
		if p.End == nil {
			return touched, false
		}
	}
	return touched, true
}

// sameAs is the snapshot that one would be made anew.
func (n *Node) sameAs(ctx context.Context, b *box, r node.SnapshotRequest, own int) (sandbox.Content, bool) {
	n.mu.Lock()
	m, ok := n.unchangedLocked(b, r, own)
	n.mu.Unlock()
	if !ok {
		return sandbox.Content{}, false
	}
	held := n.states.holdIfStored(ctx, cas.ID(m.content.Manifest)) // it may have been deleted since
	n.mu.Lock()
	defer n.mu.Unlock()
	if !held {
		delete(b.same, r.Kind)
		return sandbox.Content{}, false
	}
	// A call that came meanwhile may have changed something. What is held then
	// is let go by the next collection, after pendingFor.
	if _, ok := n.unchangedLocked(b, r, own); !ok {
		return sandbox.Content{}, false
	}
	c := m.content
	c.Same, c.Stored = c.Manifest, 0
	return c, true
}

// unchangedLocked is the last snapshot as r asks for it, if nothing can have
// happened since.
func (n *Node) unchangedLocked(b *box, r node.SnapshotRequest, own int) (mark, bool) {
	m, ok := b.same[r.Kind]
	return m, ok && m.touched == b.touched && m.path == r.Path && b.active <= own
}

func (n *Node) remember(b *box, r node.SnapshotRequest, m mark) {
	m.path = r.Path
	n.mu.Lock()
	defer n.mu.Unlock()
	if b.same == nil {
		b.same = unchanged{}
	}
	b.same[r.Kind] = m
}

// Tar writes the content of a filesystem or directory snapshot.
func (n *Node) Tar(ctx context.Context, c sandbox.Content, w io.Writer) error {
	if n.states == nil {
		return sandbox.Errorf(sandbox.Unsupported, "node.tar", "this node keeps no state")
	}
	return sandbox.WithOp("node.tar", n.states.tar(ctx, c, w))
}

// Verify reads content and names what is broken.
func (n *Node) Verify(ctx context.Context, c sandbox.Content) (int64, error) {
	if n.states == nil {
		return 0, sandbox.Errorf(sandbox.Unsupported, "node.verify", "this node keeps no state")
	}
	if err := snapshot.Verify(ctx, n.states.cfg.Store, cas.ID(c.Manifest)); err != nil {
		return 0, sandbox.WithOp("node.verify", err)
	}
	return c.Size, nil
}

// Blobs says what each content is in. One that cannot be read is left out. The
// caller does not change what it gets.
func (n *Node) Blobs(ctx context.Context, manifests []string) (map[string][]snapshot.Blob, error) {
	out := make(map[string][]snapshot.Blob, len(manifests))
	if n.states == nil {
		return out, nil
	}
	for _, m := range manifests {
		blobs, err := n.states.inBlobs(ctx, m)
		if ctx.Err() != nil {
			return nil, contextError("node.blobs", ctx)
		}
		if err != nil {
			n.log.Warn("cannot tell what content takes", "manifest", m, "err", err)
			continue
		}
		out[m] = blobs
	}
	return out, nil
}

// Release lets go of content that was made for a fork, or that its caller will
// not name after all.
func (n *Node) Release(_ context.Context, c sandbox.Content) error {
	if n.states != nil {
		n.letGo(c)
	}
	return nil
}

// letGo leaves content that nobody will name to the next collection, which would
// otherwise wait for its name.
func (n *Node) letGo(c sandbox.Content) {
	if c.Plain != "" {
		n.states.drop(c.Plain)
	}
	if c.Manifest != "" {
		n.states.unhold(cas.ID(c.Manifest))
		n.litter.Store(true)
	}
}

// Collect removes all stored content but that of keep, of sandboxes in cold
// standby, and what was made so lately that nobody could have named it.
func (n *Node) Collect(ctx context.Context, keep []string) (freed int64, err error) {
	if err := n.call(); err != nil {
		return 0, err
	}
	defer n.calls.Done()
	if n.states == nil {
		return 0, nil
	}
	keep = slices.Clone(keep)
	n.litter.Store(false)
	n.mu.Lock()
	for _, b := range n.mu.live {
		keep = append(keep, b.needs...)
		if b.cold != nil {
			keep = append(keep, b.cold.Manifest)
			keep = append(keep, b.cold.Needs...)
		}
	}
	n.mu.Unlock()
	n.sweepSealed() // also where a collection cannot read what is stored
	freed, kept, err := n.states.collect(ctx, keep)
	if kept != nil {
		for _, c := range n.classes {
			c.ahead.keepOnly(kept)
		}
	}
	if err == nil && !n.sealed() {
		err = n.mounts.sweep(kept)
	}
	for _, d := range n.drivers() {
		keeper, ok := d.Driver.(runtime.BuildKeeper)
		if !ok || err != nil {
			continue
		}
		var programs int64
		programs, err = keeper.PruneBuilds(ctx, func(ctx context.Context) ([]string, error) { return n.states.builds(ctx, kept, d.Name()) })
		freed += programs
	}
	return freed, sandbox.WithOp("node.collect", err)
}

// sealed says that what is stored is encrypted.
func (n *Node) sealed() bool { return n.states != nil && n.states.cfg.Sealed }

func fileSize(f *os.File) int64 {
	fi, err := f.Stat()
	if err != nil {
		return 0
	}
	return fi.Size()
}
