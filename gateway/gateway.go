package gateway

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"strings"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/internal/strangers"
	"github.com/cove-sandbox/cove/sandbox"
)

// Backend is what the gateway needs of the server. Its errors are
// *sandbox.Error.
type Backend interface {
	// Public says whether a port needs no token; false where there is no such
	// sandbox.
	Public(ctx context.Context, id string, port int) (bool, error)
	// AllowKey is nil if an API key may reach into a sandbox. sandbox.ErrNotFound
	// where the key may not even know of it.
	AllowKey(ctx context.Context, secret, id string) error
	// KeyLives is nil if the API key with that id could still make a token;
	// sandbox.ErrUnauthenticated where it was revoked, has expired or went with
	// its tenant. It is asked for every request with a token.
	KeyLives(ctx context.Context, key string) error
	// Hold keeps a sandbox active until release, and wakes it; without wake it is
	// sandbox.ErrAsleep instead.
	Hold(ctx context.Context, id string, wake bool) (release func(), err error)
	// Dial opens a stream to a port inside; sandbox.ErrPortClosed.
	Dial(ctx context.Context, id string, port int) (net.Conn, error)
}

// Config of a gateway. Backend and Tokens are required.
type Config struct {
	Backend Backend
	Tokens  *Tokens
	Domain  Domain
	Logger  *slog.Logger

	MaxRequests int // under way in one sandbox, WebSockets included; 4096
}

// Gateway is safe for concurrent use.
type Gateway struct {
	cfg   Config
	proxy *httputil.ReverseProxy
	h1    *http.Transport
	h2    *http.Transport

	ctx    context.Context // of everything under way
	cancel context.CancelFunc

	mu    sync.Mutex
	busy  map[string]int // requests under way, by sandbox
	total sync.WaitGroup // added to under mu, never once ctx has ended
}

// New makes a gateway.
func New(cfg Config) *Gateway {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.MaxRequests == 0 {
		cfg.MaxRequests = 4096
	}
	g := &Gateway{cfg: cfg, busy: map[string]int{}}
	g.ctx, g.cancel = context.WithCancel(context.Background())
	g.h1, g.h2 = g.transport(false), g.transport(true)
	g.proxy = g.reverseProxy()
	return g
}

// Close ends what is under way, WebSockets included, and waits for it.
func (g *Gateway) Close() {
	g.mu.Lock()
	g.cancel()
	g.mu.Unlock()
	g.total.Wait()
	g.h1.CloseIdleConnections()
	g.h2.CloseIdleConnections()
}

// Wrap gives the requests for ports to the gateway and all others to next.
func (g *Gateway) Wrap(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if t, ours, ok := g.cfg.Domain.match(r.Host); ours {
			if !ok {
				pageNoAddress.write(w, r)
				return
			}
			g.serve(w, r, visit{Target: t, path: r.URL.EscapedPath()})
			return
		}
		if p := r.URL.EscapedPath(); strings.HasPrefix(p, pathRoot) {
			t, rest, ok := cutPath(p)
			if !ok {
				pageNoAddress.write(w, r)
				return
			}
			g.serve(w, r, visit{Target: t, path: rest, prefix: prefix(t)})
			return
		}
		next.ServeHTTP(w, r)
	})
}

// visit is one request on its way in.
type visit struct {
	Target
	path   string // inside, escaped
	prefix string // what is in front of it outside; "" in the host form
	host   string // as the client named it
	secure bool   // the client speaks TLS, with us or with a proxy in front
	cookie string // to set with the answer; "" = none
}

type visitKey struct{}

func (g *Gateway) serve(w http.ResponseWriter, r *http.Request, v visit) {
	// net/http takes the host of an absolute URL over the Host header, as it
	// must; a proxy in front of us may have looked at the other.
	if r.URL.Host != "" || r.URL.Scheme != "" || r.Method == http.MethodConnect || r.URL.Opaque != "" {
		pageBadRequest.write(w, r)
		return
	}
	wake := !strings.EqualFold(r.Header.Get(wakeHeader), "no")
	v.secure = r.TLS != nil || g.cfg.Domain.Scheme == "https" && v.prefix == ""
	cred := takeCredentials(r, cookieName(v))
	foreign := len(cred.cookie) > 0 && !ownPage(r, v)
	if foreign {
		cred.cookie = nil
	}
	until, denied := g.admit(r.Context(), cred, v.Target)
	if denied != nil && foreign {
		denied = &pageForeign
	}
	if denied != nil {
		denied.write(w, r)
		return
	}
	strangers.Known(r.Context())
	if !until.IsZero() {
		v.cookie = (&http.Cookie{Name: cookieName(v), Value: cred.query, Path: v.prefix + "/", Expires: until,
			HttpOnly: true, Secure: v.secure, SameSite: http.SameSiteLaxMode}).String()
		// A person's browser gets an address that can be shown and shared; a
		// program has what it asked for without a second request.
		if (r.Method == http.MethodGet || r.Method == http.MethodHead) && wantsHTML(r) && r.Header.Get("Upgrade") == "" {
			redirect(w, v, r.URL.RawQuery, http.StatusFound)
			return
		}
	}
	if v.path == "" {
		if v.prefix != "" {
			// Relative links inside would otherwise begin one level too high. 307:
			// the method stays.
			redirect(w, v, r.URL.RawQuery, http.StatusTemporaryRedirect)
			return
		}
		v.path = "/" // OPTIONS * and the like
	}
	if !g.enter(v.Sandbox) {
		pageBusy.write(w, r)
		return
	}
	defer g.leave(v.Sandbox)

	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	defer context.AfterFunc(g.ctx, cancel)()
	release, err := g.cfg.Backend.Hold(ctx, v.Sandbox, wake)
	if err != nil {
		failure(v.Target, err).write(w, r)
		return
	}
	defer release()
	v.host = r.Host
	g.proxy.ServeHTTP(informing{w, v}, r.WithContext(context.WithValue(ctx, visitKey{}, v)))
}

// admit says whether a request may go in. until is set where a token in the
// query opened it: the life of the cookie to set.
func (g *Gateway) admit(ctx context.Context, c credentials, t Target) (until time.Time, denied *page) {
	expired, orphaned := false, false
	var failed error
	try := func(s string) (time.Time, bool) {
		tok, state := g.cfg.Tokens.check(s, t)
		expired = expired || state == tokenExpired
		if state != tokenGood {
			return tok.until, false
		}
		err := g.cfg.Backend.KeyLives(ctx, tok.key)
		switch {
		case errors.Is(err, sandbox.ErrUnauthenticated):
			orphaned = true
		case err != nil:
			failed = err
		}
		return tok.until, err == nil
	}
	if at, ok := try(c.query); ok {
		return at, nil
	}
	for _, tok := range append([]string{c.header, c.bearer}, c.cookie...) {
		if _, ok := try(tok); ok {
			return until, nil
		}
	}
	for _, key := range []string{c.header, c.bearer} {
		if strings.HasPrefix(key, apiKeyPrefix) {
			err := g.cfg.Backend.AllowKey(ctx, key, t.Sandbox)
			if err == nil {
				return until, nil
			}
			if p := failure(t, err); p.Status != http.StatusUnauthorized {
				return until, &p
			}
		}
	}
	public, err := g.cfg.Backend.Public(ctx, t.Sandbox, t.Port)
	if err != nil {
		p := failure(t, err)
		return until, &p
	}
	switch {
	case public:
		return until, nil
	case failed != nil:
		p := failure(t, failed)
		return until, &p
	case orphaned:
		return until, &pageOrphaned
	case expired:
		return until, &pageExpired
	case c.none():
		return until, &pagePrivate
	}
	return until, &pageWrongToken
}

// redirect sends the client to the visit's address without the token.
func redirect(w http.ResponseWriter, v visit, query string, status int) {
	// Two slashes in front would name another host.
	to := v.prefix + "/" + strings.TrimLeft(v.path, `/\`)
	if query != "" {
		to += "?" + query
	}
	h := w.Header()
	h.Set("Location", to)
	h.Set("Cache-Control", "no-store")
	h.Set("Referrer-Policy", "no-referrer")
	if v.cookie != "" {
		h.Add("Set-Cookie", v.cookie)
	}
	w.WriteHeader(status)
}

func (g *Gateway) enter(id string) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.ctx.Err() != nil || g.busy[id] >= g.cfg.MaxRequests {
		return false
	}
	g.busy[id]++
	g.total.Add(1)
	return true
}

func (g *Gateway) leave(id string) {
	g.mu.Lock()
	if g.busy[id]--; g.busy[id] == 0 {
		delete(g.busy, id)
	}
	g.mu.Unlock()
	g.total.Done()
}
