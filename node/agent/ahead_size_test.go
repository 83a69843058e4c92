package agent

import (
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestHeldTargets(t *testing.T) {
	const many = 1 << 40
	once := use{occasions: 1, peak: 1, rate: 0.01, idle: time.Second}
	twice := use{occasions: 2, peak: 1, rate: 0.02, idle: time.Second}
	burst := use{occasions: 40, peak: 40, rate: 0.6, idle: time.Second}
	for _, c := range []struct {
		name string
		uses []use
		b    heldBounds
		want []int
	}{
		{"nothing is used", nil, heldBounds{most: 8, memory: many}, []int{}},
		{"once says nothing of a second time", []use{once}, heldBounds{most: 8, memory: many}, []int{0}},
		{"twice does", []use{twice}, heldBounds{most: 8, memory: many}, []int{1}},
		{"a burst comes again, within what one may have", []use{burst}, heldBounds{most: 64, memory: many}, []int{aheadMost}},
		{"not for ever", []use{{occasions: 40, peak: 40, idle: aheadIdle}}, heldBounds{most: 64, memory: many}, []int{0}},
		{"a peak fades to one", []use{{occasions: 40, peak: 0.2, idle: time.Minute}}, heldBounds{most: 64, memory: many}, []int{1}},
		{"what is expected was never used", []use{{expected: 3, idle: time.Hour}}, heldBounds{most: 64, memory: many}, []int{3}},
		{"expected without end", []use{{expected: 1000}}, heldBounds{most: 64, memory: many}, []int{aheadMost}},
		{"each gets one first", []use{burst, twice, burst}, heldBounds{most: 5, memory: many}, []int{2, 1, 2}},
		{"the last used first", []use{{occasions: 2, peak: 1, idle: time.Minute}, twice}, heldBounds{most: 1, memory: many}, []int{0, 1}},
		{"the expected before it", []use{twice, {expected: 1, idle: time.Hour}}, heldBounds{most: 1, memory: many}, []int{0, 1}},
		{"memory for two", []use{burst}, heldBounds{most: 64, memory: 2*heldMemory + 1}, []int{2}},
		{"those that are there have theirs", []use{burst}, heldBounds{most: 64, held: 3, memory: heldMemory}, []int{4}},
		{"into the reserve they go", []use{burst}, heldBounds{most: 64, held: 3, memory: -1}, []int{2}},
		{"all of them", []use{burst}, heldBounds{most: 64, held: 3, memory: -many}, []int{0}},
		{"none are wanted", []use{burst}, heldBounds{most: -1, held: 3, memory: many}, []int{0}},
	} {
		if got := heldTargets(c.uses, c.b); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

// Whatever is used: never more than there is room for, never more of one than it wants,
// no second before somebody's first, and more memory never means fewer.
func TestHeldTargetsProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		uses := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) use {
			return use{occasions: rapid.IntRange(0, 100).Draw(t, "occasions"), peak: rapid.Float64Range(0, 200).Draw(t, "peak"), rate: rapid.Float64Range(0, 100).Draw(t, "rate"),
				idle: time.Duration(rapid.Int64Range(0, int64(2*aheadIdle)).Draw(t, "idle")), expected: rapid.IntRange(0, 20).Draw(t, "expected")}
		}), 0, 12).Draw(t, "uses")
		b := heldBounds{most: rapid.IntRange(-1, 40).Draw(t, "most"), held: rapid.IntRange(0, 40).Draw(t, "held"),
			memory: rapid.Int64Range(-1<<40, 1<<40).Draw(t, "memory"), restore: time.Duration(rapid.Int64Range(0, int64(10*time.Second)).Draw(t, "restore"))}
		got := heldTargets(uses, b)
		sum, wanted := 0, 0
		for i, n := range got {
			want := uses[i].wants(b.restore)
			sum, wanted = sum+n, wanted+want
			if n < 0 || n > want || want > aheadMost || uses[i].over() && n > 0 {
				t.Fatalf("%d of %+v, which wants %d", n, uses[i], want)
			}
			for j, m := range got {
				if n > 1 && m == 0 && uses[j].wants(b.restore) > 0 {
					t.Fatalf("%d of one and none of another: %v", n, got)
				}
			}
		}
		if sum > max(b.most, 0) || b.memory < 0 && sum > b.held {
			t.Fatalf("%d in all within %+v", sum, b)
		}
		if room := b.held + int(max(b.memory, 0)/heldMemory); b.memory >= 0 && sum < min(wanted, max(b.most, 0), room) {
			t.Fatalf("%d in all, %d wanted, room for %d within %+v", sum, wanted, room, b)
		}
		b.memory += heldMemory
		more := 0
		for _, n := range heldTargets(uses, b) {
			more += n
		}
		if more < sum {
			t.Fatalf("%d, with more memory %d", sum, more)
		}
	})
}
