// Package strangers bounds what those may hold of a server who have not shown
// yet that they may use it: their connections, the requests on them, and the time
// an answer to them may take. One HTTP/2 connection may have as many requests at
// once as the server accepts streams, and each that is refused holds a goroutine
// for as long as the client does not read the refusal.
//
// What is anybody's (a public port) is a visit: it has bounds of its own, so that
// those who hold what is public leave room for those who are about to show a key,
// and it may take any time, as long as what it is sent is read.
package strangers

import (
	"container/list"
	"context"
	"net"
	"net/http"
	"sync"
	"time"
)

// Limits of a Table; the zero value of each is a good default.
type Limits struct {
	Conns      int           // of strangers at a time; the oldest goes for the next; 8192
	PerAddress int           // of those from one address; 4096: a trainer opens thousands at once
	Requests   int           // of strangers at a time, over all connections; 4096
	PerConn    int           // of those on one connection; 1024: as many may arrive before the first key is looked up
	Write      time.Duration // for an answer to a stranger, and for each piece of one to a visit; 30 s

	Visits           int // of all, at a time; 8192
	VisitsPerAddress int // of those from one address; 4096, as it may have connections
}

// Table knows the connections of strangers. Safe for concurrent use.
type Table struct {
	limits Limits

	mu struct {
		sync.Mutex
		order    *list.List            // of *conn, the oldest first
		from     map[string]*list.List // the same by address
		byConn   map[net.Conn]*conn
		requests int
		visits   int
		visiting map[string]int // the same by address
	}
}

// conn is a stranger's connection; what is in it is guarded by the table's mu.
type conn struct {
	table    *Table
	nc       net.Conn
	address  string
	known    bool
	gone     bool
	inOrder  *list.Element // nil: it is known, a request on it was let in or visits, or it is gone
	inFrom   *list.Element
	requests int // of strangers
	inside   int // requests that were let in or visit
}

// New makes a table.
func New(l Limits) *Table {
	for p, v := range map[*int]int{&l.Conns: 8192, &l.PerAddress: 4096, &l.Requests: 4096, &l.PerConn: 1024, &l.Visits: 8192, &l.VisitsPerAddress: 4096} {
		if *p == 0 {
			*p = v
		}
	}
	if l.Write == 0 {
		l.Write = 30 * time.Second
	}
	t := &Table{limits: l}
	t.mu.order, t.mu.from, t.mu.byConn, t.mu.visiting = list.New(), map[string]*list.List{}, map[net.Conn]*conn{}, map[string]int{}
	return t
}

// Guard puts a server's connections and requests under the table.
func (t *Table) Guard(s *http.Server) {
	s.ConnContext = t.meet
	s.ConnState = func(nc net.Conn, state http.ConnState) {
		if state == http.StateClosed || state == http.StateHijacked {
			t.forget(nc)
		}
	}
	s.Handler = t.wrap(s.Handler)
}

type connKey struct{}
type requestKey struct{}

// request is one of a connection that was a stranger's when it came.
type request struct {
	conn *conn
	w    http.ResponseWriter
	as   standing // guarded by the table's mu
}

// standing is what a request counts as.
type standing int

const (
	stranger standing = iota
	visitor           // of what is anybody's
	guest             // let in, for this and no more
	nobody            // it has ended, or its connection is known
)

func (t *Table) meet(ctx context.Context, nc net.Conn) context.Context {
	c := &conn{table: t, nc: nc}
	c.address, _, _ = net.SplitHostPort(nc.RemoteAddr().String())
	t.mu.Lock()
	t.mu.byConn[nc] = c
	out := t.enrolLocked(c)
	t.mu.Unlock()
	out.cut()
	return context.WithValue(ctx, connKey{}, c)
}

// enrolLocked puts a connection among the strangers' as the newest, and returns the
// one that has to go for it, or nil.
func (t *Table) enrolLocked(c *conn) (out *conn) {
	peers := t.mu.from[c.address]
	if peers == nil {
		peers = list.New()
		t.mu.from[c.address] = peers
	}
	c.inOrder, c.inFrom = t.mu.order.PushBack(c), peers.PushBack(c)
	switch {
	case peers.Len() > t.limits.PerAddress:
		out = peers.Front().Value.(*conn)
	case t.mu.order.Len() > t.limits.Conns:
		out = t.mu.order.Front().Value.(*conn)
	default:
		return nil
	}
	t.dropLocked(out)
	out.gone = true
	return out
}

// cut closes a connection that has to go, if there is one.
func (c *conn) cut() {
	if c != nil {
		c.nc.Close()
	}
}

func (t *Table) forget(nc net.Conn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if c := t.mu.byConn[nc]; c != nil {
		t.dropLocked(c)
		c.gone = true
		delete(t.mu.byConn, nc)
	}
}

// dropLocked takes a connection from the strangers'; its requests count until they end.
func (t *Table) dropLocked(c *conn) {
	if c.inOrder == nil {
		return
	}
	t.mu.order.Remove(c.inOrder)
	peers := t.mu.from[c.address]
	if peers.Remove(c.inFrom); peers.Len() == 0 {
		delete(t.mu.from, c.address)
	}
	c.inOrder, c.inFrom = nil, nil
}

func (t *Table) wrap(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c, _ := r.Context().Value(connKey{}).(*conn)
		if c == nil {
			next.ServeHTTP(w, r)
			return
		}
		t.mu.Lock()
		if c.known {
			t.mu.Unlock()
			next.ServeHTTP(w, r)
			return
		}
		req := &request{conn: c, w: w}
		c.requests++
		t.mu.requests++
		over := c.requests > t.limits.PerConn || t.mu.requests > t.limits.Requests
		if over {
			t.dropLocked(c)
			c.gone = true
		}
		t.mu.Unlock()
		defer t.turn(req, nobody)
		if over {
			c.nc.Close() // ends what waits to be read, too
			panic(http.ErrAbortHandler)
		}
		// No stream of its own without such a clock: then the connection's bound serves.
		rc := http.NewResponseController(w)
		_ = rc.SetWriteDeadline(time.Now().Add(t.limits.Write))
		next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), requestKey{}, req)))
		// net/http sends the rest of an answer after this, and waits there for who does
		// not read it, where nobody counts. On HTTP/1.1 that is one a connection.
		is := t.standing(req)
		if is == visitor {
			_ = rc.SetWriteDeadline(time.Now().Add(t.limits.Write))
		}
		if (is == visitor || is == stranger) && r.ProtoMajor >= 2 {
			_ = rc.Flush()
		}
	})
}

func (t *Table) standing(r *request) standing {
	t.mu.Lock()
	defer t.mu.Unlock()
	return r.as
}

// turn has a request count as something else. A visit for which there is no room is
// false and changes nothing.
func (t *Table) turn(r *request, as standing) bool {
	t.mu.Lock()
	c := r.conn
	if as == visitor && r.as == stranger && (t.mu.visits >= t.limits.Visits || t.mu.visiting[c.address] >= t.limits.VisitsPerAddress) {
		t.mu.Unlock()
		return false
	}
	if r.as == nobody || r.as == as {
		t.mu.Unlock()
		return true
	}
	t.countLocked(r, -1)
	r.as = as
	t.countLocked(r, 1)
	var out *conn
	switch {
	case c.inside > 0:
		t.dropLocked(c)
	case c.inOrder == nil && !c.known && !c.gone:
		out = t.enrolLocked(c)
	}
	t.mu.Unlock()
	out.cut()
	return true
}

func (t *Table) countLocked(r *request, n int) {
	c := r.conn
	switch r.as {
	case stranger:
		c.requests += n
		t.mu.requests += n
	case visitor:
		c.inside += n
		t.mu.visits += n
		if t.mu.visiting[c.address] += n; t.mu.visiting[c.address] == 0 {
			delete(t.mu.visiting, c.address)
		}
	case guest:
		c.inside += n
	}
}

// Known says that whoever made the request of ctx has shown that they may use the
// server: their connection is a stranger's no longer.
func Known(ctx context.Context) {
	r, _ := ctx.Value(requestKey{}).(*request)
	if r == nil {
		return
	}
	t := r.conn.table
	t.mu.Lock()
	t.dropLocked(r.conn)
	r.conn.known = true
	t.mu.Unlock()
	r.free(nobody)
}

// LetIn says that who made the request of ctx has shown that it may be served, for as
// long as it takes, and no more: with a token of one thing alone. What else comes
// over its connection is a stranger's, and the connection is one again afterwards.
func LetIn(ctx context.Context) {
	if r, _ := ctx.Value(requestKey{}).(*request); r != nil {
		r.free(guest)
	}
}

// Visit says that the request of ctx is for what is anybody's; false if as many are
// under way as may be. It takes as long as it takes, but each piece of its answer,
// which is to be written to the writer that is returned, has its time to be read.
func Visit(ctx context.Context, w http.ResponseWriter) (http.ResponseWriter, bool) {
	r, _ := ctx.Value(requestKey{}).(*request)
	if r == nil {
		return w, true
	}
	if !r.free(visitor) {
		return w, false
	}
	return timed{w, r.conn.table.limits.Write}, true
}

// free takes the time for its answer off a request, with its new standing.
func (r *request) free(as standing) bool {
	if !r.conn.table.turn(r, as) {
		return false
	}
	_ = http.NewResponseController(r.w).SetWriteDeadline(time.Time{})
	return true
}

// timed is the answer to a visit. A deadline as such would end an HTTP/2 stream that
// is silent for a while, so there is one only when a write has waited too long.
type timed struct {
	http.ResponseWriter
	most time.Duration
}

func (w timed) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w timed) watch() (stop func() bool) {
	return time.AfterFunc(w.most, func() {
		_ = http.NewResponseController(w.ResponseWriter).SetWriteDeadline(time.Unix(1, 0))
	}).Stop
}

func (w timed) WriteHeader(status int) {
	defer w.watch()()
	w.ResponseWriter.WriteHeader(status)
}

func (w timed) Write(b []byte) (int, error) {
	defer w.watch()()
	return w.ResponseWriter.Write(b)
}

func (w timed) FlushError() error {
	defer w.watch()()
	return http.NewResponseController(w.ResponseWriter).Flush()
}
