package gateway

import (
	"net"
	"net/url"
	"strconv"
	"strings"

	"github.com/cove-sandbox/cove/sandbox"
)

// Target is a port of a sandbox.
type Target struct {
	Sandbox string
	Port    int
}

func (t Target) String() string { return t.Sandbox + ":" + strconv.Itoa(t.Port) }

// ParseTarget is the inverse of String.
func ParseTarget(s string) (Target, bool) {
	id, port, ok := strings.Cut(s, ":")
	if !ok {
		return Target{}, false
	}
	return newTarget(id, port)
}

func newTarget(id, port string) (Target, bool) {
	n, err := strconv.Atoi(port)
	// One spelling each, so that "+80" and "0080" are no second addresses.
	if err != nil || n < 1 || n > 65535 || strconv.Itoa(n) != port || !sandbox.ValidID(id) {
		return Target{}, false
	}
	return Target{id, n}, true
}

// Domain is below what the hosts of ports are. The zero value is none.
type Domain struct {
	Scheme string // http or https
	Name   string // lower case, without a port
	Port   string // "" = the scheme's own
}

// ParseDomain reads "cove.example.com" or, where the outside differs from the
// listener, "https://cove.example.com[:port]". A bare name is reached by scheme
// and port.
func ParseDomain(s, scheme, port string) (Domain, error) {
	bad := func() (Domain, error) {
		return Domain{}, sandbox.InvalidField("gateway-domain", "%.100q; a domain like cove.example.com or https://cove.example.com is accepted", s)
	}
	d := Domain{Scheme: scheme, Port: port}
	name := s
	if strings.Contains(s, "://") {
		u, err := url.Parse(s)
		if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.User != nil || u.RawQuery != "" || strings.Trim(u.Path, "/") != "" {
			return bad()
		}
		d.Scheme, name, d.Port = u.Scheme, u.Hostname(), u.Port()
	}
	d.Name = strings.ToLower(name)
	if net.ParseIP(d.Name) != nil || len(d.Name) > 180 {
		return bad()
	}
	for label := range strings.SplitSeq(d.Name, ".") {
		if label == "" || len(label) > 63 || strings.Trim(label, "abcdefghijklmnopqrstuvwxyz0123456789-") != "" || label[0] == '-' || label[len(label)-1] == '-' {
			return bad()
		}
	}
	if d.Scheme == "http" && d.Port == "80" || d.Scheme == "https" && d.Port == "443" {
		d.Port = ""
	}
	return d, nil
}

// Host is the domain with its port, where that is not the scheme's own; "" for none.
func (d Domain) Host() string {
	if d.Name == "" || d.Port == "" {
		return d.Name
	}
	return d.Name + ":" + d.Port
}

// URL of a port: absolute, or a path of the API's own address where there is no
// domain.
func (d Domain) URL(t Target) string {
	if d.Name == "" {
		return prefix(t) + "/"
	}
	return d.Scheme + "://" + strconv.Itoa(t.Port) + "-" + t.Sandbox + "." + d.Host() + "/"
}

// match takes a Host header apart. ours says that it is below the domain, ok
// that it names a port.
func (d Domain) match(host string) (t Target, ours, ok bool) {
	if d.Name == "" {
		return t, false, false
	}
	if i := strings.LastIndexByte(host, ':'); i >= 0 && !strings.HasSuffix(host, "]") {
		if _, err := strconv.ParseUint(host[i+1:], 10, 16); err != nil {
			return t, strings.Contains(strings.ToLower(host), d.Name), false
		}
		host = host[:i]
	}
	host = strings.ToLower(host)
	label, ours := strings.CutSuffix(host, "."+d.Name)
	if !ours {
		// A trailing dot is another origin to a browser and the same server to
		// DNS: cookies of the one would not reach the other.
		return t, strings.HasSuffix(host, "."+d.Name+"."), false
	}
	port, id, _ := strings.Cut(label, "-")
	t, ok = newTarget(id, port)
	return t, true, ok
}

const pathRoot = "/p/"

func prefix(t Target) string { return pathRoot + t.Sandbox + "/" + strconv.Itoa(t.Port) }

// cutPath takes the path form apart; rest keeps its escapes and begins with "/",
// or is "" where the slash is missing.
func cutPath(escaped string) (t Target, rest string, ok bool) {
	p, found := strings.CutPrefix(escaped, pathRoot)
	if !found {
		return t, "", false
	}
	id, p, _ := strings.Cut(p, "/")
	port, after, slash := strings.Cut(p, "/")
	if t, ok = newTarget(id, port); !ok {
		return t, "", false
	}
	if slash {
		rest = "/" + after
	}
	return t, rest, true
}
