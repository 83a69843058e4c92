//go:build !race

package agent_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/sandbox"
)

// holder keeps 48 MB in memory and says what they are; it is told to change 2 MB of them.
const holder = `cat >/tmp/holder.py <<'END'
import hashlib, os, socket
b = bytearray(os.urandom(48 << 20))
l = socket.socket(); l.bind(("127.0.0.1", 7779)); l.listen()
while True:
    c, _ = l.accept()
    if c.recv(10) == b"touch":
        b[10 << 20:12 << 20] = os.urandom(2 << 20)
    c.sendall(hashlib.sha256(b).hexdigest().encode()); c.close()
END
nohup python3 /tmp/holder.py >/dev/null 2>&1 &`

func (m *machine) told(id, what string) string {
	m.t.Helper()
	got := m.sh(id, fmt.Sprintf(`until python3 -c 'import socket
s = socket.create_connection(("127.0.0.1", 7779)); s.sendall(b"%s"); print(s.recv(100).decode())' 2>/dev/null; do sleep 0.05; done`, what))
	if len(got) != 64 || strings.ContainsAny(got, " \n") {
		m.t.Fatalf("%s: the holder says %q", id, got)
	}
	return got
}

func (m *machine) from(id string, snap sandbox.Snapshot) {
	m.t.Helper()
	if _, err := m.CreateFrom(m.t.Context(), sandbox.Sandbox{ID: id, Spec: spec()}, m.img, snap); err != nil {
		m.t.Fatal(err)
	}
}

// A snapshot stores what changed since the last one of the same memory, is whole without it, and
// what lives on it lives on without either and without the node that made it.
func TestMemorySnapshotsContinueOnGVisor(t *testing.T) {
	m := newMachine(t)
	ctx := t.Context()
	expect := func(id, want string) {
		t.Helper()
		if got := m.told(id, "tell"); got != want {
			t.Errorf("%s has memory %s, not %s", id, got, want)
		}
	}
	little := func(s sandbox.Snapshot) {
		t.Helper()
		if s.Content.Stored > 24<<20 || s.Content.Size < 48<<20 {
			t.Errorf("a snapshot after 2 MB of changes stored %d bytes of %d", s.Content.Stored, s.Content.Size)
		}
	}
	m.create("a")
	m.sh("a", holder)
	h1 := m.told("a", "tell")
	s1 := m.snapshot("a", sandbox.MemorySnapshot, "")
	h2 := m.told("a", "touch")
	s2 := m.snapshot("a", sandbox.MemorySnapshot, "")
	little(s2)
	m.from("of1", s1)
	m.from("of2", s2)
	expect("of1", h1)
	expect("of2", h2)
	h3 := m.told("of2", "touch")
	s3 := m.snapshot("of2", sandbox.MemorySnapshot, "")
	little(s3)
	h4 := m.told("of1", "touch") // a second branch, of the first
	s4 := m.snapshot("of1", sandbox.MemorySnapshot, "")
	expect("a", h2)

	// Deleted, the first two leave the others whole.
	if _, err := m.Collect(ctx, []string{s3.Content.Manifest, s4.Content.Manifest}); err != nil {
		t.Fatal(err)
	}
	m.restart()
	for _, s := range []sandbox.Snapshot{s3, s4} {
		if _, err := m.Verify(ctx, s.Content); err != nil {
			t.Error(err)
		}
	}
	for id, want := range map[string]string{"a": h2, "of1": h4, "of2": h3} {
		expect(id, want)
	}
	m.from("of3", s3)
	m.from("of4", s4)
	expect("of3", h3)
	expect("of4", h4)

	// To sleep and up again, and each time a little is written.
	for range 3 {
		want := m.told("of3", "touch")
		if err := m.Pause(ctx, "of3", true); err != nil {
			t.Fatal(err)
		}
		expect("of3", want)
	}
}
