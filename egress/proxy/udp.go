package proxy

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/egress/netns"
	"github.com/cove-sandbox/cove/egress/policy"
	"github.com/cove-sandbox/cove/sandbox"
)

// udpIdle ends a flow that nothing has passed on.
const udpIdle = 60 * time.Second

// session is a flow of datagrams: from where, to where.
type session struct{ from, to netip.AddrPort }

type udpSession struct {
	inside, outside *net.UDPConn
	last            atomic.Int64 // unix nanoseconds
}

func (b *Box) serveUDP() {
	buf, oob := make([]byte, 64<<10), make([]byte, 256)
	for {
		n, on, _, from, err := b.socks.UDP.ReadMsgUDPAddrPort(buf, oob)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			select {
			case <-b.ctx.Done():
				return
			case <-time.After(50 * time.Millisecond):
			}
			continue
		}
		to := meantFor(oob[:on])
		if !to.IsValid() {
			continue
		}
		s := session{unmap(from), to}
		packet := append([]byte(nil), buf[:n]...)
		if to.Port() == dnsPort {
			b.question(s, packet)
			continue
		}
		b.datagram(s, packet)
	}
}

// question answers DNS as whom it was asked of. What is over maxQuestions at a
// time is lost, like any datagram, and asked again.
func (b *Box) question(s session, packet []byte) {
	select {
	case b.dnsNow <- struct{}{}:
	default:
		return
	}
	b.tasks.Go(func() {
		defer func() { <-b.dnsNow }()
		if a := b.answer(b.ctx, packet, true); a != nil {
			netns.SendAs(b.socks.DNS, s.to.Addr(), s.from, a)
		}
	})
}

// meantFor is where a datagram was sent to.
func meantFor(oob []byte) netip.AddrPort {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return netip.AddrPort{}
	}
	for i := range msgs {
		sa, err := unix.ParseOrigDstAddr(&msgs[i])
		if err != nil {
			continue
		}
		switch sa := sa.(type) {
		case *unix.SockaddrInet4:
			return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port))
		case *unix.SockaddrInet6:
			return unmap(netip.AddrPortFrom(netip.AddrFrom16(sa.Addr), uint16(sa.Port)))
		}
	}
	return netip.AddrPort{}
}

// datagram begins a flow, or belongs to one whose own socket did not exist yet
// when it was sent.
func (b *Box) datagram(s session, packet []byte) {
	b.mu.Lock()
	known := b.mu.sessions[s]
	b.mu.Unlock()
	if known != nil {
		known.outside.Write(packet)
		return
	}
	f := policy.Flow{Addr: s.to.Addr(), Port: s.to.Port(), Protocol: sandbox.UDP}
	if v := b.current().Decide(f, b.up.Host); !v.Allow {
		b.refuse(f, v)
		return
	}
	if b.keepsToTCP(f) {
		b.refuse(f, policy.Verdict{Rule: -1, Reason: reasonQUIC})
		return
	}
	us := &udpSession{}
	p := b.enter(nil, func() {})
	if p == nil {
		b.refuse(f, policy.Verdict{Rule: -1, Reason: reasonConnections})
		return
	}
	ctx, cancel := context.WithTimeout(b.ctx, dialTimeout)
	defer cancel()
	c, err := b.up.Dial(ctx, "udp", s.to.String())
	if err != nil {
		b.leave(p)
		return
	}
	us.outside = c.(*net.UDPConn)
	if us.inside, err = b.ns.Reply(ctx, s.to, s.from); err != nil {
		us.outside.Close()
		b.leave(p)
		return
	}
	end := func() { us.inside.Close(); us.outside.Close() }
	b.mu.Lock()
	p.end = end
	b.mu.sessions[s] = us
	b.mu.Unlock()
	if v := b.pass(p, f); !v.Allow { // a Set came in between
		b.mu.Lock()
		delete(b.mu.sessions, s)
		b.mu.Unlock()
		end()
		b.leave(p)
		b.refuse(f, v)
		return
	}
	if b.ctx.Err() != nil {
		end()
	}
	us.last.Store(time.Now().UnixNano())
	n, _ := us.outside.Write(packet)
	p.entry.sent.Add(int64(n))
	out := make(chan struct{})
	b.tasks.Go(func() {
		defer close(out)
		b.relay(us, us.outside, us.inside, &p.entry.sent)
	})
	b.tasks.Go(func() {
		b.relay(us, us.inside, us.outside, &p.entry.received)
		<-out
		b.mu.Lock()
		delete(b.mu.sessions, s)
		b.mu.Unlock()
		b.leave(p)
	})
}

// relay moves datagrams one way, until none has passed either way for udpIdle.
func (b *Box) relay(us *udpSession, to, from *net.UDPConn, n *tally) {
	defer to.Close()
	defer from.Close()
	buf := make([]byte, 64<<10)
	for {
		from.SetReadDeadline(time.Now().Add(udpIdle))
		got, err := from.Read(buf)
		if isTimeout(err) && time.Since(time.Unix(0, us.last.Load())) < udpIdle {
			continue
		}
		if errors.Is(err, unix.ECONNREFUSED) {
			continue // nobody listens there, now
		}
		if err != nil {
			return
		}
		us.last.Store(time.Now().UnixNano())
		if limit := b.rate(); limit != nil && !limit.AllowN(time.Now(), got) {
			continue // a datagram over the limit is lost, as on a full line
		}
		if _, err := to.Write(buf[:got]); err == nil {
			n.Add(int64(got))
		}
	}
}
