// Package egresstest is an internet for tests: a network namespace with servers
// (HTTP, HTTPS, DNS, UDP, a banner) at made-up public addresses, and some at
// addresses that no sandbox may reach, which notes who was reached. And an
// attacker: a Linux network stack in place of a sandbox's, with raw sockets and
// all that root has, which a sandbox does not.
package egresstest

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"maps"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/egress/netns"
	"github.com/cove-sandbox/cove/egress/proxy"
)

// Addresses of the world.
const (
	Good, Good6   = "203.0.113.10", "2001:db8::10" // good.test, www.good.test
	Other, Other6 = "203.0.113.20", "2001:db8::20" // other.test
	Evil, Evil6   = "203.0.113.66", "2001:db8::66" // evil.test
	DNS           = "203.0.113.53"
	PublicDNS     = "203.0.113.88" // a resolver that answers anything, as 8.8.8.8
	Private       = "10.9.9.9"
	Private6      = "fd12::9"
	Metadata      = "169.254.169.254"
	Metadata6     = "fd00:ec2::254"
	Host          = "198.51.100.1" // the machine's own
)

var all = []string{Good, Good6, Other, Other6, Evil, Evil6, DNS, PublicDNS, Private, Private6, Metadata, Metadata6, Host}

// World is the internet.
type World struct {
	asked sync.Map // by address: *atomic.Int64

	ns  *netns.Namespace
	CA  *x509.CertPool
	key tls.Certificate

	mu struct {
		sync.Mutex
		hits map[string]int // by "address:port/protocol" that something arrived at
		zone map[string][]netip.Addr
		asks []string
	}
}

// NewWorld makes a world that ends with the test.
func NewWorld(t testing.TB) *World {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	w := &World{ns: plain(t)}
	w.mu.hits, w.mu.zone = map[string]int{}, map[string][]netip.Addr{}
	do(t, w.ns, func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		for _, a := range all {
			addr := netip.MustParseAddr(a)
			if err := netlink.AddrAdd(lo, &netlink.Addr{IPNet: &net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(addr.BitLen(), addr.BitLen())}, Flags: unix.IFA_F_NODAD}); err != nil {
				return fmt.Errorf("%s: %w", a, err)
			}
		}
		return netlink.LinkSetUp(lo)
	})
	w.Name("good.test", Good, Good6)
	w.Name("www.good.test", Good, Good6)
	w.Name("other.test", Other, Other6)
	w.Name("evil.test", Evil, Evil6)
	w.Name("rebind.good.test", Private, Private6)
	w.Name("meta.good.test", Metadata, Metadata6)
	w.Name("host.good.test", Host)
	w.Name("mixed.good.test", Private, Good)
	w.certificate(t)
	for _, a := range all {
		w.serve(t, a)
	}
	return w
}

// Name sets what a name resolves to.
func (w *World) Name(name string, addrs ...string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.mu.zone[name] = nil
	for _, a := range addrs {
		w.mu.zone[name] = append(w.mu.zone[name], netip.MustParseAddr(a))
	}
}

// Upstream leaves into the world.
func (w *World) Upstream() *proxy.Upstream {
	return &proxy.Upstream{Dial: w.Dial, Roots: w.CA, Resolvers: []netip.AddrPort{netip.MustParseAddrPort(DNS + ":53")},
		Host: func(a netip.Addr) bool {
			n, _ := w.asked.LoadOrStore(a, new(atomic.Int64))
			n.(*atomic.Int64).Add(1)
			return a == netip.MustParseAddr(Host)
		}}
}

// Asked counts how often a policy was asked about an address since the last call.
func (w *World) Asked(address string) int64 {
	n, ok := w.asked.Load(netip.MustParseAddr(address))
	if !ok {
		return 0
	}
	return n.(*atomic.Int64).Swap(0)
}

// Dial connects from within the world.
func (w *World) Dial(ctx context.Context, network, address string) (c net.Conn, err error) {
	var d net.Dialer
	d.SetMultipathTCP(false)
	derr := w.ns.Do(func() error { c, err = d.DialContext(ctx, network, address); return err })
	return c, derr
}

// Listen in the world.
func (w *World) Listen(address string) (l net.Listener, err error) {
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	err = w.ns.Do(func() error { l, err = lc.Listen(context.Background(), "tcp", address); return err })
	return l, err
}

// PEM is the certificate that CA holds.
func (w *World) PEM() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: w.key.Certificate[0]})
}

// Unreachable makes an address one of which routers say that its host is not
// there. Others that nobody has are of networks that there is no way to.
func (w *World) Unreachable(t testing.TB, address string) {
	t.Helper()
	a := netip.MustParseAddr(address)
	do(t, w.ns, func() error {
		return netlink.RouteAdd(&netlink.Route{Dst: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}, Type: unix.RTN_UNREACHABLE})
	})
}

// Path of the world's namespace.
func (w *World) Path() string { return w.ns.Path() }

// Hits returns what was reached since the last call, DNS left out, and what
// names were asked for.
func (w *World) Hits() (reached, asked []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	reached, asked = slices.Sorted(maps.Keys(w.mu.hits)), w.mu.asks
	w.mu.hits, w.mu.asks = map[string]int{}, nil
	return reached, asked
}

func (w *World) hit(a net.Addr, what string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	ap, _ := netip.ParseAddrPort(a.String())
	w.mu.hits[ap.Addr().Unmap().String()+" "+what]++
}

// countedListener notes connections.
type countedListener struct {
	net.Listener
	w    *World
	what string
}

func (l countedListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err == nil {
		l.w.hit(c.LocalAddr(), l.what)
	}
	return c, err
}

func (w *World) serve(t testing.TB, addr string) {
	listen := func(port, what string) net.Listener {
		l, err := w.Listen(net.JoinHostPort(addr, port))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		return countedListener{l, w, what}
	}
	site := &http.Server{Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/redirect":
			http.Redirect(rw, r, r.URL.Query().Get("to"), http.StatusFound)
		case "/echo":
			io.Copy(rw, r.Body)
		default:
			fmt.Fprintf(rw, "%s at %s", r.Host, addr)
		}
	})}
	t.Cleanup(func() { site.Close() })
	go site.Serve(listen("80", "http"))
	go site.Serve(listen("8080", "http-8080"))
	go site.Serve(tls.NewListener(listen("443", "https"), &tls.Config{Certificates: []tls.Certificate{w.key}}))
	banner := listen("22", "banner")
	go func() {
		for {
			c, err := banner.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				fmt.Fprintf(c, "hello from %s\n", addr)
				io.Copy(c, c)
			}()
		}
	}()
	var u net.PacketConn
	do(t, w.ns, func() (err error) { u, err = net.ListenPacket("udp", net.JoinHostPort(addr, "9999")); return err })
	t.Cleanup(func() { u.Close() })
	go func() {
		buf := make([]byte, 2048)
		for {
			n, from, err := u.ReadFrom(buf)
			if err != nil {
				return
			}
			w.hit(u.LocalAddr(), "udp")
			u.WriteTo(append([]byte(addr+" "), buf[:n]...), from)
		}
	}()
	if addr != DNS && addr != PublicDNS && addr != Private {
		return
	}
	h := dns.HandlerFunc(func(rw dns.ResponseWriter, q *dns.Msg) {
		r := w.resolve(q, addr)
		if _, ok := rw.LocalAddr().(*net.UDPAddr); ok {
			r.Truncate(1232)
		}
		rw.WriteMsg(r)
	})
	var pc net.PacketConn
	do(t, w.ns, func() (err error) { pc, err = net.ListenPacket("udp", net.JoinHostPort(addr, "53")); return err })
	l, err := w.Listen(net.JoinHostPort(addr, "53"))
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []*dns.Server{{PacketConn: pc, Handler: h}, {Listener: l, Handler: h}} {
		go s.ActivateAndServe()
		t.Cleanup(func() { s.Shutdown() })
	}
}

// HTTPS serves a site of the test's own, HTTP/2 too, with the world's
// certificate.
func (w *World) HTTPS(t testing.TB, address string, h http.Handler) {
	t.Helper()
	l, err := w.Listen(address)
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: h, TLSConfig: &tls.Config{Certificates: []tls.Certificate{w.key}}, ErrorLog: log.New(io.Discard, "", 0)}
	t.Cleanup(func() { srv.Close() })
	go srv.ServeTLS(l, "", "")
}

// TLS is a server's end of a connection, with the world's certificate.
func (w *World) TLS(c net.Conn) *tls.Conn {
	return tls.Server(c, &tls.Config{Certificates: []tls.Certificate{w.key}})
}

func (w *World) resolve(q *dns.Msg, at string) *dns.Msg {
	r := new(dns.Msg)
	r.SetReply(q)
	name := strings.TrimSuffix(strings.ToLower(q.Question[0].Name), ".")
	w.mu.Lock()
	defer w.mu.Unlock()
	w.mu.asks = append(w.mu.asks, name)
	if at != DNS {
		w.mu.hits[at+" dns"]++
	}
	addrs, ok := w.mu.zone[name]
	if !ok && at == DNS {
		r.Rcode = dns.RcodeNameError
		return r
	}
	head := dns.RR_Header{Name: q.Question[0].Name, Class: dns.ClassINET, Ttl: 300, Rrtype: q.Question[0].Qtype}
	for _, a := range addrs {
		switch {
		case a.Is4() && head.Rrtype == dns.TypeA:
			r.Answer = append(r.Answer, &dns.A{Hdr: head, A: a.AsSlice()})
		case a.Is6() && head.Rrtype == dns.TypeAAAA:
			r.Answer = append(r.Answer, &dns.AAAA{Hdr: head, AAAA: a.AsSlice()})
		}
	}
	if head.Rrtype == dns.TypeTXT {
		for range 40 { // more than a datagram holds
			r.Answer = append(r.Answer, &dns.TXT{Hdr: head, Txt: []string{strings.Repeat("t", 100)}})
		}
	}
	return r
}

func (w *World) certificate(t testing.TB) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	cert := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "world"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames: []string{"good.test", "*.good.test", "other.test", "evil.test"}}
	der, err := x509.CreateCertificate(rand.Reader, cert, cert, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	w.CA = x509.NewCertPool()
	w.CA.AddCert(parsed)
	w.key = tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// plain makes a namespace with nothing in it.
func plain(t testing.TB) *netns.Namespace {
	t.Helper()
	path := t.TempDir() + "/ns"
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	made := make(chan error)
	go func() {
		runtime.LockOSThread() // for good: the thread ends with it
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			err = unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, "")
		}
		made <- err
	}()
	if err := <-made; err != nil {
		t.Fatal(err)
	}
	ns, err := netns.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ns.Close()
		if err := netns.Remove(path); err != nil {
			t.Error(err)
		}
	})
	return ns
}

func do(t testing.TB, ns *netns.Namespace, f func() error) {
	t.Helper()
	if err := ns.Do(f); err != nil {
		t.Fatal(err)
	}
}
