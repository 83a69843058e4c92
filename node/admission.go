package node

import (
	"fmt"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// Limits are what a node gives out. Zero fields take the machine's own numbers
// and the defaults below.
type Limits struct {
	MilliCPU int64 // of the machine
	Memory   int64 // bytes of the machine
	Disk     int64 // bytes free for writable layers when nothing runs

	// CPU is compressible: too many only share. The default 128 lets a group
	// of 256 one-core sandboxes start on two cores, most of them waiting for
	// a model most of the time.
	CPUOvercommit float64
	// MemoryShare of the machine goes to requests; default 0.9, the rest is
	// for the host, the node and the warm kernels.
	MemoryShare float64
	// Disk is promised many times over (default 100×, sandboxes write little
	// of their 10 GiB); what guards the host is DiskReserve.
	DiskOvercommit float64
	DiskReserve    int64 // no create while less than this is really free; default 2 GiB

	MaxSandboxes int64 // default 2000
}

func (l Limits) withDefaults() Limits {
	def := func(p *float64, v float64) {
		if *p == 0 {
			*p = v
		}
	}
	def(&l.CPUOvercommit, 128)
	def(&l.MemoryShare, 0.9)
	def(&l.DiskOvercommit, 100)
	if l.DiskReserve == 0 {
		l.DiskReserve = 2 << 30
	}
	if l.MaxSandboxes == 0 {
		l.MaxSandboxes = 2000
	}
	return l
}

// Ledger is the node's account of what it has promised to whom. It does no
// I/O and reads no clock. Not safe for concurrent use: the node guards it.
type Ledger struct {
	limits  Limits
	used    sandbox.Resources
	count   int64
	lowDisk bool
}

// NewLedger opens an empty account.
func NewLedger(l Limits) *Ledger { return &Ledger{limits: l.withDefaults()} }

// Total is what can be promised, overcommit included.
func (l *Ledger) Total() sandbox.Resources {
	mem := int64(float64(l.limits.Memory) * l.limits.MemoryShare)
	return sandbox.Resources{
		MilliCPU:    int64(float64(l.limits.MilliCPU) * l.limits.CPUOvercommit),
		Memory:      mem,
		MemoryLimit: mem,
		Disk:        int64(float64(l.limits.Disk) * l.limits.DiskOvercommit),
	}
}

// Used is what is promised, and to how many.
func (l *Ledger) Used() (sandbox.Resources, int64) { return l.used, l.count }

// SetLowDisk says that the host is short of real disk space: nothing more is
// admitted until it is not.
func (l *Ledger) SetLowDisk(low bool) { l.lowDisk = low }

// Admit promises r or says why not: sandbox.ErrTooLarge naming the field where
// this machine could never hold it, sandbox.ErrNoCapacity naming the shortage
// where it could, asked again after retry.
func (l *Ledger) Admit(r sandbox.Resources, retry time.Duration) error {
	return l.admit(r, retry, false)
}

// Readmit is Admit for a sandbox that wakes. The disk's reserve is kept from new
// ones, not from those that are here: with less than that free they could not be
// reached for as long as it lasts.
func (l *Ledger) Readmit(r sandbox.Resources, retry time.Duration) error {
	return l.admit(r, retry, true)
}

func (l *Ledger) admit(r sandbox.Resources, retry time.Duration, wakes bool) error {
	if err := l.fits(r); err != nil {
		return err
	}
	total := l.Total()
	short := func(what string, want, have int64, unit string) error {
		return shortOf(what, want, have, unit, retry)
	}
	switch {
	case l.count >= l.limits.MaxSandboxes:
		return &sandbox.Error{Class: sandbox.NoCapacity, Op: "node.admit", RetryAfter: retry,
			Msg:  fmt.Sprintf("the node holds its maximum of %d sandboxes", l.limits.MaxSandboxes),
			Hint: "kill sandboxes or add a machine"}
	case r.Memory > total.Memory-l.used.Memory:
		return short("memory", r.Memory, total.Memory-l.used.Memory, "B")
	case r.Disk > total.Disk-l.used.Disk:
		return short("disk", r.Disk, total.Disk-l.used.Disk, "B")
	case r.MilliCPU > total.MilliCPU-l.used.MilliCPU:
		return short("cpu", r.MilliCPU, total.MilliCPU-l.used.MilliCPU, "m")
	case l.lowDisk && !wakes:
		return &sandbox.Error{Class: sandbox.NoCapacity, Op: "node.admit", RetryAfter: retry,
			Msg:  fmt.Sprintf("the host has less than %s of disk free", amount(l.limits.DiskReserve, "B")),
			Hint: "free disk space on the host; killing sandboxes frees theirs"}
	}
	l.Hold(r)
	return nil
}

// Resize makes a promise of r one with another size of disk, or says why not.
func (l *Ledger) Resize(r sandbox.Resources, disk int64, retry time.Duration) error {
	more, left := disk-r.Disk, l.Total().Disk-l.used.Disk
	if more > 0 {
		if err := l.fits(sandbox.Resources{Disk: disk}); err != nil {
			return err
		}
		if more > left {
			return shortOf("disk", more, left, "B", retry)
		}
	}
	l.used.Disk += more
	return nil
}

func shortOf(what string, want, have int64, unit string, retry time.Duration) error {
	return &sandbox.Error{Class: sandbox.NoCapacity, Op: "node.admit", RetryAfter: retry,
		Msg:  fmt.Sprintf("not enough %s: %s asked, %s left", what, amount(want, unit), amount(max(have, 0), unit)),
		Hint: fmt.Sprintf("kill sandboxes, ask for less %s, or add a machine", what)}
}

// fits refuses what no amount of waiting would give.
func (l *Ledger) fits(r sandbox.Resources) error {
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
func (l *Ledger) Hold(r sandbox.Resources) { l.add(r, 1) }

// Release takes a promise back.
func (l *Ledger) Release(r sandbox.Resources) { l.add(r, -1) }

func (l *Ledger) add(r sandbox.Resources, sign int64) {
	l.count += sign
	l.used.MilliCPU += sign * r.MilliCPU
	l.used.Memory += sign * r.Memory
	l.used.MemoryLimit += sign * r.MemoryLimit
	l.used.Disk += sign * r.Disk
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
