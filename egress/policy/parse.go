package policy

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"strconv"
	"strings"

	"github.com/cove-sandbox/cove/sandbox"
)

// ParseRule reads a rule as people write it: "allow pypi.org", "allow
// *.example.com tcp 80,443", "deny 203.0.113.0/24 udp 1000-2000", "deny * 25".
// What it means is checked by Compile.
func ParseRule(s string) (sandbox.NetworkRule, error) {
	f := strings.Fields(s)
	if len(f) < 2 {
		return sandbox.NetworkRule{}, sandbox.InvalidField("rule", "%q is not ACTION TARGET [PROTOCOL] [PORTS]", s).WithHint("as in: allow pypi.org tcp 443")
	}
	r := sandbox.NetworkRule{Action: sandbox.NetworkAction(f[0])}
	if err := tooMuch(f[1]); err != nil {
		return r, err
	}
	switch {
	case f[1] == "*":
	case isAddress(f[1]):
		r.CIDR = f[1]
	default:
		r.Domain = f[1]
	}
	rest := f[2:]
	if len(rest) > 0 && (rest[0][0] < '0' || rest[0][0] > '9') {
		r.Protocol, rest = sandbox.NetworkProtocol(rest[0]), rest[1:]
	}
	if len(rest) > 1 {
		return r, sandbox.InvalidField("rule", "%q: what is %q?", s, rest[1])
	}
	if len(rest) == 1 {
		for part := range strings.SplitSeq(rest[0], ",") {
			from, to, isRange := strings.Cut(part, "-")
			a, err := strconv.ParseUint(from, 10, 16)
			b := a
			if err == nil && isRange {
				b, err = strconv.ParseUint(to, 10, 16)
			}
			if err != nil {
				return r, sandbox.InvalidField("rule", "%q: %q is not a port or a range of ports", s, part)
			}
			r.Ports = append(r.Ports, sandbox.PortRange{From: uint16(a), To: uint16(b)})
		}
	}
	return r, nil
}

func isAddress(s string) bool {
	host, _, _ := strings.Cut(s, "/")
	_, err := netip.ParseAddr(host)
	return err == nil || strings.Contains(s, "/")
}

// tooMuch refuses a target that says more than a host, as what is copied from a
// browser or a program's settings does, and gives the rule that it may mean.
func tooMuch(target string) error {
	what, host, port := "a URL", "", ""
	if u, err := url.Parse(target); strings.Contains(target, "://") {
		if err == nil {
			host, port = u.Hostname(), cmp.Or(u.Port(), map[string]string{"http": "80", "https": "443"}[u.Scheme])
		}
	} else {
		rest, _, hasPath := strings.Cut(target, "/")
		if _, err := netip.ParseAddr(rest); err == nil {
			return nil // or a CIDR of it
		}
		if host, port, err = net.SplitHostPort(rest); err != nil {
			host = rest
		}
		switch {
		case hasPath:
			what = "a host and a path"
		case port != "":
			what = "a host and a port"
		default:
			return nil
		}
	}
	if _, err := netip.ParseAddr(host); err != nil {
		if _, _, err := Domain(host); err != nil {
			if what != "a URL" {
				return nil // whatever it is meant to be, Compile says what is wrong with it
			}
			host, port = "its host", ""
		}
	}
	err := sandbox.InvalidField("rule", "%q is %s; a rule names a host", target, what)
	if port != "" {
		return err.WithHint("write %s, or '%s tcp %s' for this port alone", host, host, port)
	}
	return err.WithHint("write %s", host)
}

// FormatRule writes a rule as ParseRule reads it.
func FormatRule(r sandbox.NetworkRule) string {
	target := r.Domain + r.CIDR
	if target == "" {
		target = "*"
	}
	s := string(r.Action) + " " + target
	if r.Protocol != "" && r.Protocol != sandbox.AnyProtocol {
		s += " " + string(r.Protocol)
	}
	for i, p := range r.Ports {
		sep := ","
		if i == 0 {
			sep = " "
		}
		s += sep + strconv.Itoa(int(p.From))
		if p.To > p.From {
			s += fmt.Sprintf("-%d", p.To)
		}
	}
	return s
}
