package gvisor

import (
	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// guestPort is where the guest listens on the kernel's loopback.
const guestPort = 49983

// userCaps is what root in the user's container has: Docker's default set
// without NET_RAW (it could sniff the loopback the guest listens on) and
// MKNOD. Not SYS_PTRACE either: between fork and exec a child is the guest's
// memory, and who may trace it reads the secret; debuggers work without it on
// processes of their own user.
// Everything else is out of reach for the code inside: the guest drops the
// rest from the bounding set before it forks.
var userCaps = []string{
	"CAP_AUDIT_WRITE", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL",
	"CAP_NET_BIND_SERVICE", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT",
}

// guestCaps is the user's set plus what entering another container takes, and
// what reading the environment of other users' processes does.
var guestCaps = append([]string{"CAP_SYS_ADMIN", "CAP_SYS_PTRACE"}, userCaps...)

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
			Capabilities: capabilities(guestCaps),
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
