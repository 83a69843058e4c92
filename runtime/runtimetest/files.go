package runtimetest

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/sandbox"
)

func (s *suite) testFiles(t *testing.T) {
	k := s.attached(t, s.open(t))
	g, ctx := k.Guest(), deadline(t)
	want := pattern(100_000)
	if _, err := g.WriteFile(ctx, "/dir/file", want, sandbox.WriteOptions{User: "root", Parents: true, Mode: 0o640}); err != nil {
		t.Fatalf("write: %v", err)
	}
	spec := shell("cksum < file; ls -l file | cut -c 1-10")
	spec.Cwd = "/dir"
	if r := s.exec(t, k, spec); !bytes.Contains([]byte(r.stdout), []byte(" 100000\n-rw-r-----")) {
		t.Errorf("a process sees %q", r.stdout)
	}
	got, info, err := g.ReadFile(ctx, "/dir/file", 500, 1000)
	if err != nil || !bytes.Equal(got, want[500:1500]) || info.Size != 100_000 {
		t.Errorf("range: %d bytes of %d, %v", len(got), info.Size, err)
	}
	spec = shell("echo from inside > other; ln -s file link")
	spec.Cwd = "/dir"
	s.exec(t, k, spec)
	list, _, err := g.List(ctx, "/dir", sandbox.ListOptions{Depth: 1, Limit: 10})
	if err != nil || len(list) != 3 {
		t.Errorf("list %+v, %v", list, err)
	}
	if info, err := g.Stat(ctx, "/dir/link"); err != nil || info.Type != sandbox.Symlink || info.Target != "file" {
		t.Errorf("stat of a link %+v, %v", info, err)
	}
	if err := g.Remove(ctx, "/dir", true); err != nil {
		t.Error(err)
	}
	if _, err := g.Stat(ctx, "/dir"); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("stat after remove: %v", err)
	}
}

func (s *suite) testBulkFile(t *testing.T) {
	k := s.attached(t, s.open(t))
	want := pattern(8 << 20)
	in := hostFile(t, want)
	if err := k.Bulk(deadline(t), guest.BulkOp{Kind: "write", Path: "/up/big", Write: sandbox.WriteOptions{User: "root", Parents: true, Mode: 0o600}}, in, nil); err != nil {
		t.Fatalf("up: %v", err)
	}
	spec := shell("wc -c < big")
	spec.Cwd = "/up"
	if r := s.exec(t, k, spec); r.stdout != "8388608\n" {
		t.Errorf("a process sees %q bytes", r.stdout)
	}
	for _, c := range []struct{ offset, length, end int64 }{{0, 0, 8 << 20}, {12345, 0, 8 << 20}, {1000, 2 << 20, 1000 + 2<<20}} {
		out := hostFile(t, nil)
		if err := k.Bulk(deadline(t), guest.BulkOp{Kind: "read", Path: "/up/big", Offset: c.offset, Length: c.length}, nil, out); err != nil {
			t.Fatalf("down: %v", err)
		}
		if got := content(t, out); !bytes.Equal(got, want[c.offset:c.end]) {
			t.Errorf("from %d, %d: %d bytes came back, and not those", c.offset, c.length, len(got))
		}
	}
	err := k.Bulk(deadline(t), guest.BulkOp{Kind: "read", Path: "/no/such"}, nil, hostFile(t, nil))
	expectClass(t, "a file that is not there", err, sandbox.NotFound)
}

func (s *suite) testBulkTree(t *testing.T) {
	k := s.attached(t, s.open(t))
	var up bytes.Buffer
	w := tar.NewWriter(&up)
	for _, f := range []struct {
		name string
		mode int64
		body string
	}{{"a", 0o644, "one"}, {"sub/b", 0o755, "two"}} {
		if err := errors.Join(w.WriteHeader(&tar.Header{Name: f.name, Mode: f.mode, Size: int64(len(f.body)), Typeflag: tar.TypeReg}),
			func() error { _, err := w.Write([]byte(f.body)); return err }()); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if err := k.Bulk(deadline(t), guest.BulkOp{Kind: "untar", Path: "/tree", Write: sandbox.WriteOptions{User: "root", Parents: true}}, hostFile(t, up.Bytes()), nil); err != nil {
		t.Fatalf("up: %v", err)
	}
	spec := shell("cat a sub/b; test -x sub/b; echo three > sub/c")
	spec.Cwd = "/tree"
	if r := s.exec(t, k, spec); r.stdout != "onetwo" || r.end.ExitCode != 0 {
		t.Errorf("%+v", r)
	}
	out := hostFile(t, nil)
	if err := k.Bulk(deadline(t), guest.BulkOp{Kind: "tar", Path: "/tree"}, nil, out); err != nil {
		t.Fatalf("down: %v", err)
	}
	files := map[string]string{}
	for r := tar.NewReader(bytes.NewReader(content(t, out))); ; {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if h.Typeflag == tar.TypeReg {
			b, err := io.ReadAll(r)
			if err != nil {
				t.Fatal(err)
			}
			files[filepath.Clean(h.Name)] = string(b)
		}
	}
	if len(files) != 3 || files["a"] != "one" || files["sub/b"] != "two" || files["sub/c"] != "three\n" {
		t.Errorf("came back as %v", files)
	}
}

// testBulkDiskFull: a full disk of the host is told from other broken outputs,
// also when there is room again by the time anyone looks.
func (s *suite) testBulkDiskFull(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "tried with a small disk", s.SmallDir != nil)
	k := s.attached(t, d)
	if err := k.Bulk(deadline(t), guest.BulkOp{Kind: "write", Path: "/up/big", Write: sandbox.WriteOptions{Parents: true}}, hostFile(t, pattern(3<<20)), nil); err != nil {
		t.Fatal(err)
	}
	for kind, path := range map[string]string{"tar": "/up", "read": "/up/big"} {
		out, err := os.Create(filepath.Join(s.SmallDir(t, 1<<20), "out"))
		if err != nil {
			t.Fatal(err)
		}
		err = k.Bulk(deadline(t), guest.BulkOp{Kind: kind, Path: path}, nil, out)
		expectClass(t, kind, err, sandbox.DiskFull)
		if err := out.Close(); err != nil {
			t.Error(err)
		}
	}
}

// hostFile is a file on the host with some content, read from its beginning.
func hostFile(t *testing.T, b []byte) *os.File {
	t.Helper()
	f, err := os.CreateTemp(t.TempDir(), "bulk")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if _, err := f.Write(b); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		t.Fatal(err)
	}
	return f
}

func content(t *testing.T, f *os.File) []byte {
	t.Helper()
	b, err := os.ReadFile(f.Name())
	if err != nil {
		t.Fatal(err)
	}
	return b
}
