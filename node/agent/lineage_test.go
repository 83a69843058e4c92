package agent

import (
	"os"
	"path/filepath"
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

// A file of pages does not grow for ever.
func TestLineageIsBounded(t *testing.T) {
	n := &Node{states: &contents{cfg: StateConfig{KeepPlain: -1}}}
	b := &box{lineage: &lineage{manifest: "m", pages: runtime.Pages{Whole: 1 << 30, Size: 2<<30 + spareGrowth + 1}}}
	if l, _ := n.since(t.Context(), b, nil, false); l != nil {
		t.Error("more than half of it is there for nothing, and the next checkpoint continues it")
	}
}
