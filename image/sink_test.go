package image

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// What the digest is of is what is in the file, whether the kernel can copy
// between the two files (same file system), cannot (another one: EXDEV), or
// the source is no file at all.
func TestSinkCopiesAndHashesTheSame(t *testing.T) {
	content := make([]byte, 40<<20) // several steps, several flushes
	rand.NewChaCha8([32]byte{}).Read(content)
	file := func(dir string) *os.File {
		f, err := os.CreateTemp(dir, "sink")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close(); os.Remove(f.Name()) })
		if _, err := f.Write(content); err != nil {
			t.Fatal(err)
		}
		return f
	}
	for name, src := range map[string]io.ReaderAt{"same file system": file(t.TempDir()), "another file system": file("/dev/shm"),
		"memory": bytes.NewReader(content)} {
		t.Run(name, func(t *testing.T) {
			dst, err := os.Create(filepath.Join(t.TempDir(), "out"))
			if err != nil {
				t.Fatal(err)
			}
			defer dst.Close()
			s := newSink(t.Context(), dst, newReporter(nil))
			defer s.close()
			var want []byte
			for _, r := range [][2]int64{{0, 30 << 20}, {35 << 20, 4096}, {1 << 20, 5 << 20}} {
				small := content[r[0]+7 : r[0]+107]
				if _, err := s.Write(small); err != nil {
					t.Fatal(err)
				}
				if err := s.CopyRange(src, r[0], r[1]); err != nil {
					t.Fatal(err)
				}
				want = append(append(want, small...), content[r[0]:r[0]+r[1]]...)
			}
			digest, err := s.digest()
			if err != nil {
				t.Fatal(err)
			}
			got, err := os.ReadFile(dst.Name())
			if err != nil || !bytes.Equal(got, want) {
				t.Errorf("%d bytes written, %d wanted, or others: %v", len(got), len(want), err)
			}
			if sum := sha256.Sum256(want); digest != hex.EncodeToString(sum[:]) {
				t.Error("the digest is of something else")
			}
		})
	}
}

// A source that ends early, an output that takes no more and a context that
// ends are errors, and none of them leaves a goroutine waiting.
func TestSinkFails(t *testing.T) {
	open := func(flags int) *os.File {
		f, err := os.OpenFile(filepath.Join(t.TempDir(), "f"), os.O_CREATE|flags, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		return f
	}
	short := open(os.O_RDWR)
	if _, err := short.Write(make([]byte, 8192)); err != nil {
		t.Fatal(err)
	}
	s := newSink(t.Context(), open(os.O_RDWR), newReporter(nil))
	err := s.CopyRange(short, 4096, 8192)
	if _, derr := s.digest(); err == nil || derr == nil {
		t.Errorf("a source cut short: %v, %v", err, derr)
	}
	s = newSink(t.Context(), open(os.O_RDONLY), newReporter(nil))
	if err := s.CopyRange(short, 0, 4096); !errors.Is(err, unix.EBADF) {
		t.Errorf("an output that cannot be written: %v", err)
	}
	s.close()
	ctx, cancel := context.WithCancel(t.Context())
	s = newSink(ctx, open(os.O_RDWR), newReporter(nil))
	cancel()
	err = s.CopyRange(short, 0, 4096)
	if _, derr := s.digest(); !errors.Is(err, context.Canceled) || !errors.Is(derr, context.Canceled) {
		t.Errorf("cancelled: %v, %v", err, derr)
	}
}
