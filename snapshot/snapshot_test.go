package snapshot

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/cas"
	"github.com/cove-sandbox/cove/cas/castest"
	"github.com/cove-sandbox/cove/cas/local"
	"github.com/cove-sandbox/cove/internal/seal"
	"github.com/cove-sandbox/cove/sandbox"
)

func newStore(t testing.TB) (*local.Store, string) {
	t.Helper()
	dir := t.TempDir()
	s, err := local.Open(dir, local.Options{Keys: seal.NewKeyring([32]byte{7})})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s, dir
}

// item is an entry of a tar in tests.
type item struct {
	tar.Header
	content []byte
}

func file(name string, content []byte) item {
	return item{tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(content)), ModTime: time.Unix(1700000000, 0)}, content}
}

func makeTar(t testing.TB, items []item) []byte {
	t.Helper()
	var b bytes.Buffer
	tw := tar.NewWriter(&b)
	for _, it := range items {
		h := it.Header
		if err := tw.WriteHeader(&h); err != nil {
			t.Fatalf("%s: %v", it.Name, err)
		}
		if _, err := tw.Write(it.content); err != nil {
			t.Fatal(err)
		}
	}
	if err := tw.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func readTar(t testing.TB, raw []byte) map[string]item {
	t.Helper()
	items := map[string]item{}
	for tr := tar.NewReader(bytes.NewReader(raw)); ; {
		h, err := tr.Next()
		if err == io.EOF {
			return items
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(tr)
		if err != nil {
			t.Fatal(err)
		}
		items[h.Name] = item{*h, content}
	}
}

// everything has one of each kind of entry that must survive.
func everything() []item {
	at := time.Unix(1700000000, 123456789)
	dir := func(name string) item {
		return item{Header: tar.Header{Typeflag: tar.TypeDir, Name: name, Mode: 0o755, ModTime: at, Format: tar.FormatPAX}}
	}
	long := strings.Repeat("n", 200)
	return []item{
		dir("./"), dir("./a/"), dir("./a/b/"),
		file("./a/small", []byte("small")), file("./a/empty", nil), file("./a/small2", []byte("small")),
		file("./a/big", castest.Content(1, 100<<10)), file("./a/same as big", castest.Content(1, 100<<10)),
		file("./a/huge", castest.Content(2, 6<<20)), file("./a/limit", castest.Content(3, ownBlob)), file("./a/below", castest.Content(3, ownBlob-1)),
		{Header: tar.Header{Typeflag: tar.TypeReg, Name: "./a/suid", Mode: 0o4755, Uid: 1000, Gid: 3000000000, Uname: "ada", ModTime: at, Format: tar.FormatPAX,
			PAXRecords: map[string]string{"SCHILY.xattr.user.x": "y\x00\xff=", "SCHILY.xattr.security.capability": "\x01\x00\x00\x02", "VENDOR.thing": "kept"}}},
		{Header: tar.Header{Typeflag: tar.TypeSymlink, Name: "./a/link", Linkname: "../../etc/passwd", Mode: 0o777, ModTime: at, Format: tar.FormatPAX}},
		{Header: tar.Header{Typeflag: tar.TypeLink, Name: "./a/hard", Linkname: "./a/big", Mode: 0o644}},
		{Header: tar.Header{Typeflag: tar.TypeFifo, Name: "./a/fifo", Mode: 0o600}},
		{Header: tar.Header{Typeflag: tar.TypeChar, Name: "./a/gone", Mode: 0, Devmajor: 0, Devminor: 0}}, // an overlay's whiteout
		{Header: tar.Header{Typeflag: tar.TypeChar, Name: "./a/null", Mode: 0o666, Devmajor: 1, Devminor: 3}},
		{Header: tar.Header{Typeflag: tar.TypeBlock, Name: "./a/disk", Mode: 0o660, Devmajor: 259, Devminor: 1<<20 - 1}},
		file("./a/.wh.removed", nil), file("./a/.wh..wh..opq", nil),
		file("./a/b/\xff\xfe not utf-8", []byte("x")), file("./a/b/ünï", []byte("y")), file("./a/b/"+long, []byte("z")),
		{Header: tar.Header{Typeflag: tar.TypeFifo, Name: "./a-sibling", Mode: 0o600}}, // sorts between a and a/b as bytes
	}
}

func pack(t testing.TB, s cas.Store, raw []byte) Manifest {
	t.Helper()
	m, err := Filesystem{}.Pack(context.Background(), s, bytes.NewReader(raw))
	if err != nil {
		t.Fatalf("pack: %v", err)
	}
	return m
}

func unpack(t testing.TB, s cas.Store, id cas.ID) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := (Filesystem{}).Unpack(context.Background(), s, id, &b); err != nil {
		t.Fatalf("unpack: %v", err)
	}
	return b.Bytes()
}

func TestEverythingInATreeSurvives(t *testing.T) {
	s, _ := newStore(t)
	raw := makeTar(t, everything())
	m := pack(t, s, raw)
	out := unpack(t, s, m.ID)
	want, got := readTar(t, raw), readTar(t, out)
	if len(got) != len(want) || m.Files != len(want) || m.Kind != KindFilesystem {
		t.Errorf("%d of %d entries; %+v", len(got), len(want), m)
	}
	for name, w := range want {
		g, ok := got[name]
		if !ok {
			t.Errorf("%q is gone", name)
			continue
		}
		if !bytes.Equal(g.content, w.content) {
			t.Errorf("%q has other content", name)
		}
		xattrs := func(h tar.Header) map[string]string {
			m := map[string]string{}
			for k, v := range h.PAXRecords {
				if strings.Contains(k, ".") {
					m[k] = v
				}
			}
			return m
		}
		if !reflect.DeepEqual(xattrs(g.Header), xattrs(w.Header)) {
			t.Errorf("%q: records %q, want %q", name, xattrs(g.Header), xattrs(w.Header))
		}
		if g.Typeflag == tar.TypeLink {
			w.ModTime = time.Unix(1700000000, 0) // that of the file it is a name of
		}
		if !g.ModTime.Equal(w.ModTime) {
			t.Errorf("%q: time %v, want %v", name, g.ModTime, w.ModTime)
		}
		g.ModTime, w.ModTime, g.PAXRecords, w.PAXRecords, g.Format, w.Format = time.Time{}, time.Time{}, nil, nil, 0, 0
		g.Xattrs, w.Xattrs = nil, nil
		if !reflect.DeepEqual(g.Header, w.Header) {
			t.Errorf("%q:\n got %+v\nwant %+v", name, g.Header, w.Header)
		}
	}
	if again := unpack(t, s, m.ID); !bytes.Equal(again, out) {
		t.Error("the tar of a snapshot is not always the same")
	}
	if m2 := pack(t, s, out); m2.ID != m.ID || m2.Stored != 0 {
		t.Errorf("what came out goes in as %+v, was %+v", m2, m)
	}
	if err := Verify(t.Context(), s, m.ID); err != nil {
		t.Error(err)
	}
}

// gVisor writes a tree in another order each time, and calls another one of the
// names of a file the file.
func TestATreeHasOneManifest(t *testing.T) {
	s, _ := newStore(t)
	tree := func(random *rand.Rand) []byte {
		names := []string{"./x", "./d/y", "./d/a", "./z"} // of one file
		random.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
		items := []item{file(names[0], castest.Content(1, 40<<10))}
		for _, name := range names[1:] {
			target := names[0]
			items = append(items, item{Header: tar.Header{Typeflag: tar.TypeLink, Name: name, Linkname: target}})
		}
		var rest []item
		for i := range 100 {
			rest = append(rest, file(fmt.Sprintf("./d/%d", i), castest.Content(uint64(i), i*700)))
		}
		rest = append(rest, item{Header: tar.Header{Typeflag: tar.TypeDir, Name: "./d/", Mode: 0o700}})
		random.Shuffle(len(rest), func(i, j int) { rest[i], rest[j] = rest[j], rest[i] })
		return makeTar(t, append(rest, items...))
	}
	random := rand.New(rand.NewPCG(1, 2))
	first := pack(t, s, tree(random))
	if first.Stored == 0 {
		t.Error("nothing stored")
	}
	for range 5 {
		if m := pack(t, s, tree(random)); m.ID != first.ID || m.Stored != 0 || m.Size != first.Size {
			t.Fatalf("%+v, then %+v", first, m)
		}
	}
	// Chains of links, too.
	chain := makeTar(t, []item{file("b", []byte("1")), {Header: tar.Header{Typeflag: tar.TypeLink, Name: "c", Linkname: "b"}},
		{Header: tar.Header{Typeflag: tar.TypeLink, Name: "a", Linkname: "c"}}})
	got := readTar(t, unpack(t, s, pack(t, s, chain).ID))
	if string(got["./a"].content) != "1" || got["./b"].Linkname != "./a" || got["./c"].Linkname != "./a" {
		t.Errorf("%+v", got)
	}
}

func TestSharedContentIsStoredOnce(t *testing.T) {
	s, _ := newStore(t)
	big := castest.Content(1, 8<<20)
	first := pack(t, s, makeTar(t, []item{file("a", big), file("s", []byte("1"))}))
	second := pack(t, s, makeTar(t, []item{file("renamed", big), file("s", []byte("2"))}))
	if first.Stored < 8<<20 || second.Stored > 10<<10 {
		t.Errorf("%d, then %d bytes", first.Stored, second.Stored)
	}
}

func TestHostileTars(t *testing.T) {
	s, dir := newStore(t)
	link := func(typ byte, name, target string) item {
		return item{Header: tar.Header{Typeflag: typ, Name: name, Linkname: target}}
	}
	for name, items := range map[string][]item{
		"absolute":               {file("/etc/passwd", nil)},
		"up":                     {file("../x", nil)},
		"up inside":              {file("a/../../x", nil)},
		"up that stays":          {file("a/../x", nil)},
		"twice":                  {file("a", nil), file("./a", nil)},
		"below a symlink":        {link(tar.TypeSymlink, "a", "/etc"), file("a/passwd", []byte("x"))},
		"below a symlink, later": {file("a/passwd", []byte("x")), link(tar.TypeSymlink, "a", "/etc")},
		"below a file":           {file("a", nil), file("a/b", nil)},
		"link to nothing":        {link(tar.TypeLink, "a", "b")},
		"link to itself":         {link(tar.TypeLink, "a", "a")},
		"link forward":           {link(tar.TypeLink, "a", "b"), file("b", nil)},
		"link to a directory":    {{Header: tar.Header{Typeflag: tar.TypeDir, Name: "d/"}}, link(tar.TypeLink, "a", "d")},
		"link outside":           {link(tar.TypeLink, "a", "../../etc/shadow")},
		"root is a file":         {file(".", nil)},
		"long name":              {file(strings.Repeat("n", 256), nil)},
		"long path":              {file(strings.Repeat("n/", 2100)+"n", nil)},
		"device":                 {{Header: tar.Header{Typeflag: tar.TypeChar, Name: "a", Devmajor: 1 << 20}}},
		"type":                   {{Header: tar.Header{Typeflag: tar.TypeCont, Name: "a"}}},
	} {
		if _, err := (Filesystem{}).Pack(t.Context(), s, bytes.NewReader(makeTar(t, items))); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	whole := makeTar(t, []item{file("a", castest.Content(1, 5<<20)), file("b", castest.Content(2, 40<<10)), file("c", []byte("x"))})
	for _, cut := range []int{100, 600, 1 << 20, 5<<20 + 1000, 5<<20 + 2000} {
		if _, err := (Filesystem{}).Pack(t.Context(), s, bytes.NewReader(whole[:cut])); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("cut at %d: %v", cut, err)
		}
	}
	left, _ := filepath.Glob(filepath.Join(dir, "*", "*"))
	if len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestSpoolOnDiskIsSealed(t *testing.T) {
	sp := &spool{dir: t.TempDir(), limit: 10}
	defer sp.close()
	secret := []byte("a small file with a secret in it")
	var queue []spooled
	for range 3 {
		c, err := sp.put(secret)
		if err != nil {
			t.Fatal(err)
		}
		queue = append(queue, c)
	}
	c, _ := sp.put([]byte("tiny"))
	queue = append([]spooled{c}, queue...)
	raw := make([]byte, sp.end)
	if _, err := sp.file.ReadAt(raw, 0); err != nil || len(raw) < 3*len(secret) || bytes.Contains(raw, secret[:8]) {
		t.Errorf("the spool's file holds %q, %v", raw, err)
	}
	got, err := io.ReadAll(&spoolReader{s: sp, queue: queue})
	if want := "tiny" + strings.Repeat(string(secret), 3); err != nil || string(got) != want {
		t.Errorf("%q, %v", got, err)
	}
	if left, _ := os.ReadDir(sp.dir); len(left) != 0 {
		t.Errorf("the spool has a name: %v", left)
	}
}

func writeFiles(t testing.TB, dir string, files map[string][]byte) (names []string) {
	t.Helper()
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
		names = append(names, name)
	}
	return names
}

func TestMemory(t *testing.T) {
	s, _ := newStore(t)
	dir := t.TempDir()
	pages := castest.Content(1, 5*chunkSize+777)
	clear(pages[chunkSize : 3*chunkSize])
	want := map[string][]byte{"pages.img": pages, "checkpoint.img": []byte("state"), "empty": nil, "zeros": make([]byte, chunkSize+1)}
	names := writeFiles(t, dir, want)
	for _, mem := range []Memory{{}, {Compress: true, Workers: 1}} {
		m, err := mem.PackDir(t.Context(), s, dir, names)
		if err != nil || m.Files != 4 || m.Kind != KindMemory {
			t.Fatalf("%+v, %v", m, err)
		}
		out := t.TempDir()
		if err := mem.UnpackDir(t.Context(), s, m.ID, out); err != nil {
			t.Fatal(err)
		}
		for name, content := range want {
			if got, err := os.ReadFile(filepath.Join(out, name)); err != nil || !bytes.Equal(got, content) {
				t.Errorf("%s: %d of %d bytes, %v", name, len(got), len(content), err)
			}
		}
		if err := mem.UnpackDir(t.Context(), s, m.ID, out); err == nil {
			t.Error("unpacked over what is there")
		}
		if got, _ := os.ReadFile(filepath.Join(out, "pages.img")); !bytes.Equal(got, pages) {
			t.Error("a failed unpack took away what was there")
		}
	}
	// The next checkpoint shares what did not change.
	pages[4*chunkSize] ^= 1
	writeFiles(t, dir, want)
	m, err := Memory{}.PackDir(t.Context(), s, dir, names)
	if err != nil || m.Stored > chunkSize+64<<10 {
		t.Errorf("one changed page takes %d bytes, %v", m.Stored, err)
	}
	for _, bad := range [][]string{{"../x"}, {"a/b"}, {""}, {"pages.img", "pages.img"}, {"."}} {
		if _, err := (Memory{}).PackDir(t.Context(), s, dir, bad); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("%q: %v", bad, err)
		}
	}
	if _, err := (Memory{}).PackDir(t.Context(), s, dir, []string{"none"}); err == nil {
		t.Error("packed a file that is not there")
	}
}

func TestVerifyNamesTheBrokenBlob(t *testing.T) {
	s, dir := newStore(t)
	raw := makeTar(t, everything())
	m := pack(t, s, raw)
	refs, err := Refs(t.Context(), s, m.ID)
	if err != nil || len(refs) < 5 || refs[0] != m.ID {
		t.Fatalf("%v, %v", refs, err)
	}
	for _, id := range refs {
		path := filepath.Join(dir, id.Hex()[:2], id.Hex()[2:])
		good, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		check := func(what string, want error) {
			t.Helper()
			var be *cas.BlobError
			if err := Verify(t.Context(), s, m.ID); !errors.Is(err, want) || !errors.As(err, &be) || be.ID != id {
				t.Errorf("%s: %v", what, err)
			}
			if err := (Filesystem{}).Unpack(t.Context(), s, m.ID, io.Discard); !errors.Is(err, want) {
				t.Errorf("%s: unpack: %v", what, err)
			}
		}
		bad := bytes.Clone(good)
		bad[70] ^= 1
		if err := os.WriteFile(path, bad, 0o600); err != nil {
			t.Fatal(err)
		}
		check("damaged", sandbox.ErrCorrupt)
		if err := s.Delete(t.Context(), id); err != nil {
			t.Fatal(err)
		}
		if id == m.ID {
			check("no such snapshot", sandbox.ErrNotFound)
		} else {
			check("missing", sandbox.ErrCorrupt)
		}
		if err := os.WriteFile(path, good, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := Verify(t.Context(), s, m.ID); err != nil {
		t.Error(err)
	}
	if err := (Memory{}).UnpackDir(t.Context(), s, m.ID, t.TempDir()); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("a tree as memory: %v", err)
	}
	info, err := s.Put(t.Context(), strings.NewReader("no manifest"))
	if err != nil {
		t.Fatal(err)
	}
	if err := Verify(t.Context(), s, info.ID); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("a blob that is no manifest: %v", err)
	}
}

func TestCollect(t *testing.T) {
	s, _ := newStore(t)
	keep := pack(t, s, makeTar(t, []item{file("a", castest.Content(1, 100<<10)), file("b", []byte("b"))}))
	drop := pack(t, s, makeTar(t, []item{file("a", castest.Content(1, 100<<10)), file("c", castest.Content(2, 100<<10))}))
	roots := []cas.ID{keep.ID}
	if removed, err := Collect(t.Context(), s, roots, false); err != nil || len(removed) != 0 {
		t.Errorf("within the grace: %v, %v", removed, err)
	}
	later := Collector{Now: func() time.Time { return time.Now().Add(2 * DefaultGrace) }}
	for _, dry := range []bool{true, true, false} {
		removed, err := later.Collect(t.Context(), s, roots, dry)
		if err != nil || len(removed) != 2 { // c and the manifest
			t.Errorf("dry %v: %v, %v", dry, removed, err)
		}
	}
	if removed, err := later.Collect(t.Context(), s, roots, false); err != nil || len(removed) != 0 {
		t.Errorf("again: %v, %v", removed, err)
	}
	if err := Verify(t.Context(), s, keep.ID); err != nil {
		t.Error(err)
	}
	// A root that is not there: its content is not known, so nothing goes.
	if _, err := later.Collect(t.Context(), s, []cas.ID{drop.ID}, false); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("a lost root: %v", err)
	}
	if err := Verify(t.Context(), s, keep.ID); err != nil {
		t.Error(err)
	}
	if removed, err := (Collector{Grace: -1}).Collect(t.Context(), s, nil, false); err != nil || len(removed) != 3 {
		t.Errorf("everything: %v, %v", removed, err)
	}
}

// A Pack that finds old garbage there and a Collect that is about to remove it:
// whoever comes first, what Pack returns is whole.
func TestCollectBesideAPack(t *testing.T) {
	s, dir := newStore(t)
	raw := makeTar(t, []item{file("a", castest.Content(1, 40<<10)), file("b", castest.Content(2, 300<<10)), file("c", []byte("c"))})
	for range 25 {
		pack(t, s, raw)
		blobs, _ := filepath.Glob(filepath.Join(dir, "[0-9a-f][0-9a-f]", "*"))
		old := time.Now().Add(-2 * DefaultGrace)
		for _, path := range blobs {
			if err := os.Chtimes(path, old, old); err != nil {
				t.Fatal(err)
			}
		}
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() {
				if _, err := Collect(t.Context(), s, nil, false); err != nil {
					t.Errorf("collect: %v", err)
				}
			})
		}
		m := pack(t, s, raw)
		wg.Wait()
		if err := Verify(t.Context(), s, m.ID); err != nil {
			t.Fatal(err)
		}
	}
}
