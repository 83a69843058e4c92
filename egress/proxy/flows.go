package proxy

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/cove-sandbox/cove/egress/policy"
	"github.com/cove-sandbox/cove/sandbox"
)

// flowsKept of one sandbox: 100 KiB at most.
const flowsKept = 512

// flowLog is a ring of what a sandbox tried last.
type flowLog struct {
	allowed, denied, missed atomic.Int64
	sent, received          atomic.Int64 // bytes of all flows

	mu struct {
		sync.Mutex
		ring [flowsKept]*flow
		next int
	}
}

// flow is an entry; bytes are counted while it is open.
type flow struct {
	sent, received tally

	mu struct {
		sync.Mutex
		is sandbox.NetworkFlow
	}
}

// tally counts for a flow and for all of its sandbox's.
type tally struct {
	own atomic.Int64
	all *atomic.Int64
}

func (t *tally) Add(n int64) {
	t.own.Add(n)
	t.all.Add(n)
}

func (l *flowLog) begin(f policy.Flow, v policy.Verdict) *flow {
	e := &flow{}
	e.mu.is = sandbox.NetworkFlow{Start: time.Now(), Name: f.Name, Address: f.Addr, Port: f.Port, Protocol: f.Protocol,
		Allowed: v.Allow, Rule: v.Rule, Reason: v.Reason}
	e.sent.all, e.received.all = &l.sent, &l.received
	switch {
	case v.Allow:
		l.allowed.Add(1)
	case v.Reason == reasonReplay: // denied as it was then
		e.mu.is.End = e.mu.is.Start
	case replayMissed(v.Reason):
		l.missed.Add(1)
		e.mu.is.End = e.mu.is.Start
	default:
		l.denied.Add(1)
		e.mu.is.End = e.mu.is.Start
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.ring[l.mu.next%flowsKept] = e
	l.mu.next++
	return e
}

// deny ends a flow that was allowed before its client spoke.
func (l *flowLog) deny(f *flow, v policy.Verdict) {
	f.cut(v)
	l.allowed.Add(-1)
	l.denied.Add(1)
}

// last returns up to n flows, oldest first, and how many there were.
func (l *flowLog) last(n int) (out []sandbox.NetworkFlow, allowed, denied int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := max(0, l.mu.next-min(n, flowsKept)); i < l.mu.next; i++ {
		out = append(out, l.mu.ring[i%flowsKept].snapshot())
	}
	return out, l.allowed.Load(), l.denied.Load()
}

func (f *flow) snapshot() sandbox.NetworkFlow {
	f.mu.Lock()
	defer f.mu.Unlock()
	is := f.mu.is
	is.Sent, is.Received = f.sent.own.Load(), f.received.own.Load()
	return is
}

func (f *flow) finish() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.mu.is.End.IsZero() {
		f.mu.is.End = time.Now()
	}
}

// cut says that a new policy ended the flow.
func (f *flow) cut(v policy.Verdict) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.mu.is.Allowed, f.mu.is.Rule, f.mu.is.Reason, f.mu.is.End = false, v.Rule, v.Reason, time.Now()
}

// fail says that what was allowed could not be reached.
func (f *flow) fail(reason string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.mu.is.Reason, f.mu.is.End = reason, time.Now()
}
