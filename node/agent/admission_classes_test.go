package agent

import (
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/cove-sandbox/cove/sandbox"
)

// A class's own limit comes beside the node's: whichever is reached first
// refuses, and says which.
func TestAdmissionOfClasses(t *testing.T) {
	limits := Limits{MilliCPU: 2000, Memory: 10 * gib, Disk: 100 * gib, MaxSandboxes: 6}
	small := sandbox.Resources{MilliCPU: 100, Memory: gib / 2, MemoryLimit: gib, Disk: gib}
	for _, c := range []struct {
		name        string
		gpus, plain int // held
		ask         string
		r           sandbox.Resources
		says        string // "" = admitted
	}{
		{name: "the first of a limited class", ask: "gpu", r: small},
		{name: "the last of it", gpus: 1, plain: 3, ask: "gpu", r: small},
		{name: "one more", gpus: 2, ask: "gpu", r: small, says: `2 sandboxes of kernel class "gpu"`},
		{name: "of another class", gpus: 2, ask: "plain", r: small},
		{name: "another class has no limit but the node's", plain: 5, ask: "plain", r: small},
		{name: "the node's number counts all classes", gpus: 2, plain: 4, ask: "plain", r: small, says: "maximum of 6"},
		{name: "the node's number comes first", gpus: 2, plain: 4, ask: "gpu", r: small, says: "maximum of 6"},
		{name: "the node's memory counts all classes", gpus: 1, plain: 1, ask: "gpu", r: sandbox.Resources{MilliCPU: 100, Memory: 8*gib + 1}, says: "memory"},
		{name: "and fits exactly", gpus: 1, plain: 1, ask: "gpu", r: sandbox.Resources{MilliCPU: 100, Memory: 8 * gib}},
		{name: "recovered ones beyond the limit leave no place", gpus: 4, ask: "gpu", r: small, says: "kernel class"},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := NewReservations(limits)
			l.Limit("gpu", 2)
			for range c.gpus {
				l.Hold("gpu", small)
			}
			for range c.plain {
				l.Hold("plain", small)
			}
			err := l.Admit(c.ask, c.r, time.Second)
			switch {
			case c.says == "" && err != nil:
				t.Errorf("refused: %v", err)
			case c.says != "" && (sandbox.ClassOf(err) != sandbox.NoCapacity || !strings.Contains(err.Error(), c.says)):
				t.Errorf("got %v, want a shortage that says %q", err, c.says)
			}
			want := map[string]int64{"gpu": int64(c.gpus), "plain": int64(c.plain)}
			if c.says == "" {
				want[c.ask]++
			}
			for class, n := range want {
				if got := l.Of(class); got != n {
					t.Errorf("%d of class %s, want %d", got, class, n)
				}
			}
		})
	}
}

// Whatever is admitted, woken and let go in whatever order, no class and no
// resource is ever promised beyond its limit, a refusal changes nothing, a
// refusal is never given where everything fits, and when all is let go nothing is
// left.
func TestAdmissionHoldsItsLimits(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limits := Limits{MilliCPU: 4000, Memory: 16 * gib, Disk: 100 * gib, MemoryReserve: 8 * gib, DiskReserve: gib,
			MaxSandboxes: rapid.Int64Range(1, 12).Draw(t, "most of all")}
		classes := []string{"", "a", "b"}
		most := map[string]int64{}
		l := NewReservations(limits)
		for _, c := range classes {
			if most[c] = rapid.Int64Range(0, 5).Draw(t, "most of "+c); most[c] > 0 {
				l.Limit(c, most[c])
			}
		}
		type held struct {
			class string
			r     sandbox.Resources
		}
		var live []held
		host, since := Host{Memory: 16 * gib, Disk: 100 * gib}, int64(0)
		l.Observe(host)
		sum := func() (all sandbox.Resources, of map[string]int64) {
			of = map[string]int64{}
			for _, h := range live {
				all.MilliCPU += h.r.MilliCPU
				all.Memory += h.r.Memory
				all.MemoryLimit += h.r.MemoryLimit
				all.Disk += h.r.Disk
				all.Reserve += h.r.Reserved()
				of[h.class]++
			}
			return all, of
		}
		t.Repeat(map[string]func(*rapid.T){
			"admit": func(t *rapid.T) {
				h := held{class: rapid.SampledFrom(classes).Draw(t, "class"), r: sandbox.Resources{
					MilliCPU: rapid.Int64Range(0, 4000).Draw(t, "cpu"), Memory: rapid.Int64Range(0, 8*gib).Draw(t, "memory"), Reserve: rapid.SampledFrom([]int64{0, gib / 128, gib}).Draw(t, "reserve"), Disk: rapid.Int64Range(0, 100*gib).Draw(t, "disk")}}
				used, of := sum()
				total := l.Total()
				wakes := rapid.Bool().Draw(t, "wakes")
				fits := int64(len(live)) < limits.MaxSandboxes && (most[h.class] == 0 || of[h.class] < most[h.class]) &&
					used.Reserve+h.r.Reserved() <= total.Memory && limits.MemoryReserve+since+h.r.Reserved() <= host.Memory &&
					host.Memory > limits.MemoryReserve && host.Stalled < stalledMost && (wakes || host.Disk >= limits.DiskReserve)
				admit := l.Admit
				if wakes {
					admit = l.Readmit
				}
				err := admit(h.class, h.r, time.Second)
				if (err == nil) != fits {
					t.Fatalf("admission of %+v: %v, and it fits: %v", h, err, fits)
				}
				if err == nil {
					since += h.r.Reserved()
					live = append(live, h)
				} else if sandbox.ClassOf(err) != sandbox.NoCapacity {
					t.Fatalf("refused with %v", err)
				}
			},
			"release": func(t *rapid.T) {
				if len(live) == 0 {
					t.Skip("nothing is held")
				}
				i := rapid.IntRange(0, len(live)-1).Draw(t, "which")
				l.Release(live[i].class, live[i].r)
				since = max(since-live[i].r.Reserved(), 0)
				live = append(live[:i], live[i+1:]...)
			},
			"look": func(t *rapid.T) {
				host, since = Host{Memory: rapid.Int64Range(0, 16*gib).Draw(t, "free"), Stalled: rapid.SampledFrom([]float64{0, 5, 50}).Draw(t, "stalled"),
					Disk: rapid.Int64Range(0, 3*gib).Draw(t, "free disk")}, 0
				l.Observe(host)
			},
			"": func(t *rapid.T) {
				want, of := sum()
				if used, count := l.Used(); used != want || count != int64(len(live)) {
					t.Fatalf("%d hold %+v, counted are %d with %+v", len(live), want, count, used)
				}
				for _, c := range classes {
					if l.Of(c) != of[c] {
						t.Fatalf("%d of class %q, counted are %d", of[c], c, l.Of(c))
					}
				}
			},
		})
	})
}
