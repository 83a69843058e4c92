package cli

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/batch"
)

// With --json there is nothing but results; without, how far it is too.
func TestBatchAsJSON(t *testing.T) {
	f := newFakeAPI(t)
	for _, quiet := range []bool{false, true} {
		args := []string{"batch", "-p", "1", "--reuse", "--", "echo", "{}"}
		if quiet {
			args = append([]string{"batch", "--json"}, args[1:]...)
		}
		r := f.cove(t, settings{stdin: strings.NewReader("a\nb\n")}, args...)
		lines := strings.Split(strings.TrimSpace(r.stdout), "\n")
		if r.code != 0 || len(lines) != 2 || quiet != (r.stderr == "") {
			t.Fatal(quiet, r)
		}
		for _, line := range lines {
			var res batch.Result
			if err := json.Unmarshal([]byte(line), &res); err != nil || res.Status != batch.OK {
				t.Errorf("%s: %v", line, err)
			}
		}
	}
}
