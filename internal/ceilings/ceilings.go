// Package ceilings knows which tables of a Linux host sandboxes fill: how many
// there is room for, and what to raise for more.
package ceilings

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// Ceiling is a number of the host that so many sandboxes use up.
type Ceiling struct {
	Sysctl string
	Each   int64 // that one sandbox takes
	Rest   int64 // that the rest of the machine may need
	Want   int64 // what it is raised to where it is lower
}

// All of them. A gVisor kernel is 25 to 40 threads with its stubs, some 40 open
// files, and one namespace of each kind; with a network it is a second one for
// that. Sandboxes use none of the host's inotify, terminals or keys: those of
// code inside are the sentry's own. 20,000 fit into what is wanted.
var All = []Ceiling{
	{"kernel.pid_max", 48, 4096, 1 << 22},
	{"kernel.threads-max", 48, 4096, 1 << 20},
	{"fs.file-max", 64, 65536, 1 << 22},
	{"fs.nr_open", eachFiles, 4096, 1 << 20}, // which the server's own limit is raised to
	{"user.max_user_namespaces", 1, 256, 1 << 16},
	{"user.max_mnt_namespaces", 1, 256, 1 << 16},
	{"user.max_pid_namespaces", 1, 256, 1 << 16},
	{"user.max_ipc_namespaces", 1, 256, 1 << 16},
	{"user.max_uts_namespaces", 1, 256, 1 << 16},
	{"user.max_net_namespaces", 2, 256, 1 << 16},
}

// A server has eachFiles open for a sandbox with a network: five sockets of its proxy,
// one or two to its guest, its network, its process and its notices (11 were counted).
const (
	eachFiles = 12
	restFiles = 1024 // database, log, clients
)

// Files is the server's limit of open files where it is lower than fs.nr_open: raising
// it takes a capability that root in a container may lack.
const Files = "the server's open files (ulimit -Hn)"

func files(read func(string) ([]byte, error)) (int64, bool) {
	b, err := read("/proc/self/limits")
	if err != nil {
		return 0, false
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) >= 5 && strings.HasPrefix(line, "Max open files") {
			n, err := strconv.ParseInt(f[4], 10, 64)
			return n, err == nil // "unlimited" is none
		}
	}
	return 0, false
}

// memoryGroups is how many memory cgroups Linux can have (their ids are 16 bits),
// less those of the rest of the machine.
const memoryGroups = 65_535 - 1024

// File is where a ceiling is read and written.
func (c Ceiling) File() string { return "/proc/sys/" + strings.ReplaceAll(c.Sysctl, ".", "/") }

// Sandboxes is how many fit below a value of the ceiling.
func (c Ceiling) Sandboxes(value int64) int64 { return max(value-c.Rest, 0) / c.Each }

func (c Ceiling) read(read func(string) ([]byte, error)) (int64, bool) {
	b, err := read(c.File())
	if err != nil {
		return 0, false // a kernel without it has no such bound
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
	return int64(min(n, math.MaxInt64)), err == nil
}

// MaxSandboxes is how many sandboxes a host has room for, and the ceiling that is met first.
func MaxSandboxes(read func(string) ([]byte, error)) (most int64, by string) {
	most, by = memoryGroups, "memory cgroups"
	for _, c := range All {
		if n, ok := c.read(read); ok && c.Sandboxes(n) < most {
			most, by = c.Sandboxes(n), c.Sysctl
		}
	}
	if n, ok := files(read); ok && max(n-restFiles, 0)/eachFiles < most {
		most, by = max(n-restFiles, 0)/eachFiles, Files
	}
	return most, by
}

// Low lists the ceilings below what is wanted, as arguments of sysctl -w.
func Low(read func(string) ([]byte, error)) (args []string) {
	for _, c := range All {
		if n, ok := c.read(read); ok && n < c.Want {
			args = append(args, fmt.Sprintf("%s=%d", c.Sysctl, c.Want))
		}
	}
	return args
}

// Raise raises what is lower than wanted and lowers nothing. raised names what was,
// refused what could not be (in a container the files may be read-only).
func Raise(read func(string) ([]byte, error), write func(file string, value []byte) error) (raised, refused []string) {
	for _, c := range All {
		n, ok := c.read(read)
		if !ok || n >= c.Want {
			continue
		}
		what := fmt.Sprintf("%s=%d", c.Sysctl, c.Want)
		if err := write(c.File(), []byte(strconv.FormatInt(c.Want, 10))); err != nil {
			refused = append(refused, what)
			continue
		}
		raised = append(raised, fmt.Sprintf("%s (was %d)", what, n))
	}
	return raised, refused
}
