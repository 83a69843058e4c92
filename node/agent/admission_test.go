package agent

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

const gib = 1 << 30

func TestAdmission(t *testing.T) {
	limits := Limits{MilliCPU: 2000, Memory: 10 * gib, Disk: 100 * gib, MaxSandboxes: 12}
	ample := Host{Memory: 10 * gib, Disk: 100 * gib}
	small := sandbox.Resources{MilliCPU: 100, Memory: gib / 16, MemoryLimit: gib / 8, Disk: gib}
	with := func(f func(*sandbox.Resources)) sandbox.Resources {
		r := small
		f(&r)
		return r
	}
	times := func(n int, r sandbox.Resources) []sandbox.Resources {
		var out []sandbox.Resources
		for range n {
			out = append(out, r)
		}
		return out
	}
	for _, c := range []struct {
		name  string
		held  []sandbox.Resources
		host  Host // zero = ample
		wakes bool
		ask   sandbox.Resources
		class sandbox.Class
		field string
		says  string
		hides string // of what others use
	}{
		{name: "an empty node takes a small one", ask: small},
		{name: "the whole machine's cores", ask: with(func(r *sandbox.Resources) { r.MilliCPU = 2000 })},
		{name: "more cores than there are", ask: with(func(r *sandbox.Resources) { r.MilliCPU = 2001 }), class: sandbox.TooLarge, field: "spec.resources.cpu", says: "2 cores"},
		{name: "more memory than is ever given out", ask: with(func(r *sandbox.Resources) { r.Memory = 9*gib + 1 }), class: sandbox.TooLarge, field: "spec.resources.memory", says: "9 GiB"},
		{name: "a memory limit above the machine", ask: with(func(r *sandbox.Resources) { r.MemoryLimit = 11 * gib }), class: sandbox.TooLarge, field: "spec.resources.memory_limit"},
		{name: "a memory limit above the share, within the machine", ask: with(func(r *sandbox.Resources) { r.MemoryLimit = 10 * gib })},
		{name: "a disk larger than the machine's", ask: with(func(r *sandbox.Resources) { r.Disk = 101 * gib }), class: sandbox.TooLarge, field: "spec.resources.disk"},
		{name: "negative", ask: with(func(r *sandbox.Resources) { r.Disk = -1 }), class: sandbox.Invalid, field: "spec.resources.disk"},
		{name: "the last place", held: times(11, small), ask: small},
		{name: "no place", held: times(12, small), ask: small, class: sandbox.NoCapacity, says: "maximum of 12"},
		{name: "what is reserved is short", held: times(2, with(func(r *sandbox.Resources) { r.Memory = 4 * gib })),
			ask: with(func(r *sandbox.Resources) { r.Memory = 2 * gib }), class: sandbox.NoCapacity, says: "not enough memory left that is not reserved, for 2GiB", hides: "1GiB"},
		{name: "a size of which little is reserved", held: times(10, with(func(r *sandbox.Resources) { r.Memory, r.Reserve = 8*gib, gib/128 })),
			ask: with(func(r *sandbox.Resources) { r.Memory, r.Reserve = 8*gib, gib/128 })},
		{name: "memory limits may add up to more than there is", held: times(2, with(func(r *sandbox.Resources) { r.MemoryLimit = 9 * gib })), ask: small},
		{name: "cpu is shared by however many", held: times(11, with(func(r *sandbox.Resources) { r.MilliCPU = 2000 })),
			ask: with(func(r *sandbox.Resources) { r.MilliCPU = 2000 })},
		{name: "declared disk does not count", held: times(11, with(func(r *sandbox.Resources) { r.Disk = 90 * gib })),
			ask: with(func(r *sandbox.Resources) { r.Disk = 60 * gib })},
		{name: "the host's disk is low", host: Host{Memory: 10 * gib, Disk: 2*gib - 1}, ask: small, class: sandbox.NoCapacity, says: "2 GiB of disk"},
		{name: "and keeps nobody asleep", host: Host{Memory: 10 * gib, Disk: 2*gib - 1}, wakes: true, ask: small},
		{name: "the machine's memory is in use", host: Host{Memory: gib + gib/16 - 1, Disk: gib * 9}, ask: small, class: sandbox.NoCapacity, says: "the memory of the machine is in use", hides: "MiB"},
		{name: "which is also for those who wake", host: Host{Memory: gib, Disk: gib * 9}, wakes: true, ask: small, class: sandbox.NoCapacity, says: "in use"},
		{name: "just enough memory is there", host: Host{Memory: gib + gib/16, Disk: gib * 9}, ask: small},
		{name: "processes wait for memory", host: Host{Memory: 9 * gib, Disk: gib * 9, Stalled: 10}, ask: small, class: sandbox.NoCapacity, says: "wait for memory"},
		{name: "they wait a little", host: Host{Memory: 9 * gib, Disk: gib * 9, Stalled: 9.9}, ask: small},
		{name: "recovered ones over the limit leave room for nobody", held: times(20, small), ask: small, class: sandbox.NoCapacity},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := NewReservations(limits)
			for _, r := range c.held {
				l.Hold("plain", r)
			}
			if c.host == (Host{}) {
				c.host = ample
			}
			l.Observe(c.host)
			before, count := l.Used()
			admit := l.Admit
			if c.wakes {
				admit = l.Readmit
			}
			err := admit("plain", c.ask, 7*time.Second)
			if sandbox.ClassOf(err) != c.class {
				t.Fatalf("got %v, want class %q", err, c.class)
			}
			if c.class == "" {
				l.Release("plain", c.ask)
			}
			if after, n := l.Used(); after != before || n != count {
				t.Errorf("the account is off: %+v then %+v", before, after)
			}
			var e *sandbox.Error
			if errors.As(err, &e) {
				if e.Field != c.field || !strings.Contains(e.Error(), c.says) {
					t.Errorf("%q (field %q) does not say %q (field %q)", e, e.Field, c.says, c.field)
				}
				if c.hides != "" && strings.Contains(e.Error()+e.Hint, c.hides) {
					t.Errorf("%q tells what is left, and so what others use", e)
				}
				if e.Class == sandbox.NoCapacity && (e.RetryAfter != 7*time.Second || e.Hint == "") {
					t.Errorf("no way out: %+v", e)
				}
			}
		})
	}
}

func TestWarmTarget(t *testing.T) {
	base := sizing{min: 4, max: 100, bootTime: 100 * time.Millisecond, freeMemory: 10 * gib, kernelMemory: 10 << 20}
	for _, c := range []struct {
		name string
		edit func(*sizing)
		want int
	}{
		{"nobody comes", func(*sizing) {}, 4},
		{"a burst of late", func(s *sizing) { s.peak = 40 }, 40},
		{"a steady stream while kernels boot", func(s *sizing) { s.peak, s.rate, s.bootTime = 20, 20, time.Second }, 40},
		{"a burst above the most", func(s *sizing) { s.peak = 400 }, 100},
		{"memory for ten more", func(s *sizing) { s.peak, s.freeMemory = 40, 105<<20 }, 10},
		{"memory for ten more besides those there", func(s *sizing) { s.peak, s.ready, s.freeMemory = 40, 15, 105<<20 }, 25},
		{"memory is short: those there go too", func(s *sizing) { s.ready, s.freeMemory = 4, -15<<20 }, 2},
		{"no memory at all", func(s *sizing) { s.ready, s.freeMemory = 4, -gib }, 0},
		{"a fraction of a peak is none", func(s *sizing) { s.min, s.peak = 0, 0.4 }, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := base
			c.edit(&s)
			if got := warmTarget(s); got != c.want {
				t.Errorf("got %d, want %d", got, c.want)
			}
		})
	}
}

func TestDemandRemembersAPeakAndForgetsIt(t *testing.T) {
	var d demand
	now := time.Unix(1000, 0)
	for range 64 {
		d.note(now)
	}
	if p := d.peakNow(now); p != 64 {
		t.Errorf("peak right after: %v", p)
	}
	if p := d.peakNow(now.Add(peakHalfLife)); p < 31 || p > 33 {
		t.Errorf("peak after its half-life: %v", p)
	}
	if p := d.peakNow(now.Add(30 * time.Minute)); p > 0.5 {
		t.Errorf("peak after half an hour: %v", p)
	}
	later := now.Add(10 * time.Minute)
	for i := range 600 { // two a second for five minutes
		d.note(later.Add(time.Duration(i) * time.Second / 2))
	}
	if r := d.rateNow(later.Add(5 * time.Minute)); r < 1.8 || r > 2.2 {
		t.Errorf("rate of a steady stream: %v", r)
	}
}
