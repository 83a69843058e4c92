package image_test

import (
	"context"
	"crypto/sha256"
	"fmt"
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/image"
	"github.com/cove-sandbox/cove/sandbox"
)

// Entries of a layer, as a kernel lists them.
func upFile(name, content string, edits ...func(*sandbox.LayerEntry)) sandbox.LayerEntry {
	e := sandbox.LayerEntry{Name: name, Mode: 0o100644, Size: int64(len(content)), Mtime: someTime.UnixNano() + 1, Ctime: 5, Ino: 100}
	for _, edit := range edits {
		edit(&e)
	}
	return e
}

func upDir(name string) sandbox.LayerEntry {
	return sandbox.LayerEntry{Name: name, Mode: 0o040755, Mtime: someTime.UnixNano() + 1, Ctime: 5, Ino: 101}
}

func upLink(name, target string) sandbox.LayerEntry {
	return sandbox.LayerEntry{Name: name, Mode: 0o120777, Target: target, Ctime: 5, Ino: 102}
}

func upGone(name string) sandbox.LayerEntry {
	return sandbox.LayerEntry{Name: name, Whiteout: true, Ctime: 5}
}

func upOpaque(name string) sandbox.LayerEntry {
	e := upDir(name)
	e.Opaque = true
	return e
}

// As edits of an entry: the time of the image's file put back, a hash, a later look.
func timePutBack(e *sandbox.LayerEntry) { e.Mtime = someTime.UnixNano() }
func changedAt(at int64) func(*sandbox.LayerEntry) {
	return func(e *sandbox.LayerEntry) { e.Ctime = at }
}
func hashOf(content string) func(*sandbox.LayerEntry) {
	return func(e *sandbox.LayerEntry) { sum := sha256.Sum256([]byte(content)); e.Hash = sum[:] }
}

func TestCompare(t *testing.T) {
	lib := library(t, image.Options{})
	base := importTar(t, lib, pack(t, dir("d"), reg("d/a", "1"), reg("d/b", "22"), dir("d/e"), reg("d/e/deep", "333"), reg("f", "4444"), hard("g", "f"), sym("s", "f"), reg("z", ""))).ID
	type layer = []sandbox.LayerEntry
	owner := func(e *sandbox.LayerEntry) { e.UID, e.GID = 7, 8 }
	mode := func(e *sandbox.LayerEntry) { e.Mode = 0o100600 }
	for _, c := range []struct {
		name        string
		before, now layer
		want        string // in the order of paths
		unsure      string
	}{
		{name: "nothing"},
		{name: "the root alone", now: layer{{Mode: 0o040755}}},
		{name: "added", now: layer{upFile("/new", "x"), upDir("/n"), upFile("/n/x", ""), upLink("/l", "f")}, want: "A /l; A /n; A /n/x; A /new"},
		{name: "content", now: layer{upFile("/f", "other")}, want: "M /f content"},
		{name: "content of the same size and another time", now: layer{upFile("/f", "5555")}, want: "M /f content"},
		{name: "mode and owner", now: layer{upFile("/f", "4444", mode, owner, timePutBack, hashOf("4444"))}, want: "M /f mode,owner"},
		{name: "everything at once", now: layer{upFile("/f", "55555", mode, owner)}, want: "M /f content,mode,owner"},
		{name: "a link that leads elsewhere", now: layer{upLink("/s", "d")}, want: "M /s target"},
		{name: "the same link again", now: layer{upLink("/s", "f")}},

		{name: "a time put back, without a hash", now: layer{upFile("/f", "5555", timePutBack)}, unsure: "/f"},
		{name: "a time put back, found by its hash", now: layer{upFile("/f", "5555", timePutBack, hashOf("5555"))}, want: "M /f content"},
		{name: "written again as it was", now: layer{upFile("/f", "4444", hashOf("4444"))}},
		{name: "an empty file touched", now: layer{upFile("/z", "")}},

		{name: "whiteout of a file", now: layer{upGone("/f")}, want: "D /f"},
		{name: "whiteout of a tree is one deletion", now: layer{upGone("/d")}, want: "D /d"},
		{name: "whiteout of what is not there", now: layer{upGone("/never")}},
		{name: "whiteout deep down", now: layer{upDir("/d"), upDir("/d/e"), upGone("/d/e/deep")}, want: "D /d/e/deep"},

		{name: "opaque and empty", now: layer{upOpaque("/d")}, want: "D /d/a; D /d/b; D /d/e"},
		{name: "opaque with the same again", now: layer{upOpaque("/d"), upFile("/d/a", "1", timePutBack, hashOf("1"))}, want: "D /d/b; D /d/e"},
		{name: "opaque with a directory of an old name", now: layer{upOpaque("/d"), upOpaque("/d/e"), upFile("/d/e/new", "x")}, want: "D /d/a; D /d/b; D /d/e/deep; A /d/e/new"},
		{name: "opaque on both sides", before: layer{upOpaque("/d")}, now: layer{upOpaque("/d"), upFile("/d/a", "1")}, want: "A /d/a"},
		{name: "opaque before, the image's again", before: layer{upOpaque("/d")}, want: "A /d/a; A /d/b; A /d/e"},

		{name: "a file that is a directory", now: layer{upDir("/f"), upFile("/f/x", "x")}, want: "M /f type; A /f/x"},
		{name: "a directory that is a file: what was in it went with it", now: layer{upFile("/d", "x")}, want: "M /d type"},
		{name: "a directory that is a link", now: layer{upLink("/d", "/etc")}, want: "M /d type"},
		{name: "a link that is a file", now: layer{upFile("/s", "4444")}, want: "M /s type"},
		{name: "a file under one that is none of the image's any more", before: layer{upFile("/d", "x")}, now: layer{upOpaque("/d"), upFile("/d/a", "1")}, want: "M /d type; A /d/a"},

		{name: "one of two hard links is written through", now: layer{upFile("/f", "5555")}, want: "M /f content"},
		{name: "hard links in the layer are each told", now: layer{upFile("/x", "x"), upFile("/y", "x")}, want: "A /x; A /y"},
		{name: "the same in both layers", before: layer{upFile("/x", "x"), upGone("/f")}, now: layer{upFile("/x", "x"), upGone("/f")}},
		{name: "its ctime moved and nothing else", before: layer{upFile("/x", "x")}, now: layer{upFile("/x", "y", changedAt(6))}, want: "M /x content"},
		{name: "its ctime moved for its mode", before: layer{upFile("/x", "x")}, now: layer{upFile("/x", "x", changedAt(6), mode)}, want: "M /x mode"},
		{name: "its ctime moved, its hash says it is the same", before: layer{upFile("/x", "x", hashOf("x"))}, now: layer{upFile("/x", "x", changedAt(6), hashOf("x"))}},
		{name: "what the layer had is gone", before: layer{upDir("/n"), upFile("/n/x", "x")}, want: "D /n"},
		{name: "what was removed is back", before: layer{upGone("/f")}, now: layer{upFile("/f", "4444")}, want: "A /f"},
	} {
		t.Run(c.name, func(t *testing.T) {
			d, unsure, err := lib.Compare(t.Context(), base, &sandbox.UpperLayer{Entries: c.before}, &sandbox.UpperLayer{Entries: c.now}, 100)
			if err != nil {
				t.Fatal(err)
			}
			if got := diffText(d); got != c.want || strings.Join(unsure, " ") != c.unsure || d.Truncated || d.Omitted {
				t.Errorf("got  %s (unsure %v)\nwant %s (%s)", got, unsure, c.want, c.unsure)
			}
		})
	}
}

func diffText(d sandbox.Diff) string {
	var lines []string
	for _, c := range d.Changes {
		lines = append(lines, strings.TrimSpace(strings.ToUpper(string(c.Kind[:1]))+" "+c.Path+" "+strings.Join(c.What, ",")))
	}
	return strings.Join(lines, "; ")
}

// Its bounds: what is listed, what was not looked at, and who leaves.
func TestCompareLimits(t *testing.T) {
	lib := library(t, image.Options{})
	base := importTar(t, lib, pack(t, reg("f", "4444"))).ID
	many := &sandbox.UpperLayer{}
	for i := range 5000 {
		many.Entries = append(many.Entries, upFile(fmt.Sprintf("/n%04d", i), "xy"))
	}
	d, _, err := lib.Compare(t.Context(), base, nil, many, 10)
	if err != nil || d.Added != 5000 || d.Bytes != 10_000 || len(d.Changes) != 10 || !d.Omitted || d.Truncated || d.Changes[9].Path != "/n0009" {
		t.Errorf("%d added of %d bytes, %d listed, omitted %v, %v", d.Added, d.Bytes, len(d.Changes), d.Omitted, err)
	}
	long := &sandbox.UpperLayer{}
	deep := ""
	for range 15 {
		deep += "/" + strings.Repeat("x", 250)
		long.Entries = append(long.Entries, upDir(deep))
	}
	for i := range 4000 {
		long.Entries = append(long.Entries, upFile(fmt.Sprintf("%s/%04d", deep, i), ""))
	}
	if d, _, err = lib.Compare(t.Context(), base, nil, long, 1_000_000); err != nil || d.Added != 4015 || !d.Omitted || len(d.Changes) < 2000 || len(d.Changes) > 3000 {
		t.Errorf("15 MB of names: %d of %d are listed (%v)", len(d.Changes), d.Added, err)
	}
	for side := range 2 {
		layers := [2]*sandbox.UpperLayer{{}, {}}
		layers[side].Truncated = true
		if d, _, err = lib.Compare(t.Context(), base, layers[0], layers[1], 10); err != nil || !d.Truncated {
			t.Errorf("a layer that was not listed whole: %+v, %v", d, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := lib.Compare(ctx, base, nil, many, 10); sandbox.ClassOf(err) != sandbox.Canceled {
		t.Errorf("a caller who has left is told %v", err)
	}
	if _, _, err := lib.Compare(t.Context(), "sha256:"+strings.Repeat("0", 64), nil, many, 10); sandbox.ClassOf(err) != sandbox.ImageNotFound {
		t.Errorf("an image that is not there: %v", err)
	}
}
