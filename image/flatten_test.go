package image_test

import (
	"archive/tar"
	"bytes"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/image"
	"github.com/cove-sandbox/cove/sandbox"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// saveTar makes what docker save would of the layers.
func saveTar(t *testing.T, layers ...[]byte) []byte {
	t.Helper()
	var ls []v1.Layer
	for _, l := range layers {
		ls = append(ls, layer(t, l))
	}
	var buf bytes.Buffer
	if err := tarball.Write(nil, ociImage(t, "linux/amd64", v1.Config{}, ls...), &buf); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

func TestFlatten(t *testing.T) {
	type layers = [][]tar.Header
	cases := []struct {
		name   string
		layers layers
		want   map[string]string // own path to content; "/" ends a directory, "->" begins a link
	}{
		{"later layers win", layers{{reg("a", "1"), reg("b", "1")}, {reg("a", "2")}}, map[string]string{"/a": "2", "/b": "1"}},
		{"whiteout of a file", layers{{reg("d/a", "1"), reg("d/b", "1")}, {reg("d/.wh.a", "")}}, map[string]string{"/d": "/", "/d/b": "1"}},
		{"whiteout of a tree", layers{{reg("d/e/a", "1"), reg("x", "1")}, {reg(".wh.d", "")}}, map[string]string{"/x": "1"}},
		{"whiteout of nothing", layers{{reg("a", "1")}, {reg("no/such/.wh.dir", "")}}, map[string]string{"/a": "1"}},
		{"a name comes back", layers{{reg("a", "1")}, {reg(".wh.a", "")}, {reg("a", "3")}}, map[string]string{"/a": "3"}},
		{"whiteout spares its own layer, whiteout last", layers{{reg("d/old", "1")}, {dir("d"), reg("d/new", "2"), reg(".wh.d", "")}}, map[string]string{"/d": "/", "/d/new": "2"}},
		{"opaque, before what it brings", layers{{reg("d/old", "1"), reg("d/e/deep", "1")}, {dir("d"), reg("d/.wh..wh..opq", ""), reg("d/new", "2")}}, map[string]string{"/d": "/", "/d/new": "2"}},
		{"opaque, after what it brings", layers{{reg("d/old", "1"), reg("d/e/deep", "1")}, {dir("d"), reg("d/e/new", "2"), reg("d/.wh..wh..opq", "")}}, map[string]string{"/d": "/", "/d/e": "/", "/d/e/new": "2"}},
		{"opaque root", layers{{reg("a", "1")}, {reg(".wh..wh..opq", ""), reg("b", "2")}}, map[string]string{"/b": "2"}},
		{"whiteout through a symlinked parent", layers{{reg("usr/lib/x", "1"), sym("lib", "usr/lib")}, {reg("lib/.wh.x", "")}}, map[string]string{"/usr": "/", "/usr/lib": "/", "/lib": "->usr/lib"}},
		{"aufs records are ignored", layers{{reg("a", "1")}, {reg(".wh..wh.plnk", ""), reg(".wh..wh.aufs", "")}}, map[string]string{"/a": "1"}},
		{"a file becomes a directory", layers{{reg("a", "1")}, {dir("a"), reg("a/b", "2")}}, map[string]string{"/a": "/", "/a/b": "2"}},
		{"a directory becomes a file", layers{{reg("a/b", "1")}, {reg("a", "2")}}, map[string]string{"/a": "2"}},
		{"a directory named again keeps its content", layers{{reg("a/b", "1")}, {dir("a/")}}, map[string]string{"/a": "/", "/a/b": "1"}},
		{"a symlink replaces a directory", layers{{reg("a/b", "1")}, {sym("a", "c")}}, map[string]string{"/a": "->c"}},
		{"a directory replaces a symlink", layers{{sym("a", "c"), reg("c/x", "1")}, {dir("a"), reg("a/y", "2")}}, map[string]string{"/a": "/", "/a/y": "2", "/c": "/", "/c/x": "1"}},
		{"merged /usr: entries go through the link", layers{{dir("usr/lib"), sym("lib", "usr/lib")}, {reg("lib/x", "2")}}, map[string]string{"/usr": "/", "/usr/lib": "/", "/usr/lib/x": "2", "/lib": "->usr/lib"}},
		{"hard link", layers{{reg("a", "1"), hard("b", "a")}}, map[string]string{"/a": "1", "/b": "1"}},
		{"hard link into a lower layer", layers{{reg("a", "1")}, {hard("b", "a")}}, map[string]string{"/a": "1", "/b": "1"}},
		{"one name of a hard link goes", layers{{reg("a", "1"), hard("b", "a")}, {reg(".wh.a", "")}}, map[string]string{"/b": "1"}},
		{"one name of a hard link changes", layers{{reg("a", "1"), hard("b", "a")}, {reg("a", "2")}}, map[string]string{"/a": "2", "/b": "1"}},
		{"hard link to a symlink", layers{{sym("a", "x"), hard("b", "a")}}, map[string]string{"/a": "->x", "/b": "->x"}},
		{"devices are left out", layers{{node(tar.TypeBlock, "sda"), node(tar.TypeChar, "dev2/null"), hard("sdb", "sda"), reg("a", "1")}}, map[string]string{"/a": "1"}},
		{"fifos stay", layers{{node(tar.TypeFifo, "pipe")}}, map[string]string{"/pipe": ""}},
		{"./ and absolute names", layers{{dir("./"), reg("./a", "1"), reg("/b", "2"), reg("c//d", "3")}}, map[string]string{"/a": "1", "/b": "2", "/c": "/", "/c/d": "3"}},
		{"nothing at all", layers{{}}, map[string]string{}},
	}
	lib := library(t, image.Options{})
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			var packed [][]byte
			for _, l := range c.layers {
				packed = append(packed, pack(t, l...))
			}
			all := files(t, lib, importTar(t, lib, saveTar(t, packed...)).ID)
			got := map[string]string{}
			for _, p := range own(all) {
				switch f := all[p]; f.mode & 0o170000 {
				case 0o040000:
					got[p] = "/"
				case 0o120000:
					got[p] = "->" + f.content
				default:
					got[p] = f.content
				}
			}
			if !maps.Equal(got, c.want) {
				t.Errorf("got  %v\nwant %v", got, c.want)
			}
		})
	}
}

func TestFlattenKeepsWhatAFileIs(t *testing.T) {
	su := reg("su", "x")
	su.Mode, su.Uid, su.Gid = 0o6755, 0, 42
	sticky := dir("spool")
	sticky.Mode = 0o1777
	far := reg("far", "x")
	far.Uid, far.Gid = 100_000, 4_000_000_000
	old := reg("old", "x")
	old.ModTime = time.Unix(-5, 0)
	capable := reg("ping", "x")
	capable.PAXRecords["SCHILY.xattr.security.capability"] = "\x01\x00\x00\x02"
	lib := library(t, image.Options{})
	img := importTar(t, lib, pack(t, su, sticky, far, old, capable, reg("empty", ""), hard("su2", "su"), node(tar.TypeChar, "null")))
	all := files(t, lib, img.ID)
	for path, want := range map[string]string{
		"/su":    `106755 0:42 "x"`,
		"/spool": `41777 0:0 ""`,
		"/far":   `100644 100000:4000000000 "x"`,
		"/empty": `100644 0:0 ""`,
	} {
		if got := describe(all[path]); got != want {
			t.Errorf("%s: got %s, want %s", path, got, want)
		}
	}
	if all["/su"].mtime != uint64(someTime.Unix()) || all["/old"].mtime != 0 {
		t.Errorf("mtimes %d and %d", all["/su"].mtime, all["/old"].mtime)
	}
	if a, b := all["/su"], all["/su2"]; a.nid != b.nid || a.nlink != 2 {
		t.Errorf("hard links: inodes %d and %d, %d links", a.nid, b.nid, a.nlink)
	}
	// gVisor's reader fails on any file with attributes, and files() read them all.
	notes, err := lib.Notes(img.ID)
	if err != nil || notes.Xattrs != 1 || notes.Devices != 1 || string(notes.XattrList["/ping"]["security.capability"]) != "\x01\x00\x00\x02" {
		t.Errorf("notes: %+v, %v", notes, err)
	}
}

func TestFlattenAddsWhatASandboxNeeds(t *testing.T) {
	both := "127.0.0.1 localhost\n::1 localhost\n"
	cases := []struct {
		name   string
		layer  []tar.Header
		path   string
		want   string
		linked bool
	}{
		{"hosts, missing", nil, "/etc/hosts", both, false},
		{"hosts, empty", []tar.Header{reg("etc/hosts", "")}, "/etc/hosts", both, false},
		{"hosts, with others", []tar.Header{reg("etc/hosts", "10.0.0.1 db # localhost")}, "/etc/hosts", "10.0.0.1 db # localhost\n" + both, false},
		{"hosts, complete", []tar.Header{reg("etc/hosts", "127.0.0.1\tlocalhost\n")}, "/etc/hosts", "127.0.0.1\tlocalhost\n", false},
		{"hosts, a link", []tar.Header{reg("data/h", "1.2.3.4 a\n"), sym("etc/hosts", "../data/h")}, "/etc/hosts", "1.2.3.4 a\n" + both, false},
		{"resolv.conf, missing", nil, "/etc/resolv.conf", "", false},
		{"resolv.conf, dangling", []tar.Header{sym("etc/resolv.conf", "../run/systemd/resolve/stub-resolv.conf")}, "/etc/resolv.conf", "", false},
		{"resolv.conf, a loop", []tar.Header{sym("etc/resolv.conf", "resolv.conf")}, "/etc/resolv.conf", "", false},
		{"resolv.conf, there", []tar.Header{reg("etc/resolv.conf", "nameserver 1.1.1.1\n")}, "/etc/resolv.conf", "nameserver 1.1.1.1\n", false},
		{"resolv.conf, linked", []tar.Header{reg("etc/r", "x"), sym("etc/resolv.conf", "/etc/r")}, "/etc/resolv.conf", "/etc/r", true},
		{"hostname, missing", nil, "/etc/hostname", "cove\n", false},
		{"hostname, there", []tar.Header{reg("etc/hostname", "mine\n")}, "/etc/hostname", "mine\n", false},
		{"etc is a link", []tar.Header{sym("etc", "/config"), dir("config")}, "/config/hosts", both, false},
		{"etc is a file", []tar.Header{reg("etc", "?")}, "/etc/hosts", both, false},
	}
	lib := library(t, image.Options{})
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			all := files(t, lib, importTar(t, lib, pack(t, append([]tar.Header{dir("x")}, c.layer...)...)).ID)
			f, ok := all[c.path]
			if !ok || f.content != c.want || (f.mode&0o170000 == 0o120000) != c.linked {
				t.Errorf("%s: %s (there: %v), want %q", c.path, describe(f), ok, c.want)
			}
		})
	}
	t.Run("mount points", func(t *testing.T) {
		all := files(t, lib, importTar(t, lib, pack(t, reg("proc", "a file"), sym("dev", "/etc"), dir("var/run"), sym("run", "var/run"))).ID)
		for path, want := range map[string]string{"/proc": `40755 0:0 ""`, "/dev": `40755 0:0 ""`, "/sys": `40755 0:0 ""`,
			"/tmp": `41777 0:0 ""`, "/run": `120777 0:0 "var/run"`} {
			if got := describe(all[path]); got != want {
				t.Errorf("%s: got %s, want %s", path, got, want)
			}
		}
	})
}

// The name of an image follows from its content alone, not from how it was
// packed or in which order.
func TestSameContentSameName(t *testing.T) {
	a := library(t, image.Options{})
	b := library(t, image.Options{})
	one := importTar(t, a, pack(t, dir("d"), reg("d/a", "1"), reg("b", "2")))
	two := importTar(t, b, pack(t, reg("b", "2"), dir("d"), reg("d/a", "1")))
	three := importTar(t, b, saveTar(t, pack(t, dir("d"), reg("d/a", "old")), pack(t, reg("d/a", "1"), reg("b", "2"))))
	if one.ID != two.ID || two.ID != three.ID {
		t.Errorf("%s, %s, %s", one.ID, two.ID, three.ID)
	}
	if all, err := b.Contents(t.Context()); err != nil || len(all) != 1 {
		t.Errorf("contents: %v, %v", all, err)
	}
}

func TestLimits(t *testing.T) {
	deep := strings.Repeat("d/", 300)
	cases := []struct {
		name   string
		limits image.Limits
		layer  []byte
		class  sandbox.Class
	}{
		{"entries", image.Limits{Entries: 10}, pack(t, many(20)...), sandbox.TooLarge},
		{"implied parents count", image.Limits{Entries: 10}, pack(t, reg("a/b/c/d/e/f/g/h/i/j/k/l", "")), sandbox.TooLarge},
		{"names", image.Limits{Names: 100}, pack(t, reg(strings.Repeat("n", 200), "")), sandbox.TooLarge},
		{"unpacked", image.Limits{Unpacked: 10_000}, pack(t, reg("a", strings.Repeat("x", 20_000))), sandbox.TooLarge},
		{"archive", image.Limits{Download: 10_000}, pack(t, reg("a", strings.Repeat("x", 20_000))), sandbox.TooLarge},
		{"depth", image.Limits{}, pack(t, dir(deep)), sandbox.TooLarge},
		{"long name", image.Limits{}, pack(t, reg(strings.Repeat("n", 256), "")), sandbox.Invalid},
		{"long path", image.Limits{}, pack(t, reg(strings.Repeat(strings.Repeat("n", 99)+"/", 50)+"x", "")), sandbox.Invalid},
		{"long link", image.Limits{}, pack(t, sym("l", strings.Repeat("n", 5000))), sandbox.Invalid},
		{"truncated", image.Limits{}, pack(t, reg("a", strings.Repeat("x", 20_000)))[:5000], sandbox.Invalid},
		{"empty", image.Limits{}, nil, sandbox.Invalid},
		{"sparse bomb", image.Limits{Unpacked: 1 << 20}, sparseBomb(t), sandbox.TooLarge},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			lib := library(t, image.Options{Limits: c.limits})
			_, err := lib.ImportTar(t.Context(), bytes.NewReader(c.layer), nil)
			wantClass(t, err, c.class)
			if all, _ := lib.Contents(t.Context()); len(all) != 0 {
				t.Errorf("left behind: %v", all)
			}
		})
	}
}

func many(n int) []tar.Header {
	var hs []tar.Header
	for i := range n {
		hs = append(hs, reg(strings.Repeat("f", i+1), ""))
	}
	return hs
}

// sparseBomb is a file of 1 TiB that takes half a KiB: PAX sparse format 1.0.
// archive/tar does not write it, so the records are set behind its back.
func sparseBomb(t *testing.T) []byte {
	t.Helper()
	body := "1\n0\n1\n" // one extent: offset 0, length 1
	body += strings.Repeat("\x00", 512-len(body)) + "x"
	h := reg("GNUSparseFile.0/bomb", body)
	data := pack(t, h)
	// A PAX header block in front of it, by hand.
	records := ""
	for _, kv := range []string{"GNU.sparse.major=1", "GNU.sparse.minor=0", "GNU.sparse.name=bomb", "GNU.sparse.realsize=1099511627776"} {
		n := len(kv) + 3
		if n+1 >= 10 {
			n = len(kv) + 4
		}
		records += strings.TrimSpace(itoa(n)) + " " + kv + "\n"
	}
	x := reg("x", records)
	x.Typeflag = tar.TypeReg
	front := pack(t, x)[:1024]
	front[156] = 'x' // the type flag; fix the checksum
	copy(front[148:156], "        ")
	sum := 0
	for _, b := range front[:512] {
		sum += int(b)
	}
	copy(front[148:156], []byte(octal(sum)+"\x00 "))
	return append(front, data...)
}
