package e2e

import (
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/e2e/world"
	"github.com/cove-sandbox/cove/internal/seal"
	"github.com/cove-sandbox/cove/sandbox"
)

// memoryHolder keeps 24 MiB in its memory alone, says their hash, and changes 2 MiB of them when it is
// told to. Words that it is told stay in its memory too.
const memoryHolder = `
import hashlib, os, socket
b = bytearray(os.urandom(24 << 20)); words = []
l = socket.socket(); l.bind(("127.0.0.1", 7780)); l.listen()
while True:
    c, _ = l.accept()
    what = c.recv(1000).decode()
    if what == "touch": b[10 << 20:12 << 20] = os.urandom(2 << 20)
    elif what != "tell": words.append(bytes.fromhex(what))
    c.sendall(hashlib.sha256(b).hexdigest().encode()); c.close()
`

const askHolder = `import socket, sys
s = socket.create_connection(("127.0.0.1", 7780)); s.sendall(sys.argv[1].encode()); print(s.recv(100).decode())`

// hold begins a holder in the sandbox, and returns the hash of its memory.
func hold(t *testing.T, b *world.Box) string {
	t.Helper()
	b.Write(t, "/tmp/holder.py", []byte(memoryHolder))
	b.Write(t, "/tmp/ask.py", []byte(askHolder))
	b.Must(t, "(setsid python3 /tmp/holder.py >/dev/null 2>&1 </dev/null &); until python3 /tmp/ask.py tell >/dev/null 2>&1; do sleep 0.05; done")
	return told(t, b, "tell")
}

// told is what the holder answers.
func told(t *testing.T, b *world.Box, what string) string {
	t.Helper()
	return b.Must(t, "python3 /tmp/ask.py "+what)
}

func holds(t *testing.T, what string, b *world.Box, want string) {
	t.Helper()
	if got := told(t, b, "tell"); got != want {
		t.Errorf("%s has memory %s, not %s", what, got, want)
	}
}

// pagesFiles are those of the checkpoints that are kept as files.
func pagesFiles(t *testing.T, w *world.World) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(w.Dir, "checkpoints", "*", "pages.img"))
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// family is a sandbox with a holder, a snapshot of it and two children.
type family struct {
	parent, a, b *world.Box
	snap         string
	hash         string // of the memory of all
}

func newFamily(t *testing.T, w *world.World) family {
	t.Helper()
	f := family{parent: w.Create(t, world.Small())}
	f.hash = hold(t, f.parent)
	f.snap = f.parent.Snapshot(t, world.Take{Kind: sandbox.MemorySnapshot}).ID
	f.a, f.b = w.Create(t, world.From(f.snap)), w.Create(t, world.From(f.snap))
	return f
}

// What children have their memory from is damaged, cut and removed under them. None has wrong bytes, what
// cannot go on ends with a cause, and nobody else notices.
func TestSharedPagesLost(t *testing.T) {
	w := world.New(t, world.Options{})
	n := w.Neighbour(t)
	n.During(t)
	f := newFamily(t, w)
	files := pagesFiles(t, w)
	if len(files) != 1 {
		t.Fatalf("kept as files: %v", files)
	}

	// One bit, on its disk. The next child has its memory from the store instead.
	pages, err := os.OpenFile(files[0], os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer pages.Close()
	flip(t, pages)
	c := w.Create(t, world.From(f.snap))
	holds(t, "a child made after the damage", c, f.hash)
	flip(t, pages) // as it was, for those that live on it
	holds(t, "a child made before", f.a, f.hash)

	// Removed, it stays with those that have it. It was: the damaged one by the node.
	for _, file := range pagesFiles(t, w) {
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
	}
	touched := told(t, f.a, "touch")
	kids, err := f.a.TryFork(t.Context(), 2, nil)
	if err != nil {
		t.Fatalf("fork of a child whose checkpoint is gone: %v", err)
	}
	holds(t, "a child of a child", kids[0], touched)
	f.a.Pause(t, true)
	holds(t, "a child that slept", f.a, touched)
	holds(t, "another child of the snapshot", w.Create(t, world.From(f.snap)), f.hash)

	// Cut, those who need what is gone end; who has it goes on.
	if err := pages.Truncate(0); err != nil {
		t.Fatal(err)
	}
	r, err := f.b.TryExec(t.Context(), sandbox.ProcessSpec{User: "root", Command: "python3 /tmp/ask.py tell", Timeout: time.Minute})
	switch {
	case err == nil && r.End.Cause == sandbox.Exited && r.End.ExitCode == 0:
		if got := strings.TrimSpace(string(r.Out)); got != f.hash {
			t.Errorf("memory that is gone was read as something else: %s, not %s", got, f.hash)
		}
	case err == nil:
		t.Logf("the process that met it: %v %s", r.End.End, r.Err)
	case sandbox.ClassOf(err) != sandbox.Ended:
		t.Errorf("an exec in a sandbox whose memory is gone: %v (%s), want %s", err, sandbox.ClassOf(err), sandbox.Ended)
	default:
		end := f.b.WantEnd(t, time.Minute, sandbox.Infra)
		t.Logf("its end: %v", end)
	}
	holds(t, "the parent", f.parent, f.hash)
	holds(t, "a grandchild", kids[1], touched)
	if err := w.Verify(t.Context(), f.snap); err != nil {
		t.Error(err)
	}
	holds(t, "a child made after all that", w.Create(t, world.From(f.snap)), f.hash)
}

// flip turns one bit in each 64 KiB of a file, or turns it back.
func flip(t *testing.T, f *os.File) {
	t.Helper()
	st, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 1)
	for at := int64(4000); at < st.Size(); at += 64 << 10 {
		if _, err := f.ReadAt(b, at); err != nil {
			t.Fatal(err)
		}
		b[0] ^= 1
		if _, err := f.WriteAt(b, at); err != nil {
			t.Fatal(err)
		}
	}
}

// Children outlive the server, their parent and the snapshot, and can all that a sandbox can.
func TestSharedPagesOutlived(t *testing.T) {
	w := world.New(t, world.Options{})
	f := newFamily(t, w)
	touched := told(t, f.a, "touch")
	w.Kill(t)
	w.Start(t)
	holds(t, "a child after a death of the server", f.a, touched)
	kids, err := f.a.TryFork(t.Context(), 2, nil)
	if err != nil {
		t.Fatal(err)
	}
	of := f.a.Snapshot(t, world.Take{Kind: sandbox.MemorySnapshot}).ID
	f.b.Pause(t, true)
	holds(t, "a child that woke", f.b, f.hash)

	// Their parent, and what they were made of: what nobody refers to is collected with it.
	if _, err := f.parent.TryKill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := w.DeleteSnapshot(t.Context(), f.snap); err != nil {
		t.Fatal(err)
	}
	holds(t, "a child without its parent", f.a, touched)
	holds(t, "a child of a child", kids[0], touched)
	last := told(t, kids[1], "touch")
	w.Kill(t)
	w.Start(t)
	holds(t, "a child of a child", kids[1], last)
	holds(t, "a child of what was taken of a child", w.Create(t, world.From(of)), touched)
	if err := f.a.TryRestore(t.Context(), of); err != nil {
		t.Fatal(err)
	}
	holds(t, "a child that was rolled back", f.a, touched)
	kids[0].Reset(t)
	if got := kids[0].Must(t, "ls /tmp"); got != "" {
		t.Errorf("a child that was reset has %q", got)
	}
	for _, k := range kids {
		if _, err := k.TryKill(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	w.Forget(t)
	w.AssertNoLitter(t)
}

// With keys, what children share is never on disk.
func TestSharedPagesEncrypted(t *testing.T) {
	key := seal.NewKey()
	file := filepath.Join(t.TempDir(), "keys")
	writeKeys(t, file, key)
	w := world.New(t, world.Options{Flags: []string{"--state-keys", file}, Keys: seal.NewKeyring(key)})
	parent := w.Create(t, world.Small())
	hold(t, parent)
	random := seal.NewKey()
	word := "word-" + hex.EncodeToString(random[:])
	hash := told(t, parent, hex.EncodeToString([]byte(word)))
	snap := parent.Snapshot(t, world.Take{Kind: sandbox.MemorySnapshot}).ID
	kids, err := parent.TryFork(t.Context(), 2, nil)
	if err != nil {
		t.Fatal(err)
	}
	kids = append(kids, w.Create(t, world.From(snap)))
	look := func(when string) {
		t.Helper()
		dirs, err := os.ReadDir(w.Dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range dirs {
			if d.Name() == "images" { // which nothing here makes, and which are large
				continue
			}
			if found := holders(t, filepath.Join(w.Dir, d.Name()), word); len(found) > 0 {
				t.Errorf("%s: what is in memory alone is on disk in %s: %v", when, d.Name(), found)
			}
		}
		for i, k := range kids {
			holds(t, fmt.Sprintf("%s: child %d", when, i), k, hash)
		}
	}
	look("while children live")
	kids[0].Pause(t, true)
	more := kids[1].Snapshot(t, world.Take{Kind: sandbox.MemorySnapshot}).ID
	look("when one slept and one was kept")
	w.Kill(t)
	w.Start(t)
	look("after a death of the server")
	kids = append(kids, w.Create(t, world.From(more)))
	look("of what was kept of a child")
}

// Snapshots that continue each other do not grow for ever. Of "make soak-origins";
// TestLineageIsBounded of node/agent has the rule.
func TestSnapshotChainBound(t *testing.T) {
	if !soaking {
		t.Skip("takes dozens of snapshots: COVE_SOAK=1")
	}
	w := world.New(t, world.Options{})
	b := w.Create(t, world.Small())
	hold(t, b)
	b.Snapshot(t, world.Take{Kind: sandbox.MemorySnapshot})
	first := pagesFiles(t, w)
	if len(first) != 1 {
		t.Fatalf("kept as files: %v", first)
	}
	whole, err := os.Stat(first[0])
	if err != nil {
		t.Fatal(err)
	}
	size := whole.Size() // it grows under its name
	for n := 1; ; n++ {
		hash := told(t, b, "touch")
		id := b.Snapshot(t, world.Take{Kind: sandbox.MemorySnapshot}).ID
		anew := false
		for _, f := range pagesFiles(t, w) {
			st, err := os.Stat(f)
			if err != nil {
				t.Fatal(err)
			}
			// Twice the whole, 64 MiB, and one more: docs/state.md.
			if st.Size() > 3*size+64<<20 {
				t.Fatalf("pages of %d MiB take %d MiB", size>>20, st.Size()>>20)
			}
			anew = anew || !os.SameFile(st, whole)
		}
		if anew || n == 60 {
			if !anew || n == 1 {
				t.Errorf("after %d snapshots one began anew: %v", n, anew)
			}
			holds(t, "a child of the last", w.Create(t, world.From(id)), hash)
			return
		}
	}
}
