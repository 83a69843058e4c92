package e2e

import (
	"context"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/e2e/world"
	"github.com/cove-sandbox/cove/internal/testbin"
	"github.com/cove-sandbox/cove/sandbox"
)

// wantError demands a class, a hint, and words in message or hint.
func wantError(t *testing.T, what string, err error, class sandbox.Class, words ...string) {
	t.Helper()
	var e *sandbox.Error
	if !errors.As(err, &e) || e.Class != class {
		t.Errorf("%s: %v (%s), want %s", what, err, sandbox.ClassOf(err), class)
		return
	}
	for _, w := range words {
		if !strings.Contains(e.Error()+" "+e.Hint, w) {
			t.Errorf("%s: %q, hint %q: no word of %q", what, e.Error(), e.Hint, w)
		}
	}
	if e.Hint == "" && class != sandbox.Corrupt {
		t.Errorf("%s: %q has no hint", what, e.Error())
	}
}

// stateCalls are the ways to take the state of a sandbox.
var stateCalls = []struct {
	name string
	call func(context.Context, *world.Box) error
}{
	{"memory", func(ctx context.Context, b *world.Box) error {
		_, err := b.TrySnapshot(ctx, world.Take{Kind: sandbox.MemorySnapshot})
		return err
	}},
	{"filesystem", func(ctx context.Context, b *world.Box) error {
		_, err := b.TrySnapshot(ctx, world.Take{Kind: sandbox.FilesystemSnapshot})
		return err
	}},
	{"directory", func(ctx context.Context, b *world.Box) error {
		_, err := b.TrySnapshot(ctx, world.Take{Kind: sandbox.DirectorySnapshot, Path: "/d"})
		return err
	}},
	{"fork", func(ctx context.Context, b *world.Box) error {
		_, err := b.TryFork(ctx, 2, nil)
		return err
	}},
	{"hot", func(ctx context.Context, b *world.Box) error { return b.TryPause(ctx, false) }},
	{"cold", func(ctx context.Context, b *world.Box) error { return b.TryPause(ctx, true) }},
}

// TestStateSentryDies ends the kernel of a sandbox while its state is taken.
func TestStateSentryDies(t *testing.T) {
	w := world.New(t, world.Options{})
	neighbour := w.Neighbour(t)
	const rounds = 3
	for _, c := range stateCalls {
		t.Run(c.name, func(t *testing.T) {
			neighbour.During(t)
			for range rounds {
				b := w.Create(t, world.Small())
				b.Must(t, "mkdir /d && head -c 24M /dev/urandom > /d/f && cp /d/f /dev/shm/f && echo here > /d/marker")
				pid := w.Kernels()[w.KernelOf(t, b.ID)]
				if pid == 0 {
					t.Fatalf("no kernel of %s", b.ID)
				}
				done := make(chan error, 1)
				go func() { done <- c.call(context.Background(), b) }()
				time.Sleep(time.Duration(mathrand.Int64N(int64(150 * time.Millisecond))))
				if err := unix.Kill(pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
					t.Fatal(err)
				}
				err := <-done
				switch class := sandbox.ClassOf(err); {
				case err == nil && c.name == "cold":
					if got := b.Must(t, "cat /d/marker"); got != "here" {
						t.Errorf("woke with %q", got)
					}
					continue
				case err != nil && class != sandbox.Ended:
					t.Errorf("the kernel died amid %s: %v (%s), want %s", c.name, err, class, sandbox.Ended)
				}
				b.WantEnd(t, 30*time.Second, sandbox.Infra)
			}
		})
	}
	for _, s := range w.Snapshots(t) {
		if err := w.Verify(t.Context(), s.ID); err != nil {
			t.Errorf("snapshot %s: %v", s.ID, err)
		}
	}
	w.AssertReconciled(t)
	w.AssertNoLitter(t)
}

// smallDisk is a file system of its own.
func smallDisk(t *testing.T, size int64) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o711); err != nil { // sentries run as nobody and walk through
		t.Fatal(err)
	}
	// Short: sockets below it have names of at most 107 bytes.
	at, err := os.MkdirTemp("", "cove-disk-")
	if err != nil {
		t.Fatal(err)
	}
	img := filepath.Join(dir, "disk.img")
	run := func(name string, args ...string) {
		t.Helper()
		if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
			t.Fatalf("%s %v: %v\n%s", name, args, err, out)
		}
	}
	f, err := os.Create(img)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(f.Truncate(size), f.Close()); err != nil {
		t.Fatal(err)
	}
	run("mkfs.ext4", "-q", "-m", "0", "-E", "lazy_itable_init=1", img)
	run("mount", "-o", "loop", img, at)
	t.Cleanup(func() {
		if out, err := exec.Command("umount", at).CombinedOutput(); err != nil {
			t.Errorf("umount %s: %v %s", at, err, out)
			return
		}
		if err := os.Remove(at); err != nil {
			t.Error(err)
		}
	})
	if err := os.Chmod(at, 0o711); err != nil {
		t.Fatal(err)
	}
	return at
}

func freeOn(t *testing.T, dir string) int64 {
	t.Helper()
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		t.Fatal(err)
	}
	return int64(st.Bavail) * st.Bsize
}

// fillDisk leaves so many bytes free, until the returned function is called.
func fillDisk(t *testing.T, dir string, leave int64) (empty func()) {
	t.Helper()
	f, err := os.Create(filepath.Join(dir, "ballast"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for size := int64(0); ; {
		more := freeOn(t, dir) - leave
		if more < 1<<20 {
			break
		}
		if err := unix.Fallocate(int(f.Fd()), 0, size, more); errors.Is(err, unix.ENOSPC) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		size += more
	}
	return func() {
		if err := os.Remove(f.Name()); err != nil {
			t.Fatal(err)
		}
	}
}

// TestStateDiskFull takes state where there is no room for it: at the first
// byte, amid the checkpoint, and amid the copy into the store.
func TestStateDiskFull(t *testing.T) {
	disk := smallDisk(t, 4<<30)
	w := world.New(t, world.Options{In: disk})
	b := w.Create(t, world.Small())
	// Random, so that nothing makes it smaller. 8 MiB a call, for it is twice in
	// the sandbox: files and memory.
	b.Must(t, "mkdir /d && head -c 24M /dev/urandom > /d/f && cp /d/f /dev/shm/f && echo here > /d/marker")
	// The first checkpoint of all keeps the programs too.
	if err := w.DeleteSnapshot(t.Context(), b.Snapshot(t, world.Take{Kind: sandbox.MemorySnapshot}).ID); err != nil {
		t.Fatal(err)
	}
	for _, leave := range []int64{0, 12 << 20, 70 << 20} {
		for _, c := range stateCalls {
			if c.name == "hot" || leave > 64<<20 && c.name != "memory" && c.name != "cold" {
				continue // needs no room, or has enough
			}
			t.Run(fmt.Sprintf("%s with %d MiB", c.name, leave>>20), func(t *testing.T) {
				empty := fillDisk(t, disk, leave)
				defer empty()
				before := freeOn(t, disk)
				wantError(t, c.name, c.call(t.Context(), b), sandbox.DiskFull)
				// A sentry lets go of its file a moment after its answer.
				freed := func() bool { return freeOn(t, disk) >= before-2<<20 }
				for until := time.Now().Add(10 * time.Second); !freed(); time.Sleep(50 * time.Millisecond) {
					if time.Now().After(until) {
						held, _ := exec.Command("sh", "-c", "du -a --block-size=1K "+disk+" | sort -n | tail -12; ls -l /proc/[0-9]*/fd 2>/dev/null | grep "+disk+".*deleted").CombinedOutput()
						t.Fatalf("%d of %d bytes are free again; there are\n%s", freeOn(t, disk), before, held)
					}
				}
				if got := b.Must(t, "cat /d/marker; cmp /d/f /dev/shm/f && echo same"); got != "here\nsame" {
					t.Errorf("the source answers %q", got)
				}
				if sb := b.Get(t); sb.Standby != sandbox.Awake || sb.State != sandbox.Running {
					t.Errorf("the source is %s %s", sb.State, sb.Standby)
				}
			})
		}
	}
	if n := len(w.Snapshots(t)); n > 0 {
		t.Errorf("%d snapshots are listed and none was made", n)
	}
	// Awake needs no room, from memory; from disk only as far as its files are not kept
	// ready, and it says so: it is awake as it was, or cold as it was.
	b.Pause(t, false)
	empty := fillDisk(t, disk, 0)
	if got := b.Must(t, "cat /d/marker"); got != "here" {
		t.Errorf("woken on a full disk it holds %q", got)
	}
	empty()
	b.Pause(t, true)
	empty = fillDisk(t, disk, 0)
	if err := b.TryResume(t.Context()); err == nil {
		if got := b.Must(t, "cmp /d/f /dev/shm/f && cat /d/marker"); got != "here" {
			t.Errorf("woken from disk without room it holds %q", got)
		}
	} else {
		wantError(t, "wake", err, sandbox.DiskFull)
		if sb := b.Get(t); sb.Standby != sandbox.Cold || sb.State != sandbox.Running {
			t.Errorf("one that found no room to wake is %s %q", sb.State, sb.Standby)
		}
	}
	empty()
	// With room all of it works, once the node has seen that there is.
	for _, c := range stateCalls {
		world.Eventually(t, 30*time.Second, c.name+", with room again", func() bool {
			err := c.call(t.Context(), b)
			// It looks every five seconds, and admits nothing until then.
			if class := sandbox.ClassOf(err); err != nil && class != sandbox.DiskFull && class != sandbox.NoCapacity {
				t.Errorf("%s, with room again: %v", c.name, err)
			}
			return err == nil
		})
	}
	if sb := b.Get(t); sb.Standby != sandbox.Cold {
		t.Errorf("the source is %q, want it cold", sb.Standby)
	}
	if got := b.Must(t, "cmp /d/f /dev/shm/f && cat /d/marker"); got != "here" {
		t.Errorf("woken from disk it holds %q", got)
	}
	w.AssertReconciled(t)
	w.AssertNoLitter(t)
}

// TestStateCorrupt flips a byte in every file of three snapshots in turn.
func TestStateCorrupt(t *testing.T) {
	w := world.New(t, world.Options{})
	take := func(b *world.Box) (snaps []sandbox.Snapshot) {
		b.Must(t, "mkdir /d && head -c 200k /dev/urandom > /d/f && head -c 200k /dev/urandom > /d/g && sync")
		for _, k := range []world.Take{{Kind: sandbox.MemorySnapshot}, {Kind: sandbox.FilesystemSnapshot}, {Kind: sandbox.DirectorySnapshot, Path: "/d"}} {
			snaps = append(snaps, b.Snapshot(t, k))
		}
		return snaps
	}
	bad, good := take(w.Create(t, world.Small())), take(w.Create(t, world.Small()))
	host := w.Create(t, world.Small())
	use := func(s sandbox.Snapshot) error {
		if s.Kind == sandbox.DirectorySnapshot {
			if err := host.TryMount(t.Context(), s.ID, "/m-"+s.ID, false); err != nil {
				return err
			}
			return host.TryMount(t.Context(), s.ID, "/u-"+s.ID, true)
		}
		b, err := w.TryCreate(t.Context(), world.From(s.ID), "")
		if err == nil {
			_, err = b.TryKill(t.Context())
		}
		return err
	}
	w.Stop(t)
	shared := map[string]bool{}
	for _, s := range good {
		for _, id := range w.BlobsOf(t, s.ID) {
			shared[id] = true
		}
	}
	tried := 0
	for _, s := range bad {
		for _, id := range w.BlobsOf(t, s.ID) {
			if shared[id] {
				continue // of the base system; breaking it would break both
			}
			tried++
			t.Run(fmt.Sprintf("%s %.15s", s.Kind, id), func(t *testing.T) {
				flip := w.FlipByte(t, id)
				w.Start(t)
				wantError(t, "verify", w.Verify(t.Context(), s.ID), sandbox.Corrupt, id)
				wantError(t, "use", use(s), sandbox.Corrupt, id)
				for _, other := range good[:1+tried%2] {
					if err := w.Verify(t.Context(), other.ID); err != nil {
						t.Errorf("another snapshot: %v", err)
					}
					if err := use(other); err != nil {
						t.Errorf("another snapshot: %v", err)
					}
				}
				w.Stop(t)
				flip()
			})
		}
	}
	if tried < 6 {
		t.Errorf("only %d files to break", tried)
	}
	w.Start(t)
	for _, s := range append(bad, good...) {
		if err := w.Verify(t.Context(), s.ID); err != nil {
			t.Errorf("mended, %s: %v", s.Kind, err)
		}
		if err := use(s); err != nil {
			t.Errorf("mended, %s: %v", s.Kind, err)
		}
	}
	w.Forget(t)
	w.AssertNoLitter(t)
}

// TestStateUpgrade starts the server with another gVisor and another guest: what
// ran goes on, what was saved too, with the programs it had. Without those its
// files are left.
func TestStateUpgrade(t *testing.T) {
	w := world.New(t, world.Options{})
	b := w.Create(t, world.Small())
	b.Must(t, "echo here > /marker; echo here > /dev/shm/marker")
	files := b.Snapshot(t, world.Take{Kind: sandbox.FilesystemSnapshot})
	memory := b.Snapshot(t, world.Take{Kind: sandbox.MemorySnapshot})
	asleep := w.Create(t, world.Small())
	asleep.Must(t, "echo asleep > /dev/shm/marker")
	asleep.Pause(t, true)
	programs := func() (names []string) {
		t.Helper()
		for _, pattern := range []string{"runsc-*", "guest-*"} {
			found, err := filepath.Glob(filepath.Join(w.Dir, "gvisor", pattern))
			if err != nil {
				t.Fatal(err)
			}
			names = append(names, found...)
		}
		return names
	}
	earlier := programs()
	if len(earlier) != 2 {
		t.Fatalf("kept are %q", earlier)
	}

	w.Stop(t)
	w.SetFlags("--guest", testbin.LaterGuest(t), "--runsc", testbin.LaterRunsc(t))
	w.Start(t)
	c, err := w.TryCreate(t.Context(), world.From(memory.ID), "")
	if err != nil {
		t.Fatalf("from memory of before: %v", err)
	}
	if got := c.Must(t, "cat /dev/shm/marker"); got != "here" {
		t.Errorf("from memory of before: %q", got)
	}
	if got := asleep.Must(t, "cat /dev/shm/marker"); got != "asleep" {
		t.Errorf("asleep over the upgrade: %q", got)
	}
	asleep.Pause(t, true)
	b.Must(t, "echo changed > /dev/shm/marker")
	forked, err := b.TryFork(t.Context(), 2, nil)
	if err != nil {
		t.Fatalf("fork of one that runs since before: %v", err)
	}
	for _, f := range forked {
		if got := f.Must(t, "cat /dev/shm/marker"); got != "changed" {
			t.Errorf("a fork of one that runs since before: %q", got)
		}
	}
	b.Pause(t, true)
	if got := b.Must(t, "cat /dev/shm/marker"); got != "changed" {
		t.Errorf("woken in its own programs: %q", got)
	}
	if err := b.TryRestore(t.Context(), memory.ID); err != nil {
		t.Errorf("back to memory of before, in place: %v", err)
	}
	if got := b.Must(t, "cat /dev/shm/marker"); got != "here" {
		t.Errorf("back to memory of before, in place: %q", got)
	}

	// Without them it says so, and names what still works.
	w.Stop(t)
	away := t.TempDir()
	for _, p := range earlier {
		if err := os.Rename(p, filepath.Join(away, filepath.Base(p))); err != nil {
			t.Fatal(err)
		}
	}
	w.Start(t)
	_, err = w.TryCreate(t.Context(), world.From(memory.ID), "")
	wantError(t, "create", err, sandbox.Precondition, "not kept", "filesystem", "cove create --snapshot")
	wantError(t, "restore in place", b.TryRestore(t.Context(), memory.ID), sandbox.Precondition, "filesystem")
	if got := b.Must(t, "cat /dev/shm/marker"); got != "here" {
		t.Errorf("after a refused restore the sandbox holds %q", got)
	}
	wantError(t, "cold", b.TryPause(t.Context(), true), sandbox.Precondition, "filesystem")
	wantError(t, "wake", asleep.TryResume(t.Context()), sandbox.Precondition, "not kept")
	if sb := asleep.Get(t); sb.State != sandbox.Running || sb.Standby != sandbox.Cold {
		t.Errorf("one that cannot wake is %s %s", sb.State, sb.Standby)
	}
	d, err := w.TryCreate(t.Context(), world.From(files.ID), "")
	if err != nil {
		t.Fatalf("from the files: %v", err)
	}
	if got := d.Must(t, "cat /marker"); got != "here" {
		t.Errorf("from the files: %q", got)
	}
	w.Stop(t)
	for _, p := range earlier {
		if err := os.Rename(filepath.Join(away, filepath.Base(p)), p); err != nil {
			t.Fatal(err)
		}
	}

	// When nothing needs them any more they go.
	w.Start(t)
	if got := asleep.Must(t, "cat /dev/shm/marker"); got != "asleep" {
		t.Errorf("with its programs again: %q", got)
	}
	w.Stop(t)
	w.Start(t)
	w.Forget(t)
	world.Eventually(t, 30*time.Second, "programs that nothing needs are removed", func() bool {
		return !slices.ContainsFunc(programs(), func(p string) bool { return slices.Contains(earlier, p) })
	})
	w.AssertReconciled(t)
	w.AssertNoLitter(t)
}
