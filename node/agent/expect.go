package agent

import (
	"context"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/sandbox"
)

// expectations are what callers said they will soon ask for, by name. They heat
// the pools and hold checkpoints as plain directories; all of it is only there to
// be quick, and none of it outlives the node.
type expectations struct {
	reading sync.Mutex // held while a checkpoint is read: one at a time leaves the disk to those who wait for it

	mu struct {
		sync.Mutex
		byName map[string]*expectation
	}
}

type expectation struct {
	node.Expectation
	timer  *time.Timer
	states map[string]*expectedState         // by manifest
	ahead  map[*kernelClass][]expectedOrigin // what of Ahead can be held
}

// expectedState is a checkpoint that is held as long as somebody expects it.
type expectedState struct {
	size   int64
	cancel context.CancelFunc

	// Guarded by expectations.mu.
	dropped bool
	ready   bool
	err     *sandbox.Error
	release func() // nil until ready
}

// Expect implements node.Node.
func (n *Node) Expect(_ context.Context, name string, e node.Expectation) (node.Expected, error) {
	const op = "node.expect"
	if err := n.call(); err != nil {
		return node.Expected{}, err
	}
	defer n.calls.Done()
	nothing := e.Kernels == 0 && e.Restores == 0 && len(e.States) == 0
	switch {
	case name == "" || e.Kernels < 0 || e.Restores < 0 || e.TTL < 0 || e.TTL > node.MaxExpect || e.TTL == 0 && !nothing:
		return node.Expected{}, sandbox.Errorf(sandbox.Invalid, op, "an expectation has a name, counts, and a TTL of at most %s", node.MaxExpect)
	case nothing:
		n.forgetExpected(name, nil)
		return node.Expected{}, nil
	}
	ahead := n.originsOf(e.Ahead)
	x := &n.expected
	most := int64(0)
	if n.states != nil {
		most = n.states.keepPlain()
	}
	x.mu.Lock()
	if x.mu.byName == nil {
		x.mu.byName = map[string]*expectation{}
	}
	was := x.mu.byName[name]
	if was == nil && len(x.mu.byName) >= node.MaxExpectations {
		x.mu.Unlock()
		return node.Expected{}, &sandbox.Error{Class: sandbox.QuotaExceeded, Op: op, Msg: "as many are expecting something of this node as there may be", RetryAfter: time.Minute}
	}
	now := &expectation{Expectation: e, states: map[string]*expectedState{}, ahead: ahead}
	x.mu.byName[name] = now
	now.timer = time.AfterFunc(e.TTL, func() { n.forgetExpected(name, now) })
	var after []func() // the lock is given up
	if was != nil {
		was.timer.Stop()
		maps.Copy(now.states, was.states)
	}
	for id, st := range now.states {
		if !slices.ContainsFunc(e.States, func(c sandbox.Content) bool { return c.Manifest == id }) {
			delete(now.states, id)
			after = append(after, st.dropLocked())
		}
	}
	for _, c := range e.States {
		if now.states[c.Manifest] == nil {
			st := &expectedState{size: c.Size, cancel: func() {}}
			if st.err = n.refuseLocked(c, most); st.err == nil {
				ctx, cancel := context.WithTimeout(n.ctx, restoreTimeout)
				st.cancel = cancel
				after = append(after, func() { n.background(func() { n.read(ctx, st, c) }) })
			}
			now.states[c.Manifest] = st
		}
	}
	n.heatLocked()
	out := node.Expected{}
	for _, c := range e.States {
		st := now.states[c.Manifest]
		out.States = append(out.States, node.ExpectedState{Manifest: c.Manifest, Ready: st.ready, Err: st.err})
	}
	x.mu.Unlock()
	for _, f := range after {
		f()
	}
	class := n.classes[0]
	out.Kernels, out.Aim = class.pool.counts()
	out.Aim = min(out.Aim, e.Kernels)
	out.Restores = class.blanks.count()
	return out, nil
}

// forgetExpected ends what is expected under a name; only = unless it was said again since.
func (n *Node) forgetExpected(name string, only *expectation) {
	x := &n.expected
	x.mu.Lock()
	e := x.mu.byName[name]
	if e == nil || only != nil && e != only {
		x.mu.Unlock()
		return
	}
	e.timer.Stop()
	delete(x.mu.byName, name)
	var gone []func()
	for _, st := range e.states {
		gone = append(gone, st.dropLocked())
	}
	n.heatLocked()
	x.mu.Unlock()
	for _, f := range gone {
		f()
	}
}

// heatLocked tells the pools how much is expected in all. They bound it.
func (n *Node) heatLocked() {
	kernels, restores := 0, 0
	for _, e := range n.expected.mu.byName {
		kernels, restores = kernels+e.Kernels, restores+e.Restores
	}
	n.classes[0].pool.expect(kernels)
	n.classes[0].blanks.expect(restores)
	for _, c := range n.classes {
		var all []expectedOrigin
		for _, e := range n.expected.mu.byName {
			all = append(all, e.ahead[c]...)
		}
		c.ahead.expect(all)
	}
}

// originsOf is what of creates that are expected can be held, by class. What cannot be,
// or is not here, is created as ever.
func (n *Node) originsOf(all []node.Ahead) map[*kernelClass][]expectedOrigin {
	out := map[*kernelClass][]expectedOrigin{}
	for _, e := range all {
		class, err := n.class(e.From.KernelClass)
		if err != nil || e.Count <= 0 {
			continue
		}
		path, err := n.cfg.Images.Path(e.Image.ID)
		if err != nil {
			continue
		}
		b := n.newBox(class, sandbox.Sandbox{Tenant: e.Tenant, Spec: e.Spec}, e.Image.Config, path)
		if o, ok := class.ahead.originOf(b, e.From); ok {
			out[class] = append(out[class], expectedOrigin{origin: o, from: e.From, container: bare(b.container), count: e.Count})
		}
	}
	return out
}

// dropLocked stops the reading of a checkpoint, and returns what lets go of it.
func (st *expectedState) dropLocked() func() {
	st.dropped = true
	st.cancel()
	if st.release == nil {
		return func() {}
	}
	return st.release
}

// refuseLocked says why a checkpoint is not read ahead; nil = it is.
func (n *Node) refuseLocked(c sandbox.Content, most int64) *sandbox.Error {
	const op = "node.expect"
	switch {
	case n.states == nil || c.Manifest == "":
		return &sandbox.Error{Class: sandbox.Unsupported, Op: op, Msg: "this node has no such memory snapshot"}
	case n.sealed():
		return &sandbox.Error{Class: sandbox.Unsupported, Op: op, Msg: "stored content is encrypted here: a checkpoint is read when it is restored, and not before"}
	}
	held := c.Size
	for _, e := range n.expected.mu.byName {
		for _, o := range e.states {
			if o.err == nil {
				held += o.size
			}
		}
	}
	if held > most {
		return &sandbox.Error{Class: sandbox.NoCapacity, Op: op, Msg: "the node holds as many checkpoints ready as it may"}
	}
	return nil
}

// read reads a checkpoint and holds it, unless nobody expects it any more.
func (n *Node) read(ctx context.Context, st *expectedState, c sandbox.Content) {
	defer st.cancel()
	release, err := n.readState(ctx, c)
	n.expected.mu.Lock()
	dropped := st.dropped
	switch {
	case err != nil:
		st.err = sandbox.AsError(err)
	case !dropped:
		st.ready, st.release = true, release
	}
	n.expected.mu.Unlock()
	if dropped && release != nil {
		release()
	}
}

// readState makes a checkpoint a plain directory and has its pages in memory, as
// far as there is memory for them.
func (n *Node) readState(ctx context.Context, c sandbox.Content) (release func(), err error) {
	n.expected.reading.Lock()
	defer n.expected.reading.Unlock()
	if err := ctx.Err(); err != nil {
		return nil, contextError("node.expect", ctx)
	}
	dir, cp, release, err := n.states.use(ctx, c)
	if err != nil {
		return nil, err
	}
	for _, name := range cp.Files {
		f, err := os.Open(filepath.Join(dir, name))
		if err == nil {
			err = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_WILLNEED)
			f.Close()
		}
		if err != nil {
			release()
			return nil, sandbox.Errorf(sandbox.Internal, "node.expect", "%w", err)
		}
	}
	return release, nil
}
