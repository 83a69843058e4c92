package secret

import (
	"fmt"
	"net/netip"
	"regexp"
	"strings"

	"golang.org/x/net/http/httpguts"

	"github.com/cove-sandbox/cove/egress/policy"
	"github.com/cove-sandbox/cove/sandbox"
)

// Bounds of a secret.
const (
	minValue       = 8 // anything shorter is found in answers by chance
	maxValue       = 4096
	maxHosts       = 32
	maxFormat      = 256
	minPlaceholder = 16
	maxPlaceholder = 256
)

var (
	namePattern        = regexp.MustCompile(`^[a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?$`)
	placeholderPattern = regexp.MustCompile(`^[A-Za-z0-9_-]+$`) // the same in URLs, JSON and headers
	envPattern         = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
)

// refused are headers that say where a request goes, where it ends or how it is
// read, or that belong to one connection: whoever could set them could make two
// requests of one.
var refused = map[string]string{
	"host": "says whom a request is for", "content-length": "says where a request ends", "transfer-encoding": "says where a request ends",
	"connection": "is about one connection", "keep-alive": "is about one connection", "proxy-connection": "is about one connection",
	"proxy-authorization": "is for a proxy", "proxy-authenticate": "is for a proxy", "te": "is about one connection",
	"trailer": "is about one connection", "upgrade": "is about one connection", "http2-settings": "is about one connection",
	"expect": "waits for the server", "content-encoding": "says how a body is read", "accept-encoding": "is the proxy's own: answers must be readable to it",
	"range": "asks for a part of an answer", "if-range": "asks for a part of an answer", "content-range": "says what part a body is",
	"sec-websocket-key": "is about one connection", "sec-websocket-accept": "is about one connection",
	"sec-websocket-version": "is about one connection", "sec-websocket-extensions": "is about one connection",
	"proxy-authentication-info": "is for a proxy", "max-forwards": "is for a proxy", "alt-used": "says whom a request is for",
}

// Refused says that a header is none to be put into requests, and why.
func Refused(name string) (why string, is bool) {
	why, is = refused[strings.ToLower(name)]
	return why, is
}

// ValidateName checks the name of a secret.
func ValidateName(field, name string) error {
	if !namePattern.MatchString(name) {
		return sandbox.InvalidField(field, "%q is not 1 to 63 of a-z, 0-9, - and _, with a letter or digit at both ends", name)
	}
	return nil
}

// Validate checks a secret with its value and placeholder. Fields are named as
// in the API; no message shows a value.
func Validate(s sandbox.Secret) error {
	if err := ValidateName("name", s.Name); err != nil {
		return err
	}
	if s.Floating {
		return floating(s)
	}
	if len(s.Hosts) == 0 {
		return sandbox.InvalidField("hosts", "is empty").WithHint("a secret is only ever sent to hosts it is bound to, as api.example.com")
	}
	if len(s.Hosts) > maxHosts {
		return sandbox.InvalidField("hosts", "%d hosts; at most %d", len(s.Hosts), maxHosts)
	}
	for i, h := range s.Hosts {
		field := fmt.Sprintf("hosts[%d]", i)
		if h == "*" {
			return sandbox.InvalidField(field, "would send the value to every server there is").WithHint("name the hosts, or *.example.com for all below a domain")
		}
		if _, err := netip.ParseAddr(h); err == nil {
			return sandbox.InvalidField(field, "%q is an address", h).WithHint("a secret is bound to names, which servers prove by TLS")
		}
		if _, _, err := policy.Domain(h); err != nil {
			return sandbox.InvalidField(field, "%q %v", h, err)
		}
	}
	if err := header(s); err != nil {
		return err
	}
	if s.Env != "" && !envPattern.MatchString(s.Env) {
		return sandbox.InvalidField("env", "%q is not the name of a variable", s.Env)
	}
	return value(s)
}

// Prefix is of every placeholder that the server makes. Those of secrets without
// hosts have it, so that a header that may send one is known by its looks.
const Prefix = "cove-secret-"

// floating checks a secret without hosts, which headers of networks send.
func floating(s sandbox.Secret) error {
	switch {
	case len(s.Hosts) > 0:
		return sandbox.InvalidField("hosts", "are for a secret that is bound to some")
	case s.Header != "" || s.Format != "" || s.URL || s.Body || s.AllowHTTP || s.Env != "":
		return sandbox.InvalidField("header", "and format, url, body, allow_http and env are for a secret with hosts")
	case !strings.HasPrefix(s.Placeholder, Prefix):
		return sandbox.InvalidField("placeholder", "of a secret without hosts begins with %s", Prefix)
	}
	return value(s)
}

func header(s sandbox.Secret) error {
	switch {
	case s.Header == "" && s.Format != "":
		return sandbox.InvalidField("format", "is for a header, and there is none")
	case s.Header == "":
		return nil
	case len(s.Header) > 128 || !httpguts.ValidHeaderFieldName(s.Header):
		return sandbox.InvalidField("header", "%q is not the name of a header", s.Header)
	}
	if why, bad := refused[strings.ToLower(s.Header)]; bad {
		return sandbox.InvalidField("header", "%s %s: setting it would break requests", s.Header, why)
	}
	if s.Format == "" {
		return nil
	}
	if strings.Count(s.Format, "{}") != 1 {
		return sandbox.InvalidField("format", "%q must have {} once, where the value goes", s.Format)
	}
	if len(s.Format) > maxFormat || !printable(s.Format) {
		return sandbox.InvalidField("format", "must be at most %d bytes without control characters", maxFormat)
	}
	return nil
}

func value(s sandbox.Secret) error {
	if n := len(s.Placeholder); n < minPlaceholder || n > maxPlaceholder || !placeholderPattern.MatchString(s.Placeholder) {
		return sandbox.InvalidField("placeholder", "must be %d to %d of a-z, A-Z, 0-9, - and _", minPlaceholder, maxPlaceholder)
	}
	v := s.Value.Reveal()
	switch {
	case len(v) < minValue:
		return sandbox.InvalidField("value", "has %d bytes, at least %d are needed", len(v), minValue).
			WithHint("a shorter one would be found by chance in answers, and guessed")
	case len(v) > maxValue:
		return sandbox.InvalidField("value", "has %d bytes, at most %d are accepted", len(v), maxValue)
	case !printable(v):
		return sandbox.InvalidField("value", "has a control character, which would break the request it is put into").WithHint("a line feed at its end is the usual one")
	case strings.TrimSpace(v) != v:
		return sandbox.InvalidField("value", "begins or ends with a space")
	case strings.Contains(v, s.Placeholder) || strings.Contains(s.Placeholder, v):
		return sandbox.InvalidField("value", "and placeholder contain one another")
	}
	return nil
}

func printable(s string) bool {
	for _, c := range []byte(s) {
		if c < ' ' || c == 0x7f {
			return false
		}
	}
	return true
}
