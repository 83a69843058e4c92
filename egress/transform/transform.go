// Package transform puts headers into requests that leave a sandbox, by the domain
// they go to, as a network policy says. They are no secrets: who may look at the
// policy sees them, and answers come back as they are. What a sandbox must not
// see is package secret's, which comes after: a placeholder in a header becomes its
// value.
package transform

import (
	"fmt"
	"net/http"
	"strings"

	"golang.org/x/net/http/httpguts"

	"github.com/cove-sandbox/cove/egress/policy"
	"github.com/cove-sandbox/cove/egress/secret"
	"github.com/cove-sandbox/cove/sandbox"
)

const (
	maxHeaders = 200
	maxValue   = 8 << 10
)

// Set is the headers of a sandbox, compiled and immutable.
type Set struct{ headers []bound }

type bound struct {
	domain      string
	wildcard    bool
	name, value string
}

// Compile checks headers and makes them ready. What is wrong is sandbox.Invalid
// with the field, as network.headers[1].name.
func Compile(headers []sandbox.NetworkHeader) (*Set, error) {
	if len(headers) > maxHeaders {
		return nil, sandbox.InvalidField("network.headers", "has %d headers; at most %d are accepted", len(headers), maxHeaders)
	}
	s := &Set{}
	for i, h := range headers {
		field := func(name string) string { return fmt.Sprintf("network.headers[%d].%s", i, name) }
		domain, wildcard, err := policy.Domain(h.Domain)
		if err != nil {
			return nil, sandbox.InvalidField(field("domain"), "%.80q %v", h.Domain, err)
		}
		if why, refused := secret.Refused(h.Name); refused {
			return nil, sandbox.InvalidField(field("name"), "%.80q is not accepted: it %s", h.Name, why)
		}
		if !httpguts.ValidHeaderFieldName(h.Name) {
			return nil, sandbox.InvalidField(field("name"), "%.80q is no name of a header", h.Name)
		}
		if len(h.Value) > maxValue || !httpguts.ValidHeaderFieldValue(h.Value) {
			return nil, sandbox.InvalidField(field("value"), "is no value of a header of at most %d bytes", maxValue)
		}
		s.headers = append(s.headers, bound{domain, wildcard, h.Name, h.Value})
	}
	return s, nil
}

// Covers says whether requests to a name get any.
func (s *Set) Covers(name string) bool {
	for _, b := range s.headers {
		if b.covers(name) {
			return true
		}
	}
	return false
}

func (b bound) covers(name string) bool {
	if b.wildcard {
		return strings.HasSuffix(name, "."+b.domain)
	}
	return name != "" && name == b.domain
}

// Wrap makes the piece of a chain of requests.
func (s *Set) Wrap(next http.RoundTripper) http.RoundTripper { return trip{s, next} }

type trip struct {
	set  *Set
	next http.RoundTripper
}

// RoundTrip does not change the request that was given.
func (t trip) RoundTrip(r *http.Request) (*http.Response, error) {
	name := strings.ToLower(r.URL.Hostname())
	if !t.set.Covers(name) {
		return t.next.RoundTrip(r)
	}
	out := r.Clone(r.Context())
	for _, b := range t.set.headers {
		if b.covers(name) {
			out.Header.Set(b.name, b.value)
		}
	}
	return t.next.RoundTrip(out)
}
