package e2b

import (
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"strings"

	"github.com/cove-sandbox/cove/sandbox"
)

// networkConfig is what a sandbox may reach, as the SDKs say it.
type networkConfig struct {
	AllowOut            []string          `json:"allowOut,omitempty"`
	DenyOut             []string          `json:"denyOut,omitempty"`
	AllowInternetAccess *bool             `json:"allow_internet_access,omitempty"` // of an update
	AllowPublicTraffic  *bool             `json:"allowPublicTraffic,omitempty"`
	Rules               map[string][]rule `json:"rules,omitempty"`
	EgressProxy         any               `json:"egressProxy,omitempty"`
	MaskRequestHost     string            `json:"maskRequestHost,omitempty"`
	HTTPSPorts          []int             `json:"httpsPorts,omitempty"`
}

// rule says what is done with requests to a domain.
type rule struct {
	Transform struct {
		Headers map[string]string `json:"headers"`
	} `json:"transform"`
}

const maxRules = 10 // domains; E2B's bound

func (c *networkConfig) headers() (out []sandbox.NetworkHeader, err error) {
	if len(c.Rules) > maxRules {
		return nil, sandbox.InvalidField("network.rules", "%d domains; at most %d are accepted", len(c.Rules), maxRules)
	}
	for _, domain := range slices.Sorted(maps.Keys(c.Rules)) {
		name, _, _ := strings.Cut(domain, ":") // of getHost in domain mode: a port is none of a name's
		for _, r := range c.Rules[domain] {
			for _, header := range slices.Sorted(maps.Keys(r.Transform.Headers)) {
				out = append(out, sandbox.NetworkHeader{Domain: strings.ToLower(name), Name: header, Value: r.Transform.Headers[header]})
			}
		}
	}
	return out, nil
}

var everything = netip.MustParsePrefix("0.0.0.0/0")

// policy is a policy of Cove's. What says nothing is the server's default: whether
// sandboxes have the internet by default is for who runs it to say, and the Python
// SDK sends its own default with every create.
//
// To E2B what is allowed is allowed, whatever is denied; to Cove the most specific
// decides. So a denied range that an allowed one covers is left out.
func (c *networkConfig) policy(internet *bool) (n sandbox.Network, err error) {
	if c == nil {
		c = &networkConfig{}
	}
	if c.EgressProxy != nil {
		return n, unsupported("network.egressProxy", "egress through a proxy of the caller's")
	}
	if n.Headers, err = c.headers(); err != nil {
		return n, err
	}
	closed := internet != nil && !*internet || c.AllowInternetAccess != nil && !*c.AllowInternetAccess
	var denied, allowed []netip.Prefix
	var domains []string
	for _, s := range c.DenyOut {
		p, ok := prefix(s)
		if !ok {
			return n, sandbox.InvalidField("network.denyOut", "%.80q is not accepted; addresses and CIDRs are", s)
		}
		closed = closed || p == everything
		denied = append(denied, p)
	}
	for _, s := range c.AllowOut {
		if p, ok := prefix(s); ok {
			allowed = append(allowed, p)
			continue
		}
		domains = append(domains, strings.ToLower(s))
	}
	if len(domains) > 0 && !closed {
		return n, sandbox.InvalidField("network.allowOut", "when specifying allowed domains, 'network.denyOut' must contain '0.0.0.0/0'")
	}
	switch {
	case closed:
		n.Mode = sandbox.NetworkRules
	case len(denied)+len(allowed)+len(n.Headers) > 0:
		n.Mode = sandbox.NetworkPublic
	}
	for _, d := range domains {
		n.Rules = append(n.Rules, sandbox.NetworkRule{Action: sandbox.NetworkAllow, Domain: d})
	}
	for _, p := range allowed {
		n.Rules = append(n.Rules, sandbox.NetworkRule{Action: sandbox.NetworkAllow, CIDR: p.String()})
	}
	if closed {
		return n, nil // the rest is denied by the mode
	}
	for _, p := range denied {
		if !slices.ContainsFunc(allowed, func(a netip.Prefix) bool { return a.Bits() <= p.Bits() && a.Contains(p.Addr()) }) {
			n.Rules = append(n.Rules, sandbox.NetworkRule{Action: sandbox.NetworkDeny, CIDR: p.String()})
		}
	}
	return n, nil
}

// prefix reads a CIDR or an address.
func prefix(s string) (netip.Prefix, bool) {
	if p, err := netip.ParsePrefix(s); err == nil {
		return p.Masked(), true
	}
	a, err := netip.ParseAddr(s)
	if err != nil {
		return netip.Prefix{}, false
	}
	return netip.PrefixFrom(a, a.BitLen()), true
}

// ingress is how ports are shown. To E2B they are public unless they are said not
// to be.
func (c *networkConfig) ingress() sandbox.Ingress {
	if c == nil {
		return sandbox.Ingress{Public: true}
	}
	private := c.AllowPublicTraffic != nil && !*c.AllowPublicTraffic
	return sandbox.Ingress{Public: !private, Host: c.MaskRequestHost, TLS: c.HTTPSPorts}
}

// configOf is a policy as the SDKs read it; nil where it says nothing.
func configOf(s sandbox.Spec) *networkConfig {
	n := s.Network
	c := networkConfig{MaskRequestHost: s.Ingress.Host, HTTPSPorts: s.Ingress.TLS}
	if !s.Ingress.Public {
		c.AllowPublicTraffic = &s.Ingress.Public
	}
	for _, r := range n.Rules {
		to := &c.AllowOut
		if r.Action == sandbox.NetworkDeny {
			to = &c.DenyOut
		}
		*to = append(*to, r.Domain+r.CIDR)
	}
	for _, h := range n.Headers {
		if c.Rules == nil {
			c.Rules = map[string][]rule{}
		}
		if len(c.Rules[h.Domain]) == 0 {
			var r rule
			r.Transform.Headers = map[string]string{}
			c.Rules[h.Domain] = []rule{r}
		}
		c.Rules[h.Domain][0].Transform.Headers[h.Name] = h.Value
	}
	if n.Mode == sandbox.NetworkRules || n.Mode != sandbox.NetworkPublic && len(c.AllowOut) > 0 {
		c.DenyOut = append(c.DenyOut, everything.String())
	}
	if len(c.AllowOut)+len(c.DenyOut)+len(c.MaskRequestHost)+len(c.HTTPSPorts)+len(c.Rules) == 0 && c.AllowPublicTraffic == nil {
		return nil
	}
	return &c
}

// setNetwork is PUT /sandboxes/{id}/network: what it leaves out is cleared.
func (d *dialect) setNetwork(w http.ResponseWriter, r *http.Request) error {
	var req networkConfig
	if err := readJSON(r, &req); err != nil {
		return err
	}
	n, err := req.policy(nil)
	if err != nil {
		return err
	}
	names, err := d.withSecrets(r.Context(), n.Headers)
	if err != nil {
		return err
	}
	sb, err := d.live(r.Context(), r.PathValue("id"))
	if err == nil {
		_, _, err = d.server.SetNetwork(r.Context(), sb.ID, n)
	}
	// What rules named before and do not now may stay: without a header that names it,
	// it goes nowhere.
	for _, name := range sb.Spec.Secrets {
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	if err == nil && len(names) > len(sb.Spec.Secrets) {
		err = d.server.SetSecrets(r.Context(), sb.ID, names)
	}
	if err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
