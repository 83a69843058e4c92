package server

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/internal/notify"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// forkGrace is how long children wait for a caller that left to ask for them
// again. An SDK asks within seconds, as long as its server is away.
const forkGrace = time.Minute

// forks knows those under way and just answered, by idempotency key. What an
// earlier process answered is found in the store: each child has a key of its
// own there, which follows from the fork's.
type forks struct {
	mu struct {
		sync.Mutex
		byKey map[string]*forking
	}
}

// forking is one fork; out and err are set before done is closed.
type forking struct {
	hash string
	what string // was asked for, in words
	done chan struct{}
	out  Forked
	err  error

	// Of a group.
	progress notify.Latest[GroupProgress]
	wanted   context.Context // ends when nobody has waited for a while
	drop     context.CancelFunc

	mu struct {
		sync.Mutex
		claimed bool // somebody was there for the answer
		callers int
	}
}

// joined counts a caller until its context ends. A group that nobody waits for
// goes after grace, in which who lost the connection comes back.
func (f *forking) joined(ctx context.Context, grace time.Duration) {
	f.mu.Lock()
	f.mu.callers++
	f.mu.Unlock()
	context.AfterFunc(ctx, func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.mu.callers--; f.mu.callers == 0 {
			time.AfterFunc(grace, func() {
				f.mu.Lock()
				defer f.mu.Unlock()
				if f.mu.callers == 0 {
					f.drop()
				}
			})
		}
	})
}

// wait is for the answer, and tells of the progress meanwhile.
func (f *forking) wait(ctx context.Context, tell func(GroupProgress)) error {
	var last GroupProgress
	for {
		p, changed := f.progress.Get()
		if p != last {
			last = p
			tell(p)
		}
		select {
		case <-f.done:
			return nil
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// forkOnce answers every request with the same key with the same children.
func (s *Server) forkOnce(ctx context.Context, r ForkRequest) (Forked, error) {
	hash := forkHash(r)
	slot := keySlot(ctx, r.Key)
	s.forks.mu.Lock()
	f := s.forks.mu.byKey[slot]
	lead := f == nil
	if lead {
		f = &forking{hash: hash, what: r.inWords(), done: make(chan struct{})}
		f.wanted, f.drop = context.WithCancel(context.WithoutCancel(ctx))
		if s.forks.mu.byKey == nil {
			s.forks.mu.byKey = map[string]*forking{}
		}
		s.forks.mu.byKey[slot] = f
	}
	s.forks.mu.Unlock()
	if f.hash != hash {
		return Forked{}, forkKeyTaken(r.Key, f.what)
	}
	tell, grace := func(GroupProgress) {}, s.cfg.ForkGrace
	if r.gang != nil {
		grace = s.cfg.GroupGrace
		f.joined(ctx, s.cfg.GroupGrace)
		tell = r.gang.tell
		r.gang = &gang{wait: r.gang.wait, tell: f.progress.Set}
	}
	if lead {
		go func() {
			defer close(f.done)
			s.leadFork(f, r)
			s.answered(f, slot, grace)
		}()
		_ = f.wait(context.WithoutCancel(ctx), tell) // a server that stops waits for its calls
	}
	if err := f.wait(ctx, tell); err != nil {
		return Forked{}, err
	}
	if err := ctx.Err(); err != nil {
		return Forked{}, err
	}
	if f.err != nil {
		return Forked{}, f.err
	}
	if err := s.claim(ctx, f); err != nil {
		return Forked{}, err
	}
	out := f.out
	out.Existed = out.Existed || !lead
	return out, nil
}

// keyed is the fork under way or just answered with a key; nil if there is none.
func (f *forks) keyed(slot string) *forking {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.mu.byKey[slot]
}

// killFork ends the children of a fork whose caller does not want them any more
// and may not know them. One under way is waited for, and no longer by who called
// alone: it is likely to leave.
func (s *Server) killFork(ctx context.Context, f *forking, call *call) (first sandbox.Sandbox, err error) {
	ctx = context.WithoutCancel(ctx)
	<-f.done
	if f.err != nil {
		return first, errNoKey() // there are none
	}
	var mu sync.Mutex // guards first
	ids := f.children()
	err = inParallel(ctx, killWidth, ids, func(id string) error {
		sb, err := s.kill(ctx, id)
		if errors.Is(err, sandbox.ErrNotFound) {
			return nil // forgotten meanwhile
		}
		mu.Lock()
		defer mu.Unlock()
		call.concerns("sandbox", id)
		if id == ids[0] {
			first = sb
		}
		return err
	})
	return first, err
}

// leadFork makes the children of a fork for all who ask with its key. Whatever
// becomes of it, a panic too, those who wait are told and the key does not stay.
func (s *Server) leadFork(f *forking, r ForkRequest) {
	f.err = &sandbox.Error{Class: sandbox.Internal, Msg: "the fork broke off; the server's log has the reason", Hint: "the same key may be tried again"}
	defer func() {
		if p := recover(); p != nil {
			s.log.Error("a fork panicked", "panic", p, "stack", string(debug.Stack()))
		}
	}()
	f.out, f.err = s.forkKnown(f.wanted, r, f.hash)
}

// answered forgets a fork when its time is over, with its children if nobody was
// there for them.
func (s *Server) answered(f *forking, slot string, grace time.Duration) {
	forget := func() {
		f.drop()
		s.forks.mu.Lock()
		delete(s.forks.mu.byKey, slot)
		s.forks.mu.Unlock()
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.err == nil && !f.mu.claimed {
			for _, id := range f.children() {
				s.takeBack(id)
			}
		}
	}
	if f.err != nil {
		forget() // the same key may be tried again
	} else {
		time.AfterFunc(grace, forget)
	}
}

func (f *forking) children() (ids []string) {
	for _, c := range f.out.Children {
		if c.Err == nil {
			ids = append(ids, c.Sandbox.ID)
		}
	}
	return ids
}

// claim puts on record that the children are somebody's, before their ids are told:
// a server that dies in between has children that nobody learned of, and ends them
// after its next start (endUnclaimed).
func (s *Server) claim(ctx context.Context, f *forking) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.mu.claimed {
		return nil
	}
	err := inParallel(ctx, reconcileWidth, f.children(), func(id string) error {
		_, err := s.store.UpdateSandbox(ctx, id, func(sb *sandbox.Sandbox) error {
			if sb.Unclaimed && sb.State == sandbox.Ending {
				return errTakenBack
			}
			sb.Unclaimed = false
			return nil
		})
		if errors.Is(err, sandbox.ErrEnded) {
			return nil // and its end is there to be read
		}
		return err
	})
	f.mu.claimed = err == nil
	return err
}

var errTakenBack = &sandbox.Error{Class: sandbox.Unavailable, Msg: "nobody asked for the children of this fork, and they are being removed", Hint: "ask again for new ones"}

// endUnclaimed takes a child of an earlier process's fork back that nobody asks
// for within the grace that its own server would have given it.
func (s *Server) endUnclaimed(id string) {
	time.AfterFunc(s.cfg.ForkGrace, func() {
		ctx := asServer(context.Background())
		_, err := s.store.UpdateSandbox(ctx, id, func(sb *sandbox.Sandbox) error {
			if !sb.Unclaimed {
				return errClaimed
			}
			sb.State = sandbox.Ending // from here on it cannot be claimed
			return nil
		})
		switch {
		case err == nil:
			s.takeBack(id)
		case !errors.Is(err, errClaimed) && !errors.Is(err, sandbox.ErrEnded) && !errors.Is(err, sandbox.ErrNotFound):
			s.log.Warn("a child of a fork that nobody knows of could not be removed", "sandbox", id, "err", err)
		}
	})
}

var errClaimed = errors.New("somebody has it")

// forkKnown looks for the children of an earlier process's fork. Where only some
// are there it died amid it: they are of a state that nobody was told of, and
// go.
func (s *Server) forkKnown(ctx context.Context, r ForkRequest, hash string) (Forked, error) {
	out := Forked{Existed: true}
	var found []string
	whole := true
	for i := range r.Count {
		sb, err := s.store.SandboxByKey(ctx, childKey(r.Key, hash, i))
		switch {
		case err == nil:
			found = append(found, sb.ID)
			whole = whole && sb.End == nil
			out.Children = append(out.Children, Child{Sandbox: s.asItIs(ctx, sb)})
		case errors.Is(err, sandbox.ErrNotFound):
			whole = false
		case errors.Is(err, sandbox.ErrAlreadyExists):
			return Forked{}, forkKeyTaken(r.Key, s.keyUsedFor(ctx, childKey(r.Key, hash, i)))
		default:
			return Forked{}, err
		}
	}
	if whole {
		return out, nil
	}
	for _, id := range found {
		if err := s.killOnNode(ctx, id, "one of a fork that was cut off"); err != nil {
			return Forked{}, err
		}
		if err := s.store.ForgetSandbox(ctx, id); err != nil && !errors.Is(err, sandbox.ErrNotFound) {
			return Forked{}, err
		}
	}
	// It goes on when the caller leaves: who has a key asks again.
	return s.fork(ctx, r, func(i int) store.Idempotency { return childKey(r.Key, hash, i) })
}

// inWords says what is asked for.
func (r ForkRequest) inWords() string {
	of := r.Rollout
	if r.Spec != nil {
		of = r.Spec.Rollout
	}
	switch {
	case r.gang == nil:
		return fmt.Sprintf("a fork of %s into %d", cmp.Or(r.Sandbox, r.Snapshot), r.Count)
	case of.Group != "":
		return fmt.Sprintf("a group of %d, '%s' of run %s", r.Count, of.Group, of.Run)
	}
	return fmt.Sprintf("a group of %d", r.Count)
}

// keyUsedFor says what an earlier process made with a key, as far as one of its
// sandboxes tells.
func (s *Server) keyUsedFor(ctx context.Context, child store.Idempotency) string {
	sb, err := s.store.SandboxByKey(ctx, store.Idempotency{Key: child.Key})
	switch of := sb.Spec.Rollout; {
	case err != nil:
		return "another request"
	case of.Group != "":
		return fmt.Sprintf("other sandboxes, such as %s, of group '%s' of run %s", sb.ID, of.Group, of.Run)
	}
	return "other sandboxes, such as " + sb.ID
}

func forkKeyTaken(key, what string) error {
	return &sandbox.Error{Class: sandbox.AlreadyExists, Field: "idempotency_key",
		Msg:  "'" + key + "' was used for " + what,
		Hint: "repeat the first request exactly, or choose a new key"}
}

// childKey is of one child of a fork.
func childKey(key, hash string, i int) store.Idempotency {
	sum := sha256.Sum256([]byte(key))
	return store.Idempotency{Key: fmt.Sprintf("fork:%s:%d", hex.EncodeToString(sum[:16]), i), Hash: hash}
}

func forkHash(r ForkRequest) string {
	if r.Spec != nil {
		spec := *r.Spec
		spec.Lease = "" // who asks is no part of what is asked for
		r.Spec = &spec
	}
	b, err := json.Marshal(r)
	if err != nil {
		panic(err) // strings and numbers only
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// keyedID is the id of the one snapshot that a tenant's key makes.
func keyedID(tenant, key string) string {
	sum := sha256.Sum256([]byte("snapshot\x00" + tenant + "\x00" + key))
	return sandbox.NewID(bytes.NewReader(sum[:]))
}

// taken finds the snapshot that an earlier request with the same key made.
func (s *Server) taken(ctx context.Context, id string, t taking) (snap sandbox.Snapshot, found bool, err error) {
	if t.id == "" {
		return snap, false, nil
	}
	snap, err = s.store.GetSnapshot(ctx, t.id)
	switch {
	case errors.Is(err, sandbox.ErrNotFound):
		return snap, false, nil
	case err != nil:
		return snap, false, err
	case snap.Sandbox != id || snap.Kind != t.kind || snap.Path != t.path:
		return snap, false, &sandbox.Error{Class: sandbox.AlreadyExists, Field: "idempotency_key", Msg: "the key was used for another snapshot",
			Hint: "repeat the first request exactly, or choose a new key"}
	}
	return snap, true, nil
}
