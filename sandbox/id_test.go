package sandbox

import (
	"bytes"
	"crypto/rand"
	"strings"
	"testing"
)

func TestNewIDIsValidAndFresh(t *testing.T) {
	seen := map[string]bool{}
	for range 10_000 {
		id := NewID(rand.Reader)
		if !ValidID(id) || len(id) != 16 || seen[id] {
			t.Fatalf("id %q: valid %v, %d long, seen before %v", id, ValidID(id), len(id), seen[id])
		}
		seen[id] = true
	}
}

func TestNewIDDependsOnNothingButTheSource(t *testing.T) {
	src := bytes.Repeat([]byte{7, 200, 31}, 16)
	if a, b := NewID(bytes.NewReader(src)), NewID(bytes.NewReader(src)); a != b {
		t.Fatalf("%q and %q from the same bytes", a, b)
	}
}

func TestNewIDRefusesAShortSource(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Fatal("an id was made from 3 random bytes")
		}
	}()
	NewID(strings.NewReader("abc"))
}

func TestValidID(t *testing.T) {
	for id, want := range map[string]bool{
		"a": true, "0": true, "abc123": true, strings.Repeat("a", 64): true,
		"": false, strings.Repeat("a", 65): false, "A": false, "a-b": false, "a/b": false, "..": false,
		"a\x00": false, "a\n": false, "é": false, "a b": false,
	} {
		if got := ValidID(id); got != want {
			t.Errorf("ValidID(%q) = %v, want %v", id, got, want)
		}
	}
}
