package gvisor

import (
	"maps"
	"slices"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/cove-sandbox/cove/guest/wire"
)

// guestPort is where the guest listens on the kernel's loopback.
const guestPort = 49983

// userCaps is what root in the user's container has, and the guest too: entering
// another container takes SYS_ADMIN, reading the environment of other users'
// processes SYS_PTRACE. Both are in it, and nobody can give what it has not.
var userCaps = slices.Sorted(maps.Keys(wire.UserCaps))

func capabilities(names []string) *specs.LinuxCapabilities {
	return &specs.LinuxCapabilities{Bounding: names, Effective: names, Permitted: names}
}

// The specs of a kernel are compared with those of the checkpoint when one is
// restored, and a difference fails it: what changes here must ask the kernel's
// programs which form it has.

// rootSpec is the kernel's root container: the guest and nothing else.
func rootSpec(emptyDir, guestfs string, env []string) *specs.Spec {
	return &specs.Spec{
		Version: specs.Version,
		Process: &specs.Process{
			Args:         []string{guestBinary, "agent"},
			Cwd:          "/",
			Env:          env,
			Capabilities: capabilities(userCaps),
			Rlimits:      []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Hard: 1 << 20, Soft: 1 << 16}},
		},
		Root:     &specs.Root{Path: emptyDir, Readonly: true},
		Hostname: "cove",
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc"},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs"},
		},
		Linux: &specs.Linux{Namespaces: []specs.LinuxNamespace{
			{Type: specs.PIDNamespace}, {Type: specs.MountNamespace}, {Type: specs.IPCNamespace}, {Type: specs.UTSNamespace}, {Type: specs.NetworkNamespace},
		}},
		Annotations: map[string]string{
			"io.kubernetes.cri.container-type": "sandbox",
			"io.kubernetes.cri.container-name": "root",
			"dev.gvisor.spec.rootfs.source":    guestfs,
			"dev.gvisor.spec.rootfs.type":      "erofs",
		},
	}
}

// userSpec is the user's container. Its process is only an init: everything
// else is forked into it by the guest.
func userSpec(kernel, emptyDir, guestfs string) *specs.Spec {
	return &specs.Spec{
		Version: specs.Version,
		Process: &specs.Process{
			Args:         initArgs(),
			Cwd:          "/",
			Env:          []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
			Capabilities: capabilities(userCaps),
		},
		Root:     &specs.Root{Path: emptyDir},
		Hostname: "cove",
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc"},
			{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"ro", "nosuid", "noexec", "nodev"}},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs"},
			{Destination: "/dev/pts", Type: "devpts", Source: "devpts"},
			{Destination: "/dev/shm", Type: "tmpfs", Source: "shm", Options: []string{"mode=1777", "nosuid", "nodev"}},
			{Destination: guestMount, Type: "erofs", Source: guestfs, Options: []string{"ro"}},
		},
		Linux: &specs.Linux{Namespaces: []specs.LinuxNamespace{
			{Type: specs.PIDNamespace}, {Type: specs.MountNamespace}, {Type: specs.IPCNamespace}, {Type: specs.UTSNamespace},
		}},
		Annotations: map[string]string{
			"io.kubernetes.cri.container-type": "container",
			"io.kubernetes.cri.sandbox-id":     kernel,
			"io.kubernetes.cri.container-name": userContainer,
		},
	}
}
