package agent

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/internal/ceilings"
)

// machineLimits fills what l leaves open from the machine itself.
func machineLimits(l Limits, dir string) (Limits, error) {
	if l.MilliCPU == 0 {
		l.MilliCPU = int64(runtime.NumCPU()) * 1000
	}
	total, _, err := hostMemory()
	if err != nil {
		return l, err
	}
	if l.Memory == 0 {
		l.Memory = total
	}
	if l.MemoryReserve == 0 {
		l.MemoryReserve = min(l.Memory, total) / 10 // more may be promised than there is, not kept
	}
	if l.MaxSandboxes == 0 {
		l.MaxSandboxes, _ = ceilings.MaxSandboxes(os.ReadFile)
	}
	if l.Disk == 0 {
		free, err := freeDisk(dir)
		if err != nil {
			return l, err
		}
		l.Disk = free
	}
	return l, nil
}

// freeDisk is what a file in dir could still take.
func freeDisk(dir string) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, fmt.Errorf("statfs %s: %w", dir, err)
	}
	return int64(st.Bavail) * st.Bsize, nil
}

// readHost reads what the machine has left. dir is where sandboxes write.
func readHost(dir string) (h Host, err error) {
	if _, h.Memory, err = hostMemory(); err != nil {
		return h, err
	}
	if psi, err := os.ReadFile("/proc/pressure/memory"); err == nil { // a kernel may be without
		h.Stalled = parsePressure(psi)
	}
	h.Disk, err = freeDisk(dir)
	return h, err
}

// hostMemory reads the machine's memory and how much of it could be had now. In a
// container that may have less, that is what counts: over its limit the host ends
// processes of it, and not of others.
func hostMemory() (total, available int64, err error) {
	data, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, 0, err
	}
	total, available = parseMeminfo(data)
	if total == 0 {
		return 0, 0, fmt.Errorf("/proc/meminfo has no MemTotal")
	}
	for _, g := range []struct{ dir, limit, used, cache string }{
		{"/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"},
		{"/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"},
	} {
		limit, lerr := readNumber(filepath.Join(g.dir, g.limit))
		used, uerr := readNumber(filepath.Join(g.dir, g.used))
		if lerr != nil || uerr != nil || limit >= total {
			continue // no container, or none with a limit
		}
		stat, _ := os.ReadFile(filepath.Join(g.dir, "memory.stat"))
		total, available = limit, min(available, max(limit-used+keyed(stat, g.cache), 0))
	}
	return total, available, nil
}

func readNumber(path string) (int64, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
}

// keyed is the number behind a name in lines of both.
func keyed(data []byte, name string) int64 {
	for line := range strings.Lines(string(data)) {
		if f := strings.Fields(line); len(f) == 2 && f[0] == name {
			n, _ := strconv.ParseInt(f[1], 10, 64)
			return n
		}
	}
	return 0
}

// parsePressure is avg10 of the line "full" of /proc/pressure/memory, in percent.
func parsePressure(data []byte) float64 {
	for line := range strings.Lines(string(data)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "full" {
			v, _ := strconv.ParseFloat(strings.TrimPrefix(f[1], "avg10="), 64)
			return v
		}
	}
	return 0
}

// coreMeter says how many cores nobody used since it was asked last.
type coreMeter struct {
	read        func() ([]byte, error) // nil = /proc/stat
	idles, alls int64                  // ticks, as read last
}

func (m *coreMeter) idle() int {
	read := m.read
	if read == nil {
		read = func() ([]byte, error) { return os.ReadFile("/proc/stat") }
	}
	data, err := read()
	if err != nil {
		return 0
	}
	idle, all := parseStat(data)
	idles, alls := idle-m.idles, all-m.alls
	first := m.alls == 0
	m.idles, m.alls = idle, all
	if first || alls <= 0 {
		return 0
	}
	return int(idles * int64(runtime.NumCPU()) / alls)
}

// parseStat is the ticks that all cores were idle, and all that passed.
func parseStat(data []byte) (idle, all int64) {
	line, _, _ := strings.Cut(string(data), "\n")
	for i, f := range strings.Fields(line) {
		n, err := strconv.ParseInt(f, 10, 64)
		if err != nil || i > 8 { // "cpu"; what comes after the eighth is counted before
			continue
		}
		if all += n; i == 4 || i == 5 { // idle, iowait
			idle += n
		}
	}
	return idle, all
}

func parseMeminfo(data []byte) (total, available int64) {
	for sc := bufio.NewScanner(bytes.NewReader(data)); sc.Scan(); {
		name, rest, _ := strings.Cut(sc.Text(), ":")
		fields := strings.Fields(rest)
		if len(fields) == 0 {
			continue
		}
		kib, _ := strconv.ParseInt(fields[0], 10, 64)
		switch name {
		case "MemTotal":
			total = kib << 10
		case "MemAvailable":
			available = kib << 10
		}
	}
	return total, available
}

// bootID changes with every start of the machine.
func bootID() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "" // then a restart of the machine is only not named as such
	}
	return strings.TrimSpace(string(b))
}
