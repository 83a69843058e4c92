package notify

import (
	"sync"
	"testing"
)

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func TestChange(t *testing.T) {
	var c Change
	c.Tell() // nobody waits
	one, same := c.Next(), c.Next()
	if one != same || closed(one) {
		t.Error("those who wait for one change do not wait for the same")
	}
	c.Tell()
	two := c.Next()
	if !closed(one) || closed(two) {
		t.Error("a change is not told, or told twice")
	}
	if n := testing.AllocsPerRun(100, c.Tell); n > 0 {
		t.Errorf("%v allocations with nobody waiting", n)
	}
}

// Nobody misses the last value, however many are set and however many look.
func TestLatest(t *testing.T) {
	const last = 10_000
	var l Latest[int]
	if v, changed := l.Get(); v != 0 || closed(changed) {
		t.Errorf("at first: %d", v)
	}
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			before := -1
			for {
				v, changed := l.Get()
				if v < before {
					t.Errorf("%d after %d", v, before)
				}
				if before = v; v == last {
					return
				}
				<-changed
			}
		})
	}
	for v := 1; v <= last; v++ {
		l.Set(v)
	}
	all.Wait()
}
