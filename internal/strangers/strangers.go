// Package strangers bounds what those may hold of a server who have not shown
// yet that they may use it: their connections, the requests on them, and the time
// an answer to them may take. One HTTP/2 connection may have as many requests at
// once as the server accepts streams, and each that is refused holds a goroutine
// for as long as the client does not read the refusal.
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
	Write      time.Duration // for an answer to a stranger; 30 s
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
	}
}

// conn is a stranger's connection; what is in it is guarded by the table's mu.
type conn struct {
	table    *Table
	nc       net.Conn
	address  string
	known    bool
	inOrder  *list.Element // nil: it is known, somebody on it was let in, or it is gone
	inFrom   *list.Element
	requests int
}

// New makes a table.
func New(l Limits) *Table {
	for p, v := range map[*int]int{&l.Conns: 8192, &l.PerAddress: 4096, &l.Requests: 4096, &l.PerConn: 1024} {
		if *p == 0 {
			*p = v
		}
	}
	if l.Write == 0 {
		l.Write = 30 * time.Second
	}
	t := &Table{limits: l}
	t.mu.order, t.mu.from, t.mu.byConn = list.New(), map[string]*list.List{}, map[net.Conn]*conn{}
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
	conn  *conn
	w     http.ResponseWriter
	ended bool // it does not count any more; guarded by the table's mu
}

func (t *Table) meet(ctx context.Context, nc net.Conn) context.Context {
	c := &conn{table: t, nc: nc}
	c.address, _, _ = net.SplitHostPort(nc.RemoteAddr().String())
	t.mu.Lock()
	peers := t.mu.from[c.address]
	if peers == nil {
		peers = list.New()
		t.mu.from[c.address] = peers
	}
	c.inOrder, c.inFrom = t.mu.order.PushBack(c), peers.PushBack(c)
	t.mu.byConn[nc] = c
	var out *conn
	switch {
	case peers.Len() > t.limits.PerAddress:
		out = peers.Front().Value.(*conn)
	case t.mu.order.Len() > t.limits.Conns:
		out = t.mu.order.Front().Value.(*conn)
	}
	if out != nil {
		t.dropLocked(out)
	}
	t.mu.Unlock()
	if out != nil {
		out.nc.Close()
	}
	return context.WithValue(ctx, connKey{}, c)
}

func (t *Table) forget(nc net.Conn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if c := t.mu.byConn[nc]; c != nil {
		t.dropLocked(c)
	}
}

// dropLocked takes a connection from the table; its requests count until they end.
func (t *Table) dropLocked(c *conn) {
	if c.inOrder == nil {
		return
	}
	t.mu.order.Remove(c.inOrder)
	peers := t.mu.from[c.address]
	if peers.Remove(c.inFrom); peers.Len() == 0 {
		delete(t.mu.from, c.address)
	}
	delete(t.mu.byConn, c.nc)
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
		}
		t.mu.Unlock()
		defer t.end(req)
		if over {
			c.nc.Close() // ends what waits to be read, too
			panic(http.ErrAbortHandler)
		}
		// No stream of its own without such a clock: then the connection's bound serves.
		_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(t.limits.Write))
		next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), requestKey{}, req)))
	})
}

// end takes a request out of the count, once.
func (t *Table) end(r *request) (first bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if r.ended {
		return false
	}
	r.ended = true
	r.conn.requests--
	t.mu.requests--
	return true
}

// Known says that whoever made the request of ctx has shown that they may use the
// server: their connection is a stranger's no longer.
func Known(ctx context.Context) { letIn(ctx, true) }

// LetIn says that the request of ctx may be served, for as long as it takes, and no
// more: it is for a page that is anybody's, or for one thing alone. What else
// comes over its connection is a stranger's.
func LetIn(ctx context.Context) { letIn(ctx, false) }

func letIn(ctx context.Context, known bool) {
	r, _ := ctx.Value(requestKey{}).(*request)
	if r == nil {
		return
	}
	t := r.conn.table
	t.mu.Lock()
	t.dropLocked(r.conn)
	r.conn.known = r.conn.known || known
	t.mu.Unlock()
	if t.end(r) {
		_ = http.NewResponseController(r.w).SetWriteDeadline(time.Time{})
	}
}
