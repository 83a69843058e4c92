package server

import (
	"bytes"
	"context"
	"crypto/sha256"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// longestGroupWait bounds how long a group may wait for room.
const longestGroupWait = time.Hour

// GroupRequest asks for sandboxes alike.
type GroupRequest struct {
	Spec    sandbox.Spec // what each is made of
	Sandbox string       // or: id of a running one that they are copies of
	Count   int
	AtLeast int           // fewer than these are none; 0 = Count
	Key     string        // makes it idempotent
	Wait    time.Duration // for room on a full node; 0 = as long as creates may
}

// GroupProgress is how far a group is.
type GroupProgress struct {
	State      string // queued or creating; "" before either
	Position   int    // how many are before it
	Ready      int
	RetryAfter time.Duration
}

// gang is what makes a fork a group: it waits for the room of all its sandboxes
// at once, and goes when nobody waits for it.
//
// Were they to wait one by one, two groups on a node with room for one would each
// have a half and wait for the other's.
type gang struct {
	wait time.Duration
	tell func(GroupProgress)
}

// CreateGroup makes sandboxes at once and keeps them if they are enough. A caller
// that leaves leaves nothing: without a key at once, with one when it did not
// come back for a while.
func (s *Server) CreateGroup(ctx context.Context, r GroupRequest, progress func(GroupProgress)) (out Forked, err error) {
	ctx, call, err := s.begin(ctx, "run.group", about("run", r.Spec.Rollout.Run))
	if err != nil {
		return out, err
	}
	defer call.end(&err)
	r.Spec.Rollout.Group = s.groupName(r)
	call.concerns("group", r.Spec.Rollout.Group)
	if err := firstError(call.needs(partsOfSpec(r.Spec)...), sandbox.ValidateIdempotencyKey("idempotency_key", r.Key), checkGroup(r)); err != nil {
		return out, err
	}
	wait := s.cfg.QueueWait
	if r.Wait > 0 {
		wait = r.Wait
	}
	f := ForkRequest{Count: r.Count, MinReady: r.AtLeast, Key: r.Key, gang: &gang{wait: wait, tell: progress}}
	if r.Sandbox == "" {
		f.Spec = &r.Spec
	} else {
		f.Sandbox, f.Labels, f.Env, f.Rollout = r.Sandbox, r.Spec.Labels, r.Spec.Env, r.Spec.Rollout
		if r.Spec.Timeout > 0 || r.Spec.NoTimeout {
			f.Timeout = &r.Spec.Timeout
		}
		if r.Spec.Lease != "" {
			f.Lease = &r.Spec.Lease
		}
		if err := s.checkFork(f); err != nil {
			return out, err
		}
	}
	if r.Key != "" {
		out, err = s.forkOnce(ctx, f)
	} else {
		out, err = s.fork(ctx, f, func(int) store.Idempotency { return store.Idempotency{} })
	}
	for _, c := range out.Children {
		if c.Err == nil {
			call.concerns("id", c.Sandbox.ID)
		}
	}
	return out, err
}

// groupName is a name for a group of a run that was given none. It follows from the
// key, so that who asks again asks for the same, and is nobody else's: a count of the
// client's would be the same in two workers of one run.
func (s *Server) groupName(r GroupRequest) string {
	if r.Spec.Rollout.Group != "" || r.Spec.Rollout.Run == "" {
		return r.Spec.Rollout.Group
	}
	if r.Key == "" {
		return "group-" + sandbox.NewID(s.cfg.Rand)
	}
	sum := sha256.Sum256([]byte("group\x00" + r.Key))
	return "group-" + sandbox.NewID(bytes.NewReader(sum[:]))
}

func checkGroup(r GroupRequest) error {
	switch {
	case r.Count < 1 || r.Count > sandbox.MaxGroup:
		return sandbox.InvalidField("count", "%d is not accepted; 1 to %d is", r.Count, sandbox.MaxGroup)
	case r.AtLeast < 0 || r.AtLeast > r.Count:
		return sandbox.InvalidField("at_least", "%d is not accepted; 1 to the count of %d is, or 0 for all", r.AtLeast, r.Count)
	case r.Wait < 0 || r.Wait > longestGroupWait:
		return sandbox.InvalidField("max_wait", "%s is not accepted; up to %s is", r.Wait, longestGroupWait)
	case r.Spec.Network.Record != nil:
		return sandbox.InvalidField("spec.network.record", "one recording is one sandbox's; a group has none")
	case r.Sandbox != "" && (r.Spec.Image != "" || r.Spec.Snapshot != "" || r.Spec.Template != ""):
		return sandbox.InvalidField("sandbox", "and an image, snapshot or template are both set; a group is made of one of them")
	}
	return nil
}

// makeGang makes a group within its turn: all that can be, and none if they are
// too few.
func (s *Server) makeGang(ctx context.Context, b plan, r ForkRequest, enough int, keys func(i int) store.Idempotency) (children []Child, err error) {
	tenant := store.ScopeOf(ctx).Tenant()
	q, err := s.quotaOf(ctx, tenant, sandboxQuota)
	if err != nil {
		return nil, err
	}
	waiting, stop := withWanted(ctx, b.wanted)
	defer stop()
	b.hasTurn, b.numbered = true, b.spec.Rollout.Run != ""
	at := place{tenant: tenant, weight: q.Weight, wait: r.gang.wait, want: b.spec.Resources, count: enough, tell: func(position int) {
		r.gang.tell(GroupProgress{State: "queued", Position: position, RetryAfter: lookAgain})
	}}
	err = s.queue.enter(waiting, at, func() error {
		if err := waiting.Err(); err != nil {
			return err // its turn, and nobody there
		}
		children = s.makeAll(ctx, b, r.Count, keys, func(ready int) { r.gang.tell(GroupProgress{State: "creating", Ready: ready}) })
		if ready := standing(children); ready < enough {
			err := s.byWhom(ctx, tooFew(ready, enough, children))
			s.takeBackAll(children)
			return err
		}
		return nil
	})
	return children, err
}

func standing(children []Child) (n int) {
	for _, c := range children {
		if c.Err == nil {
			n++
		}
	}
	return n
}
