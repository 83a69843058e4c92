package server

import (
	"context"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// leftGrace is between the end of a caller and that of its request.
const leftGrace = time.Second

// callbackOf is a request under way that nobody has begun to answer.
func (s *Server) callbackOf(ctx context.Context, id, request string) (*callback, error) {
	if err := validID("id", id); err != nil {
		return nil, err
	}
	if _, err := s.live(ctx, id); err != nil {
		return nil, err
	}
	b := &s.callbacks
	b.mu.Lock()
	defer b.mu.Unlock()
	if route := b.mu.routes[id]; route != nil {
		if c := route.calls[request]; c != nil {
			return c, nil
		}
	}
	return nil, &sandbox.Error{Class: sandbox.NotFound, Msg: "no such request: it was answered, its caller left, or its sandbox was reset"}
}

// ReadCallbackBody has the body of a request from inside read, once. What use
// returns is returned.
func (s *Server) ReadCallbackBody(ctx context.Context, id, request string, use func(io.Reader) error) (err error) {
	ctx, call, err := s.begin(ctx, "callback.body", about("id", id))
	if err != nil {
		return err
	}
	defer call.end(&err)
	c, err := s.callbackOf(ctx, id, request)
	if err != nil {
		return err
	}
	s.callbacks.mu.Lock()
	body := c.body
	c.body = nil
	s.callbacks.mu.Unlock()
	if body == nil {
		return &sandbox.Error{Class: sandbox.Precondition, Msg: "the body was in the event, or is being read already"}
	}
	return use(body)
}

// CallbackAnswer is what code inside is answered.
type CallbackAnswer struct {
	Status  int // 0 = 200
	Header  http.Header
	Content Upload
}

// AnswerCallback answers a request from inside, and returns when its caller has the
// answer. What is about one connection, or ours to say, is left out of the header.
func (s *Server) AnswerCallback(ctx context.Context, id, request string, answer CallbackAnswer) (err error) {
	ctx, call, err := s.begin(ctx, "callback.answer", about("id", id))
	if err != nil {
		return err
	}
	defer call.end(&err)
	c, err := s.callbackOf(ctx, id, request)
	if err != nil {
		return err
	}
	a := callbackAnswer{status: answer.Status, header: http.Header{}, length: answer.Content.Size, body: answer.Content, result: make(chan error, 1)}
	if a.status == 0 {
		a.status = http.StatusOK
	}
	if a.status < 200 || a.status > 599 {
		return sandbox.InvalidField("status", "%d is not accepted; 200 to 599 are", a.status)
	}
	for name, values := range answer.Header {
		if name != "Content-Length" && !slices.Contains(hopByHop, name) && !strings.HasPrefix(name, "X-Cove-") {
			a.header[name] = values
		}
	}
	s.callbacks.mu.Lock()
	taken := c.taken
	c.taken = true
	s.callbacks.mu.Unlock()
	if taken {
		return &sandbox.Error{Class: sandbox.Precondition, Msg: "the request is being answered already, or its server was given up"}
	}
	c.answer <- a // it takes the one there is; from here on its own goroutine reads the body
	select {
	case <-c.done:
	case <-c.ctx.Done():
		// The caller has left: mostly with its answer, in which case this is
		// about to be done. If not, the body is read on until its next part.
		select {
		case <-c.done:
		case <-time.After(leftGrace):
			if answer.Content.Unblock != nil {
				answer.Content.Unblock()
			}
			<-c.done
		}
	}
	select {
	case err = <-a.result:
	default:
		err = callerLeft(nil) // it left before it saw the answer
	}
	return err
}
