package erofs_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/image/erofs"
	"golang.org/x/sys/unix"
	gvisor "gvisor.dev/gvisor/pkg/erofs"
)

// What is read and written again is the same, byte for byte: nothing the
// writer knows is lost on the way back. Once with ranges, once without.
func TestReadBackIsTheSame(t *testing.T) {
	full := tree()
	full.Put("null", &erofs.Node{Mode: erofs.TypeChar | 0o666, Rdev: 1<<8 | 3})
	full.Put("disk", &erofs.Node{Mode: erofs.TypeBlock | 0o600, Rdev: 8<<8 | 1})
	full.Put("socket", &erofs.Node{Mode: erofs.TypeSocket | 0o600})
	_, want := write(t, full)
	for name, out := range map[string]interface {
		io.Writer
		Bytes() []byte
	}{"bytes": &bytes.Buffer{}, "ranges": &rangeBuffer{}} {
		t.Run(name, func(t *testing.T) {
			r := open(t, want)
			again, err := r.Tree(nil)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := erofs.Write(out, again, r.UUID()); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(out.Bytes(), want) {
				t.Fatal("another image came out")
			}
			if rb, ok := out.(*rangeBuffer); ok && rb.copies > 4 {
				// The content of neighbours is one range, but for what only Write knows.
				t.Errorf("%d ranges copied", rb.copies)
			}
		})
	}
}

// rangeBuffer is an erofs.RangeWriter in memory.
type rangeBuffer struct {
	bytes.Buffer
	copies int
}

func (b *rangeBuffer) CopyRange(src io.ReaderAt, off, n int64) error {
	b.copies++
	_, err := io.Copy(&b.Buffer, io.NewSectionReader(src, off, n))
	return err
}

func open(t *testing.T, data []byte) *erofs.Reader {
	t.Helper()
	r, err := erofs.Open(bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// lookup finds an inode by path.
func lookup(t *testing.T, r *erofs.Reader, path string) *erofs.Inode {
	t.Helper()
	in, err := r.Inode(r.Root())
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range strings.Split(path, "/") {
		found := false
		if err := r.ReadDir(in, func(name string, nid uint64) (err error) {
			if name == part {
				found = true
				in, err = r.Inode(nid)
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
		if !found {
			t.Fatalf("no %s in %s", part, path)
		}
	}
	return in
}

func TestReadsWhatMkfsMakes(t *testing.T) {
	mkfs, err := exec.LookPath("mkfs.erofs")
	if err != nil {
		t.Skip("mkfs.erofs is not installed")
	}
	src := t.TempDir()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	long := strings.Repeat("0123456789abcdef", 1000)
	must(os.WriteFile(src+"/a", []byte(long), 0o640))
	must(os.Link(src+"/a", src+"/b"))
	must(os.Symlink("a", src+"/link"))
	must(syscall.Mkfifo(src+"/pipe", 0o600))
	must(os.Mkdir(src+"/many", 0o755))
	for i := range 1000 {
		must(os.WriteFile(fmt.Sprintf("%s/many/%04d", src, i), []byte(fmt.Sprint(i)), 0o600))
	}
	must(os.Chmod(src+"/a", 0o640|os.ModeSetuid))
	must(os.Chtimes(src+"/a", unixTime, unixTime))
	xattrs := unix.Setxattr(src+"/a", "user.small", []byte("v"), 0) == nil &&
		unix.Setxattr(src+"/many", "user.big", []byte(strings.Repeat("x", 3000)), 0) == nil
	device := unix.Mknod(src+"/null", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))) == nil && os.Chmod(src+"/null", 0o666) == nil

	for _, opts := range [][]string{{"-E", "noinline_data"}, {"-E", "noinline_data", "-x1"}, {}, {"-E", "force-inode-extended"}, {"-E", "force-inode-compact"}} {
		t.Run(strings.Join(opts, " "), func(t *testing.T) {
			img := filepath.Join(t.TempDir(), "img")
			if out, err := exec.Command(mkfs, append(append([]string{}, opts...), img, src)...).CombinedOutput(); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			data, err := os.ReadFile(img)
			must(err)
			r := open(t, data)
			a, b := lookup(t, r, "a"), lookup(t, r, "b")
			if a.Nid != b.Nid || a.Nlink != 2 || a.Mode != erofs.TypeRegular|0o4640 || a.UID != uint32(os.Getuid()) {
				t.Errorf("a: %+v, b: %+v", a, b)
			}
			if got, err := io.ReadAll(r.Content(a)); err != nil || string(got) != long {
				t.Errorf("content: %d bytes, %v", len(got), err)
			}
			if compact := strings.HasSuffix(strings.Join(opts, " "), "compact"); !compact && (a.Mtime != unixTime.Unix() || a.MtimeNsec != 123456789) {
				t.Errorf("mtime %d.%d", a.Mtime, a.MtimeNsec)
			}
			if got := lookup(t, r, "link"); got.Target != "a" {
				t.Errorf("link: %+v", got)
			}
			if got, err := io.ReadAll(r.Content(lookup(t, r, "many/0777"))); err != nil || string(got) != "777" {
				t.Errorf("many: %q, %v", got, err)
			}
			if xattrs && (a.Xattrs["user.small"] != "v" || len(lookup(t, r, "many").Xattrs["user.big"]) != 3000) {
				t.Errorf("attributes: %v", a.Xattrs)
			}
			if device {
				if got := lookup(t, r, "null"); got.Rdev != 1<<8|3 || got.Mode != erofs.TypeChar|0o666 {
					t.Errorf("null: %+v", got)
				}
			}
			if xattrs && !sentryRefuses(t, img, a.Nid) {
				t.Error("gVisor reads inodes with attributes now: they need no longer be left out of images")
			}
			root, err := r.Tree(nil)
			must(err)
			var out rangeBuffer
			if _, err := erofs.Write(&out, root, [16]byte{}); err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(t.TempDir(), "again")
			must(os.WriteFile(path, out.Bytes(), 0o600))
			if err := erofs.Check(path); err != nil { // which attributes would not pass
				t.Error(err)
			}
		})
	}
}

// sentryRefuses says whether gVisor's reader fails on an inode: the reason why
// images have no attributes, packed or shared (-x1).
func sentryRefuses(t *testing.T, path string, nid uint64) bool {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	img, err := gvisor.OpenImage(f)
	if err != nil {
		t.Fatal(err)
	}
	defer img.Close()
	_, err = img.Inode(nid)
	return err != nil
}

var unixTime = time.Unix(1_600_000_000, 123456789)

// Damage, wherever it is, gives an error or a tree, and no end or panic.
func FuzzReader(f *testing.F) {
	small := erofs.NewDir(0o755, 0, 0)
	small.Put("a", file("hello"))
	small.Put("l", link("a"))
	d := erofs.NewDir(0o755, 1, 1)
	small.Put("d", d)
	d.Put("hard", small.Child("a"))
	for i := range 300 {
		d.Put(fmt.Sprintf("%04d-%s", i, strings.Repeat("n", 20)), &erofs.Node{Mode: erofs.TypeFIFO})
	}
	var buf bytes.Buffer
	if _, err := erofs.Write(&buf, small, [16]byte{}); err != nil {
		f.Fatal(err)
	}
	img := buf.Bytes()
	img[1024+8] &^= 1 // no checksum, so that damage to the superblock is looked into
	f.Add(img, 1200, uint64(0xff), 1100, uint64(1))
	for off := 1024; off < 3000; off += 16 {
		f.Add(img, off, ^uint64(0), off+8, uint64(1)<<40)
	}
	f.Fuzz(func(t *testing.T, data []byte, at int, x uint64, at2 int, y uint64) {
		data = bytes.Clone(data)
		for i := range 8 {
			if p := at + i; p >= 0 && p < len(data) {
				data[p] ^= byte(x >> (8 * i))
			}
			if p := at2 + i; p >= 0 && p < len(data) {
				data[p] ^= byte(y >> (8 * i))
			}
		}
		r, err := erofs.Open(bytes.NewReader(data))
		if err != nil {
			if !errors.Is(err, erofs.ErrFormat) {
				t.Fatal(err)
			}
			return
		}
		const most = 5000
		entries, size := 0, int64(0)
		enough := errors.New("enough")
		root, err := r.Tree(func(name string, in *erofs.Inode) error {
			entries++
			if in.IsRegular() {
				size += in.Size
			}
			if entries > most || size > 1<<24 {
				return enough
			}
			return nil
		})
		switch {
		case errors.Is(err, enough):
		case err != nil && !errors.Is(err, erofs.ErrFormat):
			t.Fatal(err)
		case err == nil:
			if _, err := erofs.Write(io.Discard, root, [16]byte{}); err != nil {
				t.Fatalf("read, and not written: %v", err)
			}
		}
	})
}

// A few blocks that describe a tree without end.
func TestReaderRefusesLoops(t *testing.T) {
	root := erofs.NewDir(0o755, 0, 0)
	d := erofs.NewDir(0o755, 0, 0)
	root.Put("d", d)
	d.Put("e", erofs.NewDir(0o755, 0, 0))
	_, data := write(t, root)
	data[1024+8] &^= 1
	r := open(t, data)
	e := lookup(t, r, "d/e")
	in := lookup(t, r, "d")
	// The entry "e" of d becomes d itself, then the root.
	at := bytes.Index(data[in.Tail:], nidBytes(e.Nid))
	if at < 0 {
		t.Fatal("the entry was not found")
	}
	for _, nid := range []uint64{in.Nid, r.Root()} {
		copy(data[in.Tail+int64(at):], nidBytes(nid))
		if _, err := open(t, data).Tree(nil); !errors.Is(err, erofs.ErrFormat) {
			t.Fatalf("a loop through inode %d: %v", nid, err)
		}
	}
	if _, err := erofs.Open(bytes.NewReader(data[:len(data)-1])); !errors.Is(err, erofs.ErrFormat) {
		t.Fatalf("cut short: %v", err)
	}
}

func nidBytes(nid uint64) []byte {
	var b [8]byte
	for i := range b {
		b[i] = byte(nid >> (8 * i))
	}
	return b[:]
}
