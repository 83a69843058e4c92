package recording

import (
	"cmp"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/cove-sandbox/cove/sandbox"
)

// Asked is what of a request can matter to a match.
type Asked struct {
	Method string
	Scheme string
	Host   string // without port, lower case
	Port   string // always set
	Path   string // as sent, still escaped
	Query  string // as sent
	Header http.Header
	Body   string // hash; anyBody = it is not known whole
}

// anyBody is the hash of a body that nobody read to its end.
const anyBody = "*"

func askedFor(method string, u *url.URL, h http.Header) Asked {
	a := Asked{Method: method, Scheme: u.Scheme, Host: strings.ToLower(strings.TrimSuffix(u.Hostname(), ".")), Port: u.Port(),
		Path: u.EscapedPath(), Query: u.RawQuery, Header: h}
	if a.Port == "" {
		a.Port = map[string]string{"http": "80", "https": "443"}[a.Scheme]
	}
	if a.Path == "" {
		a.Path = "/"
	}
	return a
}

// URL as a user would write it.
func (a Asked) URL() string {
	host := a.Host
	if strings.Contains(host, ":") {
		host = "[" + host + "]"
	}
	if a.Port != map[string]string{"http": "80", "https": "443"}[a.Scheme] {
		host += ":" + a.Port
	}
	u := a.Scheme + "://" + host + a.Path
	if a.Query != "" {
		u += "?" + a.Query
	}
	return u
}

// Rules is what is compared.
type Rules struct {
	RepeatLast   bool
	IgnoreQuery  map[string]bool // "*" = all
	IgnoreBody   bool
	MatchHeaders []string // canonical, sorted
}

// RulesOf are those of a replay.
func RulesOf(r sandbox.NetworkReplay) Rules {
	out := Rules{RepeatLast: r.RepeatLast, IgnoreBody: r.IgnoreBody, IgnoreQuery: map[string]bool{}}
	for _, q := range r.IgnoreQuery {
		out.IgnoreQuery[q] = true
	}
	for _, h := range r.MatchHeaders {
		out.MatchHeaders = append(out.MatchHeaders, http.CanonicalHeaderKey(h))
	}
	slices.Sort(out.MatchHeaders)
	out.MatchHeaders = slices.Compact(out.MatchHeaders)
	return out
}

// Equal says whether two rules compare the same.
func (r Rules) Equal(o Rules) bool {
	return r.RepeatLast == o.RepeatLast && r.IgnoreBody == o.IgnoreBody && maps.Equal(r.IgnoreQuery, o.IgnoreQuery) && slices.Equal(r.MatchHeaders, o.MatchHeaders)
}

// key is the same for requests that are the same under the rules. Parameters
// are compared as written and in any order, but those of one name in theirs.
// Range is part of it always: the parts of a download, asked for at once, are
// different requests.
func (r Rules) key(a Asked) string {
	params := strings.Split(a.Query, "&")
	params = slices.DeleteFunc(params, func(p string) bool {
		name, _, _ := strings.Cut(p, "=")
		if plain, err := url.QueryUnescape(name); err == nil {
			name = plain
		}
		return p == "" || r.IgnoreQuery["*"] || r.IgnoreQuery[name]
	})
	slices.SortStableFunc(params, func(a, b string) int {
		a, _, _ = strings.Cut(a, "=")
		b, _, _ = strings.Cut(b, "=")
		return cmp.Compare(a, b)
	})
	var b strings.Builder
	part := func(s string) { fmt.Fprintf(&b, "%d:%s,", len(s), s) } // no part can pass for two
	for _, s := range []string{a.Method, a.Scheme, a.Host, a.Port, a.Path, strings.Join(params, "&")} {
		part(s)
	}
	for _, h := range append([]string{"Range"}, r.MatchHeaders...) {
		part(strings.Join(a.Header.Values(h), "\n"))
	}
	if r.IgnoreBody {
		part(anyBody)
	} else {
		part(a.Body)
	}
	return b.String()
}

// nearestOf is how many exchanges are looked through for a hint.
const nearestOf = 4096

// nearest says how the recorded request that is most like a missed one differs;
// "" if none is like it.
func nearest(a Asked, recorded []Exchange) string {
	best, at := 0, -1
	for i := range recorded[:min(len(recorded), nearestOf)] {
		if n := alike(a, recorded[i].Request); n > best {
			best, at = n, i
		}
	}
	if at < 0 {
		return ""
	}
	is := recorded[at].Request
	was := fmt.Sprintf("recorded as number %d was %s %s", recorded[at].Number, is.Method, is.URL())
	var differs []string
	for _, d := range []struct {
		what string
		same bool
	}{{"the method", a.Method == is.Method}, {"the scheme", a.Scheme == is.Scheme}, {"the port", a.Port == is.Port}, {"the path", a.Path == is.Path},
		{"the query", a.Query == is.Query}, {"the body", a.Body == is.Body}, {"the Range", a.Header.Get("Range") == is.Header.Get("Range")}} {
		if !d.same {
			differs = append(differs, d.what)
		}
	}
	if len(differs) == 0 {
		return was + ": the same, but not as often (repeat_last answers with the last again), or with other headers"
	}
	if len(differs) == 1 {
		return was + ": " + differs[0] + " differs"
	}
	return was + ": " + strings.Join(differs, " and ") + " differ"
}

// alike weighs what two requests have in common; 0 without a common host.
func alike(a, b Asked) int {
	if a.Host != b.Host {
		return 0
	}
	n := 1
	for _, w := range []struct {
		same bool
		n    int
	}{{a.Path == b.Path, 16}, {a.Method == b.Method, 8}, {a.Query == b.Query, 4}, {a.Body == b.Body, 2}, {a.Scheme == b.Scheme && a.Port == b.Port, 2}} {
		if w.same {
			n += w.n
		}
	}
	return n
}

func sortExchanges(es []Exchange) {
	slices.SortFunc(es, func(a, b Exchange) int { return cmp.Compare(a.Number, b.Number) })
}
