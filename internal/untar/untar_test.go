package untar

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/iotest"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// entry is a shorthand for a tar header; kind is tar's type flag.
type entry struct {
	kind byte
	name string
	link string
	data string
	mode int64
}

func makeTar(t *testing.T, entries ...entry) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		if e.kind == 0 {
			e.kind = tar.TypeReg
		}
		if e.mode == 0 {
			e.mode = 0o644
		}
		h := &tar.Header{Typeflag: e.kind, Name: e.name, Linkname: e.link, Mode: e.mode, Size: int64(len(e.data)), ModTime: time.Unix(1e9, 0)}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, e.data); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// tree lists what is below a directory: "name=content", "name->target", "name/".
func tree(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || p == dir {
			return err
		}
		rel, _ := filepath.Rel(dir, p)
		switch {
		case d.Type()&fs.ModeSymlink != 0:
			target, _ := os.Readlink(p)
			out[rel] = "->" + target
		case d.IsDir():
			out[rel] = "/"
		default:
			b, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			out[rel] = string(b)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// Every attack is run in a directory with a sentinel beside it; whatever
// Extract says, nothing outside may change.
func TestHostileTars(t *testing.T) {
	const L, D, H = tar.TypeSymlink, tar.TypeDir, tar.TypeLink
	for _, c := range []struct {
		name    string
		entries []entry
		refuse  string // part of the error; "" = succeeds
		want    map[string]string
		skipped int
	}{
		{"dot-dot name", []entry{{name: "../victim", data: "x"}}, "refusing the name", nil, 0},
		{"dot-dot in the middle", []entry{{kind: D, name: "a/"}, {name: "a/../../victim", data: "x"}}, "refusing the name", nil, 0},
		{"absolute name", []entry{{name: "/tmp/cove-evil", data: "x"}}, "refusing the name", nil, 0},
		{"write through a symlink to outside", []entry{{kind: L, name: "d", link: ".."}, {name: "d/victim", data: "x"}}, "", map[string]string{"d": "/", "d/victim": "x"}, 1},
		{"write through a symlink inside", []entry{{kind: D, name: "real/"}, {kind: L, name: "d", link: "real"}, {name: "d/f", data: "x"}}, "is not a directory", nil, 0},
		{"overwrite by a file over a symlink", []entry{{name: "keep", data: "k"}, {kind: L, name: "f", link: "keep"}, {name: "f", data: "x"}}, "", map[string]string{"keep": "k", "f": "x"}, 0},
		{"symlink out, relative", []entry{{kind: L, name: "l", link: "../victim"}}, "", nil, 1},
		{"symlink out, absolute", []entry{{kind: L, name: "l", link: "/etc/passwd"}}, "", nil, 1},
		{"symlink out behind a name", []entry{{kind: L, name: "x", link: "."}, {kind: L, name: "l", link: "x/../.."}}, "", map[string]string{"x": "->."}, 1},
		{"symlink up inside the tree", []entry{{name: "f", data: "x"}, {kind: D, name: "a/b/"}, {kind: L, name: "a/b/l", link: "../../f"}}, "", map[string]string{"f": "x", "a": "/", "a/b": "/", "a/b/l": "->../../f"}, 0},
		{"symlink one up too far", []entry{{kind: L, name: "a/b/l", link: "../../../victim"}}, "", map[string]string{"a": "/", "a/b": "/"}, 1},
		{"empty symlink", []entry{{kind: L, name: "l", link: ""}}, "", nil, 1},
		{"hard link out", []entry{{kind: H, name: "l", link: "../victim"}}, "refusing", nil, 0},
		{"hard link absolute", []entry{{kind: H, name: "l", link: "/etc/passwd"}}, "refusing", nil, 0},
		{"hard link to a symlink", []entry{{kind: L, name: "s", link: "f"}, {kind: H, name: "l", link: "s"}}, "refusing the hard link", nil, 0},
		{"hard link through a symlink", []entry{{kind: D, name: "r/"}, {name: "r/f", data: "x"}, {kind: L, name: "s", link: "r"}, {kind: H, name: "l", link: "s/f"}}, "is not a directory", nil, 0},
		{"hard link to nothing", []entry{{kind: H, name: "l", link: "f"}}, "refusing the hard link", nil, 0},
		{"honest hard link", []entry{{name: "f", data: "x"}, {kind: H, name: "l", link: "f"}}, "", map[string]string{"f": "x", "l": "x"}, 0},
		{"device, fifo", []entry{{kind: tar.TypeChar, name: "null"}, {kind: tar.TypeFifo, name: "p"}, {name: "f", data: "x"}}, "", map[string]string{"f": "x"}, 2},
		{"a directory over a file", []entry{{name: "f", data: "x"}, {kind: D, name: "f/"}}, "is not a directory here", nil, 0},
		{"a file over a directory", []entry{{kind: D, name: "d/"}, {name: "d", data: "x"}}, "something else in the tar", nil, 0},
		{"a directory over a symlink", []entry{{kind: L, name: "d", link: "e"}, {kind: D, name: "d/"}}, "is not a directory here", nil, 0},
		{"too much", []entry{{name: "f", data: strings.Repeat("x", 1001)}}, "more than", nil, 0},
		{"too many", []entry{{name: "1"}, {name: "2"}, {name: "3"}, {name: "4"}, {name: "5"}, {name: "6"}}, "more than 5 entries", nil, 0},
		{"a closed directory is filled", []entry{{kind: D, name: "d/", mode: 0o500}, {name: "d/f", data: "x"}}, "", map[string]string{"d": "/", "d/f": "x"}, 0},
		{"dots and slashes", []entry{{kind: D, name: "./"}, {name: "./a//b", data: "x"}}, "", map[string]string{"a": "/", "a/b": "x"}, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			outer := t.TempDir()
			dest := filepath.Join(outer, "dest")
			if err := os.Mkdir(dest, 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(outer, "victim"), []byte("intact"), 0o600); err != nil {
				t.Fatal(err)
			}
			root, err := os.OpenRoot(dest)
			if err != nil {
				t.Fatal(err)
			}
			defer root.Close()
			skipped := 0
			err = Extract(t.Context(), root, bytes.NewReader(makeTar(t, c.entries...)),
				Options{Bytes: 1000, Entries: 5, Modes: 0o755, Skipped: func(string, string) { skipped++ }})
			if c.refuse == "" && err != nil {
				t.Errorf("refused: %v", err)
			}
			if c.refuse != "" && (err == nil || !strings.Contains(err.Error(), c.refuse)) {
				t.Errorf("error %v, want %q", err, c.refuse)
			}
			if skipped != c.skipped {
				t.Errorf("%d entries left out, want %d", skipped, c.skipped)
			}
			if c.refuse == "" {
				if got := tree(t, dest); !maps.Equal(got, c.want) {
					t.Errorf("%q, want %q", got, c.want)
				}
			}
			outside := tree(t, outer)
			for name := range outside {
				if name != "victim" && name != "dest" && !strings.HasPrefix(name, "dest/") {
					t.Errorf("%s appeared outside", name)
				}
			}
			if outside["victim"] != "intact" {
				t.Errorf("the file outside is now %q", outside["victim"])
			}
			if _, err := os.Lstat("/tmp/cove-evil"); err == nil {
				t.Error("an absolute name was written")
			}
		})
	}
}

// The same attacks on a tree that is read as a root directory: they are taken, and
// stay in it.
func TestHostileTarsOfARoot(t *testing.T) {
	const L, D, H = tar.TypeSymlink, tar.TypeDir, tar.TypeLink
	for _, c := range []struct {
		name    string
		entries []entry
		class   sandbox.Class // of a refusal by us
		want    map[string]string
	}{
		{"dot-dot name", []entry{{name: "../../victim", data: "x"}}, "", map[string]string{"victim": "x"}},
		{"absolute name", []entry{{name: "/tmp/cove-evil", data: "x"}}, "", map[string]string{"tmp": "/", "tmp/cove-evil": "x"}},
		{"symlinks out", []entry{{kind: L, name: "l", link: "/etc/passwd"}, {kind: L, name: "m", link: "../victim"}}, "", map[string]string{"l": "->/etc/passwd", "m": "->../victim"}},
		{"through a symlink inside", []entry{{kind: D, name: "real"}, {kind: L, name: "d", link: "real"}, {name: "d/f", data: "x"}}, "", map[string]string{"real": "/", "d": "->real", "real/f": "x"}},
		{"over a symlink out", []entry{{kind: L, name: "f", link: "../victim"}, {name: "f", data: "x"}}, "", map[string]string{"f": "x"}},
		{"over a hard link to a symlink out", []entry{{kind: L, name: "s", link: "../victim"}, {kind: H, name: "f", link: "s"}, {name: "f", data: "x"}}, "", map[string]string{"s": "->../victim", "f": "x"}},
		{"a directory through a file", []entry{{name: "f", data: "x"}, {name: "f/g", data: "x"}}, sandbox.Invalid, nil},
		{"devices", []entry{{kind: tar.TypeChar, name: "null"}, {kind: tar.TypeFifo, name: "p"}}, "", map[string]string{}},
		{"a long name", []entry{{name: strings.Repeat("x/", 2100) + "x", data: "x"}}, sandbox.Invalid, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			root, outer := open(t)
			err := Extract(t.Context(), root, bytes.NewReader(makeTar(t, c.entries...)), Options{Bytes: 1000, Entries: 5, Modes: 0o7777, Chroot: true})
			if c.class != "" && sandbox.ClassOf(err) != c.class || c.class == "" && err != nil {
				t.Errorf("%v", err)
			}
			if got := tree(t, root.Name()); c.class == "" && !maps.Equal(got, c.want) {
				t.Errorf("%q, want %q", got, c.want)
			}
			if b, err := os.ReadFile(filepath.Join(outer, "victim")); err != nil || string(b) != "intact" {
				t.Errorf("the file outside is %q, %v", b, err)
			}
		})
	}
	// What os.Root refuses is the file system's word on that entry.
	for _, link := range []string{"..", "/"} {
		root, _ := open(t)
		err := Extract(t.Context(), root, bytes.NewReader(makeTar(t, entry{kind: L, name: "d", link: link}, entry{name: "d/victim", data: "x"})),
			Options{Bytes: 1000, Entries: 5, Chroot: true})
		var e *EntryError
		if !errors.As(err, &e) || e.Name != "d/victim" {
			t.Errorf("through %q: %v", link, err)
		}
	}
}

// open makes a tree with a file beside it.
func open(t *testing.T) (root *os.Root, outer string) {
	t.Helper()
	outer = t.TempDir()
	dest := filepath.Join(outer, "dest")
	if err := errors.Join(os.Mkdir(dest, 0o700), os.WriteFile(filepath.Join(outer, "victim"), []byte("intact"), 0o600)); err != nil {
		t.Fatal(err)
	}
	root, err := os.OpenRoot(dest)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { root.Close() })
	return root, outer
}

func TestModesAndTimes(t *testing.T) {
	b := makeTar(t, entry{kind: tar.TypeDir, name: "d/", mode: 0o1500}, entry{name: "d/suid", data: "x", mode: 0o6755}, entry{name: "open", mode: 0o666})
	for _, c := range []struct {
		o    Options
		want map[string]fs.FileMode
	}{
		{Options{Modes: 0o755}, map[string]fs.FileMode{"d/suid": 0o755, "d": fs.ModeDir | 0o700, "open": 0o644}},
		{Options{Modes: 0o7777, Chroot: true}, map[string]fs.FileMode{"d/suid": 0o755 | fs.ModeSetuid | fs.ModeSetgid, "d": fs.ModeDir | fs.ModeSticky | 0o500, "open": 0o666}},
	} {
		root, _ := open(t)
		c.o.Bytes, c.o.Entries = 1000, 5
		if err := Extract(t.Context(), root, bytes.NewReader(b), c.o); err != nil {
			t.Fatal(err)
		}
		for name, want := range c.want {
			fi, err := root.Lstat(name)
			if err != nil || fi.Mode() != want {
				t.Errorf("%s: %v %v, want %v", name, fi.Mode(), err, want)
			} else if !fi.ModTime().Equal(time.Unix(1e9, 0)) {
				t.Errorf("%s: %v", name, fi.ModTime())
			}
		}
	}
}

// A tar that is cut off anywhere is not taken for a shorter one, and the source's
// own errors are told as they are.
func TestCutOff(t *testing.T) {
	b := makeTar(t, entry{name: "f", data: "x"}, entry{kind: tar.TypeDir, name: "d/"}, entry{name: "d/g", data: strings.Repeat("y", 600)})
	for n := 0; n < len(b)-512; n += 256 {
		root, _ := open(t)
		if err := Extract(t.Context(), root, bytes.NewReader(b[:n]), Options{Bytes: 1000, Entries: 5}); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("%d of %d bytes: %v", n, len(b), err)
		}
		fault := errors.New("the network is gone")
		if err := Extract(t.Context(), root, io.MultiReader(bytes.NewReader(b[:n]), iotest.ErrReader(fault)), Options{Bytes: 1000, Entries: 5}); !errors.Is(err, fault) {
			t.Errorf("a fault after %d bytes: %v", n, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	root, _ := open(t)
	if err := Extract(ctx, root, bytes.NewReader(b), Options{Bytes: 1000, Entries: 5}); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

// A refusal of the file system names the entry and keeps its cause.
func TestFileSystemFaults(t *testing.T) {
	root, _ := open(t)
	err := Extract(t.Context(), root, bytes.NewReader(makeTar(t, entry{name: strings.Repeat("n", 256), data: "x"})), Options{Bytes: 1000, Entries: 5})
	var e *EntryError
	if !errors.As(err, &e) || len(e.Name) != 256 || !errors.Is(err, syscall.ENAMETOOLONG) {
		t.Errorf("%v", err)
	}
	if err := root.Close(); err != nil {
		t.Fatal(err)
	}
	if err := Extract(t.Context(), root, bytes.NewReader(makeTar(t, entry{name: "f"})), Options{Bytes: 1000, Entries: 5}); !errors.Is(err, os.ErrClosed) {
		t.Errorf("a tree that is gone: %v", err)
	}
}
