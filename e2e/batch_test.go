package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/batch"
	"github.com/cove-sandbox/cove/e2e/world"
)

// A batch is cut off twice, once with its client and once with its server, and does
// each input all the same; nothing is left of it.
func TestBatch(t *testing.T) {
	w := world.New(t, world.Options{})
	dir := t.TempDir()
	in, out := filepath.Join(dir, "in"), filepath.Join(dir, "out")
	const inputs = 60
	var text strings.Builder
	for i := range inputs {
		fmt.Fprintln(&text, i)
	}
	if err := os.WriteFile(in, []byte(text.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	args := []string{"batch", in, "-o", out, "--network", "none", "--memory", "64MiB", "-p", "4", "--reuse", "--",
		"sh", "-c", "read n; echo $((n * n)); sleep 0.1; test $n != 13"}
	results := func() int {
		b, err := os.ReadFile(out)
		if err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		return strings.Count(string(b), "\n")
	}
	until := func(n int) {
		t.Helper()
		for deadline := time.Now().Add(2 * time.Minute); results() < n; time.Sleep(20 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("%d results", results())
			}
		}
	}
	client := w.Command(t, args...)
	if err := client.Start(); err != nil {
		t.Fatal(err)
	}
	until(10)
	if err := client.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	client.Wait()
	had := results()

	client = w.Command(t, args...)
	client.Stderr = os.Stderr
	if err := client.Start(); err != nil {
		t.Fatal(err)
	}
	until(had + 10)
	w.Kill(t)
	w.Start(t)
	if err := client.Wait(); client.ProcessState.ExitCode() != 1 {
		t.Fatalf("%v: one input fails, want 1", err)
	}

	ran(w.CLI(t, args[:3:3]...)).want(t, 2) // no command
	last := ran(w.CLI(t, append([]string{"batch", in, "-o", out, "--ordered"}, args[4:]...)...)).want(t, 0)
	if !strings.Contains(last.Stderr, fmt.Sprintf("%d before", inputs)) {
		t.Errorf("the last call did something: %s", last.Stderr)
	}
	b, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	if len(lines) != inputs {
		t.Fatalf("%d results", len(lines))
	}
	for i, line := range lines {
		var r batch.Result
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			t.Fatal(err)
		}
		want := batch.OK
		if i == 13 {
			want = batch.Failed
		}
		if r.Index != i || r.Status != want || r.Stdout != fmt.Sprintf("%d\n", i*i) {
			t.Errorf("%s", line)
		}
	}
	w.AssertNoLitter(t)
}
