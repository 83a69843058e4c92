package server

import (
	"cmp"
	"context"
	"fmt"
	"runtime"
	"strconv"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// forkWidth is how many children are made at once. A restore is work for a core,
// so more at once only makes the first one late, and on few cores all of them too
// late: two for each, to fill the waits. Beyond 16 cores the server is what they wait for.
var forkWidth = min(32, 2*runtime.NumCPU())

// ForkRequest asks for copies of a running sandbox, or of a snapshot.
type ForkRequest struct {
	Sandbox  string // its id, or
	Snapshot string // name or id of one
	Count    int
	MinReady int               // fewer than these are none; 0 = Count
	Labels   map[string]string // over the source's
	Env      map[string]string // over the source's
	Timeout  *time.Duration    // nil = the source's
	Lease    *string           // nil = a running source's
	Key      string            // makes it idempotent

	// Of a group: what each is made of, instead of a source, and what it is part of.
	Spec    *sandbox.Spec   `json:",omitempty"`
	Rollout sandbox.Rollout `json:",omitzero"`
	gang    *gang
}

// Forked is what came of a fork.
type Forked struct {
	Children []Child       // as many as were asked for, in order
	Paused   time.Duration // how long a live source stood still
	Existed  bool          // an earlier request with the same key made them
}

// Child is one child of a fork, or why there is none.
type Child struct {
	Sandbox sandbox.Sandbox
	Err     error
}

// Fork makes all the children it can and keeps them if they are enough. A
// caller that leaves cannot know their ids, so they are taken back, unless it has
// a key to ask for them again by (see forkOnce).
func (s *Server) Fork(ctx context.Context, r ForkRequest) (out Forked, err error) {
	ctx, call, err := s.begin(ctx, "sandbox.fork", about("id", r.Sandbox), about("snapshot", r.Snapshot))
	if err != nil {
		return out, err
	}
	defer call.end(&err)
	if r.Snapshot != "" {
		err = call.needs(reads("snapshot", "snapshots"))
	}
	if err := firstError(err, sandbox.ValidateIdempotencyKey("idempotency_key", r.Key), s.checkFork(r)); err != nil {
		return out, err
	}
	if r.Key != "" {
		return s.forkOnce(ctx, r)
	}
	return s.fork(ctx, r, func(int) store.Idempotency { return store.Idempotency{} })
}

// fork makes the children of one request.
func (s *Server) fork(ctx context.Context, r ForkRequest, keys func(i int) store.Idempotency) (out Forked, err error) {
	limit := prepareTimeout
	if r.gang != nil {
		limit += r.gang.wait
	}
	work, cancel := context.WithTimeout(context.WithoutCancel(ctx), limit)
	defer cancel()
	var b plan
	var release func()
	switch {
	case r.Spec != nil:
		b, release, err = s.planOf(work, *r.Spec)
	case r.Sandbox != "":
		b, out.Paused, release, err = s.forkLive(work, r.Sandbox)
	default:
		b, release, err = s.forkSnapshot(work, r.Snapshot)
	}
	if err != nil {
		return out, err
	}
	defer release()

	b.spec.Network.Record = nil // one recording is one sandbox's
	b.spec.Labels, b.spec.Env = over(b.spec.Labels, r.Labels), over(b.spec.Env, r.Env)
	if r.Timeout != nil {
		b.spec.Timeout, b.spec.NoTimeout = *r.Timeout, *r.Timeout == 0
	}
	if r.Lease != nil {
		b.spec.Lease = *r.Lease
	}
	if r.Rollout != (sandbox.Rollout{}) {
		if r.Lease == nil && b.spec.Lease == b.spec.Rollout.Run {
			b.spec.Lease = "" // of the source's run
		}
		b.spec.Rollout = r.Rollout
	}
	if b.spec, err = s.inRun(work, b.spec, r.Lease != nil && *r.Lease == ""); err != nil {
		return out, err
	}
	b.spec = b.spec.WithEnd(s.cfg.Defaults)
	b.wanted, b.unclaimed = ctx, r.Key != ""
	if err := b.spec.Validate(s.cfg.Limits); err != nil {
		return out, err
	}
	enough := cmp.Or(r.MinReady, r.Count)
	if err := s.admitAll(work, b.spec.Resources, enough, r.Count); err != nil {
		return out, err
	}
	b.begun = true
	if r.gang != nil {
		if out.Children, err = s.makeGang(work, b, r, enough, keys); err != nil {
			return Forked{}, err
		}
	} else {
		out.Children = s.makeAll(work, b, r.Count, keys, func(int) {})
	}
	if ready := standing(out.Children); ready < enough {
		err = s.byWhom(ctx, tooFew(ready, enough, out.Children))
	} else if ctx.Err() != nil {
		err = ctx.Err()
	}
	if err != nil {
		s.takeBackAll(out.Children)
		return Forked{}, err
	}
	return out, nil
}

// forkCauses is how many different errors of children the error of a fork names.
const forkCauses = 3

// tooFew is the error of a fork that left nothing. It is the first child's, with
// what it says of the others: no result can say it for each.
func tooFew(ready, enough int, children []Child) error {
	var first *sandbox.Error
	var causes []string
	times := map[string]int{}
	for _, c := range children {
		if c.Err == nil {
			continue
		}
		e := sandbox.AsError(c.Err)
		if first == nil {
			first = e
		}
		bare := *e
		bare.Op = ""
		if bare.Field == first.Field {
			bare.Field = "" // out names it
		}
		cause := bare.Error()
		if times[cause]++; times[cause] == 1 {
			causes = append(causes, cause)
		}
	}
	out := &sandbox.Error{Class: first.Class, Op: first.Op, Field: first.Field, Reason: first.Reason, Hint: first.Hint, RetryAfter: first.RetryAfter,
		Msg: fmt.Sprintf("%d of %d children stood and at least %d had to; none is left: ", ready, len(children), enough)}
	for i, cause := range causes[:min(len(causes), forkCauses)] {
		if i > 0 {
			out.Msg += "; "
		}
		if n := times[cause]; n > 1 {
			out.Msg += fmt.Sprintf("%d times ", n)
		}
		out.Msg += cause
	}
	if more := len(causes) - forkCauses; more > 0 {
		out.Msg += fmt.Sprintf("; and %d other causes", more)
	}
	return out
}

func (s *Server) checkFork(r ForkRequest) (err error) {
	switch {
	case r.Sandbox == "" && r.Snapshot == "":
		err = sandbox.InvalidField("id", "neither id nor snapshot is set; exactly one is accepted")
	case r.Sandbox != "" && r.Snapshot != "":
		err = sandbox.InvalidField("snapshot", "id and snapshot are both set; exactly one is accepted")
	case r.Sandbox != "":
		err = validID("id", r.Sandbox)
	default:
		err = sandbox.ValidateSnapshotRef("snapshot", r.Snapshot)
	}
	err = firstError(err, sandbox.ValidateFork(r.Count, r.MinReady), sandbox.ValidateLabels("labels", r.Labels), sandbox.ValidateEnv("env", r.Env))
	if err == nil && r.Timeout != nil {
		err = sandbox.ValidateTimeout("timeout", *r.Timeout, s.cfg.Limits.MaxTimeout)
	}
	return err
}

// forkLive freezes a running sandbox once for all its children. What is frozen
// is not kept: it is let go when they have it.
func (s *Server) forkLive(ctx context.Context, id string) (b plan, paused time.Duration, release func(), err error) {
	sb, err := s.live(ctx, id)
	if err != nil {
		return b, 0, nil, err
	}
	img, drop, err := s.images.acquire(asServer(ctx), sb.ImageID) // the sandbox is the caller's, and so what it needs
	if err != nil {
		return b, 0, nil, err
	}
	end, err := s.content.begin(ctx)
	if err != nil {
		drop()
		return b, 0, nil, err
	}
	p, err := s.node.PrepareSnapshot(ctx, id, node.SnapshotRequest{Kind: sandbox.MemorySnapshot})
	if err == nil {
		err = s.node.CommitSnapshot(ctx, p.Token) // until Release
	}
	if err != nil {
		end()
		drop()
		return b, 0, nil, s.explain(ctx, id, err)
	}
	from := s.newSnapshot(sb, taking{kind: sandbox.MemorySnapshot}, p.Content)
	b = plan{spec: sb.Spec, img: img, from: &from, lineage: sb.Lineage.Below(sb.ID), fork: sb.ID}
	if s.runLasts(ctx, sb.Spec.Rollout.Run) != nil {
		b.spec.Rollout = sandbox.Rollout{} // it was kept; its children are of no run
	}
	b.spec.Rollout.Episode = ""
	b.spec.Snapshot, b.spec.Template = "", "" // it comes from neither; its lineage says from what
	return b, p.Paused, func() {
		s.untilDone("release what "+id+" was forked from", func(ctx context.Context) error { return s.node.Release(ctx, p.Content) })
		end() // only now: content of a sandbox on standby, or of an earlier snapshot, is not collected before
		drop()
	}, nil
}

func (s *Server) forkSnapshot(ctx context.Context, ref string) (b plan, release func(), err error) {
	snap, done, err := s.useSnapshot(ctx, ref)
	if err != nil {
		return b, nil, err
	}
	o, err := s.originOf(ctx, "snapshot", snap)
	if err != nil {
		done()
		return b, nil, err
	}
	spec := snap.Spec
	spec.Snapshot, spec.Template, spec.Rollout = snap.ID, "", sandbox.Rollout{}
	if snap.Kind != sandbox.MemorySnapshot {
		spec.Volumes = nil
	}
	return plan{spec: spec, img: o.img, from: o.from, lineage: o.lineage}, func() { o.release(); done() }, nil
}

// makeAll makes n sandboxes alike, some at a time. All are tried: how many are
// enough is the caller's word. told is called with how many stand, one at a time.
func (s *Server) makeAll(ctx context.Context, b plan, n int, keys func(i int) store.Idempotency, told func(ready int)) []Child {
	var mu sync.Mutex // of ready, and of told
	ready := 0
	told(ready)
	children, places := make([]Child, n), make([]int, n)
	for i := range places {
		places[i] = i
		children[i].Err = context.DeadlineExceeded // unless it was begun
	}
	_ = inParallel(ctx, forkWidth, places, func(i int) error {
		one, cancel := context.WithTimeout(ctx, lineTimeout)
		defer cancel()
		b := b
		if b.numbered && b.spec.Rollout.Episode == "" {
			b.spec.Rollout.Episode = strconv.Itoa(i + 1)
		}
		children[i].Sandbox, _, children[i].Err = s.makeSandbox(one, b, keys(i))
		if children[i].Err == nil {
			mu.Lock()
			defer mu.Unlock()
			ready++
			told(ready)
		}
		return nil
	})
	return children
}

func (s *Server) takeBackAll(children []Child) {
	var made []string
	for _, c := range children {
		if c.Err == nil {
			made = append(made, c.Sandbox.ID)
		}
	}
	_ = inParallel(context.Background(), killWidth, made, func(id string) error { s.takeBack(id); return nil })
}
