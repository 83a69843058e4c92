package proxy

import (
	"bufio"
	"context"
	"crypto/x509"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"
)

// Upstream is how boxes reach the outside. Shared by all of a node.
type Upstream struct {
	// Dial connects from the host's namespace, or another that packets leave by.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// Resolvers that questions go to, in this order.
	Resolvers []netip.AddrPort
	// Roots that servers of intercepted TLS are checked against; nil = those of
	// the host.
	Roots *x509.CertPool
	// Host says whether an address is the machine's own.
	Host func(netip.Addr) bool
}

// NewUpstream leaves by the namespace of the process. Without resolvers those of
// /etc/resolv.conf are asked.
func NewUpstream(resolvers []netip.AddrPort) (*Upstream, error) {
	if len(resolvers) == 0 {
		var err error
		if resolvers, err = systemResolvers("/etc/resolv.conf"); err != nil {
			return nil, err
		}
	}
	d := &net.Dialer{}
	d.SetMultipathTCP(false) // an MPTCP socket cannot be spliced
	own := &ownAddresses{list: net.InterfaceAddrs}
	return &Upstream{Dial: d.DialContext, Resolvers: resolvers, Host: own.has}, nil
}

func systemResolvers(path string) (out []netip.AddrPort, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if w := strings.Fields(s.Text()); len(w) > 1 && w[0] == "nameserver" {
			if a, err := netip.ParseAddr(w[1]); err == nil {
				out = append(out, netip.AddrPortFrom(a, dnsPort))
			}
		}
	}
	return out, nil
}

// ownAddresses of the machine, read again when they are older than ownAge.
type ownAddresses struct {
	list func() ([]net.Addr, error)

	mu struct {
		sync.Mutex
		at   time.Time
		are  map[netip.Addr]bool
		fail bool
	}
}

const ownAge = 2 * time.Second

func (o *ownAddresses) has(a netip.Addr) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if now := time.Now(); o.mu.are == nil || now.Sub(o.mu.at) > ownAge {
		addrs, err := o.list()
		if o.mu.fail = err != nil; !o.mu.fail {
			o.mu.are = map[netip.Addr]bool{}
			for _, n := range addrs {
				if p, err := netip.ParsePrefix(n.String()); err == nil {
					o.mu.are[p.Addr().Unmap().WithZone("")] = true
				}
			}
			o.mu.at = now
		}
	}
	// Not known, it could be any.
	return o.mu.are == nil || o.mu.are[a]
}
