package remote

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"iter"
	"net"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/pki"
	"github.com/cove-sandbox/cove/sandbox"
)

const (
	dialTimeout = 10 * time.Second
	// pingAfter and pingTimeout find a peer that is gone without having said so.
	pingAfter   = 15 * time.Second
	pingTimeout = 15 * time.Second
	// maxStreams calls are under way on a connection; a client opens another
	// beyond that.
	maxStreams = 1024
	// callWindow is what a stream may have on its way to a reader that rests: all
	// streams of a connection together stay below the connection's own window, so
	// that none holds up another.
	callWindow = 256 << 10
	// byteWindow is that of a connection with one stream of bytes.
	byteWindow = 4<<20 - 1
	// idleLanes are kept for the next stream of bytes; a handshake takes 2 ms.
	idleLanes = 8
)

// Config is which node to call.
type Config struct {
	Name    string // the node's; another one at the address is refused
	Address string // HOST:PORT
	// TLS is of pki.InstallationCA.MutualTLS with this server's certificate, wanting a
	// node.
	TLS *tls.Config
}

// Client is a node in another process. Safe for concurrent use.
type Client struct {
	cfg   Config
	calls *http.Transport

	// lanes are connections with one stream of bytes each. A reader that rests, on
	// the node or here, would else use up the window that the calls of its
	// connection share.
	lanes struct {
		sync.Mutex
		idle   []*http.Transport
		closed bool
	}
}

// Dial makes a node of one that is elsewhere. It connects with the first call, and
// again with the next after a connection was lost.
func Dial(cfg Config) *Client {
	t := cfg.TLS.Clone()
	t.NextProtos = []string{"h2"}
	t.ClientSessionCache = tls.NewLRUClientSessionCache(4)
	cfg.TLS = t
	c := &Client{cfg: cfg}
	c.calls = c.transport(callWindow)
	return c
}

// Close lets go of the connections that no call uses.
func (c *Client) Close() error {
	c.lanes.Lock()
	defer c.lanes.Unlock()
	c.lanes.closed = true
	for _, l := range c.lanes.idle {
		l.CloseIdleConnections()
	}
	c.lanes.idle = nil
	c.calls.CloseIdleConnections()
	return nil
}

func (c *Client) transport(window int) *http.Transport {
	var h2 http.Protocols
	h2.SetHTTP2(true)
	return &http.Transport{DialTLSContext: c.dial, Protocols: &h2, ForceAttemptHTTP2: true, DisableCompression: true, IdleConnTimeout: 2 * time.Minute,
		HTTP2: &http.HTTP2Config{SendPingTimeout: pingAfter, PingTimeout: pingTimeout, MaxReceiveBufferPerStream: window}}
}

// dial makes a connection to the node of that name and no other.
func (c *Client) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	var d net.Dialer
	raw, err := d.DialContext(ctx, "tcp", c.cfg.Address)
	if err != nil {
		return nil, err
	}
	tc := tls.Client(raw, c.cfg.TLS)
	if err = tc.HandshakeContext(ctx); err == nil {
		var kind pki.Kind
		var name string
		if kind, name, err = pki.PeerOf(tc.ConnectionState()); err == nil && (kind != pki.Node || name != c.cfg.Name) {
			err = &sandbox.Error{Class: sandbox.Denied, Op: "node.remote", Msg: "at " + c.cfg.Address + " is " + string(kind) + " " + name + ", not node " + c.cfg.Name}
		}
	}
	if err != nil {
		raw.Close()
		return nil, err
	}
	return tc, nil
}

func (c *Client) lane() *http.Transport {
	c.lanes.Lock()
	defer c.lanes.Unlock()
	if n := len(c.lanes.idle); n > 0 {
		l := c.lanes.idle[n-1]
		c.lanes.idle = c.lanes.idle[:n-1]
		return l
	}
	return c.transport(byteWindow)
}

// giveBack is for a lane whose stream is over.
func (c *Client) giveBack(l *http.Transport) {
	c.lanes.Lock()
	defer c.lanes.Unlock()
	if c.lanes.closed || len(c.lanes.idle) >= idleLanes {
		l.CloseIdleConnections()
		return
	}
	c.lanes.idle = append(c.lanes.idle, l)
}

// begin sends a request and returns its answer, which over ends.
func (c *Client) begin(ctx context.Context, by *http.Transport, method string, body io.Reader) (in *frameReader, over func(), err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://node"+prefix+method, body)
	if err != nil {
		return nil, nil, c.failed(ctx, method, err)
	}
	if by, ok := ctx.Deadline(); ok {
		req.Header.Set(timeoutHeader, strconv.FormatInt(max(time.Until(by).Milliseconds(), 0), 10))
	}
	resp, err := by.RoundTrip(req)
	if err != nil {
		return nil, nil, c.failed(ctx, method, err)
	}
	if resp.StatusCode != http.StatusOK {
		resp.Body.Close()
		return nil, nil, sandbox.Errorf(sandbox.Unsupported, "node."+method, "node %s answers with %s", c.cfg.Name, resp.Status)
	}
	return newFrameReader(resp.Body), func() { resp.Body.Close() }, nil
}

// failed is why a call did not come to its end. What the caller did to it comes
// first.
func (c *Client) failed(ctx context.Context, method string, err error) error {
	op := "node." + method
	if ctx.Err() != nil {
		class := sandbox.Canceled
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			class = sandbox.DeadlineReached
		}
		return sandbox.Errorf(class, op, "%w", context.Cause(ctx))
	}
	var e *sandbox.Error
	if errors.As(err, &e) {
		if e == errBroken || e.Op == errBroken.Op && e.Class == sandbox.Unavailable {
			return sandbox.Errorf(sandbox.Unavailable, op, "the connection to node %s broke off: %w", c.cfg.Name, err)
		}
		return e
	}
	var refused tls.AlertError
	if errors.As(err, &refused) {
		return sandbox.Errorf(sandbox.Unauthenticated, op, "node %s refuses this server's certificate: %w", c.cfg.Name, err)
	}
	return sandbox.Errorf(sandbox.Unavailable, op, "node %s cannot be reached: %w", c.cfg.Name, err)
}

// arguments are the first frames of a request.
func arguments(args []any) ([]byte, error) {
	var b bytes.Buffer
	f := newFrameWriter(&b, func() error { return nil })
	err := f.value(args...)
	if err == nil {
		err = f.send()
	}
	if err != nil {
		return nil, sandbox.Errorf(sandbox.Internal, "node.remote", "%w", err)
	}
	return b.Bytes(), nil
}

// call is a method of values.
func (c *Client) call(ctx context.Context, method string, args []any, results ...any) error {
	head, err := arguments(args)
	if err != nil {
		return err
	}
	in, over, err := c.begin(ctx, c.calls, method, bytes.NewReader(head))
	if err != nil {
		return err
	}
	defer over()
	if err := in.value(results...); err != nil {
		return c.failed(ctx, method, err)
	}
	return nil
}

// stream is a method that gives an iterator.
func stream[T any](c *Client, ctx context.Context, method string, args ...any) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel() // whoever stops ranging ends it on the node
		var none T
		head, err := arguments(args)
		if err != nil {
			yield(none, err)
			return
		}
		in, over, err := c.begin(ctx, c.calls, method, bytes.NewReader(head))
		if err != nil {
			yield(none, err)
			return
		}
		defer over()
		for {
			var v T
			err := in.value(&v)
			if err == io.EOF {
				return
			}
			if err != nil {
				yield(none, c.failed(ctx, method, err))
				return
			}
			if !yield(v, nil) {
				return
			}
		}
	}
}

// upload is a method that takes a reader.
func (c *Client) upload(ctx context.Context, method string, args []any, r io.Reader, results ...any) error {
	head, err := arguments(args)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	lane := c.lane()
	defer c.giveBack(lane)
	pr, pw := io.Pipe()
	defer pr.Close()
	var failed atomic.Pointer[error] // of r
	go func() {
		out := newFrameWriter(pw, func() error { return nil })
		_, err := pw.Write(head)
		if err == nil {
			from := &source{r: r}
			_, err = io.CopyBuffer(struct{ io.Writer }{out}, from, make([]byte, piece))
			if from.err != nil {
				failed.Store(&from.err)
				err = out.over(from.err)
			} else if err == nil {
				err = out.over(nil)
			}
		}
		pw.CloseWithError(err)
	}()
	in, over, err := c.begin(ctx, lane, method, pr)
	if err == nil {
		defer over()
		if err = in.value(results...); err != nil {
			err = c.failed(ctx, method, err)
		}
	}
	if e := failed.Load(); e != nil && err != nil {
		return *e
	}
	return err
}

// source remembers that reading failed.
type source struct {
	r   io.Reader
	err error
}

func (s *source) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	if err != nil && err != io.EOF {
		s.err = err
	}
	return n, err
}

// download is a method that takes a writer: bytes come, then the results.
func (c *Client) download(ctx context.Context, method string, args []any, w io.Writer, results ...any) error {
	head, err := arguments(args)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	lane := c.lane()
	defer c.giveBack(lane)
	in, over, err := c.begin(ctx, lane, method, bytes.NewReader(head))
	if err != nil {
		return err
	}
	defer over()
	for {
		k, n, err := in.next()
		switch {
		case err != nil:
			return c.failed(ctx, method, err)
		case k == data:
			if _, err := io.CopyN(w, in.r, int64(n)); err != nil {
				return err
			}
		default:
			p, err := in.whole(n)
			if err == nil {
				err = in.fill(p, results)
			}
			if err != nil {
				return c.failed(ctx, method, err)
			}
			return nil
		}
	}
}

// content is a method that gives a reader after its results.
func (c *Client) content(ctx context.Context, method string, args []any, results ...any) (io.ReadCloser, error) {
	head, err := arguments(args)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	lane := c.lane()
	done := func() { cancel(); c.giveBack(lane) }
	in, over, err := c.begin(ctx, lane, method, bytes.NewReader(head))
	if err == nil {
		if err = in.value(results...); err == nil {
			return &content{in, sync.OnceFunc(func() { over(); done() })}, nil
		}
		over()
		err = c.failed(ctx, method, err)
	}
	done()
	return nil, err
}

type content struct {
	*frameReader
	over func()
}

func (c *content) Close() error { c.over(); return nil }

// connect is a method that gives a connection. ctx is of the connecting only.
func (c *Client) connect(ctx context.Context, method string, args ...any) (node.Conn, error) {
	head, err := arguments(args)
	if err != nil {
		return nil, err
	}
	own, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() { cancel(context.Cause(ctx)) })
	lane := c.lane()
	cn := &conn{in: &pipe{}, out: &pipe{}, cancel: cancel, head: head}
	in, over, err := c.begin(own, lane, method, body{cn})
	if err == nil {
		if err = in.value(); err != nil {
			over()
		}
	}
	if !stop() && err == nil {
		over()
		err = ctx.Err()
	}
	if err != nil {
		err = c.failed(ctx, method, err)
		cancel(err)
		c.giveBack(lane)
		return nil, err
	}
	go func() {
		cn.receive(in)
		over()
		cancel(nil)
		c.giveBack(lane)
	}()
	return cn, nil
}
