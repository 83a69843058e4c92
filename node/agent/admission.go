package agent

import (
	"cmp"
	"fmt"
	"math"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// Limits are what a node gives out. Zero fields take the machine's own numbers
// and the defaults below.
type Limits struct {
	// CPU is compressible: too many only share, so nothing but the size of one
	// sandbox is bounded by it. A group of 256 waits for a model most of the time.
	MilliCPU int64 // of the machine
	Memory   int64 // bytes of the machine
	Disk     int64 // bytes free for writable layers when nothing runs

	// MemoryReserve is kept from sandboxes: for the host, the node and what
	// grows between two looks. Default a tenth of the memory.
	MemoryReserve int64
	// DiskReserve is kept free of the real disk: no create while there is less.
	// What sandboxes may write is not counted: they write little of their 10 GiB.
	DiskReserve int64 // default 2 GiB

	MaxSandboxes int64 // default as many as the host's tables have room for
}

func (l Limits) withDefaults() Limits {
	if l.MemoryReserve == 0 {
		l.MemoryReserve = l.Memory / 10
	}
	if l.DiskReserve == 0 {
		l.DiskReserve = 2 << 30
	}
	if l.MaxSandboxes == 0 {
		l.MaxSandboxes = math.MaxInt64
	}
	return l
}

// Host is what a machine has left, as it was read.
type Host struct {
	Memory  int64   // bytes that could be had now without swapping
	Stalled float64 // percent of the last ten seconds in which nobody could go on for want of memory
	Disk    int64   // bytes that could be written
}

// Reservations count what the node has promised to sandboxes, and know what the
// machine really had left when it was last read. They do no I/O and read no
// clock. Not safe for concurrent use: the node guards it.
type Reservations struct {
	limits  Limits
	used    sandbox.Resources
	count   int64
	classes map[string]*classCount
	host    Host
	since   int64 // bytes of memory promised since host was read
}

// classCount is how many sandboxes have a kernel of a class.
type classCount struct{ count, most int64 } // most 0: the node's limits are all

// NewReservations begin with nothing promised, on a machine that nobody uses.
func NewReservations(l Limits) *Reservations {
	l = l.withDefaults()
	return &Reservations{limits: l, classes: map[string]*classCount{}, host: Host{Memory: l.Memory, Disk: math.MaxInt64}}
}

// Limit lets a class of kernels have at most so many sandboxes.
func (l *Reservations) Limit(class string, most int64) { l.class(class).most = most }

func (l *Reservations) class(name string) *classCount {
	c := l.classes[name]
	if c == nil {
		c = &classCount{}
		l.classes[name] = c
	}
	return c
}

// Observe says what the machine has left now.
func (l *Reservations) Observe(h Host) { l.host, l.since = h, 0 }

// Total is what can be promised of memory, and of the rest what the machine has.
func (l *Reservations) Total() sandbox.Resources {
	mem := l.limits.Memory - l.limits.MemoryReserve
	return sandbox.Resources{MilliCPU: l.limits.MilliCPU, Memory: mem, MemoryLimit: mem, Disk: l.limits.Disk}
}

// Used is what is promised, and to how many.
func (l *Reservations) Used() (sandbox.Resources, int64) { return l.used, l.count }

// Of is how many of a class it is promised to.
func (l *Reservations) Of(class string) int64 {
	if c := l.classes[class]; c != nil {
		return c.count
	}
	return 0
}

// Admit promises r with a kernel of a class or says why not: sandbox.ErrTooLarge naming the field where
// this machine could never hold it, sandbox.ErrNoCapacity naming the shortage
// where it could, asked again after retry.
func (l *Reservations) Admit(class string, r sandbox.Resources, retry time.Duration) error {
	return l.admit(class, r, retry, false)
}

// Readmit is Admit for a sandbox that wakes. The disk's reserve is kept from new
// ones, not from those that are here: with less than that free they could not be
// reached for as long as it lasts.
func (l *Reservations) Readmit(class string, r sandbox.Resources, retry time.Duration) error {
	return l.admit(class, r, retry, true)
}

func (l *Reservations) admit(class string, r sandbox.Resources, retry time.Duration, wakes bool) error {
	if err := l.fits(r); err != nil {
		return err
	}
	if err := l.lacks(class, r, wakes); err != nil {
		err.Op, err.RetryAfter = "node.admit", retry
		return err
	}
	l.Hold(class, r)
	return nil
}

// Full says what nobody is admitted for now, whatever is asked for; nil = nothing.
func (l *Reservations) Full() *sandbox.Error {
	return cmp.Or(l.placesLack(), l.hostLacks(0, false))
}

func (l *Reservations) placesLack() *sandbox.Error {
	if l.count < l.limits.MaxSandboxes {
		return nil
	}
	return sandbox.NoPlace(l.limits.MaxSandboxes)
}

// lacks is what there is not enough of. It does not say how much is left: who
// asks may be a tenant, and what others use is not a tenant's to know. The
// operator has it of Info.
func (l *Reservations) lacks(class string, r sandbox.Resources, wakes bool) *sandbox.Error {
	if err := l.placesLack(); err != nil {
		return err
	}
	of := l.class(class)
	switch {
	case of.most > 0 && of.count >= of.most:
		return full("it holds its maximum of %d sandboxes of kernel class %q", of.most, class).
			WithHint("kill sandboxes of that class, ask for another class, or add a machine")
	case r.Reserved() > l.Total().Memory-l.used.Reserve:
		return sandbox.NoMemory(r.Reserved())
	}
	return l.hostLacks(r.Reserved(), wakes)
}

// hostLacks is what the machine really has too little of. memory is what is to be
// added to it.
func (l *Reservations) hostLacks(memory int64, wakes bool) *sandbox.Error {
	switch {
	case memory+l.since > l.host.Memory-l.limits.MemoryReserve:
		return full("the memory of the machine is in use").
			WithHint("kill or pause sandboxes that use much ('cove ls', 'cove stats'; --idle-timeout with --on-idle pause does it by itself), or add memory or a machine")
	case l.limits.strain(l.host) > relaxed:
		return full("processes on the machine wait for memory").
			WithHint("kill or pause sandboxes that use much ('cove stats' says how much), or add memory or a machine")
	case l.host.Disk < l.limits.DiskReserve && !wakes:
		return full("the host has less than %s of disk free", amount(l.limits.DiskReserve, "B")).
			WithHint("free disk space on the host: sandboxes that wrote much ('cove stats'), snapshots ('cove snapshot ls'), images ('cove image prune')")
	}
	return nil
}

func full(format string, args ...any) *sandbox.Error {
	return sandbox.NodeFull(fmt.Sprintf(format, args...), "")
}

// Resize makes a promise of r one with another size of disk, or says why not.
func (l *Reservations) Resize(r sandbox.Resources, disk int64) error {
	if disk > r.Disk {
		if err := l.fits(sandbox.Resources{Disk: disk}); err != nil {
			return err
		}
	}
	l.used.Disk += disk - r.Disk
	return nil
}

// fits refuses what no amount of waiting would give.
func (l *Reservations) fits(r sandbox.Resources) error {
	for _, f := range []struct {
		field      string
		want, most int64
		unit       string
	}{
		{"spec.resources.cpu", r.MilliCPU, l.limits.MilliCPU, "m"},
		{"spec.resources.memory", r.Memory, l.Total().Memory, "B"},
		{"spec.resources.memory_limit", r.MemoryLimit, l.limits.Memory, "B"},
		{"spec.resources.disk", r.Disk, l.limits.Disk, "B"},
	} {
		switch {
		case f.want < 0:
			return sandbox.InvalidField(f.field, "%s is negative", amount(f.want, f.unit))
		case f.want > f.most:
			return &sandbox.Error{Class: sandbox.TooLarge, Field: f.field,
				Msg:  fmt.Sprintf("%s is more than the %s this machine has to give", amount(f.want, f.unit), amount(f.most, f.unit)),
				Hint: "ask for less, or use a larger machine"}
		}
	}
	return nil
}

// Hold promises r without asking: a sandbox found alive at recovery exists,
// whatever the limits say now.
func (l *Reservations) Hold(class string, r sandbox.Resources) {
	l.since += r.Reserved()
	l.add(class, r, 1)
}

// Release takes a promise back.
func (l *Reservations) Release(class string, r sandbox.Resources) {
	l.since = max(l.since-r.Reserved(), 0) // its own, or as much came free of what was read
	l.add(class, r, -1)
}

func (l *Reservations) add(class string, r sandbox.Resources, sign int64) {
	l.count += sign
	l.class(class).count += sign
	l.used.MilliCPU += sign * r.MilliCPU
	l.used.Memory += sign * r.Memory
	l.used.MemoryLimit += sign * r.MemoryLimit
	l.used.Disk += sign * r.Disk
	l.used.Reserve += sign * r.Reserved()
}

// amount writes a number as people do.
func amount(n int64, unit string) string {
	if unit == "m" {
		return fmt.Sprintf("%.4g cores", float64(n)/1000)
	}
	for _, u := range []struct {
		name string
		size int64
	}{{"TiB", 1 << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}} {
		if n >= u.size {
			return fmt.Sprintf("%.4g %s", float64(n)/float64(u.size), u.name)
		}
	}
	return fmt.Sprintf("%d bytes", n)
}
