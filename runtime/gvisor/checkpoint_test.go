package gvisor

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// Pages that their sentry can still write are no checkpoint.
func TestCheckpointIsReadOnly(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pages.img")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := readOnly(path, 0); err == nil {
		t.Error("it is open for writing, and taken")
	}
	if err := f.Truncate(4096); err != nil {
		t.Fatal(err)
	}
	m, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	if err := readOnly(path, 0); err == nil {
		t.Error("it is mapped for writing, and taken")
	}
	if err := unix.Munmap(m); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the first one's lease is gone
		if err := readOnly(path, 0); err != nil {
			t.Error(err)
		}
	}
}
