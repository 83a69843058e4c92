package cli

import (
	"archive/tar"
	"bytes"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
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

func equalTrees(t *testing.T, got, want map[string]string) {
	t.Helper()
	for _, k := range sortedKeys(want) {
		if got[k] != want[k] {
			t.Errorf("%s is %q, want %q", k, got[k], want[k])
		}
	}
	for _, k := range sortedKeys(got) {
		if _, ok := want[k]; !ok {
			t.Errorf("unexpected %s (%q)", k, got[k])
		}
	}
}

// localTree makes files for the tests to send.
func localTree(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "src")
	for _, d := range []string{"a/b", "empty"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for name, data := range map[string]string{"f": "F", "a/b/g": strings.Repeat("G", 100_000), "exe": "#!"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(data), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(filepath.Join(dir, "exe"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("../f", filepath.Join(dir, "a/link")); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestADirectorySurvivesTheWayThereAndBack(t *testing.T) {
	f := newFakeAPI(t)
	f.addSandbox("abc", nil)
	src := localTree(t)
	f.cove(t, settings{}, "cp", src, "abc:/work").want(t, 0, "")
	f.put("/work", "dir", "")
	f.tarOut = f.tars["/work"]
	dest := filepath.Join(t.TempDir(), "back")
	f.cove(t, settings{}, "cp", "abc:/work", dest).want(t, 0, "")
	equalTrees(t, tree(t, dest), tree(t, src))
	if fi, err := os.Stat(filepath.Join(dest, "exe")); err != nil || fi.Mode().Perm() != 0o755 {
		t.Errorf("exe: %v %v", fi.Mode(), err)
	}
	// Our users' names and numbers are nobody's business inside.
	for r := tar.NewReader(bytes.NewReader(f.tars["/work"])); ; {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if h.Uname != "" || h.Uid != 0 || h.Gid != 0 {
			t.Errorf("%s carries an owner: %+v", h.Name, h)
		}
	}
}

func TestWhereACopyLands(t *testing.T) {
	src := localTree(t)
	file := filepath.Join(src, "f")
	prepared := func() *fakeAPI {
		f := newFakeAPI(t)
		f.addSandbox("abc", nil)
		f.put("/dir", "dir", "")
		f.put("/file", "file", "old")
		f.put("/link", "symlink", "dir")
		return f
	}
	for _, c := range []struct{ from, to, file, tar string }{
		{from: file, to: "abc:/new", file: "/new"},
		{from: file, to: "abc:/file", file: "/file"},
		{from: file, to: "abc:/dir", file: "/dir/f"},
		{from: file, to: "abc:/dir/", file: "/dir/f"},
		{from: file, to: "abc:/link", file: "/link/f"},
		{from: file, to: "abc:/later/", file: "/later/f"},
		{from: file, to: "abc:rel", file: "rel"},
		{from: src, to: "abc:/new", tar: "/new"},
		{from: src, to: "abc:/dir", tar: "/dir/src"},
		{from: src + "/.", to: "abc:/dir", tar: "/dir"},
	} {
		f := prepared()
		f.cove(t, settings{}, "cp", c.from, c.to).want(t, 0, "")
		if c.file != "" && (f.files[c.file] == nil || string(f.files[c.file].data) != "F") {
			t.Errorf("%s to %s: files %v", c.from, c.to, sortedKeys(f.files))
		}
		if c.tar != "" && f.tars[c.tar] == nil {
			t.Errorf("%s to %s: tars %v", c.from, c.to, sortedKeys(f.tars))
		}
	}
	f := prepared()
	f.cove(t, settings{}, "cp", src, "abc:/file").want(t, 2, "", "/file is a file in the sandbox")
	f.cove(t, settings{}, "cp", file, file).want(t, 2, "", "exactly one side")
	f.cove(t, settings{}, "cp", "abc:/a", "abc:/b").want(t, 2, "", "exactly one side")
	f.cove(t, settings{}, "cp", "abc:/nope", ".").want(t, 1, "", "no /nope in the sandbox")
	f.cove(t, settings{}, "cp", filepath.Join(src, "nope"), "abc:/x").want(t, 1, "", "no such file")
}

func TestCopyOutOfASandbox(t *testing.T) {
	f := newFakeAPI(t)
	f.addSandbox("abc", nil)
	f.put("/out.json", "file", "{}")
	f.put("/dir", "dir", "")
	f.put("/evil", "symlink", "/evil")
	f.tarOut = makeTar(t, entry{name: "f", data: "x"}, entry{kind: tar.TypeSymlink, name: "l\x1b[2J", link: "/etc/passwd"})
	dir := t.TempDir()
	f.cove(t, settings{}, "cp", "abc:/out.json", dir).want(t, 0, "")
	f.cove(t, settings{}, "cp", "abc:/out.json", filepath.Join(dir, "renamed")).want(t, 0, "")
	f.cove(t, settings{}, "cp", "abc:/out.json", "-").want(t, 0, "{}")
	f.cove(t, settings{}, "cp", "abc:/dir", dir).want(t, 0, "", `left out l\x1b[2J: a symlink out of the tree`)
	f.cove(t, settings{}, "cp", "abc:/dir/.", filepath.Join(dir, "inner")).want(t, 0, "", "left out")
	equalTrees(t, tree(t, dir), map[string]string{"out.json": "{}", "renamed": "{}", "dir": "/", "dir/f": "x", "inner": "/", "inner/f": "x"})
	f.cove(t, settings{}, "cp", "abc:/dir", "-").want(t, 0, string(f.tarOut))
	f.cove(t, settings{}, "cp", "abc:/evil", dir).want(t, 1, "", "too many symlinks")

	// A symlink at the destination is replaced, not written through.
	victim := filepath.Join(dir, "renamed")
	if err := os.Symlink("renamed", filepath.Join(dir, "alias")); err != nil {
		t.Fatal(err)
	}
	f.put("/other", "file", "other")
	f.cove(t, settings{}, "cp", "abc:/other", filepath.Join(dir, "alias")).want(t, 0, "")
	if b, _ := os.ReadFile(victim); string(b) != "{}" {
		t.Errorf("written through a symlink: %q", b)
	}
	// More than allowed leaves nothing half-made.
	f.cove(t, settings{}, "cp", "--max-size", "3", "abc:/other", filepath.Join(dir, "big")).want(t, 2, "", "more than 3B", "--max-size")
	f.cove(t, settings{}, "cp", "--max-size", "0", "abc:/dir", filepath.Join(dir, "bigdir")).want(t, 2, "", "more than 0B")
	if _, err := os.Lstat(filepath.Join(dir, "big")); err == nil {
		t.Error("a half file was left")
	}
	for name := range tree(t, dir) {
		if strings.HasPrefix(filepath.Base(name), ".cove-") {
			t.Errorf("%s was left behind", name)
		}
	}
}

// A key whose scope is files may not look at sandboxes and needs not.
func TestCopyWithAKeyForFilesOnly(t *testing.T) {
	f := newFakeAPI(t)
	f.addSandbox("abc", nil)
	f.put("/out.json", "file", "{}")
	denied := &sandbox.Error{Class: sandbox.Denied, Msg: "outside the scopes of this key"}
	f.fail["Sandboxes/Get"], f.fail["Sandboxes/List"] = denied, denied
	f.cove(t, settings{}, "cp", "abc:/out.json", "-").want(t, 0, "{}")
	f.cove(t, settings{}, "inspect", "abc").want(t, 1, "", "outside the scopes")
}

func TestCopyFromStdin(t *testing.T) {
	f := newFakeAPI(t)
	f.addSandbox("abc", nil)
	f.put("/dir", "dir", "")
	f.cove(t, settings{stdin: strings.NewReader("data")}, "cp", "-u", "user", "-", "abc:/f").want(t, 0, "")
	if string(f.files["/f"].data) != "data" {
		t.Errorf("%q", f.files["/f"].data)
	}
	if q := f.queries[0]; !strings.Contains(q, "atomic=true") || !strings.Contains(q, "parents=true") || !strings.Contains(q, "user=user") {
		t.Errorf("query %s", q)
	}
	f.cove(t, settings{stdin: strings.NewReader("data")}, "cp", "-", "abc:/dir").want(t, 2, "", "/dir is a directory")
	f.cove(t, settings{stdin: strings.NewReader("tar")}, "cp", "--tar", "-", "abc:/dir").want(t, 0, "")
	if string(f.tars["/dir"]) != "tar" {
		t.Errorf("%q", f.tars["/dir"])
	}
}

func TestRemotePath(t *testing.T) {
	for arg, want := range map[string]string{
		"abc:/x": "abc /x", "abc:": "abc .", "abc:a:b": "abc a:b", "./abc:x": "", "/abc:x": "", "abc": "", "-": "", "C:x": "", ":x": "",
	} {
		got := ""
		if id, p, ok := remotePath(arg); ok {
			got = id + " " + p
		}
		if got != want {
			t.Errorf("%q: %q, want %q", arg, got, want)
		}
	}
}
