package e2b

import (
	"cmp"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/server"
)

// Where the calls of the SDKs come in. In plain mode one address serves everything:
// the paths tell the API from the agent, headers which sandbox and port is meant. In
// domain mode the host does: api.DOMAIN, and PORT-ID.DOMAIN, of which port 49983 is
// the agent.

const (
	apiHost     = "api"
	trafficName = "E2b-Traffic-Access-Token"

	// visitOp is what a visit of a port with a token is.
	visitOp server.Operation = "port.reach"

	// portRoot is where the gateway shows ports. What comes after is the path of a
	// server inside, which a ServeMux would clean, and its headers are that server's.
	portRoot = "/p/"
)

// front gives requests for ports to the gateway, those for the agent and the API to
// the dialect, and leaves what is not of E2B's SDKs to next.
func (d *dialect) front(dialect, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		label, ours := d.label(r.Host)
		port, id, named, err := d.addressed(r)
		if err != nil {
			writeError(w, err)
			return
		}
		switch {
		case named && port != envdPort && d.port != nil:
			d.visit(w, r, id, port)
		case named && port != envdPort:
			writeError(w, unsupported(portHeader, "ports on this server"))
		case !named && !ours && strings.HasPrefix(r.URL.EscapedPath(), portRoot):
			next.ServeHTTP(w, r)
		case preflight(r) && (named || ours && label == apiHost || fromSDK(r)):
			allow(w, r)
		case named:
			r.Header.Set(idHeader, id)
			dialect.ServeHTTP(w, r)
		case ours && label != apiHost:
			next.ServeHTTP(w, r) // which says that there is nothing
		default:
			dialect.ServeHTTP(w, r)
		}
	})
}

// label is what stands before the domain in a host.
func (d *dialect) label(host string) (string, bool) {
	if d.domain == "" {
		return "", false
	}
	name, _, _ := strings.Cut(d.domain, ":")
	host, _, _ = strings.Cut(strings.ToLower(host), ":")
	return strings.CutSuffix(host, "."+name)
}

// addressed is which port of which sandbox a request is for, if it is for one: by its
// host in domain mode, otherwise by headers.
func (d *dialect) addressed(r *http.Request) (port int, id string, named bool, err error) {
	if label, ours := d.label(r.Host); ours {
		p, id, cut := strings.Cut(label, "-")
		port, ok := parsePort(p)
		return port, id, cut && ok && sandbox.ValidID(id), nil
	}
	p := cmp.Or(r.Header.Get(portHeader), strconv.Itoa(envdPort))
	port, ok := parsePort(p)
	if !ok {
		return 0, "", false, sandbox.InvalidField(portHeader, "%.20q is no port", p)
	}
	id = r.Header.Get(idHeader)
	return port, id, id != "", nil
}

// parsePort knows one spelling of each port: whoever is asked about one is asked about
// the same.
func parsePort(s string) (int, bool) {
	port, err := strconv.Atoi(s)
	return port, err == nil && strconv.Itoa(port) == s && port >= 1 && port <= 65535
}

// visit is a request for a port. What opens a private one is taken off: code inside
// must not learn what its visitors hold.
func (d *dialect) visit(w http.ResponseWriter, r *http.Request, id string, port int) {
	token := r.Header.Get(trafficName)
	for _, name := range []string{trafficName, idHeader, portHeader, "X-Access-Token"} {
		r.Header.Del(name)
	}
	// An application's own passes.
	if ofOurs := func(v string) bool { return strings.HasPrefix(v, keyPrefix) || strings.HasPrefix(v, nativePrefix) }; slices.ContainsFunc(r.Header.Values("X-Api-Key"), ofOurs) {
		r.Header.Del("X-Api-Key")
	}
	w = &worded{ResponseWriter: w, d: d, r: r, id: id, port: port}
	if token == "" {
		d.port(w, r, id, port, "")
		return
	}
	why := "the traffic access token is not one of this sandbox"
	if g, ok := d.traffic.check(token); ok && g.sandbox == id {
		ctx, err := d.server.Vouched(r.Context(), g.key, r.RemoteAddr)
		if err == nil {
			err = d.server.ReachPort(ctx, id)
		}
		switch {
		case err == nil:
			d.port(w, r, id, port, g.key)
			return
		case gone(err):
			writeGone(w, id)
			return
		case sandbox.ClassOf(err) == sandbox.Denied:
			why = message(sandbox.AsError(err))
		}
	}
	writeRefusal(w, http.StatusForbidden, refusal{Code: http.StatusForbidden, Message: why, SandboxID: id})
}

// worded says what the gateway refuses of a sandbox that an SDK of E2B's made as
// E2B's proxy does. Its own answers have a header that none from inside has.
type worded struct {
	http.ResponseWriter
	d    *dialect
	r    *http.Request
	id   string
	port int

	instead bool // the body that comes is the gateway's, and was replaced
}

const (
	gatewayError   = "X-Cove-Error"
	privateMessage = "this port is private, or there is no such sandbox: the request needs the header e2b-traffic-access-token, or a token ('cove url ID PORT')"
)

func (w *worded) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *worded) WriteHeader(status int) {
	cause := w.Header().Get(gatewayError)
	if cause != "" && status == http.StatusUnauthorized && !strings.Contains(w.r.Header.Get("Accept"), "text/html") {
		// The same of every id: who has no token is not told what exists, and which SDK
		// made it.
		w.Header().Del("WWW-Authenticate")
		w.replace(refusal{Code: http.StatusForbidden, Message: privateMessage, SandboxID: w.id})
		return
	}
	if cause == "" || status == http.StatusUnauthorized || w.d.server.Reach().Labels(w.r.Context(), w.id)[templateLabel] == "" {
		w.ResponseWriter.WriteHeader(status)
		return
	}
	body := refusal{Code: http.StatusBadGateway, Message: goneMessage, SandboxID: w.id}
	switch {
	case cause == string(sandbox.PortClosed):
		body.Message, body.Port = "The sandbox is running but port is not open", w.port
	case status == http.StatusNotFound, status == http.StatusGone, cause == string(sandbox.Asleep):
	default:
		w.ResponseWriter.WriteHeader(status)
		return
	}
	w.replace(body)
}

func (w *worded) replace(body refusal) {
	w.instead = true
	w.Header().Del("Content-Security-Policy")
	writeRefusal(w.ResponseWriter, body.Code, body)
}

func (w *worded) Write(b []byte) (int, error) {
	if w.instead {
		return len(b), nil
	}
	return w.ResponseWriter.Write(b)
}

// Pages of any origin may call the API and the agent, as they may E2B's: what they
// need is a key or a token, and no browser sends one by itself.

// shared tells a browser so with an answer.
func shared(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Origin") != "" {
			w.Header().Set("Access-Control-Allow-Origin", "*")
			w.Header().Set("Access-Control-Expose-Headers", "Content-Disposition, Content-Range, Accept-Ranges, ETag, Last-Modified, Retry-After, X-Next-Token, X-Total-Running")
		}
		next.ServeHTTP(w, r)
	})
}

// preflight says that a browser asks whether it may ask.
func preflight(r *http.Request) bool {
	return r.Method == http.MethodOptions && r.Header.Get("Origin") != "" && r.Header.Get("Access-Control-Request-Method") != ""
}

// fromSDK says that what is asked about is a call of an SDK: in plain mode nothing
// else tells it from one of the native API's. A signed URL needs no such question,
// unless something is written by it.
func fromSDK(r *http.Request) bool {
	wanted := strings.ToLower(r.Header.Get("Access-Control-Request-Headers"))
	return r.URL.Path == "/files" || strings.Contains(wanted, "x-api-key") || strings.Contains(wanted, strings.ToLower(idHeader)) || strings.Contains(wanted, "x-access-token")
}

func allow(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Access-Control-Allow-Origin", "*")
	h.Set("Access-Control-Allow-Methods", "GET, HEAD, POST, PUT, PATCH, DELETE")
	h.Set("Access-Control-Allow-Headers", r.Header.Get("Access-Control-Request-Headers")) // "*" would not cover Authorization
	h.Set("Vary", "Access-Control-Request-Headers")
	h.Set("Access-Control-Max-Age", "7200")
	w.WriteHeader(http.StatusNoContent)
}
