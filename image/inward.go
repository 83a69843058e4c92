package image

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

// Whoever may pull chooses a registry, and a registry chooses where its tokens
// and blobs come from. All of that is asked for from this machine, inside its
// network. So connections are checked where they are made, when the name has
// become an address: names that lead inward, redirects and realms are all the
// same there. What the operator named is let through.

// registries is what of the own network may be asked for images.
type registries struct {
	hosts    []string // names, or name:port
	prefixes []netip.Prefix
	own      func() ([]net.Addr, error)
}

// parseRegistries reads what the operator allows: "registry.lan",
// "registry.lan:5000", "10.1.2.3:5000" or "10.1.0.0/16".
func parseRegistries(allow []string) (r registries, err error) {
	r.own = net.InterfaceAddrs
	for _, s := range allow {
		if p, err := netip.ParsePrefix(s); err == nil {
			r.prefixes = append(r.prefixes, p.Masked())
			continue
		}
		host, port, err := net.SplitHostPort(s)
		if err != nil {
			host, port = strings.Trim(s, "[]"), "0"
		}
		_, perr := strconv.ParseUint(port, 10, 16)
		if _, err := netip.ParseAddr(host); perr != nil || err != nil && policy.Name(host) == "" {
			return r, sandbox.InvalidField("registry-allow", "%q is not like registry.lan, registry.lan:5000 or 10.1.0.0/16", s)
		}
		r.hosts = append(r.hosts, strings.ToLower(s))
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
			r.hosts = append(r.hosts, strings.ToLower(p))
		}
	}
	return r, nil
}

// names says whether the operator allows a host whatever its address is.
func (r registries) names(address string) bool {
	host, _, err := net.SplitHostPort(address)
	return err == nil && (slices.Contains(r.hosts, strings.ToLower(host)) || slices.Contains(r.hosts, strings.ToLower(address)))
}

var errInward = errors.New("an address of this server's own network")

// check refuses an address inside.
func (r registries) check(address string) error {
	ap, err := netip.ParseAddrPort(address)
	if err != nil {
		return errInward
	}
	a := ap.Addr().Unmap().WithZone("")
	if slices.ContainsFunc(r.prefixes, func(p netip.Prefix) bool { return p.Contains(a) }) {
		return nil
	}
	own, err := r.own()
	if err != nil {
		return errInward // it could be any
	}
	host := func(a netip.Addr) bool {
		return slices.ContainsFunc(own, func(n net.Addr) bool {
			p, err := netip.ParsePrefix(n.String())
			return err == nil && p.Addr().Unmap() == a
		})
	}
	if !policy.Public(a, host) {
		return errInward
	}
	return nil
}

// transport to registries, with bounds on connecting and on waiting for an
// answer. roots nil = the host's.
func (r registries) transport(roots *x509.CertPool) http.RoundTripper {
	t := http.DefaultTransport.(*http.Transport).Clone()
	checked := &net.Dialer{Timeout: 15 * time.Second, KeepAlive: 30 * time.Second,
		Control: func(_, address string, _ syscall.RawConn) error { return r.check(address) }}
	named := &net.Dialer{Timeout: checked.Timeout, KeepAlive: checked.KeepAlive}
	t.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
		if r.names(address) {
			return named.DialContext(ctx, network, address)
		}
		return checked.DialContext(ctx, network, address)
	}
	t.TLSClientConfig = &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}
	t.ResponseHeaderTimeout = 60 * time.Second
	return t
}
