package agent

import (
	"errors"
	"slices"
	"sync"

	"github.com/cove-sandbox/cove/guest/wire"
	"github.com/cove-sandbox/cove/sandbox"
)

// maxAnswers that were given are remembered. A request is sent again within
// seconds; 256 are more than a client has under way.
const maxAnswers = 256

// answers are those of requests that must not run twice, by the request's id: one
// that is sent again, since its answer did not arrive, gets the same answer.
type answers struct {
	mu struct {
		sync.Mutex
		byID  map[string]*answer
		order []string // oldest first
	}
}

type answer struct {
	given chan struct{} // closed when the rest is set
	set   bool          // of who runs the request
	res   wire.Res
	err   error
}

// begin returns the answer of a request, and whether it is the caller's to give.
func (as *answers) begin(id string) (a *answer, mine bool) {
	as.mu.Lock()
	defer as.mu.Unlock()
	if a := as.mu.byID[id]; a != nil {
		return a, false
	}
	if as.mu.byID == nil {
		as.mu.byID = map[string]*answer{}
	}
	if len(as.mu.order) >= maxAnswers {
		select {
		case <-as.mu.byID[as.mu.order[0]].given:
			delete(as.mu.byID, as.mu.order[0])
			as.mu.order = as.mu.order[1:]
		default: // still under way; there are no more of these than connections
		}
	}
	a = &answer{given: make(chan struct{})}
	as.mu.byID[id] = a
	as.mu.order = append(as.mu.order, id)
	return a, true
}

// once runs a request that has an id, or repeats what it was answered.
func (s *session) once(r wire.Req, body *content) error {
	a, mine := s.agent.answers.begin(r.ID)
	if !mine {
		if err := body.skip(); err != nil {
			return err
		}
		select {
		case <-a.given:
		case <-s.ctx.Done():
			return errGone
		}
		return s.reply(a.res, a.err)
	}
	s.answer = a
	err := s.dispatch(r, body)
	s.answer = nil
	if !a.set {
		if a.err = err; errors.Is(err, errGone) {
			// Some of it may have been done. Twice would be worse than not at all.
			a.err = sandbox.Errorf(sandbox.Unavailable, "guest."+r.Op, "the connection ended in the middle of the request")
		}
	}
	close(a.given)
	return err
}

// forget drops every answer that was given. Who asks for one again gets it made
// again, by another sandbox: the host asks nothing of one that is gone.
func (as *answers) forget() {
	as.mu.Lock()
	defer as.mu.Unlock()
	as.mu.order = slices.DeleteFunc(as.mu.order, func(id string) bool {
		select {
		case <-as.mu.byID[id].given:
			delete(as.mu.byID, id)
			return true
		default: // under way, as is the one that forgets
			return false
		}
	})
}
