// Package inward makes connections for strangers that do not lead into this
// machine's own network.
//
// Whoever names a host chooses where this machine connects to: a registry chooses
// where its tokens and blobs come from, a shipment where its records go. All of
// that is asked for from inside. So connections are checked where they are made,
// when the name has become an address: names that lead inward, redirects and
// realms are all the same there. What the operator named is let through.
package inward

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/net/http/httpproxy"

	"github.com/cove-sandbox/cove/egress/policy"
	"github.com/cove-sandbox/cove/sandbox"
)

// Allowed is what of the own network may be reached.
type Allowed struct {
	hosts    []string // names, or name:port
	prefixes []netip.Prefix
	own      func() ([]net.Addr, error) // nil = net.InterfaceAddrs
}

// Parse reads what the operator allows: "registry.lan", "registry.lan:5000",
// "10.1.2.3:5000" or "10.1.0.0/16". field names where it was said.
func Parse(field string, allow []string) (a Allowed, err error) {
	for _, s := range allow {
		if p, err := netip.ParsePrefix(s); err == nil {
			a.prefixes = append(a.prefixes, p.Masked())
			continue
		}
		host, port, err := net.SplitHostPort(s)
		if err != nil {
			host, port = strings.Trim(s, "[]"), "0"
		}
		_, perr := strconv.ParseUint(port, 10, 16)
		if _, err := netip.ParseAddr(host); perr != nil || err != nil && policy.Name(host) == "" {
			return a, sandbox.InvalidField(field, "%q is not like registry.lan, registry.lan:5000 or 10.1.0.0/16", s)
		}
		a.hosts = append(a.hosts, strings.ToLower(s))
	}
	// A proxy of the operator's is asked for everything, and decides itself.
	env := httpproxy.FromEnvironment()
	for _, p := range []string{env.HTTPProxy, env.HTTPSProxy} {
		if _, host, ok := strings.Cut(p, "://"); ok {
			p = host
		}
		if _, host, ok := strings.Cut(p, "@"); ok {
			p = host
		}
		if p = strings.TrimRight(p, "/"); p != "" {
			a.hosts = append(a.hosts, strings.ToLower(p))
		}
	}
	return a, nil
}

// Names says whether the operator allows a host:port whatever its address is.
func (a Allowed) Names(address string) bool {
	host, _, err := net.SplitHostPort(address)
	return err == nil && (slices.Contains(a.hosts, strings.ToLower(host)) || slices.Contains(a.hosts, strings.ToLower(address)))
}

// ErrInward is why a connection is not made.
var ErrInward = errors.New("an address of this server's own network")

// check refuses an address inside.
func (a Allowed) check(address string) error {
	ap, err := netip.ParseAddrPort(address)
	if err != nil {
		return ErrInward
	}
	ip := ap.Addr().Unmap().WithZone("")
	if slices.ContainsFunc(a.prefixes, func(p netip.Prefix) bool { return p.Contains(ip) }) {
		return nil
	}
	list := net.InterfaceAddrs
	if a.own != nil {
		list = a.own
	}
	own, err := list()
	if err != nil {
		return ErrInward // it could be any
	}
	host := func(ip netip.Addr) bool {
		return slices.ContainsFunc(own, func(n net.Addr) bool {
			p, err := netip.ParsePrefix(n.String())
			return err == nil && p.Addr().Unmap() == ip
		})
	}
	if !policy.Public(ip, host) {
		return ErrInward
	}
	return nil
}

// Transport connects outward, with bounds on connecting and on waiting for an
// answer. roots nil = the host's.
func (a Allowed) Transport(roots *x509.CertPool) *http.Transport {
	t := http.DefaultTransport.(*http.Transport).Clone()
	checked := &net.Dialer{Timeout: 15 * time.Second, KeepAlive: 30 * time.Second,
		Control: func(_, address string, _ syscall.RawConn) error { return a.check(address) }}
	named := &net.Dialer{Timeout: checked.Timeout, KeepAlive: checked.KeepAlive}
	t.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
		if a.Names(address) {
			return named.DialContext(ctx, network, address)
		}
		return checked.DialContext(ctx, network, address)
	}
	t.TLSClientConfig = &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}
	t.ResponseHeaderTimeout = 60 * time.Second
	return t
}
