// Package secret puts values into requests that leave a sandbox and takes them
// out of the answers, so that code inside works with placeholders alone.
//
// [Compile] makes a [Set] of the secrets of one sandbox; [Set.Wrap] is its piece
// of the chain of package proxy. A value goes to the hosts it is bound to, by a
// name that the server proves by TLS, and nowhere else: a redirect elsewhere
// carries the placeholder. What comes back is searched for the values of the Set,
// as they are and as they may be written in URLs, JSON, HTML, base64 and
// hexadecimal, and has the placeholder in their place.
//
// Code inside sees what becomes of what it has a server echo. So nothing may
// depend on a part of a value: what is a value is replaced, and for all else,
// however much of a value it is, what comes out and when is the same.
package secret

import (
	"encoding/base64"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"

	"github.com/cove-sandbox/cove/egress/policy"
	"github.com/cove-sandbox/cove/sandbox"
)

// Set is the secrets of a sandbox, compiled and immutable.
type Set struct {
	secrets []*bound
	hide    func() hiding // made when it is first needed
}

// bound is one secret, ready for use.
type bound struct {
	is    sandbox.Secret
	hosts []host
	value string
}

type host struct {
	domain   string
	wildcard bool
}

// pair is a text and what stands in its place.
type pair struct{ from, to []byte }

// Compile checks secrets and makes them ready. What is wrong is sandbox.Invalid
// with the field, as hosts[1]. headers are the sandbox's own, which say where those
// go that have no hosts.
func Compile(secrets []sandbox.Secret, headers ...sandbox.NetworkHeader) (*Set, error) {
	s := &Set{}
	for _, is := range secrets {
		b, err := compile(is, headers)
		if err != nil {
			return nil, err
		}
		s.secrets = append(s.secrets, b)
	}
	s.hide = sync.OnceValue(func() hiding { return hidingOf(s.secrets) })
	return s, nil
}

func compile(is sandbox.Secret, headers []sandbox.NetworkHeader) (*bound, error) {
	if err := Validate(is); err != nil {
		return nil, err
	}
	b := &bound{is: is, value: is.Value.Reveal()}
	hosts := is.Hosts
	for _, h := range headers {
		if is.Floating && strings.Contains(h.Value, is.Placeholder) {
			hosts = append(hosts, h.Domain)
		}
	}
	for _, h := range hosts {
		domain, wildcard, err := policy.Domain(h)
		if err != nil {
			return nil, err
		}
		b.hosts = append(b.hosts, host{domain, wildcard})
	}
	return b, nil
}

// forms lists how a value may be written, beside the escapes that automaton
// knows: as it is, with + for spaces as in queries, and in hexadecimal and base64.
//
// Base64 of a text around the value depends on how many bytes are before it, by
// three, and its characters at both ends have bits of what is around. Those
// between do not, and are what is looked for: of the shortest value 10 characters,
// which are in nothing by chance. Their place is taken by as many of the
// placeholder's, so that the whole can still be decoded.
func forms(value, placeholder string) (out []pair) {
	add := func(from, to string) {
		if !slices.ContainsFunc(out, func(p pair) bool { return string(p.from) == from }) {
			out = append(out, pair{[]byte(from), []byte(to)})
		}
	}
	add(value, placeholder)
	add(strings.ReplaceAll(value, " ", "+"), placeholder)
	add(fmt.Sprintf("%x", value), fmt.Sprintf("%x", placeholder))
	add(fmt.Sprintf("%X", value), fmt.Sprintf("%X", placeholder))
	instead := strings.Repeat(placeholder, len(value)/len(placeholder)+1)
	for before := range 3 {
		from, to := (before*8+5)/6, (before+len(value))*8/6
		for _, e := range []*base64.Encoding{base64.RawStdEncoding, base64.RawURLEncoding} {
			core := func(s string) string { return e.EncodeToString([]byte("..."[:before] + s))[from:to] }
			add(core(value), core(instead))
		}
	}
	return out
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
