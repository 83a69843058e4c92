// Package imagetest gives tests real images: the base image, made once per
// checkout and shared, and tiny ones made on the spot.
package imagetest

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/cove-sandbox/cove/image"
	"github.com/cove-sandbox/cove/sandbox"
)

// Base opens the checkout's own library, .cache/images beside go.mod, and
// returns the base image, making it if it is missing (about a minute, one
// process at a time). The library is shared with other tests: add to it, but
// delete only what you added.
func Base(t testing.TB) (*image.Library, sandbox.Image) {
	t.Helper()
	lib, err := image.Open(filepath.Join(checkout(t), ".cache", "images"), image.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { lib.Close() })
	img, err := lib.Bootstrap(t.Context(), image.Debian{}, func(p sandbox.Progress) { t.Log(p.Step) })
	if err != nil {
		t.Fatalf("making the base image: %v", err)
	}
	return lib, img
}

// Library opens an empty library that lives as long as the test.
func Library(t testing.TB) *image.Library {
	t.Helper()
	lib, err := image.Open(filepath.Join(t.TempDir(), "images"), image.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { lib.Close() })
	return lib
}

// Tiny makes an image of the given files (path to content, mode 0755) in lib:
// for programs, link them statically.
func Tiny(t testing.TB, lib *image.Library, cfg sandbox.ImageConfig, files map[string]string) sandbox.Image {
	t.Helper()
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o755); err != nil { // it becomes the image's root
		t.Fatal(err)
	}
	for name, content := range files {
		p := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(content), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	img, err := lib.ImportDir(t.Context(), dir, cfg, nil)
	if err != nil {
		t.Fatal(err)
	}
	return img
}

// checkout is the directory of go.mod above the test's package.
func checkout(t testing.TB) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for ; dir != "/"; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
	}
	t.Fatal("no go.mod above the test's directory")
	return ""
}
