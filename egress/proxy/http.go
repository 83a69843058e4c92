package proxy

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cove-sandbox/cove/egress/policy"
	"github.com/cove-sandbox/cove/egress/recording"
	"github.com/cove-sandbox/cove/sandbox"
)

// headerDenied marks an answer that is ours, to a request that the policy
// denies. Other protocols get a connection that is reset.
const headerDenied = "Cove-Egress"

// serveHTTP speaks plain HTTP/1 with the sandbox.
func (b *Box) serveHTTP(p *passage, c *net.TCPConn, r *bufio.Reader, to netip.AddrPort) {
	b.serve(&httpBox{b: b, client: p, to: to}, c, r, func(c net.Conn) net.Conn { return c })
}

const (
	maxHeader     = 256 << 10 // of a request and of an answer
	headerTimeout = 30 * time.Second
	idleTimeout   = 5 * time.Minute // of a client between two requests
	maxStreams    = 128             // under way on one connection of HTTP/2
)

// serve speaks HTTP with the sandbox, on both sides as itself: a request is read
// to its end by the rules of net/http and written anew, so that the two sides
// cannot disagree about where one ends and whom it is for. Each request is decided
// by its own Host. wrap makes what is spoken on of the connection.
func (b *Box) serve(h *httpBox, c *net.TCPConn, r *bufio.Reader, wrap func(net.Conn) net.Conn) {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(h.tls)
	h.transport = &http.Transport{
		DialContext: h.dial, DisableCompression: true, MaxIdleConnsPerHost: 2, IdleConnTimeout: headerTimeout,
		TLSHandshakeTimeout: dialTimeout, MaxResponseHeaderBytes: maxHeader, Protocols: protocols,
		TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: b.up.Roots},
	}
	defer h.transport.CloseIdleConnections()
	scheme := "http"
	if h.tls {
		scheme = "https"
	}
	proxy := &httputil.ReverseProxy{
		Rewrite: func(pr *httputil.ProxyRequest) {
			pr.Out.URL.Scheme = scheme
			pr.Out.URL.Host = hostPort(requestName(pr.In), h.to.Port())
			pr.Out.URL.RawQuery = pr.In.URL.RawQuery // as it is, semicolons and all
			pr.Out.Host = pr.In.Host
			if _, ok := pr.In.Header["User-Agent"]; !ok {
				pr.Out.Header.Set("User-Agent", "")
			}
		},
		ModifyResponse: func(res *http.Response) error {
			if h.tls {
				res.Header.Del("Alt-Svc") // QUIC would go past us
			}
			return nil
		},
		Transport: chained{b}, FlushInterval: -1, ErrorLog: log.New(io.Discard, "", 0),
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			if a, ok := w.(asSent); ok {
				w = a.ResponseWriter // it is ours
			}
			var miss *recording.MissError
			switch {
			case errors.As(err, &miss):
				writeMiss(w, miss.Miss)
			case sandbox.ClassOf(err) == sandbox.Denied:
				deny(w, http.StatusForbidden, sandbox.Plain(err))
			case errors.Is(err, errPending):
				w.Header().Set(headerDenied, reasonPending)
				w.Header().Set("Retry-After", "1")
				http.Error(w, "cove: "+sandbox.Plain(err), http.StatusServiceUnavailable)
			default:
				w.Header().Set(headerDenied, "failed")
				http.Error(w, "cove: "+sandbox.Plain(err), http.StatusBadGateway)
			}
		},
	}
	done := make(chan struct{})
	var once sync.Once
	conn := wrap(&readConn{TCPConn: c, r: r, closed: func() { once.Do(func() { close(done) }) }})
	srv := &http.Server{
		ReadHeaderTimeout: headerTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeader, ErrorLog: log.New(io.Discard, "", 0),
		Protocols: protocols, HTTP2: &http.HTTP2Config{MaxConcurrentStreams: maxStreams},
		BaseContext: func(net.Listener) context.Context { return context.WithValue(b.ctx, connectionKey{}, h) },
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if why := h.malformed(r); why != "" {
				deny(w, http.StatusForbidden, why)
				return
			}
			// net/http cancels a request when the client sends no more, which is
			// no reason not to answer it. A stream of HTTP/2 is canceled by name.
			ctx, cancel := r.Context(), context.CancelFunc(func() {})
			if r.ProtoMajor == 1 {
				ctx, cancel = context.WithCancel(context.WithoutCancel(ctx))
			}
			defer cancel()
			defer context.AfterFunc(b.ctx, cancel)()
			proxy.ServeHTTP(asSent{w}, r.WithContext(ctx))
		}),
	}
	only := &oneConn{done: done, addr: c.LocalAddr()}
	only.mu.conn = conn
	srv.Serve(only) // returns when the connection is closed
}

// httpBox is a connection of the sandbox that speaks HTTP.
type httpBox struct {
	b         *Box
	client    *passage
	to        netip.AddrPort
	tls       bool // it was ended here, and requests go on with TLS
	transport *http.Transport
}

// chained sends a request through the chain that is in force when it comes.
type chained struct{ b *Box }

func (c chained) RoundTrip(r *http.Request) (*http.Response, error) {
	next, err := c.b.chain()
	if err != nil {
		return nil, err
	}
	res, err := next.RoundTrip(r)
	c.b.noteReplay(r, err)
	return res, err
}

// requestName is the name that a request is for; "" if it is an address.
func requestName(r *http.Request) string {
	host := r.Host
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	return policy.Name(host)
}

func (h *httpBox) flow(name string) policy.Flow {
	return policy.Flow{Name: name, Addr: h.to.Addr(), Port: h.to.Port(), Protocol: sandbox.TCP}
}

// malformed says why a request is none that anybody but a proxy would get.
func (h *httpBox) malformed(r *http.Request) string {
	switch {
	case r.Method == http.MethodConnect || r.Method == "PRI" || r.ProtoMajor != 1 && !h.tls:
		h.b.refuse(h.flow(requestName(r)), policy.Verdict{Rule: -1, Reason: reasonHTTP + r.Method})
		return "only HTTP/1 requests are let through, no tunnels"
	case r.URL.IsAbs():
		h.b.refuse(h.flow(requestName(r)), policy.Verdict{Rule: -1, Reason: reasonHTTP + "absolute"})
		return "a request with a whole URL is for a proxy, and there is none"
	}
	return ""
}

// check says why a request may not be made; nil if it may be tried.
func (h *httpBox) check(r *http.Request) error {
	name := requestName(r)
	f := h.flow(name)
	if h.tls && name == "" {
		h.b.refuse(f, policy.Verdict{Rule: -1, Reason: policy.ReasonNoName})
		return sandbox.Errorf(sandbox.Denied, "egress.http", "a request in intercepted TLS needs the name of a server as its Host")
	}
	pol := h.b.current()
	if byAddress(pol, f, h.b.up.Host) || name != "" && pol.MayResolve(name) {
		return nil // dial decides
	}
	v := pol.Decide(f, h.b.up.Host)
	if v.Allow {
		return nil
	}
	h.b.refuse(f, v)
	if name == "" {
		return sandbox.Errorf(sandbox.Denied, "egress.http", "the network policy of this sandbox does not allow %s", h.to)
	}
	return sandbox.Errorf(sandbox.Denied, "egress.http", "the network policy of this sandbox does not allow %s port %d", name, h.to.Port())
}

// direct says whether the requests for a name go to the address that the sandbox
// chose, and not to what we resolve the name to.
func (h *httpBox) direct(name string) bool {
	pol := h.b.current()
	if !h.tls && h.b.covers(name) {
		// Nothing but the address says who answers, and secrets may be for them.
		return false
	}
	return name == "" || byAddress(pol, h.flow(name), h.b.up.Host) || !pol.NeedsName() && !h.tls
}

// dial makes a connection for the requests of one name.
func (h *httpBox) dial(ctx context.Context, _, address string) (net.Conn, error) {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	b := h.b
	f := h.flow(host)
	var addrs []netip.Addr
	if h.direct(host) {
		addrs = []netip.Addr{h.to.Addr()}
	}
	p := b.enter(h.client, func() {})
	if p == nil { // perhaps for one that is kept for another request to another server
		h.transport.CloseIdleConnections()
		p = b.enter(h.client, func() {})
	}
	if p == nil {
		b.refuse(f, policy.Verdict{Rule: -1, Reason: reasonConnections})
		return nil, errConnections
	}
	up, err := b.dial(p, f, addrs)
	if err != nil {
		b.leave(p)
		return nil, err
	}
	b.mu.Lock()
	p.end = func() { reset(up) }
	ended := p.entry.snapshot().End
	b.mu.Unlock()
	if !ended.IsZero() {
		up.Close()
		b.leave(p)
		return nil, errDenied
	}
	return &countedConn{TCPConn: up, b: b, p: p}, nil
}

// asSent writes an answer with the headers that it came with. Those that it lacks
// net/http would add: one is a guess, the other another's clock.
type asSent struct{ http.ResponseWriter }

func (a asSent) Unwrap() http.ResponseWriter { return a.ResponseWriter }

func (a asSent) WriteHeader(status int) {
	if status >= 200 { // others have neither, and headers follow
		for _, k := range []string{"Content-Type", "Date"} {
			if h := a.Header(); h[k] == nil {
				h[k] = nil
			}
		}
	}
	a.ResponseWriter.WriteHeader(status)
}

func deny(w http.ResponseWriter, status int, why string) {
	w.Header().Set(headerDenied, "denied")
	w.Header().Set("Connection", "close")
	http.Error(w, "cove: "+why, status)
}

// countedConn counts the bytes of a passage, keeps to the limit, and leaves
// when it is closed.
type countedConn struct {
	*net.TCPConn
	b    *Box
	p    *passage
	left atomic.Bool
}

func (c *countedConn) Read(buf []byte) (int, error) {
	n, err := c.TCPConn.Read(buf)
	c.p.entry.received.Add(int64(n))
	return n, c.pay(n, err)
}

func (c *countedConn) Write(buf []byte) (n int, err error) {
	for len(buf) > 0 && err == nil {
		var m int
		m, err = c.TCPConn.Write(buf[:min(len(buf), 32<<10)])
		c.p.entry.sent.Add(int64(m))
		err = c.pay(m, err)
		buf, n = buf[m:], n+m
	}
	return n, err
}

func (c *countedConn) pay(n int, err error) error {
	limit := c.b.rate()
	if limit == nil || err != nil {
		return err
	}
	for n > 0 {
		part := min(n, limit.Burst())
		if err := limit.WaitN(c.b.ctx, part); err != nil {
			return err
		}
		n -= part
	}
	return nil
}

// ReadFrom and WriteTo of the TCPConn would move bytes past the counter.
func (c *countedConn) ReadFrom(r io.Reader) (int64, error) {
	return io.Copy(struct{ io.Writer }{c}, r)
}

func (c *countedConn) WriteTo(w io.Writer) (int64, error) {
	return io.Copy(w, struct{ io.Reader }{c})
}

func (c *countedConn) Close() error {
	err := c.TCPConn.Close()
	if c.left.CompareAndSwap(false, true) {
		c.b.leave(c.p)
	}
	return err
}

// readConn is a connection of which something has been read already.
type readConn struct {
	*net.TCPConn
	r      *bufio.Reader
	closed func()
}

func (c *readConn) Read(p []byte) (int, error) { return c.r.Read(p) }

func (c *readConn) WriteTo(w io.Writer) (int64, error) {
	return io.Copy(w, struct{ io.Reader }{c.r})
}

func (c *readConn) Close() error {
	err := c.TCPConn.Close()
	c.closed()
	return err
}

// oneConn is a listener that gives out one connection and ends with it.
type oneConn struct {
	done chan struct{}
	addr net.Addr

	mu struct {
		sync.Mutex
		conn net.Conn
	}
}

func (l *oneConn) Accept() (net.Conn, error) {
	l.mu.Lock()
	c := l.mu.conn
	l.mu.conn = nil
	l.mu.Unlock()
	if c != nil {
		return c, nil
	}
	<-l.done
	return nil, net.ErrClosed
}

func (l *oneConn) Close() error   { return nil }
func (l *oneConn) Addr() net.Addr { return l.addr }
