package agent

import (
	"fmt"
	"slices"
	"strings"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// Class is a kind of kernel that a node has: what the kernel is, which driver
// boots it, how many are kept warm and how many there may be. A GPU, a microVM
// and a kernel that serves more than one sandbox are classes; nothing else of
// the node knows of them.
type Class struct {
	runtime.Class                // Name "" = that of the driver
	Driver        runtime.Driver // stays the caller's to close; two classes may have the same
	Pool          PoolSettings
	// Most sandboxes of the class at once; 0 = as many as the node's limits
	// allow. A class with devices must say how many kernels can have them.
	Most int64
	// Reuse makes it the class of sandboxes that name a trust group: its kernels
	// serve more than one of those. At most one class is.
	Reuse bool
}

// kernelClass is a class at work.
type kernelClass struct {
	Class
	can    runtime.Capabilities
	pool   *pool
	blanks *blanks
	ahead  *ahead
	rests  *rests // nil unless Reuse
}

// openClasses checks what the node was configured with and makes the pools.
// Nothing is booted yet.
func (n *Node) openClasses() error {
	const op = "node.open"
	if len(n.cfg.Classes) == 0 {
		return sandbox.Errorf(sandbox.Invalid, op, "a node needs a class of kernels")
	}
	plain := 0 // classes that share the machine; one for reuse holds nothing until it is used
	for _, c := range n.cfg.Classes {
		if !c.Reuse {
			plain++
		}
	}
	plain = max(plain, 1)
	discard := func(k runtime.Kernel) { n.discard(k) }
	for _, c := range n.cfg.Classes {
		k := &kernelClass{Class: c, can: c.Driver.Capabilities()}
		if k.Name == "" {
			k.Name = c.Driver.Name()
		}
		if !runtime.ValidClassName(k.Name) {
			return sandbox.Errorf(sandbox.Invalid, op, "%q cannot be the name of a kernel class", k.Name)
		}
		if slices.ContainsFunc(n.classes, func(o *kernelClass) bool { return o.Name == k.Name }) {
			return sandbox.Errorf(sandbox.Invalid, op, "there are two kernel classes %q", k.Name)
		}
		if err := k.Check(c.Driver.Name(), k.can); err != nil {
			return sandbox.WithOp(op, err)
		}
		if len(k.Devices) > 0 && k.Most <= 0 {
			return sandbox.Errorf(sandbox.Invalid, op, "%s has devices and does not say how many kernels can have them", k.Class.Class)
		}
		if k.Reuse && !k.can.Reuse {
			return sandbox.Errorf(sandbox.Unsupported, op, "runtime %s cannot use kernels again, as %s says", c.Driver.Name(), k.Class.Class)
		}
		k.Pool = k.Pool.withDefaults(n.mu.reservations.limits.Memory, plain, k.Most)
		k.pool = newPool(k.Pool, n.bootOf(k), discard, n.freeMemory, n.creates, n.log.With("class", k.Name))
		k.pool.idle = new(coreMeter).idle
		if k.Most > 0 {
			n.mu.reservations.Limit(k.Name, k.Most)
			k.pool.spare = func() int { return n.spare(k) }
		}
		if k.Reuse {
			k.rests = &rests{most: k.Pool.Max, discard: discard}
		}
		k.blanks, k.ahead = newBlanks(n, k), newAhead(n, k)
		n.classes = append(n.classes, k)
	}
	return nil
}

// spare is how many kernels of a class may be warm beside those that sandboxes
// have.
func (n *Node) spare(k *kernelClass) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return int(max(k.Most-n.mu.reservations.Of(k.Name), 0))
}

// classOf is the class of a sandbox that is to be made.
func (n *Node) classOf(s sandbox.Spec) (*kernelClass, error) {
	if s.KernelClass == "" && s.Reuse != "" {
		if i := slices.IndexFunc(n.classes, func(c *kernelClass) bool { return c.Reuse }); i >= 0 {
			return n.classes[i], nil
		}
	}
	return n.class(s.KernelClass)
}

// class finds a class by its name; "" is the first, the default.
func (n *Node) class(name string) (*kernelClass, error) {
	if name == "" {
		return n.classes[0], nil
	}
	for _, c := range n.classes {
		if c.Name == name {
			return c, nil
		}
	}
	names := make([]string, len(n.classes))
	for i, c := range n.classes {
		names[i] = c.Name
	}
	return nil, sandbox.InvalidField("spec.kernel_class", "node %s has no kernel class %q", n.cfg.Name, name).
		WithHint("it has %s", strings.Join(names, ", "))
}

// drivers lists every driver once, with its classes: what is asked of a driver as
// a whole is asked for all of them.
func (n *Node) drivers() (out []driverClasses) {
	for _, c := range n.classes {
		i := slices.IndexFunc(out, func(d driverClasses) bool { return d.Driver == c.Driver })
		if i < 0 {
			i = len(out)
			out = append(out, driverClasses{Driver: c.Driver})
		}
		out[i].classes = append(out[i].classes, c)
	}
	return out
}

type driverClasses struct {
	runtime.Driver
	classes []*kernelClass
}

// fits refuses a sandbox that a class's kernels are too small for, or that wants
// what they cannot do.
func (c *kernelClass) fits(s sandbox.Spec) error {
	if len(s.Volumes) > 0 && !c.can.Volumes {
		return sandbox.InvalidField("spec.volumes", "sandboxes of kernel class %q can have no volumes", c.Name).WithHint("cove doctor says why")
	}
	if s.Deterministic != nil && !c.can.Clock {
		return sandbox.Errorf(sandbox.Unsupported, "", "kernels of class %q have no clock of their own: a sandbox of them cannot be deterministic", c.Name)
	}
	if !c.Fixed() {
		return nil
	}
	for _, f := range []struct {
		field      string
		want, most int64
		unit       string
	}{
		{"spec.resources.cpu", s.Resources.MilliCPU, c.Size.MilliCPU, "m"},
		{"spec.resources.memory", s.Resources.Memory, c.Size.Memory, "B"},
		{"spec.resources.memory_limit", s.Resources.MemoryLimit, c.Size.Memory, "B"},
	} {
		if f.most > 0 && f.want > f.most {
			return &sandbox.Error{Class: sandbox.TooLarge, Field: f.field,
				Msg:  fmt.Sprintf("%s is more than the %s that kernels of class %q have", amount(f.want, f.unit), amount(f.most, f.unit), c.Name),
				Hint: "ask for less, or for another class"}
		}
	}
	return nil
}

// takes is what a sandbox of the class takes of the machine: a kernel of fixed
// size takes all of it, whatever was asked for.
func (c *kernelClass) takes(r sandbox.Resources) sandbox.Resources {
	if c.can.FixedSize {
		r.MilliCPU, r.Memory, r.MemoryLimit, r.Reserve = c.Size.MilliCPU, c.Size.Memory, c.Size.Memory, c.Size.Memory
	}
	return r
}

// unsupported is the error of a call that kernels of this class cannot serve.
func (c *kernelClass) unsupported(what string) *sandbox.Error {
	return sandbox.Errorf(sandbox.Unsupported, "", "runtime %s cannot %s", c.Driver.Name(), what)
}

// sameClass refuses to restore memory into a kernel of another class than it was
// saved from: the kernels may differ in all that memory knows of. Those of a trust group do
// not: its class is one for what comes after. What was saved before there were classes is of the default.
func (n *Node) sameClass(c *kernelClass, saved string) error {
	if was, err := n.class(saved); err == nil && (was == c || was.Reuse != c.Reuse && was.Driver == c.Driver && was.Size == c.Size && slices.Equal(was.Devices, c.Devices)) {
		return nil
	}
	return sandbox.Errorf(sandbox.Precondition, "", "the memory was saved from a kernel of class %q and cannot go on in one of class %q", saved, c.Name).
		WithReason(sandbox.RestoreRefused).WithHint("create the sandbox with class %q, or from a filesystem snapshot", saved)
}
