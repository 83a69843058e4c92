package gateway

import (
	"net/http"
	"net/url"
	"strings"
)

// Names of what opens a port. None of them reaches the inside.
const (
	tokenHeader = "X-Cove-Token"
	tokenParam  = "cove_token" // of the query; cookieName tells the cookie's
	wakeHeader  = "X-Cove-Wake"

	apiKeyPrefix = "cove_"

	// maxCookies of our name are tried. Without TLS pages of other sandboxes can
	// set some for all hosts; none of theirs opens anything, each costs a MAC.
	maxCookies = 64
)

// credentials are all that a request offers.
type credentials struct {
	header string // a token or an API key
	query  string // a token
	bearer string // an API key
	cookie []string
}

func (c credentials) none() bool {
	return c.header == "" && c.query == "" && c.bearer == "" && len(c.cookie) == 0
}

// takeCredentials reads what r offers and takes it off r, with everything else
// that is only for us. Of the cookies the one called cookie opens something.
func takeCredentials(r *http.Request, cookie string) (c credentials) {
	h := r.Header
	c.header = h.Get(tokenHeader)
	for name := range h {
		if strings.HasPrefix(name, "X-Cove-") {
			delete(h, name)
		}
	}
	// An application's own Authorization passes; one that holds a key of ours
	// does not, whichever of several it is.
	if auth := h.Values("Authorization"); len(auth) > 0 {
		var rest []string
		for _, v := range auth {
			scheme, secret, _ := strings.Cut(v, " ")
			secret = strings.TrimSpace(secret)
			if strings.EqualFold(scheme, "Bearer") && (strings.HasPrefix(secret, apiKeyPrefix) || strings.HasPrefix(secret, tokenPrefix)) {
				c.bearer = secret
			} else {
				rest = append(rest, v)
			}
		}
		setAll(h, "Authorization", rest)
	}
	c.query, r.URL.RawQuery = cutParam(r.URL.RawQuery)
	// A page that was opened with a token in its address names it in what it asks
	// for. It opens nothing from there.
	for i, v := range h["Referer"] {
		h["Referer"][i] = withoutToken(v)
	}
	var cookies []string
	for _, line := range h.Values("Cookie") {
		var keep []string
		for part := range strings.SplitSeq(line, ";") {
			name, value, _ := strings.Cut(strings.TrimSpace(part), "=")
			if name = strings.TrimSpace(name); isOurCookie(name) {
				if name == cookie && len(c.cookie) < maxCookies {
					c.cookie = append(c.cookie, strings.Trim(strings.TrimSpace(value), `"`))
				}
			} else if s := strings.TrimSpace(part); s != "" {
				keep = append(keep, s)
			}
		}
		if len(keep) > 0 {
			cookies = append(cookies, strings.Join(keep, "; "))
		}
	}
	setAll(h, "Cookie", cookies)
	return c
}

func setAll(h http.Header, name string, values []string) {
	if len(values) == 0 {
		h.Del(name)
		return
	}
	h[name] = values
}

// cutParam takes our parameter out of a query and leaves the rest as it was
// written: order and escapes may be signed.
func cutParam(raw string) (token, rest string) {
	if !strings.Contains(raw, "cove") && !strings.Contains(raw, "%") {
		return "", raw
	}
	var keep []string
	for part := range strings.SplitSeq(raw, "&") {
		name, value, _ := strings.Cut(part, "=")
		if n, err := url.QueryUnescape(name); err == nil && n == tokenParam {
			if v, err := url.QueryUnescape(value); err == nil && token == "" {
				token = v
			}
			continue
		}
		keep = append(keep, part)
	}
	return token, strings.Join(keep, "&")
}

// withoutToken is a URL as it was written, but for our parameter.
func withoutToken(u string) string {
	rest, fragment, hasFragment := strings.Cut(u, "#")
	path, query, _ := strings.Cut(rest, "?")
	_, kept := cutParam(query)
	if kept == query {
		return u
	}
	if kept != "" {
		path += "?" + kept
	}
	if hasFragment {
		path += "#" + fragment
	}
	return path
}
