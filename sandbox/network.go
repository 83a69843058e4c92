package sandbox

import (
	"net/netip"
	"time"
)

// NetworkMode is what happens to traffic that no rule speaks about.
type NetworkMode string

const (
	NetworkNone   NetworkMode = "none"   // no device but the loopback
	NetworkPublic NetworkMode = "public" // the internet; nothing private, of the host or of other sandboxes
	NetworkRules  NetworkMode = "rules"  // nothing but what rules allow
)

// Network is what a sandbox may reach. Package egress/policy says what it means;
// the zero value is the server's default.
type Network struct {
	Mode   NetworkMode   `json:"mode,omitempty"`
	Rules  []NetworkRule `json:"rules,omitempty"`
	Limits NetworkLimits `json:"limits,omitzero"`

	Headers []NetworkHeader `json:"headers,omitempty"` // that requests leave with

	Record *NetworkRecord `json:"record,omitempty"`
	Replay *NetworkReplay `json:"replay,omitempty"`
}

// WithDefault returns n with its mode: rules where it has any, else the default.
func (n Network) WithDefault(mode NetworkMode) Network {
	switch {
	case n.Mode != "":
	case n.Replay != nil && len(n.Rules) == 0:
		n.Mode = NetworkNone
	case len(n.Rules) > 0:
		n.Mode = NetworkRules
	case mode != "":
		n.Mode = mode
	default:
		n.Mode = NetworkNone
	}
	return n
}

// IsZero says that nothing was asked for.
func (n Network) IsZero() bool {
	return n.saysNothing() && n.Record == nil && n.Replay == nil
}

func (n Network) saysNothing() bool {
	return n.Mode == "" && len(n.Rules) == 0 && len(n.Headers) == 0 && n.Limits == NetworkLimits{}
}

// From is n with what it leaves open taken from the network of what a sandbox
// is made of. It replays what that did and never records what that did: two
// sandboxes on one recording would be nobody's episode.
func (n Network) From(of Network) Network {
	if n.saysNothing() && n.Replay == nil {
		of.Record = n.Record
		return of
	}
	return n
}

// NetworkRule allows or denies what it matches: a CIDR, a domain, or with
// neither every destination; of those the ports and the protocol.
type NetworkRule struct {
	Action   NetworkAction   `json:"action"`
	CIDR     string          `json:"cidr,omitempty"`
	Domain   string          `json:"domain,omitempty"` // "pypi.org", or "*.pypi.org" for every name below it
	Ports    []PortRange     `json:"ports,omitempty"`  // none = every port
	Protocol NetworkProtocol `json:"protocol,omitempty"`
}

// NetworkHeader is a header that requests to a domain leave with, over what the
// client set. It is no secret: see Secret for what is.
type NetworkHeader struct {
	Domain string `json:"domain"` // or "*.example.com"
	Name   string `json:"name"`
	Value  string `json:"value"`
}

// NetworkAction of a rule.
type NetworkAction string

const (
	NetworkAllow NetworkAction = "allow"
	NetworkDeny  NetworkAction = "deny"
)

// NetworkProtocol of a rule; "" is any.
type NetworkProtocol string

const (
	AnyProtocol NetworkProtocol = "any"
	TCP         NetworkProtocol = "tcp"
	UDP         NetworkProtocol = "udp"
	ICMP        NetworkProtocol = "icmp"
)

// PortRange is From to To, both included. To 0 is From alone.
type PortRange struct {
	From uint16 `json:"from"`
	To   uint16 `json:"to,omitempty"`
}

// NetworkLimits bound the traffic of a sandbox. 0 = the node's default.
type NetworkLimits struct {
	BytesPerSecond int64 `json:"bytes_per_second,omitempty"` // up and down together
	Connections    int   `json:"connections,omitempty"`      // open at a time
}

// NetworkFlow is one attempt of a sandbox to reach something.
type NetworkFlow struct {
	Start    time.Time       `json:"start"`
	End      time.Time       `json:"end,omitzero"` // zero = still open
	Name     string          `json:"name,omitempty"`
	Address  netip.Addr      `json:"address"` // it was connected to; where it was not, what the sandbox asked for
	Port     uint16          `json:"port"`
	Protocol NetworkProtocol `json:"protocol"` // or "dns"
	Sent     int64           `json:"sent"`     // bytes out of the sandbox
	Received int64           `json:"received"`
	Allowed  bool            `json:"allowed"`
	Rule     int             `json:"rule"` // index into the policy's rules, -1 = none of them
	Reason   string          `json:"reason"`
}

// NetworkStatus is the policy in force and what came of it.
type NetworkStatus struct {
	Network    Network       `json:"network"`
	Generation int64         `json:"generation"` // of the policy; 1 at creation, +1 with each change
	Allowed    int64         `json:"allowed"`    // flows since creation
	Denied     int64         `json:"denied"`
	Sent       int64         `json:"sent,omitempty"` // bytes of all flows of its kernel
	Received   int64         `json:"received,omitempty"`
	Flows      []NetworkFlow `json:"flows,omitempty"` // the last ones, oldest first

	Recording *Recording    `json:"recording,omitempty"` // under way
	Replay    *ReplayStatus `json:"replay,omitempty"`    // under way
	Missed    int64         `json:"missed,omitempty"`    // requests that the replay had no answer for
}
