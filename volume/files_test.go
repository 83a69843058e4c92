package volume

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/sandbox"
)

func TestFiles(t *testing.T) {
	s := open(t, tempDir(t), Options{})
	create(t, s, "v", 64*mib)
	info, err := s.Put(t.Context(), "v", "/d/e/f", strings.NewReader("hello"), PutOptions{Mode: 0o640, UID: 1000, GID: 1001, Parents: true})
	if err != nil || info.Path != "/d/e/f" || info.Size != 5 || info.Mode != 0o640 || info.UID != 1000 || info.GID != 1001 || info.Type != sandbox.Regular {
		t.Errorf("%+v %v", info, err)
	}
	if got := get(t, s, "v", "d/e/../e/f"); got != "hello" {
		t.Errorf("%q", got)
	}
	_, err = s.Put(t.Context(), "v", "no/such/dir", strings.NewReader("x"), PutOptions{})
	expectClass(t, "without parents", err, sandbox.NotFound)
	_, err = s.Put(t.Context(), "v", "d", strings.NewReader("x"), PutOptions{})
	expectClass(t, "over a directory", err, sandbox.Precondition)
	_, err = s.Put(t.Context(), "v", "/", strings.NewReader("x"), PutOptions{})
	expectClass(t, "over the root", err, sandbox.Invalid)
	_, err = s.Put(t.Context(), "v", "a\x00b", strings.NewReader("x"), PutOptions{})
	expectClass(t, "a NUL", err, sandbox.Invalid)
	_, err = s.Put(t.Context(), "v", strings.Repeat("n", 300), strings.NewReader("x"), PutOptions{})
	expectClass(t, "a long name", err, sandbox.Invalid)
	_, err = s.Put(t.Context(), "v", "d/e/f", io.MultiReader(strings.NewReader("part"), brokenReader{}), PutOptions{})
	if err == nil || get(t, s, "v", "d/e/f") != "hello" {
		t.Errorf("a put that breaks off: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = s.Put(ctx, "v", "d/e/f", strings.NewReader("x"), PutOptions{})
	expectClass(t, "canceled", err, sandbox.Canceled)
	_, _, err = s.GetFile(t.Context(), "v", "d")
	expectClass(t, "reading a directory", err, sandbox.Precondition)
	_, _, err = s.GetFile(t.Context(), "v", "missing")
	expectClass(t, "reading nothing", err, sandbox.NotFound)
	_, err = s.Stat(t.Context(), "nosuch", "x")
	expectClass(t, "no volume", err, sandbox.NotFound)
	if _, err := s.Mkdir(t.Context(), "v", "m/n", PutOptions{Mode: 0o700, UID: 7, Parents: true}); err != nil {
		t.Fatal(err)
	}
	if info, err := s.Stat(t.Context(), "v", "m/n"); err != nil || info.Type != sandbox.Directory || info.Mode != 0o700 || info.UID != 7 {
		t.Errorf("%+v %v", info, err)
	}
	_, err = s.Mkdir(t.Context(), "v", "m/n", PutOptions{})
	expectClass(t, "again", err, sandbox.AlreadyExists)
	list, more, err := s.ListFiles(t.Context(), "v", "/", 10)
	if err != nil || more || len(list) != 2 {
		t.Errorf("%+v %v %v", list, more, err)
	}
	if _, more, _ := s.ListFiles(t.Context(), "v", "/", 1); !more {
		t.Error("the limit goes unsaid")
	}
	expectClass(t, "a full directory", s.Remove(t.Context(), "v", "d", false), sandbox.Precondition)
	if err := s.Remove(t.Context(), "v", "d", true); err != nil {
		t.Error(err)
	}
	expectClass(t, "again", s.Remove(t.Context(), "v", "d", true), sandbox.NotFound)
	expectClass(t, "the root", s.Remove(t.Context(), "v", "/..", true), sandbox.Invalid)
	// A reader keeps the volume.
	put(t, s, "v", "f", "kept")
	r, _, err := s.GetFile(t.Context(), "v", "f")
	if err != nil {
		t.Fatal(err)
	}
	expectClass(t, "delete with a reader", s.Delete(t.Context(), "v"), sandbox.Conflict)
	if b, err := io.ReadAll(r); err != nil || string(b) != "kept" {
		t.Errorf("%q %v", b, err)
	}
	r.Close()
	r.Close() // twice does nothing
	if err := s.Delete(t.Context(), "v"); err != nil {
		t.Error(err)
	}
}

type brokenReader struct{}

func (brokenReader) Read([]byte) (int, error) { return 0, io.ErrUnexpectedEOF }

// TestFilesHostile: whoever is root in a sandbox made these.
func TestFilesHostile(t *testing.T) {
	top := tempDir(t)
	canary := filepath.Join(top, "canary")
	if err := os.WriteFile(canary, []byte("host-secret"), 0o666); err != nil {
		t.Fatal(err)
	}
	s := open(t, filepath.Join(top, "set"), Options{})
	v := create(t, s, "v", 64*mib)
	host, err := s.Attach(t.Context(), "v", "sb", ReadWrite)
	if err != nil {
		t.Fatal(err)
	}
	put(t, s, "v", "real/file", "inside")
	for link, target := range map[string]string{
		"abs": canary, "up": "../../../canary", "dir": top, "dots": "../..", "root": "/", "proc": "/proc/self/root",
		"loop": "loop", "in": "real/file", "indir": "real", "staging": "../" + stagingDir,
	} {
		if err := os.Symlink(target, filepath.Join(host, link)); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mkfifo(filepath.Join(host, "fifo"), 0o666); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mknod(filepath.Join(host, "dev"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 5))); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", filepath.Join(host, "sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for _, p := range []string{"abs", "up", "dir/canary", "dots/canary", "root" + canary, "proc" + canary, "../canary", "/../../canary", "loop", "fifo", "dev", "sock", "staging"} {
		if r, _, err := s.GetFile(t.Context(), "v", p); err == nil {
			b, _ := io.ReadAll(io.LimitReader(r, 100))
			r.Close()
			t.Errorf("get %s: %q", p, b)
		}
		if strings.Contains(p, "/") && !strings.Contains(p, "..") { // .. stops at the root, where a put is fine
			if _, err := s.Put(t.Context(), "v", p, strings.NewReader("changed"), PutOptions{Parents: true}); err == nil {
				t.Errorf("put %s", p)
			}
			if _, err := s.Mkdir(t.Context(), "v", p+"x", PutOptions{Parents: true}); err == nil {
				t.Errorf("mkdir %s", p)
			}
			if _, err := s.Change(t.Context(), "v", p, sandbox.VolumeFile{Mode: new(uint32)}); err == nil {
				t.Errorf("change %s", p)
			}
		}
	}
	for _, p := range []string{"dir", "dots", "root", "proc", "staging"} {
		if list, _, err := s.ListFiles(t.Context(), "v", p, 10); err == nil {
			t.Errorf("list %s: %+v", p, list)
		}
	}
	if got := get(t, s, "v", "in") + get(t, s, "v", "indir/file"); got != "insideinside" {
		t.Errorf("links that stay: %q", got)
	}
	// A put replaces a link, and a removal removes it, not what it names.
	put(t, s, "v", "abs", "mine")
	if err := s.Remove(t.Context(), "v", "dir", true); err != nil {
		t.Error(err)
	}
	if got := get(t, s, "v", "abs"); got != "mine" {
		t.Errorf("%q", got)
	}
	// Names swapped under our feet.
	stop := make(chan struct{})
	done := make(chan struct{})
	if err := os.Mkdir(filepath.Join(host, "swap"), 0o755); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(done)
		for {
			select {
			case <-stop:
				return
			default:
			}
			_ = os.Rename(filepath.Join(host, "swap"), filepath.Join(host, "swapped"))
			_ = os.Symlink("../../..", filepath.Join(host, "swap"))
			_ = os.Remove(filepath.Join(host, "swap"))
			_ = os.Rename(filepath.Join(host, "swapped"), filepath.Join(host, "swap"))
		}
	}()
	for i := range 300 {
		_, _ = s.Put(t.Context(), "v", "swap/canary", strings.NewReader("changed"), PutOptions{})
		_, _ = s.Mkdir(t.Context(), "v", fmt.Sprint("swap/m", i), PutOptions{})
		_, _ = s.Change(t.Context(), "v", "swap/canary", sandbox.VolumeFile{Mode: new(uint32)})
		_ = s.Remove(t.Context(), "v", "swap/canary", true)
	}
	close(stop)
	<-done
	if got, err := os.ReadFile(canary); err != nil || string(got) != "host-secret" {
		t.Errorf("the canary is %q, %v", got, err)
	}
	if got := names(t, top); !slices.Equal(got, []string{"canary", "set"}) {
		t.Errorf("the host has %v", got)
	}
	if got := names(t, filepath.Join(top, "set")); !slices.Equal(got, []string{"format", "lock", "mnt", "tmp", "v"}) {
		t.Errorf("the set has %v", got)
	}
	if got := names(t, s.point(v.ID)); !slices.Equal(got, []string{"data", "lost+found", "staging"}) {
		t.Errorf("the image has %v", got)
	}
	if err := s.Detach(t.Context(), "v", "sb"); err != nil {
		t.Fatal(err)
	}
}

// TestDeepTree: a tree as deep as a sandbox can make it costs the node a few
// open files, not one for each level.
func TestDeepTree(t *testing.T) {
	s := open(t, tempDir(t), Options{})
	v := create(t, s, "v", 128*mib)
	host, err := s.Attach(t.Context(), v.ID, "sb", ReadWrite)
	if err != nil {
		t.Fatal(err)
	}
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	deep := func(name string) {
		t.Helper()
		fd, err := unix.Open(host, unix.O_RDONLY|unix.O_DIRECTORY, 0)
		for i := 0; err == nil && i < 5000; i++ {
			if err = unix.Mkdirat(fd, name, 0o700); err != nil {
				break
			}
			var next int
			next, err = unix.Openat(fd, name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
			unix.Close(fd)
			fd, name = next, "d"
			if err == nil {
				var f int
				if f, err = unix.Openat(fd, "f", unix.O_CREAT|unix.O_WRONLY, 0o600); err == nil {
					unix.Close(f)
				}
			}
		}
		unix.Close(fd)
		if err != nil {
			t.Fatal(err)
		}
	}
	deep("deep")
	expectClass(t, "a snapshot of it", s.Snapshot(t.Context(), "v", io.Discard), sandbox.TooLarge)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 256, Max: limit.Max}); err != nil {
		t.Fatal(err)
	}
	defer unix.Setrlimit(unix.RLIMIT_NOFILE, &limit)
	if err := s.Remove(t.Context(), "v", "deep", true); err != nil {
		t.Fatal(err)
	}
	if left := names(t, host); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	if left := names(t, filepath.Join(s.point(v.ID), stagingDir)); len(left) > 0 {
		t.Errorf("left in staging: %v", left)
	}
	// Cut off, the rest is the next mount's.
	deep("again")
	ctx, cancel := context.WithCancel(t.Context())
	if err := os.Rename(filepath.Join(host, "again"), filepath.Join(s.point(v.ID), stagingDir, "left")); err != nil {
		t.Fatal(err)
	}
	cancel()
	if err := empty(ctx, filepath.Join(s.point(v.ID), stagingDir)); err == nil {
		t.Error("an ended context is not noticed")
	}
	if err := s.Detach(t.Context(), v.ID, "sb"); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Attach(t.Context(), v.ID, "sb", ReadWrite); err != nil {
		t.Fatal(err)
	}
	if left := names(t, filepath.Join(s.point(v.ID), stagingDir)); len(left) > 0 {
		t.Errorf("left in staging after a mount: %v", left)
	}
	if err := s.Detach(t.Context(), v.ID, "sb"); err != nil {
		t.Fatal(err)
	}
}

func TestClone(t *testing.T) {
	s := open(t, tempDir(t), Options{})
	a := create(t, s, "a", 64*mib)
	put(t, s, "a", "f", "first")
	host, err := s.Attach(t.Context(), "a", "sb", ReadWrite)
	if err != nil {
		t.Fatal(err)
	}
	// A writer that numbers its records: a clone has them up to one instant.
	log, err := os.OpenFile(filepath.Join(host, "log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			if _, err := fmt.Fprintf(log, "%08d\n", i); err != nil {
				t.Error(err)
				return
			}
		}
	}()
	var last int
	for i := range 3 {
		name := fmt.Sprint("c", i)
		v, err := s.Clone(t.Context(), "a", name)
		if err != nil {
			t.Fatal(err)
		}
		if v.Size != a.Size {
			t.Errorf("%+v", v)
		}
		lines := strings.Split(strings.TrimSuffix(get(t, s, name, "log"), "\n"), "\n")
		for j, l := range lines {
			if lines[0] != "" && l != fmt.Sprintf("%08d", j) {
				t.Fatalf("record %d of the clone is %q", j, l)
			}
		}
		if len(lines) < last {
			t.Errorf("a later clone has less: %d, %d", len(lines), last)
		}
		last = len(lines)
		if got := get(t, s, name, "f"); got != "first" {
			t.Errorf("%q", got)
		}
	}
	close(stop)
	<-done
	log.Close()
	put(t, s, "c0", "f", "changed")
	if got := get(t, s, "a", "f") + get(t, s, "c1", "f"); got != "firstfirst" {
		t.Errorf("a clone's change is seen elsewhere: %q", got)
	}
	if err := s.Detach(t.Context(), "a", "sb"); err != nil {
		t.Fatal(err)
	}
	if err := s.Delete(t.Context(), "a"); err != nil { // clones do not need it
		t.Fatal(err)
	}
	if got := get(t, s, "c1", "f"); got != "first" {
		t.Errorf("%q", got)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = s.Clone(ctx, "c0", "never")
	expectClass(t, "canceled", err, sandbox.Canceled)
	_, err = s.Clone(t.Context(), "nosuch", "x")
	expectClass(t, "of nothing", err, sandbox.NotFound)
	_, err = s.Clone(t.Context(), "c0", "c1")
	expectClass(t, "a taken name", err, sandbox.AlreadyExists)
	checkFiles(t, s)
}

func TestSnapshotAndImport(t *testing.T) {
	s := open(t, tempDir(t), Options{})
	create(t, s, "a", 64*mib)
	host, err := s.Attach(t.Context(), "a", "sb", ReadWrite)
	if err != nil {
		t.Fatal(err)
	}
	put(t, s, "a", "d/f", "content")
	when := time.Unix(1_000_000_000, 123_000_000)
	for _, err := range []error{
		os.Link(filepath.Join(host, "d/f"), filepath.Join(host, "hard")),
		os.Symlink("/etc/passwd", filepath.Join(host, "link")),
		unix.Mkfifo(filepath.Join(host, "fifo"), 0o600),
		os.WriteFile(filepath.Join(host, "suid"), []byte("x"), 0o600),
		os.Chown(filepath.Join(host, "suid"), 123, 456),
		unix.Chmod(filepath.Join(host, "suid"), 0o4755),
		os.Mkdir(filepath.Join(host, "empty"), 0o700),
		os.Chtimes(filepath.Join(host, "suid"), when, when),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	var b bytes.Buffer
	if err := s.Snapshot(t.Context(), "a", &b); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Import(t.Context(), "b", 32*mib, bytes.NewReader(b.Bytes())); err != nil {
		t.Fatal(err)
	}
	if got := get(t, s, "b", "d/f") + get(t, s, "b", "hard"); got != "contentcontent" {
		t.Errorf("%q", got)
	}
	if i, err := s.Stat(t.Context(), "b", "suid"); err != nil || i.Mode != 0o4755 || i.UID != 123 || i.GID != 456 || !i.ModTime.Equal(when) {
		t.Errorf("%+v %v", i, err)
	}
	if i, err := s.Stat(t.Context(), "b", "link"); err != nil || i.Target != "/etc/passwd" {
		t.Errorf("%+v %v", i, err)
	}
	if _, err := s.Stat(t.Context(), "b", "empty"); err != nil {
		t.Error(err)
	}
	_, err = s.Stat(t.Context(), "b", "fifo")
	expectClass(t, "a FIFO", err, sandbox.NotFound)
	other, err := s.Attach(t.Context(), "b", "sb", ReadWrite)
	if err != nil {
		t.Fatal(err)
	}
	var one, two unix.Stat_t
	if unix.Stat(filepath.Join(other, "hard"), &one) != nil || unix.Stat(filepath.Join(other, "d/f"), &two) != nil || one.Ino != two.Ino {
		t.Error("a hard link is two files now")
	}
	// A file that claims more than there is.
	if err := os.Truncate(filepath.Join(host, "suid"), 1<<40); err != nil {
		t.Fatal(err)
	}
	expectClass(t, "a sparse giant", s.Snapshot(t.Context(), "a", io.Discard), sandbox.TooLarge)
	for _, n := range []string{"a", "b"} {
		if err := s.Detach(t.Context(), n, "sb"); err != nil {
			t.Fatal(err)
		}
	}
	for n := 0; n < b.Len()-512; n += 512 { // at every block, also between two entries
		_, err = s.Import(t.Context(), "cut", 32*mib, bytes.NewReader(b.Bytes()[:n]))
		expectClass(t, fmt.Sprintf("%d of %d bytes of a tar", n, b.Len()), err, sandbox.Invalid)
	}
	checkFiles(t, s)
}

func TestImportHostile(t *testing.T) {
	top := tempDir(t)
	canary := filepath.Join(top, "canary")
	if err := os.WriteFile(canary, []byte("host-secret"), 0o666); err != nil {
		t.Fatal(err)
	}
	s := open(t, filepath.Join(top, "set"), Options{})
	type entry struct {
		name, link, content string
		kind                byte
	}
	for i, c := range []struct {
		entries []entry
		want    sandbox.Class // "" = it is made, with nothing outside
	}{
		{[]entry{{"../../../canary", "", "changed", tar.TypeReg}}, ""},
		{[]entry{{canary, "", "changed", tar.TypeReg}}, ""},
		{[]entry{{"d", top, "", tar.TypeSymlink}, {"d/canary", "", "changed", tar.TypeReg}}, sandbox.Invalid},
		{[]entry{{"d", "../../../..", "", tar.TypeSymlink}, {"d/canary", "", "changed", tar.TypeReg}}, sandbox.Invalid},
		{[]entry{{"c", canary, "", tar.TypeSymlink}, {"c", "", "changed", tar.TypeReg}}, ""},
		{[]entry{{"c", canary, "", tar.TypeLink}}, sandbox.NotFound},
		{[]entry{{"c", "../../../canary", "", tar.TypeLink}}, sandbox.NotFound},
		{[]entry{{"s", canary, "", tar.TypeSymlink}, {"c", "s", "", tar.TypeLink}, {"c", "", "changed", tar.TypeReg}}, ""},
		{[]entry{{"dev", "", "", tar.TypeBlock}, {"fifo", "", "", tar.TypeFifo}}, ""},
		{[]entry{{"big", "", strings.Repeat("x", 40*mib), tar.TypeReg}}, sandbox.DiskFull},
	} {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		for _, e := range c.entries {
			if err := w.WriteHeader(&tar.Header{Name: e.name, Linkname: e.link, Size: int64(len(e.content)), Typeflag: e.kind, Mode: 0o666}); err != nil {
				t.Fatal(err)
			}
			if _, err := io.WriteString(w, e.content); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		_, err := s.Import(t.Context(), fmt.Sprint("v", i), 32*mib, &b)
		expectClass(t, fmt.Sprintf("%.200v", c.entries), err, c.want)
		if err != nil && strings.Contains(err.Error(), filepath.Join(top, "set")) {
			t.Errorf("the host's paths are in %q", err)
		}
		if c.want == sandbox.DiskFull && !strings.Contains(err.Error(), "volume of 32MiB is too small") {
			t.Errorf("%q", err)
		}
		if got, err := os.ReadFile(canary); err != nil || string(got) != "host-secret" {
			t.Fatalf("%v: the canary is %q, %v", c.entries, got, err)
		}
	}
	checkFiles(t, s)
	if got := names(t, top); !slices.Equal(got, []string{"canary", "set"}) {
		t.Errorf("the host has %v", got)
	}
}
