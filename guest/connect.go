package guest

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/guest/wire"
	"github.com/cove-sandbox/cove/sandbox"
)

// Conn is a byte stream to a port inside. It ends when its sandbox does, and at
// a checkpoint, since the other end of it is part of that; it stands still while
// the kernel is paused.
type Conn struct {
	*wire.Stream
	done func()
}

// Close ends both directions. It is idempotent.
func (c *Conn) Close() error {
	err := c.Stream.Close()
	c.done()
	return err
}

// Connect opens a stream to a TCP port inside. Where nothing listens it is
// sandbox.ErrPortClosed. The context is of the connect only.
func (c *Client) Connect(ctx context.Context, port int) (*Conn, error) {
	const op = "guest.connect"
	r := wire.Req{Op: wire.OpConnect, Port: port}
	lost, fresh := 0, true
	for try := 1; ; try++ {
		cn, err := c.take(ctx, r.Op, fresh)
		if err != nil {
			return nil, c.explain(ctx, op, err)
		}
		again, err := c.beginStream(ctx, cn, r)
		if err == nil {
			return c.stream(cn), nil
		}
		var e *sandbox.Error
		c.put(cn, errors.As(err, &e)) // the guest's own answer: the connection is in step
		if e == nil && c.wasCut(cn, err) {
			try, fresh = 0, false
			continue
		}
		if gone, _ := c.gaveUp(cn); gone && lost < maxLost && ctx.Err() == nil {
			lost++
			continue
		}
		if !again || try >= handshakes || ctx.Err() != nil {
			return nil, c.explain(ctx, op, err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Duration(try-1) * 5 * time.Millisecond):
		}
	}
}

// beginStream runs the request up to its reply. again as for runOn.
func (c *Client) beginStream(ctx context.Context, cn *conn, r wire.Req) (again bool, err error) {
	stop := context.AfterFunc(ctx, func() { cn.Close() })
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
		if err := cn.WriteJSON(wire.Request, r); err != nil {
			return err
		}
		if cn.proof != nil {
			if err := cn.proof.Check(cn.Conn); err != nil {
				cn.Close()
				return err
			}
			cn.proof = nil
			cn.SetReadDeadline(time.Time{})
		}
		k, p, err := cn.ReadFrame(wire.MaxFrame)
		switch {
		case err != nil:
			return err
		case k == wire.Error:
			e := &sandbox.Error{}
			if err := json.Unmarshal(p, e); err != nil {
				return err
			}
			return e
		case k != wire.Reply:
			cn.Close()
			return unexpected(r.Op, k)
		}
		return nil
	}()
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err == nil {
		return false, nil
	}
	return cn.proof != nil || cn.Received() == before, err
}

// stream makes a stream of a connection that has had its reply. It stays among
// the busy ones, for Park and Close to find.
func (c *Client) stream(cn *conn) *Conn {
	st := wire.NewStream(cn.Conn)
	done := sync.OnceFunc(func() { c.put(cn, false) })
	go func() { // ends with the connection
		defer done()
		for {
			k, p, err := cn.ReadFrame(wire.MaxData)
			if err == nil {
				err = st.Feed(k, p)
			}
			if err != nil {
				st.Fail(cutOff(err))
				return
			}
		}
	}()
	return &Conn{Stream: st, done: done}
}

// cutOff is what a reader or writer sees of a connection that ended without
// having been shut.
func cutOff(err error) error {
	if err == io.EOF || errors.Is(err, net.ErrClosed) {
		err = io.ErrUnexpectedEOF
	}
	return sandbox.Errorf(sandbox.Unavailable, "guest.connect", "the stream into the sandbox was cut: %w", err)
}

var _ net.Conn = (*Conn)(nil)
