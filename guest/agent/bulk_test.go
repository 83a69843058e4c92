package agent_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/guest/agent"
	"github.com/cove-sandbox/cove/guest/wire"
	"github.com/cove-sandbox/cove/sandbox"
)

func bulk(root string, op guest.BulkOp, in io.Reader) (string, error) {
	var out bytes.Buffer
	if in == nil {
		in = strings.NewReader("")
	}
	err := agent.RunBulk(agent.HostSpace(root), op, in, &out)
	return out.String(), err
}

func TestBulkReadAndWrite(t *testing.T) {
	root := t.TempDir()
	content := strings.Repeat("0123456789", 300_000)
	if _, err := bulk(root, guest.BulkOp{Kind: "write", Path: "/d/f", Write: sandbox.WriteOptions{Parents: true, Mode: 0o600}}, strings.NewReader(content)); err != nil {
		t.Fatal(err)
	}
	if got, err := bulk(root, guest.BulkOp{Kind: "read", Path: "/d/f"}, nil); err != nil || got != content {
		t.Errorf("%v, %d bytes", err, len(got))
	}
	if got, err := bulk(root, guest.BulkOp{Kind: "read", Path: "/d/f", Offset: 5, Length: 7}, nil); err != nil || got != "5678901" {
		t.Errorf("%v %q", err, got)
	}
	for name, c := range map[string]struct {
		op   guest.BulkOp
		want error
	}{
		"no kind":       {guest.BulkOp{Path: "/"}, sandbox.ErrInvalid},
		"relative":      {guest.BulkOp{Kind: "read", Path: "d"}, sandbox.ErrInvalid},
		"read nothing":  {guest.BulkOp{Kind: "read", Path: "/none"}, sandbox.ErrNotFound},
		"tar a file":    {guest.BulkOp{Kind: "tar", Path: "/d/f"}, sandbox.ErrPrecondition},
		"untar nowhere": {guest.BulkOp{Kind: "untar", Path: "/none"}, sandbox.ErrNotFound},
		"negative":      {guest.BulkOp{Kind: "read", Path: "/d/f", Offset: -1}, sandbox.ErrInvalid},
	} {
		var e *sandbox.Error
		if _, err := bulk(root, c.op, nil); !errors.Is(err, c.want) || !errors.As(err, &e) || e.Op == "" {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestAWriteThatFailsHalfWayLeavesNothingAtomicBehind(t *testing.T) {
	root := t.TempDir()
	must(t, os.WriteFile(filepath.Join(root, "f"), []byte("old"), 0o644))
	broken := io.MultiReader(strings.NewReader("half"), iotestErr{})
	if _, err := bulk(root, guest.BulkOp{Kind: "write", Path: "/f", Write: sandbox.WriteOptions{Atomic: true}}, broken); !errors.Is(err, sandbox.ErrUnavailable) {
		t.Error(err)
	}
	if ents, _ := os.ReadDir(root); len(ents) != 1 {
		t.Errorf("%v", ents)
	}
	if b, _ := os.ReadFile(filepath.Join(root, "f")); string(b) != "old" {
		t.Errorf("%q", b)
	}
}

type iotestErr struct{}

func (iotestErr) Read([]byte) (int, error) { return 0, errors.New("cut") }

// tree describes a directory, for comparing.
func tree(t *testing.T, root string) string {
	t.Helper()
	var lines []string
	must(t, filepath.Walk(root, func(p string, fi os.FileInfo, err error) error {
		if err != nil || p == root {
			return err
		}
		line := strings.TrimPrefix(p, root) + " " + fi.Mode().String()
		switch {
		case fi.Mode()&os.ModeSymlink != 0:
			l, _ := os.Readlink(p)
			line += " -> " + l
		case fi.Mode().IsRegular():
			b, _ := os.ReadFile(p)
			line += " " + string(b) + " " + fi.ModTime().UTC().Format(time.RFC3339Nano)
			if fi.Sys().(*syscall.Stat_t).Nlink > 1 {
				line += " linked"
			}
		case fi.IsDir():
			line += " " + fi.ModTime().UTC().Format(time.RFC3339Nano)
		}
		lines = append(lines, line)
		return nil
	}))
	sort.Strings(lines)
	return strings.Join(lines, "\n")
}

func TestADirectoryGoesOutAndInUnchanged(t *testing.T) {
	src, dst := t.TempDir(), t.TempDir()
	at := func(p string) string { return filepath.Join(src, "d", p) }
	must(t, os.MkdirAll(at("sub/empty"), 0o755))
	must(t, os.WriteFile(at("sub/file"), []byte("content"), 0o640))
	must(t, os.WriteFile(at("run"), []byte("#!"), 0o755))
	must(t, os.Chmod(at("run"), 0o755|os.ModeSetuid))
	must(t, os.Link(at("sub/file"), at("zlink")))
	must(t, os.Symlink("/etc/passwd", at("abs")))
	must(t, os.Symlink("sub/file", at("rel")))
	must(t, syscall.Mkfifo(at("fifo"), 0o600))
	must(t, os.WriteFile(at(strings.Repeat("n", 200)), nil, 0o644))
	must(t, os.Chmod(at("sub"), 0o500))
	old := time.Date(2001, 2, 3, 4, 5, 6, 789, time.UTC)
	must(t, os.Chtimes(at("sub/file"), old, old))
	must(t, os.Chtimes(at("sub"), old, old))
	out, err := bulk(src, guest.BulkOp{Kind: "tar", Path: "/d"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := bulk(dst, guest.BulkOp{Kind: "untar", Path: "/made/for/it", Write: sandbox.WriteOptions{Parents: true}}, strings.NewReader(out)); err != nil {
		t.Fatal(err)
	}
	want, got := tree(t, filepath.Join(src, "d")), tree(t, filepath.Join(dst, "made/for/it"))
	if want != got {
		t.Errorf("went out:\n%s\ncame in:\n%s", want, got)
	}
	// Once more over itself: files are replaced, directories kept.
	if _, err := bulk(dst, guest.BulkOp{Kind: "untar", Path: "/made/for/it"}, strings.NewReader(out)); err != nil {
		t.Fatal(err)
	}
	if got := tree(t, filepath.Join(dst, "made/for/it")); want != got {
		t.Errorf("over itself:\n%s", got)
	}
}

// pack makes a tar of headers; regular files hold "evil".
func pack(t *testing.T, hs ...tar.Header) io.Reader {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range hs {
		if h.Mode == 0 {
			h.Mode = 0o644
		}
		if h.Typeflag == tar.TypeReg {
			h.Size = 4
		}
		must(t, w.WriteHeader(&h))
		if h.Typeflag == tar.TypeReg {
			w.Write([]byte("evil"))
		}
	}
	must(t, w.Close())
	return &b
}

func TestATarCannotReachOutOfItsDirectory(t *testing.T) {
	reg := func(name string) tar.Header { return tar.Header{Typeflag: tar.TypeReg, Name: name} }
	sym := func(name, to string) tar.Header {
		return tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: to}
	}
	hard := func(name, to string) tar.Header { return tar.Header{Typeflag: tar.TypeLink, Name: name, Linkname: to} }
	for name, hs := range map[string][]tar.Header{
		"dot dot":               {reg("../victim")},
		"dot dot inside":        {reg("a/../../victim")},
		"absolute":              {reg("/victim")},
		"relative link parent":  {sym("l", ".."), reg("l/victim")},
		"absolute link parent":  {sym("l", "/"), reg("l/victim")},
		"link over link":        {sym("l", "."), sym("l/m", ".."), reg("l/m/victim")},
		"link below link":       {sym("a", "b"), sym("b", ".."), reg("a/victim")},
		"hard link out":         {hard("h", "../victim")},
		"hard link absolute":    {hard("h", "/victim")},
		"hard link by link":     {sym("l", ".."), hard("h", "l/victim")},
		"directory by link":     {sym("l", ".."), {Typeflag: tar.TypeDir, Name: "l/newdir", Mode: 0o777}},
		"char device":           {{Typeflag: tar.TypeChar, Name: "dev", Devmajor: 1, Devminor: 3}},
		"block device":          {{Typeflag: tar.TypeBlock, Name: "dev", Devmajor: 8}},
		"file through its link": {sym("f", "../victim"), reg("f")}, // replaces the link, which is fine
		"dir over its link":     {sym("f", ".."), {Typeflag: tar.TypeDir, Name: "f", Mode: 0o777}},
		"fifo by link":          {sym("l", ".."), {Typeflag: tar.TypeFifo, Name: "l/fifo"}},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			must(t, os.MkdirAll(filepath.Join(root, "in"), 0o755))
			must(t, os.WriteFile(filepath.Join(root, "victim"), []byte("good"), 0o600))
			before, _ := os.Stat(root)
			_, err := bulk(root, guest.BulkOp{Kind: "untar", Path: "/in"}, pack(t, hs...))
			fine := name == "file through its link" || name == "dir over its link"
			if fine != (err == nil) || err != nil && !errors.Is(err, sandbox.ErrInvalid) {
				t.Errorf("%v", err)
			}
			if b, _ := os.ReadFile(filepath.Join(root, "victim")); string(b) != "good" {
				t.Errorf("victim: %q", b)
			}
			fi, _ := os.Stat(filepath.Join(root, "victim"))
			if fi.Mode() != 0o600 || fi.Sys().(*syscall.Stat_t).Nlink != 1 {
				t.Errorf("victim: %v", fi)
			}
			after, _ := os.Stat(root)
			if ents, _ := os.ReadDir(root); len(ents) != 2 || before.Mode() != after.Mode() {
				t.Errorf("outside: %v %v", ents, after.Mode())
			}
			for _, bad := range []string{"dev", "h"} {
				if _, err := os.Lstat(filepath.Join(root, "in", bad)); err == nil {
					t.Errorf("%s was made", bad)
				}
			}
		})
	}
}

func TestLinksThatStayBelowAreFollowed(t *testing.T) {
	root := t.TempDir()
	must(t, os.MkdirAll(filepath.Join(root, "usr/bin"), 0o755))
	must(t, os.Symlink("usr/bin", filepath.Join(root, "bin")))
	if _, err := bulk(root, guest.BulkOp{Kind: "untar", Path: "/"}, pack(t, tar.Header{Typeflag: tar.TypeDir, Name: "bin", Mode: 0o755}, tar.Header{Typeflag: tar.TypeReg, Name: "bin/tool"})); err != nil {
		t.Fatal(err)
	}
	if b, _ := os.ReadFile(filepath.Join(root, "usr/bin/tool")); string(b) != "evil" {
		t.Errorf("%q", b)
	}
}

func TestATarThatIsNoneIsRefused(t *testing.T) {
	root := t.TempDir()
	whole, _ := io.ReadAll(pack(t, tar.Header{Typeflag: tar.TypeReg, Name: "a"}, tar.Header{Typeflag: tar.TypeReg, Name: "b"}))
	for name, in := range map[string]string{
		"garbage": strings.Repeat("garbage!", 1000),
		"cut":     string(whole[:514]),
		"header":  string(whole[:100]),
	} {
		if _, err := bulk(root, guest.BulkOp{Kind: "untar", Path: "/"}, strings.NewReader(in)); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A small tar comes with its request, and is as hostile as one in a transfer.
func TestUntarRequest(t *testing.T) {
	b := newBox(t)
	read := func(r io.Reader) []byte {
		data, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	good := read(pack(t, tar.Header{Typeflag: tar.TypeDir, Name: "d", Mode: 0o750}, tar.Header{Typeflag: tar.TypeReg, Name: "d/f", Mode: 0o600}))
	for range 2 { // again is the same
		if err := b.Untar(t.Context(), "/made/for/it", good, sandbox.WriteOptions{Parents: true}); err != nil {
			t.Fatal(err)
		}
	}
	if info, err := b.Stat(t.Context(), "/made/for/it/d/f"); err != nil || info.Mode != 0o600 {
		t.Errorf("%+v %v", info, err)
	}
	for name, c := range map[string]struct {
		path string
		tar  []byte
		want error
	}{
		"no directory": {"/none", good, sandbox.ErrNotFound},
		"climbing":     {"/made", read(pack(t, tar.Header{Typeflag: tar.TypeReg, Name: "../x"})), sandbox.ErrInvalid},
		"cut off":      {"/made", good[:700], sandbox.ErrInvalid},
		"too large":    {"/made", make([]byte, wire.MaxUntar+1), sandbox.ErrTooLarge},
	} {
		if err := b.Untar(t.Context(), c.path, c.tar, sandbox.WriteOptions{}); !errors.Is(err, c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := b.Untar(t.Context(), "/made", good, sandbox.WriteOptions{}); err != nil {
		t.Errorf("after those that were refused: %v", err)
	}
}
