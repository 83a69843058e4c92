// Package proxy is the only way out of a sandbox. Everything that a sandbox
// sends into its namespace (package netns) ends in a socket of a [Box], whatever
// address it was for, and the Box decides by the policy what becomes of it:
//
//   - DNS, to whatever server, is answered by our own resolver: only names the
//     policy may allow are looked up, and answers that lead to private addresses
//     are left out.
//   - TCP: a connection that the policy refuses by address and port is refused,
//     and one that needs no name comes about when the one out has. Where the policy knows domains, the name is read off the TLS
//     ClientHello or the HTTP request. Who is allowed by name is connected to
//     what we ourselves resolve the name to, never to the address the sandbox
//     chose. Who shows no name is decided by address alone.
//     TLS is passed on as it is, but for names that an [Interception] covers:
//     those requests go through its chain, and on over TLS of our own.
//   - UDP is decided by address alone.
//   - the rest goes nowhere.
//
// Connections out are made by [Upstream], in the host's own namespace.
package proxy

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/cove-sandbox/cove/egress/netns"
	"github.com/cove-sandbox/cove/egress/policy"
	"github.com/cove-sandbox/cove/sandbox"
)

const (
	defaultConnections = 1024 // open at a time, UDP flows with them
	dialTimeout        = 10 * time.Second
)

// Box enforces the policy of one sandbox. Safe for concurrent use.
type Box struct {
	ns  *netns.Namespace
	up  *Upstream
	log *slog.Logger

	socks  *netns.Sockets
	ctx    context.Context
	cancel context.CancelFunc
	tasks  sync.WaitGroup
	flows  flowLog
	names  nameCache
	dnsNow chan struct{} // a slot per question under way

	mu struct {
		sync.Mutex
		closed     bool
		policy     *policy.Policy
		generation int64
		intercept  *Interception
		settled    chan struct{} // closed when intercept is no longer pending; nil = it is not
		limiter    *rate.Limiter // nil = no limit
		open       map[*passage]bool
		paired     int // of open, those with connections of ours: they count as one with the first of these
		sessions   map[session]*udpSession
		callers    map[ends]*caller // whose connects wait
		talking    map[ends]bool    // whose connects have returned, until both sides have closed
	}
}

// passage is one connection under way.
type passage struct {
	flow  policy.Flow
	entry *flow // nil until it is decided
	http  bool  // carries requests of ours, each decided
	end   func()

	client *passage // that a connection of ours is for; nil = it is the sandbox's own
	ours   int      // connections that are for this one
}

// Open begins to serve a namespace on its sockets. The Box owns both.
func Open(ns *netns.Namespace, socks *netns.Sockets, up *Upstream, p *policy.Policy, generation int64, i *Interception, log *slog.Logger) *Box {
	b := &Box{ns: ns, up: up, log: log, socks: socks, dnsNow: make(chan struct{}, maxQuestions)}
	b.mu.open, b.mu.sessions, b.mu.callers, b.mu.talking = map[*passage]bool{}, map[session]*udpSession{}, map[ends]*caller{}, map[ends]bool{}
	b.ctx, b.cancel = context.WithCancel(context.Background())
	b.Set(p, generation)
	b.Intercept(i)
	b.tasks.Go(b.serveDoor)
	b.tasks.Go(b.serveTCP)
	b.tasks.Go(b.serveUDP)
	return b
}

// Device opens the sandbox's end of the namespace.
func (b *Box) Device() (f *os.File, gso uint32, err error) { return b.ns.Device() }

// Set puts a policy in force. When it returns, nothing that the policy denies
// is open any more, and nothing of it will be.
func (b *Box) Set(p *policy.Policy, generation int64) {
	limits := p.Spec().Limits
	b.mu.Lock()
	b.mu.policy, b.mu.generation = p, generation
	b.mu.limiter = nil
	if limits.BytesPerSecond > 0 {
		b.mu.limiter = rate.NewLimiter(rate.Limit(limits.BytesPerSecond), int(max(limits.BytesPerSecond/4, copyChunk)))
	}
	var ends []func()
	for c := range b.mu.open {
		if c.entry == nil {
			continue // decides again when it is about to pass
		}
		if v := p.Decide(c.flow, b.up.Host); !v.Allow {
			c.entry.cut(v)
			ends = append(ends, c.end)
		}
	}
	b.mu.Unlock()
	for _, end := range ends {
		end()
	}
}

// Status is the policy in force and the flows of late.
func (b *Box) Status(flows int) sandbox.NetworkStatus {
	b.mu.Lock()
	s := sandbox.NetworkStatus{Network: b.mu.policy.Spec(), Generation: b.mu.generation}
	b.mu.Unlock()
	s.Flows, s.Allowed, s.Denied = b.flows.last(flows)
	s.Missed, s.Sent, s.Received = b.flows.missed.Load(), b.flows.sent.Load(), b.flows.received.Load()
	return s
}

// Denied counts the attempts that were denied.
func (b *Box) Denied() int64 { return b.flows.denied.Load() }

// Close cuts every connection. The namespace and what sends into it live on,
// and nothing leaves any more.
func (b *Box) Close() error {
	b.mu.Lock()
	if b.mu.closed {
		b.mu.Unlock()
		return nil
	}
	b.mu.closed = true
	var ends []func()
	for c := range b.mu.open {
		ends = append(ends, c.end)
	}
	b.mu.Unlock()
	b.cancel()
	err := b.socks.Close()
	for _, end := range ends {
		end()
	}
	b.tasks.Wait()
	b.mu.Lock()
	callers := maps.Clone(b.mu.callers)
	b.mu.Unlock()
	for key, c := range callers {
		b.forget(key, c)
	}
	return errors.Join(err, b.ns.Close())
}

// enter counts a connection against the limit. end must cut it at once. The
// passage is nil where the sandbox has as many as it may. One of ours, for the
// requests of a client, counts only if the client has another already: over
// HTTP/2, where requests are for several servers at once.
func (b *Box) enter(client *passage, end func()) *passage {
	b.mu.Lock()
	defer b.mu.Unlock()
	most := b.mu.policy.Spec().Limits.Connections
	if most == 0 {
		most = defaultConnections
	}
	pairs := client != nil && client.ours == 0 && b.mu.open[client]
	if b.mu.closed || !pairs && len(b.mu.open)-b.mu.paired >= most {
		return nil
	}
	p := &passage{end: end, client: client, http: client != nil}
	b.mu.open[p] = true
	if client != nil {
		client.ours++
	}
	if pairs {
		b.mu.paired++
	}
	return p
}

func (b *Box) leave(p *passage) {
	b.mu.Lock()
	delete(b.mu.open, p)
	if p.ours > 0 { // which go on, and count by themselves
		b.mu.paired--
	}
	if c := p.client; c != nil {
		if c.ours--; c.ours == 0 && b.mu.open[c] {
			b.mu.paired--
		}
	}
	b.mu.Unlock()
	if p.entry != nil {
		p.entry.finish()
	}
}

func (b *Box) current() *policy.Policy {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.mu.policy
}

// pass decides for good, by the policy in force at this moment: a Set that
// comes later finds the passage and cuts it. What is denied leaves no trace here,
// for the caller may go on to another address.
func (b *Box) pass(p *passage, f policy.Flow) policy.Verdict {
	b.mu.Lock()
	defer b.mu.Unlock()
	v := b.mu.policy.Decide(f, b.up.Host)
	if !v.Allow {
		return v
	}
	p.flow = f
	if p.entry == nil { // else it is the next address of the same connection
		p.entry = b.flows.begin(f, v)
	}
	return v
}

// refuse notes a connection that does not come about.
func (b *Box) refuse(f policy.Flow, v policy.Verdict) {
	v.Allow = false
	b.flows.begin(f, v).finish()
}

func (b *Box) rate() *rate.Limiter {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.mu.limiter
}

func addrPort(a net.Addr) netip.AddrPort {
	switch a := a.(type) {
	case *net.TCPAddr:
		return unmap(a.AddrPort())
	case *net.UDPAddr:
		return unmap(a.AddrPort())
	}
	return netip.AddrPort{}
}

func unmap(a netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(a.Addr().Unmap().WithZone(""), a.Port())
}
