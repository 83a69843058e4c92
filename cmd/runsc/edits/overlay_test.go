package main

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// goroot is the Go that builds this.
func goroot(t *testing.T) string {
	t.Helper()
	out, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(out))
}

// A Go in which the place has moved builds, but sandboxes take 1 MiB more: this is where that is seen.
func TestTheRuntimeIsChangedInTwoNumbers(t *testing.T) {
	root, path := goroot(t), filepath.Join(t.TempDir(), "runtime.json")
	if said, err := overlay(root, path); err != nil || said {
		t.Fatalf("said %v, %v", said, err)
	}
	var got struct{ Replace map[string]string }
	b, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(b, &got)
	}
	if err != nil || len(got.Replace) != 1 {
		t.Fatalf("%s: %v", b, err)
	}
	for was, is := range got.Replace {
		before, err := os.ReadFile(was)
		if err != nil {
			t.Fatal(err)
		}
		after, err := os.ReadFile(is)
		if err != nil {
			t.Fatal(err)
		}
		old, now := bytes.Split(before, []byte("\n")), bytes.Split(after, []byte("\n"))
		changed := 0
		for i := range min(len(old), len(now)) {
			if !bytes.Equal(old[i], now[i]) {
				changed++
			}
		}
		if len(old) != len(now) || changed != len(runtimeEdits) {
			t.Errorf("%d of %d lines differ, and there are %d now", changed, len(old), len(now))
		}
	}
}

func TestAnotherRuntimeIsLeftAsItIs(t *testing.T) {
	root := t.TempDir()
	file := filepath.Join(root, spanSets)
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	// The first place is there: not even that is changed alone.
	if err := os.WriteFile(file, []byte("package runtime\n\nconst "+runtimeEdits[0].old+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(root, "runtime.json")
	said, err := overlay(root, path)
	if err != nil || !said {
		t.Fatalf("said %v, %v", said, err)
	}
	var got struct{ Replace map[string]string }
	b, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(b, &got)
	}
	if err != nil || len(got.Replace) != 0 {
		t.Errorf("%s: %v", b, err)
	}
	if _, err := overlay(filepath.Join(root, "none"), path); err == nil {
		t.Error("a Go that is not there was taken")
	}
}
