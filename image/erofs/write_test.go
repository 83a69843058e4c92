package erofs_test

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/image/erofs"
	gvisor "gvisor.dev/gvisor/pkg/erofs"
)

func file(content string) *erofs.Node {
	return &erofs.Node{Mode: erofs.TypeRegular | 0o644, Size: int64(len(content)), Mtime: 1700000000, MtimeNsec: 5,
		Open: func() (io.ReadCloser, error) { return io.NopCloser(strings.NewReader(content)), nil }}
}

func link(target string) *erofs.Node {
	return &erofs.Node{Mode: erofs.TypeSymlink | 0o777, Target: target}
}

// tree has every shape the layout rules care about: directories of one, two
// and many blocks, names on both sides of ".", tails that fit behind the inode
// and tails that do not, empty and block-sized files, long links, hard links.
func tree() *erofs.Node {
	root := erofs.NewDir(0o755, 0, 0)
	root.Put("empty", file(""))
	root.Put("small", file("hello\n"))
	root.Put("block", file(strings.Repeat("b", 4096)))
	root.Put("big", file(strings.Repeat("0123456789abcdef", 70000)))
	root.Put("!before-dot", file("x"))
	root.Put(".hidden", file("y"))
	shared := file("two names")
	shared.Mode = erofs.TypeRegular | 0o4755
	shared.UID, shared.GID = 1000, 70000
	root.Put("hard-a", shared)
	many := erofs.NewDir(0o1777, 1000, 1000)
	root.Put("many", many)
	for i := range 2000 {
		many.Put(fmt.Sprintf("entry-%04d", i), file(fmt.Sprint(i)))
	}
	many.Put("hard-b", shared)
	long := erofs.NewDir(0o700, 0, 0)
	root.Put("long", long)
	for i := range 40 {
		long.Put(fmt.Sprintf("%03d", i)+strings.Repeat("n", 252), file("l"))
	}
	root.Put("nothing", erofs.NewDir(0o755, 0, 0))
	root.Put("link", link("small"))
	root.Put("link-long", link(strings.Repeat("t", 4095)))
	root.Put("link-tail", link(strings.Repeat("t", 4032)))
	root.Put("link-over", link(strings.Repeat("t", 4033)))
	root.Put("fifo", &erofs.Node{Mode: erofs.TypeFIFO | 0o600})
	deep := root
	for range 60 {
		d := erofs.NewDir(0o755, 0, 0)
		deep.Put("d", d)
		deep = d
	}
	return root
}

func write(t *testing.T, root *erofs.Node) (path string, content []byte) {
	t.Helper()
	var buf bytes.Buffer
	size, err := erofs.Write(&buf, root, [16]byte{1, 2, 3})
	if err != nil {
		t.Fatal(err)
	}
	if size != int64(buf.Len()) || size%4096 != 0 {
		t.Fatalf("size %d, wrote %d", size, buf.Len())
	}
	path = filepath.Join(t.TempDir(), "image.erofs")
	if err := os.WriteFile(path, buf.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	return path, buf.Bytes()
}

func TestSentryReadsWhatWasWritten(t *testing.T) {
	path, _ := write(t, tree())
	if err := erofs.Check(path); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	img, err := gvisor.OpenImage(f)
	if err != nil {
		t.Fatal(err)
	}
	defer img.Close()
	compareGVisor(t, img, img.RootNid(), tree(), "/")
}

// compareGVisor looks every name up, as the sentry does, and compares.
func compareGVisor(t *testing.T, img *gvisor.Image, nid uint64, want *erofs.Node, path string) {
	ino, err := img.Inode(nid)
	if err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	if ino.Mode() != want.Mode || ino.UID() != want.UID || ino.GID() != want.GID ||
		ino.Mtime() != uint64(want.Mtime) || ino.MtimeNsec() != want.MtimeNsec {
		t.Errorf("%s: got %o %d:%d %d.%d", path, ino.Mode(), ino.UID(), ino.GID(), ino.Mtime(), ino.MtimeNsec())
	}
	switch {
	case want.IsSymlink():
		if got, err := ino.Readlink(); err != nil || got != want.Target {
			t.Errorf("%s: link of %d bytes, want %d: %v", path, len(got), len(want.Target), err)
		}
	case want.IsRegular():
		off, err := ino.DataOffset()
		if err != nil {
			t.Fatal(err)
		}
		r, _ := want.Open()
		content, _ := io.ReadAll(r)
		if len(content) == 0 {
			return
		}
		if got, err := img.BytesAt(off, ino.Size()); err != nil || !bytes.Equal(got, content) {
			t.Errorf("%s: content differs: %v", path, err)
		}
		if off%4096 != 0 {
			t.Errorf("%s: content at %d cannot be mapped", path, off)
		}
	case want.IsDir():
		seen := 0
		if err := ino.IterDirents(func(string, uint8, uint64) error { seen++; return nil }); err != nil {
			t.Fatal(err)
		}
		if seen != want.Len()+2 {
			t.Errorf("%s: %d entries, want %d", path, seen, want.Len()+2)
		}
		for _, name := range want.Names() {
			child, err := ino.Lookup(name)
			if err != nil {
				t.Fatalf("%s%s: %v", path, name, err)
			}
			compareGVisor(t, img, child, want.Child(name), path+name+"/")
		}
		if _, err := ino.Lookup("no such name"); err == nil {
			t.Errorf("%s: found a name that is not there", path)
		}
	}
}

func TestHardLinksShareAnInode(t *testing.T) {
	path, _ := write(t, tree())
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	img, err := gvisor.OpenImage(f)
	if err != nil {
		t.Fatal(err)
	}
	defer img.Close()
	root, _ := img.Inode(img.RootNid())
	a, _ := root.Lookup("hard-a")
	manyNid, _ := root.Lookup("many")
	many, _ := img.Inode(manyNid)
	b, _ := many.Lookup("hard-b")
	ino, _ := img.Inode(a)
	if a != b || ino.Nlink() != 2 {
		t.Fatalf("nids %d and %d, %d links", a, b, ino.Nlink())
	}
}

func TestEqualTreesGiveEqualBytes(t *testing.T) {
	_, a := write(t, tree())
	_, b := write(t, tree())
	if !bytes.Equal(a, b) {
		t.Fatal("the same tree was written differently")
	}
}

func TestFsckAgrees(t *testing.T) {
	fsck, err := exec.LookPath("fsck.erofs")
	if err != nil {
		t.Skip("fsck.erofs is not installed")
	}
	path, _ := write(t, tree())
	out := filepath.Join(t.TempDir(), "extracted")
	msg, err := exec.Command(fsck, "--extract="+out, path).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, msg)
	}
	compareDir(t, out)
}

func TestKernelMountsIt(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("mounting needs root")
	}
	path, _ := write(t, tree())
	dir := t.TempDir()
	if msg, err := exec.Command("mount", "-t", "erofs", "-o", "loop,ro", path, dir).CombinedOutput(); err != nil {
		t.Skipf("this kernel or container cannot mount it: %s", msg)
	}
	defer exec.Command("umount", dir).Run()
	compareDir(t, dir)
	if target, err := os.Readlink(filepath.Join(dir, "link-long")); err != nil || len(target) != 4095 {
		t.Errorf("long link: %d bytes, %v", len(target), err)
	}
}

func compareDir(t *testing.T, dir string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(dir, "many"))
	if err != nil || len(entries) != 2001 {
		t.Fatalf("%d entries: %v", len(entries), err)
	}
	got, err := os.ReadFile(filepath.Join(dir, "big"))
	if err != nil || string(got) != strings.Repeat("0123456789abcdef", 70000) {
		t.Fatalf("big: %d bytes, %v", len(got), err)
	}
	if got, err := os.ReadFile(filepath.Join(dir, "many/entry-1234")); err != nil || string(got) != "1234" {
		t.Fatalf("entry: %q, %v", got, err)
	}
	if target, err := os.Readlink(filepath.Join(dir, "link")); err != nil || target != "small" {
		t.Fatalf("link: %q, %v", target, err)
	}
}

func TestRefusesWhatTheFormatCannotHold(t *testing.T) {
	dir := erofs.NewDir(0o755, 0, 0)
	cases := map[string]func(root *erofs.Node){
		"two names for a directory": func(r *erofs.Node) { r.Put("a", dir); r.Put("b", dir) },
		"long name":                 func(r *erofs.Node) { r.Put(strings.Repeat("n", 256), file("")) },
		"dot":                       func(r *erofs.Node) { r.Put("..", file("")) },
		"long link":                 func(r *erofs.Node) { r.Put("l", link(strings.Repeat("t", 4096))) },
		"short content": func(r *erofs.Node) {
			f := file("abc")
			f.Size = 5
			r.Put("f", f)
		},
		"endless depth": func(r *erofs.Node) {
			for range 3000 {
				d := erofs.NewDir(0o755, 0, 0)
				r.Put("d", d)
				r = d
			}
		},
	}
	for name, spoil := range cases {
		t.Run(name, func(t *testing.T) {
			root := erofs.NewDir(0o755, 0, 0)
			spoil(root)
			if _, err := erofs.Write(io.Discard, root, [16]byte{}); err == nil {
				t.Fatal("written")
			}
		})
	}
}

func TestCheckNoticesDamage(t *testing.T) {
	path, content := write(t, tree())
	if err := os.WriteFile(path, content[:len(content)/2], 0o600); err != nil {
		t.Fatal(err)
	}
	if err := erofs.Check(path); err == nil {
		t.Fatal("a truncated image passed")
	}
	content[1100] ^= 1
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := erofs.Check(path); err == nil {
		t.Fatal("a superblock with a wrong checksum passed")
	}
}
