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
	// Door is how a port is shown; the zero value where there is no such sandbox.
	Door(ctx context.Context, id string, port int) (sandbox.Door, error)
	// AllowKey is the id of an API key that may reach into a sandbox.
	// sandbox.ErrNotFound where the key may not even know of it.
	AllowKey(ctx context.Context, secret, id string) (key string, err error)
	// KeyLives is nil if the API key with that id could still make a token;
	// sandbox.ErrUnauthenticated where it was revoked, has expired or went with
	// its tenant. It is asked for every request with a token, and again and
	// again while one goes on.
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

	MaxRequests int           // under way in one sandbox, WebSockets included; 4096
	KeyLook     time.Duration // how often the key of what is under way is looked at; 2 s
}

// Gateway is safe for concurrent use.
type Gateway struct {
	cfg   Config
	proxy *httputil.ReverseProxy
	h1    *http.Transport
	h2    *http.Transport

	ctx    context.Context // of everything under way
	cancel context.CancelFunc
	total  sync.WaitGroup // added to under mu, never once ctx has ended

	mu struct {
		sync.Mutex
		busy map[string]int // requests under way, by sandbox
	}
}

// New makes a gateway.
func New(cfg Config) *Gateway {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.MaxRequests == 0 {
		cfg.MaxRequests = 4096
	}
	if cfg.KeyLook == 0 {
		cfg.KeyLook = 2 * time.Second
	}
	g := &Gateway{cfg: cfg}
	g.mu.busy = map[string]int{}
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
			g.Serve(w, r, t, false)
			return
		}
		if p := r.URL.EscapedPath(); strings.HasPrefix(p, pathRoot) {
			t, rest, ok := cutPath(p)
			if !ok {
				pageNoAddress.write(w, r)
				return
			}
			g.serve(w, r, visit{Target: t, path: rest, prefix: prefix(t)}, false)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// Serve shows a port at an address of its own. Whoever admits a request has looked
// at what it holds, and has taken that off it.
func (g *Gateway) Serve(w http.ResponseWriter, r *http.Request, t Target, admitted bool) {
	g.serve(w, r, visit{Target: t, path: r.URL.EscapedPath()}, admitted)
}

// visit is one request on its way in.
type visit struct {
	Target
	sandbox.Door
	path   string // inside, escaped
	prefix string // what is in front of it outside; "" in the host form
	host   string // as the client named it
	secure bool   // the client speaks TLS, with us or with a proxy in front
	cookie string // to set with the answer; "" = none
}

type visitKey struct{}

func (g *Gateway) serve(w http.ResponseWriter, r *http.Request, v visit, admitted bool) {
	// net/http takes the host of an absolute URL over the Host header, as it
	// must; a proxy in front of us may have looked at the other.
	if r.URL.Host != "" || r.URL.Scheme != "" || r.Method == http.MethodConnect || r.URL.Opaque != "" {
		pageBadRequest.write(w, r)
		return
	}
	door, err := g.cfg.Backend.Door(r.Context(), v.Sandbox, v.Port)
	if err != nil {
		failure(v.Target, err).write(w, r)
		return
	}
	v.Door = door
	wake := !v.NoWake && !strings.EqualFold(r.Header.Get(wakeHeader), "no")
	v.secure = r.TLS != nil || g.cfg.Domain.Scheme == "https" && v.prefix == ""
	cred := takeCredentials(r, cookieName(v))
	foreign := len(cred.cookie) > 0 && !ownPage(r, v)
	if foreign {
		cred.cookie = nil
	}
	var until time.Time
	var key string
	if !admitted {
		var denied *page
		key, until, denied = g.admit(r.Context(), cred, v)
		if denied != nil && foreign {
			denied = &pageForeign
		}
		if denied != nil {
			denied.write(w, r)
			return
		}
	}
	strangers.LetIn(r.Context()) // a public port, or a token of one, opens nothing else: see enter for what bounds it
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
	if key != "" {
		defer g.endWithKey(ctx, key, cancel)()
	}
	release, err := g.cfg.Backend.Hold(ctx, v.Sandbox, wake)
	if err != nil {
		failure(v.Target, err).write(w, r)
		return
	}
	defer release()
	v.host = r.Host
	if v.Host == "" {
		v.Host = r.Host
	}
	g.proxy.ServeHTTP(informing{w, v}, r.WithContext(context.WithValue(ctx, visitKey{}, v)))
}

// endWithKey ends a request when the API key that opened it is revoked or expires: a
// WebSocket or a stream may go on for days. Nearly all requests are over before the
// first look, and cost a timer.
func (g *Gateway) endWithKey(ctx context.Context, key string, end context.CancelFunc) (stop func() bool) {
	return time.AfterFunc(g.cfg.KeyLook, func() {
		again := time.NewTicker(g.cfg.KeyLook)
		defer again.Stop()
		for {
			if err := g.cfg.Backend.KeyLives(ctx, key); errors.Is(err, sandbox.ErrUnauthenticated) {
				end()
				return
			}
			select {
			case <-ctx.Done():
				return
			case <-again.C:
			}
		}
	}).Stop
}

// admit says whether a request may go in, and the id of the API key that opened it, ""
// where the port is open to all. until is set where a token in the query opened it: the
// life of the cookie to set.
func (g *Gateway) admit(ctx context.Context, c credentials, v visit) (key string, until time.Time, denied *page) {
	t := v.Target
	expired, orphaned := false, false
	var failed error
	try := func(s string) (token, bool) {
		tok, state := g.cfg.Tokens.check(s, t)
		expired = expired || state == tokenExpired
		if state != tokenGood {
			return tok, false
		}
		err := g.cfg.Backend.KeyLives(ctx, tok.key)
		switch {
		case errors.Is(err, sandbox.ErrUnauthenticated):
			orphaned = true
		case err != nil:
			failed = err
		}
		return tok, err == nil
	}
	if tok, ok := try(c.query); ok {
		return tok.key, tok.until, nil
	}
	for _, tok := range append([]string{c.header, c.bearer}, c.cookie...) {
		if tok, ok := try(tok); ok {
			return tok.key, until, nil
		}
	}
	for _, secret := range []string{c.header, c.bearer} {
		if strings.HasPrefix(secret, apiKeyPrefix) {
			key, err := g.cfg.Backend.AllowKey(ctx, secret, t.Sandbox)
			if err == nil {
				return key, until, nil
			}
			if p := failure(t, err); p.Status != http.StatusUnauthorized {
				return "", until, &p
			}
		}
	}
	switch {
	case v.Public:
		return "", until, nil
	case failed != nil:
		p := failure(t, failed)
		return "", until, &p
	case orphaned:
		return "", until, &pageOrphaned
	case expired:
		return "", until, &pageExpired
	case c.none():
		return "", until, &pagePrivate
	}
	return "", until, &pageWrongToken
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
	if g.ctx.Err() != nil || g.mu.busy[id] >= g.cfg.MaxRequests {
		return false
	}
	g.mu.busy[id]++
	g.total.Add(1)
	return true
}

func (g *Gateway) leave(id string) {
	g.mu.Lock()
	if g.mu.busy[id]--; g.mu.busy[id] == 0 {
		delete(g.mu.busy, id)
	}
	g.mu.Unlock()
	g.total.Done()
}
