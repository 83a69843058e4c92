package agent_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

func TestFilesAreWrittenReadAndDescribed(t *testing.T) {
	b := newBox(t)
	ctx := t.Context()
	info, err := b.WriteFile(ctx, "/a/b/c.txt", []byte("hello world"), sandbox.WriteOptions{Parents: true, Mode: 0o640})
	if err != nil || info.Path != "/a/b/c.txt" || info.Name != "c.txt" || info.Size != 11 || info.Mode != 0o640 || info.Type != sandbox.Regular {
		t.Fatalf("%v %+v", err, info)
	}
	for _, c := range []struct {
		off, n int64
		want   string
	}{{0, 0, "hello world"}, {6, 0, "world"}, {0, 5, "hello"}, {6, 100, "world"}, {100, 0, ""}} {
		data, info, err := b.ReadFile(ctx, "/a/b/c.txt", c.off, c.n)
		if err != nil || string(data) != c.want || info.Size != 11 {
			t.Errorf("read %d+%d: %v %q", c.off, c.n, err, data)
		}
	}
	if info, err = b.WriteFile(ctx, "/a/b/c.txt", []byte("!"), sandbox.WriteOptions{Append: true}); err != nil || info.Size != 12 || info.Mode != 0o640 {
		t.Errorf("append: %v %+v", err, info)
	}
	if info, err = b.WriteFile(ctx, "/a/b/c.txt", []byte("new"), sandbox.WriteOptions{Atomic: true}); err != nil || info.Size != 3 || info.Mode != 0o640 {
		t.Errorf("atomic: %v %+v", err, info)
	}
	if info, err = b.WriteFile(ctx, "/empty", nil, sandbox.WriteOptions{}); err != nil || info.Size != 0 || info.Mode != 0o644 {
		t.Errorf("empty: %v %+v", err, info)
	}
	big := bytes.Repeat([]byte("0123456789abcdef"), 1<<20)
	if _, err := b.WriteFile(ctx, "/big", big, sandbox.WriteOptions{}); err != nil {
		t.Fatal(err)
	}
	if data, _, err := b.ReadFile(ctx, "/big", 0, 0); err != nil || !bytes.Equal(data, big) {
		t.Errorf("16 MiB: %v, %d bytes", err, len(data))
	}
	if left, _ := filepath.Glob(filepath.Join(b.root, "a/b/.cove-*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestRelativePathsAreBelowTheWorkingDirectory(t *testing.T) {
	b := newBox(t) // its working directory is /work
	ctx := t.Context()
	if info, err := b.WriteFile(ctx, "a.txt", []byte("x"), sandbox.WriteOptions{}); err != nil || info.Path != "/work/a.txt" {
		t.Errorf("%+v %v", info, err)
	}
	if info, err := b.Move(ctx, "./a.txt", "../b.txt"); err != nil || info.Path != "/b.txt" {
		t.Errorf("%+v %v", info, err)
	}
	if info, err := b.Stat(ctx, "."); err != nil || info.Path != "/work" {
		t.Errorf("%+v %v", info, err)
	}
	if info, err := b.Stat(ctx, "../../../.."); err != nil || info.Path != "/" {
		t.Errorf("the root has no parent: %+v %v", info, err)
	}
}

// One rule for every way to write: through a symlink, into a device.
func TestWritesFollowLinksAndKeepDevices(t *testing.T) {
	b := newBox(t)
	ctx := t.Context()
	must(t, os.WriteFile(filepath.Join(b.root, "target"), []byte("old"), 0o640))
	must(t, os.Symlink("target", filepath.Join(b.root, "link")))
	must(t, os.Symlink("made", filepath.Join(b.root, "dangling")))
	for _, atomic := range []bool{false, true} {
		for link, target := range map[string]string{"link": "target", "dangling": "made"} {
			content := fmt.Sprint("new ", atomic)
			if _, err := b.WriteFile(ctx, "/"+link, []byte(content), sandbox.WriteOptions{Atomic: atomic}); err != nil {
				t.Errorf("%s: %v", link, err)
			}
			if got, _ := os.ReadFile(filepath.Join(b.root, target)); string(got) != content {
				t.Errorf("%s holds %q", target, got)
			}
			if st, err := os.Lstat(filepath.Join(b.root, link)); err != nil || st.Mode()&os.ModeSymlink == 0 {
				t.Errorf("%s is a link no more: %v %v", link, st, err)
			}
		}
	}
	null := filepath.Join(b.root, "null")
	if err := syscall.Mknod(null, syscall.S_IFCHR|0o666, 1<<8|3); err != nil {
		t.Skip("no right to make a device:", err)
	}
	must(t, os.Chmod(null, 0o666))
	for _, opt := range []sandbox.WriteOptions{{}, {Atomic: true, Mode: 0o600}, {Append: true}} {
		if _, err := b.WriteFile(ctx, "/null", []byte("x"), opt); err != nil {
			t.Errorf("%+v: %v", opt, err)
		}
	}
	if st, err := os.Lstat(null); err != nil || st.Mode() != os.ModeDevice|os.ModeCharDevice|0o666 {
		t.Errorf("/dev/null is now %v, %v", st, err)
	}
}

func TestPathsThatCannotBeAreRefused(t *testing.T) {
	b := newBox(t)
	for _, p := range []string{"", "/a\x00b", "/" + strings.Repeat("x", 5000)} {
		_, err := b.Stat(t.Context(), p)
		var e *sandbox.Error
		if !errors.Is(err, sandbox.ErrInvalid) || !errors.As(err, &e) || e.Field != "path" {
			t.Errorf("%q: %v", clipTest(p), err)
		}
	}
	if _, err := b.Stat(t.Context(), "/"+strings.Repeat("x", 300)); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("long name: %v", err)
	}
	if _, err := b.Stat(t.Context(), "/../../etc/.."); err != nil {
		t.Errorf("the root has no parent: %v", err)
	}
}

func clipTest(s string) string { return s[:min(len(s), 20)] }

func TestErrorsSayWhatIsWrong(t *testing.T) {
	b := newBox(t)
	ctx := t.Context()
	must(t, os.MkdirAll(filepath.Join(b.root, "dir/full"), 0o755))
	must(t, os.WriteFile(filepath.Join(b.root, "file"), []byte("x"), 0o644))
	must(t, syscall.Mkfifo(filepath.Join(b.root, "fifo"), 0o644))
	must(t, os.Symlink("loop2", filepath.Join(b.root, "loop1")))
	must(t, os.Symlink("loop1", filepath.Join(b.root, "loop2")))
	for name, c := range map[string]struct {
		err  error
		want error
	}{
		"read nothing":          {second(b.ReadFile(ctx, "/none", 0, 0)), sandbox.ErrNotFound},
		"read a directory":      {second(b.ReadFile(ctx, "/dir", 0, 0)), sandbox.ErrPrecondition},
		"read a FIFO":           {second(b.ReadFile(ctx, "/fifo", 0, 0)), sandbox.ErrPrecondition},
		"read a loop":           {second(b.ReadFile(ctx, "/loop1", 0, 0)), sandbox.ErrInvalid},
		"read below a file":     {second(b.ReadFile(ctx, "/file/x", 0, 0)), sandbox.ErrPrecondition},
		"negative offset":       {second(b.ReadFile(ctx, "/file", -1, 0)), sandbox.ErrInvalid},
		"write a FIFO":          {first(b.WriteFile(ctx, "/fifo", []byte("x"), sandbox.WriteOptions{})), sandbox.ErrPrecondition},
		"write a directory":     {first(b.WriteFile(ctx, "/dir", []byte("x"), sandbox.WriteOptions{})), sandbox.ErrPrecondition},
		"atomic on a directory": {first(b.WriteFile(ctx, "/dir", []byte("x"), sandbox.WriteOptions{Atomic: true})), sandbox.ErrPrecondition},
		"write the root":        {first(b.WriteFile(ctx, "/", []byte("x"), sandbox.WriteOptions{})), sandbox.ErrPrecondition},
		"write nowhere":         {first(b.WriteFile(ctx, "/no/where", []byte("x"), sandbox.WriteOptions{})), sandbox.ErrNotFound},
		"write with bad mode":   {first(b.WriteFile(ctx, "/m", []byte("x"), sandbox.WriteOptions{Mode: 0o100644})), sandbox.ErrInvalid},
		"append atomically":     {first(b.WriteFile(ctx, "/m", []byte("x"), sandbox.WriteOptions{Atomic: true, Append: true})), sandbox.ErrInvalid},
		"mkdir that exists":     {first(b.Mkdir(ctx, "/dir", sandbox.WriteOptions{})), sandbox.ErrAlreadyExists},
		"mkdir over a file":     {first(b.Mkdir(ctx, "/file", sandbox.WriteOptions{Parents: true})), sandbox.ErrPrecondition},
		"mkdir without parents": {first(b.Mkdir(ctx, "/x/y", sandbox.WriteOptions{})), sandbox.ErrNotFound},
		"remove nothing":        {b.Remove(ctx, "/none", true), sandbox.ErrNotFound},
		"remove a full one":     {b.Remove(ctx, "/dir", false), sandbox.ErrPrecondition},
		"remove the root":       {b.Remove(ctx, "/", true), sandbox.ErrInvalid},
		"move nothing":          {first(b.Move(ctx, "/none", "/x")), sandbox.ErrNotFound},
		"move into itself":      {first(b.Move(ctx, "/dir", "/dir/full/x")), sandbox.ErrInvalid},
		"list a file":           {third(b.List(ctx, "/file", sandbox.ListOptions{})), sandbox.ErrPrecondition},
		"chown to nobody known": {b.Chown(ctx, "/file", "no-such-user", false), sandbox.ErrInvalid},
		"chmod out of range":    {b.Chmod(ctx, "/file", 0o10000, false), sandbox.ErrInvalid},
		"watch nothing":         {b.Watch(ctx, "/none", false, nil), sandbox.ErrNotFound},
	} {
		var e *sandbox.Error
		if !errors.Is(c.err, c.want) || !errors.As(c.err, &e) || e.Op == "" || strings.Contains(e.Error(), b.root) {
			t.Errorf("%s: %v", name, c.err)
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
func first[A any](_ A, err error) error          { return err }
func second[A, B any](_ A, _ B, err error) error { return err }
func third[A, B any](_ A, _ B, err error) error  { return err }

func TestSymlinksAreDescribedFollowedForContentAndNeverLeadOut(t *testing.T) {
	b := newBox(t)
	ctx := t.Context()
	outside := filepath.Join(t.TempDir(), "secret")
	must(t, os.WriteFile(outside, []byte("host"), 0o644))
	must(t, os.WriteFile(filepath.Join(b.root, "real"), []byte("real"), 0o644))
	must(t, os.Symlink("/real", filepath.Join(b.root, "abs")))
	must(t, os.Symlink(outside, filepath.Join(b.root, "out")))
	must(t, os.Symlink("../../../../../../../.."+outside, filepath.Join(b.root, "up")))
	must(t, os.Symlink("fresh", filepath.Join(b.root, "dangling")))
	if info, err := b.Stat(ctx, "/abs"); err != nil || info.Type != sandbox.Symlink || info.Target != "/real" {
		t.Errorf("%v %+v", err, info)
	}
	if data, _, err := b.ReadFile(ctx, "/abs", 0, 0); err != nil || string(data) != "real" {
		t.Errorf("%v %q", err, data)
	}
	for _, p := range []string{"/out", "/up"} {
		if data, _, err := b.ReadFile(ctx, p, 0, 0); !errors.Is(err, sandbox.ErrNotFound) {
			t.Errorf("%s: %v %q", p, err, data)
		}
	}
	if _, err := b.WriteFile(ctx, "/dangling", []byte("x"), sandbox.WriteOptions{}); err != nil {
		t.Error(err)
	}
	if data, _ := os.ReadFile(filepath.Join(b.root, "fresh")); string(data) != "x" {
		t.Errorf("%q", data)
	}
}

func TestRemoveTakesDownAnythingAndFollowsNothing(t *testing.T) {
	b := newBox(t)
	keep := filepath.Join(b.root, "keep")
	must(t, os.MkdirAll(keep, 0o755))
	must(t, os.WriteFile(filepath.Join(keep, "me"), nil, 0o644))

	// A symlink farm, a wide directory, one nested deeper than any path.
	farm := filepath.Join(b.root, "farm")
	must(t, os.MkdirAll(farm, 0o755))
	for i := range 3000 {
		must(t, os.Symlink([]string{"/keep", keep, "..", "/", "."}[i%5], filepath.Join(farm, fmt.Sprint(i))))
	}
	cur, err := os.Open(farm)
	must(t, err)
	for range 3000 {
		must(t, syscall.Mkdirat(int(cur.Fd()), "d", 0o755))
		fd, err := syscall.Openat(int(cur.Fd()), "d", syscall.O_RDONLY, 0)
		must(t, err)
		cur.Close()
		cur = os.NewFile(uintptr(fd), "d")
	}
	cur.Close()
	if err := b.Remove(t.Context(), "/farm", true); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(farm); !os.IsNotExist(err) {
		t.Errorf("still there: %v", err)
	}
	if _, err := os.Stat(filepath.Join(keep, "me")); err != nil {
		t.Error("a symlink was followed")
	}
	must(t, os.Symlink("keep", filepath.Join(b.root, "link")))
	if err := b.Remove(t.Context(), "/link", true); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(keep, "me")); err != nil {
		t.Error("removing a link removed its target")
	}
}

func TestListByDepthAndLimit(t *testing.T) {
	b := newBox(t)
	for _, d := range []string{"t/a/b/c", "t/z"} {
		must(t, os.MkdirAll(filepath.Join(b.root, d), 0o755))
	}
	must(t, os.WriteFile(filepath.Join(b.root, "t/a/f"), []byte("1234"), 0o600))
	must(t, os.Symlink("/t", filepath.Join(b.root, "t/again")))
	names := func(depth, limit int) (string, bool) {
		files, cut, err := b.List(t.Context(), "/t", sandbox.ListOptions{Depth: depth, Limit: limit})
		must(t, err)
		var s []string
		for _, f := range files {
			s = append(s, strings.TrimPrefix(f.Path, "/t/"))
		}
		return strings.Join(s, " "), cut
	}
	for _, c := range []struct {
		depth, limit int
		want         string
		cut          bool
	}{{0, 0, "a again z", false}, {1, 2, "a again", true}, {2, 0, "a a/b a/f again z", false}, {9, 0, "a a/b a/b/c a/f again z", false}} {
		if got, cut := names(c.depth, c.limit); got != c.want || cut != c.cut {
			t.Errorf("depth %d limit %d: %q %v", c.depth, c.limit, got, cut)
		}
	}
	if _, _, err := b.List(t.Context(), "/t", sandbox.ListOptions{Depth: -1}); !errors.Is(err, sandbox.ErrInvalid) {
		t.Error(err)
	}
}

func TestMkdirMoveChmodChown(t *testing.T) {
	b := newBox(t)
	ctx := t.Context()
	info, err := b.Mkdir(ctx, "/x/y/z", sandbox.WriteOptions{Parents: true, Mode: 0o700})
	if err != nil || info.Type != sandbox.Directory || info.Mode != 0o700 {
		t.Fatalf("%v %+v", err, info)
	}
	if info, _ := b.Stat(ctx, "/x/y"); info.Mode != 0o755 {
		t.Errorf("parent %o", info.Mode)
	}
	if _, err := b.Mkdir(ctx, "/x/y/z", sandbox.WriteOptions{Parents: true}); err != nil {
		t.Errorf("again: %v", err)
	}
	must(t, os.WriteFile(filepath.Join(b.root, "x/y/f"), nil, 0o644))
	must(t, os.Symlink("/x/outside", filepath.Join(b.root, "x/y/l")))
	must(t, os.WriteFile(filepath.Join(b.root, "x/outside"), nil, 0o600))
	if info, err := b.Move(ctx, "/x/y", "/x/w"); err != nil || info.Path != "/x/w" {
		t.Errorf("%v %+v", err, info)
	}
	if err := b.Chmod(ctx, "/x/w", 0o711, true); err != nil {
		t.Error(err)
	}
	for p, want := range map[string]uint32{"/x/w": 0o711, "/x/w/z": 0o711, "/x/w/f": 0o711, "/x/outside": 0o600} {
		if info, err := b.Stat(ctx, p); err != nil || info.Mode != want {
			t.Errorf("%s: %v %o", p, err, info.Mode)
		}
	}
	if os.Getuid() != 0 {
		return
	}
	if err := b.Chown(ctx, "/x/w", "1234:4321", true); err != nil {
		t.Error(err)
	}
	for p, want := range map[string]uint32{"/x/w": 1234, "/x/w/l": 1234, "/x/w/f": 1234, "/x/outside": 0} {
		if info, err := b.Stat(ctx, p); err != nil || info.UID != want {
			t.Errorf("%s: %v %d", p, err, info.UID)
		}
	}
}

func TestWatchSeesWhatHappensAfterReady(t *testing.T) {
	b := newBox(t)
	must(t, os.MkdirAll(filepath.Join(b.root, "w/sub"), 0o755))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	changes := make(chan sandbox.FileChange, 1000)
	done := make(chan error, 1)
	go func() {
		done <- b.Watch(ctx, "/w", true, func(c sandbox.FileChange) error { changes <- c; return nil })
	}()
	if c := <-changes; c.Op != "ready" {
		t.Fatalf("%+v", c)
	}
	at := func(p string) string { return filepath.Join(b.root, p) }
	seen := map[sandbox.FileChange]bool{}
	expect := func(p, op string) {
		t.Helper()
		want := sandbox.FileChange{Path: p, Op: op}
		for timeout := time.After(20 * time.Second); !seen[want]; {
			select {
			case c := <-changes:
				seen[c] = true
			case <-timeout:
				t.Fatalf("no %+v", want)
			}
		}
	}
	must(t, os.WriteFile(at("w/f"), []byte("x"), 0o644))
	expect("/w/f", "create")
	expect("/w/f", "write")
	must(t, os.Chmod(at("w/f"), 0o600))
	expect("/w/f", "chmod")
	must(t, os.Rename(at("w/f"), at("w/sub/g")))
	expect("/w/f", "rename")
	expect("/w/sub/g", "create")
	must(t, os.MkdirAll(at("w/new/deep/deeper"), 0o755))
	must(t, os.WriteFile(at("w/new/deep/deeper/file"), []byte("x"), 0o644))
	expect("/w/new", "create")
	expect("/w/new/deep/deeper/file", "create")
	must(t, os.Rename(at("w/new"), at("w/moved")))
	expect("/w/moved", "create")
	expect("/w/moved/deep/deeper", "create")
	must(t, os.Remove(at("w/moved/deep/deeper/file")))
	expect("/w/moved/deep/deeper/file", "remove")
	cancel()
	if err := <-done; !errors.Is(err, sandbox.ErrCanceled) {
		t.Errorf("%v", err)
	}
}

func TestAWatchEndsWithItsPathAndWithTheEpisode(t *testing.T) {
	b := newBox(t)
	for name, end := range map[string]func() error{
		"removed": func() error { return os.Remove(filepath.Join(b.root, "removed")) },
		"renamed": func() error { return os.Rename(filepath.Join(b.root, "renamed"), filepath.Join(b.root, "other")) },
	} {
		must(t, os.Mkdir(filepath.Join(b.root, name), 0o755))
		if err := b.Watch(t.Context(), "/"+name, false, func(c sandbox.FileChange) error {
			if c.Op == "ready" {
				return end()
			}
			return nil
		}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := b.Watch(t.Context(), "/", false, func(c sandbox.FileChange) error { return b.Leave(t.Context()) }); err != nil {
		t.Errorf("left: %v", err)
	}
}
