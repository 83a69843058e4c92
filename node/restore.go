package node

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

// restore makes a kernel that goes on from content.
func (n *Node) restore(ctx context.Context, b *box, from sandbox.Content, g *guest.Client) (k runtime.Kernel, err error) {
	if n.states == nil {
		return nil, sandbox.Errorf(sandbox.Unsupported, "", "this node keeps no state")
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
		b, err := n.blanks.get(ctx, from.Build)
		blank <- made{b, err}
	}()
	dir, cp, release, err := n.states.use(ctx, from)
	m := <-blank
	if err != nil || m.err != nil {
		if m.err == nil {
			n.blanks.giveBack(m.b, from.Build)
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
		n.blanks.giveBack(m.b, from.Build)
		return nil, sandbox.Errorf(sandbox.Unsupported, "", "runtime %s cannot restore memory", n.cfg.Driver.Name()).WithReason(sandbox.RestoreRefused)
	}
	err = n.connected(ctx, b, m.b.ID(), func(c runtime.Container) (err error) {
		c.Guest = g
		k, err = r.Restore(ctx, dir, cp, c)
		return err
	})
	if err != nil && n.cfg.Networks != nil {
		if rerr := n.cfg.Networks.Remove(m.b.ID()); rerr != nil {
			n.log.Error("the network of a kernel that is gone stays", "kernel", m.b.ID(), "err", rerr)
		}
	}
	switch {
	case err == nil:
		// Code inside may have seen to it that this fails; it is its own loss.
		if err := n.trust(ctx, b.sb, k); err != nil {
			n.log.Warn("a restored sandbox may not trust its authority", "sandbox", b.id, "err", err)
		}
		return k, nil
	case sandbox.ClassOf(err) == sandbox.Precondition: // the blank is as it was
		n.blanks.giveBack(m.b, from.Build)
	default:
		n.kernels.remove(m.b.ID())
	}
	return nil, err
}

// CreateFrom is Create from a memory snapshot. See server.StateNode.
func (n *Node) CreateFrom(ctx context.Context, sb sandbox.Sandbox, img sandbox.Image, from sandbox.Snapshot) (took time.Duration, err error) {
	start := time.Now()
	if err := n.call(); err != nil {
		return 0, err
	}
	defer n.calls.Done()
	n.pool.begin()
	defer n.pool.end()
	b, err := n.admit(sb, img, start)
	if err != nil {
		return 0, sandbox.WithOp("node.create", err)
	}
	rctx, cancel := context.WithTimeout(ctx, restoreTimeout)
	defer cancel()
	n.mu.Lock()
	b.needs = slices.Clone(from.Content.Needs)
	n.mu.Unlock()
	var k runtime.Kernel
	if err = n.giveTape(rctx, b.sb, from.Content.Replay); err == nil {
		err = n.attachVolumes(rctx, b)
	}
	if err == nil {
		k, err = n.restore(rctx, b, from.Content, nil)
	}
	if err == nil {
		if err = n.journal.append(record{Kind: recCreated, ID: b.id, Entry: n.entryOf(b, k)}); err != nil {
			n.discard(k)
		}
	}
	if err != nil {
		n.undo(b)
		if ctx.Err() != nil {
			err = contextError("node.create", ctx)
		}
		return 0, sandbox.WithOp("node.create", err)
	}
	n.run(b, k)
	return time.Since(start), nil
}

// PrepareImage makes the image that a filesystem snapshot starts from.
func (n *Node) PrepareImage(ctx context.Context, from sandbox.Snapshot, base sandbox.Image, progress func(sandbox.Progress)) (sandbox.Image, error) {
	const op = "node.prepare_image"
	d, ok := n.cfg.Images.(Deriver)
	if !ok || n.states == nil {
		return sandbox.Image{}, sandbox.Errorf(sandbox.Unsupported, op, "this node cannot make images of snapshots")
	}
	if progress == nil {
		progress = func(sandbox.Progress) {}
	}
	var img sandbox.Image
	err := n.states.piped(ctx, from.Content, func(r io.Reader) (err error) {
		img, err = d.Derive(ctx, base.ID, r, progress)
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
	n.pool.begin()
	defer n.pool.end()

	n.mu.Lock()
	sb, asleep := b.sb, b.cold != nil
	n.mu.Unlock()
	sb.ImageID, sb.Standby = img.ID, sandbox.Awake
	sb.Episode++
	sb.Spec.Authority = cmp.Or(from.Spec.Authority, sb.Spec.Authority) // what its files and processes trust
	if from.Kind == sandbox.MemorySnapshot {
		sb.Spec.Resources.Disk = cmp.Or(from.Spec.Resources.Disk, sb.Spec.Resources.Disk) // its writable layer comes with it, as large as it is
	}
	next := n.newBox(sb, img.Config, path)
	next.container.Volumes = b.container.Volumes
	if from.Kind == sandbox.MemorySnapshot {
		next.needs = slices.Clone(from.Content.Needs)
	}
	rctx, cancel := context.WithTimeout(b.ctx, restoreTimeout)
	defer cancel()
	if asleep {
		if err := n.room(rctx, b); err != nil {
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
		k, err = n.embody(rctx, next, from)
	}
	if err == nil {
		if err = n.journal.append(record{Kind: recCreated, ID: id, Entry: &entry{Sandbox: sb, Image: img.Config, Kernel: k.Handle(), Needs: next.needs}}); err != nil {
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
	b.sb.ImageID, b.sb.Episode, b.needs = sb.ImageID, sb.Episode, next.needs
	b.sb.Spec.Authority, b.sb.Spec.Resources = sb.Spec.Authority, sb.Spec.Resources
	b.touched++
	b.same = nil
	n.standLocked(b, sandbox.Awake, false)
	n.goLocked(func() { n.watch(b, k) })
	now := b.sb
	n.mu.Unlock()
	n.interceptAgain(now, k)
	if old != nil {
		n.discard(old)
	}
	n.sweepSealed()
	n.seekTape(id, from.Content.Replay)
	return sb.Episode, time.Since(start), nil
}

// resize has b hold another size of disk.
func (n *Node) resize(b *box, disk int64) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if b.held {
		if err := n.ledger.Resize(b.resources, disk, time.Second); err != nil {
			return err
		}
	}
	b.resources.Disk = disk
	return nil
}

// embody gives a box a kernel that is what the snapshot says.
func (n *Node) embody(ctx context.Context, b *box, from sandbox.Snapshot) (runtime.Kernel, error) {
	if from.Kind == sandbox.MemorySnapshot {
		return n.restore(ctx, b, from.Content, nil)
	}
	k, err := n.pool.take(ctx)
	if err != nil {
		return nil, err
	}
	if err := n.connected(ctx, b, k.ID(), func(c runtime.Container) error { return k.Attach(ctx, c) }); err != nil {
		n.discard(k)
		return nil, err
	}
	if err := n.trust(ctx, b.sb, k); err != nil {
		n.discard(k)
		return nil, err
	}
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
		return sandbox.Errorf(sandbox.Unsupported, op, "runtime %s cannot mount", n.cfg.Driver.Name()).WithHint("unpack it instead")
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
	op := guest.BulkOp{Kind: "untar", Path: path, User: b.image.User}
	op.Write.Parents = true
	return n.inside(b).Bulk(ctx, op, f, nil)
}
