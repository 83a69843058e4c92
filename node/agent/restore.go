package agent

import (
	"cmp"
	"context"
	"io"
	"slices"
	"time"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// restoreTimeout bounds what takes 50 ms and reading the memory from disk.
const restoreTimeout = 2 * time.Minute

// restore makes a kernel that goes on from content, which was saved with the volumes had.
func (n *Node) restore(ctx context.Context, b *box, from sandbox.Content, had []sandbox.VolumeMount, g *guest.Client) (k runtime.Kernel, err error) {
	if n.states == nil {
		return nil, sandbox.Errorf(sandbox.Unsupported, "", "this node keeps no state")
	}
	n.mu.Lock()
	volumes, err := volumesOver(had, b.container.Volumes)
	n.mu.Unlock()
	if err != nil {
		return nil, err
	}
	if err := n.sameClass(b.class, from.KernelClass); err != nil {
		return nil, err
	}
	n.mu.Lock()
	wakes := b.cold != nil
	n.mu.Unlock()
	if o, ok := b.class.ahead.originOf(b, from); ok && !wakes {
		if h := b.class.ahead.take(o, from, b.container); h != nil {
			if k, err = n.begin(ctx, b, h); err == nil {
				n.wentOn(ctx, b, k, h.cp, from)
				return k, nil
			}
			n.discard(h)
			if ctx.Err() != nil {
				return nil, err
			}
			n.log.Warn("a kernel that was restored ahead did not go on; another is restored", "sandbox", b.id, "kernel", h.ID(), "err", err)
		}
	}
	unhold, err := n.holdMounts(ctx, from.Needs)
	if err != nil {
		return nil, err
	}
	defer func() {
		unhold()
		if err != nil {
			n.sweepSealed()
		}
	}()
	// The kernel is made while the content is read.
	type made struct {
		b   runtime.Blank
		err error
	}
	blank := make(chan made, 1)
	go func() {
		k, err := b.class.blanks.get(ctx, from.Build)
		blank <- made{k, err}
	}()
	dir, cp, release, err := n.states.use(ctx, from)
	if err == nil {
		// The state itself says it too: a record of it may be older than classes.
		if err = n.sameClass(b.class, cp.Class); err != nil {
			release()
		}
	}
	m := <-blank
	if err != nil || m.err != nil {
		if m.err == nil {
			b.class.blanks.giveBack(m.b, from.Build)
		}
		if err == nil {
			release()
			err = m.err
		}
		return nil, err
	}
	defer release()
	r, ok := m.b.(runtime.Restorer)
	if !ok {
		b.class.blanks.giveBack(m.b, from.Build)
		return nil, b.class.unsupported("restore memory").WithReason(sandbox.RestoreRefused)
	}
	err = n.connected(ctx, b, m.b.ID(), func(c runtime.Container) (err error) {
		c.Guest, c.Volumes = g, volumes
		if b.clock != nil {
			if !wakes && !from.Clock.IsZero() { // a child begins where its parent was
				b.clock.restart(from.Clock)
			}
			c.Clock = b.clock.reading()
		}
		k, err = r.Restore(ctx, dir, cp, c)
		return err
	})
	if err != nil {
		n.removeNetwork(m.b.ID())
	}
	switch {
	case err == nil:
		n.wentOn(ctx, b, k, cp, from)
		return k, nil
	case sandbox.ClassOf(err) == sandbox.Precondition: // the blank is as it was
		b.class.blanks.giveBack(m.b, from.Build)
	default:
		n.kernels.remove(m.b.ID())
	}
	return nil, err
}

// wentOn is what comes after a restore.
func (n *Node) wentOn(ctx context.Context, b *box, k runtime.Kernel, cp runtime.Checkpoint, from sandbox.Content) {
	n.descend(b, k, cp, from.Manifest)
	// Code inside may have seen to it that this fails; it is its own loss.
	if err := n.trust(ctx, b.sb, b.image, k); err != nil {
		n.log.Warn("a restored sandbox may not trust its authority", "sandbox", b.id, "err", err)
	}
}

// CreateFrom is Create from a memory snapshot.
func (n *Node) CreateFrom(ctx context.Context, sb sandbox.Sandbox, img sandbox.Image, from sandbox.Snapshot) (took time.Duration, err error) {
	// Memory goes on in the class it was saved from: whether its kernel was, or will
	// be, one of a trust group is not the caller's concern.
	if c, err := n.class(from.Content.KernelClass); err == nil && sb.Spec.KernelClass == "" && (c.Reuse || sb.Spec.Reuse != "") {
		sb.Spec.KernelClass = c.Name
	}
	return n.create(ctx, sb, img, from.Content, func(b *box) (runtime.Kernel, error) {
		ctx, cancel := context.WithTimeout(ctx, restoreTimeout)
		defer cancel()
		k, err := n.restore(ctx, b, from.Content, from.Spec.Volumes, nil)
		if err != nil {
			return nil, err
		}
		recorded := n.journal.submit(record{Kind: recCreated, ID: b.id, Entry: n.entryOf(b, k)}, false)
		n.begins(ctx, b, k, true)
		if err := <-recorded; err != nil {
			n.discard(k)
			return nil, err
		}
		return k, nil
	})
}

// PrepareImage makes the image that a filesystem snapshot starts from.
func (n *Node) PrepareImage(ctx context.Context, from sandbox.Snapshot, base sandbox.Image, work string) (sandbox.Image, error) {
	const op = "node.prepare_image"
	d, ok := n.cfg.Images.(Deriver)
	if !ok || n.states == nil {
		return sandbox.Image{}, sandbox.Errorf(sandbox.Unsupported, op, "this node cannot make images of snapshots")
	}
	report, end := n.progress.begin(work)
	defer end()
	var img sandbox.Image
	err := n.states.piped(ctx, from.Content, func(r io.Reader) (err error) {
		img, err = d.Derive(ctx, base.ID, r, report)
		return err
	})
	return img, sandbox.WithOp(op, err)
}

// Restore replaces what a sandbox is by a snapshot. The old kernel is there
// until the new one is recorded: if anything fails before, nothing has changed.
func (n *Node) Restore(ctx context.Context, id string, img sandbox.Image, from sandbox.Snapshot) (episode int64, took time.Duration, err error) {
	start := time.Now()
	if err := n.call(); err != nil {
		return 0, 0, err
	}
	defer n.calls.Done()
	b, err := n.find(ctx, id) // what is asleep need not wake to be replaced
	if err != nil {
		return 0, 0, err
	}
	giveBack, err := n.own(ctx, b)
	if err != nil {
		return 0, 0, err
	}
	defer giveBack()
	path, err := n.cfg.Images.Path(img.ID)
	if err != nil {
		return 0, 0, sandbox.WithOp("node.restore", err)
	}
	n.creates.begin()
	defer n.creates.end()

	n.mu.Lock()
	sb, asleep, volumes := b.sb, b.cold != nil, b.container.Volumes
	n.mu.Unlock()
	sb.ImageID, sb.Standby = img.ID, sandbox.Awake
	sb.Episode++
	sb.Spec.Authority = cmp.Or(from.Spec.Authority, sb.Spec.Authority) // what its files and processes trust
	if from.Kind == sandbox.MemorySnapshot {
		sb.Spec.Resources.Disk = cmp.Or(from.Spec.Resources.Disk, sb.Spec.Resources.Disk) // its writable layer comes with it, as large as it is
	}
	next := n.newBox(b.class, sb, img.Config, path)
	next.container.Volumes = volumes
	if from.Kind == sandbox.MemorySnapshot {
		next.needs = slices.Clone(from.Content.Needs)
	}
	rctx, cancel := context.WithTimeout(b.ctx, restoreTimeout)
	defer cancel()
	if asleep {
		if err := n.waitForCapacity(rctx, b); err != nil {
			return 0, 0, sandbox.WithOp("node.restore", err)
		}
	}
	n.mu.Lock()
	was := b.resources.Disk
	n.mu.Unlock()
	// Until one of the two is gone it may be either.
	err = n.resize(b, max(was, sb.Spec.Resources.Disk))
	var k runtime.Kernel
	if err == nil {
		k, err = n.startFrom(rctx, next, from)
	}
	if err == nil {
		if err = n.journal.append(record{Kind: recCreated, ID: id, Entry: &entry{Sandbox: sb, Image: img.Config, Kernel: k.Handle(), Needs: next.needs, Clock: next.clock.mark()}}); err != nil {
			n.discard(k)
		}
	}
	if err != nil {
		_ = n.resize(b, was) // less always fits
		if asleep {
			n.mu.Lock()
			n.releaseLocked(b)
			n.mu.Unlock()
		}
		if cause := context.Cause(b.ctx); cause != nil {
			err = cause
		}
		return 0, 0, sandbox.WithOp("node.restore", err)
	}
	_ = n.resize(b, sb.Spec.Resources.Disk)
	n.mu.Lock()
	old := b.kernel
	if b.cold != nil {
		n.litter.Store(true)
		n.abandonLocked(b, nil)
	}
	b.kernel, b.cold, b.container, b.image = k, nil, next.container, next.image
	b.sb.ImageID, b.sb.Episode, b.needs, b.lineage = sb.ImageID, sb.Episode, next.needs, next.lineage
	b.sb.Spec.Authority, b.sb.Spec.Resources = sb.Spec.Authority, sb.Spec.Resources
	b.beginning, b.marks, b.clock = next.beginning, nil, next.clock
	n.setEnvLocked(b)
	b.touched++
	b.same = nil
	n.setStandbyLocked(b, sandbox.Awake, false)
	n.goLocked(func() { n.watch(b, k) })
	now := b.sb
	n.mu.Unlock()
	n.interceptAgain(now, k)
	if old != nil {
		n.discard(old)
	}
	n.sweepSealed()
	n.seekRecording(id, from.Content.Replay)
	return sb.Episode, time.Since(start), nil
}

// resize has b hold another size of disk.
func (n *Node) resize(b *box, disk int64) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if b.held {
		if err := n.mu.reservations.Resize(b.resources, disk); err != nil {
			return err
		}
	}
	b.resources.Disk = disk
	return nil
}

// startFrom gives a box a kernel in the state that a snapshot has.
func (n *Node) startFrom(ctx context.Context, b *box, from sandbox.Snapshot) (runtime.Kernel, error) {
	if from.Kind == sandbox.MemorySnapshot {
		k, err := n.restore(ctx, b, from.Content, from.Spec.Volumes, nil)
		if err == nil {
			n.begins(ctx, b, k, true)
		}
		return k, err
	}
	k, err := b.class.pool.take(ctx)
	if err != nil {
		return nil, err
	}
	if err := n.connected(ctx, b, k.ID(), func(c runtime.Container) error { return k.Attach(ctx, c) }); err != nil {
		n.discard(k)
		return nil, err
	}
	if err := n.trust(ctx, b.sb, b.image, k); err != nil {
		n.discard(k)
		return nil, err
	}
	n.begins(ctx, b, k, false)
	return k, nil
}

// Mount puts a directory snapshot into a sandbox.
func (n *Node) Mount(ctx context.Context, id string, from sandbox.Snapshot, path string, unpack bool) error {
	const op = "node.mount"
	if err := n.call(); err != nil {
		return err
	}
	defer n.calls.Done()
	if n.states == nil {
		return sandbox.Errorf(sandbox.Unsupported, op, "this node keeps no state")
	}
	b, release, err := n.hold(ctx, id)
	if err != nil {
		return err
	}
	defer release()
	if unpack {
		return sandbox.WithOp(op, n.unpack(ctx, b, from, path))
	}
	giveBack, err := n.own(ctx, b)
	if err != nil {
		return err
	}
	defer giveBack()
	k := n.inside(b)
	m, ok := k.(runtime.Mounter)
	d, can := n.cfg.Images.(Deriver)
	if !ok || !can {
		return sandbox.WithOp(op, b.class.unsupported("mount").WithHint("unpack it instead"))
	}
	if err := n.mounted(b, from.Content.Manifest); err != nil {
		return sandbox.WithOp(op, err)
	}
	file, unhold, err := n.mountFile(ctx, d, from.Content)
	if err != nil {
		return sandbox.WithOp(op, err)
	}
	defer unhold()
	return sandbox.WithOp(op, n.explain(b, k, m.Mount(ctx, file, path)))
}

// unpack writes a directory snapshot into the sandbox's own files.
func (n *Node) unpack(ctx context.Context, b *box, from sandbox.Snapshot, path string) error {
	f, err := n.states.spool()
	if err != nil {
		return err
	}
	defer f.Close()
	if err := n.states.tar(ctx, from.Content, f); err != nil {
		return asDiskError(err)
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return err
	}
	op := guest.BulkOp{Kind: "untar", Path: path, User: n.userOf(b)}
	op.Write.Parents = true
	return n.inside(b).Bulk(ctx, op, f, nil)
}
