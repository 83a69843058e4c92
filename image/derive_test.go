package image_test

import (
	"archive/tar"
	"bytes"
	"context"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/image"
	"github.com/cove-sandbox/cove/image/erofs"
	"github.com/cove-sandbox/cove/sandbox"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// wh is a removed name as gVisor's overlay has it.
func wh(name string) tar.Header {
	return tar.Header{Typeflag: tar.TypeChar, Name: name, ModTime: someTime}
}

// opaque is a directory that hides what the base has in it.
func opaque(name string) tar.Header {
	h := dir(name)
	h.PAXRecords = map[string]string{"SCHILY.xattr.trusted.overlay.opaque": "y"}
	return h
}

func derive(t *testing.T, lib *image.Library, base string, diff []byte) sandbox.Image {
	t.Helper()
	img, err := lib.Derive(t.Context(), base, bytes.NewReader(diff), nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := lib.Verify(t.Context(), img.ID); err != nil { // the digest is of what is on the disk
		t.Fatal(err)
	}
	return img
}

func shape(all map[string]file) map[string]string {
	got := map[string]string{}
	for _, p := range own(all) {
		switch f := all[p]; f.mode & erofs.TypeMask {
		case erofs.TypeDir:
			got[p] = "/"
		case erofs.TypeSymlink:
			got[p] = "->" + f.content
		default:
			got[p] = f.content
		}
	}
	return got
}

func TestDerive(t *testing.T) {
	userOpaque := dir("d")
	userOpaque.PAXRecords = map[string]string{"SCHILY.xattr.user.overlay.opaque": "y"}
	type hdrs = []tar.Header
	cases := []struct {
		name       string
		base, diff hdrs
		want       map[string]string
	}{
		{"nothing", hdrs{reg("a", "1")}, hdrs{dir("./")}, map[string]string{"/a": "1"}},
		{"added, changed, removed", hdrs{reg("a", "1"), reg("b", "1"), reg("c", "1")}, hdrs{dir("./"), reg("./b", "2"), wh("./c"), reg("./d", "2")},
			map[string]string{"/a": "1", "/b": "2", "/d": "2"}},
		{"whiteouts share an inode", hdrs{reg("a", "1"), reg("d/b", "1"), reg("c", "1")}, hdrs{wh("./a"), dir("./d/"), hard("./d/b", "./a"), hard("./c", "./d/b")},
			map[string]string{"/d": "/"}},
		{"whiteout of a tree", hdrs{reg("d/e/f", "1"), reg("x", "1")}, hdrs{wh("d")}, map[string]string{"/x": "1"}},
		{"opaque", hdrs{reg("d/old", "1"), reg("d/e/deep", "1")}, hdrs{opaque("./d/"), dir("./d/e/"), reg("./d/e/new", "2")},
			map[string]string{"/d": "/", "/d/e": "/", "/d/e/new": "2"}},
		{"opaque comes last", hdrs{reg("d/old", "1"), reg("d/e/deep", "1")}, hdrs{reg("d/e/new", "2"), opaque("d")},
			map[string]string{"/d": "/", "/d/e": "/", "/d/e/new": "2"}},
		{"merged without it", hdrs{reg("d/old", "1")}, hdrs{dir("d"), reg("d/new", "2")}, map[string]string{"/d": "/", "/d/old": "1", "/d/new": "2"}},
		{"anybody's attribute hides nothing", hdrs{reg("d/old", "1")}, hdrs{userOpaque}, map[string]string{"/d": "/", "/d/old": "1"}},
		{"OCI whiteouts", hdrs{reg("a", "1"), reg("d/old", "1")}, hdrs{reg(".wh.a", ""), reg("d/.wh..wh..opq", ""), reg("d/new", "2")},
			map[string]string{"/d": "/", "/d/new": "2"}},
		{"files that only look like whiteouts", hdrs{reg("a", "1")}, hdrs{reg(".wh.a", "x"), reg(".wh.", ""), dir(".wh.d")},
			map[string]string{"/a": "1", "/.wh.a": "x", "/.wh.": "", "/.wh.d": "/"}},
		{"a symlink of the base becomes a directory", hdrs{sym("l", "d"), reg("d/x", "1")}, hdrs{opaque("./l/"), reg("./l/y", "2")},
			map[string]string{"/l": "/", "/l/y": "2", "/d": "/", "/d/x": "1"}},
		{"a directory becomes a file", hdrs{reg("d/x", "1")}, hdrs{reg("d", "2")}, map[string]string{"/d": "2"}},
		{"a file becomes a directory", hdrs{reg("d", "1")}, hdrs{opaque("d"), reg("d/x", "2")}, map[string]string{"/d": "/", "/d/x": "2"}},
		{"hard link in the changes", hdrs{reg("a", "1")}, hdrs{reg("./b", "2"), hard("./c", "./b")}, map[string]string{"/a": "1", "/b": "2", "/c": "2"}},
		{"hard link to a file of the base", hdrs{reg("a", "1")}, hdrs{hard("b", "a")}, map[string]string{"/a": "1", "/b": "1"}},
		{"one name of the base's hard link changes", hdrs{reg("a", "1"), hard("b", "a"), hard("c", "a")}, hdrs{reg("a", "2")}, map[string]string{"/a": "2", "/b": "1", "/c": "1"}},
		{"one name of the base's hard link goes", hdrs{reg("a", "1"), hard("b", "a")}, hdrs{wh("a")}, map[string]string{"/b": "1"}},
		{"fifos", hdrs{node(tar.TypeFifo, "p")}, hdrs{node(tar.TypeFifo, "q")}, map[string]string{"/p": "", "/q": ""}},
	}
	lib := library(t, image.Options{})
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			base := importTar(t, lib, pack(t, c.base...))
			img := derive(t, lib, base.ID, pack(t, c.diff...))
			if got := shape(files(t, lib, img.ID)); !maps.Equal(got, c.want) {
				t.Errorf("got  %v\nwant %v", got, c.want)
			}
			fsck(t, lib, img.ID)
		})
	}
}

func TestDeriveKeepsWhatAFileIs(t *testing.T) {
	fine := func(h tar.Header) tar.Header {
		h.ModTime, h.Format = time.Unix(1_500_000_000, 987654321), tar.FormatPAX
		return h
	}
	su := fine(reg("su", "x"))
	su.Mode, su.Uid, su.Gid = 0o6755, 7, 42
	lib := library(t, image.Options{})
	capable := fine(reg("capable", "x"))
	capable.PAXRecords["SCHILY.xattr.user.note"] = "v"
	replaced := reg("replaced", "x")
	replaced.PAXRecords["SCHILY.xattr.user.note"] = "v"
	base := importTar(t, lib, pack(t, su, hard("su2", "su"), capable, replaced))
	changed := fine(reg("changed", "y"))
	changed.Mode, changed.Uid, changed.Gid = 0o4711, 1000, 70000
	noted := dir("noted")
	noted.PAXRecords = map[string]string{"SCHILY.xattr.user.mine": "w", "SCHILY.xattr.trusted.overlay.opaque": "y"}
	img := derive(t, lib, base.ID, pack(t, changed, hard("changed2", "changed"), noted, wh("replaced"), node(tar.TypeBlock, "disk"), node(tar.TypeChar, "tty")))
	// A chain, to see that a derived image is read back whole too.
	img = derive(t, lib, img.ID, pack(t, reg("more", "z")))

	r := reader(t, lib, img.ID)
	for path, want := range map[string]erofs.Inode{
		"su":      {Mode: 0o106755, UID: 7, GID: 42, Mtime: 1_500_000_000, MtimeNsec: 987654321, Nlink: 2, Size: 1},
		"changed": {Mode: 0o104711, UID: 1000, GID: 70000, Mtime: 1_500_000_000, MtimeNsec: 987654321, Nlink: 2, Size: 1},
		"disk":    {Mode: 0o060666, Mtime: someTime.Unix(), Nlink: 1, Rdev: 8<<8 | 1},
		"tty":     {Mode: 0o020666, Mtime: someTime.Unix(), Nlink: 1, Rdev: 8<<8 | 1},
	} {
		got := inode(t, r, path)
		if got.Mode != want.Mode || got.UID != want.UID || got.GID != want.GID || got.Mtime != want.Mtime || got.MtimeNsec != want.MtimeNsec ||
			got.Nlink != want.Nlink || got.Size != want.Size || got.Rdev != want.Rdev {
			t.Errorf("%s: %+v, want %+v", path, got, want)
		}
	}
	if inode(t, r, "su").Nid != inode(t, r, "su2").Nid || inode(t, r, "changed").Nid != inode(t, r, "changed2").Nid {
		t.Error("hard links were cut")
	}
	notes, err := lib.Notes(img.ID)
	if err != nil || notes.Xattrs != 2 || len(notes.XattrList) != 2 || string(notes.XattrList["/capable"]["user.note"]) != "v" || string(notes.XattrList["/noted"]["user.mine"]) != "w" {
		t.Errorf("notes: %+v, %v", notes, err)
	}
}

func TestDeriveTakesTheConfigOver(t *testing.T) {
	lib := library(t, image.Options{})
	cfg := v1.Config{Env: []string{"A=b"}, WorkingDir: "/w", User: "1000", Entrypoint: []string{"/init"}, Cmd: []string{"x"}}
	var buf bytes.Buffer
	if err := tarball.Write(nil, ociImage(t, "linux/amd64", cfg, layer(t, pack(t, reg("a", "1")))), &buf); err != nil {
		t.Fatal(err)
	}
	base := importTar(t, lib, buf.Bytes())
	img := derive(t, lib, base.ID, pack(t, reg("b", "2")))
	if img.Source != image.SourceDerived || img.Platform != base.Platform || img.Config.User != "1000" || img.Config.WorkingDir != "/w" ||
		len(img.Config.Env) != 1 || len(img.Config.Entrypoint) != 1 || len(img.Config.Cmd) != 1 {
		t.Errorf("%+v", img)
	}
	if again, err := lib.Get(img.ID); err != nil || again.Config.User != "1000" {
		t.Errorf("%+v, %v", again, err)
	}
	if err := lib.Delete(t.Context(), base.ID); err != nil {
		t.Fatal(err)
	}
	if got := files(t, lib, img.ID)["/a"].content; got != "1" { // it stands alone
		t.Errorf("/a: %q", got)
	}
}

// The same base and changes give the same name, whatever their order; so does
// a chain that ends in the same files; and a chain does not grow.
func TestDeriveIsNamedByItsContent(t *testing.T) {
	lib := library(t, image.Options{})
	base := importTar(t, lib, pack(t, reg("a", "1"), reg("d/x", noise(1<<20))))
	one := derive(t, lib, base.ID, pack(t, dir("d"), wh("a"), reg("d/b", "2"), hard("d/c", "d/b")))
	two := derive(t, lib, base.ID, pack(t, dir("d"), reg("d/c", "2"), hard("d/b", "d/c"), wh("a")))
	if one.ID != two.ID {
		t.Errorf("%s and %s", one.ID, two.ID)
	}
	last := base
	for i := range 20 {
		last = derive(t, lib, last.ID, pack(t, dir("d"), reg("d/churn", noise(1 << 20)[i:])))
	}
	last = derive(t, lib, last.ID, pack(t, dir("d"), wh("d/churn"), wh("a"), reg("d/b", "2"), hard("d/c", "d/b")))
	if last.ID != one.ID || last.Size != one.Size {
		t.Errorf("after a chain: %s of %d bytes, not %s of %d", last.ID, last.Size, one.ID, one.Size)
	}
	if same := derive(t, lib, base.ID, pack(t)); same.ID != base.ID || same.Source != base.Source {
		t.Errorf("no changes: %+v", same)
	}
}

func TestDeriveConfines(t *testing.T) {
	lib := library(t, image.Options{})
	base := importTar(t, lib, pack(t, reg("etc/passwd", "image"), sym("up", "../../../.."), sym("abs", "/etc"), sym("loop", "loop"), reg("f", "1")))
	before, _ := lib.Contents(t.Context())
	for name, hdrs := range map[string][]tar.Header{
		"dot dot":             {reg("../x", "evil")},
		"dot dot inside":      {reg("a/../../x", "evil")},
		"whiteout upwards":    {wh("../etc")},
		"hard link upwards":   {hard("h", "../../etc/passwd")},
		"hard link to none":   {hard("h", "/root/.ssh/id_rsa")},
		"a loop as parent":    {reg("loop/x", "evil")},
		"a file as parent":    {reg("f/x", "evil")},
		"root as a file":      {reg(".", "evil")},
		"device out of range": {{Typeflag: tar.TypeBlock, Name: "d", Devmajor: 1 << 20}},
		"unknown type":        {{Typeflag: 'Q', Name: "a"}},
	} {
		_, err := lib.Derive(t.Context(), base.ID, bytes.NewReader(pack(t, hdrs...)), nil)
		if err == nil || sandbox.ClassOf(err) != sandbox.Invalid {
			t.Errorf("%s: %v", name, err)
		}
	}
	if after, _ := lib.Contents(t.Context()); !maps.Equal(before, after) {
		t.Errorf("left behind: %v", after)
	}
	img := derive(t, lib, base.ID, pack(t, reg("/absolute", "1"), reg("up/top", "2"), reg("abs/in-etc", "3"), wh("up/etc/passwd")))
	got := files(t, lib, img.ID)
	if _, there := got["/etc/passwd"]; there || got["/absolute"].content != "1" || got["/top"].content != "2" || got["/etc/in-etc"].content != "3" {
		t.Errorf("%v", shape(got))
	}
}

// A snapshot is complete or absent: wherever its tar stops, there is no image.
func TestDeriveRefusesACutTar(t *testing.T) {
	lib := library(t, image.Options{})
	base := importTar(t, lib, pack(t, reg("a", "1")))
	diff := pack(t, reg("b", strings.Repeat("\x00", 1500)), reg("c", "2"))
	for cut := 0; cut < len(diff)-1024+512; cut += 256 {
		_, err := lib.Derive(t.Context(), base.ID, bytes.NewReader(diff[:cut]), nil)
		if err == nil || sandbox.ClassOf(err) != sandbox.Invalid {
			t.Fatalf("cut at %d of %d: %v", cut, len(diff), err)
		}
	}
	if all, _ := lib.Contents(t.Context()); len(all) != 1 {
		t.Errorf("left behind: %v", all)
	}
}

func TestDeriveFromNothing(t *testing.T) {
	lib := library(t, image.Options{})
	_, err := lib.Derive(t.Context(), "sha256:"+strings.Repeat("0", 64), bytes.NewReader(pack(t)), nil)
	wantClass(t, err, sandbox.ImageNotFound)
	_, err = lib.Derive(t.Context(), "../etc", bytes.NewReader(pack(t)), nil)
	wantClass(t, err, sandbox.Invalid)
	base := importTar(t, lib, pack(t, reg("a", "1")))
	path, _ := lib.Path(base.ID)
	os.Chmod(path, 0o600)
	if err := os.Truncate(path, 4096); err != nil {
		t.Fatal(err)
	}
	_, err = lib.Derive(t.Context(), base.ID, bytes.NewReader(pack(t)), nil)
	wantClass(t, err, sandbox.Corrupt)
}

func TestDeriveLimits(t *testing.T) {
	dir := t.TempDir()
	wide := libraryAt(t, dir, image.Options{})
	base := importTar(t, wide, pack(t, reg("a", noise(100_000)), reg("b", ""), reg("c", "")))
	for name, limits := range map[string]image.Limits{"unpacked": {Unpacked: 150_000}, "entries": {Entries: 14}, "base": {Unpacked: 50_000}} {
		lib := libraryAt(t, dir, image.Options{Limits: limits})
		_, err := lib.Derive(t.Context(), base.ID, bytes.NewReader(pack(t, reg("d", noise(60_000)), reg("e", ""), reg("f", ""))), nil)
		if err == nil || sandbox.ClassOf(err) != sandbox.TooLarge {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestDeriveCancelled(t *testing.T) {
	dir := t.TempDir()
	lib := libraryAt(t, dir, image.Options{})
	base := importTar(t, lib, pack(t, reg("a", noise(20<<20))))
	for _, step := range []string{"flatten", "erofs"} {
		ctx, cancel := context.WithCancel(t.Context())
		_, err := lib.Derive(ctx, base.ID, bytes.NewReader(pack(t, reg("b", noise(4<<20)))), func(p sandbox.Progress) {
			if p.Step == step {
				cancel()
			}
		})
		wantClass(t, err, sandbox.Canceled)
		noTemp(t, dir)
	}
}

func TestDeriveDiskFull(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("mounting needs root")
	}
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=24m"); err != nil {
		t.Skipf("cannot mount: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	lib := libraryAt(t, dir, image.Options{})
	base := importTar(t, lib, pack(t, reg("a", noise(8<<20))))
	// Full while the changes are spooled; while the base is copied; while the changes are written.
	for _, size := range []int{20 << 20, 9 << 20, 5 << 20} {
		_, err := lib.Derive(t.Context(), base.ID, bytes.NewReader(pack(t, reg("b", noise(size)))), nil)
		wantClass(t, err, sandbox.DiskFull)
		noTemp(t, dir)
	}
	if all, err := lib.Contents(t.Context()); err != nil || len(all) != 1 {
		t.Errorf("contents: %v, %v", all, err)
	}
	derive(t, lib, base.ID, pack(t, reg("b", noise(1<<20)))) // there is room again
}

func TestFromTar(t *testing.T) {
	lib := library(t, image.Options{})
	root := dir("./")
	root.Mode, root.Uid = 0o2750, 1000
	data := pack(t, root, reg("./.wh.a", ""), reg("./a", "1"), hard("./b", "./a"), sym("./l", "/elsewhere"))
	img, err := lib.FromTar(t.Context(), bytes.NewReader(data), nil)
	if err != nil {
		t.Fatal(err)
	}
	all := files(t, lib, img.ID)
	if len(all) != 5 || all["/a"].content != "1" || all["/a"].nid != all["/b"].nid || all["/l"].content != "/elsewhere" || all["/"].mode != 0o042750 || all["/"].uid != 1000 {
		t.Errorf("%v", all) // nothing added, nothing taken for a removal
	}
	if img.Source != image.SourceData || img.Platform != "" || img.Config.User != "" {
		t.Errorf("%+v", img)
	}
	again, err := lib.FromTar(t.Context(), bytes.NewReader(pack(t, root, reg("a", "1"), hard("b", "a"), sym("l", "/elsewhere"), reg(".wh.a", ""))), nil)
	if err != nil || again.ID != img.ID {
		t.Errorf("%s, not %s: %v", again.ID, img.ID, err)
	}
	// What looks like an image archive is still a directory.
	saved, err := lib.FromTar(t.Context(), bytes.NewReader(saveTar(t, pack(t, reg("x", "1")))), nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := files(t, lib, saved.ID)["/manifest.json"]; !ok {
		t.Error("the archive was taken for an image")
	}
	_, err = lib.FromTar(t.Context(), bytes.NewReader(data[:1536]), nil)
	wantClass(t, err, sandbox.Invalid)
	_, err = lib.FromTar(t.Context(), bytes.NewReader(pack(t, reg("../x", ""))), nil)
	wantClass(t, err, sandbox.Invalid)
}

// reader opens an image with our own reader.
func reader(t testing.TB, lib *image.Library, id string) *erofs.Reader {
	t.Helper()
	path, err := lib.Path(id)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	r, err := erofs.Open(f)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func inode(t testing.TB, r *erofs.Reader, path string) *erofs.Inode {
	t.Helper()
	in, err := r.Inode(r.Root())
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range strings.Split(filepath.Clean(path), "/") {
		next := uint64(0)
		if err := r.ReadDir(in, func(name string, nid uint64) error {
			if name == part {
				next = nid
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		if next == 0 {
			t.Fatalf("no %s", path)
		}
		if in, err = r.Inode(next); err != nil {
			t.Fatal(err)
		}
	}
	return in
}
