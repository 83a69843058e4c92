package secret

import (
	"bytes"
	"cmp"
	"io"
	"slices"
	"time"
)

// hiding is what is to be taken out of answers.
type hiding struct {
	*automaton
	hold int
}

func hidingOf(secrets []*bound) hiding {
	var pairs []pair
	for _, b := range secrets {
		pairs = append(pairs, forms(b.value, b.is.Placeholder)...)
	}
	a := newAutomaton(pairs, true)
	return hiding{a, len(a.levels) * maxWritten}
}

// all replaces in a whole text.
func (h hiding) all(s string) string {
	r := h.replacer()
	return string(r.feed(nil, []byte(s), true))
}

func (h hiding) replacer() replacer {
	return replacer{search: search{a: h.automaton}, hold: h.hold}
}

// replacer replaces texts in a stream, wherever its pieces begin and end.
//
// What may be part of a text is held back until it is known. In answers that is
// the end of what came, as long as a text may be, whatever it is: if it were only
// what begins as a value does, code inside would learn by what is late whether
// its guess is right so far, and so a value byte by byte. What a line feed ends
// is not held, because no text has one, nor what a message ends; everybody can
// see where those are.
type replacer struct {
	search   search
	hold     int       // so many bytes, always; 0 = what begins a text, which is no secret
	mask     bool      // by stars, as many: lengths stay
	messages *messages // nil = none are known

	data []byte // what a text may begin in, out or not
	done int    // bytes of data that are out or replaced
	past int    // where the last text that was replaced ends
	hits []hit
	last hit // found last
}

// hit is where a text is in data.
type hit struct{ from, to, pair int }

// feed returns what is known of the stream after more of it. end says that
// nothing follows.
func (r *replacer) feed(out, in []byte, end bool) []byte {
	before := len(r.data)
	r.data = append(r.data, in...)
	r.search.run(r.data, end, r.hit)
	keep, known := r.keep()
	if r.messages != nil {
		if n := r.messages.feed(in); n > 0 {
			known = max(known, before+n)
		}
	}
	if end {
		known = len(r.data)
	}
	out = r.emit(out, known)
	if keep > 0 {
		r.forget(keep)
	}
	return out
}

// keep says from where on a text may begin that is not whole yet, and up to
// where nothing is held back.
func (r *replacer) keep() (from, known int) {
	n := len(r.data)
	if r.hold > 0 {
		from = max(0, n-r.hold)
		from += bytes.LastIndexByte(r.data[from:], '\n') + 1
		return from, from
	}
	from = n - r.search.a.depth(r.search.place)
	return from, from
}

// holds says that something is held back.
func (r *replacer) holds() bool { return r.done < len(r.data) }

// flush lets go of what is held back. If it began a text, the rest of that is
// still replaced.
func (r *replacer) flush(out []byte) []byte { return r.emit(out, len(r.data)) }

func (r *replacer) hit(to, pair int) {
	low := 0
	if r.last.pair == pair && r.last.to <= to {
		// One that overlaps the same before it need not be followed through it: of
		// "aaaa…" every byte ends one.
		low = max(0, r.last.to-1)
	}
	a := r.search.a
	r.last = hit{a.begins(r.data, low, to, a.pairs[pair].from), to, pair}
	r.hits = append(r.hits, r.last)
}

// emit lets data out up to known. Texts that begin before are all found. Where
// they overlap, what is first stands for all; where they begin together, the
// longest.
func (r *replacer) emit(out []byte, known int) []byte {
	slices.SortFunc(r.hits, func(a, b hit) int { return cmp.Or(a.from-b.from, b.to-a.to) })
	used := 0
	for _, h := range r.hits {
		if h.from >= known {
			break
		}
		used++
		if h.to <= r.done {
			continue
		}
		if h.from > r.done {
			out = append(out, r.data[r.done:h.from]...)
			r.done = h.from
		}
		switch {
		case r.mask:
			out = append(out, bytes.Repeat([]byte("*"), h.to-r.done)...)
		case h.from >= r.past:
			out = append(out, r.search.a.pairs[h.pair].to...)
		}
		r.done, r.past = h.to, h.to
	}
	r.hits = slices.Delete(r.hits, 0, used)
	if known > r.done {
		out = append(out, r.data[r.done:known]...)
		r.done = known
	}
	return out
}

// forget drops the first n bytes of data.
func (r *replacer) forget(n int) {
	r.data = append(r.data[:0], r.data[n:]...)
	r.done -= n
	r.past = max(0, r.past-n)
	r.search.forget(n)
	for i := range r.hits {
		r.hits[i].from -= n
		r.hits[i].to -= n
	}
	r.last.from, r.last.to = r.last.from-n, r.last.to-n
}

// quiet is how long a stream must bring nothing for what is held back to be let
// go: somebody may be waiting for it before they go on. Of a value whose parts
// come further apart all but the last part gets out, so it is longer than code
// inside can make a gap: by an answer that fills the first window of a far server
// (a round trip), or by not reading. 50 ms were less than some round trips.
const quiet = 3 * time.Second

// quietRequest is that of a request of which nobody knows how much comes. What is
// held back there is the beginning of a placeholder, or by chance looks so, and
// its sender may wait for an answer before it goes on.
const quietRequest = 50 * time.Millisecond

// body is a reader with texts replaced.
type body struct {
	io.ReadCloser
	r     replacer
	live  bool // what is held back is let go after quiet
	quiet time.Duration
	atEnd func() // once, when all was read; may be nil

	in   []byte
	full bool      // by the last read
	got  chan read // what the read under way has; nil = there is none
	out  []byte
	rest []byte // of out, not read yet
	err  error
}

const maxRead = 64 << 10

type read struct {
	n   int
	err error
}

func (b *body) Read(p []byte) (int, error) {
	for len(b.rest) == 0 && b.err == nil {
		n, err, more := b.more()
		if !more {
			b.out = b.r.flush(b.out[:0])
		} else {
			b.err, b.full = err, n == len(b.in)
			b.out = b.r.feed(b.out[:0], b.in[:n], err != nil)
			if err == io.EOF && b.atEnd != nil {
				b.atEnd()
			}
		}
		b.rest = b.out
	}
	if n := copy(p, b.rest); n > 0 || len(p) == 0 {
		b.rest = b.rest[n:]
		return n, nil
	}
	return 0, b.err
}

// more reads into b.in. more is false if nothing came for a while and something
// is held back.
func (b *body) more() (n int, err error, more bool) {
	if b.in == nil {
		b.in = make([]byte, 16<<10)
	}
	if b.full && len(b.in) < maxRead && b.got == nil {
		b.in = make([]byte, maxRead) // each read may be handed over between two threads
	}
	waits := b.live && b.r.holds()
	if b.got == nil {
		if !waits {
			n, err = b.ReadCloser.Read(b.in)
			return n, err, true
		}
		got := make(chan read, 1) // who closes the body does not read it any more
		b.got = got
		go func() {
			n, err := b.ReadCloser.Read(b.in)
			got <- read{n, err}
		}()
	}
	var over <-chan time.Time
	if waits {
		t := time.NewTimer(b.quiet)
		defer t.Stop()
		over = t.C
	}
	select {
	case r := <-b.got:
		b.got = nil
		return r.n, r.err, true
	case <-over:
		return 0, nil, false
	}
}

// upgraded is a connection that speaks another protocol by now. Of what the
// server says values are masked in place, so that frames keep their lengths.
type upgraded struct {
	io.Writer
	*body
}
