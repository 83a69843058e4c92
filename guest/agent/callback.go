package agent

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/guest/wire"
	"github.com/cove-sandbox/cove/internal/notify"
	"github.com/cove-sandbox/cove/sandbox"
)

const (
	// maxCallers connections to the host may be open at once. The next waits in
	// the listener's queue, which is the kernel's to bound.
	maxCallers = 512
	// leaseGrace is how long the listener lives on when no host asks for its
	// connections: a host that died is told to callers as soon as that, one that
	// comes back after a checkpoint is never that late.
	leaseGrace = 10 * time.Second
)

// callbacks is the way from code inside to the host: a listener on the loopback
// whose connections the host reads and writes (see caller). It belongs to the
// kernel, not to an episode: a reset ends the connections and nothing else.
//
// It lives as long as a host asks for connections, so that nothing has to be
// undone for a host that dies.
type callbacks struct {
	log   *slog.Logger
	clock execClock // stands still with the sandbox; leases are of it

	mu struct {
		sync.Mutex
		token   string // whose listener it is; "" = there is none
		ln      net.Listener
		port    int
		last    int64 // id of the newest caller; ids are never used again
		callers map[int64]*caller
		changed notify.Change // a caller more or less, or another listener
		asking  int           // accepts under way
		lease   *deadline     // nil while one is
		closed  bool
	}
}

func (c *callbacks) init(log *slog.Logger) {
	c.log, c.mu.callers = log, map[int64]*caller{}
}

func (c *callbacks) listening() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.token != ""
}

// listen opens the listener for a token. The same again changes nothing; a new
// token takes the listener over, and what another host left behind ends.
func (a *Agent) listen(ep *episode, r wire.Req) error {
	if r.Token == "" {
		return sandbox.InvalidField("token", "must be set")
	}
	if r.Port < 1 || r.Port > 65535 {
		return sandbox.InvalidField("port", "%d is no TCP port; 1 to 65535 are", r.Port)
	}
	if err := a.callbacks.start(r.Token, r.Port); err != nil {
		return err
	}
	if err := nameHost(ep.space, ep.space.files); err != nil {
		a.callbacks.stop(r.Token)
		return fileError("/etc/hosts", err)
	}
	return nil
}

func (c *callbacks) start(token string, port int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.closed {
		return errNoContainer()
	}
	if c.mu.token == token && c.mu.port == port {
		return nil
	}
	if c.mu.token != "" && c.mu.port == port {
		c.forsakeLocked(c.mu.token != token)
		c.mu.token = token
		c.leaseLocked()
		return nil
	}
	c.stopLocked()
	ln, err := net.Listen("tcp4", net.JoinHostPort(wire.CallbackAddr, strconv.Itoa(port)))
	if err != nil {
		if errors.Is(err, unix.EADDRINUSE) {
			return &sandbox.Error{Class: sandbox.Precondition, Reason: sandbox.PortTaken,
				Msg:  "a program inside listens on port " + strconv.Itoa(port) + " of every address already",
				Hint: "end it, have it listen on 127.0.0.1, or serve callbacks on another port"}
		}
		return sandbox.Errorf(sandbox.Unavailable, "", "%w", err)
	}
	c.mu.token, c.mu.port, c.mu.ln = token, port, ln
	c.leaseLocked()
	go c.acceptFrom(ln)
	return nil
}

// acceptFrom takes connections until the listener closes.
func (c *callbacks) acceptFrom(ln net.Listener) {
	for c.awaitSlot(ln) {
		nc, err := ln.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // out of descriptors, or a peer that left: the next may work
			c.log.Warn("accept of a callback", "err", err)
			time.Sleep(10 * time.Millisecond)
			continue
		}
		c.mu.Lock()
		if c.mu.ln == ln {
			c.mu.last++
			c.mu.callers[c.mu.last] = newCaller(nc.(*net.TCPConn))
			c.mu.changed.Tell()
		} else {
			nc.Close()
		}
		c.mu.Unlock()
	}
}

// awaitSlot waits until one more may be taken; false if the listener is no more.
func (c *callbacks) awaitSlot(ln net.Listener) bool {
	for {
		c.mu.Lock()
		ours, free, changed := c.mu.ln == ln, len(c.mu.callers) < maxCallers, c.mu.changed.Next()
		c.mu.Unlock()
		if !ours || free {
			return ours
		}
		<-changed
	}
}

// leaseLocked gives the host its time to ask, from now on.
func (c *callbacks) leaseLocked() {
	c.clock.drop(c.mu.lease)
	c.mu.lease = nil
	if c.mu.token == "" || c.mu.asking > 0 {
		return
	}
	var d *deadline
	d = c.clock.deadline(leaseGrace, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.clock.drop(d)
		if c.mu.lease == d {
			c.stopLocked()
		}
	})
	c.mu.lease = d
}

// accept returns the ids of the callers after one, waiting for the first.
func (c *callbacks) accept(ctx context.Context, token string, after int64) ([]int64, error) {
	c.mu.Lock()
	c.mu.asking++
	c.leaseLocked()
	defer func() {
		c.mu.asking--
		c.leaseLocked()
		c.mu.Unlock()
	}()
	for {
		if token == "" || c.mu.token != token {
			return nil, &sandbox.Error{Class: sandbox.NotFound, Msg: "this listener is no more"}
		}
		var ids []int64
		for id := after + 1; id <= c.mu.last; id++ {
			if c.mu.callers[id] != nil {
				ids = append(ids, id)
			}
		}
		if len(ids) > 0 {
			return ids, nil
		}
		changed := c.mu.changed.Next()
		c.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
		}
		c.mu.Lock()
		if ctx.Err() != nil {
			return nil, errGone
		}
	}
}

func (c *callbacks) find(id int64) *caller {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.callers[id]
}

// drop ends one caller.
func (c *callbacks) drop(id int64) {
	c.mu.Lock()
	k := c.mu.callers[id]
	if k != nil {
		delete(c.mu.callers, id)
		c.mu.changed.Tell()
	}
	c.mu.Unlock()
	if k != nil {
		k.conn.Close()
	}
}

// hangUp ends all callers.
func (c *callbacks) hangUp() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.forsakeLocked(false)
}

// forsake ends the listener and all callers, which are told where they wait for
// an answer: the host they called is not this sandbox's.
func (c *callbacks) forsake() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.forsakeLocked(true)
	c.stopLocked()
}

// forget ends the listener and all callers, of whom nobody is left.
func (c *callbacks) forget() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.forsakeLocked(false)
	c.stopLocked()
}

func (c *callbacks) forsakeLocked(say bool) {
	for id, k := range c.mu.callers {
		delete(c.mu.callers, id)
		if say {
			k.lament()
		}
		k.conn.Close()
	}
	c.mu.changed.Tell()
}

// stop ends the listener of a token, and no other.
func (c *callbacks) stop(token string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.token == token {
		c.stopLocked()
	}
}

func (c *callbacks) stopLocked() {
	if c.mu.ln != nil {
		c.mu.ln.Close()
	}
	c.mu.ln, c.mu.token, c.mu.port = nil, "", 0
	c.clock.drop(c.mu.lease)
	c.mu.lease = nil
	c.forsakeLocked(true)
}

func (c *callbacks) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.closed = true
	c.stopLocked()
}

// accept is a request that ends with the next connections.
func (s *session) accept(r wire.Req) error {
	ids, err := s.agent.callbacks.accept(s.ctx, r.Token, r.Call)
	return s.reply(wire.Res{Calls: ids}, err)
}

// call runs the requests that act on one caller.
func (s *session) call(r wire.Req, body *content) error {
	k := s.agent.callbacks.find(r.Call)
	if k == nil {
		return errCallerGone()
	}
	switch r.Op {
	case wire.OpCallRead:
		p, eof, err := k.read(s.ctx, r.Offset)
		if err != nil {
			return err
		}
		if len(p) > 0 && s.conn.Queue(wire.Data, p) != nil {
			return errGone
		}
		return s.reply(wire.Res{EOF: eof}, nil)
	case wire.OpCallWrite:
		var data []byte
		if err := body.each(func(b []byte) error { data = append(data, b...); return nil }); err != nil {
			return err
		}
		return s.reply(wire.Res{}, k.write(s.ctx, r.Offset, data))
	default: // close
		if r.Flag {
			return s.reply(wire.Res{}, k.closeWrite(s.ctx))
		}
		s.agent.callbacks.drop(r.Call)
		return s.reply(wire.Res{}, nil)
	}
}

func errCallerGone() error {
	return &sandbox.Error{Class: sandbox.NotFound, Msg: "the connection from inside is no more"}
}
