package quota

import (
	"cmp"
	"slices"
)

// Queue orders those who wait for room on a full node: in turn between tenants,
// in order of arrival within one. It is start-time fair queueing: a tenant that
// is served moves back by one turn divided by its weight, and one that comes
// back after a pause starts at the present, so that nobody saves up turns.
//
// The zero value is empty. Not safe for concurrent use.
type Queue struct {
	lines   map[string]*line
	present float64 // the turn of whoever was served last
	tickets map[int64]string
	last    int64
}

type line struct {
	turn    float64
	step    float64
	waiting []int64
}

// Join adds one to its tenant's line and returns its ticket. The weight is the
// tenant's from now on; 0 is 1.
func (q *Queue) Join(tenant string, weight int32) int64 {
	if q.lines == nil {
		q.lines, q.tickets = map[string]*line{}, map[int64]string{}
	}
	l := q.lines[tenant]
	if l == nil {
		l = &line{}
		q.lines[tenant] = l
	}
	if len(l.waiting) == 0 {
		l.turn = max(l.turn, q.present)
	}
	l.step = 1 / float64(max(weight, 1))
	q.last++
	l.waiting = append(l.waiting, q.last)
	q.tickets[q.last] = tenant
	return q.last
}

// Len is how many wait.
func (q *Queue) Len() int { return len(q.tickets) }

// Heads are the first of each line, in the order in which they should be tried.
// A head that does not fit does not hold up the others.
func (q *Queue) Heads() []int64 {
	type head struct {
		turn   float64
		ticket int64
	}
	var heads []head
	for _, l := range q.lines {
		if len(l.waiting) > 0 {
			heads = append(heads, head{l.turn, l.waiting[0]})
		}
	}
	slices.SortFunc(heads, func(a, b head) int { return cmp.Or(cmp.Compare(a.turn, b.turn), cmp.Compare(a.ticket, b.ticket)) })
	out := make([]int64, len(heads))
	for i, h := range heads {
		out[i] = h.ticket
	}
	return out
}

// Ahead is how many will be served before one that waits, if all fit; -1 if it
// does not wait.
func (q *Queue) Ahead(ticket int64) int {
	own := q.lines[q.tickets[ticket]]
	if own == nil {
		return -1
	}
	n := slices.Index(own.waiting, ticket)
	turn := own.turn + float64(n)*own.step
	for _, l := range q.lines {
		if l == own || len(l.waiting) == 0 || l.turn > turn {
			continue
		}
		before := min(int((turn-l.turn)/l.step)+1, len(l.waiting))
		if l.turn+float64(before-1)*l.step == turn && l.waiting[before-1] > ticket {
			before-- // of the same turn, and came later
		}
		n += before
	}
	return n
}

// Served takes out one that got what it waited for, which is its tenant's turn.
func (q *Queue) Served(ticket int64) {
	l := q.remove(ticket)
	if l == nil {
		return
	}
	q.present = max(q.present, l.turn)
	l.turn += l.step
	q.tidy()
}

// Leave takes out one that gives up, which costs its tenant nothing.
func (q *Queue) Leave(ticket int64) {
	if q.remove(ticket) != nil {
		q.tidy()
	}
}

func (q *Queue) remove(ticket int64) *line {
	l := q.lines[q.tickets[ticket]]
	if l == nil {
		return nil
	}
	delete(q.tickets, ticket)
	l.waiting = slices.DeleteFunc(l.waiting, func(t int64) bool { return t == ticket })
	return l
}

// tidy forgets lines that are empty and whose turn is not in the future. When nobody waits at all,
// there is nobody left to be fair to.
func (q *Queue) tidy() {
	for tenant, l := range q.lines {
		if len(l.waiting) == 0 && (l.turn <= q.present || len(q.tickets) == 0) {
			delete(q.lines, tenant)
		}
	}
}
