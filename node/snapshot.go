package node

import (
	"context"
	"io"
	"os"
	"slices"
	"time"

	"github.com/cove-sandbox/cove/cas"
	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/snapshot"
)

// SnapshotRequest is what to take of a sandbox.
type SnapshotRequest struct {
	Kind     sandbox.SnapshotKind
	Path     string // of a directory
	Stop     bool   // the sandbox has ended when it returns
	Keep     bool   // in the content store; otherwise until Release, for a fork
	Progress func(sandbox.Progress)
	// Commit, if there is one, is called with what was made before the sandbox
	// is stopped for it, and not without Stop. If it fails nothing is stopped: a
	// sandbox ends when its caller has on record what is left of it. Up to there
	// a context that ends leaves the sandbox as it was; from there it counts no
	// more.
	Commit func(sandbox.Content) error
}

// unchanged is the last snapshot of a kind and what had happened until then.
// Nothing has since if nothing was asked of the sandbox and no process was in
// it that could have done something by itself.
type unchanged map[sandbox.SnapshotKind]mark

type mark struct {
	touched int64
	path    string
	content sandbox.Content
}

// Snapshot makes the content of a snapshot, complete and durable, or nothing.
// See server.StateNode.
func (n *Node) Snapshot(ctx context.Context, id string, r SnapshotRequest) (c sandbox.Content, paused time.Duration, err error) {
	if err := n.call(); err != nil {
		return c, 0, err
	}
	defer n.calls.Done()
	if n.states == nil {
		return c, 0, sandbox.Errorf(sandbox.Unsupported, "node.snapshot", "this node keeps no state")
	}
	if r.Progress == nil {
		r.Progress = func(sandbox.Progress) {}
	}
	b, err := n.find(ctx, id)
	if err != nil {
		return c, 0, err
	}
	if r.Kind == sandbox.MemorySnapshot {
		c, paused, err = n.snapshotMemory(ctx, b, r)
	} else {
		c, paused, err = n.snapshotFiles(ctx, id, r)
	}
	if err != nil {
		n.letGo(c)
		return sandbox.Content{}, 0, sandbox.WithOp("node.snapshot", err)
	}
	r.Progress(sandbox.Progress{Step: "done", Done: c.Size, Total: c.Size})
	return c, paused, nil
}

// snapshotMemory leaves a sandbox on standby where it is.
func (n *Node) snapshotMemory(ctx context.Context, b *box, r SnapshotRequest) (c sandbox.Content, paused time.Duration, err error) {
	giveBack, err := n.own(ctx, b)
	if err != nil {
		return c, 0, err
	}
	defer giveBack()
	n.mu.Lock()
	k, cold, was := b.kernel, b.cold, b.sb.Standby
	n.mu.Unlock()
	if cold != nil { // it is its own snapshot
		c = *cold
		c.Stored = 0
		n.states.hold(cas.ID(c.Manifest)) // also if it wakes before the caller has named it
		if r.Stop {
			return c, 0, n.stopInto(ctx, b, r, c)
		}
		return c, 0, nil
	}
	if r.Keep && !r.Stop {
		if m, ok := n.sameAs(b, r, 0); ok {
			return m, 0, nil
		}
	}
	touched, quiet := n.quiet(ctx, b, k, 0)
	if r.Stop && was == sandbox.Awake {
		// Nothing may happen between the state and the end.
		if err := n.freeze(b, true, false); err != nil {
			return c, 0, err
		}
		defer func() {
			if err != nil {
				_ = n.thaw(b)
			}
		}()
	}
	r.Progress(sandbox.Progress{Step: "freeze"})
	// The caller may leave: what is frozen is thawed all the same.
	c, paused, err = n.checkpoint(ctx, b, k, r.Keep)
	if err != nil {
		return c, 0, n.explain(b, k, err)
	}
	if r.Stop {
		return c, paused, n.stopInto(ctx, b, r, c)
	}
	if r.Keep && quiet {
		n.remember(b, r, mark{touched: touched, content: c})
	}
	return c, paused, nil
}

// stopInto ends a sandbox once its state is safe and on record.
func (n *Node) stopInto(ctx context.Context, b *box, r SnapshotRequest, c sandbox.Content) error {
	if ctx.Err() != nil {
		return contextError("", ctx)
	}
	if r.Commit != nil {
		if err := r.Commit(c); err != nil {
			return err
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.endLocked(b, sandbox.End{Cause: sandbox.KilledByUser, Detail: "stopped by a snapshot"}, true)
	return nil
}

// checkpoint writes the state of a kernel to a directory and, with keep, from
// there to the store. The directory stays as long as it pays.
func (n *Node) checkpoint(ctx context.Context, b *box, k runtime.Kernel, keep bool) (c sandbox.Content, paused time.Duration, err error) {
	ck, ok := k.(runtime.Checkpointer)
	if !ok {
		return c, 0, sandbox.Errorf(sandbox.Unsupported, "", "runtime %s cannot save memory", n.cfg.Driver.Name())
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
	position := n.tapes.get(b.id).position() // what is under way now breaks off in what is made of it
	start := time.Now()
	cp, err := ck.Checkpoint(ctx, dir, runtime.CheckpointOptions{})
	paused = time.Since(start)
	if err != nil {
		return c, 0, err
	}
	if err := describe(dir, cp); err != nil {
		return c, 0, err
	}
	if !keep {
		c = sandbox.Content{Plain: "fork-" + n.states.next(), Size: sizeOf(dir), Build: cp.Build}
		n.states.offer(c.Plain, dir, cp, true)
		offered = true
	} else {
		if c, err = n.states.store(ctx, dir, cp); err != nil {
			n.litter.Store(true) // what is there of it serves nobody
			return c, 0, err
		}
		// Of a sleeper too: the next use may be in a year, but is more often in
		// a minute, and reading it back takes 10 ms for 10 MiB, 60 for 100.
		n.states.offer(c.Manifest, dir, cp, false)
		offered = true
	}
	n.mu.Lock()
	c.Base, c.Needs, c.Replay = b.sb.ImageID, slices.Clone(b.needs), position
	n.mu.Unlock()
	return c, paused, nil
}

// snapshotFiles wakes the sandbox: what is asked for is inside.
func (n *Node) snapshotFiles(ctx context.Context, id string, r SnapshotRequest) (c sandbox.Content, paused time.Duration, err error) {
	b, release, err := n.hold(ctx, id)
	if err != nil {
		return c, 0, err
	}
	defer release()
	giveBack, err := n.own(ctx, b)
	if err != nil {
		return c, 0, err
	}
	defer giveBack()
	// A directory may be on a volume, or lead there, and others write to those.
	n.mu.Lock()
	shared := r.Kind == sandbox.DirectorySnapshot && len(b.sb.Spec.Volumes) > 0
	n.mu.Unlock()
	if !r.Stop && !shared {
		if m, ok := n.sameAs(b, r, 1); ok {
			return m, 0, nil
		}
	}
	n.mu.Lock()
	k, base, user := b.kernel, b.sb.ImageID, b.image.User
	n.mu.Unlock()
	touched, quiet := n.quiet(ctx, b, k, 1)
	f, err := n.states.spool()
	if err != nil {
		return c, 0, err
	}
	defer f.Close()
	r.Progress(sandbox.Progress{Step: "freeze"})
	start := time.Now()
	switch r.Kind {
	case sandbox.FilesystemSnapshot:
		d, ok := k.(runtime.Differ)
		if !ok {
			return c, 0, sandbox.Errorf(sandbox.Unsupported, "", "runtime %s cannot tell what a sandbox changed", n.cfg.Driver.Name())
		}
		err = d.Diff(ctx, f)
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
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return c, 0, err
	}
	r.Progress(sandbox.Progress{Step: "store", Total: fileSize(f)})
	c, err = n.states.pack(sandbox.Content{Base: base}, func() (snapshot.Manifest, error) {
		return snapshot.Filesystem{SpoolDir: n.states.cfg.Plain}.Pack(ctx, n.states.cfg.Store, f)
	})
	if err != nil {
		n.litter.Store(true)
		return c, 0, err
	}
	if r.Stop {
		return c, paused, n.stopInto(ctx, b, r, c)
	}
	if quiet && !shared {
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
func (n *Node) sameAs(b *box, r SnapshotRequest, own int) (sandbox.Content, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	m, ok := b.same[r.Kind]
	if !ok || m.touched != b.touched || m.path != r.Path || b.active > own {
		return sandbox.Content{}, false
	}
	// It may have been deleted since.
	if !n.states.again(context.Background(), cas.ID(m.content.Manifest)) {
		delete(b.same, r.Kind)
		return sandbox.Content{}, false
	}
	c := m.content
	c.Same, c.Stored = c.Manifest, 0
	return c, true
}

func (n *Node) remember(b *box, r SnapshotRequest, m mark) {
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
	for _, b := range n.live {
		keep = append(keep, b.needs...)
		if b.cold != nil {
			keep = append(keep, b.cold.Manifest)
			keep = append(keep, b.cold.Needs...)
		}
	}
	n.mu.Unlock()
	n.sweepSealed() // also where a collection cannot read what is stored
	freed, kept, err := n.states.collect(ctx, keep)
	if err == nil && !n.Sealed() {
		err = n.mounts.sweep(kept)
	}
	if keeper, ok := n.cfg.Driver.(runtime.BuildKeeper); ok && err == nil {
		var programs int64
		programs, err = keeper.PruneBuilds(ctx, func(ctx context.Context) ([]string, error) { return n.states.builds(ctx, kept) })
		freed += programs
	}
	return freed, sandbox.WithOp("node.collect", err)
}

// Sealed says that what is stored is encrypted.
func (n *Node) Sealed() bool { return n.states != nil && n.states.cfg.Sealed }

// Litter says that content became useless since the last Collect.
func (n *Node) Litter() bool { return n.litter.Load() }

func fileSize(f *os.File) int64 {
	fi, err := f.Stat()
	if err != nil {
		return 0
	}
	return fi.Size()
}
