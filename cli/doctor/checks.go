package doctor

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/cove-sandbox/cove/internal/ceilings"
	"github.com/cove-sandbox/cove/sandbox"
)

func checkOS(p Probes) Result {
	got := p.GOOS + "/" + p.GOARCH
	if p.GOOS != "linux" {
		return fail("system", got+": sandboxes need Linux", "run the server on Linux and set COVE_URL here; the other commands work on this machine")
	}
	if p.GOARCH != "amd64" && p.GOARCH != "arm64" {
		return fail("system", got+": gVisor runs on amd64 and arm64", "use a machine of one of these")
	}
	return ok("system", got)
}

func checkRoot(p Probes) Result {
	if id := p.EUID(); id != 0 {
		return fail("root", fmt.Sprintf("running as uid %d; namespaces, cgroups and mounts need root", id), "run it with sudo: sudo cove serve")
	}
	return ok("root", "yes")
}

// checkKernel: gVisor asks for 4.14.77; pidfds and the mount calls it is
// tested with are in 5.10 and later, which every supported distribution has.
func checkKernel(p Probes) Result {
	b, err := p.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		return fail("kernel", "cannot read /proc: "+err.Error(), "mount it: mount -t proc proc /proc")
	}
	release := strings.TrimSpace(string(b))
	var major, minor int
	if _, err := fmt.Sscanf(release, "%d.%d", &major, &minor); err != nil {
		return warn("kernel", release+": version not understood", "Linux 5.10 or later is known to work")
	}
	switch v := major*1000 + minor; {
	case v < 4014:
		return fail("kernel", release+" is too old", "Linux 5.10 or later; gVisor needs at least 4.14")
	case v < 5010:
		return warn("kernel", release+" is older than what Cove is tested on", "Linux 5.10 or later is known to work")
	}
	return ok("kernel", release)
}

func checkNamespaces(ctx context.Context, p Probes) Result {
	for _, ns := range []string{"mnt", "pid", "net", "ipc", "uts", "user"} {
		if _, err := p.Stat("/proc/self/ns/" + ns); err != nil {
			return fail("namespaces", "this kernel has no "+ns+" namespaces", "use a distribution's kernel; this one was built without them")
		}
		file := "/proc/sys/user/max_" + ns + "_namespaces"
		if b, err := p.ReadFile(file); err == nil {
			if n, err := strconv.Atoi(strings.TrimSpace(string(b))); err == nil && n == 0 {
				return fail("namespaces", file+" is 0", fmt.Sprintf("sysctl -w user.max_%s_namespaces=65536", ns))
			}
		}
	}
	if p.EUID() != 0 {
		return warn("namespaces", "present; not tried without root", "run cove doctor with sudo")
	}
	if err := p.Namespaces(ctx); err != nil {
		return fail("namespaces", "making them fails: "+err.Error(),
			"in a container, run it privileged (docker run --privileged, or CAP_SYS_ADMIN and no seccomp profile)")
	}
	return ok("namespaces", "mount, pid, net, ipc, uts")
}

// checkPtrace: systrap, gVisor's platform, takes hold of its stub processes by
// ptrace and steers them by seccomp traps.
func checkPtrace(p Probes) Result {
	if b, err := p.ReadFile("/proc/sys/kernel/yama/ptrace_scope"); err == nil && strings.TrimSpace(string(b)) == "3" {
		return fail("systrap", "kernel.yama.ptrace_scope is 3: no process may be traced until the next boot",
			"set kernel.yama.ptrace_scope=1 in /etc/sysctl.d and reboot")
	}
	b, err := p.ReadFile("/proc/sys/kernel/seccomp/actions_avail")
	if err != nil {
		return fail("systrap", "this kernel has no seccomp filters", "use a distribution's kernel; this one was built without CONFIG_SECCOMP_FILTER")
	}
	if !strings.Contains(" "+string(b), " trap") {
		return fail("systrap", "seccomp cannot trap: "+strings.TrimSpace(string(b)), "use a distribution's kernel")
	}
	return ok("systrap", "seccomp traps and ptrace are there")
}

var controllers = []string{"cpu", "memory", "pids"}

// checkCgroups accepts v2 with the controllers enabled, or v1 with a hierarchy
// for each (also beside an empty v2, as hybrid systems have it).
func checkCgroups(p Probes) Result {
	const root = "/sys/fs/cgroup"
	if b, err := p.ReadFile(root + "/cgroup.controllers"); err == nil {
		have := strings.Fields(string(b))
		var missing []string
		for _, c := range controllers {
			if !slices.Contains(have, c) {
				missing = append(missing, c)
			}
		}
		if len(missing) > 0 {
			return fail("cgroups", "v2 without "+strings.Join(missing, ", "),
				"boot with the controllers enabled (cgroup_enable=memory on some boards), or start the container with its own cgroup namespace and delegation")
		}
		if err := p.TryDir(root); err != nil && p.EUID() == 0 {
			return fail("cgroups", "v2 is not writable: "+err.Error(), "mount -o remount,rw "+root)
		}
		return ok("cgroups", "v2 with "+strings.Join(controllers, ", "))
	}
	var missing []string
	for _, c := range controllers {
		if _, err := p.Stat(filepath.Join(root, c)); err != nil {
			missing = append(missing, c)
		}
	}
	switch {
	case len(missing) == len(controllers):
		return fail("cgroups", "no cgroup file system at "+root, "mount -t cgroup2 none "+root)
	case len(missing) > 0:
		return fail("cgroups", "v1 without "+strings.Join(missing, ", "),
			fmt.Sprintf("mkdir -p %s/%s && mount -t cgroup -o %s cgroup %s/%s", root, missing[0], missing[0], root, missing[0]))
	}
	for _, c := range controllers {
		if err := p.TryDir(filepath.Join(root, c)); err != nil && p.EUID() == 0 {
			return fail("cgroups", "v1 "+c+" is not writable: "+err.Error(), "mount -o remount,rw "+filepath.Join(root, c))
		}
	}
	return ok("cgroups", "v1 with "+strings.Join(controllers, ", "))
}

// FindBinary is where a companion binary is: as told, else beside this
// executable, else in $PATH.
func FindBinary(p Probes, told, name string) (string, error) {
	if told != "" {
		if fi, err := p.Stat(told); err != nil {
			return "", err
		} else if fi.IsDir() || fi.Mode()&0o111 == 0 {
			return "", fmt.Errorf("%s is not an executable file", told)
		}
		return filepath.Abs(told)
	}
	if exe, err := p.Executable(); err == nil {
		beside := filepath.Join(filepath.Dir(exe), name)
		if fi, err := p.Stat(beside); err == nil && !fi.IsDir() {
			return beside, nil
		}
	}
	found, err := p.LookPath(name)
	if err != nil {
		return "", fmt.Errorf("no %s beside cove or in $PATH", name)
	}
	return filepath.Abs(found)
}

func checkRunsc(ctx context.Context, p Probes, c Config) Result {
	path, err := FindBinary(p, c.Runsc, "runsc")
	if err != nil {
		return fail("runsc", err.Error(), "make build, or name it with --runsc or COVE_RUNSC")
	}
	if _, err := p.Output(ctx, path, "--version"); err != nil {
		return fail("runsc", path+" does not run: "+err.Error(), "make build")
	}
	got, want, err := p.GVisor(path)
	switch {
	case err != nil:
		return warn("runsc", path+": its version is unknown: "+err.Error(), "make build makes the one Cove is pinned to")
	case got != want && want != "":
		return fail("runsc", fmt.Sprintf("%s is gVisor %s, this cove drives %s", path, got, want), "make build; the two speak a private protocol")
	}
	return ok("runsc", path+" ("+got+")")
}

func checkGuest(p Probes, c Config) Result {
	path, err := FindBinary(p, c.Guest, "cove-guest")
	if err != nil {
		return fail("guest", err.Error(), "make build, or name it with --guest or COVE_GUEST")
	}
	return ok("guest", path)
}

func checkErofs(p Probes) Result {
	path, err := p.LookPath("mkfs.erofs")
	if err != nil {
		return fail("mkfs.erofs", "not installed; the guest's own file system is made with it", "apt-get install -y erofs-utils")
	}
	return ok("mkfs.erofs", path)
}

func checkMmdebstrap(p Probes, c Config) Result {
	path, err := p.LookPath("mmdebstrap")
	if err != nil {
		return warn("mmdebstrap", "not installed; the base image is made with it", "apt-get install -y mmdebstrap")
	}
	return ok("mmdebstrap", path)
}

// checkNetwork warns: sandboxes without a network need none of it.
func checkNetwork(p Probes) Result {
	const without = "; only sandboxes without a network can be made"
	if p.EUID() != 0 {
		return warn("network", "not tried without root", "run cove doctor with sudo")
	}
	if err := p.Network(); err != nil {
		return warn("network", err.Error()+without,
			"modprobe -a veth nf_tables nft_tproxy, or start with --network-default none; in a container, run it privileged")
	}
	return ok("network", "namespaces, veth, nftables with tproxy")
}

// checkVolumes warns: without them a server runs, and says of volumes that they
// are not supported.
func checkVolumes(p Probes) Result {
	const without = "; sandboxes work, volumes do not"
	for _, name := range []string{"mkfs.ext4", "e2fsck", "resize2fs"} {
		if _, err := p.LookPath(name); err == nil {
			continue
		}
		if _, err := p.Stat("/usr/sbin/" + name); err != nil { // not in everybody's path
			return warn("volumes", name+" is not installed"+without, "apt-get install -y e2fsprogs")
		}
	}
	if _, err := p.Stat("/dev/loop-control"); err != nil {
		return warn("volumes", "no loop devices"+without, "modprobe loop; in a container, run it privileged with /dev of the host")
	}
	if b, err := p.ReadFile("/proc/filesystems"); err != nil || !slices.Contains(strings.Fields(string(b)), "ext4") {
		return warn("volumes", "this kernel has no ext4, or has not loaded it"+without, "modprobe ext4")
	}
	return ok("volumes", "ext4 on loop devices")
}

func checkDisk(p Probes, c Config) Result {
	dir := c.Data
	for dir != "/" && dir != "." {
		if _, err := p.Stat(dir); err == nil {
			break
		}
		dir = filepath.Dir(dir)
	}
	bytes, inodes, err := p.Space(dir)
	fix := "free some, or put the data elsewhere with --data"
	switch {
	case err != nil:
		return warn("disk", "cannot tell the free space of "+dir+": "+err.Error(), fix)
	case bytes < 2<<30:
		return fail("disk", gib(bytes)+" free at "+dir+"; the base image alone needs 2 GiB to be made", fix)
	case inodes > 0 && inodes < 100_000:
		return fail("disk", fmt.Sprintf("%d inodes free at %s", inodes, dir), fix)
	case bytes < 10<<30:
		return warn("disk", gib(bytes)+" free at "+dir, fix+"; a sandbox may write 10 GiB by default")
	}
	return ok("disk", gib(bytes)+" free at "+dir)
}

func checkMemory(p Probes) Result {
	b, err := p.ReadFile("/proc/meminfo")
	if err != nil {
		return warn("memory", err.Error(), "")
	}
	var total, available int64
	for _, line := range strings.Split(string(b), "\n") {
		f := strings.Fields(line)
		if len(f) < 2 {
			continue
		}
		n, _ := strconv.ParseInt(f[1], 10, 64)
		switch f[0] {
		case "MemTotal:":
			total = n << 10
		case "MemAvailable:":
			available = n << 10
		}
	}
	detail := gib(available) + " of " + gib(total) + " available"
	switch {
	case available < 512<<20:
		return fail("memory", detail, "free some: an empty server with its warm kernels takes about 300 MiB")
	case available < 2<<30:
		return warn("memory", detail, "a sandbox may use 512 MiB by default, and takes 8 to 12 idle")
	}
	return ok("memory", detail)
}

// checkLimits: "cove serve" raises what it may; what is low here stays so only
// where it may not.
func checkLimits(p Probes) Result {
	most, by := ceilings.MaxSandboxes(p.ReadFile)
	room := fmt.Sprintf("room for %d sandboxes (by %s)", most, by)
	low := ceilings.Low(p.ReadFile)
	if most < 1000 && by == ceilings.Files {
		return warn("limits", room+"; 'cove serve' raises this if it may", "raise the hard limit of open files: ulimit -Hn 1048576, or LimitNOFILE= of its unit")
	}
	if most < 1000 && len(low) > 0 {
		return warn("limits", room+"; 'cove serve' raises this if it may", "sysctl -w "+strings.Join(low, " "))
	}
	return ok("limits", room)
}

func checkServer(ctx context.Context, p Probes, c Config) []Result {
	if p.Server == nil {
		return nil
	}
	err := p.Server(ctx)
	switch {
	case err == nil:
		return []Result{ok("server", c.URL), ok("key", "accepted")}
	case errors.Is(err, ErrNoServer):
		return []Result{warn("server", "none at "+c.URL, "make start, or cove serve, or set COVE_URL")}
	case errors.Is(err, sandbox.ErrUnauthenticated):
		return []Result{ok("server", c.URL), fail("key", "the server does not accept it",
			`eval "$(sudo cove env)", or set COVE_KEY to a key of this server`)}
	}
	return []Result{warn("server", c.URL+": "+err.Error(), "see its log")}
}

func firstLine(s string) string {
	s, _, _ = strings.Cut(strings.TrimSpace(s), "\n")
	return s
}

func gib(n int64) string { return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30)) }
