package guest

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/guest/wire"
	"github.com/cove-sandbox/cove/internal/notify"
	"github.com/cove-sandbox/cove/sandbox"
)

// Dialer opens one connection to the guest of a kernel.
type Dialer func(ctx context.Context) (net.Conn, error)

const (
	// maxIdle connections are kept per kernel. Every one costs a descriptor
	// here and two goroutines in the guest; a new one costs about a
	// millisecond. Four cover an exec with a watcher and file calls beside it.
	maxIdle = 4

	// idleFor is how long an unused connection beside the last two is kept.
	idleFor = 30 * time.Second

	// handshakes is how often a connection that was closed before the guest
	// proved itself is dialled again. Code inside can open connections fast
	// enough to push ours out of the guest's table of strangers; each try is
	// an independent race that we win almost always.
	handshakes = 8

	// dialFor bounds a dial: two calls to the kernel, which a sentry that saves
	// itself may leave waiting for a while.
	dialFor = 30 * time.Second
)

// Client is the host's side of the guest protocol. One request at a time runs
// on a connection; idle connections are kept and reused, and a stream that is
// left early costs its connection. Safe for concurrent use.
type Client struct {
	young time.Duration // set before use

	mu struct {
		sync.Mutex
		dial    Dialer        // replaced by MoveTo
		secret  []byte        // replaced, never changed in place
		held    chan struct{} // closed by Release; nil unless new requests wait
		ended   notify.Change // a request let its connection go
		idle    []idleConn    // the most recently used last
		busy    map[*conn]struct{}
		dialing int         // requests that wait for their connection
		timer   *time.Timer // trims idle; nil when idle is empty
		closed  bool
		orphan  bool // by Outlive: its kernel may go, what waits here does not

		standing  sandbox.Standby // by Stand
		following map[*events]struct{}

		silence  SilenceLimits
		onSilent func(op string) // nil: nobody counts
		onHeld   func()          // nil: nobody wakes it
	}
}

// conn is one connection; proof is pending until the first answer.
type conn struct {
	*wire.Conn
	proof  *wire.Prover
	reused bool
	secret []byte // it was or is to be authenticated with

	endless bool      // its request is one that runs until something happens; set before it is busy
	start   time.Time // of an exec begun on it; zero for any other request; likewise

	// Guarded by Client.mu.
	cut    bool  // by Park or Rekey
	lost   bool  // by its watch: what was sent did not arrive
	failed error // by its watch
}

type idleConn struct {
	*conn
	since time.Time
}

// NewClient makes a client; it dials on first use.
func NewClient(dial Dialer, secret []byte) *Client {
	c := &Client{young: young}
	c.mu.dial, c.mu.secret, c.mu.busy, c.mu.following, c.mu.silence = dial, secret, map[*conn]struct{}{}, map[*events]struct{}{}, defaultSilenceLimits
	return c
}

// Container tells the guest which container it serves from now on.
type Container struct {
	InitPID    int      `json:"init_pid"` // of the user container's init, in the guest's pid namespace
	Env        []string `json:"env"`      // the environment every process starts from
	WorkingDir string   `json:"working_dir"`
	User       string   `json:"user"`
	Pids       int64    `json:"pids"`               // processes and threads there may be; 0 = no limit
	Resolv     string   `json:"resolv,omitempty"`   // content of /etc/resolv.conf; "" = the image's
	Hostname   string   `json:"hostname,omitempty"` // and in /etc/hostname and /etc/hosts; "" = as it is
}

// Close closes every connection; requests under way fail with
// sandbox.ErrUnavailable. It is idempotent.
func (c *Client) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.retireLocked()
	c.dropIdleLocked()
	return nil
}

// Retire is Close but for connections that no request is using, which are there for
// the client that moves here next (MoveTo): who still has this one reaches nothing
// with it any more.
func (c *Client) Retire() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.retireLocked()
}

func (c *Client) retireLocked() {
	c.mu.closed = !c.mu.orphan
	if c.mu.held != nil && c.mu.closed {
		close(c.mu.held)
		c.mu.held = nil
	}
	for cn := range c.mu.busy {
		cn.Close()
	}
}

// CloseIdle closes the connections that no request is using. A kernel must
// have none while it is checkpointed.
func (c *Client) CloseIdle() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.dropIdleLocked()
}

func (c *Client) dropIdleLocked() {
	for _, i := range c.mu.idle {
		i.Close()
	}
	c.mu.idle = nil
	if c.mu.timer != nil {
		c.mu.timer.Stop()
		c.mu.timer = nil
	}
}

// Ping returns when the guest has answered.
func (c *Client) Ping(ctx context.Context) error {
	_, err := c.call(ctx, wire.Req{Op: wire.OpPing}, nil)
	return err
}

// Prepare lets the guest do ahead what it can of an Enter of the same container.
// The one it serves is not touched.
func (c *Client) Prepare(ctx context.Context, ct Container) error {
	_, err := c.call(ctx, ct.request(wire.OpPrepare), nil)
	return err
}

// Enter makes the guest serve a container. A container served before is left
// first.
func (c *Client) Enter(ctx context.Context, ct Container) error {
	_, err := c.call(ctx, ct.request(wire.OpEnter), nil)
	return err
}

func (ct Container) request(op string) wire.Req {
	return wire.Req{Op: op, InitPID: ct.InitPID, Env: ct.Env, WorkingDir: ct.WorkingDir, User: ct.User, Pids: ct.Pids, Resolv: ct.Resolv, Hostname: ct.Hostname}
}

// Init is the pid of the init of the container being served, 0 for none: what
// a node asks a guest it has just found again.
func (c *Client) Init(ctx context.Context) (int, error) {
	res, err := c.call(ctx, wire.Req{Op: wire.OpInit}, nil)
	return res.InitPID, err
}

// WaitInit returns nil when the init of the container being served has ended
// without Leave: code inside killed it. Left or not entered, it is
// sandbox.ErrPrecondition. It holds a connection for as long as it waits.
func (c *Client) WaitInit(ctx context.Context) error {
	_, err := c.call(ctx, wire.Req{Op: wire.OpWaitInit}, nil)
	return err
}

// Leave ends every process started through the guest with cause reset and
// forgets them. The container itself is the driver's to destroy.
func (c *Client) Leave(ctx context.Context) error {
	_, err := c.call(ctx, wire.Req{Op: wire.OpLeave}, nil)
	return err
}

// Scrub is Leave for a kernel that will serve another sandbox: the guest forgets
// everything of this one. sandbox.ErrPrecondition if the kernel cannot.
func (c *Client) Scrub(ctx context.Context) error {
	_, err := c.call(ctx, wire.Req{Op: wire.OpScrub}, nil)
	return err
}

// safeToRepeat says that running a request twice is the same as running it
// once, so that it may be sent again when a kept connection turns out to be
// dead. A start is: its exec_id runs at most once. The others have an id (withID),
// but not every guest that was restored from an earlier Cove's checkpoint heeds it.
func safeToRepeat(r wire.Req) bool {
	switch r.Op {
	case wire.OpInput, wire.OpSignal, wire.OpMkdir, wire.OpMove, wire.OpRemove:
		return false
	case wire.OpWrite:
		return r.Write == nil || !r.Write.Append
	}
	return true
}

// call runs a request that ends in a reply.
func (c *Client) call(ctx context.Context, r wire.Req, content []byte) (wire.Res, error) {
	var res wire.Res
	err := c.run(ctx, r, content, nil, func(k wire.Kind, p []byte) (bool, error) {
		if k != wire.Reply {
			return false, unexpected(r.Op, k)
		}
		return true, json.Unmarshal(p, &res)
	})
	return res, err
}

// onFrame takes one frame of an answer and says whether it was the last.
type onFrame func(k wire.Kind, p []byte) (done bool, err error)

// run sends a request and hands the answer's frames to on, except Error, which
// it returns. A request that Park or Rekey cuts off is sent again once new ones
// may run; resume, where it is not nil, then says what is left of it.
func (c *Client) run(ctx context.Context, r wire.Req, content []byte, resume func(wire.Req, []byte) (wire.Req, []byte), on onFrame) error {
	op := "guest." + r.Op
	if len(content) > wire.MaxContent {
		return sandbox.Errorf(sandbox.TooLarge, op, "%d bytes in one call, at most %d", len(content), wire.MaxContent)
	}
	r = withID(r)
	lost, fresh := 0, true
	for try := 1; ; try++ {
		cn, err := c.take(ctx, r.Op, fresh)
		if err != nil {
			return c.explain(ctx, op, err)
		}
		before := cn.Received()
		again, err := c.runOn(ctx, cn, r, content, on)
		if err == nil {
			return nil
		}
		if c.wasCut(cn, err) && (endless(r.Op) || safeToRepeat(r) && cn.Received() == before) {
			if resume != nil {
				r, content = resume(r, content)
			}
			try, fresh = 0, false
			continue
		}
		if gone, failed := c.gaveUp(cn); failed != nil {
			return sandbox.WithOp(op, failed)
		} else if gone && lost < maxLost && ctx.Err() == nil { // the guest that told so knows ids
			if resume != nil {
				r, content = resume(r, content)
			}
			lost++
			continue
		}
		if !again || try >= handshakes || ctx.Err() != nil {
			return c.explain(ctx, op, err)
		}
		select { // a stale connection is replaced at once, a pushed-out one after a breath
		case <-ctx.Done():
		case <-time.After(time.Duration(try-1) * 5 * time.Millisecond):
		}
	}
}

// errStop carries an error of this side, mostly of the caller's own sink, out of
// runOn untouched and gives the connection up.
type errStop struct{ error }

func (e errStop) Unwrap() error { return e.error }

// runOn runs a request on one connection. again says that the request surely
// has not run, or may run twice without harm.
func (c *Client) runOn(ctx context.Context, cn *conn, r wire.Req, content []byte, on onFrame) (again bool, err error) {
	stop := context.AfterFunc(ctx, func() { cn.Close() })
	ok := false
	defer func() { c.put(cn, stop() && ok) }()
	before := cn.Received()
	unwatch := func() {}
	defer func() { unwatch() }()

	err = func() error {
		if !cn.reused {
			cn.SetReadDeadline(time.Now().Add(wire.HandshakeTimeout))
			p, err := cn.OfferAuth(cn.secret)
			if err != nil {
				return err
			}
			cn.proof = p
		}
		unwatch = c.watch(ctx, cn, r.Op)
		out, err := newSender(cn.Conn, r, content)
		if err != nil {
			return err
		}
		if err := out.start(); err != nil {
			return err
		}
		if cn.proof != nil {
			if err := cn.proof.Check(cn.Conn); err != nil {
				cn.Close()
				out.finish()
				return err
			}
			cn.proof = nil
			cn.SetReadDeadline(time.Time{})
		}
		err = answers(cn, out, on)
		if _, fromGuest := err.(*sandbox.Error); err != nil && !fromGuest {
			cn.Close() // ends the sender; a guest that refuses still takes all content
		}
		if serr := out.finish(); err == nil {
			err = serr
		}
		return err
	}()

	switch e := err.(type) {
	case nil:
		ok = true
		return false, nil
	case *sandbox.Error: // the guest's own answer: the connection is in step
		ok = true
		return false, e
	case errStop:
		return false, e
	}
	if cn.proof != nil || !cn.reused && cn.Received() == before {
		return true, err // the guest never took us for its host, so it did nothing
	}
	return cn.reused && cn.Received() == before && safeToRepeat(r), err
}

func answers(cn *conn, out *sender, on onFrame) error {
	for {
		k, p, err := cn.ReadFrame(wire.MaxFrame)
		if err != nil {
			return err
		}
		if k == wire.Credit {
			n, err := wire.ParseCredit(p)
			if err != nil {
				return err
			}
			out.credit(n)
			continue
		}
		if k == wire.Error {
			e := &sandbox.Error{}
			if err := json.Unmarshal(p, e); err != nil {
				return err
			}
			return e
		}
		done, err := on(k, p)
		if err != nil {
			return err
		}
		if done {
			return nil
		}
	}
}

// take returns a connection for one request: the most recently used idle one
// that is still open, or a new one. fresh says that it was not cut off before:
// what was is content to wait until somebody wakes the sandbox.
func (c *Client) take(ctx context.Context, op string, fresh bool) (*conn, error) {
	for {
		cn, err := c.takeNow(ctx, op, fresh)
		if cn != nil || err != nil {
			return cn, err
		}
	}
}

// takeNow is take, or neither if the client was held while it dialled: Park
// and Rekey look for connections when they hold, and would not find that one.
func (c *Client) takeNow(ctx context.Context, op string, fresh bool) (*conn, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	c.mu.Lock()
	for c.heldFrom(op) {
		held, wake := c.mu.held, c.mu.onHeld
		c.mu.Unlock()
		if wake != nil && fresh && wakes(op) {
			wake()
		}
		select {
		case <-held:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		c.mu.Lock()
	}
	for len(c.mu.idle) > 0 && !c.mu.closed {
		cn := c.mu.idle[len(c.mu.idle)-1].conn
		c.mu.idle = c.mu.idle[:len(c.mu.idle)-1]
		if !open(cn.Conn.Conn) {
			cn.Close()
			continue
		}
		cn.reused, cn.endless, cn.start = true, endless(op), startOf(op)
		c.mu.busy[cn] = struct{}{}
		c.mu.Unlock()
		return cn, nil
	}
	if c.mu.closed {
		c.mu.Unlock()
		return nil, net.ErrClosed
	}
	c.mu.dialing++
	cn := &conn{secret: c.mu.secret, endless: endless(op), start: startOf(op)}
	dial := c.mu.dial
	c.mu.Unlock()
	dctx, cancel := context.WithTimeout(ctx, dialFor)
	nc, err := dial(dctx)
	cancel()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.dialing--
	c.oneEndedLocked()
	if err != nil {
		return nil, err
	}
	if c.mu.closed {
		nc.Close()
		return nil, net.ErrClosed
	}
	if c.heldFrom(op) {
		nc.Close()
		return nil, nil
	}
	cn.Conn = wire.NewConn(nc)
	c.mu.busy[cn] = struct{}{}
	return cn, nil
}

// heldFrom says whether a request must wait; the rekey is what others wait for.
func (c *Client) heldFrom(op string) bool { return c.mu.held != nil && op != wire.OpRekey }

// oneEndedLocked wakes Park.
func (c *Client) oneEndedLocked() {
	c.mu.ended.Tell()
}

// put keeps a connection that is in step and closes any other.
func (c *Client) put(cn *conn, inStep bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.mu.busy, cn)
	defer c.oneEndedLocked()
	if !inStep || c.mu.closed || cn.cut || len(c.mu.idle) >= maxIdle {
		cn.Close()
		return
	}
	c.mu.idle = append(c.mu.idle, idleConn{cn, time.Now()})
	if c.mu.timer == nil {
		c.mu.timer = time.AfterFunc(idleFor, c.trim)
	}
}

// trim closes what has been idle for long, the oldest first.
func (c *Client) trim() {
	c.mu.Lock()
	defer c.mu.Unlock()
	// Two stay in all: a dial costs two of the ten milliseconds that a kernel fresh
	// from its pool has for an attach, and who watches for the end of its init takes
	// one away from the call that comes next.
	keep := max(1, 2-len(c.mu.busy))
	n := 0
	for n < len(c.mu.idle)-keep && time.Since(c.mu.idle[n].since) >= idleFor {
		c.mu.idle[n].Close()
		n++
	}
	c.mu.idle = append(c.mu.idle[:0], c.mu.idle[n:]...)
	c.mu.timer = nil
	if len(c.mu.idle) > keep && !c.mu.closed {
		c.mu.timer = time.AfterFunc(idleFor-time.Since(c.mu.idle[0].since), c.trim)
	}
}

// explain gives every failure a class: the caller's own, the guest's, or
// unavailable when the connection is what failed.
func (c *Client) explain(ctx context.Context, op string, err error) error {
	var stop errStop
	if errors.As(err, &stop) {
		return stop.error
	}
	var e *sandbox.Error
	if errors.As(err, &e) {
		return sandbox.WithOp(op, err)
	}
	switch ctx.Err() {
	case context.Canceled:
		return sandbox.Errorf(sandbox.Canceled, op, "%w", context.Cause(ctx))
	case context.DeadlineExceeded:
		return sandbox.Errorf(sandbox.DeadlineReached, op, "%w", context.Cause(ctx))
	}
	return sandbox.Errorf(sandbox.Unavailable, op, "no answer from the guest: %w", err)
}

var errHeader = errStop{&sandbox.Error{Class: sandbox.TooLarge, Msg: "the request is larger than 8 MiB", Hint: "send large content as input or in a file"}}

// unexpected is not the guest's answer but our own verdict on it, so it stops
// the connection.
func unexpected(op string, k wire.Kind) error {
	return errStop{sandbox.Errorf(sandbox.Internal, "guest."+op, "unexpected frame of kind %d", k)}
}
