package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// machine is a made-up machine; the zero changes make a good one.
type machine struct {
	files   map[string]string // content by path; directories have "/"
	missing []string          // commands not in $PATH
	Probes
}

func goodMachine() *machine {
	m := &machine{files: map[string]string{
		"/proc/sys/kernel/osrelease":             "6.1.0-18-amd64\n",
		"/proc/sys/kernel/seccomp/actions_avail": "kill_process kill_thread trap errno user_notif trace log allow\n",
		"/proc/sys/kernel/pid_max":               "4194304\n",
		"/proc/sys/fs/file-max":                  "9223372036854775807\n",
		"/proc/meminfo":                          "MemTotal:       24103000 kB\nMemFree:  1 kB\nMemAvailable:   23000000 kB\n",
		"/sys/fs/cgroup/cgroup.controllers":      "cpuset cpu io memory hugetlb pids rdma misc\n",
		"/var/lib/cove":                          "/", "/var/lib": "/", "/var": "/", "/": "/",
		"/opt/cove/runsc": "elf", "/opt/cove/cove-guest": "elf",
		"/dev/loop-control": "", "/proc/filesystems": "nodev\tproc\n\text4\n",
	}}
	for _, ns := range []string{"mnt", "pid", "net", "ipc", "uts", "user"} {
		m.files["/proc/self/ns/"+ns] = ""
		m.files["/proc/sys/user/max_"+ns+"_namespaces"] = "95000\n"
	}
	m.Probes = Probes{
		GOOS: "linux", GOARCH: "amd64",
		EUID:       func() int { return 0 },
		Executable: func() (string, error) { return "/opt/cove/cove", nil },
		ReadFile: func(name string) ([]byte, error) {
			if c, ok := m.files[name]; ok {
				return []byte(c), nil
			}
			return nil, fs.ErrNotExist
		},
		Stat: func(name string) (fs.FileInfo, error) {
			if c, ok := m.files[name]; ok {
				return info{filepath.Base(name), c == "/"}, nil
			}
			return nil, fmt.Errorf("stat %s: %w", name, fs.ErrNotExist)
		},
		LookPath: func(name string) (string, error) {
			for _, x := range m.missing {
				if x == name {
					return "", errors.New("not found")
				}
			}
			return "/usr/bin/" + name, nil
		},
		Output:     func(context.Context, string, ...string) (string, error) { return "mkfs.erofs 1.5\nusage", nil },
		TryDir:     func(string) error { return nil },
		Space:      func(string) (int64, int64, error) { return 50 << 30, 1e6, nil },
		Namespaces: func(context.Context) error { return nil },
		Network:    func() error { return nil },
		GVisor:     func(string) (string, string, error) { return "v0.0.0-1", "v0.0.0-1", nil },
		Server:     func(context.Context) error { return nil },
	}
	return m
}

type info struct {
	name string
	dir  bool
}

func (i info) Name() string       { return i.name }
func (i info) Size() int64        { return 1 }
func (i info) Mode() fs.FileMode  { return 0o755 }
func (i info) ModTime() time.Time { return time.Time{} }
func (i info) IsDir() bool        { return i.dir }
func (i info) Sys() any           { return nil }

func TestAGoodMachineHasNothingToFix(t *testing.T) {
	results := Run(t.Context(), goodMachine().Probes, Config{Data: "/var/lib/cove", URL: "http://x"})
	if len(results) < 14 {
		t.Errorf("only %d checks", len(results))
	}
	for _, r := range results {
		if r.Status != OK || r.Fix != "" || r.Detail == "" || r.Name == "" {
			t.Errorf("%+v", r)
		}
	}
}

// Each machine lacks one thing; exactly that is said, with the way to fix it.
func TestEachMissingThingIsNamedWithItsFix(t *testing.T) {
	for _, c := range []struct {
		name   string
		break_ func(*machine)
		check  string
		status Status
		detail string
		fix    string
	}{
		{"macOS", func(m *machine) { m.GOOS = "darwin" }, "system", Fail, "need Linux", "COVE_URL"},
		{"32 bit", func(m *machine) { m.GOARCH = "386" }, "system", Fail, "amd64 and arm64", "use a machine"},
		{"not root", func(m *machine) { m.EUID = func() int { return 1000 } }, "root", Fail, "uid 1000", "sudo cove serve"},
		{"old kernel", func(m *machine) { m.files["/proc/sys/kernel/osrelease"] = "3.10.0\n" }, "kernel", Fail, "too old", "5.10"},
		{"oldish kernel", func(m *machine) { m.files["/proc/sys/kernel/osrelease"] = "4.19.0-25\n" }, "kernel", Warn, "older", "5.10"},
		{"strange kernel", func(m *machine) { m.files["/proc/sys/kernel/osrelease"] = "plan9\n" }, "kernel", Warn, "not understood", "5.10"},
		{"no net namespaces", func(m *machine) { delete(m.files, "/proc/self/ns/net") }, "namespaces", Fail, "no net namespaces", "kernel"},
		{"user namespaces off", func(m *machine) { m.files["/proc/sys/user/max_user_namespaces"] = "0\n" }, "namespaces", Fail, "is 0", "sysctl -w user.max_user_namespaces=65536"},
		{"unshare refused", func(m *machine) {
			m.Namespaces = func(context.Context) error { return errors.New("operation not permitted") }
		}, "namespaces", Fail, "not permitted", "--privileged"},
		{"no nftables", func(m *machine) { m.Network = func() error { return errors.New("nftables: operation not supported") } }, "network", Warn, "without a network", "modprobe"},
		{"ptrace locked", func(m *machine) { m.files["/proc/sys/kernel/yama/ptrace_scope"] = "3\n" }, "systrap", Fail, "ptrace_scope is 3", "reboot"},
		{"ptrace restricted is fine", func(m *machine) { m.files["/proc/sys/kernel/yama/ptrace_scope"] = "1\n" }, "systrap", OK, "", ""},
		{"no seccomp", func(m *machine) { delete(m.files, "/proc/sys/kernel/seccomp/actions_avail") }, "systrap", Fail, "no seccomp", "CONFIG_SECCOMP_FILTER"},
		{"v2 without memory", func(m *machine) { m.files["/sys/fs/cgroup/cgroup.controllers"] = "cpu pids\n" }, "cgroups", Fail, "v2 without memory", "cgroup_enable=memory"},
		{"v2 read-only", func(m *machine) { m.TryDir = func(string) error { return fs.ErrPermission } }, "cgroups", Fail, "not writable", "remount,rw"},
		{"no cgroups", func(m *machine) { delete(m.files, "/sys/fs/cgroup/cgroup.controllers") }, "cgroups", Fail, "no cgroup file system", "mount -t cgroup2"},
		{"v1", func(m *machine) { v1(m, "cpu", "memory", "pids") }, "cgroups", OK, "", ""},
		{"v1 without pids", func(m *machine) { v1(m, "cpu", "memory") }, "cgroups", Fail, "v1 without pids", "mount -t cgroup -o pids"},
		{"no runsc", func(m *machine) { delete(m.files, "/opt/cove/runsc"); m.missing = []string{"runsc"} }, "runsc", Fail, "no runsc beside cove", "make build"},
		{"other runsc", func(m *machine) {
			m.GVisor = func(string) (string, string, error) { return "v0.0.0-2", "v0.0.0-1", nil }
		}, "runsc", Fail, "v0.0.0-2, this cove drives v0.0.0-1", "make build"},
		{"distribution's runsc", func(m *machine) {
			m.GVisor = func(string) (string, string, error) { return "", "", errors.New("no build info") }
		}, "runsc", Warn, "unknown", "make build"},
		{"runsc does not run", func(m *machine) {
			m.Output = func(context.Context, string, ...string) (string, error) { return "", errors.New("exec format error") }
		}, "runsc", Fail, "exec format error", "make build"},
		{"no guest", func(m *machine) { delete(m.files, "/opt/cove/cove-guest"); m.missing = []string{"cove-guest"} }, "guest", Fail, "no cove-guest", "make build"},
		{"no e2fsprogs", func(m *machine) { m.missing = []string{"resize2fs"} }, "volumes", Warn, "resize2fs is not installed", "apt-get install -y e2fsprogs"},
		{"e2fsprogs out of the path", func(m *machine) {
			m.missing, m.files["/usr/sbin/mkfs.ext4"] = []string{"mkfs.ext4"}, "elf"
		}, "volumes", OK, "", ""},
		{"no loop devices", func(m *machine) { delete(m.files, "/dev/loop-control") }, "volumes", Warn, "no loop devices", "modprobe loop"},
		{"no ext4", func(m *machine) { m.files["/proc/filesystems"] = "\txfs\n" }, "volumes", Warn, "no ext4", "modprobe ext4"},
		{"no erofs-utils", func(m *machine) { m.missing = []string{"mkfs.erofs"} }, "mkfs.erofs", Fail, "not installed", "apt-get install -y erofs-utils"},
		{"no mmdebstrap", func(m *machine) { m.missing = []string{"mmdebstrap"} }, "mmdebstrap", Warn, "not installed", "apt-get install -y mmdebstrap"},
		{"disk full", func(m *machine) { m.Space = func(string) (int64, int64, error) { return 1 << 30, 1e6, nil } }, "disk", Fail, "1.0 GiB free", "--data"},
		{"disk low", func(m *machine) { m.Space = func(string) (int64, int64, error) { return 5 << 30, 1e6, nil } }, "disk", Warn, "5.0 GiB free", "--data"},
		{"no inodes", func(m *machine) { m.Space = func(string) (int64, int64, error) { return 50 << 30, 10, nil } }, "disk", Fail, "10 inodes", "--data"},
		{"btrfs counts no inodes", func(m *machine) { m.Space = func(string) (int64, int64, error) { return 50 << 30, 0, nil } }, "disk", OK, "", ""},
		{"data dir to be made", func(m *machine) { delete(m.files, "/var/lib/cove") }, "disk", OK, "free at /var/lib", ""},
		{"little memory", func(m *machine) { m.files["/proc/meminfo"] = "MemTotal: 900000 kB\nMemAvailable: 300000 kB\n" }, "memory", Fail, "0.3 GiB of 0.9 GiB", "free some"},
		{"some memory", func(m *machine) { m.files["/proc/meminfo"] = "MemTotal: 2000000 kB\nMemAvailable: 1500000 kB\n" }, "memory", Warn, "1.4 GiB", "512 MiB"},
		{"low pid_max", func(m *machine) { m.files["/proc/sys/kernel/pid_max"] = "32768\n" }, "limits", Warn, "room for 597 sandboxes (by kernel.pid_max)", "sysctl -w kernel.pid_max="},
		{"no server", func(m *machine) { m.Server = func(context.Context) error { return ErrNoServer } }, "server", Warn, "none at", "make start"},
		{"wrong key", func(m *machine) {
			m.Server = func(context.Context) error { return &sandbox.Error{Class: sandbox.Unauthenticated} }
		}, "key", Fail, "does not accept", "cove env"},
		{"sick server", func(m *machine) { m.Server = func(context.Context) error { return errors.New("HTTP 502") } }, "server", Warn, "502", "log"},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := goodMachine()
			c.break_(m)
			found := false
			for _, r := range Run(t.Context(), m.Probes, Config{Data: "/var/lib/cove", URL: "http://x"}) {
				if r.Name != c.check {
					// One cause may not look like two.
					if r.Status == Fail {
						t.Errorf("also fails: %+v", r)
					}
					continue
				}
				found = true
				if r.Status != c.status || !strings.Contains(r.Detail, c.detail) || !strings.Contains(r.Fix, c.fix) {
					t.Errorf("%+v, want %s %q %q", r, c.status, c.detail, c.fix)
				}
				if (r.Fix == "") != (r.Status == OK) {
					t.Errorf("%+v: a problem needs a fix, and only a problem", r)
				}
			}
			if !found {
				t.Errorf("no check %q", c.check)
			}
		})
	}
}

func v1(m *machine, controllers ...string) {
	delete(m.files, "/sys/fs/cgroup/cgroup.controllers")
	for _, c := range controllers {
		m.files["/sys/fs/cgroup/"+c] = "/"
	}
}

func TestPreflightIsOnlyWhatPreventsAStart(t *testing.T) {
	m := goodMachine()
	m.missing = []string{"mkfs.erofs", "mmdebstrap"}
	m.Server = func(context.Context) error { return &sandbox.Error{Class: sandbox.Unauthenticated} }
	bad := Preflight(t.Context(), m.Probes, Config{Data: "/var/lib/cove"})
	if len(bad) != 1 || bad[0].Name != "mkfs.erofs" {
		t.Errorf("%+v", bad)
	}
}

func TestFindBinaryPrefersWhatItIsTold(t *testing.T) {
	m := goodMachine()
	m.files["/elsewhere/runsc"] = "elf"
	for told, want := range map[string]string{"/elsewhere/runsc": "/elsewhere/runsc", "": "/opt/cove/runsc"} {
		if got, err := FindBinary(m.Probes, told, "runsc"); err != nil || got != want {
			t.Errorf("%q: %s %v", told, got, err)
		}
	}
	delete(m.files, "/opt/cove/runsc")
	if got, err := FindBinary(m.Probes, "", "runsc"); err != nil || got != "/usr/bin/runsc" {
		t.Errorf("%s %v", got, err)
	}
	// A wrong path is an error, not a reason to take another.
	if got, err := FindBinary(m.Probes, "/nope", "runsc"); err == nil {
		t.Errorf("took %s", got)
	}
	m.files["/adir"] = "/"
	if _, err := FindBinary(m.Probes, "/adir", "runsc"); err == nil {
		t.Error("took a directory")
	}
}

// The real probes answer on this machine without a panic.
func TestSystemProbesAnswer(t *testing.T) {
	p := System()
	for _, r := range Run(t.Context(), p, Config{Data: t.TempDir()}) {
		if r.Detail == "" {
			t.Errorf("%+v", r)
		}
	}
}
