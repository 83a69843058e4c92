package seal

import (
	"bytes"
	"encoding/hex"
	"errors"
	"testing"

	"github.com/cove-sandbox/cove/sandbox"
)

func TestPiecesOpenOnlyWhereTheyBelong(t *testing.T) {
	old, next := NewKey(), NewKey()
	ring, turned := NewKeyring(old), NewKeyring(next, old)
	s := ring.Stream("a")
	sealed := s.Seal([]byte("content"), []byte("1"))
	if bytes.Contains(sealed, []byte("content")) || len(sealed) != len("content")+s.Overhead() {
		t.Errorf("%d bytes: %q", len(sealed), sealed)
	}
	changed := bytes.Clone(sealed)
	changed[len(changed)-1] ^= 1
	for _, c := range []struct {
		name   string
		s      *Pieces
		sealed []byte
		place  string
		want   error
	}{
		{"itself", s, sealed, "1", nil},
		{"a new key on top", turned.Stream("a"), sealed, "1", nil},
		{"another place", s, sealed, "2", sandbox.ErrCorrupt},
		{"another thing", ring.Stream("b"), sealed, "1", sandbox.ErrCorrupt},
		{"changed", s, changed, "1", sandbox.ErrCorrupt},
		{"cut", s, sealed[:5], "1", sandbox.ErrCorrupt},
		{"empty", s, sealed[:8], "1", sandbox.ErrCorrupt},
		{"the key is gone", NewKeyring(next).Stream("a"), sealed, "1", sandbox.ErrPrecondition},
	} {
		got, err := c.s.Open(c.sealed, []byte(c.place))
		if !errors.Is(err, c.want) || c.want == nil && string(got) != "content" {
			t.Errorf("%s: %q %v", c.name, got, err)
		}
	}
	if (*Keyring)(nil).Stream("a") != nil {
		t.Error("a keyring without keys seals")
	}
}

// What the first release sealed opens for ever.
func TestOpensWhatTheFirstReleaseSealed(t *testing.T) {
	ring := NewKeyring([KeySize]byte{1, 2, 3})
	for name, c := range map[string]struct {
		p             *Pieces
		sealed, bound string
	}{
		"stream": {ring.Stream("recording abc"), "1ac2f192702849e006e6c6be0aac61b691045d2975d8878dcbf236f123f559cf5544e1840159d033f3", "place"},
		"secret": {ring.Pieces("cove secrets v1"), "1ac2f192702849e02af5ca12d5d7b9ba156073a5a3a9440b92f07a80d62b69a79eeb448772a9822db2", "t\x00a"},
	} {
		sealed, err := hex.DecodeString(c.sealed)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := c.p.Open(sealed, []byte(c.bound)); err != nil || string(got) != "hello" {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
}
