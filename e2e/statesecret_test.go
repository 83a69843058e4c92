package e2e

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/e2e/world"
	"github.com/cove-sandbox/cove/internal/seal"
	"github.com/cove-sandbox/cove/sandbox"
)

// holders are the files below dir that have marker in them.
func holders(t *testing.T, dir, marker string) (found []string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err == nil && e.IsDir() && path == filepath.Join(dir, "networks") {
			return fs.SkipDir // namespaces, which are no files
		}
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		if filepath.Base(filepath.Dir(path)) == "networks" { // a namespace is mounted on it
			return nil
		}
		has, err := contains(path, []byte(marker))
		if errors.Is(err, fs.ErrNotExist) {
			return nil // it went meanwhile
		}
		if has {
			rel, _ := filepath.Rel(dir, path)
			found = append(found, rel)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// contains says whether a file has marker in it. Holes are not read: layers of sandboxes are
// large, and mostly holes.
func contains(path string, marker []byte) (bool, error) {
	f, err := os.Open(path)
	if err != nil {
		return false, err
	}
	defer f.Close()
	for at := int64(0); ; {
		begin, err := f.Seek(at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return false, nil
		} else if err != nil {
			return false, err
		}
		if at, err = f.Seek(begin, unix.SEEK_HOLE); err != nil {
			return false, err
		}
		b := make([]byte, at-begin)
		n, err := f.ReadAt(b, begin)
		if err != nil && !errors.Is(err, io.EOF) {
			return false, err
		}
		if bytes.Contains(b[:n], marker) {
			return true, nil
		}
	}
}

// writeKeys makes a key file, the first key the active one.
func writeKeys(t *testing.T, path string, keys ...[seal.KeySize]byte) {
	t.Helper()
	var b strings.Builder
	for _, k := range keys {
		fmt.Fprintln(&b, hex.EncodeToString(k[:]))
	}
	if err := os.WriteFile(path, []byte(b.String()), 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestStateEncrypted puts a marker into memory, files and variables of a
// sandbox, takes its state in every way, and reads the disk.
func TestStateEncrypted(t *testing.T) {
	first, second := seal.NewKey(), seal.NewKey()
	ring := seal.NewKeyring(second, first)
	file := filepath.Join(t.TempDir(), "keys")
	writeKeys(t, file, first)
	w := world.New(t, world.Options{Flags: []string{"--state-keys", file}, Keys: ring})
	fresh := seal.NewKey()
	marker, env := "marker-"+hex.EncodeToString(fresh[:16]), "env-"+hex.EncodeToString(fresh[16:])
	spec := world.Small()
	spec.Env = map[string]string{"SECRET": env}
	b := w.Create(t, spec)
	b.Write(t, "/d/file", []byte(marker))
	b.Must(t, "cp /d/file /dev/shm/file; (x=$(cat /d/file); sleep 100000; echo $x) >/dev/null 2>&1 </dev/null &")
	var snaps []sandbox.Snapshot
	for _, k := range []world.Take{{Kind: sandbox.MemorySnapshot}, {Kind: sandbox.FilesystemSnapshot}, {Kind: sandbox.DirectorySnapshot, Path: "/d"}} {
		snaps = append(snaps, b.Snapshot(t, k))
	}
	asleep := func() *world.Box {
		kids, err := b.TryFork(t.Context(), 1, nil)
		if err != nil {
			t.Fatal(err)
		}
		kids[0].Pause(t, true)
		return kids[0]
	}
	cold := asleep()
	if w.Blobs() == 0 {
		t.Fatal("nothing was stored")
	}
	look := func(what string) {
		t.Helper()
		for _, f := range holders(t, w.Dir, marker) {
			if top, _, _ := strings.Cut(f, "/"); top != "gvisor" && top != "images" { // the live layer; see docs/security-boundary.md
				t.Errorf("%s: the marker is in %s", what, f)
			}
		}
		for _, f := range holders(t, w.Dir, env) { // variables are part of the record
			if !strings.HasPrefix(f, "cove.db") && f != "node/journal" && !strings.HasPrefix(f, "gvisor/") {
				t.Errorf("%s: the variable is in %s", what, f)
			}
		}
		if left, _ := filepath.Glob(filepath.Join(w.Dir, "checkpoints", "*")); len(left) > 0 {
			t.Errorf("%s: plain checkpoints on disk: %v", what, left)
		}
		if left, _ := filepath.Glob(w.MemoryDir() + "/*"); len(left) > 0 {
			t.Errorf("%s: plain checkpoints in memory: %v", what, left)
		}
	}
	look("at rest")
	use := func(what string) {
		t.Helper()
		c, err := w.TryCreate(t.Context(), world.From(snaps[0].ID), "")
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if got := c.Must(t, "cat /d/file /dev/shm/file"); got != marker+marker {
			t.Errorf("%s: %q", what, got)
		}
		if _, err := c.TryKill(t.Context()); err != nil {
			t.Error(err)
		}
		if got := cold.Must(t, "cat /dev/shm/file"); got != marker {
			t.Errorf("%s: woken with %q", what, got)
		}
		cold.Pause(t, true)
	}
	use("with the key")
	look("after use")
	w.Stop(t)
	if _, err := os.Stat(w.MemoryDir()); err == nil {
		t.Errorf("%s is there after a stop", w.MemoryDir())
	}
	writeKeys(t, file, second, first)
	w.Start(t)
	use("after a rotation")
	later := b.Snapshot(t, world.Take{Kind: sandbox.FilesystemSnapshot})
	w.Stop(t)
	writeKeys(t, file, second)
	w.Start(t)
	// What was sealed with a key that is gone says which.
	sum := sha256.Sum256(first[:])
	_, err := w.TryCreate(t.Context(), world.From(snaps[0].ID), "")
	wantError(t, "create without the key", err, sandbox.Precondition, hex.EncodeToString(sum[:8]))
	wantError(t, "verify without the key", w.Verify(t.Context(), snaps[0].ID), sandbox.Precondition, hex.EncodeToString(sum[:8]))
	_ = later
	writeKeys(t, file, second, first)
	w.Restart(t)
	use("with both again")
	look("in the end")
	w.AssertNoLitter(t)
}

// TestPlainOfEncryptedGoes starts from and mounts what is encrypted, which puts
// it on disk in plain for that time, and reads the disk when the sandboxes are
// gone.
func TestPlainOfEncryptedGoes(t *testing.T) {
	key := seal.NewKey()
	file := filepath.Join(t.TempDir(), "keys")
	writeKeys(t, file, key)
	w := world.New(t, world.Options{Flags: []string{"--state-keys", file}, Keys: seal.NewKeyring(key)})
	fresh := seal.NewKey()
	marker := "marker-" + hex.EncodeToString(fresh[:16])
	b := w.Create(t, world.Small())
	b.Write(t, "/d/file", []byte(marker))
	files := b.Snapshot(t, world.Take{Kind: sandbox.FilesystemSnapshot})
	dir := b.Snapshot(t, world.Take{Kind: sandbox.DirectorySnapshot, Path: "/d"})
	kill := func(boxes ...*world.Box) {
		t.Helper()
		for _, b := range boxes {
			if _, err := b.TryKill(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	}
	clean := func(when string) {
		t.Helper()
		found := holders(t, w.Dir, marker)
		for until := time.Now().Add(20 * time.Second); len(found) > 0 && time.Now().Before(until); found = holders(t, w.Dir, marker) {
			<-time.After(50 * time.Millisecond)
		}
		if len(found) > 0 {
			t.Errorf("%s: the marker is in %v", when, found)
		}
	}
	kill(b)
	clean("at rest")

	from, err := w.TryCreate(t.Context(), world.From(files.ID), "")
	if err != nil {
		t.Fatal(err)
	}
	host := w.Create(t, world.Small())
	if err := host.TryMount(t.Context(), dir.ID, "/m", false); err != nil {
		t.Fatal(err)
	}
	for _, b := range []*world.Box{from, host} {
		b.Pause(t, true)
	}
	if left, _ := filepath.Glob(filepath.Join(w.Dir, "node", "mounts", "*")); len(left) > 0 {
		t.Errorf("mounted in what is cold: %v", left)
	}
	w.Restart(t)
	if got := from.Must(t, "cat /d/file") + host.Must(t, "cat /m/file"); got != marker+marker {
		t.Errorf("woken with %q", got)
	}
	kill(from, host)
	clean("after use")

	// Killed while they are in use, which then end while nobody looks; and with
	// another key nothing starts from what is left.
	if _, err = w.TryCreate(t.Context(), world.From(files.ID), ""); err != nil {
		t.Fatal(err)
	}
	if len(holders(t, filepath.Join(w.Dir, "images"), marker)) == 0 {
		t.Error("no prepared image: the test shows nothing")
	}
	w.Kill(t)
	for k, pid := range w.Kernels() {
		t.Log("killing kernel", k)
		if p, err := os.FindProcess(pid); err == nil {
			_ = p.Kill()
		}
	}
	writeKeys(t, file, seal.NewKey())
	w.Start(t)
	clean("after a start with another key")
	sum := sha256.Sum256(key[:])
	_, err = w.TryCreate(t.Context(), world.From(files.ID), "")
	wantError(t, "create with another key", err, sandbox.Precondition, hex.EncodeToString(sum[:8]))
	writeKeys(t, file, key)
	w.Restart(t)
	w.AssertNoLitter(t)
}

// TestStatePlainLeft gives keys to a server that was killed without: what it
// had in plain on disk must go.
func TestStatePlainLeft(t *testing.T) {
	w := world.New(t, world.Options{})
	b := w.Create(t, world.Small())
	b.Must(t, "echo x > /dev/shm/x")
	b.Snapshot(t, world.Take{Kind: sandbox.MemorySnapshot})
	plain := filepath.Join(w.Dir, "checkpoints", "*")
	if left, _ := filepath.Glob(plain); len(left) == 0 {
		t.Fatal("no plain checkpoint is kept: the test shows nothing")
	}
	w.Kill(t)
	file := filepath.Join(t.TempDir(), "keys")
	writeKeys(t, file, seal.NewKey())
	w.SetFlags("--state-keys", file)
	w.Start(t)
	if left, _ := filepath.Glob(plain); len(left) > 0 {
		t.Errorf("with keys, plain checkpoints are on disk: %v", left)
	}
	w.Kill(t)
	if err := os.MkdirAll(filepath.Join(w.MemoryDir(), "left"), 0o700); err != nil {
		t.Fatal(err)
	}
	w.SetFlags()
	w.Start(t)
	if _, err := os.Stat(w.MemoryDir()); err == nil {
		t.Error("without keys, plain checkpoints are in memory")
	}
	w.AssertNoLitter(t)
}
