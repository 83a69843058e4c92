// Package mountinfo reads the table of mounts of a process.
package mountinfo

import (
	"fmt"
	"os"
	"slices"
	"strings"
)

// Mount is a line of the table.
type Mount struct {
	At     string // where it is
	Kind   string // of file system
	Source string // a device, or whatever the file system calls it
}

// Own lists the mounts of this process, the oldest first.
func Own() ([]Mount, error) {
	b, err := os.ReadFile("/proc/self/mountinfo")
	return Parse(string(b)), err
}

// Parse reads a table (proc(5), /proc/PID/mountinfo). What is no line of one is left out.
func Parse(table string) (all []Mount) {
	for line := range strings.Lines(table) {
		f := strings.Fields(line)
		if len(f) < 7 {
			continue
		}
		// Six fields, any number of optional ones, a dash.
		dash := slices.Index(f[6:], "-")
		if dash < 0 || len(f) < 6+dash+3 {
			continue
		}
		all = append(all, Mount{At: unescape(f[4]), Kind: f[6+dash+1], Source: unescape(f[6+dash+2])})
	}
	return all
}

// unescape undoes the \040 of the table.
func unescape(s string) string {
	for _, c := range []string{" ", "\t", "\n", `\`} {
		s = strings.ReplaceAll(s, fmt.Sprintf(`\%03o`, c[0]), c)
	}
	return s
}
