package recording

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// missesKept is how many of the last misses a status lists.
const missesKept = 64

// Player answers out of a recording: the n-th of equal requests gets the n-th
// recorded answer. Nothing it does depends on time. Safe for concurrent use.
type Player struct {
	rec   *Recording
	rules Rules
	now   func() time.Time

	// For a player of a library; nil = it is nobody's. note and back are called
	// under mu.
	note  func(exchange uint32) // one was used
	back  func() error          // none is
	close func() error

	byKey map[string][]int // into recording.Exchanges

	mu struct {
		sync.Mutex
		next     map[string]int
		answered int64
		unused   int64
		missed   int64
		misses   []sandbox.ReplayMiss // at most missesKept
	}
}

// NewPlayer begins at the start of a recording.
func NewPlayer(t *Recording, rules Rules) *Player {
	p := &Player{rec: t, rules: rules, now: time.Now, byKey: map[string][]int{}}
	p.mu.next, p.mu.unused = map[string]int{}, int64(len(t.Exchanges))
	for i := range t.Exchanges {
		k := rules.key(t.Exchanges[i].Request)
		p.byKey[k] = append(p.byKey[k], i)
	}
	return p
}

// Over answers by itself, whatever is behind it.
func (p *Player) Over(http.RoundTripper) http.RoundTripper { return p }

// Knows says whether a host was asked.
func (p *Player) Knows(name string) bool { return p.rec.Knows(name) }

// Status is how far it is.
func (p *Player) Status() sandbox.ReplayStatus {
	p.mu.Lock()
	defer p.mu.Unlock()
	return sandbox.ReplayStatus{Recording: p.rec.Header.ID, Answered: p.mu.answered, Missed: p.mu.missed, Unused: p.mu.unused, Misses: slices.Clone(p.mu.misses)}
}

// MissName notes a name that was looked up, and is not on the recording. The request
// that was to follow will not. It is false for one that was looked up in vain
// while recording too.
func (p *Player) MissName(name string) bool {
	if p.rec.unfound[name] {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.missed++
	p.keep(sandbox.ReplayMiss{At: p.now().UTC(), Method: "DNS", URL: name, Reason: string(sandbox.ReplayMissed), Hint: "no request to this host was recorded"})
	return true
}

func (p *Player) keep(m sandbox.ReplayMiss) {
	if len(p.mu.misses) == missesKept {
		p.mu.misses = p.mu.misses[1:]
	}
	p.mu.misses = append(p.mu.misses, m)
}

// MissError is a request without an answer. It is a sandbox.Error of the reason
// replay_miss or replay_truncated.
type MissError struct {
	Miss sandbox.ReplayMiss
}

func (e *MissError) Error() string { return e.Unwrap().Error() }

func (e *MissError) Unwrap() error {
	r := &sandbox.Error{Class: sandbox.NotFound, Reason: sandbox.Reason(e.Miss.Reason), Hint: e.Miss.Hint, Msg: e.Miss.Method + " " + e.Miss.URL + " is not on the recording"}
	if r.Reason == sandbox.ReplayTruncated {
		r.Msg = e.Miss.Method + " " + e.Miss.URL + " is not whole on the recording"
	}
	return r
}

// RoundTrip reads the request's body to its end before it answers: the body
// decides which answer it is.
func (p *Player) RoundTrip(req *http.Request) (*http.Response, error) {
	asked, err := askedIn(req)
	if err != nil {
		return nil, err
	}
	sum := sha256.New()
	if req.Body != nil {
		_, err = io.Copy(sum, req.Body)
		req.Body.Close()
		if err != nil {
			return nil, err
		}
	}
	asked.Body = hex.EncodeToString(sum.Sum(nil))
	e, err := p.find(asked)
	if err != nil {
		return nil, err
	}
	if f := e.end.Failed; f != nil {
		return nil, &sandbox.Error{Class: f.Class, Msg: string(f.Msg)}
	}
	return p.rec.response(e, req)
}

// find takes the answer of a request.
func (p *Player) find(a Asked) (*Exchange, error) {
	keys := []string{p.rules.key(a)}
	if !p.rules.IgnoreBody {
		loose := a
		loose.Body = anyBody
		keys = append(keys, p.rules.key(loose))
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, k := range keys {
		at, n := p.byKey[k], p.mu.next[k]
		if n < len(at) {
			e := &p.rec.Exchanges[at[n]]
			p.take(k, e)
			return p.play(a, e)
		}
	}
	for _, k := range keys {
		if at := p.byKey[k]; p.rules.RepeatLast && len(at) > 0 {
			return p.play(a, &p.rec.Exchanges[at[len(at)-1]])
		}
	}
	return nil, p.miss(a, sandbox.ReplayMissed, nearest(a, p.rec.Exchanges))
}

// take uses up the next answer of a key.
func (p *Player) take(key string, e *Exchange) {
	p.mu.next[key]++
	p.mu.unused--
	if p.note != nil {
		p.note(e.Number)
	}
}

func (p *Player) play(a Asked, e *Exchange) (*Exchange, error) {
	if why := e.unreplayable(); why != "" {
		return nil, p.miss(a, sandbox.ReplayTruncated, fmt.Sprintf("recorded as number %d: %s", e.Number, why))
	}
	p.mu.answered++
	return e, nil
}

func (p *Player) miss(a Asked, why sandbox.Reason, hint string) error {
	m := sandbox.ReplayMiss{At: p.now().UTC(), Method: a.Method, URL: a.URL(), Reason: string(why), Hint: hint}
	p.mu.missed++
	p.keep(m)
	return &MissError{m}
}

// seek takes exchanges for used that a player before this one answered with.
func (p *Player) seek(used []uint32) {
	done := make(map[uint32]bool, len(used))
	for _, n := range used {
		done[n] = true
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for key, at := range p.byKey {
		for _, i := range at {
			if !done[p.rec.Exchanges[i].Number] {
				break // equal ones are used in their order
			}
			p.mu.next[key]++
			p.mu.unused--
			p.mu.answered++
		}
	}
}

// Rewind begins the recording anew.
func (p *Player) Rewind() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	clear(p.mu.next)
	p.mu.answered, p.mu.missed, p.mu.misses, p.mu.unused = 0, 0, nil, int64(len(p.rec.Exchanges))
	if p.back != nil {
		return p.back()
	}
	return nil
}

// Close lets go of the recording. Requests under way may fail.
func (p *Player) Close() error {
	if p.close == nil {
		return nil
	}
	return p.close()
}

// Used is what was answered with by now.
func (p *Player) Used() (used []uint32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for key, n := range p.mu.next {
		for _, i := range p.byKey[key][:n] {
			used = append(used, p.rec.Exchanges[i].Number)
		}
	}
	slices.Sort(used)
	return used
}

// response is the answer as it came.
func (t *Recording) response(e *Exchange, req *http.Request) (*http.Response, error) {
	scan := t.scan
	var a answerHead
	if err := scan.json(e.answer, &a); err != nil {
		return nil, err
	}
	res := &http.Response{Status: fmt.Sprintf("%d %s", a.Status, http.StatusText(a.Status)), StatusCode: a.Status, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: a.Header.http(), ContentLength: a.Length, Request: req}
	b := &bodyReader{scan: scan, frames: e.body, then: io.EOF}
	if e.end.Cut {
		b.then = io.ErrUnexpectedEOF
	}
	res.Body = io.NopCloser(b)
	if len(a.Trailer) > 0 || len(e.end.Trailer) > 0 {
		res.Trailer = http.Header{}
		for _, k := range a.Trailer {
			res.Trailer[string(k)] = nil
		}
		res.Body = io.NopCloser(&trailingReader{b, func() {
			for k, vs := range e.end.Trailer.http() {
				res.Trailer[k] = vs
			}
		}})
	}
	if req.Method == http.MethodHead {
		res.Body = http.NoBody
	}
	return res, nil
}

// trailingReader calls then at the end, before whoever reads is told of it.
type trailingReader struct {
	r    io.Reader
	then func()
}

func (t *trailingReader) Read(p []byte) (int, error) {
	n, err := t.r.Read(p)
	if err == io.EOF {
		t.then()
	}
	return n, err
}

func trimBrackets(h string) string { return strings.TrimSuffix(strings.TrimPrefix(h, "["), "]") }

func isV6(h string) bool {
	a, err := netip.ParseAddr(h)
	return err == nil && a.Is6()
}
