package egresstest

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/egress/netns"
	"github.com/cove-sandbox/cove/egress/policy"
	"github.com/cove-sandbox/cove/egress/proxy"
	"github.com/cove-sandbox/cove/sandbox"
)

// Attacker sits where a sandbox would.
type Attacker struct {
	Box   *proxy.Box
	World *World
	ns    *netns.Namespace // of the attacker
	slot  *netns.Namespace
}

// NewAttacker is behind a Box with a policy, in front of the world.
func NewAttacker(t testing.TB, w *World, n sandbox.Network) *Attacker {
	t.Helper()
	dir := t.TempDir()
	slot, err := netns.Make(dir, "slot")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := netns.Remove(dir + "/slot"); err != nil {
			t.Error(err)
		}
	})
	a := &Attacker{World: w, ns: plain(t), slot: slot}
	a.Box = a.Serve(t, n, 1)
	var inner netlink.Link
	target, err := os.Open(a.ns.Path())
	if err != nil {
		t.Fatal(err)
	}
	defer target.Close()
	do(t, slot, func() (err error) {
		if inner, err = netlink.LinkByName("inner"); err != nil {
			return err
		}
		return netlink.LinkSetNsFd(inner, int(target.Fd()))
	})
	do(t, a.ns, func() error {
		if err := os.WriteFile("/proc/sys/net/ipv6/conf/inner/disable_ipv6", []byte("0"), 0); err != nil {
			return err
		}
		l, err := netlink.LinkByName("inner")
		if err != nil {
			return err
		}
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		if err := errors.Join(netlink.LinkSetUp(lo), netlink.LinkSetARPOn(l), netlink.LinkSetUp(l)); err != nil {
			return err
		}
		for _, f := range []struct{ own, gate netip.Prefix }{{netns.Inner4, netns.Gateway4}, {netns.Inner6, netns.Gateway6}} {
			ip := &net.IPNet{IP: f.own.Addr().AsSlice(), Mask: net.CIDRMask(f.own.Bits(), f.own.Addr().BitLen())}
			family := unix.AF_INET
			if f.own.Addr().Is6() {
				family = unix.AF_INET6
			}
			if err := errors.Join(
				netlink.AddrAdd(l, &netlink.Addr{IPNet: ip, Flags: unix.IFA_F_NODAD}),
				netlink.NeighSet(&netlink.Neigh{LinkIndex: l.Attrs().Index, Family: family, State: netlink.NUD_PERMANENT, IP: f.gate.Addr().AsSlice(), HardwareAddr: netns.GateMAC}),
				netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Gw: f.gate.Addr().AsSlice()})); err != nil {
				return err
			}
		}
		return nil
	})
	return a
}

// Serve opens a Box on the attacker's namespace, in place of the one before,
// which must be closed. It is closed with the test.
func (a *Attacker) Serve(t testing.TB, n sandbox.Network, generation int64) *proxy.Box {
	t.Helper()
	p, err := policy.Compile(n)
	if err != nil {
		t.Fatal(err)
	}
	ns, err := netns.Open(a.slot.Path())
	if err != nil {
		t.Fatal(err)
	}
	socks, err := ns.Listen(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	b := proxy.Open(ns, socks, a.World.Upstream(), p, generation, nil, slog.New(slog.DiscardHandler))
	t.Cleanup(func() { b.Close() })
	a.Box = b
	return b
}

// Do runs f in the attacker's namespace.
func (a *Attacker) Do(f func() error) error { return a.ns.Do(f) }

// patience of an attempt: one that is dropped silently waits it out.
const patience = 1500 * time.Millisecond

// Dial connects as the sandbox would.
func (a *Attacker) Dial(network, address string) (c net.Conn, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	var d net.Dialer
	d.SetMultipathTCP(false)
	err = a.ns.Do(func() error { c, err = d.DialContext(ctx, network, address); return err })
	if err == nil {
		c.SetDeadline(time.Now().Add(15 * time.Second))
	}
	return c, err
}

// Raw sends text and returns all that comes back.
func (a *Attacker) Raw(address, text string) string {
	c, err := a.Dial("tcp", address)
	if err != nil {
		return fail(err)
	}
	defer c.Close()
	io.WriteString(c, text)
	if text != "" {
		c.(*net.TCPConn).CloseWrite()
	}
	b, err := io.ReadAll(c)
	if err != nil && len(b) == 0 {
		return fail(err)
	}
	return string(b)
}

// Line returns the first line that a server says by itself.
func (a *Attacker) Line(address string) string {
	c, err := a.Dial("tcp", address)
	if err != nil {
		return fail(err)
	}
	defer c.Close()
	s, err := bufio.NewReader(c).ReadString('\n')
	if err != nil {
		return fail(err)
	}
	return s
}

// HTTP asks an address for a host, "" = that of the address.
func (a *Attacker) HTTP(address, host string) string {
	return a.Get(address, "http://"+address+"/", host)
}

// Get asks an address for a URL.
func (a *Attacker) Get(address, url, host string) string {
	req, err := http.NewRequest("GET", url, nil)
	if err != nil {
		return fail(err)
	}
	req.Host = host
	tr := &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) { return a.Dial("tcp", address) }, DisableKeepAlives: true}
	res, err := (&http.Client{Transport: tr, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}).Do(req)
	if err != nil {
		return fail(err)
	}
	defer res.Body.Close()
	b, _ := io.ReadAll(res.Body)
	if res.Header.Get("Cove-Egress") != "" {
		return "denied"
	}
	if to := res.Header.Get("Location"); to != "" {
		return "redirect " + to
	}
	return string(b)
}

// HTTPS asks an address with a server name ("" = none) for a host.
func (a *Attacker) HTTPS(address, sni, host string, change ...func(*tls.Config)) string {
	c, err := a.Dial("tcp", address)
	if err != nil {
		return fail(err)
	}
	defer c.Close()
	cfg := &tls.Config{ServerName: sni, RootCAs: a.World.CA}
	if sni == "" {
		cfg.InsecureSkipVerify = true
	}
	for _, f := range change {
		f(cfg)
	}
	tc := tls.Client(c, cfg)
	if _, err := fmt.Fprintf(tc, "GET / HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n", host); err != nil {
		return fail(err)
	}
	res, err := http.ReadResponse(bufio.NewReader(tc), nil)
	if err != nil {
		return fail(err)
	}
	b, _ := io.ReadAll(res.Body)
	return string(b)
}

// Client reaches an address whatever the URL says, and trusts no certificates
// but those in PEM.
func (a *Attacker) Client(t testing.TB, address string, pem []byte) *http.Client {
	t.Helper()
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(pem)
	tr := &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) { return a.Dial("tcp", address) },
		TLSClientConfig: &tls.Config{RootCAs: roots}, ForceAttemptHTTP2: true, DisableCompression: true}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// UDP sends a datagram and waits for one.
func (a *Attacker) UDP(address, text string) string {
	c, err := a.Dial("udp", address)
	if err != nil {
		return fail(err)
	}
	defer c.Close()
	io.WriteString(c, text)
	c.SetReadDeadline(time.Now().Add(patience))
	buf := make([]byte, 2048)
	n, err := c.Read(buf)
	if err != nil {
		return fail(err)
	}
	return string(buf[:n])
}

// Ask asks a resolver.
func (a *Attacker) Ask(network, server, name string, typ uint16) string {
	c, err := a.Dial(network, net.JoinHostPort(server, "53"))
	if err != nil {
		return fail(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(5 * time.Second))
	q := new(dns.Msg)
	q.SetQuestion(dns.Fqdn(name), typ)
	dc := &dns.Conn{Conn: c}
	if err := dc.WriteMsg(q); err != nil {
		return fail(err)
	}
	m, err := dc.ReadMsg()
	if err != nil {
		return fail(err)
	}
	out := dns.RcodeToString[m.Rcode]
	for _, rr := range m.Answer {
		switch rr := rr.(type) {
		case *dns.A:
			out += " " + rr.A.String()
		case *dns.AAAA:
			out += " " + rr.AAAA.String()
		default:
			return out + " " + strconv.Itoa(len(m.Answer)) + " records"
		}
	}
	return out
}

// Packet writes a whole Ethernet frame of an IPv4 packet onto the wire.
func (a *Attacker) Packet(source, dest string, protocol byte, payload []byte) error {
	return a.ns.Do(func() error {
		l, err := netlink.LinkByName("inner")
		if err != nil {
			return err
		}
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		var f bytes.Buffer
		f.Write(netns.GateMAC)
		f.Write(netns.InnerMAC)
		f.Write([]byte{8, 0})
		h := []byte{0x45, 0, 0, byte(20 + len(payload)), 0, 1, 0, 0, 64, protocol, 0, 0}
		h = append(h, netip.MustParseAddr(source).AsSlice()...)
		h = append(h, netip.MustParseAddr(dest).AsSlice()...)
		sum := 0
		for i := 0; i < len(h); i += 2 {
			sum += int(h[i])<<8 | int(h[i+1])
		}
		sum = sum&0xffff + sum>>16
		sum = ^(sum&0xffff + sum>>16)
		h[10], h[11] = byte(sum>>8), byte(sum)
		f.Write(h)
		f.Write(payload)
		return unix.Sendto(fd, f.Bytes(), 0, &unix.SockaddrLinklayer{Ifindex: l.Attrs().Index, Protocol: 8, Halen: 6, Addr: [8]byte(append(append([]byte{}, netns.GateMAC...), 0, 0))})
	})
}

// fail puts an error in a word.
func fail(err error) string {
	var ne net.Error
	switch {
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.EPIPE):
		return "reset"
	case errors.Is(err, syscall.ECONNREFUSED):
		return "refused"
	case errors.As(err, &ne) && ne.Timeout():
		return "timeout"
	}
	return "error: " + err.Error()
}
