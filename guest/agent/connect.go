package agent

import (
	"context"
	"errors"
	"net"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/guest/wire"
	"github.com/cove-sandbox/cove/sandbox"
)

const (
	// dialInside bounds a connect on the loopback: it is refused at once or
	// taken at once, unless the server has stopped accepting.
	dialInside = 10 * time.Second
	// lastWords is how long a server inside may take to read what was on its
	// way when the host left.
	lastWords = 10 * time.Second
)

// connect joins the connection with a TCP port of the container, whose network
// stack is the agent's own, or carries on a stream that is there already. It is
// the last request of its connection.
func (s *session) connect(ep *episode, r wire.Req) error {
	if r.Port < 1 || r.Port > 65535 {
		return sandbox.InvalidField("port", "%d is no TCP port; 1 to 65535 are", r.Port)
	}
	v := s.agent.visitors.find(r.Token)
	switch {
	case v != nil:
	case r.Mark != nil:
		return errVisitorGone()
	default:
		in, err := dialPort(s.ctx, r.Port)
		if s.ctx.Err() != nil && err != nil {
			return errGone // a host that parted from us asks again; it is not to take this for the answer
		}
		if err != nil {
			return err
		}
		if v, err = s.agent.visitors.add(ep, r.Token, in); err != nil {
			in.Close()
			return err
		}
	}
	if r.Mark == nil {
		r.Mark = &wire.Mark{}
	}
	return v.carriedBy(s, *r.Mark)
}

// dialPort tries both loopback addresses: a server may listen on either alone.
func dialPort(ctx context.Context, port int) (*net.TCPConn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialInside)
	defer cancel()
	d := net.Dialer{KeepAlive: -1} // the loopback loses nobody
	var refused bool
	var last error
	for _, ip := range []string{"127.0.0.1", "::1"} {
		c, err := d.DialContext(ctx, "tcp", net.JoinHostPort(ip, strconv.Itoa(port)))
		if err == nil {
			return c.(*net.TCPConn), nil
		}
		if errors.Is(err, unix.ECONNREFUSED) {
			refused = true
		} else if ip == "127.0.0.1" || !refused {
			last = err // a kernel without IPv6 says so at the second
		}
	}
	if refused && last == nil {
		return nil, &sandbox.Error{Class: sandbox.Precondition, Reason: sandbox.PortClosed,
			Msg:  "nothing listens on " + strconv.Itoa(port) + " inside",
			Hint: "a server must listen on 127.0.0.1 or 0.0.0.0"}
	}
	return nil, sandbox.Errorf(sandbox.Unavailable, "", "port %d inside does not answer: %w", port, last)
}

// outBuffers hold what is on its way out of a socket. Most streams are idle most
// of the time, and an idle one has none.
var outBuffers = sync.Pool{New: func() any { b := make([]byte, wire.MaxData); return &b }}

// copyOut sends what the server writes, and its end.
func copyOut(st *wire.Stream, in *net.TCPConn) error {
	rc, err := in.SyscallConn()
	if err != nil {
		return err
	}
	for {
		var buf *[]byte
		var n int
		var rerr error
		err := rc.Read(func(fd uintptr) bool {
			// Taken only once there may be something to read.
			buf = outBuffers.Get().(*[]byte)
			n, rerr = retryEINTR(func() (int, error) { return unix.Read(int(fd), *buf) })
			if rerr == syscall.EAGAIN {
				outBuffers.Put(buf)
				return false
			}
			return true
		})
		if err != nil {
			return err
		}
		if rerr == nil && n > 0 {
			_, rerr = st.Write((*buf)[:n])
			outBuffers.Put(buf)
			if rerr == nil {
				continue
			}
			return rerr
		}
		outBuffers.Put(buf)
		if rerr != nil {
			return rerr
		}
		return st.CloseWrite()
	}
}
