package snapshot

import (
	"cmp"
	"crypto/sha256"
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
	// OnlyKept removes all that no Keep rule holds.
	OnlyKept bool
	// MaxAge removes what is older; 0 is no limit.
	MaxAge time.Duration
	// MaxBytes is a budget for what all of them take together, each blob once;
	// 0 is no limit. It is the hardest rule: only pinned ones stay above it.
	MaxBytes int64
}

// Snap is what a decision needs to know of a snapshot.
type Snap struct {
	ID      string
	Created time.Time
	// Blobs it is in, shared with others or not. Those that stay whatever is
	// decided, because something else needs them, are left out: they can be
	// neither saved nor freed.
	Blobs  []Blob
	Labels map[string]string
	Pinned bool // a standby sandbox or a template uses it
}

// Reason says which rule removes a snapshot.
type Reason string

const (
	TooOld     Reason = "max_age"
	OverBudget Reason = "max_bytes"
	NotKept    Reason = "keep_last"
)

// Removal is a snapshot to remove, and why.
type Removal struct {
	ID     string
	Reason Reason
	Detail string // for people
	Frees  int64  // once those before it are gone too
}

// Holding is the blobs of some snapshots, each counted once however many of
// them need it. The zero value is ready.
type Holding struct {
	held  map[[sha256.Size]byte]held
	bytes int64
}

type held struct {
	by     int
	stored int64 // as the first one said
}

// Bytes that all of them take.
func (h *Holding) Bytes() int64 { return h.bytes }

// Len is the number of blobs.
func (h *Holding) Len() int { return len(h.held) }

// Has says whether a blob is among them.
func (h *Holding) Has(b Blob) bool { return h.held[b.Sum].by > 0 }

// Add takes a snapshot in.
func (h *Holding) Add(blobs []Blob) {
	if h.held == nil {
		h.held = map[[sha256.Size]byte]held{}
	}
	for _, b := range blobs {
		was := h.held[b.Sum]
		if was.by == 0 {
			was.stored = max(b.Stored, 0)
			h.bytes += was.stored
		}
		was.by++
		h.held[b.Sum] = was
	}
}

// Drop takes one out that was added.
func (h *Holding) Drop(blobs []Blob) {
	for _, b := range blobs {
		was := h.held[b.Sum]
		if was.by--; was.by == 0 {
			h.bytes -= was.stored
			delete(h.held, b.Sum)
			continue
		}
		h.held[b.Sum] = was
	}
}

// Decide says which snapshots the rules remove, in the order to remove them.
// It is pure: the same input gives the same answer, and what is left after the
// removals is removed no further.
//
// First go those above MaxAge that no Keep rule holds, and with OnlyKept all
// that none holds. If the rest is above MaxBytes, the oldest go until it is not:
// first those that no Keep rule holds, then the kept ones. A pinned one never
// goes, and its bytes count. One that is in nothing but blobs of those that stay
// is left: it would go for nothing.
func Decide(rules Rules, snaps []Snap, now time.Time) []Removal {
	// Oldest first; the id decides between equals, so that order of input does not.
	snaps = slices.Clone(snaps)
	slices.SortFunc(snaps, func(a, b Snap) int { return cmp.Or(a.Created.Compare(b.Created), cmp.Compare(a.ID, b.ID)) })
	kept := keptBy(rules, snaps)
	var all, left Holding
	var order []int // of those that go
	why := make([]Reason, len(snaps))
	for i, s := range snaps {
		all.Add(s.Blobs)
		switch {
		case s.Pinned || kept[i]:
		case rules.MaxAge > 0 && now.Sub(s.Created) > rules.MaxAge:
			why[i] = TooOld
		case rules.OnlyKept:
			why[i] = NotKept
		}
		if why[i] == "" {
			left.Add(s.Blobs)
		} else {
			order = append(order, i)
		}
	}
	for _, alsoKept := range []bool{false, true} {
		for i, s := range snaps {
			if rules.MaxBytes <= 0 || left.bytes <= rules.MaxBytes || why[i] != "" || s.Pinned || kept[i] != alsoKept {
				continue
			}
			// Also where it frees nothing yet: it may share with the next to go.
			why[i] = OverBudget
			order = append(order, i)
			left.Drop(s.Blobs)
		}
	}
	var out []Removal
	for _, i := range order {
		s := snaps[i]
		if why[i] == OverBudget && !slices.ContainsFunc(s.Blobs, func(b Blob) bool { return !left.Has(b) }) {
			continue
		}
		r := Removal{ID: s.ID, Reason: why[i]}
		switch r.Reason {
		case TooOld:
			r.Detail = fmt.Sprintf("%s old, above %s", now.Sub(s.Created).Round(time.Second), rules.MaxAge)
		case OverBudget:
			r.Detail = fmt.Sprintf("%d bytes in all, above %d", all.bytes, rules.MaxBytes)
		case NotKept:
			r.Detail = "no rule keeps it"
		}
		r.Frees = all.bytes
		all.Drop(s.Blobs)
		r.Frees -= all.bytes
		out = append(out, r)
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
