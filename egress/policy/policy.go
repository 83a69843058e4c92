// Package policy decides what a sandbox may reach. It is pure: a compiled
// policy and a flow in, a verdict out; who enforces it is package egress/proxy.
//
// The order of a decision:
//
//  1. Rules with a domain are compared by the name of the flow, rules with a
//     CIDR by its address. Among those of a kind the most specific decides: an
//     exact domain before a wildcard, a longer wildcard before a shorter, a
//     longer prefix before a shorter; then fewer ports before more, one protocol
//     before any. Equals: deny.
//  2. If one of the two says deny, the flow is denied: an allowed name does not
//     lead to a denied address, nor an allowed address to a denied name.
//  3. Addresses that are built in as denied (private, link-local, metadata,
//     loopback, the host's own, ...) are opened only by a rule that allows a
//     CIDR inside the built-in range. An allowed name that resolves there stays
//     denied, and 0.0.0.0/0 opens none of them.
//  4. If one of the two says allow, the flow is allowed.
//  5. Rules with neither decide what is left, then the mode: public allows, rules
//     and none deny. Under public, a flow without a name is denied if any rule
//     denies a domain: it may be that domain's.
//
// A rule by domain speaks about TCP only: UDP carries no name that we can check.
package policy

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	"github.com/cove-sandbox/cove/sandbox"
)

// Flow is what a verdict is asked for.
type Flow struct {
	Name     string // "" if the protocol tells none; as Name returns it
	Addr     netip.Addr
	Port     uint16
	Protocol sandbox.NetworkProtocol
}

// Verdict on a flow.
type Verdict struct {
	Allow bool
	Rule  int // that decided; -1 = none of them
	// ByAddress says that a rule for its address allowed it: the flow goes to
	// that very address. Else it goes to what its name resolves to.
	ByAddress bool
	Reason    string
}

// Reasons of verdicts that no rule gave.
const (
	ReasonRule    = "rule"
	ReasonDefault = "mode"    // what the mode says of the rest
	ReasonNoName  = "no_name" // rules deny a domain, and the flow has no name to check
	ReasonBuiltin = "builtin_"
)

// Policy is compiled and immutable.
type Policy struct {
	spec       sandbox.Network
	domains    []rule // most specific first, denying before allowing
	cidrs      []rule
	rest       []rule
	denyDomain bool // a rule denies one
}

type rule struct {
	index    int
	allow    bool
	domain   string // without "*."
	wildcard bool
	prefix   netip.Prefix
	ports    []sandbox.PortRange // sorted, disjoint; nil = all
	protocol sandbox.NetworkProtocol
}

// Spec is what the policy was compiled from.
func (p *Policy) Spec() sandbox.Network { return p.spec }

// NeedsName says whether the name of a flow can matter.
func (p *Policy) NeedsName() bool { return len(p.domains) > 0 }

// Decide gives the verdict on a flow. host says whether an address is one of
// the machine's own; nil = none is known.
func (p *Policy) Decide(f Flow, host func(netip.Addr) bool) Verdict {
	f.Addr = f.Addr.Unmap().WithZone("")
	name, byName := first(p.domains, f)
	addr, byAddr := first(p.cidrs, f)
	switch {
	case byName && !name.allow:
		return Verdict{Rule: name.index, Reason: ReasonRule}
	case byAddr && !addr.allow:
		return Verdict{Rule: addr.index, Reason: ReasonRule}
	}
	if r, denied := builtin(f.Addr, host); denied && !(byAddr && inside(addr.prefix, r.prefix)) {
		return Verdict{Rule: -1, Reason: ReasonBuiltin + r.name}
	}
	switch {
	case byName:
		return Verdict{Allow: true, Rule: name.index, ByAddress: byAddr, Reason: ReasonRule}
	case byAddr:
		return Verdict{Allow: true, Rule: addr.index, ByAddress: true, Reason: ReasonRule}
	}
	if r, ok := first(p.rest, f); ok {
		if r.allow && f.Name == "" && p.denyDomain {
			return Verdict{Rule: -1, Reason: ReasonNoName}
		}
		return Verdict{Allow: r.allow, Rule: r.index, Reason: ReasonRule}
	}
	if p.spec.Mode != sandbox.NetworkPublic {
		return Verdict{Rule: -1, Reason: ReasonDefault}
	}
	if f.Name == "" && p.denyDomain {
		return Verdict{Rule: -1, Reason: ReasonNoName}
	}
	return Verdict{Allow: true, Rule: -1, Reason: ReasonDefault}
}

// Refuses says whether a connection of TCP can be refused before its client has
// said anything: no name that it may show would have it allowed. The verdict is
// that of the refusal.
//
// Who is let through by a name goes to what that resolves to, so the address that
// the sandbox chose says little; but one that is denied itself, by a rule or
// built in, no name needs: our resolver does not give it out, or not to this use.
func (p *Policy) Refuses(f Flow, host func(netip.Addr) bool) (Verdict, bool) {
	f.Name, f.Protocol = "", sandbox.TCP
	v := p.Decide(f, host)
	switch {
	case v.Allow:
		return v, false
	case strings.HasPrefix(v.Reason, ReasonBuiltin):
		return v, true
	case v.Rule >= 0 && p.spec.Rules[v.Rule].CIDR != "":
		return v, true
	}
	// Names that the rules speak about, and one that they do not. Of a wildcard
	// some name that is no other rule's.
	named := Flow{Port: f.Port, Protocol: sandbox.TCP}
	for _, r := range p.domains {
		named.Name = r.domain
		if r.wildcard {
			named.Name = unspoken + r.domain
		}
		if d, ok := first(p.domains, named); ok && d.allow {
			return Verdict{}, false
		}
	}
	if r, ok := first(p.rest, named); ok && r.allow || !ok && p.spec.Mode == sandbox.NetworkPublic {
		return Verdict{}, false
	}
	return v, true
}

// unspoken is in front of names that no rule names exactly: no resolver takes it.
const unspoken = "*."

// MayResolve says whether a name may be looked up: whether there is a port on
// which the policy could allow a connection to it. What a name resolves to is
// not asked, for the question itself goes to whoever serves the name, and can
// carry anything. So in mode rules a name needs a rule that allows it.
func (p *Policy) MayResolve(name string) bool {
	ports := []uint16{443, 1}
	for _, rules := range [][]rule{p.domains, p.rest} {
		for _, r := range rules {
			for _, pr := range r.ports {
				ports = append(ports, pr.From)
				if pr.To < 65535 {
					ports = append(ports, pr.To+1)
				}
			}
		}
	}
	for _, port := range ports {
		f := Flow{Name: name, Port: port, Protocol: sandbox.TCP}
		r, ok := first(p.domains, f)
		if !ok {
			r, ok = first(p.rest, f)
		}
		if ok && r.allow || !ok && p.spec.Mode == sandbox.NetworkPublic {
			return true
		}
	}
	return false
}

// first finds the rule that decides; they are sorted.
func first(rules []rule, f Flow) (rule, bool) {
	for _, r := range rules {
		if r.matches(f) {
			return r, true
		}
	}
	return rule{}, false
}

func (r rule) matches(f Flow) bool {
	if r.protocol != sandbox.AnyProtocol && r.protocol != f.Protocol {
		return false
	}
	if r.ports != nil && !slices.ContainsFunc(r.ports, func(p sandbox.PortRange) bool { return p.From <= f.Port && f.Port <= p.To }) {
		return false
	}
	switch {
	case r.domain != "":
		if f.Protocol != sandbox.TCP || f.Name == "" {
			return false
		}
		if r.wildcard {
			return strings.HasSuffix(f.Name, "."+r.domain)
		}
		return f.Name == r.domain
	case r.prefix.IsValid():
		return r.prefix.Contains(f.Addr)
	}
	return true
}

// compare orders rules of one kind by who decides.
func compare(a, b rule) int {
	yes := func(x bool) int {
		if x {
			return 0
		}
		return 1
	}
	return cmp.Or(
		cmp.Compare(yes(!a.wildcard), yes(!b.wildcard)),
		cmp.Compare(len(b.domain), len(a.domain)), // of two wildcards that match one name the longer has more labels
		cmp.Compare(b.prefix.Bits(), a.prefix.Bits()),
		cmp.Compare(count(a.ports), count(b.ports)),
		cmp.Compare(yes(a.protocol != sandbox.AnyProtocol), yes(b.protocol != sandbox.AnyProtocol)),
		cmp.Compare(yes(!a.allow), yes(!b.allow)),
		cmp.Compare(a.index, b.index))
}

func count(ports []sandbox.PortRange) int {
	if ports == nil {
		return 1 << 16
	}
	n := 0
	for _, p := range ports {
		n += int(p.To) - int(p.From) + 1
	}
	return n
}

func inside(p, of netip.Prefix) bool { return of.Bits() <= p.Bits() && of.Contains(p.Addr()) }

// Opens says whether some rule allows an address that is built in as denied.
func (p *Policy) Opens(a netip.Addr, host func(netip.Addr) bool) bool {
	a = a.Unmap().WithZone("")
	d, is := builtin(a, host)
	return is && slices.ContainsFunc(p.cidrs, func(r rule) bool { return r.allow && r.prefix.Contains(a) && inside(r.prefix, d.prefix) })
}
