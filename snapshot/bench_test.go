package snapshot

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/cove-sandbox/cove/cas/castest"
)

// BenchmarkMemory is a pages.img of 100 MiB that does not compress, sealed:
// new, again (everything is there), and back.
func BenchmarkMemory(b *testing.B) {
	const size = 100 << 20
	s, _ := newStore(b)
	dir := b.TempDir()
	pages := castest.Content(1, size)
	writeFiles(b, dir, map[string][]byte{"pages.img": pages})
	var m Manifest
	packDir := func(b *testing.B) {
		var err error
		if m, err = (Memory{}).PackDir(b.Context(), s, dir, []string{"pages.img"}); err != nil {
			b.Fatal(err)
		}
	}
	b.Run("Pack/new", func(b *testing.B) {
		b.SetBytes(size)
		for b.Loop() {
			b.StopTimer()
			if _, err := (Collector{Grace: -1}).Collect(b.Context(), s, nil, false); err != nil {
				b.Fatal(err)
			}
			b.StartTimer()
			packDir(b)
		}
	})
	b.Run("Pack/again", func(b *testing.B) {
		b.SetBytes(size)
		for b.Loop() {
			packDir(b)
		}
	})
	b.Run("Unpack", func(b *testing.B) {
		out := b.TempDir()
		b.SetBytes(size)
		for b.Loop() {
			if err := (Memory{}).UnpackDir(b.Context(), s, m.ID, out); err != nil {
				b.Fatal(err)
			}
			b.StopTimer()
			os.Remove(filepath.Join(out, "pages.img"))
			b.StartTimer()
		}
	})
}

// BenchmarkFilesystem is a tree of 300 files and 20 MB, sealed: new, again, back.
func BenchmarkFilesystem(b *testing.B) {
	s, _ := newStore(b)
	var items []item
	for i := range 300 {
		items = append(items, file(fmt.Sprintf("./f%d", i), castest.Content(uint64(i), i*450)))
	}
	raw := makeTar(b, items)
	var m Manifest
	b.Run("Pack/new", func(b *testing.B) {
		b.SetBytes(int64(len(raw)))
		for b.Loop() {
			b.StopTimer()
			if _, err := (Collector{Grace: -1}).Collect(b.Context(), s, nil, false); err != nil {
				b.Fatal(err)
			}
			b.StartTimer()
			m = pack(b, s, raw)
		}
	})
	b.Run("Pack/again", func(b *testing.B) {
		b.SetBytes(int64(len(raw)))
		for b.Loop() {
			m = pack(b, s, raw)
		}
	})
	b.Run("Unpack", func(b *testing.B) {
		b.SetBytes(int64(len(raw)))
		for b.Loop() {
			if err := (Filesystem{}).Unpack(b.Context(), s, m.ID, io.Discard); err != nil {
				b.Fatal(err)
			}
		}
	})
}
