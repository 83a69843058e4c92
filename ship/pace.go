package ship

import (
	"errors"
	"math/rand/v2"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// Size bounds a batch: whichever is reached first.
type Size struct {
	Records int
	Bytes   int64 // of the log
}

// SizeFor is what a batch may have for a sink: of Parquet and of objects few large
// ones are good, a request or an append is over soon.
func SizeFor(k sandbox.ShipmentSink) Size {
	if k.Format == sandbox.Parquet || k.Kind == sandbox.S3Sink {
		return Size{Records: 100_000, Bytes: 64 << 20}
	}
	return Size{Records: 10_000, Bytes: 4 << 20}
}

// Pace says when the next batch is due: when what waits is enough or has waited long
// enough, and after a failure not before its time. It reads no clock. The zero value
// of all but Size is a start. For one goroutine.
type Pace struct {
	Size   Size
	Linger time.Duration
	// Jitter is a number below 1; nil = a random one. Shipments that failed together
	// should not come back together.
	Jitter func() float64

	waitingSince time.Time // of the oldest that waits; zero = none does
	failures     int
	notBefore    time.Time
}

// Backoff of deliveries that fail.
const (
	firstRetry = 500 * time.Millisecond
	maxRetry   = time.Minute
)

// Waits says that something waits, from now at the latest.
func (p *Pace) Waits(now time.Time) {
	if p.waitingSince.IsZero() {
		p.waitingSince = now
	}
}

// Due says how long to wait before the next delivery, given how many bytes wait: 0 =
// it is due. ok false = nothing waits.
func (p *Pace) Due(now time.Time, bytes int64) (wait time.Duration, ok bool) {
	if bytes <= 0 || p.waitingSince.IsZero() {
		return 0, false
	}
	at := p.waitingSince.Add(p.Linger)
	if bytes >= p.Size.Bytes || p.failures > 0 {
		at = now
	}
	if p.notBefore.After(at) {
		at = p.notBefore
	}
	return max(0, at.Sub(now)), true
}

// Delivered says that a batch was taken; more = something waits still.
func (p *Pace) Delivered(now time.Time, more bool) {
	p.failures, p.notBefore, p.waitingSince = 0, time.Time{}, time.Time{}
	if more {
		p.waitingSince = now
	}
}

// Failed says that a batch was not taken. A sink that says when it would be asked
// again is, and no sooner.
func (p *Pace) Failed(now time.Time, err error) {
	wait := min(maxRetry, firstRetry<<min(p.failures, 10))
	p.failures++
	jitter := rand.Float64
	if p.Jitter != nil {
		jitter = p.Jitter
	}
	wait -= time.Duration(jitter() * float64(wait) / 2)
	var e *sandbox.Error
	if errors.As(err, &e) {
		wait = max(wait, min(e.RetryAfter, time.Hour))
	}
	p.notBefore = now.Add(wait)
}

// Failures is how many deliveries failed since one was taken.
func (p *Pace) Failures() int { return p.failures }
