package gvisor

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

// Two nodes, or two data directories, make the same file system of the same guest:
// a checkpoint of one is restored over the other's.
func TestTheGuestIsTheSameEverywhere(t *testing.T) {
	guest := filepath.Join(t.TempDir(), "cove-guest")
	if err := os.WriteFile(guest, []byte("#!guest"), 0o755); err != nil {
		t.Fatal(err)
	}
	var made [2][]byte
	for i := range made {
		img, err := buildGuestFS(t.Context(), t.TempDir(), guest)
		if err != nil {
			t.Fatal(err)
		}
		if made[i], err = os.ReadFile(img); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(made[0], made[1]) {
		t.Error("two file systems of the same guest differ")
	}
}
