package testbin

import (
	"bytes"
	"debug/buildinfo"
	"os"
	"path/filepath"
	"testing"
)

// LaterGuest is a guest that is another by a byte.
func LaterGuest(t testing.TB) string {
	t.Helper()
	b, err := os.ReadFile(Guest(t))
	if err != nil {
		t.Fatal(err)
	}
	return program(t, "cove-guest", append(b, '\n'))
}

// LaterRunsc is a runsc that says it is of another gVisor.
func LaterRunsc(t testing.TB) string {
	t.Helper()
	runsc := Runsc(t)
	info, err := buildinfo.ReadFile(runsc)
	if err != nil {
		t.Fatal(err)
	}
	var was string
	for _, m := range info.Deps {
		if m.Path == "gvisor.dev/gvisor" {
			was = m.Version
		}
	}
	if len(was) < 10 {
		t.Fatalf("%s is of gVisor %q", runsc, was)
	}
	later := []byte(was)
	last := &later[len(later)-1] // of a commit's hash
	if *last != '0' {
		*last = '0'
	} else {
		*last = '1'
	}
	b, err := os.ReadFile(runsc)
	if err != nil {
		t.Fatal(err)
	}
	return program(t, "runsc", bytes.ReplaceAll(b, []byte(was), later))
}

func program(t testing.TB, name string, b []byte) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "cove-later-") // t.TempDir is closed to a sentry's user
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, b, 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}
