package server

import (
	"context"
	"fmt"
	"runtime"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
	"github.com/cove-sandbox/cove/wire"
)

// forkWidth is how many children are made at once. A restore is work for a core
// and reads of the same pages, so more at once only makes the first one late,
// and on few cores all of them too late: two for each, to fill the waits.
var forkWidth = min(8, 2*runtime.NumCPU())

// childTimeout bounds one child. Those that stand already run beside it, and
// have what their source was doing to do.
func childTimeout(n int) time.Duration { return createTimeout + time.Duration(n)*time.Second }

// Fork makes all the children it can and keeps them if they are enough. A
// caller that leaves cannot know their ids, so they are taken back, unless it has
// a key to ask for them again by (see forkOnce).
func (s sandboxService) Fork(ctx context.Context, r *connect.Request[covev1.ForkRequest]) (*connect.Response[covev1.ForkResponse], error) {
	if s.calls.isDraining() {
		return nil, stopping()
	}
	m := r.Msg
	if err := sandbox.ValidateIdempotencyKey("idempotency_key", m.IdempotencyKey); err != nil {
		return nil, err
	}
	var out *covev1.ForkResponse
	var err error
	if m.IdempotencyKey != "" {
		out, err = s.forkOnce(ctx, m)
	} else {
		out, err = s.fork(ctx, m, func(int) store.Idempotency { return store.Idempotency{} })
	}
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(out), nil
}

// fork makes the children of one request.
func (s *Server) fork(ctx context.Context, m *covev1.ForkRequest, keys func(i int) store.Idempotency) (*covev1.ForkResponse, error) {
	timeout, err := s.checkFork(m)
	if err != nil {
		return nil, err
	}
	work, cancel := context.WithTimeout(context.WithoutCancel(ctx), prepareTimeout)
	defer cancel()
	var b birth
	var paused time.Duration
	var release func()
	if m.Id != "" {
		b, paused, release, err = s.forkLive(work, m.Id)
	} else {
		b, release, err = s.forkSnapshot(work, m.Snapshot)
	}
	if err != nil {
		return nil, err
	}
	defer release()

	b.spec.Network.Record = nil // one tape is one sandbox's
	b.spec.Labels, b.spec.Env = over(b.spec.Labels, m.Labels), over(b.spec.Env, m.Env)
	if m.Timeout != nil {
		b.spec.Timeout, b.spec.NoTimeout = timeout, timeout == 0
	}
	if m.Lease != nil {
		b.spec.Lease = m.GetLease()
	}
	b.spec = b.spec.WithEnd(s.cfg.Defaults)
	b.wanted = ctx
	if err := b.spec.Validate(s.cfg.Limits); err != nil {
		return nil, err
	}
	enough := m.MinReady
	if enough == 0 {
		enough = m.Count
	}
	if err := s.admitAll(work, b.spec.Resources, int(enough), int(m.Count)); err != nil {
		return nil, err
	}
	b.begun = true
	children, errs := s.bearAll(work, b, int(m.Count), keys)

	out := &covev1.ForkResponse{Paused: durationpb.New(paused)}
	ready := int32(0)
	for i, sb := range children {
		if errs[i] == nil {
			ready++
			out.Results = append(out.Results, &covev1.ForkResult{Sandbox: wire.Sandbox(sb)})
			continue
		}
		detail, msg := wire.ErrorDetail(errs[i])
		out.Results = append(out.Results, &covev1.ForkResult{Error: detail, Message: msg})
	}
	if ready < enough {
		s.takeBackAll(children, errs)
		return nil, tooFew(int(ready), int(enough), errs)
	}
	if ctx.Err() != nil {
		s.takeBackAll(children, errs)
		return nil, ctx.Err()
	}
	return out, nil
}

// forkCauses is how many different errors of children the error of a fork names.
const forkCauses = 3

// tooFew is the error of a fork that left nothing. It is the first child's, with
// what it says of the others: no result can say it for each.
func tooFew(ready, enough int, errs []error) error {
	var first *sandbox.Error
	var causes []string
	times := map[string]int{}
	for _, err := range errs {
		if err == nil {
			continue
		}
		e := wire.Domain(err)
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
		Msg: fmt.Sprintf("%d of %d children stood and at least %d had to; none is left: ", ready, len(errs), enough)}
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

func (s *Server) checkFork(m *covev1.ForkRequest) (timeout time.Duration, err error) {
	switch {
	case m.Id == "" && m.Snapshot == "":
		err = sandbox.InvalidField("id", "neither id nor snapshot is set; exactly one is accepted")
	case m.Id != "" && m.Snapshot != "":
		err = sandbox.InvalidField("snapshot", "id and snapshot are both set; exactly one is accepted")
	case m.Id != "":
		err = validID("id", m.Id)
	default:
		err = sandbox.ValidateSnapshotRef("snapshot", m.Snapshot)
	}
	if err != nil {
		return 0, err
	}
	if timeout, err = wire.DurationFrom("timeout", m.Timeout); err != nil {
		return 0, err
	}
	return timeout, firstError(sandbox.ValidateFork(int(m.Count), int(m.MinReady)), sandbox.ValidateLabels("labels", m.Labels),
		sandbox.ValidateEnv("env", m.Env), sandbox.ValidateTimeout("timeout", timeout, s.cfg.Limits.MaxTimeout))
}

// forkLive freezes a running sandbox once for all its children. What is frozen
// is not kept: it is let go when they have it.
func (s *Server) forkLive(ctx context.Context, id string) (b birth, paused time.Duration, release func(), err error) {
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
	c, paused, err := s.node.Snapshot(ctx, id, SnapshotRequest{Kind: sandbox.MemorySnapshot, Progress: func(sandbox.Progress) {}})
	if err != nil {
		end()
		drop()
		return b, 0, nil, s.explain(ctx, id, err)
	}
	from := s.newSnapshot(sb, taking{kind: sandbox.MemorySnapshot}, c)
	b = birth{spec: sb.Spec, img: img, from: &from, lineage: sb.Lineage.Below(sb.ID)}
	b.spec.Snapshot, b.spec.Template = "", "" // it comes from neither; its lineage says from what
	return b, paused, func() {
		s.owe("release what "+id+" was forked from", func(ctx context.Context) error { return s.node.Release(ctx, c) })
		end() // only now: content of a sandbox on standby, or of an earlier snapshot, is not collected before
		drop()
	}, nil
}

func (s *Server) forkSnapshot(ctx context.Context, ref string) (b birth, release func(), err error) {
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
	spec.Snapshot, spec.Template = snap.ID, ""
	if snap.Kind != sandbox.MemorySnapshot {
		spec.Volumes = nil
	}
	return birth{spec: spec, img: o.img, from: o.from, lineage: o.lineage}, func() { o.release(); done() }, nil
}

// bearAll makes n sandboxes alike, some at a time. All are tried: how many are
// enough is the caller's word.
func (s *Server) bearAll(ctx context.Context, b birth, n int, keys func(i int) store.Idempotency) ([]sandbox.Sandbox, []error) {
	children, errs, places := make([]sandbox.Sandbox, n), make([]error, n), make([]int, n)
	for i := range places {
		places[i] = i
		errs[i] = context.DeadlineExceeded // unless it was begun
	}
	_ = inParallel(ctx, forkWidth, places, func(i int) error {
		one, cancel := context.WithTimeout(ctx, childTimeout(n))
		defer cancel()
		children[i], _, errs[i] = s.bear(one, b, keys(i))
		return nil
	})
	return children, errs
}

func (s *Server) takeBackAll(children []sandbox.Sandbox, errs []error) {
	var made []string
	for i, sb := range children {
		if errs[i] == nil {
			made = append(made, sb.ID)
		}
	}
	_ = inParallel(context.Background(), killWidth, made, func(id string) error { s.takeBack(id); return nil })
}
