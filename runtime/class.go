package runtime

import (
	"fmt"
	"regexp"

	"github.com/cove-sandbox/cove/sandbox"
)

// Class is a kind of kernel. Kernels of one class are alike until they are given
// a container, so a node boots them ahead of demand and any will do; kernels of
// two classes are never taken for one another. The zero Class is a driver's
// plain kernel: no devices of the host, of any size.
type Class struct {
	Name string
	// Devices of the host that every kernel of the class has, by path. Only of a
	// driver with Capabilities.Devices.
	Devices []string
	// Size of the class's kernels, CPU and memory; zero = that of the container.
	// A driver with Capabilities.FixedSize needs it, because its kernels are given
	// their size when they boot. With any driver a sandbox must fit into it.
	Size sandbox.Resources
}

var className = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$`)

// ValidClassName is 1 to 40 of a-z, 0-9 and dashes, none of them at the ends.
func ValidClassName(name string) bool { return className.MatchString(name) }

// Fixed says whether the class has a size of its own.
func (c Class) Fixed() bool { return c.Size.MilliCPU > 0 || c.Size.Memory > 0 }

// Check says why a driver that can do what can cannot boot the class:
// sandbox.ErrInvalid or sandbox.ErrUnsupported. Drivers call it in Boot.
func (c Class) Check(driver string, can Capabilities) error {
	switch {
	case len(c.Devices) > 0 && !can.Devices:
		return sandbox.Errorf(sandbox.Unsupported, "runtime.class", "runtime %s cannot give kernels devices of the host, and %s has %v", driver, c, c.Devices)
	case can.FixedSize && (c.Size.MilliCPU <= 0 || c.Size.Memory <= 0):
		return sandbox.Errorf(sandbox.Invalid, "runtime.class", "kernels of runtime %s have their size from the start: %s needs CPU and memory", driver, c)
	case c.Size.MilliCPU < 0 || c.Size.Memory < 0:
		return sandbox.Errorf(sandbox.Invalid, "runtime.class", "the size of %s is negative", c)
	}
	return nil
}

func (c Class) String() string {
	if c.Name == "" {
		return "the plain kernel class"
	}
	return fmt.Sprintf("kernel class %q", c.Name)
}
