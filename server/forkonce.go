package server

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
	"github.com/cove-sandbox/cove/wire"
)

// forkGrace is how long children wait for a caller that left to ask for them
// again. An SDK asks within seconds, as long as its server is away.
const forkGrace = time.Minute

// forks knows those under way and just answered, by idempotency key. What an
// earlier process answered is found in the store: each child has a key of its
// own there, which follows from the fork's.
type forks struct {
	mu    sync.Mutex
	byKey map[string]*forking
}

// forking is one fork; out and err are set before done is closed.
type forking struct {
	hash string
	done chan struct{}
	out  *covev1.ForkResponse
	err  error

	claimed bool // somebody was there for the answer; guarded by forks.mu
}

// forkOnce answers every request with the same key with the same children.
func (s *Server) forkOnce(ctx context.Context, m *covev1.ForkRequest) (*covev1.ForkResponse, error) {
	hash := forkHash(m)
	slot := store.ScopeOf(ctx).Tenant() + " " + m.IdempotencyKey
	s.forks.mu.Lock()
	f := s.forks.byKey[slot]
	lead := f == nil
	if lead {
		f = &forking{hash: hash, done: make(chan struct{})}
		if s.forks.byKey == nil {
			s.forks.byKey = map[string]*forking{}
		}
		s.forks.byKey[slot] = f
	}
	s.forks.mu.Unlock()
	if f.hash != hash {
		return nil, forkKeyTaken(m.IdempotencyKey)
	}
	if lead {
		f.out, f.err = s.forkKnown(ctx, m, hash)
		close(f.done)
	}
	select {
	case <-f.done:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	s.forks.mu.Lock()
	f.claimed = f.claimed || ctx.Err() == nil
	s.forks.mu.Unlock()
	if lead {
		forget := func() {
			s.forks.mu.Lock()
			defer s.forks.mu.Unlock()
			delete(s.forks.byKey, slot)
			if f.err == nil && !f.claimed {
				for _, r := range f.out.Results {
					if r.Sandbox != nil {
						s.takeBack(r.Sandbox.Id)
					}
				}
			}
		}
		if f.err != nil {
			forget() // the same key may be tried again
		} else {
			time.AfterFunc(s.cfg.ForkGrace, forget)
		}
	}
	if f.err != nil {
		return nil, f.err
	}
	out := proto.CloneOf(f.out)
	out.Existed = out.Existed || !lead
	return out, nil
}

// forkKnown looks for the children of an earlier process's fork. Where only some
// are there it died amid it: they are of a state that nobody was told of, and
// go.
func (s *Server) forkKnown(ctx context.Context, m *covev1.ForkRequest, hash string) (*covev1.ForkResponse, error) {
	out := &covev1.ForkResponse{Existed: true}
	var found []string
	whole := true
	for i := range int(m.Count) {
		sb, err := s.store.SandboxByKey(ctx, childKey(m.IdempotencyKey, hash, i))
		switch {
		case err == nil:
			found = append(found, sb.ID)
			whole = whole && sb.End == nil
			out.Results = append(out.Results, &covev1.ForkResult{Sandbox: wire.Sandbox(s.asItIs(sb))})
		case errors.Is(err, sandbox.ErrNotFound):
			whole = false
		case errors.Is(err, sandbox.ErrAlreadyExists):
			return nil, forkKeyTaken(m.IdempotencyKey)
		default:
			return nil, err
		}
	}
	if whole {
		return out, nil
	}
	for _, id := range found {
		if err := s.killOnNode(ctx, id, "one of a fork that was cut off"); err != nil {
			return nil, err
		}
		if err := s.store.ForgetSandbox(ctx, id); err != nil && !errors.Is(err, sandbox.ErrNotFound) {
			return nil, err
		}
	}
	// It goes on when the caller leaves: who has a key asks again.
	return s.fork(context.WithoutCancel(ctx), m, func(i int) store.Idempotency { return childKey(m.IdempotencyKey, hash, i) })
}

func forkKeyTaken(key string) error {
	return &sandbox.Error{Class: sandbox.AlreadyExists, Field: "idempotency_key",
		Msg:  "'" + key + "' was used for another fork",
		Hint: "repeat the first request exactly, or choose a new key"}
}

// childKey is of one child of a fork.
func childKey(key, hash string, i int) store.Idempotency {
	sum := sha256.Sum256([]byte(key))
	return store.Idempotency{Key: fmt.Sprintf("fork:%s:%d", hex.EncodeToString(sum[:16]), i), Hash: hash}
}

func forkHash(m *covev1.ForkRequest) string {
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		panic(err) // a message that came over the wire
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
