package local

import (
	"bytes"
	"crypto/sha256"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/cove-sandbox/cove/cas"
	"github.com/cove-sandbox/cove/cas/castest"
	"github.com/cove-sandbox/cove/internal/seal"
)

const benchSize = 100 << 20

// BenchmarkRead is 100 MiB of noise, uncompressed, from the page cache.
// The digest alone is the yardstick: it is sequential, so no reader of one blob
// is faster than that on any number of cores.
func BenchmarkRead(b *testing.B) {
	content := castest.Content(1, benchSize)
	b.Run("digest alone", func(b *testing.B) {
		b.SetBytes(benchSize)
		for b.Loop() {
			sha256.Sum256(content)
		}
	})
	for name, keys := range map[string]*seal.Keyring{"plain": nil, "sealed": seal.NewKeyring(testKey)} {
		s := open(b, b.TempDir(), Options{Keys: keys})
		info := put(b, s, content, cas.Uncompressed)
		b.Run(name+"/ReadTo", func(b *testing.B) {
			dst, err := os.Create(filepath.Join(b.TempDir(), "out"))
			if err != nil {
				b.Fatal(err)
			}
			defer dst.Close()
			b.SetBytes(benchSize)
			for b.Loop() {
				if err := s.ReadTo(b.Context(), info.ID, dst); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run(name+"/Open", func(b *testing.B) {
			b.SetBytes(benchSize)
			for b.Loop() {
				r, err := s.Open(b.Context(), info.ID)
				if err != nil {
					b.Fatal(err)
				}
				if _, err := io.Copy(io.Discard, r); err != nil {
					b.Fatal(err)
				}
				r.Close()
			}
		})
	}
}

// BenchmarkBatch is 300 blobs of 64 KiB made durable: a batch against Puts.
func BenchmarkBatch(b *testing.B) {
	s := open(b, b.TempDir(), Options{})
	seed := uint64(0)
	run := func(b *testing.B, put func(content []byte) error, commit func() error) {
		for range 300 {
			seed++
			if err := put(castest.Content(seed, 64<<10)); err != nil {
				b.Fatal(err)
			}
		}
		if err := commit(); err != nil {
			b.Fatal(err)
		}
	}
	b.Run("batch", func(b *testing.B) {
		for b.Loop() {
			batch, err := s.Begin()
			if err != nil {
				b.Fatal(err)
			}
			run(b, func(c []byte) error { _, err := batch.Put(b.Context(), bytes.NewReader(c)); return err },
				func() error { return batch.Commit(b.Context()) })
		}
	})
	b.Run("puts", func(b *testing.B) {
		for b.Loop() {
			run(b, func(c []byte) error { _, err := s.Put(b.Context(), bytes.NewReader(c)); return err }, func() error { return nil })
		}
	})
}
