package snapshot

import (
	"cmp"
	"fmt"
	"slices"
	"time"
)

// Rules say which snapshots to keep. The zero value keeps all.
type Rules struct {
	// KeepLast of the unpinned, by age: these stay whatever their age, and go
	// last when MaxBytes asks.
	KeepLast int
	// KeepLabels: a snapshot that carries all of them is kept like the last
	// ones. Empty matches none.
	KeepLabels map[string]string
	// MaxAge removes what is older; 0 is no limit.
	MaxAge time.Duration
	// MaxBytes is a budget for all of them together; 0 is no limit. It is the
	// hardest rule: only pinned ones stay above it.
	MaxBytes int64
}

// Snap is what a decision needs to know of a snapshot.
type Snap struct {
	ID      string
	Created time.Time
	Bytes   int64 // what deleting it would free
	Labels  map[string]string
	Pinned  bool // a standby sandbox or a template uses it
}

// Reason says which rule removes a snapshot.
type Reason string

const (
	TooOld     Reason = "max_age"
	OverBudget Reason = "max_bytes"
)

// Removal is a snapshot to remove, and why.
type Removal struct {
	ID     string
	Reason Reason
	Detail string // for people
}

// Decide says which snapshots the rules remove, in the order to remove them.
// It is pure: the same input gives the same answer, and what is left after the
// removals is removed no further.
//
// First go those above MaxAge that no Keep rule holds. If the rest is above
// MaxBytes, the oldest go until it is not: first those that no Keep rule holds,
// then the kept ones. A pinned one never goes, and its bytes count.
func Decide(rules Rules, snaps []Snap, now time.Time) []Removal {
	// Oldest first; the id decides between equals, so that order of input does not.
	snaps = slices.Clone(snaps)
	slices.SortFunc(snaps, func(a, b Snap) int { return cmp.Or(a.Created.Compare(b.Created), cmp.Compare(a.ID, b.ID)) })
	kept := keptBy(rules, snaps)
	var out []Removal
	gone := make([]bool, len(snaps))
	for i, s := range snaps {
		if age := now.Sub(s.Created); rules.MaxAge > 0 && age > rules.MaxAge && !s.Pinned && !kept[i] {
			gone[i] = true
			out = append(out, Removal{s.ID, TooOld, fmt.Sprintf("%s old, above %s", age.Round(time.Second), rules.MaxAge)})
		}
	}
	if rules.MaxBytes <= 0 {
		return out
	}
	var total int64
	for i, s := range snaps {
		if !gone[i] {
			total += max(s.Bytes, 0)
		}
	}
	for _, alsoKept := range []bool{false, true} {
		for i, s := range snaps {
			// One that frees nothing would go for nothing.
			if total <= rules.MaxBytes || gone[i] || s.Pinned || kept[i] != alsoKept || s.Bytes <= 0 {
				continue
			}
			gone[i] = true
			out = append(out, Removal{s.ID, OverBudget, fmt.Sprintf("%d bytes in all, above %d", total, rules.MaxBytes)})
			total -= s.Bytes
		}
	}
	return out
}

// keptBy marks what a Keep rule holds; snaps are oldest first.
func keptBy(rules Rules, snaps []Snap) []bool {
	kept := make([]bool, len(snaps))
	left := rules.KeepLast
	for i := len(snaps) - 1; i >= 0; i-- {
		if left > 0 && !snaps[i].Pinned {
			kept[i] = true
			left--
		}
		kept[i] = kept[i] || hasLabels(snaps[i].Labels, rules.KeepLabels)
	}
	return kept
}

func hasLabels(have, want map[string]string) bool {
	for k, v := range want {
		if got, ok := have[k]; !ok || got != v {
			return false
		}
	}
	return len(want) > 0
}
