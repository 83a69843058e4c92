package server

import (
	"context"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/quota"
	"github.com/cove-sandbox/cove/sandbox"
)

// waitingRoom is where creates wait for room on a full node, in turn between
// tenants (see quota.Queue). One is tried at a time: an end makes a round, in
// which the first of each tenant is tried until one fits, and then another.
//
// A round looks at the node once: were each to look, a place that comes free
// amid it would go to whoever is next and not to those who were tried before,
// whose turn it is.
type waitingRoom struct {
	look func() Capacity // says what the node has

	mu    sync.Mutex
	queue quota.Queue
	turns map[int64]chan struct{} // a ticket's turn; buffered
	round []int64                 // who is still to be tried; the first has the turn now
	again bool                    // something ended while a round was under way
	seen  *Capacity               // by the round, once one was tried; of whoever has the turn
}

// lookAgain is how long a round is at most away: room may also come from what
// nobody reports, such as a sandbox that went to standby.
const lookAgain = 250 * time.Millisecond

func (r *waitingRoom) init(look func() Capacity) {
	r.look, r.turns = look, map[int64]chan struct{}{}
}

// wake begins a round, if anybody waits.
func (r *waitingRoom) wake() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.wakeLocked()
}

func (r *waitingRoom) wakeLocked() {
	if len(r.round) > 0 {
		r.again = true
		return
	}
	r.again, r.seen = false, nil
	r.round = r.queue.Heads()
	r.callLocked()
}

// callLocked gives the turn to the first of the round.
func (r *waitingRoom) callLocked() {
	for len(r.round) > 0 {
		if turn := r.turns[r.round[0]]; turn != nil {
			turn <- struct{}{}
			return
		}
		r.round = r.round[1:] // it left
	}
	if r.again {
		r.wakeLocked()
	}
}

// over ends a turn. Whoever was served or gave up leaves; after a success the
// order is made anew.
func (r *waitingRoom) over(ticket int64, served, leaves bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	had := len(r.round) > 0 && r.round[0] == ticket
	switch {
	case served:
		r.queue.Served(ticket)
	case leaves:
		r.queue.Leave(ticket)
	}
	if served || leaves {
		delete(r.turns, ticket)
	}
	if !had {
		return // gave up without having the turn
	}
	if r.round = r.round[1:]; served {
		r.round = nil
		r.wakeLocked()
		return
	}
	r.callLocked()
}

// enter tries at once if nobody waits or no wait would help, and otherwise waits
// for its turn, as long as there is no room for what it wants or the attempt says
// no_capacity, and at most for wait.
func (r *waitingRoom) enter(ctx context.Context, tenant string, weight int32, wait time.Duration, want sandbox.Resources, attempt func() error) error {
	r.mu.Lock()
	empty := r.queue.Len() == 0
	r.mu.Unlock()
	var err error = &sandbox.Error{Class: sandbox.NoCapacity, Msg: "others are waiting for room on the node", RetryAfter: time.Second}
	if wait <= 0 || empty || never(r.look().Total, want) {
		if err = attempt(); wait <= 0 || sandbox.ClassOf(err) != sandbox.NoCapacity {
			return err
		}
	}
	r.mu.Lock()
	ticket, turn := r.queue.Join(tenant, weight), make(chan struct{}, 1)
	r.turns[ticket] = turn
	r.mu.Unlock()

	patience := time.NewTimer(wait)
	defer patience.Stop()
	again := time.NewTicker(lookAgain)
	defer again.Stop()
	for {
		select {
		case <-turn:
			aerr := r.fits(want)
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
func (r *waitingRoom) fits(want sandbox.Resources) error {
	if r.seen == nil {
		c := r.look()
		r.seen = &c
	}
	c := *r.seen
	if c.MaxSandboxes > 0 && c.Sandboxes >= c.MaxSandboxes || c.Total.MilliCPU > 0 && c.Used.MilliCPU+want.MilliCPU > c.Total.MilliCPU ||
		c.Total.Memory > 0 && c.Used.Memory+want.Memory > c.Total.Memory || c.Total.Disk > 0 && c.Used.Disk+want.Disk > c.Total.Disk {
		return &sandbox.Error{Class: sandbox.NoCapacity, Msg: "the node is full", RetryAfter: time.Second,
			Hint: "kill what is not needed, or ask again"}
	}
	return nil
}

// never says that an empty node would not have room for it either, or that it is
// no size at all: the attempt says what is wrong with it.
func never(total, want sandbox.Resources) bool {
	beyond := func(want, total int64) bool { return want < 0 || total > 0 && want > total }
	return beyond(want.MilliCPU, total.MilliCPU) || beyond(want.Memory, total.Memory) || beyond(want.Disk, total.Disk)
}
