package server

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/sandbox"
)

// callback is one request from inside, from its header to its answer.
type callback struct {
	id     string
	came   time.Time
	name   *callbackName
	event  *CallbackEvent
	ctx    context.Context // ends when the caller leaves, or has its answer
	answer chan callbackAnswer
	failed chan struct{} // closed when its server is gone
	done   chan struct{} // closed when its goroutine has ended

	// Guarded by the book's mu.
	taken bool      // by an answer, or failed
	body  io.Reader // nil once somebody reads it, or if it is in the event
}

// callbackAnswer is what a PUT brings. Its body is read by the request's own
// goroutine, which then says what became of it.
type callbackAnswer struct {
	status int
	header http.Header
	length int64 // -1: until it ends
	body   io.Reader
	result chan error // capacity 1
}

// ServeHTTP is a request from inside. Everything in it is hostile.
func (r *callbackRoute) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	r.calling.Add(1)
	defer r.calling.Done()
	name, path, _ := strings.Cut(strings.TrimPrefix(req.URL.EscapedPath(), "/"), "/")
	if req.Method == http.MethodConnect || !validName.MatchString(name) {
		refuse(w, http.StatusNotFound, "no_such_name", "the path must begin with the name of a handler, as in http://"+callbackHost+"/llm", 0)
		return
	}
	if req.Header.Get("Upgrade") != "" {
		refuse(w, http.StatusNotImplemented, "unsupported", "callbacks are plain HTTP requests; WebSockets and other upgrades are not carried", 0)
		return
	}
	s := r.book.s
	// The sandbox is active while it waits for an answer.
	release, err := node.Keep(asServer(req.Context()), s.node, r.id)
	if err != nil {
		refuse(w, http.StatusServiceUnavailable, "unavailable", "the sandbox is going to sleep or ending", time.Second)
		return
	}
	defer release()
	_ = http.NewResponseController(w).EnableFullDuplex() // an answer may begin before the request has ended

	ev := &CallbackRequest{ID: sandbox.NewID(s.cfg.Rand), Method: req.Method, Path: "/" + path, Query: asciiQuery(req.URL.RawQuery), Headers: endToEnd(req.Header)}
	c := &callback{id: ev.ID, came: time.Now(), event: &CallbackEvent{Request: ev},
		answer: make(chan callbackAnswer, 1), failed: make(chan struct{}), done: make(chan struct{})}
	ctx, cancel := context.WithCancel(req.Context())
	defer cancel()
	c.ctx = ctx
	if n := req.ContentLength; n >= 0 && n <= callbackInline {
		if ev.Body, err = io.ReadAll(io.LimitReader(req.Body, n)); err != nil {
			return // the caller left
		}
	} else {
		ev.BodyFollows, c.body = true, req.Body
	}
	if !r.begin(w, c, name) {
		return
	}
	defer r.finish(c)
	select {
	case a := <-c.answer:
		begun, err := s.pass(ctx, r.id, w, a)
		a.result <- err
		switch {
		case err == nil:
		case begun:
			panic(http.ErrAbortHandler) // the caller must see that something is missing
		default:
			refuse(w, http.StatusBadGateway, "handler_gone", "the answer of "+name+" broke off before it began", 0)
		}
	case <-c.failed:
		refuse(w, http.StatusBadGateway, "handler_gone", "the process that serves "+name+" is gone, or closed it", 0)
	case <-ctx.Done():
	}
}

// begin puts a request among those under way and before its server, or says
// why not.
func (r *callbackRoute) begin(w http.ResponseWriter, c *callback, name string) bool {
	b := r.book
	b.mu.Lock()
	n, under, ended := r.names[name], len(r.calls), r.ended
	ok := n != nil && !n.lost && under < maxCallbacks && !ended && !b.s.calls.isDraining()
	if ok {
		c.name = n
		r.calls[c.id] = c
		if n.stream != nil {
			n.stream.pushLocked(c.event)
		}
	}
	b.mu.Unlock()
	switch {
	case ok:
	case n == nil:
		refuse(w, http.StatusNotFound, "no_such_name", "nobody serves this name for this sandbox; a client does with serve(\""+name+"\", handler)", 0)
	case n.lost || ended:
		refuse(w, http.StatusServiceUnavailable, "no_handler", "the process that served "+name+" is gone; it may come back", 5*time.Second)
	case under >= maxCallbacks:
		refuse(w, http.StatusServiceUnavailable, "no_capacity", strconv.Itoa(maxCallbacks)+" requests of this sandbox are under way, the most there may be", time.Second)
	default:
		refuse(w, http.StatusServiceUnavailable, "unavailable", "the server is being restarted", 2*time.Second)
	}
	return ok
}

// finish takes a request out. Who was told of it and did not answer hears that.
func (r *callbackRoute) finish(c *callback) {
	b := r.book
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(r.calls, c.id)
	if !c.taken && c.name.stream != nil {
		st := c.name.stream
		if i := slices.Index(st.pending, c.event); i >= 0 {
			st.pending = slices.Delete(st.pending, i, i+1)
		} else {
			st.pushLocked(&CallbackEvent{Gone: c.id})
		}
	}
	c.taken = true
	close(c.done)
}

// refuse answers for the route itself, which X-Cove-Error tells from answers of
// handlers.
func refuse(w http.ResponseWriter, status int, code, message string, retry time.Duration) {
	h := w.Header()
	clear(h)
	h.Set("Content-Type", "application/json")
	h.Set("X-Cove-Error", code)
	if retry > 0 {
		h.Set("Retry-After", strconv.Itoa(int(retry/time.Second)))
	}
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(map[string]string{"code": code, "message": message})
}

var passBuffers = sync.Pool{New: func() any { b := make([]byte, 64<<10); return &b }}

// pass sends an answer inside as it comes. Every part of it wakes a sandbox that
// was put on standby meanwhile.
func (s *Server) pass(ctx context.Context, id string, w http.ResponseWriter, a callbackAnswer) (begun bool, err error) {
	h := w.Header()
	h["Content-Type"] = nil // none is guessed
	for k, v := range a.header {
		h[k] = v
	}
	if a.length >= 0 {
		h.Set("Content-Length", strconv.FormatInt(a.length, 10))
	}
	flush := http.NewResponseController(w).Flush
	buf := passBuffers.Get().(*[]byte)
	defer passBuffers.Put(buf)
	for {
		n, rerr := a.body.Read(*buf)
		if rerr != nil && rerr != io.EOF {
			return begun, &sandbox.Error{Class: sandbox.Canceled, Msg: "the answer broke off", Err: rerr}
		}
		if n == 0 && rerr == nil {
			continue
		}
		release, err := node.Keep(asServer(ctx), s.node, id)
		if err != nil {
			return begun, err
		}
		if !begun {
			w.WriteHeader(a.status)
			begun = true
		}
		if n > 0 {
			_, err = w.Write((*buf)[:n])
		}
		if err == nil && a.length < 0 && rerr == nil {
			err = flush()
		}
		release()
		switch {
		case errors.Is(err, http.ErrBodyNotAllowed): // a HEAD, a 204: the header is the answer
		case err != nil:
			return begun, callerLeft(err)
		}
		if rerr == io.EOF {
			return begun, nil
		}
	}
}

func callerLeft(err error) error {
	return &sandbox.Error{Class: sandbox.Canceled, Msg: "the caller inside has left", Err: err}
}

// hopByHop headers are about one connection.
var hopByHop = []string{"Connection", "Proxy-Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Te", "Trailer", "Transfer-Encoding", "Upgrade"}

// endToEnd are the headers that are a handler's business.
func endToEnd(h http.Header) []CallbackHeader {
	drop := slices.Clone(hopByHop)
	for _, v := range h["Connection"] {
		for f := range strings.SplitSeq(v, ",") {
			drop = append(drop, http.CanonicalHeaderKey(strings.TrimSpace(f)))
		}
	}
	var out []CallbackHeader
	for k, vs := range h {
		if slices.Contains(drop, k) {
			continue
		}
		for _, v := range vs {
			out = append(out, CallbackHeader{Name: k, Value: latin1(v)})
		}
	}
	slices.SortStableFunc(out, func(a, b CallbackHeader) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// latin1 reads bytes as ISO 8859-1, which every header value is.
func latin1(s string) string {
	ascii := true
	for i := range len(s) {
		ascii = ascii && s[i] < 0x80
	}
	if ascii {
		return s
	}
	var b strings.Builder
	for i := range len(s) {
		b.WriteRune(rune(s[i]))
	}
	return b.String()
}

// asciiQuery encodes what net/http lets through of a query and no URL has.
func asciiQuery(q string) string {
	var b strings.Builder
	for i := range len(q) {
		if c := q[i]; c <= ' ' || c >= 0x7f {
			b.WriteString("%" + strings.ToUpper(strconv.FormatInt(int64(c)+0x100, 16)[1:]))
		} else {
			b.WriteByte(c)
		}
	}
	return b.String()
}
