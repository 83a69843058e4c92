package agent

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/cas/local"
	"github.com/cove-sandbox/cove/runtime"
)

func pagesIn(t *testing.T, c *contents, content string) string {
	t.Helper()
	dir, _, err := c.scratch()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, runtime.PagesFile), []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

// One continues the pages of a checkpoint, in the same file; the next that would finds them
// continued, and is left as it is.
func TestExtend(t *testing.T) {
	dir := t.TempDir()
	st, err := local.Open(dir+"/state", local.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	c, err := openContents(StateConfig{Store: st, Plain: dir + "/plain"})
	if err != nil {
		t.Fatal(err)
	}
	first := pagesIn(t, c, "first")
	c.offer("m1", first, runtime.Checkpoint{}, false)
	l := &lineage{manifest: "m1", pages: runtime.Pages{ID: "1", Size: 5}}
	if !c.extensible(l) {
		t.Fatal("what is kept cannot be continued")
	}
	cp := runtime.Checkpoint{Pages: &runtime.Pages{ID: "2", Offset: 5, Size: 11}}
	second := pagesIn(t, c, "second")
	if !c.extend(l, second, cp) {
		t.Fatal("not continued")
	}
	if b, err := os.ReadFile(filepath.Join(second, runtime.PagesFile)); string(b) != "firstsecond" {
		t.Errorf("the file has %q, %v", b, err)
	}
	if c.extensible(l) {
		t.Error("continued twice")
	}
	third := pagesIn(t, c, "third")
	if c.extend(l, third, cp) {
		t.Error("continued twice")
	}
	if b, err := os.ReadFile(filepath.Join(third, runtime.PagesFile)); string(b) != "third" {
		t.Errorf("what could not be put behind is %q, %v", b, err)
	}
	if c.extend(&lineage{manifest: "gone"}, third, cp) {
		t.Error("what is not kept was continued")
	}
}

// A file of pages does not grow for ever: twice what one checkpoint is, and 64 MiB, is
// continued, and what is more begins anew. TestSnapshotChainBound of e2e is the whole way.
func TestLineageIsBounded(t *testing.T) {
	st, err := local.Open(t.TempDir(), local.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	c, err := openContents(StateConfig{Store: st, Plain: t.TempDir(), KeepPlain: -1})
	if err != nil {
		t.Fatal(err)
	}
	stored, err := st.Put(t.Context(), strings.NewReader("manifest"))
	if err != nil {
		t.Fatal(err)
	}
	n := &Node{states: c}
	for _, whole := range []int64{0, 1 << 20, 1 << 30} {
		const spare = 64 << 20
		for size, continued := range map[int64]bool{whole: true, 2*whole + spare: true, 2*whole + spare + 1: false, 4*whole + 2*spare: false} {
			b := &box{lineage: &lineage{manifest: string(stored.ID), pages: runtime.Pages{Whole: whole, Size: size}}}
			l, done := n.since(t.Context(), b, nil, false)
			done()
			if (l != nil) != continued {
				t.Errorf("a file of %d, of which one checkpoint is %d, is continued: %v", size, whole, l != nil)
			}
		}
	}
}
