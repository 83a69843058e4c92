package server

import (
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// answerPrefix marks the headers of a PUT that are the answer's own.
const answerPrefix = "Cove-Answer-"

// leftGrace is between the end of a caller and that of its request.
const leftGrace = time.Second

// callbackOf is a request under way that nobody has begun to answer.
func (s *Server) callbackOf(r *http.Request) (*callback, error) {
	id := r.PathValue("id")
	if err := validID("id", id); err != nil {
		return nil, err
	}
	if _, err := s.live(r.Context(), id); err != nil {
		return nil, err
	}
	b := &s.callbacks
	b.mu.Lock()
	defer b.mu.Unlock()
	if route := b.routes[id]; route != nil {
		if c := route.calls[r.PathValue("request")]; c != nil {
			return c, nil
		}
	}
	return nil, &sandbox.Error{Class: sandbox.NotFound, Msg: "no such request: it was answered, its caller left, or its sandbox was reset"}
}

// getCallbackBody is GET /v1/sandboxes/{id}/callbacks/{request}/body, once.
func (s *Server) getCallbackBody(w http.ResponseWriter, r *http.Request) error {
	c, err := s.callbackOf(r)
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
	w.Header().Set("Content-Type", "application/octet-stream")
	flush := http.NewResponseController(w).Flush
	buf := passBuffers.Get().(*[]byte)
	defer passBuffers.Put(buf)
	if err := flush(); err != nil {
		return nil
	}
	for {
		n, rerr := body.Read(*buf)
		if n > 0 {
			if _, err := w.Write((*buf)[:n]); err != nil || flush() != nil {
				return nil // the client left
			}
		}
		if rerr == io.EOF {
			return nil
		}
		if rerr != nil {
			panic(http.ErrAbortHandler) // not a whole body
		}
	}
}

// putCallback is PUT /v1/sandboxes/{id}/callbacks/{request}?status=200.
func (s *Server) putCallback(w http.ResponseWriter, r *http.Request) error {
	// What is wrong is said at once: net/http would first take 256 KiB more of
	// an answer that may come in words.
	_ = http.NewResponseController(w).EnableFullDuplex()
	c, err := s.callbackOf(r)
	if err != nil {
		return err
	}
	a := callbackAnswer{status: http.StatusOK, header: http.Header{}, length: r.ContentLength, body: r.Body, result: make(chan error, 1)}
	if q := r.URL.Query().Get("status"); q != "" {
		a.status, err = strconv.Atoi(q)
		if err != nil || a.status < 200 || a.status > 599 {
			return sandbox.InvalidField("status", "%.10q is not accepted; 200 to 599 are", q)
		}
	}
	for k, vs := range r.Header {
		if name, ok := strings.CutPrefix(k, answerPrefix); ok && name != "Content-Length" && !slices.Contains(hopByHop, name) && !strings.HasPrefix(name, "X-Cove-") {
			a.header[name] = vs
		}
	}
	s.callbacks.mu.Lock()
	taken := c.taken
	c.taken = true
	s.callbacks.mu.Unlock()
	if taken {
		return &sandbox.Error{Class: sandbox.Precondition, Msg: "the request is being answered already, or its server was given up"}
	}
	c.answer <- a // has room for the one there is; from here on its own goroutine reads the body
	select {
	case <-c.done:
	case <-c.ctx.Done():
		// The caller has left: mostly with its answer, in which case this is
		// about to be done. If not, the body is read on until its next part.
		select {
		case <-c.done:
		case <-time.After(leftGrace):
			w.Header().Set("Connection", "close") // it is of no use behind the deadline
			_ = http.NewResponseController(w).SetReadDeadline(time.Now())
			<-c.done
		}
	}
	select {
	case err = <-a.result:
	default:
		err = callerLeft(nil) // it left before it saw the answer
	}
	if err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
