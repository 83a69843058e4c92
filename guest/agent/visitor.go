package agent

import (
	"io"
	"net"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/guest/wire"
	"github.com/cove-sandbox/cove/sandbox"
)

const (
	// maxVisitors connections from outside may be open at once. Each costs two
	// descriptors here and up to two windows of memory.
	maxVisitors = 8192
	// visitorGrace is how long one is kept that no connection carries. A host that
	// parted from it for a checkpoint is back within milliseconds of the thaw; one
	// that died never is, and the server inside shall see its clients gone.
	visitorGrace = 10 * time.Second
)

// visitors are the connections from outside to ports inside. They belong to a
// container, and to the outside: a kernel that goes on as another sandbox has
// none of them.
type visitors struct {
	clock execClock // stands still with the sandbox; graces are of it

	mu struct {
		sync.Mutex
		byID map[string]*visitor
		all  map[*visitor]struct{}
	}
}

// visitor is one connection from outside: a stream to the host, over whichever
// connection carries it now, joined with a socket to a server inside.
type visitor struct {
	of *visitors
	id string // "" if the host is one that cannot ask for it again
	in *net.TCPConn
	st *wire.Stream

	copies sync.WaitGroup
	ending sync.Once // who ends it says what becomes of the socket

	turn sync.Mutex // of the session that carries it
	mu   struct {
		sync.Mutex
		carrier *session
		gone    bool      // from of
		grace   *deadline // nil while one carries it
	}
}

func errVisitorGone() error {
	return &sandbox.Error{Class: sandbox.NotFound, Msg: "the connection to the port inside is no more"}
}

func (vs *visitors) find(id string) *visitor {
	vs.mu.Lock()
	defer vs.mu.Unlock()
	return vs.mu.byID[id]
}

// add begins a visitor of a container, which copies both ways from now on.
func (vs *visitors) add(ep *episode, id string, in *net.TCPConn) (*visitor, error) {
	v := &visitor{of: vs, id: id, in: in, st: wire.NewStream()}
	if id == "" {
		v.st.Plain()
	}
	vs.mu.Lock()
	if len(vs.mu.all) >= maxVisitors {
		vs.mu.Unlock()
		return nil, sandbox.Errorf(sandbox.NoCapacity, "", "the sandbox has %d connections from outside, as many as there may be", maxVisitors)
	}
	if vs.mu.all == nil {
		vs.mu.byID, vs.mu.all = map[string]*visitor{}, map[*visitor]struct{}{}
	}
	if id != "" {
		vs.mu.byID[id] = v
	}
	vs.mu.all[v] = struct{}{}
	vs.mu.Unlock()
	v.copies.Go(func() {
		if err := copyOut(v.st, in); err != nil {
			v.broke(err)
		}
	})
	v.copies.Go(func() {
		_, err := v.st.WriteTo(in)
		if err == nil {
			err = in.CloseWrite()
		}
		if err != nil {
			v.broke(err)
		}
	})
	select {
	case <-ep.over: // and hangUp may not have seen it
		v.drop()
		return nil, errNoContainer()
	default:
		return v, nil
	}
}

// hangUp ends all of them: their container is gone, or their outside another
// sandbox's.
func (vs *visitors) hangUp() {
	vs.mu.Lock()
	var all []*visitor
	for v := range vs.mu.all {
		all = append(all, v)
	}
	vs.mu.Unlock()
	for _, v := range all {
		v.drop()
	}
}

// carriedBy serves a visitor over a session until that ends. One that carried it
// before is ended first: only then is known what came over it.
func (v *visitor) carriedBy(s *session, host wire.Mark) error {
	v.mu.Lock()
	if v.mu.carrier != nil {
		v.mu.carrier.conn.Close()
	}
	v.mu.Unlock()
	v.turn.Lock()
	defer v.turn.Unlock()
	v.mu.Lock()
	if v.mu.gone {
		v.mu.Unlock()
		return errVisitorGone()
	}
	v.mu.carrier = s
	v.of.clock.drop(v.mu.grace)
	v.mu.grace = nil
	v.mu.Unlock()
	defer v.parted(s)
	mark := v.st.Mark()
	sink := frameSink(v.take)
	s.sink.Store(&sink)                             // before the reply, upon which the host sends the first frame
	if s.reply(wire.Res{Mark: &mark}, nil) != nil { // cut before it began: there will be a next
		s.conn.Close()
	} else if err := v.st.Attach(s.conn, host); err != nil {
		v.broke(err)
		s.conn.Close()
	}
	<-s.ctx.Done() // nothing is taken from it any more
	return errGone
}

// take is given the frames of the host by whoever reads them: a hand-over to
// another goroutine is a wake-up, and those are dear in here.
func (v *visitor) take(f frame) bool {
	if f.kind == wire.Over {
		v.hostLeft(wire.ParseOver(f.data) == nil)
		return false
	}
	if err := v.st.Feed(f.kind, f.data); err != nil {
		v.broke(err)
		return false
	}
	return true
}

// parted begins the time within which another session must carry the visitor.
func (v *visitor) parted(s *session) {
	v.st.Detach(s.conn)
	if v.id == "" || v.st.Closed() {
		v.hostLeft(true)
		return
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.mu.carrier = nil
	if !v.mu.gone {
		v.mu.grace = v.of.clock.deadline(visitorGrace, func() { v.hostLeft(true) })
	}
}

// hostLeft ends a visitor that the host reads no more of. In order, the server
// inside gets what was on its way, if it takes that soon.
func (v *visitor) hostLeft(inOrder bool) {
	v.forget()
	if !inOrder {
		v.drop()
		return
	}
	v.ending.Do(func() {
		_ = v.in.SetReadDeadline(time.Unix(1, 0))
		_ = v.in.SetWriteDeadline(time.Now().Add(lastWords))
		v.st.Fail(io.EOF) // behind what came
		go func() {
			v.copies.Wait()
			v.in.Close()
		}()
	})
}

// broke ends a visitor whose socket, or host, failed. The host is told, now or when
// it asks again.
func (v *visitor) broke(why error) {
	v.ending.Do(func() {
		_ = v.st.Abort(sandbox.Errorf(sandbox.Unavailable, "", "the server inside broke off: %w", why))
		v.in.Close()
	})
}

// drop ends a visitor at once, and both of its ends see that it was cut.
func (v *visitor) drop() {
	v.forget()
	v.ending.Do(func() {
		_ = v.st.Abort(errVisitorGone())
		_ = v.in.SetLinger(0)
		v.in.Close()
	})
}

func (v *visitor) forget() {
	v.of.mu.Lock()
	delete(v.of.mu.all, v)
	if v.of.mu.byID[v.id] == v {
		delete(v.of.mu.byID, v.id)
	}
	v.of.mu.Unlock()
	v.mu.Lock()
	defer v.mu.Unlock()
	v.mu.gone = true
	v.of.clock.drop(v.mu.grace)
	v.mu.grace = nil
}
