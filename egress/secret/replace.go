package secret

import (
	"bytes"
	"io"
)

// replacer replaces texts in a stream, wherever its pieces begin and end.
//
// What may be the beginning of a text is held back until it is known. But for
// less than holdFrom bytes: an answer of which the last byte is, by chance, the
// first of a value must not wait for a byte that comes only after the client has
// said something. Such a beginning is let through; if the rest follows, that rest
// is replaced, and no more than holdFrom-1 bytes of the value are out.
type replacer struct {
	pairs []pair
	mask  bool // by stars, as many: lengths stay

	tail     []byte // may begin a text
	released int    // bytes of tail that are out already
}

const holdFrom = 4

// feed returns what is known of the stream after more of it. end says that
// nothing follows.
func (r *replacer) feed(out, in []byte, end bool) []byte {
	data := in
	if len(r.tail) > 0 {
		data = append(r.tail, in...)
	}
	skip := r.released // bytes of data that are out
	r.tail, r.released = nil, 0
	next := make([]int, len(r.pairs)) // where each text is next; -1 = nowhere
	for i, p := range r.pairs {
		next[i] = bytes.Index(data, p.from)
	}
	emit := func(from, to int) {
		if from = max(from, skip); from < to {
			out = append(out, data[from:to]...)
		}
	}
	at := 0
	for {
		found := -1
		for i, p := range r.pairs {
			if next[i] >= 0 && next[i] < at {
				if next[i] = bytes.Index(data[at:], p.from); next[i] >= 0 {
					next[i] += at
				}
			}
			if next[i] >= 0 && (found < 0 || next[i] < next[found]) {
				found = i
			}
		}
		if found < 0 {
			break
		}
		p := r.pairs[found]
		emit(at, next[found])
		switch past := next[found] + len(p.from); {
		case !r.mask:
			out = append(out, p.to...)
		default:
			out = append(out, bytes.Repeat([]byte("*"), past-max(next[found], skip))...)
		}
		at = next[found] + len(p.from)
	}
	keep := len(data)
	if !end {
		keep = r.begins(data, at)
	}
	emit(at, keep)
	if rest := data[keep:]; len(rest) > 0 {
		r.tail = bytes.Clone(rest)
		r.released = max(0, skip-keep)
		if len(rest) < holdFrom {
			emit(keep, len(data))
			r.released = len(rest)
		}
	}
	return out
}

// begins finds the first place from which on data may be the beginning of a text.
func (r *replacer) begins(data []byte, at int) int {
	first := len(data)
	for _, p := range r.pairs {
		for i := max(at, len(data)-len(p.from)+1); i < first; i++ {
			if bytes.HasPrefix(p.from, data[i:]) {
				first = i
				break
			}
		}
	}
	return first
}

// replaceAll replaces in a whole text.
func replaceAll(pairs []pair, s string) string {
	r := replacer{pairs: pairs}
	return string(r.feed(nil, []byte(s), true))
}

// body is a reader with texts replaced.
type body struct {
	io.ReadCloser
	r     replacer
	atEnd func() // once, when all was read; may be nil

	in   []byte
	out  []byte
	rest []byte // of out, not read yet
	err  error
}

func newBody(rc io.ReadCloser, pairs []pair, atEnd func()) *body {
	return &body{ReadCloser: rc, r: replacer{pairs: pairs}, atEnd: atEnd}
}

func (b *body) Read(p []byte) (int, error) {
	for len(b.rest) == 0 && b.err == nil {
		if b.in == nil {
			b.in = make([]byte, 16<<10)
		}
		var n int
		n, b.err = b.ReadCloser.Read(b.in)
		b.out = b.r.feed(b.out[:0], b.in[:n], b.err == io.EOF)
		b.rest = b.out
		if b.err == io.EOF && b.atEnd != nil {
			b.atEnd()
		}
	}
	if n := copy(p, b.rest); n > 0 || len(p) == 0 {
		b.rest = b.rest[n:]
		return n, nil
	}
	return 0, b.err
}

// upgraded is a connection that speaks another protocol by now. Of what the
// server says values are masked in place, so that frames keep their lengths.
type upgraded struct {
	io.Writer
	*body
}
