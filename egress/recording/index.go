package recording

import (
	"encoding/json"
	"errors"
	"io"
	"net/url"
	"strings"

	"github.com/cove-sandbox/cove/sandbox"
)

// Recording is a recording that was read: where everything is, and what was asked.
// Bodies stay in the file. Immutable, and shared by all who replay it.
type Recording struct {
	Header    Header
	Exchanges []Exchange // complete ones, in the order they were asked

	scan     scanner // by value: each reader takes a copy with a buffer of its own
	finished *finish
	whole    int64 // bytes up to the end of the last whole frame
	open     int   // exchanges without an end
	last     uint32
	heads    int // bytes of requests' heads in memory
	hosts    map[string]bool
	unfound  map[string]bool // names that were looked up in vain
}

// Exchange is one request and its answer.
type Exchange struct {
	Number  uint32 // from 1
	Request Asked

	request frame
	sent    []frame
	answer  frame // kind 0 = there was none
	body    []frame
	end     end
}

// Read reads a recording. What comes after the last whole frame, or an exchange that
// was not finished, is left out: that is what a crash leaves. All else that is
// wrong is sandbox.Corrupt.
func Read(r io.ReaderAt, size int64, s Sealer) (*Recording, error) { return read(r, size, s, nil) }

// read is Read; unpacked, if not nil, is told the size of each payload that is
// looked at, then and later, and stops it by an error.
func read(r io.ReaderAt, size int64, s Sealer, unpacked func(n int) error) (*Recording, error) {
	sc, err := openRecording(r, size, s)
	if err != nil {
		return nil, err
	}
	sc.unpacked = unpacked
	t := &Recording{hosts: map[string]bool{}, unfound: map[string]bool{}, whole: preambleLen}
	open := map[uint32]*Exchange{}
	for n := 0; ; n++ {
		f, err := sc.next()
		if err == io.EOF || errors.Is(err, errTorn) {
			break
		}
		if n >= maxFrames {
			return nil, corrupt("more than %d frames", maxFrames)
		}
		if t.finished != nil {
			return nil, corrupt("something after its end")
		}
		err = t.take(sc, f, n == 0, open)
		if errors.Is(err, errTorn) {
			break
		}
		if err != nil {
			return nil, err
		}
		t.whole = f.next()
	}
	if t.whole == preambleLen {
		return nil, corrupt("it has no header")
	}
	t.open = len(open)
	t.scan = *sc
	t.scan.buf = nil
	sortExchanges(t.Exchanges)
	return t, nil
}

// take takes in a frame.
func (t *Recording) take(sc *scanner, f frame, first bool, open map[uint32]*Exchange) error {
	k := f.kind &^ compressed
	if first != (k == kindHeader) {
		return corrupt("its header is not where it belongs")
	}
	e := open[f.exchange]
	switch k {
	case kindHeader:
		return sc.json(f, &t.Header)
	case kindFinish:
		end := &finish{}
		if err := sc.json(f, end); err != nil {
			return err
		}
		t.finished = end
		return nil
	case kindUnfound:
		b, err := sc.payload(f)
		if err == nil && len(t.unfound) < maxUnfound && len(b) <= maxName {
			t.unfound[string(b)] = true
		}
		return err
	case kindRequest:
		// Numbers only ever go up: what is open twice, or again after its end,
		// was not written by a recorder.
		if f.exchange <= t.last {
			return corrupt("exchange %d after %d", f.exchange, t.last)
		}
		if len(t.Exchanges)+len(open) >= maxExchanges {
			return corrupt("more than %d exchanges", maxExchanges)
		}
		b, err := sc.payload(f)
		if err != nil {
			return err
		}
		if t.heads += len(b); t.heads > maxHeads {
			return corrupt("more than %d bytes of headers", maxHeads)
		}
		var h requestHead
		if err := json.Unmarshal(b, &h); err != nil {
			return corrupt("exchange %d: %v", f.exchange, err)
		}
		asked, err := h.asked()
		if err != nil {
			return err
		}
		t.last = f.exchange
		open[f.exchange] = &Exchange{Number: f.exchange, Request: asked, request: f}
		return nil
	}
	if e == nil {
		return corrupt("a frame %q of an exchange that is not open", byte(k))
	}
	switch k {
	case kindRequestBody, kindAnswerBody:
		if k == kindAnswerBody && e.answer.kind == 0 {
			return corrupt("exchange %d: a body without an answer", f.exchange)
		}
		// Checked here once, so that a replay does not find out half-way.
		if _, err := sc.payload(f); err != nil {
			return err
		}
		if k == kindRequestBody {
			e.sent = append(e.sent, f)
		} else {
			e.body = append(e.body, f)
		}
	case kindAnswer:
		if e.answer.kind != 0 {
			return corrupt("exchange %d: two answers", f.exchange)
		}
		var a answerHead
		if err := sc.json(f, &a); err != nil {
			return err
		}
		if a.Status < 100 || a.Status > 999 {
			return corrupt("exchange %d: status %d", f.exchange, a.Status)
		}
		e.answer = f
	case kindEnd:
		if err := sc.json(f, &e.end); err != nil {
			return err
		}
		if e.answer.kind == 0 && e.end.Failed == nil {
			return corrupt("exchange %d ends without an answer", f.exchange)
		}
		e.Request.Body = e.end.Hash
		if e.end.Partial {
			e.Request.Body = anyBody
		}
		delete(open, f.exchange)
		t.hosts[e.Request.Host] = true
		t.Exchanges = append(t.Exchanges, *e)
	default:
		return corrupt("a frame of an unknown kind %q", byte(k))
	}
	return nil
}

// asked is what a request is matched by; its body comes with its end.
func (h requestHead) asked() (Asked, error) {
	u, err := url.Parse(string(h.URL))
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return Asked{}, corrupt("a request for %.200q", string(h.URL))
	}
	return askedFor(string(h.Method), u, h.Header.http()), nil
}

// Knows says whether a host of this name was asked.
func (t *Recording) Knows(name string) bool { return t.hosts[strings.ToLower(name)] }

// Finished says whether it has an end.
func (t *Recording) Finished() bool { return t.finished != nil }

// count fills in what a recording's record says of its content.
func (t *Recording) count(r *sandbox.Recording) {
	r.Exchanges, r.Bytes = int64(len(t.Exchanges)), t.whole
	for _, e := range t.Exchanges {
		if e.unreplayable() != "" {
			r.Truncated++
		}
	}
	r.State = sandbox.RecordingOpen
	if f := t.finished; f != nil {
		r.State, r.FinishedAt, r.Dropped = sandbox.RecordingFinished, f.At, f.Dropped
		if f.Interrupted {
			r.State = sandbox.RecordingInterrupted
		}
	}
}

// unreplayable says why an exchange cannot be played; "" if it can.
func (e *Exchange) unreplayable() string {
	switch {
	case e.end.Truncated:
		return "its answer was longer than a recording takes"
	case e.end.Upgrade:
		return "it became another protocol (a WebSocket), which is not recorded"
	}
	return ""
}

// bodyReader reads a body off the recording.
type bodyReader struct {
	scan   scanner
	frames []frame
	left   []byte
	then   error // after the last
}

func (b *bodyReader) Read(p []byte) (int, error) {
	for len(b.left) == 0 {
		if len(b.frames) == 0 {
			return 0, b.then
		}
		var err error
		if b.left, err = b.scan.payload(b.frames[0]); err != nil {
			return 0, err
		}
		b.frames = b.frames[1:]
	}
	n := copy(p, b.left)
	b.left = b.left[n:]
	return n, nil
}
