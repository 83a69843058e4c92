package proxy

import (
	"encoding/json"
	"errors"
	"net/http"
	"net/netip"

	"github.com/miekg/dns"

	"github.com/cove-sandbox/cove/egress/policy"
	"github.com/cove-sandbox/cove/egress/recording"
	"github.com/cove-sandbox/cove/sandbox"
)

// A sandbox that replays has a policy that denies everything, so that nothing
// leaves whatever the recording does. Requests end in the recording, before the policy is
// asked.

const (
	// headerReplay marks an answer that is ours: "miss" or "truncated".
	headerReplay = "Cove-Replay"
	// statusMiss is one that clients do not try again: of 502 and its like many
	// make five attempts with pauses, which an episode would wait for. And one
	// that servers seldom send, where 404 would be taken for the page's own.
	statusMiss = http.StatusFailedDependency

	reasonReplay = "replay" // of a flow that is as it was recorded
)

// replayed are the addresses of every name on a recording, of the ranges for
// benchmarks and for documentation: clients connect to anything, and are told
// apart by the name they then say.
var (
	replayed4 = netip.MustParseAddr("198.18.0.1")
	replayed6 = netip.MustParseAddr("2001:db8::c0e")
)

func replayMissed(reason string) bool {
	return reason == string(sandbox.ReplayMissed) || reason == string(sandbox.ReplayTruncated)
}

// replay is nil where there is none.
func (b *Box) replay() Replay {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mu.intercept == nil {
		return nil
	}
	return b.mu.intercept.Replay
}

// lookUpRecording answers a question by the names on a recording.
func (b *Box) lookUpRecording(q *dns.Msg, f policy.Flow, known Replay) *dns.Msg {
	question := q.Question[0]
	if f.Name == "" || !known.Knows(f.Name) {
		if question.Qtype != dns.TypeAAAA { // which is asked for beside A: one miss, not two
			why := reasonReplay
			if known.MissName(f.Name) {
				why = string(sandbox.ReplayMissed)
			}
			b.refuse(f, policy.Verdict{Rule: -1, Reason: why})
		}
		return b.reply(q, dns.RcodeNameError)
	}
	r := b.reply(q, dns.RcodeSuccess)
	head := dns.RR_Header{Name: question.Name, Class: dns.ClassINET, Ttl: uint32(maxTTL.Seconds()), Rrtype: question.Qtype}
	switch question.Qtype {
	case dns.TypeA:
		r.Answer = append(r.Answer, &dns.A{Hdr: head, A: replayed4.AsSlice()})
	case dns.TypeAAAA:
		r.Answer = append(r.Answer, &dns.AAAA{Hdr: head, AAAA: replayed6.AsSlice()})
	}
	return r
}

// noteUnfound tells a recording what was not there, so that its not being there
// again is no miss.
func (b *Box) noteUnfound(q *dns.Msg) {
	b.mu.Lock()
	i := b.mu.intercept
	b.mu.Unlock()
	if i == nil || i.Unfound == nil || len(q.Question) != 1 {
		return
	}
	if name := policy.Name(q.Question[0].Name); name != "" {
		i.Unfound(name)
	}
}

// noteReplay puts a request that a recording answered, or could not, into the flow
// log: no connection does.
func (b *Box) noteReplay(r *http.Request, err error) {
	if b.replay() == nil {
		return
	}
	h, ok := r.Context().Value(connectionKey{}).(*httpBox)
	if !ok {
		return
	}
	v := policy.Verdict{Allow: true, Rule: -1, Reason: reasonReplay}
	var miss *recording.MissError
	if errors.As(err, &miss) {
		v.Allow, v.Reason = false, miss.Miss.Reason
	}
	b.flows.begin(h.flow(requestName(r)), v).finish()
}

// writeMiss tells the code inside.
func writeMiss(w http.ResponseWriter, m sandbox.ReplayMiss) {
	kind := "miss"
	if m.Reason == string(sandbox.ReplayTruncated) {
		kind = "truncated"
	}
	w.Header().Set(headerReplay, kind)
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(statusMiss)
	// It goes to the connection; one that is gone needs no answer.
	_ = json.NewEncoder(w).Encode(struct {
		Code   string `json:"code"`
		Method string `json:"method"`
		URL    string `json:"url"`
		Hint   string `json:"hint,omitempty"`
	}{m.Reason, m.Method, m.URL, m.Hint})
}
