package snapshot

import (
	"crypto/sha256"
	"fmt"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

var noon = time.Date(2026, 9, 1, 12, 0, 0, 0, time.UTC)

// blob is one by name.
func blob(name string, size int64) Blob { return Blob{sha256.Sum256([]byte(name)), size} }

// snap is one of so many hours and bytes of its own.
func snap(id string, hours int, size int64, flags ...string) Snap {
	s := Snap{ID: id, Created: noon.Add(-time.Duration(hours) * time.Hour), Blobs: []Blob{blob(id, size)}, Labels: map[string]string{}}
	for _, f := range flags {
		if f == "pin" {
			s.Pinned = true
		} else {
			s.Labels[f] = "yes"
		}
	}
	return s
}

// and is the snapshot with blobs that others have too, of five bytes each.
func (s Snap) and(shared ...string) Snap {
	for _, name := range shared {
		s.Blobs = append(s.Blobs, blob("shared "+name, 5))
	}
	return s
}

func TestDecide(t *testing.T) {
	for _, c := range []struct {
		name  string
		rules Rules
		snaps []Snap
		want  string // ids with reasons, in order
	}{
		{"no rules", Rules{}, []Snap{snap("a", 9999, 1<<50)}, "[]"},
		{"nothing there", Rules{KeepLast: 1, MaxBytes: 1, MaxAge: 1}, nil, "[]"},
		{"age", Rules{MaxAge: 5 * time.Hour}, []Snap{snap("new", 1, 1), snap("edge", 5, 1), snap("old", 6, 1), snap("older", 7, 1)}, "[older:max_age old:max_age]"},
		{"age, but the last two", Rules{MaxAge: time.Hour, KeepLast: 2}, []Snap{snap("a", 4, 1), snap("b", 3, 1), snap("c", 2, 1)}, "[a:max_age]"},
		{"age, but labelled", Rules{MaxAge: time.Hour, KeepLabels: map[string]string{"gold": "yes"}}, []Snap{snap("a", 4, 1, "gold"), snap("b", 3, 1)}, "[b:max_age]"},
		{"age, but pinned", Rules{MaxAge: time.Hour}, []Snap{snap("a", 4, 1, "pin"), snap("b", 3, 1)}, "[b:max_age]"},
		{"a pinned one is not one of the last", Rules{MaxAge: time.Hour, KeepLast: 1}, []Snap{snap("a", 4, 1), snap("b", 3, 1), snap("c", 2, 1, "pin")}, "[a:max_age]"},
		{"two labels, one missing", Rules{MaxAge: time.Hour, KeepLabels: map[string]string{"x": "yes", "y": "yes"}}, []Snap{snap("a", 4, 1, "x"), snap("b", 4, 1, "x", "y")}, "[a:max_age]"},
		{"budget takes the oldest", Rules{MaxBytes: 10}, []Snap{snap("a", 3, 5), snap("b", 2, 5), snap("c", 1, 5)}, "[a:max_bytes]"},
		{"budget spares the kept while it can", Rules{MaxBytes: 10, KeepLabels: map[string]string{"k": "yes"}}, []Snap{snap("a", 3, 5, "k"), snap("b", 2, 5), snap("c", 1, 5)}, "[b:max_bytes]"},
		{"budget takes the kept when it must", Rules{MaxBytes: 5, KeepLast: 3}, []Snap{snap("a", 3, 5), snap("b", 2, 5), snap("c", 1, 5)}, "[a:max_bytes b:max_bytes]"},
		{"budget counts the pinned", Rules{MaxBytes: 10}, []Snap{snap("a", 3, 8, "pin"), snap("b", 2, 5)}, "[b:max_bytes]"},
		{"pinned above the budget", Rules{MaxBytes: 1}, []Snap{snap("a", 3, 8, "pin")}, "[]"},
		{"age makes room first", Rules{MaxBytes: 10, MaxAge: 2 * time.Hour}, []Snap{snap("a", 3, 5), snap("b", 2, 5), snap("c", 1, 5)}, "[a:max_age]"},
		{"what is in nothing stays", Rules{MaxBytes: 4}, []Snap{{ID: "a", Created: noon.Add(-3 * time.Hour)}, snap("b", 2, 5)}, "[b:max_bytes]"},
		{"what frees nothing stays", Rules{MaxBytes: 4}, []Snap{{ID: "a", Created: noon.Add(-3 * time.Hour), Blobs: []Blob{blob("c", 4)}}, snap("b", 2, 5), snap("c", 1, 4)}, "[b:max_bytes]"},
		{"shared bytes count once", Rules{MaxBytes: 7}, []Snap{snap("a", 3, 1).and("x"), snap("b", 2, 1).and("x")}, "[]"},
		{"shared bytes are there until the last is gone", Rules{MaxBytes: 6}, []Snap{snap("a", 4, 1).and("x"), snap("b", 3, 1).and("x"), snap("c", 2, 1)}, "[a:max_bytes b:max_bytes]"},
		{"one content under two names goes with both", Rules{MaxBytes: 4}, []Snap{snap("a", 3, 0).and("x"), snap("b", 2, 0).and("x")}, "[a:max_bytes b:max_bytes]"},
		{"what the pinned hold is not freed", Rules{MaxBytes: 4}, []Snap{snap("a", 3, 2).and("x"), snap("b", 2, 0, "pin").and("x")}, "[a:max_bytes]"},
		{"only the kept", Rules{OnlyKept: true, KeepLast: 1}, []Snap{snap("a", 3, 1), snap("b", 2, 1, "pin"), snap("c", 1, 1)}, "[a:keep_last]"},
		{"equal times go by id", Rules{MaxBytes: 5}, []Snap{snap("b", 1, 5), snap("a", 1, 5)}, "[a:max_bytes]"},
	} {
		var got []string
		for _, r := range Decide(c.rules, c.snaps, noon) {
			got = append(got, r.ID+":"+string(r.Reason))
			if r.Detail == "" {
				t.Errorf("%s: %s without a reason for people", c.name, r.ID)
			}
		}
		if fmt.Sprint(got) != c.want {
			t.Errorf("%s: %v, want %s", c.name, got, c.want)
		}
	}
}

// union is what some snapshots take, counted anew.
func union(snaps []Snap) (n int64) {
	seen := map[Blob]bool{}
	for _, s := range snaps {
		for _, b := range s.Blobs {
			if !seen[b] {
				n += b.Stored
			}
			seen[b] = true
		}
	}
	return n
}

func TestDecideHolds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rules := Rules{
			KeepLast: rapid.IntRange(0, 5).Draw(t, "last"),
			MaxBytes: rapid.Int64Range(0, 60).Draw(t, "bytes"),
			MaxAge:   time.Duration(rapid.IntRange(0, 30).Draw(t, "age")) * time.Hour,
			OnlyKept: rapid.IntRange(0, 9).Draw(t, "only kept") == 0,
		}
		if rapid.Bool().Draw(t, "labels") {
			rules.KeepLabels = map[string]string{"k": "yes"}
		}
		var all []Blob
		for i, size := range rapid.SliceOfN(rapid.Int64Range(0, 20), 1, 8).Draw(t, "blobs") {
			all = append(all, blob(fmt.Sprint(i), size))
		}
		n := rapid.IntRange(0, 12).Draw(t, "n")
		var snaps []Snap
		for i := range n {
			s := snap(fmt.Sprint(i), rapid.IntRange(0, 40).Draw(t, "hours"), 0)
			s.Blobs = nil
			for j := range all {
				if rapid.Bool().Draw(t, "has") {
					s.Blobs = append(s.Blobs, all[j])
				}
			}
			s.Pinned = rapid.IntRange(0, 3).Draw(t, "pin") == 0
			if rapid.Bool().Draw(t, "label") {
				s.Labels["k"] = "yes"
			}
			snaps = append(snaps, s)
		}
		removed := Decide(rules, snaps, noon)
		gone := map[string]Reason{}
		var frees int64
		for _, r := range removed {
			if _, twice := gone[r.ID]; twice {
				t.Fatalf("%s is removed twice", r.ID)
			}
			gone[r.ID] = r.Reason
			frees += r.Frees
			// What one frees is what is less without it.
			var before, after []Snap
			for _, s := range snaps {
				_, earlier := gone[s.ID]
				if !earlier || s.ID == r.ID {
					before = append(before, s)
				}
				if !earlier {
					after = append(after, s)
				}
			}
			if freed := union(before) - union(after); freed != r.Frees {
				t.Fatalf("%s would free %d and frees %d", r.ID, r.Frees, freed)
			}
		}
		var left, pinned []Snap
		for _, s := range snaps {
			if s.Pinned {
				pinned = append(pinned, s)
			}
			reason, ok := gone[s.ID]
			if !ok {
				left = append(left, s)
				continue
			}
			if s.Pinned {
				t.Fatalf("%s is pinned", s.ID)
			}
			if reason == TooOld && (noon.Sub(s.Created) <= rules.MaxAge || hasLabels(s.Labels, rules.KeepLabels)) {
				t.Fatalf("%+v is not too old", s)
			}
		}
		if union(snaps)-union(left) != frees {
			t.Fatalf("%d are free, %d were said", union(snaps)-union(left), frees)
		}
		if total := union(left); rules.MaxBytes > 0 && total > rules.MaxBytes && total > union(pinned) {
			t.Fatalf("%d bytes left, %d of them must stay", total, union(pinned))
		}
		var stays Holding
		for _, s := range left {
			stays.Add(s.Blobs)
		}
		for _, s := range snaps {
			if gone[s.ID] == OverBudget && !slices.ContainsFunc(s.Blobs, func(b Blob) bool { return !stays.Has(b) }) {
				t.Fatalf("%s goes for nothing", s.ID)
			}
		}
		if more := Decide(rules, left, noon); len(more) != 0 {
			t.Fatalf("again: %v", more)
		}
		slices.Reverse(snaps)
		if other := Decide(rules, snaps, noon); !slices.Equal(other, removed) {
			t.Fatalf("in another order: %v, was %v", other, removed)
		}
	})
}
