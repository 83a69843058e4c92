package agent

import (
	"context"
	"errors"
	"regexp"
	"slices"
	"time"

	"github.com/cove-sandbox/cove/egress/policy"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

var validID = regexp.MustCompile(`^[a-z0-9]{1,64}$`)

// attachTimeout bounds what takes 3 ms on a quiet machine.
const attachTimeout = 30 * time.Second

// Create admits sb, gives it a kernel with its container and returns when the
// record of it is durable, with the time that took. On error nothing of it is
// left.
func (n *Node) Create(ctx context.Context, sb sandbox.Sandbox, img sandbox.Image) (took time.Duration, err error) {
	return n.create(ctx, sb, img, sandbox.Content{}, func(b *box) (k runtime.Kernel, err error) {
		k, err = n.place(ctx, b)
		b.placed = k
		return k, err
	})
}

// create is Create, and CreateFrom some content: place gives what was admitted its
// kernel, and has it in the journal.
func (n *Node) create(ctx context.Context, sb sandbox.Sandbox, img sandbox.Image, from sandbox.Content, place func(*box) (runtime.Kernel, error)) (took time.Duration, err error) {
	start := time.Now()
	if err := n.call(); err != nil {
		return 0, err
	}
	defer n.calls.Done()
	n.creates.begin()
	defer n.creates.end()

	b, err := n.admit(sb, img, start)
	if err != nil {
		return 0, sandbox.WithOp("node.create", err)
	}
	n.mu.Lock()
	b.needs = slices.Clone(from.Needs)
	n.mu.Unlock()
	var k runtime.Kernel
	if err = n.giveRecording(ctx, b.sb, from.Replay); err == nil {
		err = n.attachVolumes(ctx, b)
	}
	if err == nil {
		var unhold func()
		unhold, err = n.startMounts(ctx, b)
		defer unhold()
	}
	if err == nil {
		k, err = place(b)
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

// admit checks the request and reserves its id and its resources.
func (n *Node) admit(sb sandbox.Sandbox, img sandbox.Image, now time.Time) (*box, error) {
	if !validID.MatchString(sb.ID) {
		return nil, sandbox.InvalidField("id", "%q is not 1 to 64 of a-z and 0-9", sb.ID)
	}
	class, err := n.classOf(sb.Spec)
	if err == nil {
		err = class.fits(sb.Spec)
	}
	if err != nil {
		return nil, err
	}
	path, err := n.cfg.Images.Path(img.ID)
	if err != nil {
		return nil, err
	}
	sb.ImageID, sb.Node, sb.State, sb.Episode = img.ID, n.cfg.Name, sandbox.Creating, 1
	if sb.Spec.Network.Mode == "" {
		sb.Spec.Network.Mode = sandbox.NetworkNone
	}
	sb.NetworkGeneration = 1
	p, err := policy.Compile(sb.Spec.Network)
	if err != nil {
		return nil, err
	}
	if sb.CreatedAt.IsZero() {
		sb.CreatedAt = now
	}
	if sb.ExpiresAt.IsZero() && sb.Spec.Timeout > 0 {
		sb.ExpiresAt = now.Add(sb.Spec.Timeout)
	}
	if sb.Spec.Intercepted() {
		sb.Spec.Authority = authorityOf(sb)
	}
	b := n.newBox(class, sb, img.Config, path)
	b.policy = p

	retry := n.timers.next(now)
	n.mu.Lock()
	defer n.mu.Unlock()
	if _, over := n.mu.ends[sb.ID]; over || n.mu.live[sb.ID] != nil {
		return nil, sandbox.Errorf(sandbox.AlreadyExists, "node.create", "sandbox %s exists", sb.ID)
	}
	if err := n.mu.reservations.Admit(class.Name, b.resources, retry); err != nil {
		return nil, err
	}
	b.held = true
	n.mu.live[sb.ID] = b
	return b, nil
}

func (n *Node) newBox(class *kernelClass, sb sandbox.Sandbox, img sandbox.ImageConfig, path string) *box {
	sb.Spec.KernelClass = class.Name // and not "": another may be the default after a restart
	b := &box{id: sb.ID, class: class, resources: class.takes(sb.Spec.Resources), image: img, sb: sb,
		container: runtime.Container{
			Sandbox:   sb.ID,
			Rootfs:    runtime.Rootfs{Path: path, Env: img.Env, WorkingDir: img.WorkingDir, User: img.User},
			Env:       n.environment(sb, img),
			Resources: sb.Spec.Resources,
			Resolvers: resolvers(sb.Spec.Network),
		},
		op: make(chan struct{}, 1), ready: make(chan struct{}), gone: make(chan struct{}), stuck: make(chan struct{})}
	b.ctx, b.cancel = context.WithCancelCause(context.Background())
	if d := sb.Spec.Deterministic; d != nil {
		b.clock, b.container.Sandbox, b.container.Clock = newStepClock(d), sandbox.DeterministicName, d.Clock
	}
	return b
}

// place finds b a kernel that takes its container. A kernel that turns out
// broken is replaced once; a second in a row is not bad luck.
func (n *Node) place(ctx context.Context, b *box) (runtime.Kernel, error) {
	for attempt := 1; ; attempt++ {
		k, err := n.takeKernel(ctx, b)
		if err != nil {
			return nil, err
		}
		broken, err := n.attach(ctx, b, k)
		if err == nil {
			return k, nil
		}
		n.discard(k)
		if !broken || attempt == 2 || ctx.Err() != nil {
			return nil, err
		}
		n.log.Warn("a kernel did not take its container; trying another", "sandbox", b.id, "kernel", k.ID(), "err", err)
	}
}

// attach puts b into k and into the journal at the same time: both take a few
// milliseconds and neither needs the other. broken says that another kernel
// may do better.
func (n *Node) attach(ctx context.Context, b *box, k runtime.Kernel) (broken bool, err error) {
	recorded := n.journal.submit(record{Kind: recCreated, ID: b.id, Entry: &entry{Sandbox: b.sb, Image: b.image, Kernel: k.Handle(), Needs: b.needs, Clock: b.clock.mark()}}, false)
	actx, cancel := context.WithTimeout(ctx, attachTimeout)
	defer cancel()
	attachErr := n.connected(actx, b, k.ID(), func(c runtime.Container) error { return k.Attach(actx, c) })
	if attachErr == nil {
		attachErr = n.trust(actx, b.sb, b.image, k)
	}
	n.begins(actx, b, k, false)
	if err := <-recorded; err != nil {
		return false, err
	}
	if attachErr == nil {
		return false, nil
	}
	if ctx.Err() != nil {
		return false, contextError("node.create", ctx)
	}
	switch sandbox.ClassOf(attachErr) {
	case sandbox.Unavailable, sandbox.Internal, sandbox.DeadlineReached, sandbox.Canceled:
		return true, attachErr
	}
	return isDone(k), attachErr
}

// run is the moment a created sandbox starts its life.
func (n *Node) run(b *box, k runtime.Kernel) {
	defer n.interceptAgain(b.sb, k)
	n.mu.Lock()
	defer n.mu.Unlock()
	b.kernel = k
	b.sb.State = sandbox.Running
	b.lastActive = time.Now()
	close(b.ready)
	n.armLocked(b)
	n.goLocked(func() { n.watch(b, k) })
}

// undo removes a sandbox that was admitted and never ran. Its record, if it
// came to one, is withdrawn; were that lost too, recovery finds no kernel.
func (n *Node) undo(b *box) {
	if err := n.journal.appendFact(record{Kind: recForgot, ID: b.id}); err != nil {
		n.log.Warn("an undone create is not yet out of the journal", "sandbox", b.id, "err", err)
	}
	b.cancel(errors.New("create failed"))
	n.detachVolumes(b)
	n.undoRecording(b.sb)
	n.mu.Lock()
	delete(n.mu.live, b.id)
	n.releaseLocked(b)
	n.mu.Unlock()
	close(b.ready)
	close(b.gone)
}

// releaseLocked takes b's reservation back.
func (n *Node) releaseLocked(b *box) {
	if b.held {
		b.held = false
		n.mu.reservations.Release(b.class.Name, b.resources)
	}
}

func isDone(k runtime.Kernel) bool {
	select {
	case <-k.Done():
		return true
	default:
		return false
	}
}
