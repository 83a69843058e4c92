package remote

import (
	"context"
	"encoding/binary"
	"io"
	"net"
	"sync/atomic"
	"time"

	"github.com/cove-sandbox/cove/node"
)

// closeTimeout is how long the node may take to end a connection that was closed.
const closeTimeout = 10 * time.Second

// conn is a byte stream to the node. What is written is the body of its request,
// what is read comes from the answer.
type conn struct {
	in, out *pipe
	cancel  context.CancelCauseFunc
	closing atomic.Bool

	// Of the body, used by the transport alone.
	head     []byte // what is to be sent next; at first the arguments
	frame    []byte // where head is made
	shut     bool   // end was sent
	finished bool
}

// body is a conn as the transport reads it: frames of what was written. After
// the end of writing it goes on until the connection is closed, to say so.
type body struct{ *conn }

func (b body) Read(p []byte) (int, error) {
	if len(b.head) == 0 {
		if err := b.next(); err != nil {
			return 0, err
		}
	}
	n := copy(p, b.head)
	b.head = b.head[n:]
	return n, nil
}

// next makes the next frame.
func (b body) next() error {
	if b.finished {
		return io.EOF
	}
	if cap(b.frame) == 0 {
		b.frame = make([]byte, headerSize+piece)
	}
	n, err := 0, io.EOF
	if b.shut { // and not closed yet
		_ = b.out.wait(false, func() bool { return b.closing.Load() || b.out.mu.err != nil }) // without a deadline
	} else {
		n, err = b.out.read(b.frame[headerSize:], false)
	}
	k := data
	switch {
	case err == io.EOF && b.closing.Load():
		k, b.finished = closed, true
	case err == io.EOF && !b.shut:
		k, b.shut = end, true
	case err == io.EOF:
		b.finished = true
		return io.EOF
	case err != nil:
		return err
	}
	b.frame[0] = byte(k)
	binary.BigEndian.PutUint32(b.frame[1:], uint32(n))
	b.head = b.frame[:headerSize+n]
	return nil
}

// Close is the transport's: it sends no more.
func (b body) Close() error {
	b.out.fail(net.ErrClosed)
	return nil
}

// receive moves the answer to the reader, and returns when the call is over.
func (c *conn) receive(in *frameReader) {
	buf := make([]byte, piece)
	for {
		n, err := in.Read(buf)
		if n > 0 {
			if _, werr := c.in.write(buf[:n], false); werr != nil && !c.closing.Load() {
				return
			}
		}
		if err == io.EOF {
			c.in.close()
			_, _ = in.r.ReadByte() // the other half goes on until the stream is over
			c.out.fail(net.ErrClosed)
			return
		}
		if err != nil {
			c.in.finish(err)
			c.out.fail(err)
			return
		}
	}
}

func (c *conn) Read(p []byte) (int, error)  { return c.in.read(p, true) }
func (c *conn) Write(p []byte) (int, error) { return c.out.write(p, true) }

func (c *conn) CloseWrite() error {
	c.out.close()
	return nil
}

// Close ends the connection in order: what was written arrives.
func (c *conn) Close() error {
	if c.closing.Swap(true) {
		return nil
	}
	c.in.fail(net.ErrClosed)
	c.out.close()
	time.AfterFunc(closeTimeout, func() { c.cancel(net.ErrClosed) })
	return nil
}

// Abort ends it so that the other side sees that it did not end in order.
func (c *conn) Abort(error) error {
	c.closing.Store(true)
	c.in.fail(net.ErrClosed)
	c.out.fail(net.ErrClosed)
	c.cancel(net.ErrClosed)
	return nil
}

func (c *conn) SetDeadline(t time.Time) error {
	c.in.deadline(t)
	c.out.deadline(t)
	return nil
}

func (c *conn) SetReadDeadline(t time.Time) error  { c.in.deadline(t); return nil }
func (c *conn) SetWriteDeadline(t time.Time) error { c.out.deadline(t); return nil }

func (c *conn) LocalAddr() net.Addr  { return addr{} }
func (c *conn) RemoteAddr() net.Addr { return addr{} }

// addr of a stream, which has none that means anything here.
type addr struct{}

func (addr) Network() string { return "node" }
func (addr) String() string  { return "node" }

var _ node.Conn = (*conn)(nil)
