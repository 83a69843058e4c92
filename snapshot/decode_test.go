package snapshot

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"io"
	"os"
	"reflect"
	"testing"

	"github.com/cove-sandbox/cove/sandbox"
)

func samples() []*content {
	blobs := []blobRef{{sum: [32]byte{1}, size: 100}, {sum: [32]byte{2}, size: chunkSize}}
	return []*content{
		{kind: KindFilesystem},
		{kind: KindMemory},
		{kind: KindFilesystem, blobs: blobs, entries: []entry{
			{typ: typeDir, mode: 0o755},
			{typ: typeFile, path: "a", size: 40, blob: 0, uname: "u", records: []record{{"SCHILY.xattr.x", "y"}}},
			{typ: typeFile, path: "b", size: 60, blob: 0, offset: 40, sec: -5, nsec: 7},
			{typ: typeFile, path: "c", size: chunkSize, blob: 1, uid: 1<<32 - 1},
			{typ: typeLink, path: "d", target: 1},
			{typ: typeSymlink, path: "e", symlink: "../.."},
			{typ: typeChar, path: "f", major: 1, minor: 3}, {typ: typeFifo, path: "g"}, {typ: typeFile, path: "h"},
		}},
		{kind: KindMemory, blobs: blobs, files: []memoryFile{
			{name: "a", mode: 0o600, size: 100, chunks: []int{0}}, {name: "b", size: 2 * chunkSize, chunks: []int{-1, 1}}, {name: "c"}}},
	}
}

func same(a, b *content) bool { return bytes.Equal(encode(a), encode(b)) }

func TestManifestComesBack(t *testing.T) {
	for _, c := range samples() {
		got, err := decode(encode(c))
		if err != nil || got.kind != c.kind || !same(got, c) || len(got.entries) != len(c.entries) {
			t.Errorf("%v\n got %+v\nwant %+v", err, got, c)
			continue
		}
		for i := range c.entries {
			if !reflect.DeepEqual(got.entries[i], c.entries[i]) {
				t.Errorf("got %+v\nwant %+v", got.entries[i], c.entries[i])
			}
		}
	}
}

// Manifests are read for ever; this one was written by the first release.
func TestReadsManifestVersion1(t *testing.T) {
	raw, err := hex.DecodeString(goldenManifest)
	if err != nil {
		t.Fatal(err)
	}
	c, err := decode(raw)
	if err != nil || !same(c, samples()[2]) {
		t.Errorf("%+v, %v", c, err)
	}
}

func TestForgedManifests(t *testing.T) {
	change := func(f func(c *content)) []byte {
		c := samples()[2]
		f(c)
		return encode(c)
	}
	memory := func(f func(c *content)) []byte {
		c := samples()[3]
		f(c)
		return encode(c)
	}
	head := func(kind byte, numbers ...uint64) []byte {
		b := append([]byte(magic), version, kind)
		for _, n := range numbers {
			b = binary.AppendUvarint(b, n)
		}
		return b
	}
	for name, raw := range map[string][]byte{
		"empty":                   append([]byte(magic), version, kindFilesystem),
		"kind":                    head(9, 0, 0),
		"many blobs":              head(kindFilesystem, 1<<40),
		"many entries":            head(kindFilesystem, 0, 1<<20),
		"many files":              head(kindMemory, 0, 1<<20),
		"long number":             append([]byte(magic), version, kindFilesystem, 0x80, 0x00, 0),
		"behind the end":          append(encode(samples()[2]), 0),
		"up":                      change(func(c *content) { c.entries[1].path = "../a" }),
		"up inside":               change(func(c *content) { c.entries[1].path = "a/../../a" }),
		"absolute":                change(func(c *content) { c.entries[1].path = "/a" }),
		"not clean":               change(func(c *content) { c.entries[1].path = "./a" }),
		"zero byte":               change(func(c *content) { c.entries[1].path = "a\x00" }),
		"order":                   change(func(c *content) { c.entries[1].path = "z" }),
		"twice":                   change(func(c *content) { c.entries[2].path = "a" }),
		"root is a file":          change(func(c *content) { c.entries[0].typ = typeFifo }),
		"below a file":            change(func(c *content) { c.entries[2].path = "a/b" }),
		"mode":                    change(func(c *content) { c.entries[1].mode = 0o170000 }),
		"nanoseconds":             change(func(c *content) { c.entries[1].nsec = 1e9 }),
		"blob that is none":       change(func(c *content) { c.entries[1].blob = 5 }),
		"outside of its blob":     change(func(c *content) { c.entries[2].size = 61 }),
		"offset overflows":        change(func(c *content) { c.entries[2].offset = 1<<63 - 1 }),
		"file too large":          change(func(c *content) { c.entries[1].size = 1 << 60 }),
		"parts overlap":           change(func(c *content) { c.entries[2].offset = 10 }),
		"parts go back":           change(func(c *content) { c.entries[2].offset = 0 }),
		"link to itself":          change(func(c *content) { c.entries[4].target = 4 }),
		"link forward":            change(func(c *content) { c.entries[4].target = 5 }),
		"link to a directory":     change(func(c *content) { c.entries[4].target = 0 }),
		"symlink to nowhere":      change(func(c *content) { c.entries[5].symlink = "" }),
		"device":                  change(func(c *content) { c.entries[6].major = 1 << 12 }),
		"type":                    change(func(c *content) { c.entries[7].typ = 'x' }),
		"record that tar sets":    change(func(c *content) { c.entries[1].records[0].key = "path" }),
		"record sparse":           change(func(c *content) { c.entries[1].records[0].key = "GNU.sparse.size" }),
		"blob twice":              change(func(c *content) { c.blobs[1].sum = c.blobs[0].sum }),
		"blob not used":           change(func(c *content) { c.blobs = append(c.blobs, blobRef{sum: [32]byte{3}}) }),
		"memory: name":            memory(func(c *content) { c.files[0].name = "../a" }),
		"memory: directory":       memory(func(c *content) { c.files[0].name = "a/b" }),
		"memory: no name":         memory(func(c *content) { c.files[0].name = "" }),
		"memory: twice":           memory(func(c *content) { c.files[1].name = "a" }),
		"memory: chunk too short": memory(func(c *content) { c.files[1].chunks[1] = 0 }),
		"memory: size":            memory(func(c *content) { c.files[2].size = 1 << 43 }),
		"memory: huge":            memory(func(c *content) { c.files[2].size = 1 << 60 }),
		"memory: blob":            memory(func(c *content) { c.files[0].chunks[0] = 7 }),
	} {
		if c, err := decode(raw); !errors.Is(err, sandbox.ErrCorrupt) {
			t.Errorf("%s: %v, %+v", name, err, c)
		}
	}
	if _, err := decode([]byte(magic + "\x02\x01\x00\x00")); !errors.Is(err, sandbox.ErrUnsupported) {
		t.Errorf("version 2: %v", err)
	}
	if _, err := decode([]byte("x")); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("no manifest: %v", err)
	}
}

// What decodes encodes to the same bytes (a manifest has one name), and can be
// acted on without harm.
func FuzzDecode(f *testing.F) {
	for _, c := range samples() {
		f.Add(encode(c))
	}
	s, _ := newStore(f)
	out := f.TempDir()
	f.Fuzz(func(t *testing.T, raw []byte) {
		c, err := decode(raw)
		if err != nil {
			var se *sandbox.Error
			if !errors.As(err, &se) {
				t.Fatalf("%v", err)
			}
			return
		}
		if again := encode(c); !bytes.Equal(again, raw) {
			t.Fatalf("%x encodes to %x", raw, again)
		}
		info, err := s.Put(t.Context(), bytes.NewReader(raw))
		if err != nil {
			t.Fatal(err)
		}
		defer s.Delete(t.Context(), info.ID)
		if c.kind == KindFilesystem {
			_ = Filesystem{}.Unpack(t.Context(), s, info.ID, io.Discard)
			return
		}
		err = Memory{}.UnpackDir(t.Context(), s, info.ID, out)
		left, _ := os.ReadDir(out)
		for _, e := range left {
			if err != nil {
				t.Fatalf("left %v after %v", e, err)
			}
			os.Remove(out + "/" + e.Name())
		}
	})
}
