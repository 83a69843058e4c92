package agent

import (
	"math"
	goruntime "runtime"
	"time"
)

// PoolSettings bound the warm kernels of a class. Zero fields take the defaults,
// which share the machine among the classes.
type PoolSettings struct {
	Min int // warm kernels held even when nobody comes; default 4, -1 = none
	Max int // default 256, at most 1/20 of the memory; never more than Class.Most
	// Blank kernels held beside them (see blanks); default 1, or none where
	// Class.Most limits them, -1 = none.
	Blank int
	// Ahead is how many kernels are held at most that were restored from checkpoints in
	// use (see ahead); default 32, at most 1/40 of the memory, none where Class.Most limits
	// them or there are no blank ones, -1 = none.
	Ahead int
	// Parallel boots for creators that wait; default the number of cores: a
	// boot is CPU-bound (66 ms), more at once only make each one slower.
	Parallel int
	// Background boots ahead of demand; default half the cores, so that they
	// do not take the CPU from what sandboxes do. As many as cores are idle, and at
	// most Parallel, where that is more.
	Background int
	// Grace after a create before the next background boot: the first exec
	// comes right behind a create and must not share its core with a boot.
	Grace time.Duration // default 20 ms
	// Patience is the longest a background boot is put off by creates.
	Patience     time.Duration // default 250 ms
	KernelMemory int64         // of one warm kernel; default 12 MiB
}

// withDefaults is for one of so many classes, with at most so many kernels of it
// (0 = any number).
func (s PoolSettings) withDefaults(memory int64, classes int, most int64) PoolSettings {
	cores := goruntime.NumCPU()
	def := func(p *int, v int) {
		if *p == 0 {
			*p = v
		}
	}
	if s.KernelMemory == 0 {
		s.KernelMemory = 12 << 20
	}
	def(&s.Min, 4)
	def(&s.Max, min(256, max(s.Min, int(memory/20/s.KernelMemory/int64(classes)))))
	if most > 0 {
		def(&s.Blank, -1)
		def(&s.Ahead, -1)
		s.Max = int(min(int64(s.Max), most))
		s.Min = min(s.Min, s.Max)
	}
	def(&s.Blank, 1)
	if s.Blank < 0 {
		def(&s.Ahead, -1)
	}
	def(&s.Ahead, max(1, min(32, int(memory/40/heldMemory/int64(classes)))))
	def(&s.Parallel, cores)
	def(&s.Background, max(1, cores/2/classes))
	if s.Grace == 0 {
		s.Grace = 20 * time.Millisecond
	}
	if s.Patience == 0 {
		s.Patience = 250 * time.Millisecond
	}
	return s
}

// demand remembers how fast kernels were taken. It costs two numbers, not a
// history: a peak that fades and a moving average.
type demand struct {
	second int64 // the second being counted
	count  float64
	peak   float64 // most takes in one second, fading
	peakAt time.Time
	rate   float64 // takes per second, averaged over about rateWindow
	rateAt time.Time
}

const (
	// A trainer comes back with the next batch of episodes after minutes: a
	// peak must still count then, and be forgotten within half an hour.
	peakHalfLife = 3 * time.Minute
	rateWindow   = time.Minute
)

// note counts one take.
func (d *demand) note(now time.Time) {
	if s := now.Unix(); s != d.second {
		d.second, d.count = s, 0
	}
	d.count++
	if p := d.peakNow(now); d.count >= p {
		d.peak, d.peakAt = d.count, now
	}
	d.rate, d.rateAt = d.rateNow(now)+1/rateWindow.Seconds(), now
}

func (d *demand) peakNow(now time.Time) float64 {
	return d.peak * math.Exp2(-now.Sub(d.peakAt).Seconds()/peakHalfLife.Seconds())
}

func (d *demand) rateNow(now time.Time) float64 {
	return d.rate * math.Exp(-now.Sub(d.rateAt).Seconds()/rateWindow.Seconds())
}

// sizing is all that the number of warm kernels depends on.
type sizing struct {
	min, max     int
	expected     int           // that callers said they will take: see Node.Expect
	peak, rate   float64       // from demand
	bootTime     time.Duration // of one kernel, recently
	ready        int
	freeMemory   int64 // of the host, above its reserve; negative = below
	kernelMemory int64
}

// warmTarget is how many warm kernels to hold: as many as the busiest second
// of late took, plus those taken while a replacement boots, or as many as are
// expected if that is more, within what memory is free. Memory wins over min: a warm kernel is never worth an OOM.
func warmTarget(s sizing) int {
	want := int(math.Ceil(s.peak - 0.5 + s.rate*s.bootTime.Seconds()))
	want = min(max(want, s.expected, s.min), s.max)
	affordable := s.ready + int(math.Floor(float64(s.freeMemory)/float64(s.kernelMemory)))
	return max(min(want, affordable), 0)
}
