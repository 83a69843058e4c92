package nodetest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"path"
	"strings"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/sandbox"
)

func (s *suite) testFiles(t *testing.T) {
	ctx, n, id := t.Context(), s.Node, s.box(t)
	_, err := n.WriteFile(ctx, id, "no/dir", []byte("x"), sandbox.WriteOptions{})
	expect(t, "no directory", err, sandbox.ErrNotFound)
	f, err := n.WriteFile(ctx, id, "a/b/f", []byte("content"), sandbox.WriteOptions{Parents: true, Mode: 0o640})
	if err != nil || f.Size != 7 || f.Mode != 0o640 || f.Type != sandbox.Regular || f.Name != "f" {
		t.Errorf("%+v, %v", f, err)
	}
	_, err = n.WriteFile(ctx, id, "a/b/f", []byte(" and more"), sandbox.WriteOptions{Append: true})
	must(t, "append", err)
	s.expectFile(t, id, "a/b/f", "content and more")
	if got, info, err := n.ReadFile(ctx, id, "a/b/f", 8, 3); err != nil || string(got) != "and" || info.Size != 16 {
		t.Errorf("a part: %q, %+v, %v", got, info, err)
	}
	_, _, err = n.ReadFile(ctx, id, "a/none", 0, 0)
	expect(t, "no file", err, sandbox.ErrNotFound)
	big := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	s.write(t, id, "big", string(big))
	s.expectFile(t, id, "big", string(big))
	d, err := n.MakeDir(ctx, id, "d", sandbox.WriteOptions{})
	if err != nil || d.Type != sandbox.Directory {
		t.Errorf("%+v, %v", d, err)
	}
	for i := range 5 {
		s.write(t, id, fmt.Sprint("d/", i), "")
	}
	files, truncated, err := n.ListFiles(ctx, id, "d", sandbox.ListOptions{Depth: 1})
	if err != nil || len(files) != 5 || truncated {
		t.Errorf("%+v, %v, %v", files, truncated, err)
	}
	files, truncated, err = n.ListFiles(ctx, id, "d", sandbox.ListOptions{Depth: 1, Limit: 2})
	if err != nil || len(files) != 2 || !truncated {
		t.Errorf("%+v, %v, %v", files, truncated, err)
	}
	if f, err = n.MoveFile(ctx, id, "d/1", "d/one"); err != nil || f.Name != "one" {
		t.Errorf("%+v, %v", f, err)
	}
	must(t, "chmod", n.Chmod(ctx, id, "d/one", 0o755, false))
	must(t, "chown", n.Chown(ctx, id, "d/one", fmt.Sprintf("%d:%d", f.UID, f.GID), false))
	s.testAttributes(t, id)
	if f, err = n.StatFile(ctx, id, "d/one"); err != nil || f.Mode != 0o755 || f.ModTime.IsZero() {
		t.Errorf("%+v, %v", f, err)
	}
	if err := n.RemoveFile(ctx, id, "d", false); err == nil {
		t.Error("a directory that is not empty is removed")
	}
	must(t, "remove", n.RemoveFile(ctx, id, "d", true))
	_, err = n.StatFile(ctx, id, "d")
	expect(t, "stat", err, sandbox.ErrNotFound)
}

// testAttributes: what is set is told by all that describe a file, and goes with it.
func (s *suite) testAttributes(t *testing.T, id string) {
	ctx, n := t.Context(), s.Node
	want := map[string]string{"author": "mish", "e2b.purpose": "upload of \"x\""}
	set, err := n.SetAttributes(ctx, id, "d/one", want)
	stat, serr := n.StatFile(ctx, id, "d/one")
	_, read, rerr := n.ReadFile(ctx, id, "d/one", 0, 0)
	list, _, lerr := n.ListFiles(ctx, id, "d", sandbox.ListOptions{Attributes: true})
	listed := sandbox.FileInfo{}
	for _, f := range list {
		if f.Name == "one" {
			listed = f
		}
	}
	for name, f := range map[string]sandbox.FileInfo{"set": set, "stat": stat, "read": read, "list": listed} {
		if !maps.Equal(f.Attributes, want) {
			t.Errorf("%s: %v", name, f.Attributes)
		}
	}
	must(t, "attributes", errors.Join(err, serr, rerr, lerr))
	moved, err := n.MoveFile(ctx, id, "d/one", "d/two")
	if err != nil || !maps.Equal(moved.Attributes, want) {
		t.Errorf("moved: %v, %v", moved.Attributes, err)
	}
	_, err = n.MoveFile(ctx, id, "d/two", "d/one")
	must(t, "move", err)
	if f, err := n.SetAttributes(ctx, id, "d/one", map[string]string{"author": "other"}); err != nil || len(f.Attributes) != 1 || f.Attributes["author"] != "other" {
		t.Errorf("replaced: %v, %v", f.Attributes, err)
	}
	if f, err := n.SetAttributes(ctx, id, "d/one", nil); err != nil || len(f.Attributes) != 0 {
		t.Errorf("none: %v, %v", f.Attributes, err)
	}
	_, err = n.SetAttributes(ctx, id, "d/none", want)
	expect(t, "no file", err, sandbox.ErrNotFound)
}

func (s *suite) testWatch(t *testing.T) {
	id := s.box(t)
	for ch, err := range s.Node.Watch(t.Context(), id, ".", true) {
		must(t, "watch", err)
		if ch.Op == "ready" {
			s.write(t, id, "seen", "x")
		} else if strings.HasSuffix(ch.Path, "seen") {
			break
		}
	}
	ctx, leave := context.WithCancel(t.Context())
	var err error
	for _, err = range s.Node.Watch(ctx, id, ".", false) {
		leave()
	}
	leave()
	expect(t, "leaving", err, sandbox.ErrCanceled)
}

// random is content that no two transfers share, and its digest.
func random(n int) (*bytes.Reader, [32]byte) {
	b := make([]byte, n)
	r := rand.NewChaCha8([32]byte{byte(n)})
	_, _ = r.Read(b)
	return bytes.NewReader(b), sha256.Sum256(b)
}

// unsized hides what a reader is but that it reads, a little at a time.
type unsized struct{ r io.Reader }

func (u unsized) Read(p []byte) (int, error) { return u.r.Read(p[:min(len(p), 70_000)]) }

func (s *suite) testUpload(t *testing.T) {
	ctx, id := t.Context(), s.box(t)
	const size = 20<<20 + 7
	for i, opt := range []sandbox.WriteOptions{{Parents: true}, {Atomic: true, Mode: 0o600}, {Append: true}} {
		r, sum := random(size)
		must(t, "upload", s.Node.Upload(ctx, id, node.Upload{Path: "a/big", Write: opt}, unsized{r}))
		from := node.Download{Path: "a/big"}
		if opt.Append {
			from.Offset = size
		}
		h := sha256.New()
		must(t, "download", s.Node.Download(ctx, id, from, h))
		if [32]byte(h.Sum(nil)) != sum {
			t.Errorf("round %d: what comes back is not what went in", i)
		}
	}
	must(t, "nothing", s.Node.Upload(ctx, id, node.Upload{Path: "empty"}, strings.NewReader("")))
	s.expectFile(t, id, "empty", "")
	expect(t, "no directory", s.Node.Upload(ctx, id, node.Upload{Path: "none/f"}, strings.NewReader("x")), sandbox.ErrNotFound)
}

// An atomic upload looks as it says, and where it says nothing like the file that it
// replaces.
func (s *suite) testUploadLooks(t *testing.T) {
	ctx, id := t.Context(), s.box(t)
	put := func(path string, opt sandbox.WriteOptions) sandbox.FileInfo {
		t.Helper()
		opt.Atomic = true
		must(t, "upload", s.Node.Upload(ctx, id, node.Upload{Path: path, Write: opt}, unsized{strings.NewReader("content")}))
		info, err := s.Node.StatFile(ctx, id, path)
		must(t, "stat", err)
		return info
	}
	for _, step := range []struct{ say, want uint32 }{{0, 0o644}, {0o640, 0o640}, {0, 0o640}, {0o4711, 0o4711}, {0, 0o4711}, {0o751, 0o751}} {
		if got := put("f", sandbox.WriteOptions{Mode: step.say}).Mode; got != step.want {
			t.Errorf("mode %o, want %o", got, step.want)
		}
	}
	if err := s.Node.Chown(ctx, id, "f", "1000:1001", false); err != nil {
		t.Skipf("files cannot be given away here: %v", err)
	}
	for _, step := range []struct {
		user     string
		uid, gid uint32
	}{{"", 1000, 1001}, {"7:8", 7, 8}, {"", 7, 8}} {
		if got := put("f", sandbox.WriteOptions{User: step.user}); got.UID != step.uid || got.GID != step.gid || got.Mode != 0o751 {
			t.Errorf("as %q: %d:%d %o, want %d:%d", step.user, got.UID, got.GID, got.Mode, step.uid, step.gid)
		}
	}
	if got := put("new", sandbox.WriteOptions{User: "7:8"}); got.UID != 7 || got.GID != 8 || got.Mode != 0o644 {
		t.Errorf("a new one: %+v", got)
	}
}

// breaking gives some content and then its error.
type breaking struct {
	left int
	err  error
}

func (b *breaking) Read(p []byte) (int, error) {
	if b.left == 0 {
		return 0, b.err
	}
	n := min(len(p), b.left)
	b.left -= n
	return n, nil
}

// Content that breaks off is not taken for whole, and its error is the answer.
func (s *suite) testUploadBreaksOff(t *testing.T) {
	ctx, id := t.Context(), s.box(t)
	s.write(t, id, "f", "as it was")
	tooLarge := &sandbox.Error{Class: sandbox.TooLarge, Msg: "more than is accepted"}
	for _, size := range []int{0, 100, 5 << 20} {
		err := s.Node.Upload(ctx, id, node.Upload{Path: "f", Write: sandbox.WriteOptions{Atomic: true}}, &breaking{size, tooLarge})
		if err != error(tooLarge) {
			t.Errorf("after %d bytes: %v", size, err)
		}
		s.expectFile(t, id, "f", "as it was")
	}
	// Its caller leaves while it waits for more.
	pr, pw := io.Pipe()
	defer pw.Close()
	leaving, leave := context.WithCancel(ctx)
	go func() {
		_, _ = pw.Write([]byte("some"))
		leave()
	}()
	expect(t, "leaving", s.Node.Upload(leaving, id, node.Upload{Path: "f", Write: sandbox.WriteOptions{Atomic: true}}, pr), sandbox.ErrCanceled)
	s.expectFile(t, id, "f", "as it was")
	await(t, func() (any, bool) { // what was begun is gone
		files, _, err := s.Node.ListFiles(ctx, id, ".", sandbox.ListOptions{Depth: 1})
		for _, f := range files {
			if strings.Contains(f.Name, "upload") {
				return fmt.Sprint("left: ", f.Name), false
			}
		}
		return err, err == nil
	})
	// A target that fails is not waited for by who has nothing to say.
	silent, never := io.Pipe()
	defer never.Close()
	defer silent.Close()
	err := s.Node.Upload(ctx, id, node.Upload{Path: "none/f"}, silent)
	expect(t, "a silent reader", err, sandbox.ErrNotFound)
}

// full takes so much and then fails.
type full struct {
	free int
	err  error
}

func (f *full) Write(p []byte) (int, error) {
	if f.free -= len(p); f.free < 0 {
		return 0, f.err
	}
	return len(p), nil
}

func (s *suite) testDownload(t *testing.T) {
	ctx, id := t.Context(), s.box(t)
	s.exec(t, id, "seq 1 500000 > f")
	var b bytes.Buffer
	must(t, "a part", s.Node.Download(ctx, id, node.Download{Path: "f", Offset: 4, Length: 5}, &b))
	if b.String() != "3\n4\n5" {
		t.Errorf("%q", b.String())
	}
	expect(t, "no file", s.Node.Download(ctx, id, node.Download{Path: "none"}, io.Discard), sandbox.ErrNotFound)
	errFull := errors.New("no room")
	if err := s.Node.Download(ctx, id, node.Download{Path: "f"}, &full{100_000, errFull}); !errors.Is(err, errFull) {
		t.Errorf("a writer that fails: %v", err)
	}
	leaving, leave := context.WithCancel(ctx)
	defer leave()
	pr, pw := io.Pipe()
	done := make(chan error, 1)
	go func() {
		done <- s.Node.Download(leaving, id, node.Download{Path: "f"}, pw)
	}()
	_, err := io.ReadFull(pr, make([]byte, 1000))
	must(t, "read", err)
	leave()
	pr.CloseWithError(context.Canceled)
	select {
	case err = <-done:
	case <-time.After(patience):
		t.Fatal("it goes on without its caller")
	}
	if err == nil {
		t.Error("half of it is taken for whole")
	}
}

func (s *suite) testTree(t *testing.T) {
	ctx, id := t.Context(), s.box(t)
	s.write(t, id, "from/a", "A")
	s.write(t, id, "from/sub/b", strings.Repeat("B", 3<<20))
	var tar bytes.Buffer
	must(t, "download", s.Node.Download(ctx, id, node.Download{Path: "from", Tar: true}, &tar))
	// Padding behind the end, as tar's own blocking makes it, is part of the content.
	padded := io.MultiReader(&tar, bytes.NewReader(make([]byte, 1<<20)))
	must(t, "upload", s.Node.Upload(ctx, id, node.Upload{Path: "to", Tar: true, Write: sandbox.WriteOptions{Parents: true}}, padded))
	s.expectFile(t, id, "to/a", "A")
	s.expectFile(t, id, "to/sub/b", strings.Repeat("B", 3<<20))
	if err := s.Node.Upload(ctx, id, node.Upload{Path: "bad", Tar: true, Write: sandbox.WriteOptions{Parents: true}}, strings.NewReader(strings.Repeat("no tar", 1000))); err == nil {
		t.Error("what is no tar is unpacked")
	}
}

// testJudged: a tar for a user who comes after another finds what is to be gone gone,
// and the user its way there.
func (s *suite) testJudged(t *testing.T) {
	ctx, id := t.Context(), s.box(t)
	s.write(t, id, "shut/work/old/file", "old")
	s.write(t, id, "from/new", "new")
	here, err := s.Node.StatFile(ctx, id, "shut")
	must(t, "stat", err)
	must(t, "chmod", s.Node.Chmod(ctx, id, "shut", 0o700, false))
	var tar bytes.Buffer
	must(t, "download", s.Node.Download(ctx, id, node.Download{Path: "from", Tar: true}, &tar))
	work := path.Join(here.Path, "work")
	to := node.Upload{Path: work, Tar: true, Write: sandbox.WriteOptions{User: fmt.Sprintf("%d:%d", here.UID, here.GID), Parents: true},
		Remove: []string{path.Join(work, "old"), path.Join(work, "none")}, Open: []string{work, path.Join(work, "none")}}
	for range 2 { // where nothing is left to do, nothing is an error
		must(t, "upload", s.Node.Upload(ctx, id, to, bytes.NewReader(tar.Bytes())))
	}
	s.expectFile(t, id, "shut/work/new", "new")
	_, err = s.Node.StatFile(ctx, id, "shut/work/old")
	expect(t, "what was removed", err, sandbox.ErrNotFound)
	if info, err := s.Node.StatFile(ctx, id, "shut"); err != nil || info.Mode != 0o711 {
		t.Errorf("%o, %v", info.Mode, err)
	}
	to.Write.User = "nobody"
	expect(t, "a user by name", s.Node.Upload(ctx, id, to, bytes.NewReader(tar.Bytes())), sandbox.ErrInvalid)
}
