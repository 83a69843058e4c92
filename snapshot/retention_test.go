package snapshot

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

var noon = time.Date(2026, 9, 1, 12, 0, 0, 0, time.UTC)

// snap is one of so many hours and bytes.
func snap(id string, hours int, size int64, flags ...string) Snap {
	s := Snap{ID: id, Created: noon.Add(-time.Duration(hours) * time.Hour), Bytes: size, Labels: map[string]string{}}
	for _, f := range flags {
		if f == "pin" {
			s.Pinned = true
		} else {
			s.Labels[f] = "yes"
		}
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
		{"what frees nothing stays", Rules{MaxBytes: 4}, []Snap{snap("a", 3, 0), snap("b", 2, 5)}, "[b:max_bytes]"},
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

func TestDecideHolds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rules := Rules{
			KeepLast: rapid.IntRange(0, 5).Draw(t, "last"),
			MaxBytes: rapid.Int64Range(0, 60).Draw(t, "bytes"),
			MaxAge:   time.Duration(rapid.IntRange(0, 30).Draw(t, "age")) * time.Hour,
		}
		if rapid.Bool().Draw(t, "labels") {
			rules.KeepLabels = map[string]string{"k": "yes"}
		}
		n := rapid.IntRange(0, 12).Draw(t, "n")
		var snaps []Snap
		for i := range n {
			s := snap(fmt.Sprint(i), rapid.IntRange(0, 40).Draw(t, "hours"), rapid.Int64Range(0, 20).Draw(t, "size"))
			s.Pinned = rapid.Bool().Draw(t, "pin")
			if rapid.Bool().Draw(t, "label") {
				s.Labels["k"] = "yes"
			}
			snaps = append(snaps, s)
		}
		removed := Decide(rules, snaps, noon)
		gone := map[string]Reason{}
		for _, r := range removed {
			if _, twice := gone[r.ID]; twice {
				t.Fatalf("%s is removed twice", r.ID)
			}
			gone[r.ID] = r.Reason
		}
		var left []Snap
		var total, free int64
		for _, s := range snaps {
			if _, ok := gone[s.ID]; ok {
				if s.Pinned {
					t.Fatalf("%s is pinned", s.ID)
				}
				if gone[s.ID] == TooOld && (noon.Sub(s.Created) <= rules.MaxAge || hasLabels(s.Labels, rules.KeepLabels)) {
					t.Fatalf("%+v is not too old", s)
				}
				continue
			}
			left = append(left, s)
			total += s.Bytes
			if !s.Pinned {
				free += s.Bytes
			}
		}
		if rules.MaxBytes > 0 && total > rules.MaxBytes && free > 0 {
			t.Fatalf("%d bytes left, %d of them could go", total, free)
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
