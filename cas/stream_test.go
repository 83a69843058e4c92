package cas

import (
	"bytes"
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
		s      *Stream
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
