package seal

import (
	"bytes"
	"testing"
)

func TestFramesOpenOnlyInTheirPlace(t *testing.T) {
	key := NewKey()
	f := NewFrames(key, []byte("salt"), "purpose")
	sealed := f.Seal([]byte("head"), 7, false, []byte("content"), []byte("bound"))[len("head"):]
	if bytes.Contains(sealed, []byte("content")) || len(sealed) != len("content")+TagSize {
		t.Errorf("%q", sealed)
	}
	changed := bytes.Clone(sealed)
	changed[0] ^= 1
	for _, c := range []struct {
		name   string
		f      *Frames
		number uint64
		last   bool
		sealed []byte
		bound  string
		want   bool
	}{
		{"itself", f, 7, false, sealed, "bound", true},
		{"the same key again", NewFrames(key, []byte("salt"), "purpose"), 7, false, sealed, "bound", true},
		{"another number", f, 8, false, sealed, "bound", false},
		{"as the last", f, 7, true, sealed, "bound", false},
		{"bound to something else", f, 7, false, sealed, "other", false},
		{"another salt", NewFrames(key, []byte("other"), "purpose"), 7, false, sealed, "bound", false},
		{"another purpose", NewFrames(key, []byte("salt"), "other"), 7, false, sealed, "bound", false},
		{"another key", NewFrames(NewKey(), []byte("salt"), "purpose"), 7, false, sealed, "bound", false},
		{"changed", f, 7, false, changed, "bound", false},
		{"cut", f, 7, false, sealed[:len(sealed)-1], "bound", false},
		{"nothing", f, 7, false, nil, "bound", false},
	} {
		got, ok := c.f.Open(nil, c.number, c.last, c.sealed, []byte(c.bound))
		if ok != c.want || ok && string(got) != "content" {
			t.Errorf("%s: %q, %v", c.name, got, ok)
		}
	}
}

// No two places have the same nonce: with one key that would give both away.
func TestNoncesDiffer(t *testing.T) {
	seen := map[[12]byte]bool{}
	for _, number := range []uint64{0, 1, 2, 255, 256, 1 << 20, 1<<56 - 1, 1 << 56, 1<<64 - 1} {
		for _, last := range []bool{false, true} {
			n := Nonce(number, last)
			if seen[n] {
				t.Errorf("%d, %v: %x again", number, last, n)
			}
			seen[n] = true
		}
	}
}
