package policy

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/net/idna"

	"github.com/cove-sandbox/cove/sandbox"
)

const (
	maxRules       = 512
	maxPorts       = 64 // ranges of one rule
	maxConnections = 1 << 16
)

// Compile makes a network spec ready to decide, if Check has nothing against it.
// It is for whoever enforces the policy: once for each spec.
func Compile(n sandbox.Network) (*Policy, error) {
	p := &Policy{spec: n}
	err := check(n, func(r rule) {
		switch {
		case r.domain != "":
			p.domains = append(p.domains, r)
			p.denyDomain = p.denyDomain || !r.allow
		case r.prefix.IsValid():
			p.cidrs = append(p.cidrs, r)
		default:
			p.rest = append(p.rest, r)
		}
	})
	if err != nil {
		return nil, err
	}
	for _, rules := range [][]rule{p.domains, p.cidrs, p.rest} {
		slices.SortFunc(rules, compare)
	}
	return p, nil
}

// Check says what is wrong with a network spec, for whoever passes it on:
// sandbox.Invalid with the rule in Field, as network.rules[2].domain.
func Check(n sandbox.Network) error { return check(n, func(rule) {}) }

// check gives each rule to take.
func check(n sandbox.Network, take func(rule)) error {
	switch n.Mode {
	case sandbox.NetworkNone:
		if len(n.Rules) > 0 {
			return sandbox.InvalidField("network.rules", "mode none has no rules").WithHint("use mode rules, which denies what no rule allows")
		}
	case sandbox.NetworkPublic, sandbox.NetworkRules:
	default:
		return sandbox.InvalidField("network.mode", "%q is not none, public or rules", n.Mode)
	}
	if err := n.ValidateRecording("network"); err != nil {
		return err
	}
	if len(n.Rules) > maxRules {
		return sandbox.InvalidField("network.rules", "%d rules; at most %d", len(n.Rules), maxRules)
	}
	if n.Limits.BytesPerSecond < 0 || n.Limits.BytesPerSecond > 0 && n.Limits.BytesPerSecond < 1024 {
		return sandbox.InvalidField("network.limits.bytes_per_second", "%d is neither 0 nor at least 1024", n.Limits.BytesPerSecond)
	}
	if n.Limits.Connections < 0 || n.Limits.Connections > maxConnections {
		return sandbox.InvalidField("network.limits.connections", "%d is not 0 to %d", n.Limits.Connections, maxConnections)
	}
	seen := map[string]int{}
	for i, spec := range n.Rules {
		r, err := compile(i, spec)
		if err != nil {
			return err
		}
		if j, dup := seen[r.key()]; dup {
			if n.Rules[j].Action == spec.Action {
				return sandbox.InvalidField(field(i, ""), "says the same as rule %d", j)
			}
			return sandbox.InvalidField(field(i, ""), "contradicts rule %d: both match the same, one allows and one denies", j)
		}
		seen[r.key()] = i
		take(r)
	}
	return nil
}

func field(i int, name string) string {
	f := fmt.Sprintf("network.rules[%d]", i)
	if name != "" {
		f += "." + name
	}
	return f
}

func compile(i int, spec sandbox.NetworkRule) (rule, error) {
	r := rule{index: i, allow: spec.Action == sandbox.NetworkAllow, protocol: spec.Protocol}
	if !r.allow && spec.Action != sandbox.NetworkDeny {
		return r, sandbox.InvalidField(field(i, "action"), "%q is not allow or deny", spec.Action)
	}
	switch spec.Protocol {
	case "":
		r.protocol = sandbox.AnyProtocol
	case sandbox.AnyProtocol, sandbox.TCP, sandbox.UDP:
	case sandbox.ICMP:
		if r.allow {
			return r, sandbox.InvalidField(field(i, "protocol"), "icmp cannot be allowed: it never leaves a sandbox")
		}
		if len(spec.Ports) > 0 {
			return r, sandbox.InvalidField(field(i, "ports"), "icmp has no ports")
		}
	default:
		return r, sandbox.InvalidField(field(i, "protocol"), "%q is not any, tcp, udp or icmp", spec.Protocol)
	}
	var err error
	if r.ports, err = ports(i, spec.Ports); err != nil {
		return r, err
	}
	switch {
	case spec.CIDR != "" && spec.Domain != "":
		return r, sandbox.InvalidField(field(i, ""), "has a cidr and a domain; a rule has one of them")
	case spec.CIDR != "":
		r.prefix, err = cidr(i, spec.CIDR)
	case spec.Domain != "":
		if r.protocol != sandbox.AnyProtocol && r.protocol != sandbox.TCP {
			return r, sandbox.InvalidField(field(i, "protocol"), "%s carries no name that could be checked", r.protocol).WithHint("use a cidr")
		}
		r.domain, r.wildcard, err = Domain(spec.Domain)
		if err != nil {
			err = sandbox.InvalidField(field(i, "domain"), "%q %v", spec.Domain, err)
		}
	}
	return r, err
}

func ports(i int, in []sandbox.PortRange) ([]sandbox.PortRange, error) {
	if len(in) > maxPorts {
		return nil, sandbox.InvalidField(field(i, "ports"), "%d ranges; at most %d", len(in), maxPorts)
	}
	var out []sandbox.PortRange
	for j, p := range in {
		f := fmt.Sprintf("ports[%d]", j)
		if p.To == 0 {
			p.To = p.From
		}
		if p.From == 0 {
			return nil, sandbox.InvalidField(field(i, f), "there is no port 0")
		}
		if p.To < p.From {
			return nil, sandbox.InvalidField(field(i, f), "%d-%d runs backwards", p.From, p.To)
		}
		out = append(out, p)
	}
	slices.SortFunc(out, func(a, b sandbox.PortRange) int { return int(a.From) - int(b.From) })
	for j := 1; j < len(out); j++ {
		if out[j].From <= out[j-1].To {
			return nil, sandbox.InvalidField(field(i, "ports"), "%d-%d and %d-%d overlap", out[j-1].From, out[j-1].To, out[j].From, out[j].To)
		}
	}
	return out, nil
}

func cidr(i int, s string) (netip.Prefix, error) {
	bad := func(format string, args ...any) (netip.Prefix, error) {
		return netip.Prefix{}, sandbox.InvalidField(field(i, "cidr"), "%q %s", s, fmt.Sprintf(format, args...))
	}
	p, err := netip.ParsePrefix(s)
	if err != nil {
		a, aerr := netip.ParseAddr(s)
		if aerr != nil {
			return bad("is neither an address nor a CIDR such as 203.0.113.0/24")
		}
		if a.Zone() != "" {
			return bad("has a zone")
		}
		p = netip.PrefixFrom(a, a.BitLen())
	}
	if p.Addr().Is4In6() {
		return bad("is IPv4 written as IPv6; write it as IPv4")
	}
	if p.Masked() != p {
		return bad("has bits set after its prefix; did you mean %s?", p.Masked())
	}
	return p, nil
}

// key tells rules that match the same from others.
func (r rule) key() string {
	return fmt.Sprint(r.domain, r.wildcard, r.prefix, r.ports, r.protocol)
}

// Domain checks a domain as rules have it: a name, or "*." and one. What it
// returns is without that. The error says what the domain is or has.
func Domain(s string) (name string, wildcard bool, err error) {
	rest, wildcard := strings.CutPrefix(s, "*.")
	switch {
	case strings.Contains(rest, "*"):
		return "", false, fmt.Errorf("may have a * only as its first label")
	case strings.HasSuffix(rest, "."):
		return "", false, fmt.Errorf("ends with a dot")
	case strings.ContainsAny(rest, ":/@ "):
		return "", false, fmt.Errorf("is not a domain: no scheme, port or path")
	}
	if _, err := netip.ParseAddr(rest); err == nil {
		return "", false, fmt.Errorf("is an address; use cidr")
	}
	ascii, err := idna.Lookup.ToASCII(rest)
	if err != nil {
		return "", false, fmt.Errorf("is not a valid domain name: %v", err)
	}
	if n := Name(ascii); n == "" || n != ascii {
		return "", false, fmt.Errorf("is not a valid domain name")
	}
	if !strings.Contains(ascii, ".") && wildcard {
		return "", false, fmt.Errorf("covers a whole top-level domain")
	}
	return ascii, wildcard, nil
}

// Name brings a host name off the wire into the one form that rules are
// compared in, or returns "" if it is none: an address, or nothing a resolver
// would take.
func Name(s string) string {
	s = strings.TrimSuffix(strings.ToLower(s), ".")
	if len(s) == 0 || len(s) > 253 {
		return ""
	}
	numeric := true // the last label; 1.2.3.4, 0x7f.1 and 2130706433 are addresses to some resolvers
	for label := range strings.SplitSeq(s, ".") {
		if len(label) == 0 || len(label) > 63 || label[0] == '-' || label[len(label)-1] == '-' {
			return ""
		}
		numeric = label[0] >= '0' && label[0] <= '9'
		for _, c := range []byte(label) {
			if !(c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '-' || c == '_') {
				return ""
			}
			if c < '0' || c > '9' {
				numeric = numeric && strings.HasPrefix(label, "0x")
			}
		}
	}
	if numeric {
		return ""
	}
	return s
}
