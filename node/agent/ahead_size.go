package agent

import (
	"cmp"
	"math"
	"slices"
	"time"
)

const (
	// aheadIdle without a create, and a checkpoint is not in use any more: what is held
	// of it costs what an idle sandbox does.
	aheadIdle = 5 * time.Minute
	// aheadMost kernels are held of one checkpoint: a fork of eight is usual.
	aheadMost = 8
	// aheadFrom occasions on, kernels are held of a checkpoint. One says nothing of a
	// second: a search that forks each of its snapshots once would restore everything
	// twice.
	aheadFrom = 2
	// occasion is how long what comes at once lasts: the children of a fork are one.
	occasion = time.Second
	// heldMemory is what one takes, of a checkpoint whose pages it has not touched yet.
	heldMemory = 24 << 20
)

// use is how a checkpoint was used of late.
type use struct {
	occasions  int           // on which sandboxes were created from it, since it was last not in use
	peak, rate float64       // of creates, from demand
	idle       time.Duration // since the last
	expected   int           // that callers said they will make: see Node.Expect
}

// wants is how many kernels should be held of a checkpoint, if nothing bounds it: as
// many as the busiest second of late took, and those taken while one is restored, or as
// many as are expected.
func (u use) wants(restore time.Duration) int {
	want := u.expected
	if u.occasions >= aheadFrom && u.idle < aheadIdle {
		want = max(want, 1, int(math.Ceil(u.peak-0.5+u.rate*restore.Seconds())))
	}
	return min(want, aheadMost)
}

// over says that a checkpoint is not in use any more.
func (u use) over() bool { return u.expected == 0 && u.idle >= aheadIdle }

// heldBounds are all that bounds the held kernels of a class together.
type heldBounds struct {
	most    int
	held    int   // that there are
	memory  int64 // of the host that is free above its reserve; negative = below
	restore time.Duration
}

// heldTargets is how many kernels to hold of each checkpoint. Where not all can have what
// they want, each gets one before any gets a second, who was used last first.
func heldTargets(uses []use, b heldBounds) []int {
	left := max(min(b.most, b.held+int(math.Floor(float64(b.memory)/heldMemory))), 0)
	order := make([]int, len(uses))
	for i := range order {
		order[i] = i
	}
	since := func(i int) time.Duration {
		if uses[i].expected > 0 {
			return 0
		}
		return uses[i].idle
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(since(a), since(b)) })
	targets := make([]int, len(uses))
	for given := true; given && left > 0; {
		given = false
		for _, i := range order {
			if left > 0 && targets[i] < uses[i].wants(b.restore) {
				targets[i]++
				left--
				given = true
			}
		}
	}
	return targets
}
