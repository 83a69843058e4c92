package guest

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"net"
	"time"

	"github.com/cove-sandbox/cove/guest/wire"
	"github.com/cove-sandbox/cove/sandbox"
)

// Conn is a byte stream to a port inside. It ends when its sandbox or its episode
// does. It stands still while the kernel is paused, and while it is checkpointed
// or asleep on disk, and then goes on where it was: the other end waits in the
// guest, which Park parts it from and Release lets it find again.
type Conn struct{ *wire.Stream }

// Connect opens a stream to a TCP port inside. Where nothing listens it is
// sandbox.ErrPortClosed. The context is of the connect only.
func (c *Client) Connect(ctx context.Context, port int) (*Conn, error) {
	var id [16]byte // nobody else can name it, not even who has the guest's secret
	_, _ = rand.Read(id[:])
	r := wire.Req{Op: wire.OpConnect, Port: port, Token: hex.EncodeToString(id[:])}
	cn, res, err := c.join(ctx, r, true)
	if err != nil {
		return nil, c.explain(ctx, "guest.connect", err)
	}
	st := wire.NewStream()
	resumes := res.Mark != nil
	if !resumes {
		st.Plain()
		res.Mark = &wire.Mark{}
	}
	if err := st.Attach(cn.Conn, *res.Mark); err != nil {
		c.put(cn, false)
		return nil, sandbox.Errorf(sandbox.Internal, "guest.connect", "%w", err)
	}
	go c.carry(st, cn, r, resumes)
	return &Conn{st}, nil
}

// join sends a connect until a connection has its reply, which is then of a
// stream. A connect may be sent twice: its token is that of one stream. One that
// goes on is not fresh: it wakes nobody, its bytes do.
func (c *Client) join(ctx context.Context, r wire.Req, fresh bool) (cn *conn, res wire.Res, err error) {
	lost := 0
	for try := 1; ; try++ {
		if cn, err = c.take(ctx, r.Op, fresh); err != nil {
			return nil, res, err
		}
		again, err := c.beginStream(ctx, cn, r, &res)
		if err == nil {
			return cn, res, nil
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
			return nil, res, err
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Duration(try-1) * 5 * time.Millisecond):
		}
	}
}

// beginStream runs the request up to its reply. again as for runOn.
func (c *Client) beginStream(ctx context.Context, cn *conn, r wire.Req, res *wire.Res) (again bool, err error) {
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
		return json.Unmarshal(p, res)
	}()
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err == nil {
		return false, nil
	}
	return cn.proof != nil || cn.Received() == before, err
}

// carry moves a stream from one connection to the next until it is over. The
// connection stays among the busy ones, for Park and Close to find.
func (c *Client) carry(st *wire.Stream, cn *conn, r wire.Req, resumes bool) {
	for breaks := 0; ; {
		over, err := c.feed(st, cn)
		st.Detach(cn.Conn)
		cut := c.wasCut(cn, err)
		c.put(cn, false)
		switch {
		case over:
			st.Fail(err)
			return
		case cut && resumes:
		// The guest ends the connection of a stream that we closed. Otherwise it
		// is not its part to end one: a few times that may be a mishap.
		case st.Closed() || !resumes || breaks >= handshakes:
			st.Fail(cutOff(err))
			return
		default:
			breaks++
		}
		mark := st.Mark()
		r.Mark = &mark
		var res wire.Res
		if cn, res, err = c.join(context.Background(), r, false); err == nil {
			if res.Mark == nil {
				res.Mark = &wire.Mark{}
			}
			if err = st.Attach(cn.Conn, *res.Mark); err != nil {
				c.put(cn, false)
			}
		}
		if err != nil {
			st.Fail(cutOff(err))
			return
		}
	}
}

// feed hands frames to a stream until the connection ends, or the guest says that
// the stream is over.
func (c *Client) feed(st *wire.Stream, cn *conn) (over bool, err error) {
	for {
		k, p, err := cn.ReadFrame(wire.MaxData)
		if err != nil {
			return false, err
		}
		if k == wire.Over {
			if err = wire.ParseOver(p); err == nil {
				err = io.ErrUnexpectedEOF
			}
			return true, cutOff(err)
		}
		if err := st.Feed(k, p); err != nil {
			return true, cutOff(err)
		}
	}
}

// cutOff is what a reader or writer sees of a connection that ended without
// having been shut.
func cutOff(err error) error {
	if err == nil || err == io.EOF || errors.Is(err, net.ErrClosed) {
		err = io.ErrUnexpectedEOF
	}
	return sandbox.Errorf(sandbox.Unavailable, "guest.connect", "the stream into the sandbox was cut: %w", err)
}

var _ net.Conn = (*Conn)(nil)
