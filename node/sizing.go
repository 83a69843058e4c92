package node

import (
	"math"
	"time"
)

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
	peak, rate   float64       // from demand
	bootTime     time.Duration // of one kernel, recently
	ready        int
	freeMemory   int64 // of the host, above its reserve; negative = below
	kernelMemory int64
}

// warmTarget is how many warm kernels to hold: as many as the busiest second
// of late took, plus those taken while a replacement boots, within what memory
// is free. Memory wins over min: a warm kernel is never worth an OOM.
func warmTarget(s sizing) int {
	want := int(math.Ceil(s.peak - 0.5 + s.rate*s.bootTime.Seconds()))
	want = min(max(want, s.min), s.max)
	room := s.ready + int(math.Floor(float64(s.freeMemory)/float64(s.kernelMemory)))
	return max(min(want, room), 0)
}
