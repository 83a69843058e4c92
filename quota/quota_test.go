package quota

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

var t0 = time.Unix(1_700_000_000, 0)

func TestCreate(t *testing.T) {
	one := sandbox.Resources{MilliCPU: 1000, Memory: 512, Disk: 100}
	for name, c := range map[string]struct {
		q     sandbox.Quota
		used  Usage
		ask   sandbox.Resources
		fits  bool
		never bool // however long one waits
	}{
		"no bounds":                {sandbox.Quota{}, Usage{Sandboxes: 1 << 40, Memory: 1 << 60}, one, true, false},
		"the last sandbox":         {sandbox.Quota{Sandboxes: 3}, Usage{Sandboxes: 2}, one, true, false},
		"one sandbox too many":     {sandbox.Quota{Sandboxes: 3}, Usage{Sandboxes: 3}, one, false, false},
		"the last core":            {sandbox.Quota{MilliCPU: 2000}, Usage{MilliCPU: 1000}, one, true, false},
		"a thousandth of a core":   {sandbox.Quota{MilliCPU: 2000}, Usage{MilliCPU: 1001}, one, false, false},
		"the last byte":            {sandbox.Quota{Memory: 1024}, Usage{Memory: 512}, one, true, false},
		"one byte too many":        {sandbox.Quota{Memory: 1024}, Usage{Memory: 513}, one, false, false},
		"disk":                     {sandbox.Quota{Disk: 1000}, Usage{Disk: 950}, one, false, false},
		"more than there ever is":  {sandbox.Quota{Memory: 100}, Usage{}, one, false, true},
		"above after a cut":        {sandbox.Quota{Sandboxes: 1}, Usage{Sandboxes: 9}, one, false, false},
		"nothing of what is short": {sandbox.Quota{Disk: 1000}, Usage{Disk: 2000}, sandbox.Resources{MilliCPU: 1}, true, false},
		"no overflow":              {sandbox.Quota{Memory: 100}, Usage{}, sandbox.Resources{Memory: 1<<63 - 1}, false, true},
	} {
		_, err := Create(c.q, c.used, Bucket{}, c.ask, 1, 1, t0)
		if (err == nil) != c.fits {
			t.Errorf("%s: %v", name, err)
		}
		if e, ok := err.(*sandbox.Error); ok {
			if e.Class != sandbox.QuotaExceeded || e.Hint == "" || (e.RetryAfter == 0) != c.never {
				t.Errorf("%s: %s, after %s, hint %q", name, e.Class, e.RetryAfter, e.Hint)
			}
		}
	}
}

func TestSnapshotAndVolume(t *testing.T) {
	q := sandbox.Quota{SnapshotBytes: 100, Disk: 100}
	if Snapshot(q, Usage{SnapshotBytes: 99}) != nil || Snapshot(q, Usage{SnapshotBytes: 100}) == nil || Snapshot(sandbox.Quota{}, Usage{SnapshotBytes: 1 << 60}) != nil {
		t.Error("snapshots")
	}
	if Disk(q, Usage{Disk: 40}, 60) != nil || Disk(q, Usage{Disk: 40}, 61) == nil || Disk(q, Usage{Disk: 400}, -5) != nil {
		t.Error("volumes")
	}
}

// Of many alike, as many as must be there are asked for at once, before any is
// made.
func TestCreateMany(t *testing.T) {
	one := sandbox.Resources{MilliCPU: 1000, Memory: 512, Disk: 100}
	for name, c := range map[string]struct {
		q        sandbox.Quota
		used     Usage
		least, n int
		fits     bool
		never    bool
	}{
		"all fit":                      {sandbox.Quota{Sandboxes: 5}, Usage{Sandboxes: 1}, 4, 4, true, false},
		"one too many":                 {sandbox.Quota{Sandboxes: 5}, Usage{Sandboxes: 2}, 4, 4, false, false},
		"enough fit":                   {sandbox.Quota{Sandboxes: 5}, Usage{Sandboxes: 2}, 3, 4, true, false},
		"memory of all":                {sandbox.Quota{Memory: 2048}, Usage{}, 4, 4, true, false},
		"memory of all but one":        {sandbox.Quota{Memory: 2048}, Usage{Memory: 1}, 4, 4, false, false},
		"more than there ever is":      {sandbox.Quota{Memory: 2047}, Usage{}, 4, 4, false, true},
		"more at once than per second": {sandbox.Quota{CreatesPerSecond: 2}, Usage{}, 4, 4, true, false},
	} {
		_, err := Create(c.q, c.used, Bucket{}, one, c.least, c.n, t0)
		if (err == nil) != c.fits {
			t.Errorf("%s: %v", name, err)
		}
		if e, ok := err.(*sandbox.Error); ok && (e.RetryAfter == 0) != c.never {
			t.Errorf("%s: come back after %s", name, e.RetryAfter)
		}
	}
	if err := Fits(sandbox.Quota{Memory: 100}, Usage{}, sandbox.Resources{Memory: 1<<63 - 1}, 256); err == nil {
		t.Error("256 times too much is nothing")
	}
}

func TestBucketTakesWhole(t *testing.T) {
	type ask struct {
		at   time.Duration
		rate float64
		n    int
		wait time.Duration // 0: it passes
	}
	for name, asks := range map[string][]ask{
		"a fork of four at two per second":   {{0, 2, 4, 0}, {0, 2, 1, 1500 * time.Millisecond}, {1500 * time.Millisecond, 2, 1, 0}},
		"the next one waits for all of them": {{0, 2, 4, 0}, {time.Second, 2, 4, time.Second}, {2 * time.Second, 2, 4, 0}},
		"a refusal takes nothing":            {{0, 2, 1, 0}, {0, 2, 4, 500 * time.Millisecond}, {0, 2, 1, 0}},
		"as many as it holds":                {{0, 10, 10, 0}, {0, 10, 1, 100 * time.Millisecond}},
		"less than one per second":           {{0, 0.5, 3, 0}, {0, 0.5, 1, 6 * time.Second}, {6 * time.Second, 0.5, 1, 0}},
		"no bound":                           {{0, 0, 256, 0}, {0, 0, 256, 0}},
		"the rate is lowered":                {{0, 1000, 1000, 0}, {0, 1, 1, time.Second}},
		"the rate is raised":                 {{0, 1, 1, 0}, {0, 1000, 1000, time.Second}},
		"times are whole milliseconds":       {{0, 3, 3, 0}, {0, 3, 1, 334 * time.Millisecond}},
	} {
		var b Bucket
		for i, a := range asks {
			next, err := Create(sandbox.Quota{CreatesPerSecond: a.rate}, Usage{}, b, sandbox.Resources{}, 1, a.n, t0.Add(a.at))
			var wait time.Duration
			if e, ok := err.(*sandbox.Error); ok {
				wait = e.RetryAfter
			}
			if b = next; wait != a.wait {
				t.Errorf("%s: ask %d waits %s, want %s", name, i, wait, a.wait)
			}
		}
	}
	if e, ok := func() (e *sandbox.Error, ok bool) {
		_, err := Bucket{missing: 256, rate: 1e-300, at: t0}.take(1e-300, 1, t0)
		e, ok = err.(*sandbox.Error)
		return
	}(); !ok || e.RetryAfter <= 0 {
		t.Error("a wait of ages is none")
	}
}

// Over any time, no more pass than the rate, one bucket, and what one call may go
// below it; and whoever comes back when told to gets through.
func TestBucketHoldsItsRate(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 7))
		rate := []float64{0.1, 0.5, 1, 3, 10, 1000}[r.IntN(6)]
		widest := []int{1, 4, 256}[r.IntN(3)]
		q := sandbox.Quota{CreatesPerSecond: rate}
		var b Bucket
		now, passed, forward := t0, 0, time.Duration(0)
		for range 500 {
			n := 1 + r.IntN(widest)
			next, err := Create(q, Usage{}, b, sandbox.Resources{}, 1, n, now)
			if err == nil {
				passed += n
			} else {
				e := err.(*sandbox.Error)
				if e.RetryAfter <= 0 {
					t.Fatalf("seed %d: refused for no time", seed)
				}
				if _, err := Create(q, Usage{}, next, sandbox.Resources{}, 1, n, now.Add(e.RetryAfter)); err != nil {
					t.Fatalf("seed %d: %d came back after %s and were refused: %v", seed, n, e.RetryAfter, err)
				}
			}
			b = next
			size := max(1, rate)
			if limit := rate*forward.Seconds() + size + max(0, float64(widest)-size) + 1e-3; float64(passed) > limit {
				t.Fatalf("seed %d: %d creates in %s at %g per second", seed, passed, forward, rate)
			}
			switch r.IntN(10) {
			case 0:
				now = now.Add(-time.Duration(r.Int64N(int64(time.Second)))) // a clock set back
			default:
				step := time.Duration(r.ExpFloat64() / rate * float64(widest) * float64(time.Second))
				now, forward = now.Add(step), forward+step
			}
		}
	}
}

// One that asks steadily at its rate is never refused.
func TestBucketLetsItsRateThrough(t *testing.T) {
	var b Bucket
	var err error
	for i := range 10_000 {
		if b, err = Create(sandbox.Quota{CreatesPerSecond: 7}, Usage{}, b, sandbox.Resources{}, 1, 1, t0.Add(time.Duration(i)*time.Second/7)); err != nil {
			t.Fatal(i, err)
		}
	}
}

func TestQueueTakesTurns(t *testing.T) {
	for name, c := range map[string]struct {
		joins string // tenants in order of arrival; a capital has weight 3
		want  string
	}{
		"in order within one":               {"aaa", "aaa"},
		"in turn":                           {"aaaab", "abaaa"},
		"a crowd does not starve another":   {"aaaaaaaaaabbb", "abababaaaaaaa"},
		"three":                             {"aaabbbccc", "abcabcabc"},
		"weight":                            {"AAAAAAbbbb", "AbAAAbAAbb"},
		"a crowd of many":                   {"aaaaaaaaabcdefg", "abcdefgaaaaaaaa"},
		"the first of two who came at once": {"ba", "ba"},
	} {
		var q Queue
		who := map[int64]string{}
		for _, r := range c.joins {
			weight, tenant := int32(0), string(r)
			if r < 'a' {
				weight = 3
			}
			who[q.Join(tenant, weight)] = tenant
		}
		got := ""
		for q.Len() > 0 {
			head := q.Heads()[0]
			got += who[head]
			q.Served(head)
		}
		if got != c.want {
			t.Errorf("%s: %s is served as %s, want %s", name, c.joins, got, c.want)
		}
		if len(q.lines) != 0 {
			t.Errorf("%s: %d lines are kept for nobody", name, len(q.lines))
		}
	}
}

// simulate lets tenants ask for one place of a full node each time they have
// fewer than width outstanding, in virtual time, and counts who is served.
func simulate(seed uint64, width map[string]int, weight map[string]int32, places int) map[string]int {
	r := rand.New(rand.NewPCG(seed, 1))
	var q Queue
	who, waits, served := map[int64]string{}, map[string]int{}, map[string]int{}
	for range places {
		for tenant, w := range width {
			for waits[tenant] < w {
				who[q.Join(tenant, weight[tenant])] = tenant
				waits[tenant]++
			}
		}
		if r.IntN(10) == 0 { // somebody gives up
			for ticket, tenant := range who {
				q.Leave(ticket)
				waits[tenant]--
				delete(who, ticket)
				break
			}
			continue
		}
		head := q.Heads()[0]
		served[who[head]]++
		waits[who[head]]--
		delete(who, head)
		q.Served(head)
	}
	return served
}

// Under lasting pressure each tenant gets its share, however many it lets wait.
func TestQueueIsFairUnderPressure(t *testing.T) {
	for seed := range uint64(20) {
		served := simulate(seed, map[string]int{"crowd": 500, "few": 3, "one": 2}, map[string]int32{}, 3000)
		total := served["crowd"] + served["few"] + served["one"]
		for tenant, n := range served {
			if share := float64(n) / float64(total); share < 0.30 || share > 0.37 {
				t.Errorf("seed %d: %s got %.0f%% of the places: %v", seed, tenant, share*100, served)
			}
		}
		weighted := simulate(seed, map[string]int{"big": 50, "small": 50}, map[string]int32{"big": 4}, 3000)
		if ratio := float64(weighted["big"]) / float64(weighted["small"]); ratio < 3.7 || ratio > 4.3 {
			t.Errorf("seed %d: weight 4 against 1 got %.2f: %v", seed, ratio, weighted)
		}
	}
}

// A tenant that was away does not come back with saved-up turns.
func TestQueueDoesNotSaveTurns(t *testing.T) {
	var q Queue
	for range 100 {
		q.Join("busy", 0)
	}
	for range 50 {
		q.Served(q.Heads()[0])
	}
	who := map[int64]string{}
	for range 10 {
		who[q.Join("back", 0)] = "back"
	}
	got := ""
	for range 6 {
		head := q.Heads()[0]
		got += fmt.Sprintf("%.1s", who[head]+"-")
		q.Served(head)
	}
	if got != "b-b-b-" && got != "-b-b-b" {
		t.Errorf("served as %s", got)
	}
}

// Ahead is the number of those who are served before, tried against the order
// itself.
func TestQueueAhead(t *testing.T) {
	var q Queue
	if q.Ahead(7) != -1 {
		t.Error("one that does not wait")
	}
	var all []int64
	for i, tenant := range []string{"a", "a", "a", "b", "c", "b", "a", "c", "c", "c"} {
		all = append(all, q.Join(tenant, int32(1+i%2)))
	}
	want := map[int64]int{}
	for _, ticket := range all {
		want[ticket] = q.Ahead(ticket)
	}
	for n := 0; q.Len() > 0; n++ {
		first := q.Heads()[0]
		if want[first] != n {
			t.Errorf("ticket %d is number %d, and was told %d", first, n, want[first])
		}
		q.Served(first)
	}
}
