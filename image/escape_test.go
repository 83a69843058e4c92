package image_test

import (
	"archive/tar"
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/image"
	"github.com/cove-sandbox/cove/sandbox"
)

func itoa(n int) string { return strconv.Itoa(n) }

func octal(n int) string {
	s := strconv.FormatInt(int64(n), 8)
	return strings.Repeat("0", 6-len(s)) + s
}

// Layers that try to leave the image. Each is refused or confined, and the
// host's file is untouched either way.
func TestLayersCannotEscape(t *testing.T) {
	outside := t.TempDir()
	secret := filepath.Join(outside, "secret")
	if err := os.WriteFile(secret, []byte("host"), 0o600); err != nil {
		t.Fatal(err)
	}
	up := strings.Repeat("../", 20)
	rel := strings.TrimPrefix(secret, "/")
	cases := []struct {
		name    string
		layer   []tar.Header
		refused bool
		at      string // where a confined write ended up inside the image
	}{
		{"dot dot", []tar.Header{reg(up+rel, "evil")}, true, ""},
		{"dot dot in the middle", []tar.Header{reg("a/b/"+up+rel, "evil")}, true, ""},
		{"dot dot at the end", []tar.Header{dir("a/..")}, true, ""},
		{"absolute name", []tar.Header{reg(secret, "evil")}, false, secret},
		{"absolute symlink as parent", []tar.Header{sym("l", outside), reg("l/secret", "evil")}, false, secret},
		{"relative symlink as parent", []tar.Header{sym("l", up+strings.TrimPrefix(outside, "/")), reg("l/secret", "evil")}, false, secret},
		{"chain of symlinks", []tar.Header{sym("a", "b"), sym("b", up), reg("a/"+rel, "evil")}, false, secret},
		{"symlink, then a file through it", []tar.Header{sym("l", secret), reg("l", "evil")}, false, "/l"},
		{"symlink loop as parent", []tar.Header{sym("a", "b"), sym("b", "a"), reg("a/x", "evil")}, true, ""},
		{"symlink to itself many times", []tar.Header{sym("a", strings.Repeat("a/", 100)), reg("a/x", "evil")}, true, ""},
		{"hard link to an absolute path", []tar.Header{hard("h", secret)}, true, ""},
		{"hard link upwards", []tar.Header{hard("h", up+rel)}, true, ""},
		{"hard link through a symlink", []tar.Header{sym("l", outside), hard("h", "l/secret")}, true, ""},
		{"hard link, then written", []tar.Header{sym("l", outside), hard("h", "l/secret"), reg("h", "evil")}, true, ""},
		{"hard link to a directory", []tar.Header{dir("d"), hard("h", "d")}, true, ""},
		{"block device", []tar.Header{node(tar.TypeBlock, "disk"), reg("disk/x", "evil")}, false, "/disk/x"},
		{"whiteout upwards", []tar.Header{reg("..", "")}, true, ""},
		{"file as parent", []tar.Header{reg("f", ""), reg("f/x", "evil")}, true, ""},
		{"root as a file", []tar.Header{reg(".", "evil")}, true, ""},
		{"owner out of range", []tar.Header{{Typeflag: tar.TypeReg, Name: "a", Uid: 1 << 33}}, true, ""},
		{"unknown type", []tar.Header{{Typeflag: 'Q', Name: "a"}}, true, ""},
	}
	lib := library(t, image.Options{})
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			img, err := lib.ImportTar(t.Context(), bytes.NewReader(pack(t, c.layer...)), nil)
			switch {
			case c.refused:
				wantClass(t, err, sandbox.Invalid)
			case err != nil:
				t.Fatal(err)
			default:
				if got := files(t, lib, img.ID)[c.at].content; got != "evil" {
					t.Errorf("%s holds %q in the image", c.at, got)
				}
			}
			if got, err := os.ReadFile(secret); err != nil || string(got) != "host" {
				t.Fatalf("the host's file: %q, %v", got, err)
			}
			if entries, _ := os.ReadDir(outside); len(entries) != 1 {
				t.Fatalf("the host's directory has %d entries", len(entries))
			}
		})
	}
}

func TestWhiteoutsCannotEscape(t *testing.T) {
	lib := library(t, image.Options{})
	for _, name := range []string{".wh.", ".wh..", ".wh...", "a/.wh..", "../.wh.x"} {
		_, err := lib.ImportTar(t.Context(), bytes.NewReader(saveTar(t, pack(t, reg("a/b", "1")), pack(t, reg(name, "")))), nil)
		wantClass(t, err, sandbox.Invalid)
	}
	// Through a link to the root and beyond, it stays inside.
	img := importTar(t, lib, saveTar(t, pack(t, reg("etc/passwd", "image"), sym("l", "../../../..")), pack(t, reg("l/etc/.wh.passwd", ""))))
	if _, ok := files(t, lib, img.ID)["/etc/passwd"]; ok {
		t.Error("the whiteout did not reach the image's own file")
	}
}

// ImportDir copies symlinks of a directory and never follows them.
func TestImportDirFollowsNothing(t *testing.T) {
	outside := t.TempDir()
	if err := os.WriteFile(filepath.Join(outside, "secret"), []byte("host secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	src := t.TempDir()
	for name, target := range map[string]string{"file": filepath.Join(outside, "secret"), "dir": outside, "loop": "loop"} {
		if err := os.Symlink(target, filepath.Join(src, name)); err != nil {
			t.Fatal(err)
		}
	}
	lib := library(t, image.Options{})
	img, err := lib.ImportDir(t.Context(), src, sandbox.ImageConfig{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	path, _ := lib.Path(img.ID)
	data, err := os.ReadFile(path)
	if err != nil || bytes.Contains(data, []byte("host secret")) {
		t.Fatalf("a file from outside is in the image (%v)", err)
	}
	if got := files(t, lib, img.ID)["/dir"]; got.mode&0o170000 != 0o120000 || got.content != outside {
		t.Errorf("link: %s", describe(got))
	}
}

// Whatever bytes come in, the answer is an error with a class or an image the
// sentry can read.
func FuzzImportTar(f *testing.F) {
	for _, seed := range [][]tar.Header{
		{reg("a", "1"), dir("d"), sym("l", "../d"), hard("h", "a"), reg("l/x", "2")},
		{reg("etc/hosts", "x"), sym("etc/resolv.conf", "x"), node(tar.TypeFifo, "p"), node(tar.TypeChar, "c")},
	} {
		f.Add(pack(f, seed...))
	}
	lib, err := image.Open(f.TempDir(), image.Options{Limits: image.Limits{Unpacked: 1 << 20, Download: 1 << 20, Entries: 1000}})
	if err != nil {
		f.Fatal(err)
	}
	defer lib.Close()
	f.Fuzz(func(t *testing.T, data []byte) {
		img, err := lib.ImportTar(t.Context(), bytes.NewReader(data), nil)
		if err != nil {
			if c := sandbox.ClassOf(err); c != sandbox.Invalid && c != sandbox.TooLarge && c != sandbox.Unsupported && c != sandbox.Corrupt {
				t.Fatalf("class %s: %v", c, err)
			}
			return
		}
		files(t, lib, img.ID)
		if err := lib.Delete(t.Context(), img.ID); err != nil {
			t.Fatal(err)
		}
	})
}

// The same for the changes of an image.
func FuzzDerive(f *testing.F) {
	lib, err := image.Open(f.TempDir(), image.Options{Limits: image.Limits{Unpacked: 1 << 20, Download: 1 << 20, Entries: 1000}})
	if err != nil {
		f.Fatal(err)
	}
	defer lib.Close()
	base, err := lib.ImportTar(f.Context(), bytes.NewReader(pack(f, reg("a", "1"), hard("h", "a"), dir("d"), reg("d/x", "2"), sym("l", "d"))), nil)
	if err != nil {
		f.Fatal(err)
	}
	for _, seed := range [][]tar.Header{
		{dir("./"), wh("./a"), hard("./h", "./a"), opaque("./d/"), reg("./d/y", "3"), reg("l/z", "4")},
		{reg(".wh.a", ""), reg("d/.wh..wh..opq", ""), node(tar.TypeBlock, "b"), hard("c", "b"), wh("l/x"), hard("l/q", "h")},
	} {
		f.Add(pack(f, seed...))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		img, err := lib.Derive(t.Context(), base.ID, bytes.NewReader(data), nil)
		if err != nil {
			if c := sandbox.ClassOf(err); c != sandbox.Invalid && c != sandbox.TooLarge && c != sandbox.Unsupported && c != sandbox.Corrupt {
				t.Fatalf("class %s: %v", c, err)
			}
			return
		}
		files(t, lib, img.ID)
		if img.ID == base.ID {
			return
		}
		if err := lib.Delete(t.Context(), img.ID); err != nil {
			t.Fatal(err)
		}
	})
}
