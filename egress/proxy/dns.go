package proxy

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/miekg/dns"

	"github.com/cove-sandbox/cove/egress/policy"
	"github.com/cove-sandbox/cove/sandbox"
)

const (
	dnsPort      = 53
	dnsTimeout   = 3 * time.Second // for one resolver
	maxQuestions = 64              // of a sandbox under way
	// maxTTL is how long a sandbox may go by an old answer: a connection by
	// name goes to a fresh one anyway.
	maxTTL = 30 * time.Second
	// dnsProtocol is what questions that were refused are listed as.
	dnsProtocol sandbox.NetworkProtocol = "dns"

	reasonPrivate = "private_answer" // a public name that resolves to private addresses
)

// asked are the types of record that a sandbox may ask for. HTTPS and SVCB are
// answered with nothing: they carry the keys for a ClientHello whose name we
// could not read.
var asked = map[uint16]bool{dns.TypeA: true, dns.TypeAAAA: true, dns.TypeCNAME: true, dns.TypeMX: true, dns.TypeTXT: true,
	dns.TypeSRV: true, dns.TypeNS: true, dns.TypeSOA: true, dns.TypeCAA: true}

// answer answers a question of the sandbox. nil = it is none.
func (b *Box) answer(ctx context.Context, packet []byte, udp bool) []byte {
	q := new(dns.Msg)
	if err := q.Unpack(packet); err != nil || q.Response {
		return nil
	}
	r := b.lookUp(ctx, q)
	if r.Rcode != dns.RcodeSuccess {
		b.noteUnfound(q)
	}
	return pack(r, q, udp)
}

func (b *Box) reply(q *dns.Msg, rcode int) *dns.Msg {
	r := new(dns.Msg)
	r.SetRcode(q, rcode)
	r.RecursionAvailable = true
	if q.IsEdns0() != nil {
		r.SetEdns0(1232, false)
	}
	return r
}

func (b *Box) lookUp(ctx context.Context, q *dns.Msg) *dns.Msg {
	if q.Opcode != dns.OpcodeQuery || len(q.Question) != 1 || q.Question[0].Qclass != dns.ClassINET {
		return b.reply(q, dns.RcodeRefused)
	}
	question := q.Question[0]
	name := policy.Name(question.Name)
	f := policy.Flow{Name: name, Port: dnsPort, Protocol: dnsProtocol}
	if r := b.replay(); r != nil {
		return b.lookUpRecording(q, f, r)
	}
	pol := b.current()
	switch {
	case name == "" || !pol.MayResolve(name):
		// NXDOMAIN and not REFUSED: programs give up at once instead of trying
		// again. Without a SOA nobody remembers it.
		b.refuse(f, policy.Verdict{Rule: -1, Reason: policy.ReasonDefault})
		return b.reply(q, dns.RcodeNameError)
	case dns.IsSubDomain("in-addr.arpa.", question.Name) || dns.IsSubDomain("ip6.arpa.", question.Name):
		return b.reply(q, dns.RcodeNameError)
	case !asked[question.Qtype]:
		return b.reply(q, dns.RcodeSuccess)
	}
	a, err := b.ask(ctx, name, question.Qtype)
	if err != nil {
		return b.reply(q, dns.RcodeServerFailure)
	}
	r := b.reply(q, a.Rcode)
	for _, rr := range a.Answer {
		rr = dns.Copy(rr)
		rr.Header().Ttl = min(rr.Header().Ttl, uint32(maxTTL/time.Second))
		if addr := address(rr); addr.IsValid() {
			// Rebinding: what a name leads to must be what anybody may reach, or
			// a rule names the address.
			if !policy.Public(addr, b.up.Host) && !pol.Opens(addr, b.up.Host) {
				f.Addr = addr
				b.refuse(f, policy.Verdict{Rule: -1, Reason: reasonPrivate})
				continue
			}
			b.names.remember(addr, name)
		}
		r.Answer = append(r.Answer, rr)
	}
	return r
}

// resolve finds the addresses of a name.
func (b *Box) resolve(ctx context.Context, name string) (addrs []netip.Addr, err error) {
	var results [2]*dns.Msg
	var errs [2]error
	var wg sync.WaitGroup
	for i, typ := range []uint16{dns.TypeA, dns.TypeAAAA} {
		wg.Go(func() { results[i], errs[i] = b.ask(ctx, name, typ) })
	}
	wg.Wait()
	for _, r := range results {
		if r == nil {
			continue
		}
		for _, rr := range r.Answer {
			if a := address(rr); a.IsValid() {
				addrs = append(addrs, a)
			}
		}
	}
	if len(addrs) == 0 {
		return nil, errors.Join(errs[:]...)
	}
	return addrs, nil
}

func address(rr dns.RR) netip.Addr {
	var ip net.IP
	switch rr := rr.(type) {
	case *dns.A:
		ip = rr.A
	case *dns.AAAA:
		ip = rr.AAAA
	}
	a, _ := netip.AddrFromSlice(ip)
	return a.Unmap()
}

// ask puts a question of our own to the resolvers, nothing of the sandbox's
// packet but name and type. The answer is shared: it must not be changed.
func (b *Box) ask(ctx context.Context, name string, typ uint16) (*dns.Msg, error) {
	if m := b.names.answer(name, typ); m != nil {
		return m, nil
	}
	q := new(dns.Msg)
	q.SetQuestion(dns.Fqdn(name), typ)
	q.SetEdns0(1232, false)
	err := error(sandbox.Errorf(sandbox.Unavailable, "egress.resolve", "the node knows no resolver").WithHint("cove serve --dns ADDRESS"))
	for try := range 2 {
		for _, server := range b.up.Resolvers {
			var m *dns.Msg
			m, err = exchange(ctx, b.up.Dial, "udp", server, q)
			if err == nil && m.Truncated {
				m, err = exchange(ctx, b.up.Dial, "tcp", server, q)
			}
			if err == nil && (m.Rcode == dns.RcodeSuccess || m.Rcode == dns.RcodeNameError || try == 1) {
				b.names.keep(name, typ, m)
				return m, nil
			}
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
		}
	}
	return nil, err
}

func exchange(ctx context.Context, dial func(context.Context, string, string) (net.Conn, error), network string, server netip.AddrPort, q *dns.Msg) (*dns.Msg, error) {
	ctx, cancel := context.WithTimeout(ctx, dnsTimeout)
	defer cancel()
	nc, err := dial(ctx, network, server.String())
	if err != nil {
		return nil, err
	}
	defer nc.Close()
	until, _ := ctx.Deadline()
	nc.SetDeadline(until)
	stop := context.AfterFunc(ctx, func() { nc.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	c := &dns.Conn{Conn: nc, UDPSize: 4096}
	q = q.Copy()
	q.Id = dns.Id()
	if err := c.WriteMsg(q); err != nil {
		return nil, err
	}
	for {
		m, err := c.ReadMsg()
		if err != nil {
			return nil, err
		}
		if m.Id == q.Id && m.Response && slices.Equal(m.Question, q.Question) {
			return m, nil
		}
	}
}

// pack brings an answer into the size that the question allows.
func pack(r, q *dns.Msg, udp bool) []byte {
	size := dns.MaxMsgSize
	if udp {
		size = dns.MinMsgSize
		if e := q.IsEdns0(); e != nil {
			size = min(max(size, int(e.UDPSize())), 4096)
		}
	}
	r.Truncate(size)
	out, err := r.Pack()
	if err != nil {
		return nil
	}
	return out
}

// serveDNSConn answers questions over TCP.
func (b *Box) serveDNSConn(nc net.Conn) {
	c := &dns.Conn{Conn: nc}
	for range 1000 {
		nc.SetDeadline(time.Now().Add(sniffTime))
		packet := make([]byte, dns.MaxMsgSize)
		n, err := c.Read(packet)
		if err != nil {
			return
		}
		a := b.answer(b.ctx, packet[:n], false)
		if a == nil {
			return
		}
		if _, err := c.Write(a); err != nil {
			return
		}
	}
}
