package snapshot

import (
	"bytes"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/cove-sandbox/cove/sandbox"
)

// A file whose beginning another snapshot has is as if it had been there whole, and only its
// end is stored.
func TestPackSince(t *testing.T) {
	ctx := t.Context()
	store, _ := newStore(t)
	rnd := rand.NewChaCha8([32]byte{1})
	content := func(n int) []byte {
		b := make([]byte, n)
		_, _ = rnd.Read(b)
		return b
	}
	write := func(dir, name string, b []byte) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	files := []string{"pages.img", "meta.img"}
	for _, c := range []struct{ before, own int }{
		{3*chunkSize + 4096, 4096},
		{3*chunkSize + 4096, 2 * chunkSize},
		{2 * chunkSize, chunkSize - 4096},
		{2 * chunkSize, 0},
		{2*chunkSize + 4096, 0},
		{4096, chunkSize},
		{chunkSize - 4096, 4096},
	} {
		dir, want := t.TempDir(), content(c.before)
		if c.before > chunkSize {
			clear(want[:chunkSize]) // a chunk of zeros has no blob
		}
		write(dir, "pages.img", want)
		write(dir, "meta.img", []byte("one"))
		first, err := Memory{}.PackDir(ctx, store, dir, files)
		if err != nil {
			t.Fatal(err)
		}
		for range 2 { // the second is of a file that two snapshots are in already
			since := &Since{ID: first.ID, Name: "pages.img", Size: int64(len(want))}
			own := content(c.own)
			want = append(want, own...)
			write(dir, "pages.img", own)
			write(dir, "meta.img", []byte("two"))
			m, err := Memory{}.PackSince(ctx, store, dir, files, since)
			if err != nil {
				t.Fatalf("%+v: %v", c, err)
			}
			if most := int64(c.own + chunkSize + 64<<10); m.Stored > most {
				t.Errorf("%+v: %d bytes are stored, more than %d", c, m.Stored, most)
			}
			out := t.TempDir()
			if err := (Memory{}).UnpackDir(ctx, store, m.ID, out); err != nil {
				t.Fatalf("%+v: %v", c, err)
			}
			got, err := os.ReadFile(filepath.Join(out, "pages.img"))
			if err != nil || !bytes.Equal(got, want) {
				t.Fatalf("%+v: %d bytes are not the %d that were put in (%v)", c, len(got), len(want), err)
			}
			if err := Verify(ctx, store, m.ID); err != nil {
				t.Errorf("%+v: %v", c, err)
			}
			first = m
		}
	}
}

// What is not as it is said to have been is no beginning.
func TestPackSinceRefuses(t *testing.T) {
	ctx := t.Context()
	store, _ := newStore(t)
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "pages.img"), make([]byte, 4096), 0o600); err != nil {
		t.Fatal(err)
	}
	m, err := Memory{}.PackDir(ctx, store, dir, []string{"pages.img"})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []Since{{m.ID, "pages.img", 8192}, {m.ID, "other", 4096}} {
		if _, err := (Memory{}).PackSince(ctx, store, dir, []string{"pages.img"}, &s); sandbox.ClassOf(err) != sandbox.Precondition {
			t.Errorf("%+v: %v", s, err)
		}
	}
}
