package guest

import (
	"context"
	"errors"
	"net"
	"time"

	"github.com/cove-sandbox/cove/guest/wire"
	"github.com/cove-sandbox/cove/sandbox"
)

const (
	// parkGrace is how long Park waits for requests that end by themselves.
	parkGrace = 2 * time.Second
	// cutGrace is how long it waits for the kernel to let go of a connection.
	cutGrace = 500 * time.Millisecond
	// young is what a pause gives an exec from its start to end: most commands take
	// 10 to 100 ms. One that goes on is frozen, as whoever pauses wants it.
	young = 300 * time.Millisecond
)

// Hold makes new requests wait (for Release, their context or Close); those
// under way are left alone. For a paused kernel, whose guest would not answer.
func (c *Client) Hold() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.held == nil {
		c.mu.held = make(chan struct{})
	}
}

// OnHeld has f called when a request of a user's must wait because of Hold or Park
// and none under way was cut for it: the sandbox was put to sleep between its
// caller's wake and its request. f does not block.
func (c *Client) OnHeld(f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.onHeld = f
}

// wakes says that a request is one that a sandbox wakes for: all that its users
// make. The node's own, and the callbacks that stand still with it, are not.
func wakes(op string) bool {
	switch op {
	case wire.OpStart, wire.OpAttach, wire.OpInput, wire.OpCloseInput, wire.OpSignal, wire.OpResize, wire.OpProcesses, wire.OpWait,
		wire.OpRead, wire.OpWrite, wire.OpStat, wire.OpList, wire.OpMkdir, wire.OpMove, wire.OpRemove, wire.OpChmod, wire.OpChown, wire.OpSetAttrs, wire.OpUntar,
		wire.OpWatch, wire.OpConnect:
		return true
	}
	return false
}

// Settle is Hold that first lets requests finish that end by themselves, for at
// most two seconds: a call that was made before the pause is answered, not frozen.
// An exec may be such a call; until it is young no more, it is taken for one.
func (c *Client) Settle(ctx context.Context) error {
	if err := c.settle(ctx, c.young); err != nil {
		c.Release()
		return sandbox.Errorf(sandbox.Canceled, "guest.settle", "%w", err)
	}
	return nil
}

// Release ends Hold and Park. It is idempotent.
func (c *Client) Release() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.held != nil {
		close(c.mu.held)
		c.mu.held = nil
	}
}

// Park is Hold that also ends every connection, for a kernel being
// checkpointed: what the host holds of a connection is not part of it. Requests
// that end by themselves are waited for. The others (an attached process, a
// wait, a watch) are cut off and go on after Release where they were, unknown
// to the caller. What still runs after a grace, a write to a process that does
// not read, fails with sandbox.ErrUnavailable.
func (c *Client) Park(ctx context.Context) error {
	if err := c.settle(ctx, 0); err != nil {
		c.Release()
		return sandbox.Errorf(sandbox.Canceled, "guest.park", "%w", err)
	}
	c.mu.Lock()
	idle := c.mu.idle
	c.mu.idle = nil
	c.cutLocked()
	for cn := range c.mu.busy {
		hangUp(cn.Conn.Conn)
	}
	c.mu.Unlock()
	for _, i := range idle {
		hangUp(i.Conn.Conn)
	}
	deadline := time.Now().Add(cutGrace)
	for _, i := range idle {
		// The kernel's end of it is gone when ours reads the end.
		i.SetReadDeadline(deadline)
		_, _ = i.Conn.Conn.Read(make([]byte, 1))
		i.Close()
	}
	late := time.After(time.Until(deadline))
	for { // a busy connection is read by its request
		c.mu.Lock()
		wait, left := c.mu.ended.Next(), len(c.mu.busy)
		c.mu.Unlock()
		if left == 0 {
			return nil
		}
		select {
		case <-wait:
		case <-late:
			return nil // its caller is slow to take what it was sent; the kernel's end is gone all the same
		}
	}
}

// settle is Hold that also waits for requests that end by themselves, and for
// execs that were begun less than young ago.
func (c *Client) settle(ctx context.Context, young time.Duration) error {
	c.mu.Lock()
	patience := parkGrace
	if c.mu.held != nil {
		patience = 0 // paused: nothing ends by itself
	}
	c.mu.Unlock()
	c.Hold()
	grace, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		c.mu.Lock()
		wait, short := c.mu.ended.Next(), c.mu.dialing
		var grown <-chan time.Time // nil: none is young
		for cn := range c.mu.busy {
			age := young
			if !cn.start.IsZero() {
				age = time.Since(cn.start)
			}
			if !cn.endless || age < young {
				short++
			}
			if age < young && grown == nil {
				grown = time.After(young - age)
			}
		}
		c.mu.Unlock()
		if short == 0 {
			break
		}
		select {
		case <-wait:
			continue
		case <-grown:
			continue
		case <-grace.Done():
		}
		break
	}
	return ctx.Err()
}

// cutLocked says that the requests under way are about to lose their
// connections and not to be over for it.
func (c *Client) cutLocked() {
	for cn := range c.mu.busy {
		cn.cut = true
	}
}

// Outlive lets what waits in a parked client wait on when its kernel goes, for
// MoveTo or Abandon.
func (c *Client) Outlive() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.orphan = true
}

// MoveTo makes c a client of the guest that to is one of, and ends to. What
// Park cut off goes on there: it is the same guest, restored.
func (c *Client) MoveTo(to *Client) {
	to.mu.Lock()
	dial, secret, idle := to.mu.dial, to.mu.secret, to.mu.idle
	to.mu.idle = nil
	to.mu.Unlock()
	to.Close()
	c.mu.Lock()
	c.mu.dial, c.mu.secret, c.mu.orphan, c.mu.closed = dial, secret, false, false
	c.mu.idle = append(c.mu.idle, idle...)
	c.mu.Unlock()
	c.Release()
}

// Abandon ends what Outlive kept waiting.
func (c *Client) Abandon() {
	c.mu.Lock()
	c.mu.orphan = false
	c.mu.Unlock()
	c.Close()
}

// wasCut says whether err is Park's or Rekey's doing.
func (c *Client) wasCut(cn *conn, err error) bool {
	var e *sandbox.Error
	var stop errStop
	if errors.As(err, &e) || errors.As(err, &stop) {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return cn.cut && !c.mu.closed
}

// hangUp ends our half of a connection, upon which the kernel ends the other.
func hangUp(nc net.Conn) {
	if cw, ok := nc.(interface{ CloseWrite() error }); ok && cw.CloseWrite() == nil {
		return
	}
	nc.Close()
}

// endless requests run until something happens inside.
func endless(op string) bool {
	switch op {
	case wire.OpStart, wire.OpAttach, wire.OpWait, wire.OpWaitInit, wire.OpWatch, wire.OpConnect, wire.OpAccept, wire.OpCallRead, wire.OpCallWrite:
		return true
	}
	return false
}

// startOf is now for a request that begins an exec.
func startOf(op string) time.Time {
	if op == wire.OpStart {
		return time.Now()
	}
	return time.Time{}
}

// Freeze stops the clocks of the deadlines of all processes until Thaw.
func (c *Client) Freeze(ctx context.Context) error {
	_, err := c.call(ctx, wire.Req{Op: wire.OpFreeze}, nil)
	return err
}

// Thaw ends Freeze; without one it does nothing.
func (c *Client) Thaw(ctx context.Context) error {
	_, err := c.call(ctx, wire.Req{Op: wire.OpThaw}, nil)
	return err
}

// SetEnv replaces the environment that processes to come start from.
func (c *Client) SetEnv(ctx context.Context, env []string) error {
	_, err := c.call(ctx, wire.Req{Op: wire.OpSetEnv, Env: env}, nil)
	return err
}

// Rekey gives the guest of a restored kernel a secret of its own, with the
// environment and limit of the sandbox it is now. Connections of the old secret
// end, but for the one that asks, which the next request goes on with. Requests
// of this client are as with Park and Release: new ones wait, and what is cut off
// goes on under the new secret. same says that it is the sandbox that it was:
// without it, calls to the host that were under way end too, for their host was
// another's. If it fails, which secret holds is not known.
func (c *Client) Rekey(ctx context.Context, secret []byte, ct Container, same bool) error {
	return c.rekey(ctx, wire.Req{Secret: secret, Env: ct.Env, Pids: ct.Pids, Hostname: ct.Hostname, Flag: same})
}

// RekeyForNobody is Rekey of a kernel that is nobody's yet: its clocks stand, and what it
// was connected with stays, until a Rekey says whose it is. Name, limit and the process,
// which no list shows, are for practice: what they touch is slow the first time, 6 and 8 ms.
func (c *Client) RekeyForNobody(ctx context.Context, secret []byte, ct Container, process sandbox.ProcessSpec) error {
	return c.rekey(ctx, wire.Req{Secret: secret, Pids: ct.Pids, Hostname: ct.Hostname, Spec: &process, Stay: true})
}

func (c *Client) rekey(ctx context.Context, r wire.Req) error {
	c.mu.Lock()
	held := c.mu.held != nil
	c.mu.Unlock()
	if !held { // who held it releases it
		defer c.Release()
	}
	if err := c.settle(ctx, 0); err != nil {
		return sandbox.Errorf(sandbox.Canceled, "guest.rekey", "%w", err)
	}
	c.mu.Lock()
	c.cutLocked()
	for len(c.mu.idle) > 1 {
		c.mu.idle[0].Close()
		c.mu.idle = c.mu.idle[1:]
	}
	c.mu.Unlock()
	r.Op = wire.OpRekey
	if _, err := c.call(ctx, r, nil); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.secret = r.Secret
	return nil
}

// Mount moves the mount at from, in the container of another init, to an
// absolute path of the container being served. No part of path may be a
// symlink; missing directories are made.
func (c *Client) Mount(ctx context.Context, initPID int, from, path string) error {
	_, err := c.call(ctx, wire.Req{Op: wire.OpMount, InitPID: initPID, To: from, Path: path}, nil)
	return err
}
