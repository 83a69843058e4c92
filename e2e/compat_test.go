package e2e

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/e2e/world"
	"github.com/cove-sandbox/cove/sandbox"
)

// TestCompatibility runs every row of docs/compatibility.md: what is said to work
// works, what is said to be impossible fails.
func TestCompatibility(t *testing.T) {
	doc, err := os.ReadFile("../docs/compatibility.md")
	if err != nil {
		t.Fatal(err)
	}
	b := world.New(t, world.Options{}).Create(t, world.Small())
	row := regexp.MustCompile("^\\| (.*?) \\|.* `(.*)` \\|$")
	section, ran := "", 0
	for line := range strings.SplitSeq(string(doc), "\n") {
		if s, ok := strings.CutPrefix(line, "## "); ok {
			section = s
		}
		m := row.FindStringSubmatch(line)
		if m == nil || !slices.Contains([]string{"Works", "Works differently", "Cannot"}, section) { // the others have no checks
			continue
		}
		ran++
		t.Run(section+"/"+m[1], func(t *testing.T) {
			check := strings.NewReplacer(`\n`, "\n", `\|`, "|").Replace(m[2]) // as a cell of Markdown holds them
			r := b.Exec(t, sandbox.ProcessSpec{Command: check, User: "root", Timeout: 30 * time.Second})
			r.WantCause(t, sandbox.Exited)
			if worked := r.End.ExitCode == 0; worked != (section != "Cannot") {
				t.Errorf("exit %d\n%s\nstdout %.300q\nstderr %.300q", r.End.ExitCode, check, r.Out, r.Err)
			}
			b.Reset(t)
		})
	}
	if ran < 20 {
		t.Errorf("only %d rows were found", ran)
	}
}
