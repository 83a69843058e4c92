package world

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/image/imagetest"
)

// linkFile is a hard link where the file system allows it: an image is 250 MB
// and never written to.
func linkFile(from, to string) error {
	err := os.Link(from, to)
	if errors.Is(err, unix.EXDEV) || errors.Is(err, unix.EPERM) {
		return copyFile(from, to)
	}
	return err
}

func copyFile(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}

// seedImages gives the server the checkout's base image, which its bootstrap
// then finds instead of making one.
func (w *World) seedImages(t testing.TB) {
	t.Helper()
	lib, img := imagetest.Base(t)
	path, err := lib.Path(img.ID)
	if err != nil {
		t.Fatal(err)
	}
	blobs := filepath.Join(w.Dir, "images", "blobs", "sha256")
	if err := os.MkdirAll(blobs, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, from := range []string{path, strings.TrimSuffix(path, ".erofs") + ".json"} {
		if err := linkFile(from, filepath.Join(blobs, filepath.Base(from))); err != nil {
			t.Fatalf("taking the base image: %v", err)
		}
	}
}
