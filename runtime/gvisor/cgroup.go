package gvisor

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/sandbox"
)

// kernelOverhead is added to a sandbox's memory limit: the sentry and the
// guest take about 10 MiB idle and page tables on top, which a user who asked
// for 64 MiB does not mean to pay for.
const kernelOverhead = 24 << 20

// cgroups makes one cgroup per kernel below a parent of the driver's own, on a
// v1 or a v2 host. The zero value is not usable; see findCgroups. Immutable.
type cgroups struct {
	v2   bool
	dirs map[string]string // v1: controller -> parent directory; v2: "" -> parent
}

var v1Controllers = []string{"cpu", "cpuacct", "memory", "pids"}

// findCgroups finds the host's cgroup version and makes the parent, whose name
// depends on the driver's directory so that two Coves never sweep each other.
func findCgroups(dir string) (cgroups, error) {
	const op = "gvisor.cgroups"
	sum := sha256.Sum256([]byte(dir))
	parent := "cove-" + hex.EncodeToString(sum[:4])
	var st unix.Statfs_t
	if err := unix.Statfs("/sys/fs/cgroup", &st); err != nil {
		return cgroups{}, sandbox.Errorf(sandbox.Precondition, op, "no cgroups at /sys/fs/cgroup: %w", err)
	}
	if st.Type == unix.CGROUP2_SUPER_MAGIC {
		top := "/sys/fs/cgroup"
		g := cgroups{v2: true, dirs: map[string]string{"": filepath.Join(top, parent)}}
		have, err := os.ReadFile(filepath.Join(top, "cgroup.controllers"))
		if err != nil {
			return g, sandbox.Errorf(sandbox.Precondition, op, "%w", err)
		}
		for _, c := range []string{"cpu", "memory", "pids"} {
			if !slices.Contains(strings.Fields(string(have)), c) {
				return g, sandbox.Errorf(sandbox.Precondition, op, "the %s cgroup controller is not available", c).
					WithHint("enable it on the kernel command line, or delegate it to this container")
			}
		}
		if err := os.MkdirAll(g.dirs[""], 0o755); err != nil {
			return g, sandbox.Errorf(sandbox.Precondition, op, "%w", err)
		}
		for _, d := range []string{top, g.dirs[""]} {
			if err := os.WriteFile(filepath.Join(d, "cgroup.subtree_control"), []byte("+cpu +memory +pids"), 0); err != nil {
				return g, sandbox.Errorf(sandbox.Precondition, op, "cannot enable controllers below %s: %w", d, err).
					WithHint("the cgroup tree must be writable; in a container run it with cgroupns=host and privileged")
			}
		}
		return g, nil
	}
	g := cgroups{dirs: map[string]string{}}
	for _, c := range v1Controllers {
		p := filepath.Join("/sys/fs/cgroup", c)
		if p2, err := filepath.EvalSymlinks(p); err == nil {
			p = p2 // cpu and cpuacct may be one hierarchy
		}
		d := filepath.Join(p, parent)
		if err := os.MkdirAll(d, 0o755); err != nil {
			return g, sandbox.Errorf(sandbox.Precondition, op, "the %s cgroup controller is not usable: %w", c, err)
		}
		g.dirs[c] = d
	}
	return g, nil
}

// parents are the distinct parent directories.
func (g cgroups) parents() []string {
	var out []string
	for _, d := range g.dirs {
		if !slices.Contains(out, d) {
			out = append(out, d)
		}
	}
	return out
}

// list names every kernel that has a cgroup.
func (g cgroups) list() []string {
	var ids []string
	for _, p := range g.parents() {
		ents, _ := os.ReadDir(p)
		for _, e := range ents {
			if e.IsDir() && !slices.Contains(ids, e.Name()) {
				ids = append(ids, e.Name())
			}
		}
	}
	return ids
}

func (g cgroups) path(controller, id, file string) string {
	if g.v2 {
		controller = ""
	}
	return filepath.Join(g.dirs[controller], id, file)
}

// create makes the cgroup of a kernel, without limits.
func (g cgroups) create(id string) error {
	for _, p := range g.parents() {
		if err := os.Mkdir(filepath.Join(p, id), 0o755); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
	}
	return nil
}

// removeParents takes the driver's own groups away where no kernel is left in
// them; with one they are busy, and stay.
func (g cgroups) removeParents() {
	for _, p := range g.parents() {
		_ = unix.Rmdir(p)
	}
}

// open gives a descriptor for CLONE_INTO_CGROUP on v2, so that the sentry is
// started in its cgroup. On v1 there is no such thing and it is nil: see join.
func (g cgroups) open(id string) (*os.File, error) {
	if !g.v2 {
		return nil, nil
	}
	return os.Open(g.path("", id, ""))
}

// join moves a sentry and the stubs it has forked so far into the cgroup on a
// v1 host, and says how much memory they had: v1 leaves that charged to where
// it was allocated. Joining with the forking thread, as would be exact, is not
// to be had: runsc forks from a goroutine of its own, and runsc's way, to move
// its whole process for the time, is not open to a server.
//
// It is called before the root container starts, so nothing forks meanwhile
// but the sentry itself; a second look finds what it did.
func (g cgroups) join(id string, pid int) (before int64, err error) {
	if g.v2 {
		return 0, nil
	}
	status := fmt.Sprintf("/proc/%d/status", pid)
	before = (readKeyed(status, "RssAnon:") + readKeyed(status, "RssShmem:")) << 10
	for range 10 {
		in := g.procs(id)
		var out []int
		for _, p := range descendants(pid) {
			if !slices.Contains(in, p) {
				out = append(out, p)
			}
		}
		if len(out) == 0 {
			return before, nil
		}
		for _, p := range out {
			for _, parent := range g.parents() {
				err := os.WriteFile(filepath.Join(parent, id, "cgroup.procs"), []byte(strconv.Itoa(p)), 0)
				if err != nil && !errors.Is(err, unix.ESRCH) {
					return 0, fmt.Errorf("joining cgroup: %w", err)
				}
			}
		}
	}
	return 0, fmt.Errorf("the processes of %d do not settle in their cgroup", pid)
}

// names of what is in a directory; none if it is gone. A glob reads the directory above it too, which of a
// process in /proc cost 2 ms of CPU for each boot.
func names(dir string) []string {
	d, err := os.Open(dir)
	if err != nil {
		return nil
	}
	defer d.Close()
	got, _ := d.Readdirnames(-1)
	return got
}

// descendants is pid and all processes below it.
func descendants(pid int) []int {
	out := []int{pid}
	for i := 0; i < len(out) && i < 1000; i++ {
		dir := fmt.Sprintf("/proc/%d/task", out[i])
		for _, t := range names(dir) {
			b, _ := os.ReadFile(filepath.Join(dir, t, "children"))
			for _, f := range strings.Fields(string(b)) {
				if p, err := strconv.Atoi(f); err == nil && !slices.Contains(out, p) {
					out = append(out, p)
				}
			}
		}
	}
	return out
}

// cpuPeriod is the time in which a share of the CPU is counted, microseconds.
const cpuPeriod = 100_000

// limit sets what the sandbox in a kernel may use.
func (g cgroups) limit(id string, r sandbox.Resources) error {
	quota := max(r.MilliCPU*cpuPeriod/1000, 1000)
	// The sentry ends processes before it comes to this.
	mem := strconv.FormatInt(r.MemoryLimit+kernelOverhead+memoryReserve(r.MemoryLimit), 10)
	// A process inside is four to five tasks of the host (a stub, its system
	// call thread, its system message threads). The limit is kept inside, by
	// the guest's cgroup; this one only protects the host, and a sentry that
	// runs into it dies.
	pids := strconv.FormatInt(6*r.Pids+512, 10)
	type kv struct{ controller, file, value string }
	set := []kv{
		{"cpu", "cpu.cfs_period_us", strconv.Itoa(cpuPeriod)},
		{"cpu", "cpu.cfs_quota_us", strconv.FormatInt(quota, 10)},
		{"memory", "memory.limit_in_bytes", mem},
		{"pids", "pids.max", pids},
	}
	if g.v2 {
		set = []kv{
			{"", "cpu.max", fmt.Sprintf("%d %d", quota, cpuPeriod)},
			{"", "memory.max", mem},
			{"", "memory.oom.group", "1"},
			{"", "pids.max", pids},
		}
		if _, err := os.Stat(g.path("", id, "memory.swap.max")); err == nil {
			set = append(set, kv{"", "memory.swap.max", "0"})
		}
	}
	for _, s := range set {
		if err := os.WriteFile(g.path(s.controller, id, s.file), []byte(s.value), 0); err != nil {
			return fmt.Errorf("setting %s: %w", s.file, err)
		}
	}
	return nil
}

// oomKills counts the processes of a kernel the host's OOM killer has ended.
func (g cgroups) oomKills(id string) int64 {
	if g.v2 {
		return readKeyed(g.path("", id, "memory.events"), "oom_kill")
	}
	return readKeyed(g.path("memory", id, "memory.oom_control"), "oom_kill")
}

// cpuTime reads what a kernel has used of the processor.
func (g cgroups) cpuTime(id string) (time.Duration, bool) {
	if g.v2 {
		n := readKeyed(g.path("", id, "cpu.stat"), "usage_usec")
		return time.Duration(n) * time.Microsecond, n > 0
	}
	n := readInt(g.path("cpuacct", id, "cpuacct.usage"))
	return time.Duration(n), n > 0
}

// memory is what a kernel has, page cache included: what is cheap to ask.
func (g cgroups) memory(id string) int64 {
	if g.v2 {
		return readInt(g.path("", id, "memory.current"))
	}
	return readInt(g.path("memory", id, "memory.usage_in_bytes"))
}

// stats reads what a kernel uses.
func (g cgroups) stats(id string) (s sandbox.Stats, err error) {
	s.CPUTime, _ = g.cpuTime(id)
	if g.v2 {
		st := g.path("", id, "memory.stat")
		s.Memory = readKeyed(st, "anon") + readKeyed(st, "shmem")
		s.MemoryPeak = readInt(g.path("", id, "memory.peak"))
		_, err = os.Stat(st)
		return s, err
	}
	st := g.path("memory", id, "memory.stat")
	s.Memory = readKeyed(st, "total_rss") + readKeyed(st, "total_shmem")
	s.MemoryPeak = readInt(g.path("memory", id, "memory.max_usage_in_bytes"))
	_, err = os.Stat(st)
	return s, err
}

// procs lists the processes in a kernel's cgroup.
func (g cgroups) procs(id string) []int {
	b, _ := os.ReadFile(g.path("pids", id, "cgroup.procs"))
	var out []int
	for _, f := range strings.Fields(string(b)) {
		if pid, err := strconv.Atoi(f); err == nil && pid > 0 {
			out = append(out, pid)
		}
	}
	return out
}

// remove deletes the cgroup. Processes that are still dying keep it busy for a
// moment; deadline bounds the wait.
func (g cgroups) remove(id string, deadline time.Time) error {
	for _, p := range g.parents() {
		d := filepath.Join(p, id)
		for wait := time.Millisecond; ; wait = min(2*wait, 50*time.Millisecond) {
			err := unix.Rmdir(d)
			if err == nil || errors.Is(err, unix.ENOENT) {
				break
			}
			if !errors.Is(err, unix.EBUSY) || time.Now().After(deadline) {
				return fmt.Errorf("removing cgroup %s: %w", d, err)
			}
			time.Sleep(wait)
		}
	}
	return nil
}

func readInt(path string) int64 {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0
	}
	n, _ := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	return n
}

func readKeyed(path, key string) int64 {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0
	}
	for _, line := range strings.Split(string(b), "\n") {
		if f := strings.Fields(line); len(f) >= 2 && f[0] == key {
			n, _ := strconv.ParseInt(f[1], 10, 64)
			return n
		}
	}
	return 0
}
