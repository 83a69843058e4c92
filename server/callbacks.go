package server

import (
	"cmp"
	"context"
	"log/slog"
	"net"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/sandbox"
)

// Callbacks: code inside asks http://cove.internal/NAME, a client serves NAME.
//
// The node hands over the connections, one http.Server per sandbox parses what
// comes over them (hostile input, hence here and not in the guest), and each
// request waits in its handler for a PUT with the answer. Names, requests and
// who serves them are in memory only: a new server begins with none, its
// clients come back, and the guest tells those who waited inside.

const (
	callbackHost    = "cove.internal"
	callbackPort    = 80
	maxNames        = 64  // of one sandbox
	maxCallbacks    = 256 // requests under way of one sandbox; more are 503
	maxOwner        = 64
	callbackInline  = 64 << 10 // a body up to this travels in the event
	callbackHeaders = 64 << 10
	// callbackHeaderTime is for the header of a request, from its first byte;
	// callbackIdle for a connection between requests. Bodies and answers may
	// take as long as they do.
	callbackHeaderTime = 30 * time.Second
	callbackIdle       = 2 * time.Minute
	drainLook          = 50 * time.Millisecond
)

var validName = regexp.MustCompile(`^[a-z0-9-]{1,63}$`)

// callbackBook has every route there is.
type callbackBook struct {
	s      *Server
	ctx    context.Context // ends with stop
	cancel context.CancelFunc

	ends sync.WaitGroup // routes that are closing

	mu struct {
		sync.Mutex
		closed bool
		routes map[string]*callbackRoute // by sandbox
	}
}

func (b *callbackBook) init(s *Server) {
	b.s, b.mu.routes = s, map[string]*callbackRoute{}
	b.ctx, b.cancel = context.WithCancel(context.Background())
}

// callbackRoute is the callback address of one sandbox. What is below mu is
// guarded by the book's.
type callbackRoute struct {
	book    *callbackBook
	id      string
	port    int
	ready   chan struct{}  // closed when it listens, or err is set
	over    chan struct{}  // closed when it has ended; err says why
	err     error          // set before one of these is closed
	ln      net.Listener   // set before ready
	srv     *http.Server   // the same
	calling sync.WaitGroup // requests, those being refused too

	ended  bool
	names  map[string]*callbackName
	calls  map[string]*callback
	linger *time.Timer // ends a route that nobody serves; nil while somebody does
}

// callbackName is a name that somebody serves, or has until lately.
type callbackName struct {
	name, owner string
	stream      *callbackStream // nil: its server left
	grace       *time.Timer     // ends the wait for it to come back; nil with a stream
	lost        bool            // it did not
}

// callbackStream is one Serve call.
type callbackStream struct {
	route   *callbackRoute
	name    *callbackName
	pending []*CallbackEvent
	wake    chan struct{} // capacity 1: pending is not empty
	cut     chan struct{} // closed when the name is another's, or closed; why says which
	why     error
}

func validCallbackName(name string) error {
	if !validName.MatchString(name) {
		return sandbox.InvalidField("name", "%.70q is not accepted; 1 to 63 of a-z, 0-9 and - are", name)
	}
	return nil
}

// ServeRequest asks for the requests that code inside a sandbox makes to a name.
type ServeRequest struct {
	Sandbox string
	Name    string
	Owner   string // who comes back by it after a broken connection
	Port    int    // 0 = 80
	Replace bool   // takes the name from whoever serves it
}

// CallbackEvent is something that who serves a name is told: one of these, or
// nothing, which says that the stream is alive.
type CallbackEvent struct {
	Serving string // the URL code inside asks, first of all
	Request *CallbackRequest
	Gone    string // the id of a request whose caller left
}

// CallbackRequest is a request from inside.
type CallbackRequest struct {
	ID, Method, Path, Query string
	Headers                 []CallbackHeader
	Body                    []byte
	BodyFollows             bool // it is too large for an event, or of unknown length
}

// CallbackHeader is one line of a header, ISO 8859-1 read as UTF-8.
type CallbackHeader struct{ Name, Value string }

// ServeCallbacks serves a name for code inside until the caller leaves, or the name
// or its sandbox ends.
func (s *Server) ServeCallbacks(ctx context.Context, r ServeRequest, sink func(CallbackEvent) error) (err error) {
	ctx, call, err := s.begin(ctx, "callback.serve", about("sandbox", r.Sandbox), about("name", r.Name))
	if err != nil {
		return err
	}
	defer call.end(&err)
	r.Port = cmp.Or(r.Port, callbackPort)
	if err := firstError(validID("sandbox_id", r.Sandbox), validCallbackName(r.Name), validPort(r.Port)); err != nil {
		return err
	}
	if len(r.Owner) > maxOwner {
		return sandbox.InvalidField("owner", "%d bytes; at most %d are accepted", len(r.Owner), maxOwner)
	}
	if _, err := s.live(ctx, r.Sandbox); err != nil {
		return err
	}
	st, err := s.callbacks.serve(ctx, r)
	if err != nil {
		return s.explain(ctx, r.Sandbox, err)
	}
	defer s.callbacks.leave(st)
	url := "http://" + callbackHost
	if r.Port != callbackPort {
		url += ":" + strconv.Itoa(r.Port)
	}
	call.begun()
	if err := sink(CallbackEvent{Serving: url + "/" + r.Name}); err != nil {
		return err
	}
	alive := time.NewTicker(s.cfg.KeepAlive)
	defer alive.Stop()
	draining := s.calls.drained()
	var looks <-chan time.Time // while draining
	for {
		select {
		case <-st.wake:
			for _, ev := range s.callbacks.take(st) {
				if err := sink(*ev); err != nil {
					return err
				}
			}
		case <-alive.C:
			if err := sink(CallbackEvent{}); err != nil {
				return err
			}
		case <-draining:
			// Those under way are waited for like other calls.
			draining = nil
			look := time.NewTicker(drainLook)
			defer look.Stop()
			looks = look.C
		case <-looks:
			if s.callbacks.idle(st) {
				return stopping()
			}
		case <-st.cut:
			return st.why
		case <-st.route.over:
			select {
			case <-st.cut: // its name was closed, and the route ended with it
				return st.why
			default:
			}
			return s.explain(ctx, r.Sandbox, st.route.err)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// CloseCallbacks ends a name, whoever serves it, or if owner does.
func (s *Server) CloseCallbacks(ctx context.Context, id, name, owner string) (err error) {
	ctx, call, err := s.begin(ctx, "callback.close", about("sandbox", id), about("name", name))
	if err != nil {
		return err
	}
	defer call.end(&err)
	if err := firstError(validID("sandbox_id", id), validCallbackName(name)); err != nil {
		return err
	}
	if _, err := s.live(ctx, id); err != nil {
		return err
	}
	return s.callbacks.close(id, name, owner)
}

// serve gives a name to a new stream.
func (b *callbackBook) serve(ctx context.Context, m ServeRequest) (*callbackStream, error) {
	for {
		r, err := b.route(ctx, m.Sandbox, m.Port)
		if err != nil {
			return nil, err
		}
		st, err := b.attach(r, m)
		if st != nil || err != nil {
			return st, err
		}
		select { // it ended in between
		case <-r.over:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// route is the sandbox's, made if it has none.
func (b *callbackBook) route(ctx context.Context, id string, port int) (*callbackRoute, error) {
	b.mu.Lock()
	if b.mu.closed {
		b.mu.Unlock()
		return nil, stopping()
	}
	r := b.mu.routes[id]
	if r == nil {
		r = &callbackRoute{book: b, id: id, port: port, ready: make(chan struct{}), over: make(chan struct{}),
			names: map[string]*callbackName{}, calls: map[string]*callback{}}
		b.mu.routes[id] = r
		b.ends.Add(1)
		go r.run()
	}
	b.mu.Unlock()
	select {
	case <-r.ready:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if r.ln == nil {
		return nil, r.err
	}
	if r.port != port {
		return nil, &sandbox.Error{Class: sandbox.Conflict, Field: "port",
			Msg: "the callbacks of this sandbox are on port " + strconv.Itoa(r.port), Hint: "all names of a sandbox share one"}
	}
	return r, nil
}

// run listens and serves until the sandbox ends or nobody serves a name.
func (r *callbackRoute) run() {
	b := r.book
	defer b.ends.Done()
	ln, err := node.Listen(asServer(b.ctx), b.s.node, r.id, r.port)
	if err != nil {
		b.mu.Lock()
		delete(b.mu.routes, r.id)
		r.ended, r.err = true, err
		b.mu.Unlock()
		close(r.ready)
		close(r.over)
		return
	}
	r.ln = ln
	r.srv = &http.Server{Handler: r, ReadHeaderTimeout: callbackHeaderTime, IdleTimeout: callbackIdle, MaxHeaderBytes: callbackHeaders,
		DisableGeneralOptionsHandler: true, ErrorLog: slog.NewLogLogger(b.s.log.Handler(), slog.LevelDebug)}
	b.mu.Lock()
	b.lingerLocked(r)
	closed := b.mu.closed
	b.mu.Unlock()
	close(r.ready)
	if !closed {
		err = r.srv.Serve(ln)
	}
	b.end(r, err)
	_ = r.srv.Close()
	_ = ln.Close()
	r.calling.Wait()
}

// end takes a route out of the book. Its requests end with their connections.
func (b *callbackBook) end(r *callbackRoute, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.endLocked(r, err)
}

func (b *callbackBook) endLocked(r *callbackRoute, err error) {
	if r.ended {
		return
	}
	r.ended, r.err = true, err
	if b.mu.routes[r.id] == r {
		delete(b.mu.routes, r.id)
	}
	if r.linger != nil {
		r.linger.Stop()
	}
	for _, n := range r.names {
		n.stopGrace()
	}
	close(r.over)
}

// attach is nil if the route has ended.
func (b *callbackBook) attach(r *callbackRoute, m ServeRequest) (*callbackStream, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if r.ended {
		return nil, nil
	}
	n := r.names[m.Name]
	switch {
	case n == nil && len(r.names) >= maxNames:
		return nil, sandbox.InvalidField("name", "the sandbox has %d names already; at most that many are accepted", maxNames)
	case n == nil:
		n = &callbackName{name: m.Name}
		r.names[m.Name] = n
	case m.Owner != "" && m.Owner == n.owner: // it came back
	case n.stream != nil && !m.Replace:
		return nil, &sandbox.Error{Class: sandbox.AlreadyExists, Field: "name", Msg: "somebody serves " + m.Name + " of this sandbox",
			Hint: "replace takes it over; another name can be served beside it"}
	default: // requests that another process was told of are not ours to answer
		r.failLocked(n)
	}
	if n.stream != nil {
		n.stream.endLocked(&sandbox.Error{Class: sandbox.Conflict, Msg: "another has taken " + m.Name + " over"})
	}
	n.stopGrace()
	st := &callbackStream{route: r, name: n, wake: make(chan struct{}, 1), cut: make(chan struct{})}
	n.stream, n.owner, n.lost = st, m.Owner, false
	for _, c := range r.callsOf(n) {
		st.pushLocked(c.event)
	}
	b.lingerLocked(r)
	return st, nil
}

// leave is the end of a Serve call. Its requests are kept for a while.
func (b *callbackBook) leave(st *callbackStream) {
	b.mu.Lock()
	defer b.mu.Unlock()
	r, n := st.route, st.name
	if n.stream != st {
		return
	}
	n.stream = nil
	if r.ended {
		return
	}
	n.grace = time.AfterFunc(b.s.cfg.CallbackGrace, func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		if n.stream == nil && r.names[n.name] == n && !r.ended {
			n.lost = true
			r.failLocked(n)
			b.lingerLocked(r)
		}
	})
}

// close ends a name; the last one ends the route.
func (b *callbackBook) close(id, name, owner string) error {
	b.mu.Lock()
	r := b.mu.routes[id]
	var n *callbackName
	if r != nil {
		n = r.names[name]
	}
	if n == nil || owner != "" && owner != n.owner {
		b.mu.Unlock()
		return &sandbox.Error{Class: sandbox.NotFound, Msg: "nobody serves " + name + " of this sandbox, or somebody else does"}
	}
	delete(r.names, name)
	n.stopGrace()
	r.failLocked(n)
	if n.stream != nil {
		n.stream.endLocked(&sandbox.Error{Class: sandbox.Canceled, Msg: name + " was closed"})
	}
	last := true
	for _, o := range r.names {
		last = last && o.lost
	}
	if last { // under one lock: a name that is attached meanwhile would end with it
		b.endLocked(r, net.ErrClosed)
	}
	b.mu.Unlock()
	if last {
		_ = r.srv.Close() // whoever waits inside is told, here or by the guest
	}
	return nil
}

// lingerLocked ends a route that nobody serves, after a while in which code
// inside is told so.
func (b *callbackBook) lingerLocked(r *callbackRoute) {
	served := false
	for _, n := range r.names {
		served = served || !n.lost
	}
	if r.linger != nil {
		r.linger.Stop()
		r.linger = nil
	}
	if served || r.ended {
		return
	}
	var t *time.Timer
	t = time.AfterFunc(b.s.cfg.CallbackLinger, func() {
		b.mu.Lock()
		idle := r.linger == t
		if idle {
			b.endLocked(r, net.ErrClosed)
		}
		b.mu.Unlock()
		if idle {
			_ = r.srv.Close()
		}
	})
	r.linger = t
}

// stop ends all routes and waits for them.
func (b *callbackBook) stop() {
	b.mu.Lock()
	b.mu.closed = true
	routes := make([]*callbackRoute, 0, len(b.mu.routes))
	for _, r := range b.mu.routes {
		routes = append(routes, r)
	}
	b.mu.Unlock()
	b.cancel()
	for _, r := range routes {
		<-r.ready
		b.end(r, stopping())
		if r.srv != nil {
			_ = r.srv.Close()
		}
	}
	b.ends.Wait()
}

// take empties the queue of a stream.
func (b *callbackBook) take(st *callbackStream) []*CallbackEvent {
	b.mu.Lock()
	defer b.mu.Unlock()
	evs := st.pending
	st.pending = nil
	return evs
}

// idle says whether a stream has no request under way.
func (b *callbackBook) idle(st *callbackStream) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(st.route.callsOf(st.name)) == 0
}

// callsOf are the requests to a name that nobody has begun to answer, in the
// order in which they came.
func (r *callbackRoute) callsOf(n *callbackName) (calls []*callback) {
	for _, c := range r.calls {
		if c.name == n && !c.taken {
			calls = append(calls, c)
		}
	}
	slices.SortFunc(calls, func(a, b *callback) int { return a.came.Compare(b.came) })
	return calls
}

// failLocked tells those who wait for an answer of n that there will be none.
func (r *callbackRoute) failLocked(n *callbackName) {
	for _, c := range r.callsOf(n) {
		c.taken = true
		close(c.failed)
	}
}

func (st *callbackStream) pushLocked(ev *CallbackEvent) {
	st.pending = append(st.pending, ev)
	select {
	case st.wake <- struct{}{}:
	default:
	}
}

func (st *callbackStream) endLocked(why error) {
	if st.name.stream == st {
		st.name.stream = nil
	}
	st.why = why
	close(st.cut)
}

func (n *callbackName) stopGrace() {
	if n.grace != nil {
		n.grace.Stop()
		n.grace = nil
	}
}
