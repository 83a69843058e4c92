package agent

import (
	"context"
	"io"
	"net"
	"os"
	"slices"
	"strconv"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/guest/wire"
	"github.com/cove-sandbox/cove/sandbox"
)

// caller is one connection that code inside made to the host. Both directions
// are addressed by byte offset, so that a request about it may be sent again on
// another connection, after a checkpoint: what was read is kept until the host
// asks for what follows it, what was written is counted.
type caller struct {
	conn *net.TCPConn

	reading chan struct{} // capacity 1: whose is what follows
	base    int64         // offset of kept
	kept    []byte        // read, and not known to have arrived
	eof     bool

	writing chan struct{} // the same
	wrote   int64

	awaits atomic.Bool // something was read after the last that was written
}

func newCaller(c *net.TCPConn) *caller {
	_ = c.SetKeepAlive(false) // the loopback loses nobody
	return &caller{conn: c, reading: make(chan struct{}, 1), writing: make(chan struct{}, 1)}
}

// turn waits for a direction to be free: a request that a checkpoint cut off
// may still be on its way out when its repetition comes.
func turn(ctx context.Context, c chan struct{}) (done func(), err error) {
	select {
	case c <- struct{}{}:
		return func() { <-c }, nil
	case <-ctx.Done():
		return nil, errGone
	}
}

// until runs f, which deadline in the past ends, until ctx ends.
func until(ctx context.Context, deadline func(time.Time) error, f func() error) error {
	ended := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(ended)
		_ = deadline(time.Unix(1, 0))
	})
	err := f()
	if !stop() {
		<-ended
		_ = deadline(time.Time{})
		if err != nil {
			return errGone
		}
	}
	return err
}

// read returns what the caller sent from offset on, at least a byte unless it
// has ended. What is before offset has arrived.
func (k *caller) read(ctx context.Context, offset int64) (p []byte, eof bool, err error) {
	done, err := turn(ctx, k.reading)
	if err != nil {
		return nil, false, err
	}
	defer done()
	if offset < k.base || offset > k.base+int64(len(k.kept)) {
		return nil, false, sandbox.InvalidField("offset", "%d is not between %d and %d", offset, k.base, k.base+int64(len(k.kept)))
	}
	if k.kept = k.kept[offset-k.base:]; len(k.kept) == 0 {
		k.kept = nil
	}
	k.base = offset
	if len(k.kept) == 0 && !k.eof {
		err = until(ctx, k.conn.SetReadDeadline, k.fill)
		if err == io.EOF {
			k.eof, err = true, nil
		}
		if err != nil && err != errGone {
			err = sandbox.Errorf(sandbox.Unavailable, "", "the caller inside broke off: %w", err)
		}
	}
	return k.kept, k.eof, err
}

// fill reads once. An idle connection has no buffer.
func (k *caller) fill() error {
	rc, err := k.conn.SyscallConn()
	if err != nil {
		return err
	}
	var n int
	var rerr error
	err = rc.Read(func(fd uintptr) bool {
		buf := outBuffers.Get().(*[]byte)
		defer outBuffers.Put(buf)
		n, rerr = retryEINTR(func() (int, error) { return unix.Read(int(fd), *buf) })
		if rerr == syscall.EAGAIN {
			return false
		}
		if n > 0 {
			k.kept = slices.Clone((*buf)[:n])
		}
		return true
	})
	switch {
	case err != nil:
		return err
	case rerr != nil:
		return os.NewSyscallError("read", rerr)
	case n == 0:
		return io.EOF
	}
	k.awaits.Store(true)
	return nil
}

// write sends the part of p that was not sent before; offset is where p begins.
func (k *caller) write(ctx context.Context, offset int64, p []byte) error {
	done, err := turn(ctx, k.writing)
	if err != nil {
		return err
	}
	defer done()
	have := k.wrote - offset
	if have < 0 || have > int64(len(p)) {
		return sandbox.InvalidField("offset", "%d with %d bytes does not meet %d", offset, len(p), k.wrote)
	}
	k.awaits.Store(false)
	err = until(ctx, k.conn.SetWriteDeadline, func() error {
		n, err := k.conn.Write(p[have:])
		k.wrote += int64(n)
		return err
	})
	if err != nil && err != errGone {
		err = sandbox.Errorf(sandbox.Unavailable, "", "the caller inside broke off: %w", err)
	}
	return err
}

// closeWrite ends our direction.
func (k *caller) closeWrite(ctx context.Context) error {
	done, err := turn(ctx, k.writing)
	if err != nil {
		return err
	}
	defer done()
	_ = k.conn.CloseWrite() // twice, or behind a caller that left: it is shut either way
	return nil
}

// lament tells a caller that waits for an answer why there will be none, in the
// one language that the route speaks. One to which an answer has begun is cut
// off, which it notices.
func (k *caller) lament() {
	if !k.awaits.Load() {
		return
	}
	if rc, err := k.conn.SyscallConn(); err == nil {
		// Once, without waiting: it fits, for nothing else is on its way.
		_ = rc.Control(func(fd uintptr) { _, _ = unix.Write(int(fd), []byte(lamentation)) })
	}
}

const lamentBody = `{"code":"handler_gone","message":"the handler of this call is gone: its server ended, or this sandbox was forked or restored","hint":"ask again once something serves ` + wire.CallbackHost + `"}` + "\n"

var lamentation = "HTTP/1.1 502 Bad Gateway\r\nContent-Type: application/json\r\nX-Cove-Error: handler_gone\r\nConnection: close\r\nContent-Length: " +
	strconv.Itoa(len(lamentBody)) + "\r\n\r\n" + lamentBody
