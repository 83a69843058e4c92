package proxy

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"syscall"
	"time"

	"github.com/cove-sandbox/cove/egress/netns"
	"github.com/cove-sandbox/cove/egress/policy"
	"github.com/cove-sandbox/cove/sandbox"
)

// admitTime is how long a connection that was admitted may take to come about. It
// takes one packet each way within this machine.
const admitTime = 10 * time.Second

// ends are both ends of a connection, as the sandbox has them.
type ends struct{ from, to netip.AddrPort }

// caller is a connection that the sandbox has begun, and whose connect has not
// returned: it waits at the door until it is known what becomes of it.
type caller struct {
	p      *passage
	up     *net.TCPConn // where it goes; nil = a name decides, that it has to say first
	expire *time.Timer  // nil until it is admitted
}

// serveDoor answers connects truthfully. What the policy refuses by address and
// port is refused; where no name is needed the connection out is made first, and
// fails inside as it failed outside; the rest is let in, to say its name.
func (b *Box) serveDoor() {
	for {
		s, err := b.socks.Door.Next()
		if errors.Is(err, os.ErrClosed) || b.ctx.Err() != nil {
			return
		}
		if err != nil { // the device went down, say
			select {
			case <-b.ctx.Done():
				return
			case <-time.After(50 * time.Millisecond):
			}
			continue
		}
		key := ends{s.From, s.To}
		b.mu.Lock()
		_, again := b.mu.callers[key]
		again = again || b.mu.talking[key]
		b.mu.Unlock()
		if again {
			continue // it called again while we were at it
		}
		p := b.enter(nil, func() {})
		if p == nil {
			b.refuse(policy.Flow{Addr: s.To.Addr(), Port: s.To.Port(), Protocol: sandbox.TCP}, policy.Verdict{Rule: -1, Reason: reasonConnections})
			b.answerSyn(s, netns.Reset)
			continue
		}
		c := &caller{p: p}
		b.mu.Lock()
		b.mu.callers[key] = c
		b.mu.Unlock()
		b.tasks.Go(func() { b.called(s, c) })
	}
}

// called decides on a connection that waits.
func (b *Box) called(s netns.Syn, c *caller) {
	up, let, how := b.let(s, c.p)
	key := ends{s.From, s.To}
	if !let {
		b.forget(key, c)
		if how != noAnswer {
			b.answerSyn(s, how)
		}
		return
	}
	b.mu.Lock()
	c.up = up
	// A Set that comes from now on cuts it; one that came in between has ended it.
	cut := up != nil && !c.p.entry.snapshot().End.IsZero()
	if up != nil {
		c.p.end = func() { reset(up) }
	}
	if !cut {
		c.expire = time.AfterFunc(admitTime, func() { b.forget(key, c) })
	}
	b.mu.Unlock()
	if cut {
		b.forget(key, c)
		b.answerSyn(s, netns.Reset)
		return
	}
	if err := b.socks.Door.Admit(s); err != nil {
		b.log.Warn("a connection of a sandbox could not be let through", "to", s.To, "err", err)
		b.forget(key, c)
	}
}

// noAnswer leaves it to the client when to give up, as on a network where
// nobody answers either.
const noAnswer netns.Refusal = -1

// let says whether a connection may come about, and if not how it is answered.
func (b *Box) let(s netns.Syn, p *passage) (up *net.TCPConn, ok bool, how netns.Refusal) {
	f := policy.Flow{Addr: s.To.Addr(), Port: s.To.Port(), Protocol: sandbox.TCP}
	if f.Port == dnsPort {
		return nil, true, 0 // our resolver, whatever its address
	}
	i, known := b.interception()
	if !known {
		b.refuse(f, policy.Verdict{Rule: -1, Reason: reasonPending})
		return nil, false, netns.Reset
	}
	if i != nil && i.Recording != nil {
		// A recording answers, for addresses that are made up; or one is to have what
		// is denied, too, so that it will be denied again.
		return nil, true, 0
	}
	f.Name = b.names.hint(f.Addr) // for the log
	if pol := b.current(); pol.NeedsName() || i != nil {
		if v, refused := pol.Refuses(f, b.up.Host); refused {
			b.refuse(f, v)
			return nil, false, netns.Reset
		}
		return nil, true, 0
	}
	// No name can matter: dial has the one answer.
	up, err := b.dial(p, f, []netip.Addr{f.Addr})
	if err != nil {
		return nil, false, refusal(err)
	}
	return up, true, 0
}

// refusal is how a sandbox is told what became of our own connect.
func refusal(err error) netns.Refusal {
	var ne net.Error
	switch {
	case errors.Is(err, errDenied), errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.ECONNRESET):
		return netns.Reset
	case errors.Is(err, syscall.ENETUNREACH):
		return netns.NetworkUnreachable
	case errors.Is(err, context.Canceled), errors.As(err, &ne) && ne.Timeout():
		return noAnswer
	}
	return netns.HostUnreachable
}

func (b *Box) answerSyn(s netns.Syn, how netns.Refusal) {
	if err := b.socks.Door.Refuse(s, how); err != nil && b.ctx.Err() == nil {
		b.log.Debug("a connection of a sandbox could not be refused", "to", s.To, "err", err)
	}
}

// forget ends a caller, unless it was connected or forgotten already.
func (b *Box) forget(key ends, c *caller) {
	if b.take(key) != c {
		return
	}
	if c.up != nil {
		reset(c.up)
	}
	b.leave(c.p)
}

// take finds who waits between two ends, nil = nobody, and is the last to.
func (b *Box) take(key ends) *caller {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.takeLocked(key)
}

// arrived is take for one whose connection has come about. A SYN that it sent
// twice may be looked at only now: it is not another connection, which would
// count for the ten seconds that it is waited for.
func (b *Box) arrived(key ends) *caller {
	b.mu.Lock()
	defer b.mu.Unlock()
	c := b.takeLocked(key)
	if c != nil {
		b.mu.talking[key] = true
	}
	return c
}

func (b *Box) departed(key ends) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.mu.talking, key)
}

func (b *Box) takeLocked(key ends) *caller {
	c := b.mu.callers[key]
	if c == nil {
		return nil
	}
	delete(b.mu.callers, key)
	if c.expire != nil {
		c.expire.Stop()
	}
	return c
}
