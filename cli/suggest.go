package cli

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"
)

// knownCommand is the Args of a command that only has subcommands. Cobra's own
// suggestions allow two edits, which makes every two-letter command a
// suggestion for every other, and count "sl" for "ls" as two.
func knownCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	var near, begun []string
	for _, c := range cmd.Commands() {
		if c.Hidden {
			continue
		}
		for _, name := range append([]string{c.Name()}, c.Aliases...) {
			allowed := 1
			if len(name) > 4 {
				allowed = 2
			}
			full := "'" + cmd.CommandPath() + " " + c.Name() + "'"
			if len(args[0]) > 1 && strings.HasPrefix(name, args[0]) {
				begun = append(begun, full)
				break
			}
			if edits(args[0], name) <= allowed {
				near = append(near, full)
				break
			}
		}
	}
	if len(begun) > 0 { // "set" is the start of set-quota sooner than a slip for get
		near = begun
	}
	hint := fmt.Sprintf("'%s --help' lists the commands", cmd.CommandPath())
	if len(near) > 0 {
		hint = "did you mean " + strings.Join(near, " or ") + "?"
	}
	return &usageError{msg: fmt.Sprintf("unknown command %q", strings.TrimPrefix(cmd.CommandPath()+" "+args[0], "cove ")), hint: hint}
}

// edits counts insertions, deletions, changes and swaps of neighbours.
func edits(a, b string) int {
	d := make([][]int, len(a)+1)
	for i := range d {
		d[i] = make([]int, len(b)+1)
		d[i][0] = i
	}
	for j := range d[0] {
		d[0][j] = j
	}
	for i := 1; i <= len(a); i++ {
		for j := 1; j <= len(b); j++ {
			change := d[i-1][j-1]
			if a[i-1] != b[j-1] {
				change++
			}
			d[i][j] = min(change, d[i-1][j]+1, d[i][j-1]+1)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				d[i][j] = min(d[i][j], d[i-2][j-2]+1)
			}
		}
	}
	return d[len(a)][len(b)]
}
