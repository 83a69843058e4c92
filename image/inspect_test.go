package image_test

import (
	"archive/tar"
	"bytes"
	"fmt"
	"maps"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/image"
	"github.com/cove-sandbox/cove/sandbox"
	gvisor "gvisor.dev/gvisor/pkg/erofs"
)

// file is what a path of an image is, as the sentry would see it.
type file struct {
	mode     uint16
	uid, gid uint32
	mtime    uint64
	content  string // or a symlink's target
	nid      uint64
	nlink    uint32
}

// files reads a whole image with gVisor's reader.
func files(t *testing.T, lib *image.Library, id string) map[string]file {
	t.Helper()
	path, err := lib.Path(id)
	if err != nil {
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
	all := map[string]file{}
	var walk func(nid uint64, path string)
	walk = func(nid uint64, path string) {
		ino, err := img.Inode(nid)
		if err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		e := file{mode: ino.Mode(), uid: ino.UID(), gid: ino.GID(), mtime: ino.Mtime(), nid: nid, nlink: ino.Nlink()}
		switch {
		case ino.IsSymlink():
			e.content, err = ino.Readlink()
		case ino.IsRegular() && ino.Size() > 0:
			var off uint64
			var data []byte
			if off, err = ino.DataOffset(); err == nil {
				data, err = img.BytesAt(off, ino.Size())
			}
			e.content = string(data)
		case ino.IsDir():
			err = ino.IterDirents(func(name string, _ uint8, child uint64) error {
				if name != "." && name != ".." {
					walk(child, path+"/"+name)
				}
				return nil
			})
		}
		if err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		if path == "" {
			path = "/"
		}
		all[path] = e
	}
	walk(img.RootNid(), "")
	return all
}

// injected is what every image gets.
var injected = []string{"/", "/dev", "/etc", "/etc/hostname", "/etc/hosts", "/etc/resolv.conf", "/proc", "/run", "/sys", "/tmp"}

// own lists the paths of an image without what every image gets.
func own(all map[string]file) []string {
	return slices.DeleteFunc(slices.Sorted(maps.Keys(all)), func(p string) bool { return slices.Contains(injected, p) })
}

var someTime = time.Unix(1_600_000_000, 0)

func reg(name, content string) tar.Header {
	return tar.Header{Typeflag: tar.TypeReg, Name: name, Size: int64(len(content)), Mode: 0o644, ModTime: someTime,
		PAXRecords: map[string]string{"TEST.content": content}}
}
func dir(name string) tar.Header {
	return tar.Header{Typeflag: tar.TypeDir, Name: name, Mode: 0o755, ModTime: someTime}
}
func sym(name, target string) tar.Header {
	return tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target, Mode: 0o777, ModTime: someTime}
}
func hard(name, target string) tar.Header {
	return tar.Header{Typeflag: tar.TypeLink, Name: name, Linkname: target, Mode: 0o644, ModTime: someTime}
}
func node(typ byte, name string) tar.Header {
	return tar.Header{Typeflag: typ, Name: name, Mode: 0o666, Devmajor: 8, Devminor: 1, ModTime: someTime}
}

// pack writes headers made by reg and its kin.
func pack(t testing.TB, hdrs ...tar.Header) []byte {
	t.Helper()
	var buf bytes.Buffer
	tw := tar.NewWriter(&buf)
	for _, h := range hdrs {
		content := h.PAXRecords["TEST.content"]
		h.PAXRecords = maps.Clone(h.PAXRecords)
		delete(h.PAXRecords, "TEST.content")
		if err := tw.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := tw.Write([]byte(content)); err != nil {
			t.Fatal(err)
		}
	}
	if err := tw.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

// library opens an empty library with options and checks at the end that no
// temporary work is left in it.
func library(t *testing.T, opts image.Options) *image.Library {
	t.Helper()
	return libraryAt(t, t.TempDir(), opts)
}

func libraryAt(t *testing.T, dir string, opts image.Options) *image.Library {
	t.Helper()
	if opts.Registries == nil {
		opts.Registries = []string{"127.0.0.0/8"} // where tests have theirs
	}
	lib, err := image.Open(dir, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		lib.Close()
		noTemp(t, dir)
	})
	return lib
}

func noTemp(t *testing.T, dir string) {
	t.Helper()
	left, err := os.ReadDir(dir + "/tmp")
	if err != nil {
		t.Error(err)
	}
	for _, e := range left {
		t.Errorf("temporary work left behind: %s", e.Name())
	}
}

func importTar(t *testing.T, lib *image.Library, data []byte) sandbox.Image {
	t.Helper()
	img, err := lib.ImportTar(t.Context(), bytes.NewReader(data), nil)
	if err != nil {
		t.Fatal(err)
	}
	return img
}

func wantClass(t *testing.T, err error, class sandbox.Class) {
	t.Helper()
	if err == nil || sandbox.ClassOf(err) != class {
		t.Fatalf("got %v (class %s), want class %s", err, sandbox.ClassOf(err), class)
	}
}

func describe(f file) string {
	return fmt.Sprintf("%o %d:%d %q", f.mode, f.uid, f.gid, f.content)
}
