package gateway

import (
	"encoding/json"
	"errors"
	"html/template"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// page is an answer of the gateway itself. Its header X-Cove-Error tells it from
// one of the server inside.
type page struct {
	Status  int    `json:"-"`
	Code    string `json:"code"`
	Title   string `json:"-"`
	Message string `json:"message"`
	Hint    string `json:"hint,omitempty"`
	retry   time.Duration
}

var (
	pageNoAddress = page{Status: http.StatusNotFound, Code: "no_such_address", Title: "No such address",
		Message: "This address names no port of a sandbox.",
		Hint:    "Addresses are <port>-<sandbox>.<domain> and /p/<sandbox>/<port>/."}
	pageBadRequest = page{Status: http.StatusBadRequest, Code: "invalid_argument", Title: "Not accepted",
		Message: "A request for a port names a path, not a whole URL or another host."}
	pagePrivate = page{Status: http.StatusUnauthorized, Code: "unauthenticated", Title: "This port is private",
		Message: "This port is private, or there is no such sandbox.",
		Hint:    "'cove url ID PORT' makes an address with a token; an API key as 'Authorization: Bearer' opens it too."}
	pageWrongToken = page{Status: http.StatusUnauthorized, Code: "unauthenticated", Title: "The token does not open this port",
		Message: "The token is not for this port, or not one of this server.",
		Hint:    "'cove url ID PORT' makes a new one."}
	pageExpired = page{Status: http.StatusUnauthorized, Code: "unauthenticated", Title: "The token has expired",
		Message: "The token was right and has expired.",
		Hint:    "'cove url ID PORT' makes a new one."}
	pageOrphaned = page{Status: http.StatusUnauthorized, Code: "unauthenticated", Title: "The token is void",
		Message: "The token was right; the API key it was made with was revoked or has expired.",
		Hint:    "'cove url ID PORT' makes a new one, with another key."}
	pageForeign = page{Status: http.StatusForbidden, Code: "permission_denied", Title: "Not from another page",
		Message: "The cookie opens this port for its own pages and for links that are followed, not for what other pages ask for.",
		Hint:    "Programs send the token as header X-Cove-Token. Applications with more than one page or file need the host form (--gateway-domain)."}
	pageBusy = page{Status: http.StatusServiceUnavailable, Code: "no_capacity", Title: "Too many requests at once",
		Message: "This sandbox has as many requests under way as one may have.", retry: time.Second}
	pageCrowded = page{Status: http.StatusServiceUnavailable, Code: "no_capacity", Title: "Too many requests at once",
		Message: "As many requests to public ports are under way as the server takes from those who show no key.",
		Hint:    "A token ('cove url ID PORT') or an API key is not among them.", retry: time.Second}
)

// failure is the page for an error of the backend or of the way inside.
func failure(t Target, err error) page {
	var e *sandbox.Error
	if !errors.As(err, &e) {
		return page{Status: http.StatusBadGateway, Code: "bad_gateway", Title: "The server inside broke off",
			Message: "The server on port " + strconv.Itoa(t.Port) + " inside did not answer the request in full."}
	}
	msg := *e
	msg.Op, msg.Field = "", ""
	p := page{Status: http.StatusBadGateway, Code: string(e.Class), Title: "The sandbox cannot be reached", Message: msg.Error(), Hint: e.Hint, retry: e.RetryAfter}
	switch {
	case errors.Is(err, sandbox.ErrPortClosed):
		port := strconv.Itoa(t.Port)
		p.Code, p.Title = string(sandbox.PortClosed), "Port "+port+" is not open"
		p.Message = "Nothing listens on " + port + " inside; a server must listen on 127.0.0.1 or 0.0.0.0."
		p.Hint = "'cove exec " + t.Sandbox + " -- …' starts one."
	case errors.Is(err, sandbox.ErrAsleep):
		p.Status, p.Code, p.Title = http.StatusServiceUnavailable, string(sandbox.Asleep), "The sandbox is asleep"
	case e.Class == sandbox.NotFound, e.Class == sandbox.Invalid:
		p.Status, p.Title = http.StatusNotFound, "No such sandbox"
	case e.Class == sandbox.Ended:
		p.Status, p.Title = http.StatusGone, "The sandbox has ended"
	case e.Class == sandbox.NoCapacity, e.Class == sandbox.Precondition:
		p.Status = http.StatusServiceUnavailable
	case e.Class == sandbox.DeadlineReached:
		p.Status = http.StatusGatewayTimeout
	case e.Class == sandbox.Denied:
		p.Status, p.Title = http.StatusForbidden, "Not allowed"
	case e.Class == sandbox.Unauthenticated:
		p = pagePrivate
	case e.Class == sandbox.Internal:
		p.Status, p.Message = http.StatusInternalServerError, "A defect of the server; its log says more."
	}
	return p
}

var pageHTML = template.Must(template.New("").Parse(`<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{{.Title}}</title>
<style>body{font:16px/1.5 system-ui,sans-serif;max-width:40em;margin:15vh auto;padding:0 1em;color:#222;background:#fff}
h1{font-size:1.4em}p{margin:.6em 0}.s{color:#767676}@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}}</style></head>
<body><h1>{{.Title}}</h1><p>{{.Message}}</p>{{with .Hint}}<p>{{.}}</p>{{end}}<p class="s">Cove · {{.Status}} {{.Code}}</p></body></html>
`))

// write answers with the page, as HTML to who asks for it and as JSON to others.
func (p page) write(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("X-Cove-Error", p.Code)
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Vary", "Accept")
	if p.Status == http.StatusUnauthorized {
		h.Set("WWW-Authenticate", `Bearer realm="cove"`)
	}
	if p.retry > 0 {
		h.Set("Retry-After", strconv.Itoa(int((p.retry+time.Second-1)/time.Second)))
	}
	html := wantsHTML(r)
	if html {
		h.Set("Content-Type", "text/html; charset=utf-8")
		h.Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
	} else {
		h.Set("Content-Type", "application/json")
	}
	w.WriteHeader(p.Status)
	if r.Method == http.MethodHead {
		return
	}
	// An error means that the client left.
	if html {
		_ = pageHTML.Execute(w, p)
		return
	}
	_ = json.NewEncoder(w).Encode(p)
}

func wantsHTML(r *http.Request) bool {
	return strings.Contains(r.Header.Get("Accept"), "text/html")
}
