package main

import (
	"crypto/sha256"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/cove-sandbox/cove/sandbox"
)

// The key file follows the key that is in it through rotations, and no other.
func TestTheKeyFileFollowsRotations(t *testing.T) {
	at := places{t.TempDir()}
	follow := followKey(at, slog.New(slog.DiscardHandler))
	hash := func(s string) []byte { h := sha256.Sum256([]byte(s)); return h[:] }
	follow(hash("anything"), "no file, so none is made")
	if _, err := os.Stat(at.key()); err == nil {
		t.Error("a key file was made")
	}
	if err := os.WriteFile(at.key(), []byte("one\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	follow(hash("somebody else's"), "their next")
	follow(hash("one"), "two")
	follow(hash("two"), "three")
	b, err := os.ReadFile(at.key())
	st, serr := os.Stat(at.key())
	if err != nil || serr != nil || string(b) != "three\n" || st.Mode().Perm() != 0o600 {
		t.Errorf("%q %v %v %v", b, st.Mode(), err, serr)
	}
}

func TestADirectoryThatSomebodyElseMadeIsNotTaken(t *testing.T) {
	base := t.TempDir()
	mine := filepath.Join(base, "mine")
	for range 2 { // made, and found again
		if err := ownDirectory(mine); err != nil {
			t.Fatal(err)
		}
	}
	if st, _ := os.Stat(mine); st.Mode().Perm() != 0o700 {
		t.Error(st.Mode())
	}
	link, open, file := filepath.Join(base, "link"), filepath.Join(base, "open"), filepath.Join(base, "file")
	if err := os.Symlink(mine, link); err != nil {
		t.Fatal(err)
	}
	_ = os.Mkdir(open, 0o700)
	_ = os.Chmod(open, 0o777)
	_ = os.WriteFile(file, nil, 0o600)
	bad := []string{link, open, file}
	if os.Geteuid() == 0 {
		theirs := filepath.Join(base, "theirs")
		_ = os.Mkdir(theirs, 0o700)
		if err := os.Chown(theirs, 65534, 65534); err != nil {
			t.Fatal(err)
		}
		bad = append(bad, theirs)
	}
	for _, dir := range bad {
		if err := ownDirectory(dir); sandbox.ClassOf(err) != sandbox.Precondition {
			t.Errorf("%s: %v", dir, err)
		}
	}
}

// What "make start" or a person made open is closed to lookers.
func TestTheDataDirectoryIsClosed(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data")
	for _, mode := range []os.FileMode{0, 0o755, 0o777, 0o700} {
		if mode != 0 {
			if err := os.Chmod(dir, mode); err != nil {
				t.Fatal(err)
			}
		}
		if err := (places{dir}).make(); err != nil {
			t.Fatal(err)
		}
		want := os.FileMode(0o711)
		if mode == 0o700 {
			want = mode
		}
		if st, _ := os.Stat(dir); st.Mode().Perm() != want {
			t.Errorf("%o became %o", mode, st.Mode().Perm())
		}
	}
}
