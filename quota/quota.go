// Package quota decides whether a tenant may have more, and who is next when
// there is not enough for everybody. It is pure: what is used, what is asked for
// and the time come in, a verdict comes out.
package quota

import (
	"fmt"
	"math"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// Usage is what a tenant holds.
type Usage struct {
	Sandboxes     int64
	MilliCPU      int64
	Memory        int64
	Disk          int64 // writable layers and volumes
	SnapshotBytes int64
	ImageBytes    int64 // images with a name of the tenant's, each content once
}

// Plus is u with one more sandbox.
func (u Usage) Plus(r sandbox.Resources) Usage {
	u.Sandboxes++
	u.MilliCPU += r.MilliCPU
	u.Memory += r.Memory
	u.Disk += r.Disk
	return u
}

// Minus is u with one sandbox less.
func (u Usage) Minus(r sandbox.Resources) Usage {
	u.Sandboxes--
	u.MilliCPU -= r.MilliCPU
	u.Memory -= r.Memory
	u.Disk -= r.Disk
	return u
}

// comeBack is when to ask again for what is free only when something ends,
// which nobody can know.
const comeBack = 5 * time.Second

// Create says whether a tenant may make n more sandboxes alike, of which least
// must fit into its bounds. The bucket is what the last call returned, the zero
// one at first; a refusal takes nothing from it.
func Create(q sandbox.Quota, used Usage, b Bucket, ask sandbox.Resources, least, n int, now time.Time) (Bucket, error) {
	if err := Fits(q, used, ask, least); err != nil {
		return b, err
	}
	return b.take(q.CreatesPerSecond, n, now)
}

// Fits says whether n more sandboxes alike fit into a tenant's bounds, at
// whatever rate they come.
func Fits(q sandbox.Quota, used Usage, ask sandbox.Resources, n int) error {
	for _, c := range []struct {
		what             string
		have, ask, limit int64
		show             func(int64) string
	}{
		{"sandboxes", used.Sandboxes, 1, q.Sandboxes, plain},
		{"CPU", used.MilliCPU, ask.MilliCPU, q.MilliCPU, cores},
		{"memory", used.Memory, ask.Memory, q.Memory, sandbox.FormatSize},
		{"disk", used.Disk, ask.Disk, q.Disk, sandbox.FormatSize},
	} {
		if err := within(c.what, c.have, times(c.ask, n), c.limit, c.show); err != nil {
			return err
		}
	}
	return nil
}

// times does not overflow.
func times(a int64, n int) int64 {
	if n > 0 && a > math.MaxInt64/int64(n) {
		return math.MaxInt64
	}
	return a * int64(n)
}

// Disk says whether a tenant may have more bytes of disk, of volumes or of a
// writable layer.
func Disk(q sandbox.Quota, used Usage, more int64) error {
	return within("disk", used.Disk, more, q.Disk, sandbox.FormatSize)
}

// Snapshot says whether a tenant may take a snapshot. How many bytes one adds is
// known only when it is there, so the last one may go over the bound.
func Snapshot(q sandbox.Quota, used Usage) error {
	if q.SnapshotBytes == 0 || used.SnapshotBytes < q.SnapshotBytes {
		return nil
	}
	return &sandbox.Error{Class: sandbox.QuotaExceeded, RetryAfter: comeBack,
		Msg:  fmt.Sprintf("the tenant's snapshots take %s of its quota of %s", sandbox.FormatSize(used.SnapshotBytes), sandbox.FormatSize(q.SnapshotBytes)),
		Hint: `"cove snapshot prune" and "cove snapshot rm" make room`}
}

// Image says whether a tenant may name more bytes of images.
func Image(q sandbox.Quota, used Usage, more int64) error {
	err := within("images", used.ImageBytes, more, q.ImageBytes, sandbox.FormatSize)
	if e, ok := err.(*sandbox.Error); ok {
		return e.WithHint(`"cove image rm" takes a name back; an image counts no more when it has no name, no sandbox and no snapshot left; or ask an installation's admin for more`)
	}
	return err
}

// BuildFiles says whether what a tenant uploads for builds fits into what is kept of
// its builds at all. What is there already gives way to it.
func BuildFiles(most, size int64) error {
	return within("build files", 0, size, most, sandbox.FormatSize)
}

func within(what string, have, ask, limit int64, show func(int64) string) error {
	if limit == 0 || ask <= 0 && what != "sandboxes" || have <= limit-ask {
		return nil
	}
	e := &sandbox.Error{Class: sandbox.QuotaExceeded, RetryAfter: comeBack,
		Msg:  fmt.Sprintf("%s: %s in use, %s asked for, the tenant's quota is %s", what, show(have), show(ask), show(limit)),
		Hint: "kill what is not needed, or ask an installation's admin for more"}
	if ask > limit {
		e.RetryAfter, e.Hint = 0, "this is more than the tenant may have at all: ask for less, or an installation's admin for more"
	}
	return e
}

func plain(n int64) string { return fmt.Sprint(n) }
func cores(n int64) string { return fmt.Sprintf("%g cores", float64(n)/1000) }

// Bucket is a token bucket: the zero one is full. It holds the creates of one
// second, and one at least. A call for more than it holds is let through when it
// is full and leaves it below empty, so that such calls come through at all and
// whatever follows waits for them: over time the rate holds.
type Bucket struct {
	missing float64 // of a full one; more than its size when below empty
	rate    float64 // it was last filled at
	at      time.Time
}

// take takes n at once or nothing. Whoever asks for the same again after
// RetryAfter gets it, if nobody else came in between.
func (b Bucket) take(rate float64, n int, now time.Time) (Bucket, error) {
	if rate <= 0 {
		return Bucket{at: now}, nil
	}
	size := math.Max(1, rate)
	missing := b.missing
	if b.rate > 0 { // a new rate is no reason to wait longer, or less, than under the old
		missing *= rate / b.rate
	}
	if now.After(b.at) { // a clock that went back gives nothing, and goes on from there
		missing -= now.Sub(b.at).Seconds() * rate
	}
	missing = math.Max(missing, 0)
	// The tolerance is for times that were rounded to nanoseconds on the way.
	if over := missing - (size - math.Min(float64(n), size)); over > 1e-6 {
		return Bucket{missing, rate, now}, &sandbox.Error{Class: sandbox.QuotaExceeded, RetryAfter: waitFor(over / rate),
			Msg:  fmt.Sprintf("more than the tenant's %g creates per second", rate),
			Hint: "ask again after the time given, or ask an installation's admin for more"}
	}
	return Bucket{missing + float64(n), rate, now}, nil
}

// waitFor rounds seconds up to what callers are told: milliseconds, and no more
// than a duration holds.
func waitFor(seconds float64) time.Duration {
	if seconds >= time.Duration(math.MaxInt64).Seconds()/2 {
		return math.MaxInt64 / 2
	}
	return time.Duration(math.Ceil(seconds*1000)) * time.Millisecond
}
