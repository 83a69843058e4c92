package e2b

import (
	"cmp"
	"net/http"
	"strconv"
	"strings"

	"github.com/cove-sandbox/cove/sandbox"
)

// Where the calls of the SDKs come in. In plain mode one address serves everything:
// the paths tell the API from the agent, headers which sandbox and port is meant. In
// domain mode the host does: api.DOMAIN, and PORT-ID.DOMAIN, of which port 49983 is
// the agent.

const (
	apiHost     = "api"
	trafficName = "E2b-Traffic-Access-Token"
	// portRoot is where the gateway shows ports. What comes after is the path of a
	// server inside, which a ServeMux would clean, and its headers are that server's.
	portRoot = "/p/"
)

// front gives requests for ports to the gateway, those for the agent and the API to
// the dialect, and leaves what is not of E2B's SDKs to next.
func (d *dialect) front(dialect, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		label, ours := d.label(r.Host)
		port, id, named := addressed(label)
		if !ours {
			id, named = r.Header.Get(idHeader), r.Header.Get(idHeader) != ""
			var err error
			if port, err = strconv.Atoi(cmp.Or(r.Header.Get(portHeader), strconv.Itoa(envdPort))); err != nil || port < 1 || port > 65535 {
				writeError(w, sandbox.InvalidField(portHeader, "%.20q is no port", r.Header.Get(portHeader)))
				return
			}
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

// addressed takes PORT-ID apart.
func addressed(label string) (port int, id string, ok bool) {
	p, id, ok := strings.Cut(label, "-")
	port, err := strconv.Atoi(p)
	return port, id, ok && err == nil && strconv.Itoa(port) == p && port >= 1 && port <= 65535 && sandbox.ValidID(id)
}

// visit is a request for a port. What opens a private one is taken off: code inside
// must not learn what its visitors hold.
func (d *dialect) visit(w http.ResponseWriter, r *http.Request, id string, port int) {
	token := r.Header.Get(trafficName)
	for _, name := range []string{trafficName, idHeader, portHeader, "X-Access-Token"} {
		r.Header.Del(name)
	}
	w = &worded{ResponseWriter: w, d: d, r: r, id: id, port: port}
	if token == "" {
		d.port(w, r, id, port, false)
		return
	}
	g, ok := d.traffic.check(token)
	if ok && g.sandbox == id {
		if _, err := d.server.Vouched(r.Context(), g.key, r.RemoteAddr); err == nil {
			d.port(w, r, id, port, true)
			return
		}
	}
	writeRefusal(w, http.StatusForbidden, refusal{Code: http.StatusForbidden, Message: "the traffic access token is not one of this sandbox", SandboxID: id})
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

const gatewayError = "X-Cove-Error"

func (w *worded) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *worded) WriteHeader(status int) {
	cause := w.Header().Get(gatewayError)
	if cause == "" || w.d.server.Reach().Labels(w.r.Context(), w.id)[templateLabel] == "" {
		w.ResponseWriter.WriteHeader(status)
		return
	}
	body := refusal{Code: http.StatusBadGateway, Message: goneMessage, SandboxID: w.id}
	switch {
	case status == http.StatusUnauthorized:
		body.Code, body.Message = http.StatusForbidden, "this port is private: the request needs the header e2b-traffic-access-token"
		w.Header().Del("WWW-Authenticate")
	case cause == string(sandbox.PortClosed):
		body.Message, body.Port = "The sandbox is running but port is not open", w.port
	case status == http.StatusNotFound, status == http.StatusGone, cause == string(sandbox.Asleep):
	default:
		w.ResponseWriter.WriteHeader(status)
		return
	}
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
