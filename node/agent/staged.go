package agent

import (
	"context"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/cas"
	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/sandbox"
)

// stand is what a snapshot holds of its sandbox: the sole use of it, and with
// Stop that it does not run.
type stand struct {
	n        *Node
	b        *box
	giveBack func() // nil: not owned
	release  func() // nil: not held
	frozen   bool
}

func (s *stand) freeze() error {
	err := s.n.freeze(s.b, true, false)
	s.frozen = err == nil
	return err
}

// leave lets the sandbox be, and with goOn lets it run.
func (s *stand) leave(goOn bool) {
	if s.frozen && goOn {
		if err := s.n.thaw(s.b); err != nil && s.b.ctx.Err() == nil {
			s.n.log.Warn("a sandbox does not go on after its snapshot", "sandbox", s.b.id, "err", err)
		}
	}
	if s.giveBack != nil {
		s.giveBack()
	}
	if s.release != nil {
		s.release()
	}
}

// staged are the snapshots that wait for their commit, and for a while what
// became of the others: a commit whose answer was lost is said again.
type staged struct {
	mu struct {
		sync.Mutex
		byToken map[string]*stagedSnapshot
	}
}

// outcomesFor is how long they are remembered.
const outcomesFor = 10 * time.Minute

type stagedSnapshot struct {
	content sandbox.Content
	box     *box
	stop    bool
	stand   func(goOn bool) // ends it; the second time does nothing

	// Guarded by staged.mu.
	fate  fate
	timer *time.Timer // aborts it, and then forgets it
}

type fate int

const (
	undecided fate = iota
	committed
	aborted
)

// stage gives a snapshot that was made its token.
func (n *Node) stage(p *node.Prepared, s *stand, r node.SnapshotRequest) {
	ttl := r.TTL
	if ttl == 0 {
		ttl = node.DefaultPrepared
	}
	p.Token, p.Until = newToken(), time.Now().Add(ttl)
	g := &stagedSnapshot{content: p.Content, box: s.b, stop: r.Stop, stand: func(bool) {}}
	if r.Stop {
		var once sync.Once
		g.stand = func(goOn bool) { once.Do(func() { s.leave(goOn) }) }
		// One that ends meanwhile is not kept from it. Its state is good still.
		context.AfterFunc(s.b.ctx, func() { g.stand(false) })
	}
	n.staged.mu.Lock()
	defer n.staged.mu.Unlock()
	if n.staged.mu.byToken == nil {
		n.staged.mu.byToken = map[string]*stagedSnapshot{}
	}
	n.staged.mu.byToken[p.Token] = g
	g.timer = time.AfterFunc(ttl, func() {
		if n.abort(p.Token) {
			n.log.Warn("nobody committed a snapshot in time; it is aborted", "sandbox", s.b.id)
		}
	})
}

// settle decides what becomes of a snapshot that waits, and returns it; nil = it
// does not wait, and was says what became of it.
func (s *staged) settle(token string, as fate) (g *stagedSnapshot, was fate, known bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	g, known = s.mu.byToken[token]
	if !known {
		return nil, 0, false
	}
	if g.fate != undecided {
		return nil, g.fate, true
	}
	g.fate = as
	g.timer.Stop()
	g.timer = time.AfterFunc(outcomesFor, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.mu.byToken, token)
	})
	return g, undecided, true
}

// CommitSnapshot lets content be the caller's, and with Stop ends the sandbox.
func (n *Node) CommitSnapshot(_ context.Context, token string) error {
	const op = "node.commit_snapshot"
	if err := n.call(); err != nil {
		return err
	}
	defer n.calls.Done()
	g, was, known := n.staged.settle(token, committed)
	switch {
	case !known:
		return sandbox.Errorf(sandbox.NotFound, op, "no such snapshot waits here")
	case was == aborted:
		return sandbox.Errorf(sandbox.Conflict, op, "the snapshot was aborted").WithHint("take it again")
	case g == nil:
		return nil
	}
	// Its caller has named it: from here on it is there for as long as that says so,
	// and not until a collection has heard the name.
	if m := g.content.Manifest; m != "" {
		n.states.unhold(cas.ID(m))
	}
	if g.stop {
		n.mu.Lock()
		n.endLocked(g.box, sandbox.End{Cause: sandbox.KilledByUser, Detail: "stopped by a snapshot"}, true)
		n.mu.Unlock()
		g.stand(false)
	}
	return nil
}

// AbortSnapshot lets content go and the sandbox go on.
func (n *Node) AbortSnapshot(_ context.Context, token string) error {
	if err := n.call(); err != nil {
		return err
	}
	defer n.calls.Done()
	if n.abort(token) {
		return nil
	}
	if _, was, _ := n.staged.settle(token, aborted); was == committed {
		return sandbox.Errorf(sandbox.Conflict, "node.abort_snapshot", "the snapshot was committed")
	}
	return nil
}

// abort says whether there was something to abort.
func (n *Node) abort(token string) bool {
	g, _, _ := n.staged.settle(token, aborted)
	if g == nil {
		return false
	}
	g.stand(true)
	n.letGo(g.content)
	return true
}

// abortAll is for a node that closes: its sandboxes go on without it.
func (n *Node) abortAll() {
	n.staged.mu.Lock()
	tokens := make([]string, 0, len(n.staged.mu.byToken))
	for t := range n.staged.mu.byToken {
		tokens = append(tokens, t)
	}
	n.staged.mu.Unlock()
	for _, t := range tokens {
		n.abort(t)
	}
}
