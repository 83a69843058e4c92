package server

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/sandbox"
)

// busyBook is the sandboxes that no clock may end now: a grade is under way, and
// an end amid it would count as the agent's fault. Their timeout, idle timeout and
// lease wait; a kill does not.
type busyBook struct {
	mu struct {
		sync.Mutex
		of map[string]*busy
	}
}

type busy struct {
	turn  sync.Mutex // held while the node is told of an expiry
	count int        // guarded by busyBook.mu
}

func (b *busyBook) init() { b.mu.of = map[string]*busy{} }

func (b *busyBook) join(id string) *busy {
	b.mu.Lock()
	defer b.mu.Unlock()
	e := b.mu.of[id]
	if e == nil {
		e = &busy{}
		b.mu.of[id] = e
	}
	e.count++
	return e
}

func (b *busyBook) leave(id string, e *busy) (last bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if e.count--; e.count == 0 {
		delete(b.mu.of, id)
	}
	return e.count == 0
}

func (b *busyBook) get(id string) *busy {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.mu.of[id]
}

// holdOff wakes a sandbox and keeps its timeout, its idle timeout and its lease
// from ending it until release. What was due meanwhile is due then. An end of its
// life that a hold of at most most cannot meet is left alone: to move it is a write.
//
// The node forgets the expiry and is told it again from the record, so a server
// that dies amid it holds nothing: Reconcile tells the node too.
func (s *Server) holdOff(ctx context.Context, sb sandbox.Sandbox, most time.Duration) (release func(), err error) {
	id := sb.ID
	awake, err := node.Keep(ctx, s.node, id)
	if err != nil {
		return nil, s.explain(ctx, id, err)
	}
	e := s.busy.join(id)
	if !sb.ExpiresAt.IsZero() && sb.ExpiresAt.Before(s.cfg.Clock().Add(most)) {
		e.turn.Lock()
		err = s.node.SetExpiry(ctx, id, time.Time{})
		e.turn.Unlock()
	}
	base := context.WithoutCancel(ctx)
	release = sync.OnceFunc(func() {
		defer awake()
		e.turn.Lock()
		defer e.turn.Unlock()
		if !s.busy.leave(id, e) {
			return
		}
		s.leases.poke()
		s.untilDone("set the expiry of "+id+" again", func(ctx context.Context) error {
			sb, err := s.store.GetSandbox(asServer(base), id)
			if err == nil && sb.End == nil {
				err = s.node.SetExpiry(asServer(ctx), id, sb.ExpiresAt)
			}
			if errors.Is(err, sandbox.ErrNotFound) || errors.Is(err, sandbox.ErrEnded) {
				return nil
			}
			return err
		})
	})
	if err != nil {
		release()
		return nil, s.explain(ctx, id, err)
	}
	return release, nil
}

// setExpiry tells the node of an expiry that is on record, unless a hold is to
// tell it later.
func (s *Server) setExpiry(ctx context.Context, id string, at time.Time) error {
	if e := s.busy.get(id); e != nil {
		e.turn.Lock()
		defer e.turn.Unlock()
		if s.busy.get(id) == e {
			return nil
		}
	}
	return s.node.SetExpiry(ctx, id, at)
}
