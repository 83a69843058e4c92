package main

import (
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// pinned is the directory of gVisor as it comes.
func pinned(t *testing.T) string {
	t.Helper()
	cmd := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "gvisor.dev/gvisor")
	cmd.Env = append(os.Environ(), "GOFLAGS=") // not as we edited it
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(out))
}

func TestEditsFitThePinnedGvisor(t *testing.T) {
	from := pinned(t)
	dir := filepath.Join(t.TempDir(), "gvisor")
	for range 2 { // over what an earlier pin, and one that was interrupted, left
		if err := os.MkdirAll(filepath.Join(dir+".new", "half"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := run(from, dir); err != nil {
			t.Fatal(err)
		}
	}
	for i, e := range edits {
		if e.add == "" && e.new != "" && !changedAgain(e, edits[i+1:]) {
			src, err := os.ReadFile(filepath.Join(dir, e.file))
			if err != nil || !strings.Contains(string(src), e.new) {
				t.Errorf("%s lacks %q (%v)", e.file, e.new, err)
			}
		}
		if _, err := parser.ParseFile(token.NewFileSet(), filepath.Join(dir, e.file), nil, parser.SkipObjectResolution); err != nil {
			t.Error(err)
		}
	}
	if _, err := os.Stat(dir + ".new"); err == nil {
		t.Error("a copy is left behind")
	}
}

// changedAgain says whether a later edit has a line of what this one put there: what
// it makes of it is then that one's to show.
func changedAgain(e edit, later []edit) bool {
	for _, l := range later {
		for line := range strings.Lines(l.old) {
			if l.file == e.file && len(strings.TrimSpace(line)) > 10 && strings.Contains(e.new, line) {
				return true
			}
		}
	}
	return false
}

func TestAnEditThatDoesNotFitIsNamed(t *testing.T) {
	for _, e := range edits {
		from := filepath.Join(t.TempDir(), "from")
		if err := os.MkdirAll(filepath.Join(from, filepath.Dir(e.file)), 0o755); err != nil {
			t.Fatal(err)
		}
		if e.add != "" { // a file of that name has come since
			if err := os.WriteFile(filepath.Join(from, e.file), nil, 0o644); err != nil {
				t.Fatal(err)
			}
			if err := e.apply(from); err == nil {
				t.Errorf("%s was written over", e.file)
			}
			continue
		}
		for _, text := range []string{"package gone\n", e.old + e.old} {
			if err := os.WriteFile(filepath.Join(from, e.file), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
			if err := e.apply(from); err == nil || !strings.Contains(err.Error(), e.file) {
				t.Errorf("%s with %q: %v", e.file, text, err)
			}
		}
	}
}
