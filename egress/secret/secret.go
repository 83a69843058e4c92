// Package secret puts values into requests that leave a sandbox and takes them
// out of the answers, so that code inside works with placeholders alone.
//
// [Compile] makes a [Set] of the secrets of one sandbox; [Set.Wrap] is its piece
// of the chain of package proxy. A value goes to the hosts it is bound to, by a
// name that the server proves by TLS, and nowhere else: a redirect elsewhere
// carries the placeholder. What comes back is searched for the value, as it is
// and as it may be written in URLs, JSON and base64, and has the placeholder in
// its place.
package secret

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/cove-sandbox/cove/egress/policy"
	"github.com/cove-sandbox/cove/sandbox"
)

// Set is the secrets of a sandbox, compiled and immutable.
type Set struct{ secrets []*bound }

// bound is one secret, ready for use.
type bound struct {
	is    sandbox.Secret
	hosts []host
	value string
	hide  []pair // what of answers is replaced by what
}

type host struct {
	domain   string
	wildcard bool
}

// pair is a text and what stands in its place.
type pair struct{ from, to []byte }

// Compile checks secrets and makes them ready. What is wrong is sandbox.Invalid
// with the field, as hosts[1].
func Compile(secrets []sandbox.Secret) (*Set, error) {
	s := &Set{}
	for _, is := range secrets {
		b, err := compile(is)
		if err != nil {
			return nil, err
		}
		s.secrets = append(s.secrets, b)
	}
	return s, nil
}

func compile(is sandbox.Secret) (*bound, error) {
	if err := Validate(is); err != nil {
		return nil, err
	}
	b := &bound{is: is, value: is.Value.Reveal()}
	for _, h := range is.Hosts {
		domain, wildcard, err := policy.Domain(h)
		if err != nil {
			return nil, err
		}
		b.hosts = append(b.hosts, host{domain, wildcard})
	}
	b.hide = hides(b.value, is.Placeholder)
	return b, nil
}

// hides lists how a value may be written, longest first: where two begin at one
// place the longer is meant.
func hides(value, placeholder string) (out []pair) {
	seen := map[string]bool{}
	add := func(from, to string) {
		if !seen[from] {
			seen[from] = true
			out = append(out, pair{[]byte(from), []byte(to)})
		}
	}
	add(value, placeholder)
	add(url.QueryEscape(value), placeholder)
	add(url.PathEscape(value), placeholder)
	add(jsonText(value, true), placeholder)
	add(jsonText(value, false), placeholder)
	for _, e := range []*base64.Encoding{base64.StdEncoding, base64.URLEncoding} {
		// Without padding, which then follows as it is.
		e = e.WithPadding(base64.NoPadding)
		add(e.EncodeToString([]byte(value)), e.EncodeToString([]byte(placeholder)))
	}
	slices.SortStableFunc(out, func(a, b pair) int { return len(b.from) - len(a.from) })
	return out
}

// jsonText is a string as it stands between quotes.
func jsonText(s string, html bool) string {
	var b strings.Builder
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(html)
	_ = e.Encode(s) // a string into memory
	return b.String()[1 : b.Len()-2]
}

// Covers says whether requests to a name are to be looked into.
func (s *Set) Covers(name string) bool {
	return slices.ContainsFunc(s.secrets, func(b *bound) bool { return b.covers(name) })
}

// Env is the placeholders that are handed to processes, by variable.
func Env(secrets []sandbox.Secret) map[string]string {
	out := map[string]string{}
	for _, s := range secrets {
		if s.Env != "" {
			out[s.Env] = s.Placeholder
		}
	}
	return out
}

func (b *bound) covers(name string) bool {
	return name != "" && slices.ContainsFunc(b.hosts, func(h host) bool {
		if h.wildcard {
			return strings.HasSuffix(name, "."+h.domain)
		}
		return name == h.domain
	})
}

// Wrap makes the piece of a chain of requests.
func (s *Set) Wrap(next http.RoundTripper) http.RoundTripper { return &trip{s, next} }

// String and Format keep values out of logs.
func (s *Set) String() string { return fmt.Sprintf("%d secrets", len(s.secrets)) }

func (s *Set) Format(f fmt.State, _ rune) { fmt.Fprint(f, s.String()) }
