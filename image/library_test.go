package image_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/image"
	"github.com/cove-sandbox/cove/image/imagetest"
	"github.com/cove-sandbox/cove/sandbox"
)

func TestContentsAndDelete(t *testing.T) {
	lib := library(t, image.Options{})
	a := importTar(t, lib, pack(t, reg("a", "1")))
	b := importTar(t, lib, pack(t, reg("b", "1")))
	all, err := lib.Contents(t.Context())
	if err != nil || len(all) != 2 || all[a.ID] != a.Size || all[b.ID] != b.Size {
		t.Fatalf("contents: %v, %v", all, err)
	}
	if !lib.Have(a.ID) {
		t.Fatal("an image that was made is not here")
	}
	if err := lib.Delete(t.Context(), a.ID); err != nil {
		t.Fatal(err)
	}
	if lib.Have(a.ID) || !lib.Have(b.ID) {
		t.Fatal("the wrong one is gone")
	}
	_, err = lib.Get(a.ID)
	wantClass(t, err, sandbox.ImageNotFound)
	_, err = lib.Path(a.ID)
	wantClass(t, err, sandbox.ImageNotFound)
	wantClass(t, lib.Delete(t.Context(), a.ID), sandbox.ImageNotFound)
	wantClass(t, lib.Verify(t.Context(), a.ID), sandbox.ImageNotFound)
}

// An id comes from outside and becomes part of a path.
func TestIDsCannotNameOtherFiles(t *testing.T) {
	lib := library(t, image.Options{})
	for _, id := range []string{"", "sha256:", "../../etc/passwd", "sha256:../../../etc/passwd", "sha256:" + strings.Repeat("A", 64),
		"sha256:" + strings.Repeat("a", 63), "sha256:" + strings.Repeat("a", 63) + "/", "md5:" + strings.Repeat("a", 64)} {
		_, err := lib.Path(id)
		wantClass(t, err, sandbox.Invalid)
		wantClass(t, lib.Delete(t.Context(), id), sandbox.Invalid)
		if lib.Have(id) {
			t.Errorf("has %q", id)
		}
	}
}

func TestVerifyNoticesDamage(t *testing.T) {
	lib := library(t, image.Options{})
	img := importTar(t, lib, pack(t, reg("a", "1")))
	if err := lib.Verify(t.Context(), img.ID); err != nil {
		t.Fatal(err)
	}
	path, _ := lib.Path(img.ID)
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	data[len(data)-1] ^= 1
	os.Chmod(path, 0o600)
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	wantClass(t, lib.Verify(t.Context(), img.ID), sandbox.Corrupt)
}

// What a crash leaves is removed by the next Open; what another process is
// still doing is not.
func TestOpenRemovesOnlyWhatACrashLeft(t *testing.T) {
	dir := t.TempDir()
	lib := libraryAt(t, dir, image.Options{})
	kept := importTar(t, lib, pack(t, reg("a", "1")))

	// Work under way: the import waits for the rest of its tar.
	pr, pw := io.Pipe()
	done := make(chan error, 1)
	go func() {
		_, err := lib.ImportTar(t.Context(), pr, nil)
		done <- err
	}()
	data := pack(t, reg("b", noise(4<<20)))
	if _, err := pw.Write(data[:2<<20]); err != nil { // returns once it was read: the workspace is there
		t.Fatal(err)
	}

	put := func(rel string, age time.Duration) string {
		p := filepath.Join(dir, rel)
		if err := os.MkdirAll(filepath.Dir(p), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(p, time.Time{}, time.Now().Add(-age)); err != nil {
			t.Fatal(err)
		}
		return p
	}
	orphan := strings.Repeat("0", 64)
	gone := []string{
		put("tmp/crashed/image.erofs", 0), put("tmp/crashed/.lock", 0), put("tmp/no-lock/spool-0", 0),
		put("blobs/sha256/"+orphan+".json", 0), put("blobs/sha256/"+strings.Repeat("1", 64)+".erofs", 0),
		put("partial/"+orphan, 30*24*time.Hour),
	}
	stays := put("partial/"+strings.Repeat("2", 64), time.Hour)

	second, err := image.Open(dir, image.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer second.Close()
	for _, p := range gone {
		if _, err := os.Stat(p); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is still there", p)
		}
	}
	if _, err := os.Stat(stays); err != nil {
		t.Errorf("a recent partial download: %v", err)
	}
	if !second.Have(kept.ID) {
		t.Error("an image is gone")
	}
	if _, err := pw.Write(data[2<<20:]); err != nil {
		t.Fatal(err)
	}
	pw.Close()
	if err := <-done; err != nil {
		t.Fatalf("the other process's work was disturbed: %v", err)
	}
}

// endless never runs dry and says when it is first read.
type endless struct{ started chan struct{} }

func (e *endless) Read(b []byte) (int, error) {
	select {
	case <-e.started:
	default:
		close(e.started)
	}
	return min(len(b), 512), nil
}

func TestCloseEndsWorkUnderWay(t *testing.T) {
	dir := t.TempDir()
	lib := libraryAt(t, dir, image.Options{})
	done := make(chan error, 1)
	src := &endless{make(chan struct{})}
	go func() {
		_, err := lib.ImportTar(t.Context(), src, nil)
		done <- err
	}()
	<-src.started
	lib.Close()
	noTemp(t, dir) // Close waited for the clean-up
	wantClass(t, <-done, sandbox.Unavailable)
	_, err := lib.ImportTar(t.Context(), bytes.NewReader(pack(t, reg("a", ""))), nil)
	wantClass(t, err, sandbox.Unavailable)
}

func TestCancelLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	lib := libraryAt(t, dir, image.Options{})
	for _, step := range []string{"download", "flatten", "erofs"} {
		ctx, cancel := context.WithCancel(t.Context())
		_, err := lib.ImportTar(ctx, bytes.NewReader(pack(t, reg("a", noise(4<<20)))), func(p sandbox.Progress) {
			if p.Step == step {
				cancel()
			}
		})
		wantClass(t, err, sandbox.Canceled)
		noTemp(t, dir)
	}
	if all, _ := lib.Contents(t.Context()); len(all) != 0 {
		t.Errorf("left behind: %v", all)
	}
}

func TestDiskFull(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("mounting needs root")
	}
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=16m"); err != nil {
		t.Skipf("cannot mount: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	lib := libraryAt(t, dir, image.Options{})
	small := importTar(t, lib, pack(t, reg("a", "1")))
	// Full while spooling, and full while the image is written.
	for _, size := range []int{20 << 20, 10 << 20} {
		_, err := lib.ImportTar(t.Context(), bytes.NewReader(pack(t, reg("a", noise(size)))), nil)
		wantClass(t, err, sandbox.DiskFull)
		if err.(*sandbox.Error).Hint == "" {
			t.Error("no way out")
		}
		noTemp(t, dir)
	}
	r := startRegistry(t)
	ref := r.push(t, "big", ociImage(t, "linux/amd64", emptyConfig, layer(t, pack(t, reg("a", noise(20<<20))))))
	_, err := lib.Pull(t.Context(), ref, "linux/amd64", nil)
	wantClass(t, err, sandbox.DiskFull)
	if left, _ := os.ReadDir(filepath.Join(dir, "partial")); len(left) != 0 {
		t.Errorf("%d partial downloads keep the disk full", len(left))
	}
	if all, err := lib.Contents(t.Context()); err != nil || len(all) != 1 || !lib.Have(small.ID) {
		t.Errorf("contents: %v, %v", all, err)
	}
	importTar(t, lib, pack(t, reg("b", noise(2<<20)))) // there is room again
}

func TestImportDir(t *testing.T) {
	src := t.TempDir()
	if err := os.WriteFile(filepath.Join(src, "run.sh"), []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Link(filepath.Join(src, "run.sh"), filepath.Join(src, "again")); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(src, "sub"), 0o2750); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(filepath.Join(src, "sub"), 0o750|os.ModeSetgid); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(filepath.Join(src, "sub", "pipe"), 0o600); err != nil {
		t.Fatal(err)
	}
	lib := library(t, image.Options{})
	cfg := sandbox.ImageConfig{User: "1000", Env: []string{"A=b"}}
	img, err := lib.ImportDir(t.Context(), src, cfg, nil)
	if err != nil {
		t.Fatal(err)
	}
	all := files(t, lib, img.ID)
	if got := strings.Join(own(all), " "); got != "/again /run.sh /sub /sub/pipe" {
		t.Errorf("files: %s", got)
	}
	if a, b := all["/run.sh"], all["/again"]; a.nid != b.nid || a.mode != 0o100755 || a.content != "#!/bin/sh\n" {
		t.Errorf("%s", describe(a))
	}
	if all["/sub"].mode != 0o042750 || all["/sub/pipe"].mode != 0o010600 {
		t.Errorf("modes %o and %o", all["/sub"].mode, all["/sub/pipe"].mode)
	}
	if img.Source != "dir" || img.Config.User != "1000" {
		t.Errorf("%+v", img)
	}
	_, err = lib.ImportDir(t.Context(), filepath.Join(src, "run.sh"), cfg, nil)
	wantClass(t, err, sandbox.Invalid)
	_, err = lib.ImportDir(t.Context(), filepath.Join(src, "nothing"), cfg, nil)
	wantClass(t, err, sandbox.Invalid)
}

func TestImportDirNoticesAChange(t *testing.T) {
	src := t.TempDir()
	name := filepath.Join(src, "growing")
	if err := os.WriteFile(name, []byte("1"), 0o600); err != nil {
		t.Fatal(err)
	}
	lib := library(t, image.Options{})
	_, err := lib.ImportDir(t.Context(), src, sandbox.ImageConfig{}, func(p sandbox.Progress) {
		if p.Step == "erofs" && p.Done == 0 {
			os.WriteFile(name, []byte("22"), 0o600)
		}
	})
	wantClass(t, err, sandbox.Conflict)
}

func TestTiny(t *testing.T) {
	lib := imagetest.Library(t)
	img := imagetest.Tiny(t, lib, sandbox.ImageConfig{}, map[string]string{"bin/x": "hello"})
	if got := files(t, lib, img.ID)["/bin/x"]; got.content != "hello" || got.mode != 0o100755 {
		t.Error(describe(got))
	}
}

// The tools people look at images with agree.
func TestFsckAgrees(t *testing.T) {
	fsck, err := exec.LookPath("fsck.erofs")
	if err != nil {
		t.Skip("fsck.erofs is not installed")
	}
	lib := library(t, image.Options{})
	path, _ := lib.Path(importTar(t, lib, pack(t, reg("a", "1"), sym("l", "a"), hard("h", "a"), dir("d"))).ID)
	if out, err := exec.Command(fsck, path).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}
