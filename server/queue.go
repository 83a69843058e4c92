package server

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/quota"
	"github.com/cove-sandbox/cove/sandbox"
)

// createQueue is where creates wait for room on a full node, in turn between
// tenants (see quota.Queue). One is tried at a time: an end makes a round, in
// which the first of each tenant is tried until one fits, and then another.
//
// A round looks at the node once: were each to look, a place that comes free
// amid it would go to whoever is next and not to those who were tried before,
// whose turn it is.
type createQueue struct {
	look func(context.Context) (sandbox.Capacity, error) // says what the node has

	mu struct {
		sync.Mutex
		queue quota.Queue
		turns map[int64]chan struct{} // a ticket's turn; buffered
		round []int64                 // who is still to be tried; the first has the turn now
		again bool                    // something ended while a round was under way
		seen  *sandbox.Capacity       // by the round, once one was tried
	}
}

// lookAgain is how long a round is at most away: room may also come from what
// nobody reports, such as a sandbox that went to standby.
const lookAgain = 250 * time.Millisecond

func (r *createQueue) init(look func(context.Context) (sandbox.Capacity, error)) {
	r.look, r.mu.turns = look, map[int64]chan struct{}{}
}

// wake begins a round, if anybody waits.
func (r *createQueue) wake() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.wakeLocked()
}

func (r *createQueue) wakeLocked() {
	if len(r.mu.round) > 0 {
		r.mu.again = true
		return
	}
	r.mu.again, r.mu.seen = false, nil
	r.mu.round = r.mu.queue.Heads()
	r.callLocked()
}

// callLocked gives the turn to the first of the round.
func (r *createQueue) callLocked() {
	for len(r.mu.round) > 0 {
		if turn := r.mu.turns[r.mu.round[0]]; turn != nil {
			turn <- struct{}{}
			return
		}
		r.mu.round = r.mu.round[1:] // it left
	}
	if r.mu.again {
		r.wakeLocked()
	}
}

// over ends a turn. Whoever was served or gave up leaves; after a success the
// order is made anew.
func (r *createQueue) over(ticket int64, served, leaves bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	had := len(r.mu.round) > 0 && r.mu.round[0] == ticket
	switch {
	case served:
		r.mu.queue.Served(ticket)
	case leaves:
		r.mu.queue.Leave(ticket)
	}
	if served || leaves {
		delete(r.mu.turns, ticket)
	}
	if !had {
		return // gave up without having the turn
	}
	if r.mu.round = r.mu.round[1:]; served {
		r.mu.round = nil
		r.wakeLocked()
		return
	}
	r.callLocked()
}

// place is who enters the queue, and for what.
type place struct {
	tenant string
	weight int32
	wait   time.Duration     // at most
	want   sandbox.Resources // of one
	count  int               // that must fit at once
	tell   func(ahead int)   // how many are before it, as that changes; nil = nobody asks
}

// reserved is the memory that all of them are promised.
func (p place) reserved() int64 { return p.want.Reserved() * int64(p.count) }

// enter tries at once if nobody waits or no wait would help, and otherwise waits
// for its turn, as long as there is no room for what it wants or the attempt says
// no_capacity, and at most for wait. Several at once are not tried in vain: what
// was made of them would have to be taken back.
func (r *createQueue) enter(ctx context.Context, p place, attempt func() error) error {
	r.mu.Lock()
	empty := r.mu.queue.Len() == 0
	r.mu.Unlock()
	var err error = &sandbox.Error{Class: sandbox.NoCapacity, Msg: "others are waiting for room on the node", RetryAfter: time.Second}
	has, lookErr := r.look(ctx)
	if lookErr != nil {
		return lookErr
	}
	never := neverFits(has.Total, p.want) || has.Total.Memory > 0 && p.reserved() > has.Total.Memory || has.MaxSandboxes > 0 && int64(p.count) > has.MaxSandboxes
	switch {
	case p.count > 1 && never:
		return &sandbox.Error{Class: sandbox.NoCapacity, Msg: fmt.Sprintf("%d of this size are more than the node has room for, empty", p.count),
			Hint: "ask for fewer, for smaller ones, or for at least so many (at_least)"}
	case p.count > 1 && lacks(has, p) != nil:
		if err = lacks(has, p); p.wait <= 0 {
			return err
		}
	case p.wait <= 0 || empty || never:
		if err = attempt(); p.wait <= 0 || sandbox.ClassOf(err) != sandbox.NoCapacity {
			return err
		}
	}
	r.mu.Lock()
	ticket, turn := r.mu.queue.Join(p.tenant, p.weight), make(chan struct{}, 1)
	r.mu.turns[ticket] = turn
	r.mu.Unlock()

	patience := time.NewTimer(p.wait)
	defer patience.Stop()
	again := time.NewTicker(lookAgain)
	defer again.Stop()
	ahead := -1
	for {
		if p.tell != nil {
			r.mu.Lock()
			now := r.mu.queue.Ahead(ticket)
			r.mu.Unlock()
			if now != ahead {
				ahead = now
				p.tell(now)
			}
		}
		select {
		case <-turn:
			aerr := r.fits(ctx, p)
			if aerr == nil {
				aerr = attempt()
			}
			if sandbox.ClassOf(aerr) != sandbox.NoCapacity {
				r.over(ticket, aerr == nil, true)
				return aerr
			}
			err = aerr
			r.over(ticket, false, false)
		case <-again.C:
			r.wake()
		case <-patience.C:
			r.over(ticket, false, true)
			return err
		case <-ctx.Done():
			r.over(ticket, false, true)
			return ctx.Err()
		}
	}
}

// fits says whether the node had room, as far as it says, when the round began.
// For who has the turn. Asking costs nothing, while an attempt writes a record.
func (r *createQueue) fits(ctx context.Context, p place) error {
	r.mu.Lock()
	seen := r.mu.seen
	r.mu.Unlock()
	if seen == nil {
		c, err := r.look(ctx)
		if err != nil {
			return err
		}
		r.mu.Lock()
		seen, r.mu.seen = &c, &c
		r.mu.Unlock()
	}
	return lacks(*seen, p)
}

// lacks is nil where a node has room, as far as it says.
func lacks(c sandbox.Capacity, p place) error {
	var why *sandbox.Error
	switch {
	case c.Full != "":
		why = &sandbox.Error{Class: sandbox.NoCapacity, Msg: c.Full, Hint: c.FullHint}
	case c.MaxSandboxes > 0 && c.Sandboxes+int64(p.count) > c.MaxSandboxes:
		why = sandbox.NoPlace(c.MaxSandboxes)
	case c.Total.Memory > 0 && c.Used.Memory+p.reserved() > c.Total.Memory:
		why = sandbox.NoMemory(p.reserved())
	default:
		return nil
	}
	why.RetryAfter = time.Second
	return why
}

// neverFits says that an empty node would not have room for it either, or that it is
// no size at all: the attempt says what is wrong with it.
func neverFits(total, want sandbox.Resources) bool {
	beyond := func(want, total int64) bool { return want < 0 || total > 0 && want > total }
	return beyond(want.MilliCPU, total.MilliCPU) || beyond(want.Memory, total.Memory) || beyond(want.Disk, total.Disk)
}
