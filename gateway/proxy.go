package gateway

import (
	"context"
	"crypto/tls"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

const (
	// dialTimeout bounds the way to a port of a sandbox that is awake.
	dialTimeout = 30 * time.Second
	// idleConns are kept per port between requests, for idleFor. More would only
	// be of use to more requests at once than a small server inside answers.
	idleConns = 64
	idleFor   = 15 * time.Second
	// maxHeader is what a server inside may send as header of one answer.
	maxHeader = 256 << 10
)

// transport writes requests anew and reads answers, over streams into sandboxes.
// There is no limit of connections per port: with one, clients that read slowly
// could hold them all. Requests are limited instead.
func (g *Gateway) transport(h2 bool) *http.Transport {
	var p http.Protocols
	p.SetHTTP1(!h2)
	p.SetUnencryptedHTTP2(h2)
	return &http.Transport{
		DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
			t, ok := ParseTarget(addr)
			if !ok {
				return nil, sandbox.Errorf(sandbox.Internal, "gateway.dial", "no target: %q", addr)
			}
			ctx, cancel := context.WithTimeout(ctx, dialTimeout)
			defer cancel()
			return g.cfg.Backend.Dial(ctx, t.Sandbox, t.Port)
		},
		Protocols:              &p,
		TLSClientConfig:        &tls.Config{InsecureSkipVerify: true}, // of a server inside: what it shows proves nothing, and nobody is between
		DisableCompression:     true,
		MaxIdleConns:           1024,
		MaxIdleConnsPerHost:    idleConns,
		IdleConnTimeout:        idleFor,
		ExpectContinueTimeout:  time.Second,
		MaxResponseHeaderBytes: maxHeader,
	}
}

func (g *Gateway) reverseProxy() *httputil.ReverseProxy {
	return &httputil.ReverseProxy{
		Transport: roundTripper{g},
		Rewrite:   rewrite,
		ModifyResponse: func(res *http.Response) error {
			v, _ := res.Request.Context().Value(visitKey{}).(visit)
			clean(res.Header, v)
			if v.cookie != "" {
				res.Header.Add("Set-Cookie", v.cookie)
			}
			if res.StatusCode == http.StatusSwitchingProtocols {
				if rwc, ok := res.Body.(io.ReadWriteCloser); ok {
					res.Body = upgraded{rwc}
				}
			}
			return nil
		},
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			v, _ := r.Context().Value(visitKey{}).(visit)
			if r.Context().Err() != nil && g.ctx.Err() == nil {
				return // nobody is there to read an answer
			}
			g.cfg.Logger.Debug("gateway", "target", v.Target, "err", err)
			failure(v.Target, err).write(w, r)
		},
		ErrorLog:   slog.NewLogLogger(g.cfg.Logger.Handler(), slog.LevelDebug),
		BufferPool: buffers{},
	}
}

// roundTripper chooses how to speak to the server inside: HTTP/1.1, which all of
// them do, or HTTP/2 to one that is sent gRPC, which exists on nothing else.
type roundTripper struct{ g *Gateway }

func (rt roundTripper) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.ProtoMajor == 2 && strings.HasPrefix(r.Header.Get("Content-Type"), "application/grpc") {
		return rt.g.h2.RoundTrip(r)
	}
	return rt.g.h1.RoundTrip(r)
}

// rewrite makes the request that goes in. What came as X-Forwarded-* and
// Forwarded is the client's word about itself; httputil has dropped three of
// them by now.
func rewrite(p *httputil.ProxyRequest) {
	v, _ := p.In.Context().Value(visitKey{}).(visit)
	h := p.Out.Header
	for name := range h {
		if strings.HasPrefix(name, "X-Forwarded-") || name == "X-Real-Ip" || name == "Forwarded" {
			delete(h, name)
		}
	}
	p.SetXForwarded()
	if v.prefix != "" {
		h.Set("X-Forwarded-Prefix", v.prefix)
	}
	path, err := url.PathUnescape(v.path)
	if err != nil {
		path = v.path // cannot be: net/http has parsed it
	}
	scheme := "http"
	if v.TLS {
		scheme = "https"
	}
	p.Out.URL = &url.URL{Scheme: scheme, Host: v.Target.String(), Path: path, RawPath: v.path, RawQuery: p.In.URL.RawQuery, ForceQuery: p.In.URL.ForceQuery}
	p.Out.Host = v.Host
	// The same map: it is filled when the body has been read, and httputil's copy
	// is from before that.
	p.Out.Trailer = p.In.Trailer
}

// wholeOrigin are headers that act on an origin. In the path form that is the
// API's and every other sandbox's.
var wholeOrigin = []string{"Alt-Svc", "Clear-Site-Data", "Service-Worker-Allowed", "Strict-Transport-Security",
	"Nel", "Report-To", "Reporting-Endpoints", "Public-Key-Pins", "Origin-Agent-Cluster"}

// clean makes the header of an answer fit for where it is shown.
func clean(h http.Header, v visit) {
	for name := range h {
		if strings.HasPrefix(name, "X-Cove-") {
			delete(h, name) // what only we say
		}
	}
	if lines := h.Values("Set-Cookie"); len(lines) > 0 {
		var keep []string
		for _, l := range lines {
			if l, ok := scopeCookie(l, v.prefix); ok {
				keep = append(keep, l)
			}
		}
		setAll(h, "Set-Cookie", keep)
	}
	if v.prefix == "" {
		return
	}
	for _, name := range wholeOrigin {
		h.Del(name)
	}
	h.Add("Content-Security-Policy", sandboxed)
	if loc := h.Get("Location"); loc != "" {
		h.Set("Location", outside(loc, v))
	}
}

// scopeCookie keeps a cookie where it belongs: on its own host, and in the path
// form below its own path. ok is false for one that takes our name.
func scopeCookie(line, prefix string) (_ string, ok bool) {
	parts := strings.Split(line, ";")
	// A cookie without a name is sent as its value alone, which may read as ours.
	name, _, _ := strings.Cut(strings.TrimLeft(parts[0], "= \t"), "=")
	if isOurCookie(strings.TrimSpace(name)) {
		return "", false
	}
	out := parts[:1:1]
	path := ""
	for _, p := range parts[1:] {
		attr, value, _ := strings.Cut(strings.TrimSpace(p), "=")
		switch strings.ToLower(strings.TrimSpace(attr)) {
		case "domain":
		case "path":
			if path = strings.TrimSpace(value); prefix == "" {
				out = append(out, p)
			}
		default:
			out = append(out, p)
		}
	}
	if prefix != "" {
		if !strings.HasPrefix(path, "/") {
			path = "/"
		}
		if !within(path, prefix) {
			path = prefix + path
		}
		out = append(out, " Path="+path)
	}
	return strings.Join(out, ";"), true
}

// outside is a Location of the server inside as its client must see it.
func outside(loc string, v visit) string {
	u, err := url.Parse(loc)
	if err != nil || u.Opaque != "" || u.Host != "" && !strings.EqualFold(u.Host, v.host) || u.Host == "" && !strings.HasPrefix(u.Path, "/") {
		return loc
	}
	if within(u.Path, v.prefix) {
		return loc
	}
	u.Path = v.prefix + u.Path
	if u.RawPath != "" {
		u.RawPath = v.prefix + u.RawPath
	}
	return u.String()
}

func within(path, prefix string) bool { return path == prefix || strings.HasPrefix(path, prefix+"/") }

// buffers for bodies, shared by all requests.
type buffers struct{}

var bufferPool = sync.Pool{New: func() any { b := make([]byte, 32<<10); return &b }}

func (buffers) Get() []byte  { return *bufferPool.Get().(*[]byte) }
func (buffers) Put(b []byte) { bufferPool.Put(&b) }

// upgraded is a connection that has left HTTP. io.Copy would give each direction
// 32 KiB for its life; most WebSockets are idle for most of theirs, so these
// begin small and grow with what they carry: 2,000 idle ones hold 4 MiB and not
// 128.
type upgraded struct{ io.ReadWriteCloser }

func (u upgraded) CloseWrite() error {
	if cw, ok := u.ReadWriteCloser.(interface{ CloseWrite() error }); ok {
		return cw.CloseWrite()
	}
	return u.Close()
}

func (u upgraded) WriteTo(w io.Writer) (int64, error)  { return copyGrowing(w, u.ReadWriteCloser) }
func (u upgraded) ReadFrom(r io.Reader) (int64, error) { return copyGrowing(u.ReadWriteCloser, r) }

const firstBuffer, lastBuffer = 1 << 10, 64 << 10

func copyGrowing(w io.Writer, r io.Reader) (total int64, err error) {
	buf := make([]byte, firstBuffer)
	for {
		n, rerr := r.Read(buf)
		if n > 0 {
			m, werr := w.Write(buf[:n])
			total += int64(m)
			if werr != nil {
				return total, werr
			}
		}
		if rerr == io.EOF {
			return total, nil
		}
		if rerr != nil {
			return total, rerr
		}
		if n == len(buf) && n < lastBuffer {
			buf = make([]byte, 4*n)
		}
	}
}
