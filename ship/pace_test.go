package ship

import (
	"testing"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// A clock that nobody waits for.
func TestPace(t *testing.T) {
	now := time.Unix(1700000000, 0)
	p := Pace{Size: Size{Bytes: 1000}, Linger: time.Minute, Jitter: func() float64 { return 0 }}
	due := func(bytes int64) time.Duration {
		t.Helper()
		wait, ok := p.Due(now, bytes)
		if !ok {
			return -1
		}
		return wait
	}
	if due(0) != -1 || due(10) != -1 {
		t.Error("nothing waits, and something is due")
	}
	p.Waits(now)
	now = now.Add(10 * time.Second)
	p.Waits(now) // the oldest counts
	if d := due(10); d != 50*time.Second {
		t.Errorf("due in %s", d)
	}
	if d := due(1000); d != 0 {
		t.Errorf("enough waits, and it is due in %s", d)
	}
	now = now.Add(time.Minute)
	if d := due(10); d != 0 {
		t.Errorf("it waited long enough, and is due in %s", d)
	}
	// Failures: the waits double up to a minute, whatever else waits.
	want := firstRetry
	for range 20 {
		p.Failed(now, sandbox.ErrUnavailable)
		if d := due(1 << 40); d != want {
			t.Errorf("after %d failures due in %s, want %s", p.Failures(), d, want)
		}
		want = min(want*2, maxRetry)
	}
	// A sink that says when is asked then.
	p.Failed(now, &sandbox.Error{Class: sandbox.NoCapacity, RetryAfter: 10 * time.Minute})
	if d := due(1); d != 10*time.Minute {
		t.Errorf("due in %s", d)
	}
	p.Failed(now, &sandbox.Error{Class: sandbox.NoCapacity, RetryAfter: 1000 * time.Hour})
	if d := due(1); d != time.Hour {
		t.Errorf("due in %s", d)
	}
	now = now.Add(time.Hour)
	if due(1) != 0 {
		t.Error("not due")
	}
	p.Delivered(now, true)
	if d := due(1); d != time.Minute || p.Failures() != 0 {
		t.Errorf("the rest is due in %s", d)
	}
	p.Delivered(now, false)
	if due(0) != -1 {
		t.Error("all was delivered")
	}
	// Jitter halves at most.
	p.Jitter = func() float64 { return 1 }
	p.Waits(now)
	p.Failed(now, nil)
	if d := due(1); d != firstRetry/2 {
		t.Errorf("due in %s", d)
	}
}
