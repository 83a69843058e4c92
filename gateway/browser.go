package gateway

import (
	"net/http"
	"net/url"
	"strings"
)

// A browser sends our cookie along with whatever any page asks it to send. The
// hosts of two sandboxes are one site, so SameSite does not tell them apart, and
// in the path form they are even one origin. So a request that nothing but the
// cookie opens must come from the port's own pages or be a person's visit.

// cookieName is the name that our cookie has at an address. Under TLS the
// prefixes have the browser keep a cookie of that name from every other host
// ("__Host-", which must be for all paths) or from plain HTTP ("__Secure-"): a
// neighbour's document.cookie cannot put another in its place. Without TLS there
// is no such thing.
func cookieName(v visit) string {
	switch {
	case v.secure && v.prefix == "":
		return "__Host-" + tokenParam
	case v.secure:
		return "__Secure-" + tokenParam
	}
	return tokenParam
}

// isOurCookie says whether a name is one that our cookie has somewhere.
func isOurCookie(name string) bool {
	name = strings.ToLower(name) // browsers take the prefixes in any case
	return name == tokenParam || name == "__host-"+tokenParam || name == "__secure-"+tokenParam
}

// ownPage says whether a request that a cookie came with may go in by it. Headers
// that a page cannot forge tell: Sec-Fetch-*, which browsers send to https and to
// loopback, and Origin, which they send with everything but plain GET and HEAD.
// A request with neither is a program's.
func ownPage(r *http.Request, v visit) bool {
	read := (r.Method == http.MethodGet || r.Method == http.MethodHead) && r.Header.Get("Upgrade") == ""
	site := r.Header.Get("Sec-Fetch-Site")
	switch {
	case site == "same-origin" && v.prefix == "":
		return true // WebSockets too: none is of the same origin but the port's own
	case site == "none" && read:
		return true // typed, or a bookmark
	case site != "":
		// A link that somebody followed, in a tab of its own: frames could be
		// clicked through.
		return read && r.Header.Get("Sec-Fetch-Mode") == "navigate" && r.Header.Get("Sec-Fetch-Dest") == "document"
	}
	origins := r.Header.Values("Origin")
	if len(origins) == 0 {
		return true
	}
	// In the path form a page's origin is every sandbox's.
	return len(origins) == 1 && v.prefix == "" && isOrigin(origins[0], r.Host, v.secure)
}

func isOrigin(origin, host string, secure bool) bool {
	u, err := url.Parse(origin)
	return err == nil && strings.EqualFold(u.Host, host) && (u.Scheme == "https" || u.Scheme == "http" && !secure)
}

// sandboxed takes a page of the path form out of the origin that it shares with
// every other sandbox and the API: script in it runs with an origin of its own,
// without our cookies and without their documents. It is one more policy beside
// those that the page has, and all of them hold.
const sandboxed = "sandbox allow-scripts allow-forms allow-modals allow-popups allow-downloads"

// informing cleans what a server inside says before its answer (103 and the
// like), which httputil passes on as it came.
type informing struct {
	http.ResponseWriter
	visit visit
}

func (w informing) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w informing) WriteHeader(status int) {
	if status < 200 && status != http.StatusSwitchingProtocols {
		clean(w.Header(), w.visit)
		w.Header().Del("Set-Cookie") // one belongs to an answer
	}
	w.ResponseWriter.WriteHeader(status)
}
