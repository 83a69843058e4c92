package server

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// createTimeout bounds a creation that its caller may have left. A create
// takes milliseconds from a warm kernel and well under a second without.
const createTimeout = 60 * time.Second

// lineTimeout bounds a creation with its wait for a kernel, in line with others: a
// burst of some hundred is that many boots, which on few cores take minutes. Who
// is no longer there does not wait (plan.wanted), and what takes long for another
// reason has bounds of its own.
const lineTimeout = 10 * time.Minute

// undoTimeout bounds taking back what a failed call made.
const undoTimeout = 20 * time.Second

// creates knows the creations under way, by id and by idempotency key.
type creates struct {
	mu struct {
		sync.Mutex
		byID  map[string]chan struct{} // closed when the creation is over
		byKey map[string]*creation
	}
}

// creation is one idempotent create; its fields below done are set before done
// is closed and do not change after.
type creation struct {
	hash       string
	callers    int             // who still wait; guarded by creates.mu
	wanted     context.Context // ends when none does
	drop       context.CancelFunc
	leaderLeft func() // by who began it; once
	done       chan struct{}

	sb        sandbox.Sandbox
	err       error
	abandoned bool // all had left: it did not come to be, or was taken back
}

func (c *creates) init() {
	c.mu.byID, c.mu.byKey = map[string]chan struct{}{}, map[string]*creation{}
}

// begin marks id as being created until the returned function is called.
func (c *creates) begin(id string) (end func()) {
	done := make(chan struct{})
	c.mu.Lock()
	c.mu.byID[id] = done
	c.mu.Unlock()
	return func() {
		c.mu.Lock()
		delete(c.mu.byID, id)
		c.mu.Unlock()
		close(done)
	}
}

// pending is closed when id's creation is over; nil if none is under way.
func (c *creates) pending(id string) <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.byID[id]
}

// join returns the creation under way with a key, or makes one that the caller
// then leads. It is wanted while one of those who joined is there.
func (c *creates) join(ctx context.Context, key, hash string) (cr *creation, lead bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if cr = c.mu.byKey[key]; cr == nil {
		cr, lead = &creation{hash: hash, done: make(chan struct{})}, true
		cr.wanted, cr.drop = context.WithCancel(context.WithoutCancel(ctx))
		c.mu.byKey[key] = cr
	}
	cr.callers++
	left := sync.OnceFunc(func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if cr.callers--; cr.callers == 0 {
			cr.drop()
		}
	})
	if lead {
		cr.leaderLeft = left
	}
	context.AfterFunc(ctx, left)
	return cr, lead
}

// abandon says whether what came of a creation is nobody's: all who wanted it
// left, and nobody has come since who could be given it.
func (c *creates) abandon(cr *creation, err error) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	cr.abandoned = cr.wanted.Err() != nil && (err != nil || cr.callers == 0)
	return cr.abandoned
}

func (c *creates) leave(key string, cr *creation) {
	c.mu.Lock()
	delete(c.mu.byKey, key)
	c.mu.Unlock()
	cr.drop()
	close(cr.done)
}

// keyed is closed when the creation under way with a key is over; nil if none is.
func (c *creates) keyed(key string) <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if cr := c.mu.byKey[key]; cr != nil {
		return cr.done
	}
	return nil
}

// CreateRequest asks for a sandbox. Key makes it idempotent.
type CreateRequest struct {
	Spec sandbox.Spec
	Key  string
}

// Created is a sandbox that was made, or was already there by its key.
type Created struct {
	Sandbox  sandbox.Sandbox
	NodeTime time.Duration // that the node needed
	Existed  bool
}

// CreateSandbox returns when both the store's record and the node's are durable;
// the two are made at the same time.
//
// A caller that leaves before the answer leaves no sandbox: nobody knows its id.
// With an idempotency key the retry may come, and while it waits the creation is
// its own; after that the key makes a new one. Keeping the first for a retry was
// the other way: of a client that died, none ever came. A creation that fails
// leaves no sandbox, no record and no key: the same key may be tried again.
func (s *Server) CreateSandbox(ctx context.Context, r CreateRequest) (out Created, err error) {
	ctx, call, err := s.begin(ctx, "sandbox.create")
	if err != nil {
		return out, err
	}
	defer call.end(&err)
	if err := firstError(call.needs(partsOfSpec(r.Spec)...), sandbox.ValidateIdempotencyKey("idempotency_key", r.Key)); err != nil {
		return out, err
	}
	if r.Key == "" {
		out.Sandbox, out.NodeTime, err = s.create(ctx, ctx, r.Spec, store.Idempotency{})
		if err == nil && ctx.Err() != nil {
			s.takeBack(out.Sandbox.ID)
			err = ctx.Err()
		}
	} else {
		out.Sandbox, out.NodeTime, out.Existed, err = s.createOnce(ctx, r.Spec, r.Key)
	}
	if err == nil {
		call.concerns("sandbox", out.Sandbox.ID)
	}
	return out, err
}

// createOnce creates at most one sandbox per key. Within this process a
// second call waits for the first, so the store can be asked before the node
// and its record still be written beside the node's work.
func (s *Server) createOnce(ctx context.Context, spec sandbox.Spec, key string) (sb sandbox.Sandbox, took time.Duration, existed bool, err error) {
	idem := store.Idempotency{Key: key, Hash: specHash(spec)}
	slot := keySlot(ctx, key)
	cr, lead := s.creates.join(ctx, slot, idem.Hash)
	for !lead {
		select {
		case <-cr.done:
		case <-ctx.Done():
			return sb, 0, false, ctx.Err()
		}
		if cr.hash == idem.Hash && !cr.abandoned {
			return cr.sb, 0, true, cr.err
		}
		// Another spec with the same key. Whether the key is its or ours is
		// the store's word, not this race's: it may itself have been refused.
		// Or the same, which went with those who asked for it.
		cr, lead = s.creates.join(ctx, slot, idem.Hash)
	}
	cr.err = &sandbox.Error{Class: sandbox.Internal, Msg: "the creation did not finish"} // unless it does
	defer func() { s.creates.leave(slot, cr) }()

	work := context.WithoutCancel(ctx) // whoever joins has not left
	sb, err = s.store.SandboxByKey(work, idem)
	switch {
	case err == nil && (sb.End == nil || sb.End.Cause != sandbox.NodeLost):
		existed = true
	case err == nil:
		// It was lost with its node, perhaps before its creator ever heard of
		// it (the server died between the two records). Its key makes a new
		// one: at most one lives, and a retry is not stuck with a dead one.
		s.log.Info("a lost sandbox is made again", "sandbox", sb.ID)
		if err = s.store.ForgetSandbox(work, sb.ID); err == nil {
			sb, took, err = s.create(work, cr.wanted, spec, idem)
		}
	case errors.Is(err, sandbox.ErrNotFound):
		sb, took, err = s.create(work, cr.wanted, spec, idem)
	case errors.Is(err, sandbox.ErrAlreadyExists):
		err = keyTaken(key)
	}
	if ctx.Err() != nil {
		cr.leaderLeft() // what the context calls may still be on its way
	}
	if s.creates.abandon(cr, err) && err == nil && !existed {
		s.takeBack(sb.ID) // before the key is free: a retry must not be given what is going
		err = context.Canceled
	}
	cr.sb, cr.err = sb, err
	return sb, took, existed, err
}

// keySlot is a key among the creations under way: another tenant's same key is
// another key.
func keySlot(ctx context.Context, key string) string { return store.ScopeOf(ctx).Tenant() + " " + key }

func keyTaken(key string) error {
	return &sandbox.Error{Class: sandbox.AlreadyExists, Field: "idempotency_key",
		Msg:  "'" + key + "' was used for a sandbox with another spec",
		Hint: "repeat the first request exactly, or choose a new key"}
}

// specHash is of the spec as asked for, before defaults: a server with other
// defaults still knows the request again. Maps are marshalled sorted.
func specHash(spec sandbox.Spec) string {
	spec.Lease = "" // who asks is no part of what is asked for
	b, err := json.Marshal(spec)
	if err != nil {
		panic(err) // strings and numbers only
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// create makes a sandbox on the node and in the store, or in neither. When
// wanted ends, it gives up as long as nothing but waiting would be lost, and
// otherwise goes on to its end: what then comes of it is the caller's concern.
func (s *Server) create(ctx, wanted context.Context, spec sandbox.Spec, idem store.Idempotency) (sandbox.Sandbox, time.Duration, error) {
	b, release, err := s.planOf(ctx, spec)
	if err != nil {
		return sandbox.Sandbox{}, 0, err
	}
	defer release()
	b.wanted = wanted
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lineTimeout)
	defer cancel()
	sb, took, err := s.makeSandbox(ctx, b, idem)
	return sb, took, s.byWhom(ctx, err)
}

// planOf checks a spec and finds what it starts from, which is held until release.
func (s *Server) planOf(ctx context.Context, spec sandbox.Spec) (b plan, release func(), err error) {
	if err := spec.ValidateSource(); err != nil {
		return b, nil, err
	}
	if spec, err = s.inRun(ctx, spec, false); err != nil {
		return b, nil, err
	}
	// Nothing is looked up or prepared for a spec that is wrong anyway. One from an
	// image is whole by now; what comes from a snapshot is checked once it is there.
	probe := spec.WithDefaults(s.cfg.Defaults)
	if probe.Image == "" {
		probe.Image = s.cfg.Defaults.Image
	}
	if err := probe.Validate(s.cfg.Limits); err != nil {
		return b, nil, err
	}
	network := probe.Network
	inherits := spec.Snapshot != "" || spec.Template != ""
	if inherits {
		network.Record = nil // whether there is anything to record is the snapshot's to say
	}
	if err := validateNetwork("spec.network", network.WithDefault(s.cfg.Defaults.Network)); err != nil {
		return b, nil, err
	}
	resolving, cancel := context.WithTimeout(context.WithoutCancel(ctx), prepareTimeout)
	defer cancel()
	spec, o, err := s.resolve(resolving, spec)
	if err != nil {
		return b, nil, err
	}
	spec.Network = spec.Network.WithDefault(s.cfg.Defaults.Network)
	if inherits {
		if err := firstError(spec.Validate(s.cfg.Limits), validateNetwork("spec.network", spec.Network)); err != nil {
			o.release()
			return b, nil, err
		}
	}
	return plan{spec: spec, img: o.img, from: o.from, lineage: o.lineage}, o.release, nil
}

// takeBack removes a sandbox that nobody will ever ask for: its creator left,
// or it was one of too few.
func (s *Server) takeBack(id string) {
	s.log.Info("a sandbox that nobody will ask for is taken back", "sandbox", id)
	s.untilDone("take back "+id, func(ctx context.Context) error {
		sb, err := s.store.GetSandbox(ctx, id)
		if err != nil && !errors.Is(err, sandbox.ErrNotFound) {
			return err
		}
		if err := s.killOnNode(ctx, id, "its creator left"); err != nil {
			return err
		}
		if r := sb.Spec.Network.Record; r != nil { // or its name would be taken when the creator asks again
			if err := s.dropRecording(ctx, r.ID); err != nil {
				return err
			}
		}
		return s.store.ForgetSandbox(ctx, id)
	})
}

// killOnNode ends what the store does not know. A sandbox the node does not
// have is as good as killed.
func (s *Server) killOnNode(ctx context.Context, id, why string) error {
	err := s.node.Kill(ctx, id, sandbox.End{Cause: sandbox.Infra, Detail: why, At: s.cfg.Clock().UTC()})
	if err != nil && !errors.Is(err, sandbox.ErrNotFound) && !errors.Is(err, sandbox.ErrEnded) {
		return err
	}
	s.ends.poke() // the node keeps the end until it is acknowledged
	return nil
}
