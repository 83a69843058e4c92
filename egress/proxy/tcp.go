package proxy

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/egress/policy"
	"github.com/cove-sandbox/cove/sandbox"
)

// Reasons beside those of package policy.
const (
	reasonConnections = "too_many_connections"
	reasonUnresolved  = "name_not_resolved"
	reasonUnreachable = "unreachable"
	reasonSilent      = "no_name_in_time" // rules need a name, and the client said nothing
	reasonMalformed   = "http_malformed"  // it may be a request, and is none that we can read
	reasonNotHTTP     = "not_http"        // on a port of HTTP or TLS, where the name that was looked up says nothing
)

// isWeb says whether a port is one of HTTP or TLS, where many names share an
// address and clients speak first.
func isWeb(port uint16) bool { return port == 80 || port == 443 }

func (b *Box) serveTCP() {
	for {
		c, err := b.socks.TCP.AcceptTCP()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // out of descriptors, say
			select {
			case <-b.ctx.Done():
				return
			case <-time.After(50 * time.Millisecond):
			}
			continue
		}
		key := ends{addrPort(c.RemoteAddr()), addrPort(c.LocalAddr())}
		from := b.arrived(key)
		if from == nil { // it took longer than we wait
			reset(c)
			continue
		}
		b.tasks.Go(func() {
			defer b.leave(from.p)
			defer b.departed(key)
			if from.up != nil {
				b.join(from.p, c, nil, from.up, nil)
				return
			}
			b.mu.Lock()
			from.p.end = func() { reset(c) }
			b.mu.Unlock()
			if b.ctx.Err() != nil { // Close looked before
				reset(c)
				return
			}
			b.connected(from.p, c)
		})
	}
}

// reset closes a connection so that the other side is told that it failed.
func reset(c *net.TCPConn) {
	c.SetLinger(0)
	c.Close()
}

// connected sees a connection of the sandbox through.
func (b *Box) connected(p *passage, c *net.TCPConn) {
	to := addrPort(c.LocalAddr())
	if to.Port() == dnsPort {
		defer c.Close()
		b.serveDNSConn(c)
		return
	}
	f := policy.Flow{Addr: to.Addr(), Port: to.Port(), Protocol: sandbox.TCP}
	i, ok := b.interception()
	if !ok {
		b.refuse(f, policy.Verdict{Rule: -1, Reason: reasonPending})
		reset(c)
		return
	}
	pol := b.current()
	if !pol.NeedsName() && i == nil { // since it was let in
		f.Name = b.names.hint(to.Addr()) // for the log
		b.through(p, c, nil, f, []netip.Addr{to.Addr()}, nil)
		return
	}
	// The first bytes; or, from a client that waits for the server, none.
	r := bufio.NewReaderSize(c, sniffBytes)
	hint := b.names.hint(to.Addr())
	patience := silence
	switch {
	case isWeb(f.Port) && (hint == "" || !pol.NeedsName() || pol.MayResolve(hint)):
		patience += sniffTime // browsers open some ahead
	case hint == "" && pol.NeedsName():
		patience = strange
	}
	c.SetReadDeadline(time.Now().Add(patience))
	_, err := r.Peek(1)
	switch {
	case err == nil:
	case isTimeout(err) && !pol.NeedsName():
		c.SetReadDeadline(time.Time{})
		f.Name = hint
		b.through(p, c, r, f, []netip.Addr{to.Addr()}, func(s sniffed) string {
			if s.kind == isTLS && (s.encrypted || !i.ends(policy.Name(s.name))) {
				return ""
			}
			return spokeLate(s)
		})
		return
	case isTimeout(err) && hint != "" && !isWeb(f.Port) && pol.MayResolve(hint):
		// It speaks second (SSH, SMTP, MySQL), and looked this name up. It gets
		// to what we resolve the name to, whatever address it took.
		c.SetReadDeadline(time.Time{})
		f.Name = hint
		b.through(p, c, r, f, nil, func(s sniffed) string {
			if s.kind == isTLS && !s.encrypted && policy.Name(s.name) == hint && !i.ends(hint) {
				return ""
			}
			return spokeLate(s)
		})
		return
	case isTimeout(err):
		b.refuse(f, policy.Verdict{Rule: -1, Reason: reasonSilent})
		reset(c)
		return
	default:
		reset(c)
		return
	}
	c.SetReadDeadline(time.Now().Add(sniffTime))
	s := sniff(r)
	c.SetReadDeadline(time.Time{})
	switch s.kind {
	case isHTTP:
		b.serveHTTP(p, c, r, to)
		return
	case isLikeHTTP:
		b.refuse(f, policy.Verdict{Rule: -1, Reason: reasonMalformed})
		reset(c)
		return
	case isTLS:
		// Without a name, or with one that is only the outer of two: by address.
		if !s.encrypted {
			f.Name = policy.Name(s.name)
		}
		if i.ends(f.Name) {
			b.serveTLS(p, i, c, r, to, f.Name)
			return
		}
	default:
		switch {
		case isWeb(f.Port) && pol.NeedsName():
			if v := pol.Decide(f, b.up.Host); !v.Allow {
				if v.Reason == policy.ReasonDefault || v.Reason == policy.ReasonNoName {
					v.Reason = reasonNotHTTP
				}
				b.refuse(f, v)
				reset(c)
				return
			}
		case pol.MayResolve(hint):
			f.Name = hint
		}
	}
	if f.Name == "" || !pol.NeedsName() || byAddress(pol, f, b.up.Host) {
		b.through(p, c, r, f, []netip.Addr{to.Addr()}, nil)
		return
	}
	b.through(p, c, r, f, nil, nil)
}

// spokeLate says why a connection that was made before its client spoke does not
// go on; "" = it does. A request or a ClientHello would have been treated by its
// own name.
func spokeLate(s sniffed) string {
	switch s.kind {
	case isHTTP, isTLS:
		return policy.ReasonNoName
	case isLikeHTTP:
		return reasonMalformed
	}
	return ""
}

// byAddress says whether a rule for its address lets a named flow go where the
// sandbox meant to.
func byAddress(p *policy.Policy, f policy.Flow, host func(netip.Addr) bool) bool {
	v := p.Decide(f, host)
	return v.Allow && v.ByAddress
}

// through connects the sandbox with one of addrs; nil: with what the name of f
// resolves to. r has what was read of c already, nil = nothing. If late is set
// the sandbox has said nothing yet; of what it then says first late tells why it
// ends the connection, "" = it does not.
func (b *Box) through(p *passage, c *net.TCPConn, r *bufio.Reader, f policy.Flow, addrs []netip.Addr, late func(sniffed) string) {
	up, err := b.dial(p, f, addrs)
	if err != nil {
		reset(c)
		return
	}
	b.join(p, c, r, up, late)
}

// join moves bytes between the sandbox and where it goes until both have ended.
func (b *Box) join(p *passage, c *net.TCPConn, r *bufio.Reader, up *net.TCPConn, late func(sniffed) string) {
	defer up.Close()
	b.mu.Lock()
	closed := p.entry.snapshot().End
	p.end = func() { reset(c); reset(up) }
	b.mu.Unlock()
	if !closed.IsZero() || b.ctx.Err() != nil { // a Set came in between
		reset(c)
		return
	}
	defer c.Close()
	var wg sync.WaitGroup
	wg.Go(func() {
		if late != nil {
			if _, err := r.Peek(1); err == nil {
				c.SetReadDeadline(time.Now().Add(sniffTime))
				s := sniff(r)
				c.SetReadDeadline(time.Time{})
				if why := late(s); why != "" {
					b.flows.deny(p.entry, policy.Verdict{Rule: -1, Reason: why})
					reset(c)
					reset(up)
					return
				}
			}
		}
		if r != nil {
			head, _ := r.Peek(r.Buffered()) // cannot fail: it is there
			n, err := up.Write(head)
			p.entry.sent.Add(int64(n))
			if err != nil {
				reset(c)
				return
			}
		}
		b.copy(up, c, &p.entry.sent)
	})
	b.copy(c, up, &p.entry.received)
	wg.Wait()
}

// dial decides and connects: the address that is checked is the one that is
// connected to.
func (b *Box) dial(p *passage, f policy.Flow, addrs []netip.Addr) (*net.TCPConn, error) {
	ctx, cancel := context.WithTimeout(b.ctx, dialTimeout)
	defer cancel()
	wanted := f.Addr
	if addrs == nil {
		pol := b.current()
		if !pol.MayResolve(f.Name) {
			v := pol.Decide(f, b.up.Host)
			if v.Allow { // only an address could have allowed it, and that is handled before
				v = policy.Verdict{Rule: -1, Reason: policy.ReasonDefault}
			}
			b.refuse(f, v)
			return nil, errDenied
		}
		var err error
		if addrs, err = b.resolve(ctx, f.Name); err != nil || len(addrs) == 0 {
			b.refuse(f, policy.Verdict{Rule: -1, Reason: reasonUnresolved})
			return nil, sandbox.Errorf(sandbox.Unavailable, "egress.dial", "%s cannot be resolved: %v", f.Name, err)
		}
		addrs = sortAddrs(addrs, wanted)
	}
	// The policy is asked once for each address, and for good. Those that it denies
	// are stepped over; if it denies all, the first says why.
	var denied policy.Verdict
	var last error
	tried := 0
	for i, a := range addrs {
		f.Addr = a
		v := b.pass(p, f)
		if i == 0 {
			denied = v
		}
		if !v.Allow {
			continue
		}
		c, err := b.up.Dial(ctx, "tcp", netip.AddrPortFrom(a, f.Port).String())
		if err == nil {
			return c.(*net.TCPConn), nil
		}
		last = err
		if tried++; tried == 3 {
			break
		}
	}
	switch {
	case tried == 0:
		f.Addr = addrs[0]
		b.refuse(f, denied)
		return nil, errDenied
	case !p.entry.snapshot().End.IsZero(): // a Set came in between
		return nil, errDenied
	}
	p.entry.fail(reasonUnreachable)
	return nil, sandbox.Errorf(sandbox.Unavailable, "egress.dial", "%s port %d: %w", f.Name, f.Port, last)
}

var (
	errDenied      = sandbox.Errorf(sandbox.Denied, "egress.dial", "the network policy of this sandbox denies it")
	errConnections = sandbox.Errorf(sandbox.Denied, "egress.dial", "too many connections: this sandbox has as many open as it may")
)

// sortAddrs puts first what the sandbox chose, if it is among them, then those
// of its family.
func sortAddrs(addrs []netip.Addr, wanted netip.Addr) []netip.Addr {
	var same, family, other []netip.Addr
	for _, a := range addrs {
		switch {
		case a == wanted:
			same = append(same, a)
		case a.Is4() == wanted.Is4():
			family = append(family, a)
		default:
			other = append(other, a)
		}
	}
	return append(append(same, family...), other...)
}

// copyChunk is moved between two looks at counter and limit: with splice, so
// that bytes do not come up to us. Larger ones gain nothing.
const copyChunk = 256 << 10

// copy moves bytes one way until their end, and hands that on.
func (b *Box) copy(to, from *net.TCPConn, n *tally) {
	for {
		chunk := int64(copyChunk)
		limit := b.rate()
		if limit != nil {
			chunk = min(chunk, max(int64(limit.Limit())/20, 1024))
		}
		moved, err := to.ReadFrom(&io.LimitedReader{R: from, N: chunk})
		n.Add(moved)
		if err != nil {
			// Neither side may believe that it has all: not the one that reads,
			// nor the one that writes.
			reset(to)
			reset(from)
			return
		}
		if limit != nil && limit.WaitN(b.ctx, int(moved)) != nil {
			return // closing
		}
		if moved < chunk {
			to.CloseWrite()
			return
		}
	}
}

func isTimeout(err error) bool {
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout()
}

func hostPort(name string, port uint16) string {
	return net.JoinHostPort(name, strconv.Itoa(int(port)))
}
