package agent

import "testing"

func TestWhoEndedForWantOfMemory(t *testing.T) {
	k := parseOOM("OutOfMemory: 2\nEnded: 12 11 1\nEnded: 40\nAlloc:   7 kB\nEnded: x\n")
	if k.total != 2 {
		t.Errorf("total %d", k.total)
	}
	for _, c := range []struct {
		pid          int
		itself, want bool
	}{
		{12, true, true}, {40, true, true}, {12, false, true},
		{11, true, false}, // it was killed by somebody else, after its child
		{11, false, true}, {1, false, true}, {13, true, false}, {13, false, false},
	} {
		if got := k.ended(c.pid, c.itself); got != c.want {
			t.Errorf("ended(%d, %v) = %v", c.pid, c.itself, got)
		}
	}
	if parseOOM("").ended(0, true) {
		t.Error("an empty file names somebody")
	}
}
