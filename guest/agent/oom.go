package agent

import (
	"slices"
	"strconv"
	"strings"
)

// oomFile is where the kernel tells the root container which processes it has
// ended for want of memory; see cmd/runsc/edits (add/oom.go.in).
const oomFile = "/proc/sentry-meminfo"

// maxOOM bytes of it are read: 256 lines of 64 pids at most.
const maxOOM = 256 << 10

// oomKills is what the file says.
type oomKills struct {
	total int64
	last  [][]int // each a victim and its ancestors, in the agent's pid namespace
}

func outOfMemory() oomKills {
	b, _ := readProc(oomFile, maxOOM)
	return parseOOM(string(b))
}

// parseOOM takes what it knows of a file: a kernel without our edits has others.
func parseOOM(s string) (k oomKills) {
	for line := range strings.Lines(s) {
		key, value, _ := strings.Cut(line, ":")
		f := strings.Fields(value)
		switch {
		case key == "OutOfMemory" && len(f) == 1:
			k.total, _ = strconv.ParseInt(f[0], 10, 64)
		case key == "Ended":
			var pids []int
			for _, s := range f {
				if pid, err := strconv.Atoi(s); err == nil {
					pids = append(pids, pid)
				}
			}
			k.last = append(k.last, pids)
		}
	}
	return k
}

// ended says whether a process ended so; with itself unset, whether one below it
// did: a shell ends with 137 when what it ran was killed.
func (k oomKills) ended(pid int, itself bool) bool {
	return slices.ContainsFunc(k.last, func(pids []int) bool {
		i := slices.Index(pids, pid)
		return i == 0 || i > 0 && !itself
	})
}
