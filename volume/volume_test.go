package volume

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/sandbox"
)

const mib = 1 << 20

func needHost(t testing.TB) {
	t.Helper()
	if err := Supported(); err != nil {
		t.Skipf("this host cannot have volumes: %v", err)
	}
}

// open opens a Set and checks in the end that the host has nothing left of it.
func open(t *testing.T, dir string, o Options) *Set {
	t.Helper()
	needHost(t)
	if o.Linger == 0 {
		o.Linger = -1
	}
	s, err := Open(t.Context(), dir, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
			t.Errorf("close: %v", err)
		}
	})
	return s
}

func tempDir(t *testing.T) string {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { checkHost(t, dir) })
	return dir
}

// checkHost fails for mounts and loop devices below dir, and takes them away.
func checkHost(t *testing.T, dir string) {
	t.Helper()
	points, err := mountPoints(dir)
	if err != nil {
		t.Error(err)
	}
	for _, p := range points {
		t.Errorf("a mount is left: %s", p)
		_ = thaw(p)
		_ = unix.Unmount(p, unix.MNT_DETACH)
	}
	for _, l := range loopsBelow(t, dir) {
		t.Errorf("a loop device is left: %s", l)
	}
}

// loopsBelow waits for loop devices that are on their way out: a clear is
// finished by a worker of the kernel.
func loopsBelow(t *testing.T, dir string) (left []string) {
	t.Helper()
	for range 2000 { // 20 s: the kernel lets go in its own time
		all, err := loops()
		if err != nil {
			t.Fatal(err)
		}
		left = nil
		for n, f := range all {
			if strings.HasPrefix(f, dir+"/") {
				left = append(left, fmt.Sprintf("/dev/loop%d of %s", n, f))
			}
		}
		if len(left) == 0 {
			return nil
		}
		time.Sleep(10 * time.Millisecond)
	}
	return left
}

// checkFiles fails for files that are not of the volumes of s.
func checkFiles(t *testing.T, s *Set) {
	t.Helper()
	want := []string{}
	vs, err := s.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range vs {
		want = append(want, v.ID+".img", v.ID+".json")
	}
	slices.Sort(want)
	if got := names(t, filepath.Join(s.dir, "v")); !slices.Equal(got, want) {
		t.Errorf("v has %v, want %v", got, want)
	}
	if got := names(t, filepath.Join(s.dir, "tmp")); len(got) > 0 {
		t.Errorf("tmp has %v", got)
	}
	for _, n := range names(t, filepath.Join(s.dir, "mnt")) {
		if v, err := s.Get(t.Context(), n); err != nil || len(v.Holders) == 0 {
			t.Errorf("mnt has %s", n)
		}
	}
}

func names(t *testing.T, dir string) (out []string) {
	t.Helper()
	ents, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range ents {
		out = append(out, e.Name())
	}
	return out
}

func create(t *testing.T, s *Set, name string, size int64) Volume {
	t.Helper()
	v, err := s.Create(t.Context(), name, size)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func put(t *testing.T, s *Set, ref, path, content string) {
	t.Helper()
	if _, err := s.Put(t.Context(), ref, path, strings.NewReader(content), PutOptions{Parents: true}); err != nil {
		t.Fatal(err)
	}
}

func get(t *testing.T, s *Set, ref, path string) string {
	t.Helper()
	r, _, err := s.GetFile(t.Context(), ref, path)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	b, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func expectClass(t *testing.T, what string, err error, want sandbox.Class) {
	t.Helper()
	if got := sandbox.ClassOf(err); got != want {
		t.Errorf("%s: %v (%q), want %q", what, err, got, want)
	}
}

func hasCap(t *testing.T, c int) bool {
	t.Helper()
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		t.Fatal(err)
	}
	return data[c/32].Effective&(1<<(c%32)) != 0
}

func TestLife(t *testing.T) {
	dir := tempDir(t)
	s := open(t, dir, Options{})
	v := create(t, s, "data", 64*mib)
	if v.Size != 64*mib || v.ID != "data" || v.Old != nil {
		t.Errorf("%+v", v)
	}
	if v.Used > 8*mib {
		t.Errorf("an empty volume takes %d bytes", v.Used)
	}
	put(t, s, "data", "/a/b", "kept")
	_, err := s.Create(t.Context(), "data", 64*mib)
	expectClass(t, "a taken id", err, sandbox.AlreadyExists)
	for _, bad := range []string{"", "-x", "A", "a/b", "../x", strings.Repeat("a", 128)} {
		_, err := s.Create(t.Context(), bad, 64*mib)
		expectClass(t, bad, err, sandbox.Invalid)
	}
	for _, bad := range []int64{0, -1, sandbox.MinVolume - 1, sandbox.MaxVolume + 1} {
		_, err := s.Create(t.Context(), "x", bad)
		expectClass(t, fmt.Sprint(bad), err, sandbox.Invalid)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	_, err = s.Create(t.Context(), "late", 64*mib)
	expectClass(t, "after close", err, sandbox.Unavailable)

	s = open(t, dir, Options{})
	if got := get(t, s, v.ID, "a/b"); got != "kept" {
		t.Errorf("after a restart: %q", got)
	}
	if vs, err := s.List(t.Context()); err != nil || len(vs) != 1 || vs[0].ID != "data" {
		t.Errorf("%+v %v", vs, err)
	}
	if err := s.Delete(t.Context(), "data"); err != nil {
		t.Fatal(err)
	}
	_, err = s.Get(t.Context(), "data")
	expectClass(t, "after delete", err, sandbox.NotFound)
	create(t, s, "data", 16*mib) // the id is free again
	if got := names(t, filepath.Join(dir, "v")); len(got) != 2 {
		t.Errorf("%v", got)
	}
	checkFiles(t, s)
}

// A volume of a set that kept names is as it was, and still says what it said.
func TestOldRecords(t *testing.T) {
	dir := tempDir(t)
	s := open(t, dir, Options{})
	create(t, s, "old1", 16*mib)
	put(t, s, "old1", "f", "kept")
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	old := `{"version":1,"id":"old1","name":"data.red_","size":16777216,"made":16777216,"created":"2026-02-03T04:05:06Z","from":"old0","labels":{"a":"b"}}`
	if err := os.WriteFile(filepath.Join(dir, "v", "old1.json"), []byte(old), 0o600); err != nil {
		t.Fatal(err)
	}
	s = open(t, dir, Options{})
	check := func() {
		t.Helper()
		v, err := s.Get(t.Context(), "old1")
		if err != nil || v.Old == nil || v.Old.Name != "data.red_" || v.Old.From != "old0" || v.Old.Labels["a"] != "b" || v.Old.Created.Month() != time.February {
			t.Errorf("%+v %v", v, err)
		}
	}
	check()
	if got := get(t, s, "old1", "f"); got != "kept" {
		t.Errorf("%q", got)
	}
	_, err := s.Get(t.Context(), "data.red_")
	expectClass(t, "by its old name", err, sandbox.NotFound)
	if _, err := s.Resize(t.Context(), "old1", 24*mib); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, dir, Options{})
	check() // a record that was written since says it too
}

func TestOneSetPerDirectory(t *testing.T) {
	dir := tempDir(t)
	open(t, dir, Options{})
	_, err := Open(t.Context(), dir, Options{})
	expectClass(t, "a second Set", err, sandbox.Precondition)
}

func TestCapacity(t *testing.T) {
	s := open(t, tempDir(t), Options{Capacity: 100 * mib})
	create(t, s, "a", 64*mib)
	_, err := s.Create(t.Context(), "b", 64*mib)
	expectClass(t, "over the capacity", err, sandbox.NoCapacity)
	_, err = s.Resize(t.Context(), "a", 128*mib)
	expectClass(t, "over the capacity", err, sandbox.NoCapacity)
	create(t, s, "b", 32*mib)
	if err := s.Delete(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	create(t, s, "c", 64*mib)
	checkFiles(t, s)
	disk := open(t, tempDir(t), Options{}) // as large as its disk
	_, err = disk.Create(t.Context(), "huge", sandbox.MaxVolume)
	expectClass(t, "more than the disk", err, sandbox.NoCapacity)
}

// The limit holds against root on the mount itself, and the host's file never
// grows over it.
func TestSizeLimit(t *testing.T) {
	s := open(t, tempDir(t), Options{})
	v := create(t, s, "small", 32*mib)
	host, err := s.Attach(t.Context(), v.ID, "sb", ReadWrite)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(filepath.Join(host, "big"))
	if err != nil {
		t.Fatal(err)
	}
	block, n := make([]byte, mib), 0
	for i := range block {
		block[i] = byte(i)
	}
	for err == nil && n < 64 {
		_, err = f.Write(block)
		n++
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Errorf("after %d MiB: %v", n, err)
	}
	if n < 20 || n > 32 {
		t.Errorf("%d MiB went into a volume of 32", n)
	}
	f.Close()
	_, err = s.Put(t.Context(), v.ID, "more", bytes.NewReader(make([]byte, 8*mib)), PutOptions{})
	expectClass(t, "put into a full volume", err, sandbox.DiskFull)
	if strings.Contains(err.Error(), host) {
		t.Errorf("the host's paths are in %q", err)
	}
	// There is no way to take a volume from a sandbox that runs.
	_, other := s.Attach(t.Context(), v.ID, "sb2", ReadWrite)
	_, again := s.Attach(t.Context(), v.ID, "sb", ReadOnly)
	for _, err := range []error{other, again, s.Delete(t.Context(), v.ID)} {
		expectClass(t, "held", err, sandbox.Precondition)
		var e *sandbox.Error
		if !errors.As(err, &e) || e.Hint == "" || strings.Contains(e.Hint, "detach") {
			t.Errorf("%v, hint %q", err, e.Hint)
		}
	}
	if got, _ := s.Get(t.Context(), v.ID); got.Used > 33*mib {
		t.Errorf("it takes %d bytes of the host", got.Used)
	}
	// Inodes are limited too.
	if err := os.Remove(filepath.Join(host, "big")); err != nil {
		t.Fatal(err)
	}
	for n = 0; n < 100_000; n++ {
		if err = os.WriteFile(filepath.Join(host, fmt.Sprint("i", n)), nil, 0o600); err != nil {
			break
		}
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Errorf("after %d files: %v", n, err)
	}
	// Grown, it takes more, without a detach.
	if _, err := s.Resize(t.Context(), v.ID, 128*mib); err != nil {
		if hasCap(t, unix.CAP_SYS_RESOURCE) {
			t.Fatal(err)
		}
		expectClass(t, "without the right to", err, sandbox.Precondition)
		if got, err := s.Get(t.Context(), v.ID); err != nil || got.Size != 32*mib {
			t.Errorf("what was refused is promised: %+v %v", got, err)
		}
		if err := s.Detach(t.Context(), v.ID, "sb"); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Resize(t.Context(), v.ID, 128*mib); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Attach(t.Context(), v.ID, "sb", ReadWrite); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Remove(filepath.Join(host, "i0")); err != nil { // an inode
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(host, "after"), make([]byte, 64*mib), 0o600); err != nil {
		t.Errorf("after growing: %v", err)
	}
	_, err = s.Resize(t.Context(), v.ID, 64*mib)
	expectClass(t, "shrinking", err, sandbox.Invalid)
	if err := s.Detach(t.Context(), v.ID, "sb"); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("e2fsck", "-fn", s.image(v.ID)).CombinedOutput(); err != nil {
		t.Errorf("e2fsck: %v\n%s", err, out)
	}
	if err := s.Delete(t.Context(), v.ID); err != nil {
		t.Fatal(err)
	}
	checkFiles(t, s)
}

// What is removed inside is the host's again.
func TestDiscard(t *testing.T) {
	s := open(t, tempDir(t), Options{})
	v := create(t, s, "d", 128*mib)
	put(t, s, v.ID, "big", strings.Repeat("0123456789abcdef", 4*mib))
	full, _ := s.Get(t.Context(), v.ID)
	if err := s.Remove(t.Context(), v.ID, "big", false); err != nil {
		t.Fatal(err)
	}
	empty, _ := s.Get(t.Context(), v.ID)
	if full.Used < 64*mib || empty.Used > full.Used-60*mib {
		t.Errorf("used %d with the file, %d without", full.Used, empty.Used)
	}
}

func TestAttach(t *testing.T) {
	s := open(t, tempDir(t), Options{})
	v := create(t, s, "v", 16*mib)
	for _, c := range []struct {
		have []Mode
		want Mode
		ok   bool
	}{
		{nil, ReadWrite, true}, {nil, ReadOnly, true}, {nil, Shared, true},
		{[]Mode{ReadWrite}, ReadWrite, false}, {[]Mode{ReadWrite}, Shared, false}, {[]Mode{ReadWrite}, ReadOnly, true},
		{[]Mode{Shared, Shared}, Shared, true}, {[]Mode{Shared, ReadOnly}, ReadOnly, true}, {[]Mode{Shared}, ReadWrite, false},
		{[]Mode{ReadOnly, ReadOnly}, ReadWrite, true}, {[]Mode{ReadOnly}, Shared, true},
		{nil, "x", false},
	} {
		for i, m := range c.have {
			if _, err := s.Attach(t.Context(), "v", fmt.Sprint("sb", i), m); err != nil {
				t.Fatal(err)
			}
		}
		dir, err := s.Attach(t.Context(), "v", "new", c.want)
		if (err == nil) != c.ok {
			t.Errorf("%s beside %v: %v", c.want, c.have, err)
		}
		if err != nil && len(c.have) > 0 {
			expectClass(t, "refused", err, sandbox.Precondition)
			if !strings.Contains(err.Error(), "sb0") {
				t.Errorf("the holder is not named: %v", err)
			}
		}
		if err == nil {
			if st, err := os.Stat(dir); err != nil || !st.IsDir() {
				t.Error(err)
			}
			if _, err := s.Attach(t.Context(), "v", "new", c.want); err != nil {
				t.Errorf("again: %v", err)
			}
			err := s.Delete(t.Context(), "v")
			expectClass(t, "deleting an attached volume", err, sandbox.Precondition)
		}
		hs, err := s.Holders(t.Context(), "v")
		if err != nil {
			t.Fatal(err)
		}
		for _, h := range hs {
			if err := s.Detach(t.Context(), "v", h.Holder); err != nil {
				t.Fatal(err)
			}
		}
		if points, _ := mountPoints(s.dir); len(points) > 0 {
			t.Errorf("nobody has it, and it is mounted: %v", points)
		}
	}
	if err := s.Detach(t.Context(), v.ID, "never"); err != nil {
		t.Error(err)
	}
}

func TestLinger(t *testing.T) {
	s := open(t, tempDir(t), Options{Linger: time.Hour})
	v := create(t, s, "v", 16*mib)
	put(t, s, v.ID, "a", "b")
	if points, _ := mountPoints(s.dir); len(points) != 1 {
		t.Errorf("mounts: %v", points)
	}
	if err := s.Close(); err != nil { // an hour is not waited for
		t.Fatal(err)
	}
	short := open(t, tempDir(t), Options{Linger: time.Millisecond})
	v = create(t, short, "v", 16*mib)
	put(t, short, v.ID, "a", "b")
	for range 1000 {
		if points, _ := mountPoints(short.dir); len(points) == 0 {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Error("it stays mounted")
}

// A mount that lives on elsewhere, as that of a sandbox being ended does, must
// not get a second file system beside it.
func TestOneFileSystemPerImage(t *testing.T) {
	s := open(t, tempDir(t), Options{})
	v := create(t, s, "v", 32*mib)
	hostdir, err := s.Attach(t.Context(), v.ID, "a", ReadWrite)
	if err != nil {
		t.Fatal(err)
	}
	elsewhere := t.TempDir()
	other := exec.Command("unshare", "-m", "--propagation", "private", "sh", "-c", `mount --bind "$1" "$2" && echo ready && exec sleep 1000`, "sh", hostdir, elsewhere)
	out, err := other.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { other.Process.Kill(); other.Wait() }()
	if _, err := io.ReadFull(out, make([]byte, 6)); err != nil {
		t.Fatal(err)
	}
	their := fmt.Sprintf("/proc/%d/root%s", other.Process.Pid, elsewhere)
	if err := s.Detach(t.Context(), v.ID, "a"); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Attach(t.Context(), v.ID, "b", ReadWrite); err != nil {
		t.Fatal(err)
	}
	put(t, s, v.ID, "x", "one")
	if got, err := os.ReadFile(filepath.Join(their, "x")); err != nil || string(got) != "one" {
		t.Errorf("the other mount shows %q, %v: it is another file system", got, err)
	}
	n := 0
	all, err := loops()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range all {
		if f == s.image(v.ID) {
			n++
		}
	}
	if n != 1 {
		t.Errorf("the image has %d loop devices", n)
	}
	if err := s.Detach(t.Context(), v.ID, "b"); err != nil {
		t.Fatal(err)
	}
	other.Process.Kill()
	other.Wait()
}

// A process that stays in a mount does not keep the volume from going on.
func TestBusyMount(t *testing.T) {
	s := open(t, tempDir(t), Options{})
	v := create(t, s, "v", 16*mib)
	host, err := s.Attach(t.Context(), v.ID, "sb", ReadWrite)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(filepath.Join(host, "open"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := s.Detach(t.Context(), v.ID, "sb"); err != nil {
		t.Fatal(err)
	}
	if points, _ := mountPoints(s.dir); len(points) > 0 {
		t.Errorf("mounts: %v", points)
	}
	if _, err := f.WriteString("late"); err != nil {
		t.Fatal(err)
	}
	if got := get(t, s, v.ID, "open"); got != "late" { // the same file system
		t.Errorf("%q", got)
	}
	_, err = s.Resize(t.Context(), v.ID, 64*mib)
	expectClass(t, "a resize beside it", err, sandbox.Conflict)
	f.Close()
	if _, err = s.Resize(t.Context(), v.ID, 64*mib); err != nil {
		t.Error(err)
	}
}

func TestConcurrent(t *testing.T) {
	s := open(t, tempDir(t), Options{})
	v := create(t, s, "v", 32*mib)
	var wg sync.WaitGroup
	for i := range 6 {
		wg.Go(func() {
			for j := range 5 {
				name := fmt.Sprintf("f%d-%d", i, j)
				if _, err := s.Put(context.Background(), v.ID, name, strings.NewReader(name), PutOptions{}); err != nil {
					t.Error(err)
				}
				if i > 1 {
					continue
				}
				holder := fmt.Sprint("sb", i)
				if _, err := s.Attach(context.Background(), v.ID, holder, Shared); err != nil {
					t.Error(err)
				}
				if _, err := s.Clone(context.Background(), v.ID, fmt.Sprintf("clone%d%d", i, j)); err != nil {
					t.Error(err)
				}
				if err := s.Detach(context.Background(), v.ID, holder); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if list, more, err := s.ListFiles(t.Context(), v.ID, "/", 1000); err != nil || more || len(list) != 30 {
		t.Errorf("%d files, %v, %v", len(list), more, err)
	}
	checkFiles(t, s)
}
