package image_test

import (
	"archive/tar"
	"bytes"
	"io"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/image"
	"github.com/cove-sandbox/cove/image/erofs"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

// modelFile is a file of the model; two names with the same pointer are hard links.
type modelFile struct {
	typ     uint16
	mode    int64
	uid     int
	gid     int
	mtime   time.Time
	content string // or target
	rdev    [2]int64
}

// model is what is at each path ("a/b"), without the root.
type model map[string]*modelFile

// remove takes a path and all below it away.
func (m model) remove(p string) {
	for q := range m {
		if q == p || strings.HasPrefix(q, p+"/") {
			delete(m, q)
		}
	}
}

func dirOf(p string) string {
	if d := path.Dir(p); d != "." {
		return d
	}
	return ""
}

var modelNames = []string{"a", "b", "c", "!", "zz", "é"}

func drawFile(t *rapid.T, typ uint16) *modelFile {
	f := &modelFile{typ: typ, mode: int64(rapid.IntRange(0, 0o7777).Draw(t, "mode")), uid: rapid.IntRange(0, 100_000).Draw(t, "uid"),
		gid: rapid.IntRange(0, 3).Draw(t, "gid"), mtime: time.Unix(rapid.Int64Range(0, 1<<33).Draw(t, "sec"), rapid.Int64Range(0, 999_999_999).Draw(t, "nsec"))}
	switch typ {
	case erofs.TypeRegular:
		size := rapid.SampledFrom([]int{0, 1, 100, 4095, 4096, 4097, 20_000}).Draw(t, "size")
		f.content = strings.Repeat(string(rune('A'+rapid.IntRange(0, 25).Draw(t, "byte"))), size)
	case erofs.TypeSymlink:
		f.mode, f.content = 0o777, rapid.SampledFrom([]string{"a", "../b", "/c", "nowhere"}).Draw(t, "target")
	case erofs.TypeChar, erofs.TypeBlock:
		f.rdev = [2]int64{rapid.Int64Range(1, 0xfff).Draw(t, "major"), rapid.Int64Range(0, 0xfffff).Draw(t, "minor")}
	}
	return f
}

// change makes a few random changes to m, as calls inside a sandbox would, and
// writes them down as an overlay's upper layer: the tar comes out of the
// difference of the two trees, and not of the calls.
func change(t *rapid.T, m model, devices bool) {
	types := []uint16{erofs.TypeRegular, erofs.TypeRegular, erofs.TypeDir, erofs.TypeDir, erofs.TypeSymlink, erofs.TypeFIFO}
	if devices {
		types = append(types, erofs.TypeChar, erofs.TypeBlock)
	}
	for range rapid.IntRange(0, 25).Draw(t, "changes") {
		dirs := []string{""}
		var others []string
		for _, p := range slices.Sorted(maps.Keys(m)) {
			if m[p].typ == erofs.TypeDir {
				dirs = append(dirs, p)
			} else {
				others = append(others, p)
			}
		}
		p := path.Join(rapid.SampledFrom(dirs).Draw(t, "dir"), rapid.SampledFrom(modelNames).Draw(t, "name"))
		switch op := rapid.IntRange(0, 6).Draw(t, "op"); {
		case op == 0:
			m.remove(p)
		case op == 1 && len(others) > 0:
			from := rapid.SampledFrom(others).Draw(t, "link")
			f := m[from]
			if m[p] == nil { // link(2) replaces nothing
				m[p] = f
			}
		default:
			f := drawFile(t, rapid.SampledFrom(types).Draw(t, "type"))
			if old := m[p]; old != nil && old.typ == erofs.TypeDir && f.typ == erofs.TypeDir && op < 4 {
				m[p] = f // chmod, chown: what is below stays
			} else {
				m.remove(p)
				m[p] = f
			}
		}
	}
}

func (f *modelFile) header(name string) tar.Header {
	h := tar.Header{Name: name, Mode: f.mode, Uid: f.uid, Gid: f.gid, ModTime: f.mtime, Format: tar.FormatPAX, PAXRecords: map[string]string{}}
	switch f.typ {
	case erofs.TypeRegular:
		h.Typeflag, h.Size = tar.TypeReg, int64(len(f.content))
		h.PAXRecords["TEST.content"] = f.content
	case erofs.TypeDir:
		h.Typeflag, h.Name = tar.TypeDir, name+"/"
	case erofs.TypeSymlink:
		h.Typeflag, h.Linkname = tar.TypeSymlink, f.content
	case erofs.TypeFIFO:
		h.Typeflag = tar.TypeFifo
	case erofs.TypeChar, erofs.TypeBlock:
		h.Typeflag, h.Devmajor, h.Devminor = tar.TypeChar, f.rdev[0], f.rdev[1]
		if f.typ == erofs.TypeBlock {
			h.Typeflag = tar.TypeBlock
		}
	}
	return h
}

// upper is what an overlay over old would hold if it now showed new, in
// gVisor's form. A directory that is new, or stands where something else was,
// is opaque or has a whiteout for each name it hides: rapid chooses. A file
// with several names is copied up under each name that is new or changed.
func upper(t *rapid.T, old, now model, oci bool) []tar.Header {
	hdrs := []tar.Header{{Typeflag: tar.TypeDir, Name: "./", Mode: 0o755, ModTime: someTime}}
	written := map[*modelFile]string{}
	whiteoutAt := ""
	hide := func(p string) {
		switch {
		case oci:
			hdrs = append(hdrs, reg("./"+path.Join(path.Dir(p), ".wh."+path.Base(p)), ""))
		case whiteoutAt != "":
			hdrs = append(hdrs, hard("./"+p, whiteoutAt))
		default:
			whiteoutAt = "./" + p
			hdrs = append(hdrs, wh(whiteoutAt))
		}
	}
	var walk func(dir string, lower bool)
	walk = func(dir string, lower bool) {
		names := map[string]bool{}
		for _, m := range []model{old, now} {
			for p := range m {
				if dirOf(p) == dir && (lower || m[p] == now[p]) {
					names[p] = true
				}
			}
		}
		order := slices.Sorted(maps.Keys(names))
		if len(order) > 1 {
			order = rapid.Permutation(order).Draw(t, "order") // the overlay's are in the order of a hash map
		}
		for _, p := range order {
			was, is := old[p], now[p]
			if !lower {
				was = nil
			}
			switch {
			case is == nil:
				if was != nil {
					hide(p)
				}
			case is.typ == erofs.TypeDir:
				h := is.header("./" + p)
				below := was != nil && was.typ == erofs.TypeDir
				if below && rapid.Bool().Draw(t, "opaque") {
					below = false // replaced as a whole: all that is left below is in the upper layer
					if oci {
						hdrs = append(hdrs, h, reg("./"+p+"/.wh..wh..opq", ""))
					} else {
						h.PAXRecords["SCHILY.xattr.trusted.overlay.opaque"] = "y"
						hdrs = append(hdrs, h)
					}
				} else {
					hdrs = append(hdrs, h)
				}
				walk(p, below)
			case is != was:
				if at := written[is]; at != "" {
					hdrs = append(hdrs, hard("./"+p, at))
				} else {
					hdrs = append(hdrs, is.header("./"+p))
					written[is] = "./" + p
				}
			}
		}
	}
	walk("", true)
	return hdrs
}

// cutLinks is what copy-up does to a file with several names, of which some
// are in the upper layer and some are not: they part.
func cutLinks(hdrs []tar.Header, now model) {
	inUpper := map[string]bool{}
	for _, h := range hdrs {
		inUpper[strings.Trim(strings.TrimPrefix(h.Name, "./"), "/")] = true
	}
	copies := map[*modelFile]*modelFile{}
	for p, f := range now {
		if f.typ == erofs.TypeDir || !inUpper[p] {
			continue
		}
		if copies[f] == nil {
			c := *f
			copies[f] = &c
		}
		now[p] = copies[f]
	}
}

func TestDerivedImageIsTheModel(t *testing.T) {
	lib := library(t, image.Options{})
	rapid.Check(t, func(rt *rapid.T) {
		base := model{}
		change(rt, base, false) // ImportTar leaves devices out
		var hdrs []tar.Header
		written := map[*modelFile]string{}
		for _, p := range slices.Sorted(maps.Keys(base)) {
			if at := written[base[p]]; at != "" {
				hdrs = append(hdrs, hard(p, at))
				continue
			}
			hdrs = append(hdrs, base[p].header(p))
			written[base[p]] = p
		}
		hdrs = append(hdrs, dir("."))
		img := importTar(t, lib, pack(t, hdrs...))
		now := base
		for range rapid.IntRange(1, 3).Draw(rt, "snapshots") {
			old := maps.Clone(now)
			change(rt, now, true)
			diff := upper(rt, old, now, rapid.Bool().Draw(rt, "oci"))
			cutLinks(diff, now)
			packed := pack(t, diff...)
			next := derive(t, lib, img.ID, packed)
			compareModel(rt, reader(t, lib, next.ID), now)
			if again := derive(t, lib, img.ID, packed); again.ID != next.ID {
				rt.Fatalf("the same changes gave %s and %s", next.ID, again.ID)
			}
			img = next
		}
		files(t, lib, img.ID) // gVisor's reader takes all of it
		fsck(t, lib, img.ID)
		if rapid.IntRange(0, 9).Draw(rt, "mount") == 0 {
			compareMounted(t, rt, lib, img.ID, now)
		}
	})
}

// compareModel reads the whole image, but for what every image gets.
func compareModel(t *rapid.T, r *erofs.Reader, want model) {
	nids := map[*modelFile]uint64{}
	links := map[*modelFile]uint32{}
	for _, f := range want {
		links[f]++
	}
	seen := 0
	var walk func(in *erofs.Inode, dir string)
	walk = func(in *erofs.Inode, dir string) {
		err := r.ReadDir(in, func(name string, nid uint64) error {
			p := path.Join(dir, name)
			if slices.Contains(injected, "/"+p) {
				return nil
			}
			seen++
			f := want[p]
			if f == nil {
				t.Fatalf("%s is there", p)
			}
			got, err := r.Inode(nid)
			if err != nil {
				return err
			}
			if got.Mode != f.typ|uint16(f.mode) || got.UID != uint32(f.uid) || got.GID != uint32(f.gid) ||
				got.Mtime != f.mtime.Unix() || got.MtimeNsec != uint32(f.mtime.Nanosecond()) {
				t.Fatalf("%s: %+v, want %+v", p, got, f)
			}
			switch f.typ {
			case erofs.TypeDir:
				walk(got, p)
				return nil
			case erofs.TypeRegular:
				if content, err := io.ReadAll(r.Content(got)); err != nil || string(content) != f.content {
					t.Fatalf("%s: %d bytes, want %d: %v", p, len(content), len(f.content), err)
				}
			case erofs.TypeSymlink:
				if got.Target != f.content {
					t.Fatalf("%s: -> %s, want %s", p, got.Target, f.content)
				}
			case erofs.TypeChar, erofs.TypeBlock:
				if rdev, _ := erofs.MakeRdev(f.rdev[0], f.rdev[1]); got.Rdev != rdev {
					t.Fatalf("%s: device %#x, want %#x", p, got.Rdev, rdev)
				}
			}
			if other, ok := nids[f]; ok && other != nid || got.Nlink != links[f] {
				t.Fatalf("%s: inode %d with %d links, want %d with %d", p, nid, got.Nlink, other, links[f])
			}
			nids[f] = nid
			return nil
		})
		if err != nil {
			t.Fatalf("%s: %v", dir, err)
		}
	}
	root, err := r.Inode(r.Root())
	if err != nil {
		t.Fatal(err)
	}
	walk(root, "")
	if seen != len(want) {
		t.Fatalf("%d files, want %d", seen, len(want))
	}
}

// compareMounted looks at the image through the Linux kernel, where this
// machine lets us.
func compareMounted(t *testing.T, rt *rapid.T, lib *image.Library, id string, want model) {
	if os.Getuid() != 0 {
		return
	}
	image, _ := lib.Path(id)
	at := t.TempDir()
	if msg, err := exec.Command("mount", "-t", "erofs", "-o", "loop,ro", image, at).CombinedOutput(); err != nil {
		t.Logf("this kernel or container cannot mount it: %s", msg)
		return
	}
	defer func() {
		if err := syscall.Unmount(at, 0); err != nil {
			t.Error(err)
		}
	}()
	links := map[*modelFile]uint64{}
	for _, f := range want {
		links[f]++
	}
	for p, f := range want {
		var st syscall.Stat_t
		if err := syscall.Lstat(filepath.Join(at, p), &st); err != nil {
			rt.Fatalf("%s: %v", p, err)
		}
		if uint16(st.Mode) != f.typ|uint16(f.mode) || st.Uid != uint32(f.uid) || st.Gid != uint32(f.gid) ||
			!time.Unix(st.Mtim.Unix()).Equal(f.mtime) || f.typ != erofs.TypeDir && uint64(st.Nlink) != links[f] {
			rt.Fatalf("%s: %o %d:%d %v, %d links, want %+v", p, st.Mode, st.Uid, st.Gid, st.Mtim, st.Nlink, f)
		}
		switch f.typ {
		case erofs.TypeRegular:
			if got, err := os.ReadFile(filepath.Join(at, p)); err != nil || !bytes.Equal(got, []byte(f.content)) {
				rt.Fatalf("%s: %d bytes, %v", p, len(got), err)
			}
		case erofs.TypeSymlink:
			if got, err := os.Readlink(filepath.Join(at, p)); err != nil || got != f.content {
				rt.Fatalf("%s: -> %s, %v", p, got, err)
			}
		case erofs.TypeChar, erofs.TypeBlock:
			if int64(unix.Major(st.Rdev)) != f.rdev[0] || int64(unix.Minor(st.Rdev)) != f.rdev[1] {
				rt.Fatalf("%s: device %#x, want %v", p, st.Rdev, f.rdev)
			}
		}
	}
}

// fsck asks erofs-utils for its opinion, where they are installed.
func fsck(t testing.TB, lib *image.Library, id string) {
	t.Helper()
	tool, err := exec.LookPath("fsck.erofs")
	if err != nil {
		return
	}
	p, _ := lib.Path(id)
	if out, err := exec.Command(tool, p).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}
