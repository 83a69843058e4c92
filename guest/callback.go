package guest

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/guest/wire"
	"github.com/cove-sandbox/cove/sandbox"
)

// maxPiece bytes of a callback are written with one request. Within the window,
// so that no credit is needed.
const maxPiece = 128 << 10

// Listener takes the connections that code inside makes to the host's callback
// address. They stand still with the sandbox and go on with it, also in another
// kernel: nothing of them is tied to a connection to the guest.
type Listener struct {
	client *Client
	token  string
	port   int
	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	fresh  []int64 // accepted by the guest, not by us; of the one who calls Accept
	last   int64
}

// Listen opens the callback address inside on a port. There is one at a time:
// another ends the one before and its connections. sandbox.ErrPortTaken if a
// program inside has the port. The context is of the listen only.
func (c *Client) Listen(ctx context.Context, port int) (*Listener, error) {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	l := &Listener{client: c, token: hex.EncodeToString(b[:]), port: port}
	if _, err := c.call(ctx, wire.Req{Op: wire.OpListen, Token: l.token, Port: port}, nil); err != nil {
		return nil, err
	}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	return l, nil
}

// Accept waits for the next connection. For one goroutine.
func (l *Listener) Accept() (net.Conn, error) {
	for len(l.fresh) == 0 {
		res, err := l.client.call(l.ctx, wire.Req{Op: wire.OpAccept, Token: l.token, Call: l.last}, nil)
		if l.ctx.Err() != nil {
			return nil, net.ErrClosed
		}
		if err != nil {
			return nil, err
		}
		l.fresh = res.Calls
	}
	l.last, l.fresh = l.fresh[0], l.fresh[1:]
	return newCall(l.client, l.ctx, l.last, l.port), nil
}

// unlisten is how long the guest may take to hear that the listener is closed;
// it finds out by itself if it does not.
const unlisten = 2 * time.Second

// Close ends the listener and its connections. It is idempotent.
func (l *Listener) Close() error {
	if l.ctx.Err() != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), unlisten)
	defer cancel()
	_, err := l.client.call(ctx, wire.Req{Op: wire.OpUnlisten, Token: l.token}, nil)
	l.cancel()
	return err
}

// Addr is the one inside.
func (l *Listener) Addr() net.Addr { return callbackAddr(l.port) }

func callbackAddr(port int) net.Addr {
	return &net.TCPAddr{IP: net.ParseIP(wire.CallbackAddr), Port: port}
}

// call is one connection from inside. What was sent is fetched ahead by one
// piece, so that a reader that gives up waiting, as net/http's does after every
// request, costs nothing.
type call struct {
	client *Client
	id     int64
	port   int
	ctx    context.Context // ends with Close
	cancel context.CancelFunc

	writing struct { // one write at a time
		sync.Mutex
		wrote int64
	}

	mu struct {
		sync.Mutex
		changed sync.Cond // on mu
		in      []byte    // fetched, not read
		err     error     // after in: io.EOF, or why nothing more comes
		closed  bool
		until   time.Time // read deadline
		timer   *time.Timer
		writeBy time.Time // write deadline
	}
}

func newCall(c *Client, ctx context.Context, id int64, port int) *call {
	k := &call{client: c, id: id, port: port}
	k.ctx, k.cancel = context.WithCancel(ctx)
	k.mu.changed.L = &k.mu
	go k.fetch()
	return k
}

// fetch gets piece after piece, each when the one before was read.
func (k *call) fetch() {
	var offset int64
	for {
		k.mu.Lock()
		for len(k.mu.in) > 0 && !k.mu.closed {
			k.mu.changed.Wait()
		}
		over := k.mu.closed
		k.mu.Unlock()
		if over {
			return
		}
		p, eof, err := k.client.callRead(k.ctx, k.id, offset)
		offset += int64(len(p))
		if eof && err == nil {
			err = io.EOF
		}
		k.mu.Lock()
		k.mu.in = p
		if err != nil {
			k.mu.err = err
		}
		k.mu.changed.Broadcast()
		k.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// callRead is safe to cut and send again: the offset says what has arrived.
func (c *Client) callRead(ctx context.Context, id, offset int64) (p []byte, eof bool, err error) {
	err = c.run(ctx, wire.Req{Op: wire.OpCallRead, Call: id, Offset: offset}, nil, nil, func(k wire.Kind, b []byte) (bool, error) {
		switch k {
		case wire.Data:
			p = b // not append: before a cut the same may have come
			return false, nil
		case wire.Reply:
			var res wire.Res
			err := json.Unmarshal(b, &res)
			eof = res.EOF
			return true, err
		}
		return false, unexpected(wire.OpCallRead, k)
	})
	return p, eof, err
}

// Read waits for bytes; io.EOF once the caller has ended its direction.
func (k *call) Read(p []byte) (int, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for {
		switch {
		case k.mu.closed:
			return 0, net.ErrClosed
		case len(k.mu.in) > 0:
			n := copy(p, k.mu.in)
			if k.mu.in = k.mu.in[n:]; len(k.mu.in) == 0 {
				k.mu.in = nil
				k.mu.changed.Broadcast()
			}
			return n, nil
		case k.mu.err != nil:
			return 0, k.mu.err
		case !k.mu.until.IsZero() && !time.Now().Before(k.mu.until):
			return 0, os.ErrDeadlineExceeded
		}
		k.mu.changed.Wait()
	}
}

// Write returns when the caller's socket has taken all of p.
func (k *call) Write(p []byte) (total int, err error) {
	k.writing.Lock()
	defer k.writing.Unlock()
	k.mu.Lock()
	by := k.mu.writeBy
	k.mu.Unlock()
	ctx := k.ctx
	if !by.IsZero() {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, by)
		defer cancel()
	}
	for len(p) > 0 {
		n := min(len(p), maxPiece)
		if _, err := k.client.call(ctx, wire.Req{Op: wire.OpCallWrite, Call: k.id, Offset: k.writing.wrote}, p[:n]); err != nil {
			if errors.Is(err, sandbox.ErrDeadline) {
				err = os.ErrDeadlineExceeded
			}
			return total, err
		}
		k.writing.wrote += int64(n)
		total += n
		p = p[n:]
	}
	return total, nil
}

// CloseWrite ends our direction.
func (k *call) CloseWrite() error {
	k.writing.Lock()
	defer k.writing.Unlock()
	_, err := k.client.call(k.ctx, wire.Req{Op: wire.OpCallClose, Call: k.id, Flag: true}, nil)
	return err
}

// Close ends the connection. The guest hears of it in its time: a sandbox that
// sleeps when it wakes.
func (k *call) Close() error {
	k.mu.Lock()
	if k.mu.closed {
		k.mu.Unlock()
		return nil
	}
	k.mu.closed, k.mu.in = true, nil
	if k.mu.timer != nil {
		k.mu.timer.Stop()
	}
	k.mu.changed.Broadcast()
	k.mu.Unlock()
	go func() {
		defer k.cancel()
		// A guest that does not know it any more has what we want.
		_, _ = k.client.call(k.ctx, wire.Req{Op: wire.OpCallClose, Call: k.id}, nil)
	}()
	return nil
}

func (k *call) LocalAddr() net.Addr  { return callbackAddr(k.port) }
func (k *call) RemoteAddr() net.Addr { return callbackAddr(0) }

// SetDeadline, SetReadDeadline and SetWriteDeadline are as net.Conn has them,
// but that of writes is for those to come.
func (k *call) SetDeadline(t time.Time) error {
	_ = k.SetWriteDeadline(t)
	return k.SetReadDeadline(t)
}

func (k *call) SetReadDeadline(t time.Time) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.mu.closed {
		return net.ErrClosed
	}
	if k.mu.timer != nil {
		k.mu.timer.Stop()
		k.mu.timer = nil
	}
	k.mu.until = t
	if wait := time.Until(t); !t.IsZero() && wait > 0 {
		k.mu.timer = time.AfterFunc(wait, func() {
			k.mu.Lock()
			defer k.mu.Unlock()
			k.mu.changed.Broadcast()
		})
	}
	k.mu.changed.Broadcast()
	return nil
}

func (k *call) SetWriteDeadline(t time.Time) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.mu.writeBy = t
	return nil
}

var (
	_ net.Listener = (*Listener)(nil)
	_ net.Conn     = (*call)(nil)
)
