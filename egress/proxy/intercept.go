package proxy

import (
	"bufio"
	"crypto/tls"
	"net"
	"net/http"
	"net/netip"
	"time"

	"github.com/cove-sandbox/cove/egress/authority"
	"github.com/cove-sandbox/cove/egress/policy"
	"github.com/cove-sandbox/cove/sandbox"
)

// Interception is what of a sandbox's traffic is looked into, beyond names, and
// what is done with it. Every HTTP request, plain or out of TLS that was ended
// here, goes through one chain, outermost first:
//
//	Recording  records or replays; sees placeholders, never the values of secrets
//	Headers  puts those of the policy into requests; placeholders may be in them
//	Secrets  puts values into requests and takes them out of answers
//	         then the policy decides, the name is resolved, and TLS upstream is
//	         checked against the host's roots
//
// It is immutable once a Box has it.
type Interception struct {
	// Authority answers TLS in place of servers.
	Authority *authority.Authority
	// Names says whether the TLS of a name is ended here; all other passes as
	// it is. nil = none.
	Names func(name string) bool
	// All ends the TLS of every name: a recording has all of it.
	All bool
	// Recording, Headers and Secrets make their piece of the chain; nil = there is
	// none. They are called once, not for each request.
	Recording, Headers, Secrets func(next http.RoundTripper) http.RoundTripper
	// Replay says that nothing leaves, and which names are found. The policy
	// must be one that denies everything; nil = Recording is none that replays.
	Replay Replay
	// Unfound is told the names that were looked up in vain; nil = nobody is.
	Unfound func(name string)
	// Pending says that what it is to be is not known yet: after a restart, until
	// the server has said. Connections wait for it, then fail.
	Pending bool

	chain http.RoundTripper
}

// pendingTime is how long a connection waits for an Interception that is
// pending. A server that restarts hands over secrets before it serves.
const pendingTime = 10 * time.Second

// Reasons for requests that policy has nothing to do with.
const (
	reasonPending = "secrets_not_loaded"
	reasonHTTP    = "http_"
	reasonQUIC    = "quic_not_recorded"
)

// Replay is what answers in place of the outside.
type Replay interface {
	// Knows says whether the name was asked for anything.
	Knows(name string) bool
	// MissName notes that one was looked up that was not, and says whether that
	// is a miss: not if it was looked up in vain then.
	MissName(name string) bool
}

// ends says whether the TLS of a name is ended here.
func (i *Interception) ends(name string) bool {
	return i != nil && name != "" && (i.All || i.covers(name))
}

// isQUIC says whether a flow is HTTP that nobody can look into. Clients that find
// it closed take TCP.
func (i *Interception) isQUIC(f policy.Flow) bool {
	return i != nil && i.All && f.Protocol == sandbox.UDP && f.Port == 443
}

func (b *Box) keepsToTCP(f policy.Flow) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.mu.intercept.isQUIC(f)
}

func (i *Interception) covers(name string) bool {
	return i != nil && i.Names != nil && name != "" && i.Names(name)
}

// Intercept puts an Interception in force, nil = none. Requests to come go by
// it. Connections that passed as they are and no longer would are cut, so that
// their clients open another; what is under way inside a connection goes on as it
// began.
func (b *Box) Intercept(i *Interception) {
	if i != nil {
		next := http.RoundTripper(upstream{b})
		for _, wrap := range []func(http.RoundTripper) http.RoundTripper{i.Secrets, i.Headers, i.Recording} {
			if wrap != nil {
				next = wrap(next)
			}
		}
		i.chain = next
	}
	b.mu.Lock()
	b.mu.intercept = i
	if b.mu.settled == nil {
		b.mu.settled = make(chan struct{})
	}
	if i == nil || !i.Pending {
		close(b.mu.settled)
		b.mu.settled = nil
	}
	var ends []func()
	for p := range b.mu.open {
		if !p.http && p.entry != nil && (i.ends(p.flow.Name) || i.isQUIC(p.flow)) {
			p.entry.fail(reasonIntercept)
			ends = append(ends, p.end)
		}
	}
	b.mu.Unlock()
	for _, end := range ends {
		end()
	}
}

// reasonIntercept is a flow's that ended so that the next can be looked into.
const reasonIntercept = "intercepted_from_now_on"

// interception waits for one that is known. ok is false if there was none in
// time.
func (b *Box) interception() (i *Interception, ok bool) {
	b.mu.Lock()
	i, settled := b.mu.intercept, b.mu.settled
	b.mu.Unlock()
	if i == nil || !i.Pending {
		return i, true
	}
	t := time.NewTimer(pendingTime)
	defer t.Stop()
	select {
	case <-settled:
	case <-t.C:
	case <-b.ctx.Done():
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.mu.intercept, b.mu.intercept == nil || !b.mu.intercept.Pending
}

// serveTLS ends the TLS of a connection in place of the server it is for.
func (b *Box) serveTLS(p *passage, i *Interception, c *net.TCPConn, r *bufio.Reader, to netip.AddrPort, name string) {
	h := &httpBox{b: b, client: p, to: to, tls: true}
	b.serve(h, c, r, func(c net.Conn) net.Conn {
		return tls.Server(c, &tls.Config{
			MinVersion: tls.VersionTLS12, NextProtos: []string{"h2", "http/1.1"},
			// Whatever server name it sends in the hello that is parsed now, it is
			// the one that was looked at.
			GetCertificate:         func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return i.Authority.Leaf(name) },
			SessionTicketsDisabled: true, // keys of tickets would have to outlive the connection
		})
	})
}

// upstream is the end of the chain: it decides and sends.
type upstream struct{ b *Box }

// connectionKey finds the client's connection of a request.
type connectionKey struct{}

func (u upstream) RoundTrip(r *http.Request) (*http.Response, error) {
	h, ok := r.Context().Value(connectionKey{}).(*httpBox)
	if !ok {
		return nil, sandbox.Errorf(sandbox.Internal, "egress.http", "a request that no connection of the sandbox made")
	}
	if err := h.check(r); err != nil {
		return nil, err
	}
	return h.transport.RoundTrip(r)
}

// covers says whether a name is looked into now.
func (b *Box) covers(name string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.mu.intercept.covers(name)
}

// chain of the requests of a connection, as it is now.
func (b *Box) chain() (http.RoundTripper, error) {
	i, ok := b.interception()
	switch {
	case !ok:
		return nil, errPending
	case i == nil:
		return upstream{b}, nil
	}
	return i.chain, nil
}

var errPending = sandbox.Errorf(sandbox.Unavailable, "egress.http", "the server has not handed over the secrets of this sandbox yet").WithHint("try again")
