// Package testbin finds the binaries that integration tests run for real.
package testbin

import (
	"os"
	"path/filepath"
	"testing"
)

// Root is the top of the repository.
func Root(t testing.TB) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for range 20 {
		if b, err := os.ReadFile(filepath.Join(dir, "go.mod")); err == nil && len(b) > 0 {
			if _, err := os.Stat(filepath.Join(dir, "sandbox", "spec.go")); err == nil {
				return dir
			}
		}
		dir = filepath.Dir(dir)
	}
	t.Fatal("not inside the repository")
	return ""
}

// Runsc is the pinned runsc.
func Runsc(t testing.TB) string { return find(t, "runsc") }

// Guest is the static guest binary.
func Guest(t testing.TB) string { return find(t, "cove-guest") }

// Cove is the cove binary.
func Cove(t testing.TB) string { return find(t, "cove") }

// find fails, not skips: a test that silently ran nothing would be a lie.
func find(t testing.TB, name string) string {
	t.Helper()
	p := filepath.Join(Root(t), "bin", name)
	if _, err := os.Stat(p); err != nil {
		t.Fatalf("%s is missing: run 'make build' first", p)
	}
	return p
}
