package secret

import (
	"bytes"
	"encoding/binary"
	"slices"
)

// automaton finds texts in a stream as Aho and Corasick do: one step for each
// byte, whatever it is and however much of a text came before it. So a guess
// that begins as a value does takes no longer to search than one that does not.
//
// A step is by what bytes mean, see escapes: a state is of texts as they are.
type automaton struct {
	pairs   []pair
	escapes bool // a byte may be written as an escape

	// States are in the order of their depth: 0 is where nothing was found yet,
	// then those of one byte, of two, and so on.
	char           []byte
	child, sibling []uint32
	fail           []uint32 // the longest end of a state's text that is a state as well
	found          []int32  // the longest pair that ends here; -1 = none
	levels         []uint32 // the first state of each depth
	// first and last number states so that those that fail to one, by any number
	// of steps, are from its first to before its last.
	first, last []uint32

	// The steps of the first states are a table. Deeper ones, which only long
	// values have, go by fail: memory stays bounded.
	class [256]uint32 // columns of the table
	width uint32
	table []uint32
	rows  uint32
}

const (
	maxRows = 8192

	// Where a search is, and what is in the table, is the offset of a state's row,
	// or a state that has none; and whether a text ends there.
	isFound = 1 << 31
	isDeep  = 1 << 30
)

func newAutomaton(pairs []pair, escapes bool) *automaton {
	a := &automaton{pairs: pairs, escapes: escapes, width: 1}
	for _, p := range pairs {
		for _, c := range p.from {
			if a.class[c] == 0 {
				a.class[c] = a.width
				a.width++
			}
		}
	}
	a.grow()
	a.number()
	a.rows = min(uint32(len(a.char)), maxRows)
	a.table = make([]uint32, a.rows*a.width)
	for q := range a.rows {
		row := a.table[q*a.width : (q+1)*a.width]
		if q > 0 {
			copy(row, a.table[a.fail[q]*a.width:])
		}
		for k := a.child[q]; k != 0; k = a.sibling[k] {
			row[a.class[a.char[k]]] = a.place(k)
		}
	}
	return a
}

// grow makes the states, of all texts at once, by depth.
func (a *automaton) grow() {
	add := func(c byte) uint32 {
		a.char, a.child, a.sibling = append(a.char, c), append(a.child, 0), append(a.sibling, 0)
		a.fail, a.found = append(a.fail, 0), append(a.found, -1)
		return uint32(len(a.char) - 1)
	}
	add(0)
	at := make([]uint32, len(a.pairs)) // the state of each text
	for depth, more := 0, true; more; depth++ {
		a.levels = append(a.levels, uint32(len(a.char)))
		more = false
		for i, p := range a.pairs {
			if len(p.from) <= depth {
				continue
			}
			more = true
			q, c := at[i], p.from[depth]
			k := a.kid(q, c)
			if k == 0 {
				k = add(c)
				a.sibling[k], a.child[q] = a.child[q], k
				for f := q; f != 0 && a.fail[k] == 0; {
					f = a.fail[f]
					a.fail[k] = a.kid(f, c)
				}
				a.found[k] = a.found[a.fail[k]]
			}
			if at[i] = k; len(p.from) == depth+1 {
				a.found[k] = int32(i)
			}
		}
	}
}

func (a *automaton) number() {
	n := len(a.char)
	size, taken := make([]uint32, n), make([]uint32, n)
	for q := n - 1; q > 0; q-- {
		size[q]++
		size[a.fail[q]] += size[q]
	}
	a.first, a.last = make([]uint32, n), make([]uint32, n)
	a.last[0] = uint32(n)
	for q := 1; q < n; q++ { // whom it fails to has its own already
		f := a.fail[q]
		a.first[q] = a.first[f] + 1 + taken[f]
		a.last[q] = a.first[q] + size[q]
		taken[f] += size[q]
	}
}

// within says whether all that is found from a place on is found from another.
func (a *automaton) within(place, other uint32) bool {
	q, o := a.state(place), a.state(other)
	return a.first[q] <= a.first[o] && a.first[o] < a.last[q]
}

func (a *automaton) kid(q uint32, c byte) uint32 {
	k := a.child[q]
	for k != 0 && a.char[k] != c {
		k = a.sibling[k]
	}
	return k
}

func (a *automaton) place(q uint32) (p uint32) {
	if p = q | isDeep; q < a.rows {
		p = q * a.width
	}
	if a.found[q] >= 0 {
		p |= isFound
	}
	return p
}

func (a *automaton) state(place uint32) uint32 {
	if place&isDeep != 0 {
		return place &^ (isDeep | isFound)
	}
	return place &^ isFound / a.width
}

func (a *automaton) step(place uint32, c byte) uint32 {
	if place&isDeep != 0 {
		q := a.state(place)
		for q >= a.rows {
			if k := a.kid(q, c); k != 0 {
				return a.place(k)
			}
			q = a.fail[q]
		}
		place = q * a.width
	}
	return a.table[place&^isFound+a.class[c]]
}

// depth is how many bytes of a text have come.
func (a *automaton) depth(place uint32) int {
	n, exact := slices.BinarySearch(a.levels, a.state(place))
	if exact {
		n++
	}
	return n
}

// search is an automaton on its way through a stream.
//
// What bytes mean depends on where one begins to read: in "%2Fa" there is "/a",
// and "2Fa" as well. So beside the way on which all bytes mean themselves there may
// be others, one from each escape on. Most are soon where that one is, and end.
type search struct {
	a      *automaton
	at     int // what follows is to be read yet
	place  uint32
	beside []path // at or behind at
	places []uint32
	next   []path
	toks   []token
}

type path struct {
	at    int
	place uint32
}

// run goes on to the end of data, or to where an escape is not whole yet. hit is
// called with where a pair ends.
func (s *search) run(data []byte, end bool, hit func(end, pair int)) {
	limit := len(data)
	for at := max(s.at, limit-maxEscape); at < limit && s.a.escapes && !end; at++ {
		if escaper(data[at]) {
			if _, whole := escapes(s.toks[:0], data[at:], &s.a.class); !whole {
				limit = at
			}
		}
	}
	for s.at < limit {
		to := min(limit, s.at+block)
		s.block(data, to, hit)
		s.at = to
	}
}

const (
	block = 4096
	lanes = 4
)

// block goes on to a place that is not far.
func (s *search) block(data []byte, to int, hit func(end, pair int)) {
	if len(s.places) < to-s.at+1 { // mostly a header's value, which is short
		s.places = make([]uint32, to-s.at+1)
	}
	places := s.places[:to-s.at+1]
	places[0] = s.place
	if s.a.fill(places, data[s.at:to]) {
		for i, p := range places[1:] {
			if p&isFound != 0 {
				hit(s.at+i+1, int(s.a.found[s.a.state(p)]))
			}
		}
	}
	if s.a.escapes {
		s.aside(data, to, places, hit)
	}
	s.place = places[len(places)-1]
}

// fill notes where each byte leads to. It says whether anything was found.
//
// Each step waits for the one before it, and the processor with it; so it takes
// several parts of data at once, each as if nothing came before it. Where that was
// wrong is corrected after: it is a few bytes, as a rule.
func (a *automaton) fill(places []uint32, data []byte) bool {
	all, n, table, class := uint32(0), len(data)/lanes, a.table, &a.class
	if uint32(len(a.char)) > a.rows || n < 64 {
		p := places[0]
		for i, c := range data {
			p = a.step(p, c)
			places[i+1] = p
			all |= p
		}
		return all&isFound != 0
	}
	d0 := data[:n]
	d1, d2, d3 := data[n:][:len(d0)], data[2*n:][:len(d0)], data[3*n:][:len(d0)]
	to := places[1:]
	t0, t1, t2, t3 := to[:len(d0)], to[n:][:len(d0)], to[2*n:][:len(d0)], to[3*n:][:len(d0)]
	p0, p1, p2, p3 := places[0], uint32(0), uint32(0), uint32(0)
	for i := range d0 {
		p0 = table[p0&^isFound+class[d0[i]]]
		p1 = table[p1&^isFound+class[d1[i]]]
		p2 = table[p2&^isFound+class[d2[i]]]
		p3 = table[p3&^isFound+class[d3[i]]]
		t0[i], t1[i], t2[i], t3[i] = p0, p1, p2, p3
		all |= p0 | p1 | p2 | p3
	}
	for lane := 1; lane < lanes; lane++ {
		p := to[lane*n-1]
		for i := lane * n; i < lanes*n; i++ {
			if p = a.step(p, data[i]); to[i] == p {
				break
			}
			to[i] = p
			all |= p
		}
	}
	p := to[lanes*n-1]
	for i := lanes * n; i < len(data); i++ {
		p = a.step(p, data[i])
		to[i] = p
		all |= p
	}
	return all&isFound != 0
}

// aside follows what escapes mean.
func (s *search) aside(data []byte, to int, places []uint32, hit func(end, pair int)) {
	var next [len(escapers)]int // of each
	for i := range next {
		next[i] = s.at - 1
	}
	for at := s.at; ; at++ {
		escape := to
		for i := range next {
			if next[i] < at {
				next[i] = to
				if at < to && data[at] == escapers[i] { // they often come together
					next[i] = at
				} else if n := bytes.IndexByte(data[at:to], escapers[i]); n >= 0 {
					next[i] = at + n
				}
			}
			escape = min(escape, next[i])
		}
		at = max(at, escape)
		for _, p := range s.beside {
			at = min(at, p.at)
		}
		if at >= to {
			return
		}
		s.toks = s.toks[:0]
		if at == escape {
			s.toks, _ = escapes(s.toks, data[at:], &s.a.class)
		}
		place := places[at-s.at]
		s.next = s.next[:0]
		s.means(at, place, hit)
		for _, p := range s.beside {
			switch {
			case p.at > at:
				s.add(p)
			case !s.a.within(p.place, place):
				s.means(at, p.place, hit)
				s.reach(path{at + 1, s.a.step(p.place, data[at])}, hit)
			}
		}
		s.beside, s.next = s.next, s.beside
	}
}

// means goes on from a place by what the escapes there mean.
func (s *search) means(at int, place uint32, hit func(end, pair int)) {
	for i := range s.toks {
		t := &s.toks[i] // a copy would wait for all of it to be written
		p, text := place, t.text
		for range t.n {
			p = s.a.step(p, byte(text))
			text >>= 8
		}
		s.reach(path{at + t.size, p}, hit)
	}
}

func (s *search) reach(p path, hit func(end, pair int)) {
	if p.place != 0 && s.add(p) && p.place&isFound != 0 {
		hit(p.at, int(s.a.found[s.a.state(p.place)]))
	}
}

func (s *search) add(p path) bool {
	for i, o := range s.next {
		switch {
		case o.at != p.at:
		case s.a.within(p.place, o.place):
			return false
		case s.a.within(o.place, p.place):
			s.next[i] = p
			return true
		}
	}
	s.next = append(s.next, p)
	return true
}

// forget drops the first n bytes of data.
func (s *search) forget(n int) {
	s.at -= n
	for i := range s.beside {
		s.beside[i].at -= n
	}
}

// begins says where a text begins that ends at end, not before low: as far back
// as it may be read to.
func (a *automaton) begins(data []byte, low, end int, text []byte) int {
	if from := end - len(text); from >= low && bytes.Equal(data[from:end], text) &&
		(!a.escapes || !bytes.ContainsAny(data[max(low, from-maxEscape):from], escapers)) {
		return from
	}
	// left[at%window] is how much of the text may be before what stands from at to
	// end.
	const window = maxEscape + 1
	var left [window][]int
	left[end%window] = []int{len(text)}
	begin, last := low, end
	var toks []token
	known := make([]bool, len(text)+1) // of what is in here
	for at := end - 1; at >= low && last-at <= maxEscape; at-- {
		here := left[at%window][:0]
		toks = append(toks[:0], byteToken(1, data[at]))
		if a.escapes && escaper(data[at]) {
			toks, _ = escapes(toks, data[at:], &a.class)
		}
		for _, t := range toks {
			if at+t.size > end {
				continue
			}
			means := binary.LittleEndian.AppendUint32(nil, t.text)[:t.n]
			for _, n := range left[(at+t.size)%window] {
				if before, ok := bytes.CutSuffix(text[:n], means); ok && !known[len(before)] {
					known[len(before)] = true
					here = append(here, len(before))
				}
			}
		}
		if left[at%window] = here; len(here) > 0 {
			last = at
		}
		if known[0] {
			begin = at
		}
		for _, n := range here {
			known[n] = false
		}
	}
	return begin
}
