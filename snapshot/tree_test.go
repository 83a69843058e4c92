package snapshot

import (
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestRender(t *testing.T) {
	nodes := []Node{
		{ID: "web1", Kind: NodeSandbox, Label: "running"},
		{ID: "4f2a", Parent: "web1", Kind: NodeMemory, Label: "before the migration"},
		{ID: "9c1e", Parent: "4f2a", Above: []string{"web1"}, Kind: NodeFilesystem},
		{ID: "fork", Parent: "9c1e", Above: []string{"4f2a", "web1"}, Kind: NodeSandbox},
		{ID: "77b0", Parent: "gone", Above: []string{"gone too", "web1"}, Kind: NodeMemory},
		{ID: "d1", Parent: "77b0", Above: []string{"gone"}, Kind: NodeDirectory, Label: "/srv\n└── fake\x1b[31m"},
		{ID: "lost", Parent: "gone", Above: []string{"unknown"}, Kind: NodeMemory},
		{ID: "web1", Kind: NodeSandbox, Label: "twice"},
		{ID: "self", Parent: "self", Kind: NodeMemory},
		{ID: "c1", Parent: "c2", Kind: NodeMemory}, {ID: "c2", Parent: "c3", Kind: NodeMemory}, {ID: "c3", Parent: "c1", Kind: NodeMemory},
		{ID: "c4", Parent: "c3", Kind: NodeMemory},
	}
	want := `
web1  sandbox  running
├── 4f2a  memory  before the migration
│   └── 9c1e  filesystem
│       └── fork  sandbox
└┄┄ 77b0  memory  (2 deleted between)
    └── d1  directory  /srv└── fake[31m
lost  memory
self  memory
c1  memory
└── c3  memory
    ├── c2  memory
    └── c4  memory
`
	// c1 is cut from c2; c2 still hangs under c3, and c3 under c1.
	if got := "\n" + Render(BuildTree(nodes)); got != want {
		t.Errorf("got:%swant:%s", got, want)
	}
	if got := Render(nil); got != "" {
		t.Errorf("%q", got)
	}
}

// Whatever the input, each node is drawn once, under an ancestor of its own.
func TestEveryNodeIsInTheTreeOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		id := rapid.SampledFrom([]string{"a", "b", "c", "d", "e", "f", ""})
		var nodes []Node
		ids := map[string]bool{}
		for range rapid.IntRange(0, 8).Draw(t, "n") {
			n := Node{ID: id.Draw(t, "id"), Parent: id.Draw(t, "parent"), Above: rapid.SliceOfN(id, 0, 3).Draw(t, "above")}
			ids[n.ID] = true
			nodes = append(nodes, n)
		}
		roots := BuildTree(nodes)
		seen := map[string]bool{}
		var walk func(b *Branch, depth int)
		walk = func(b *Branch, depth int) {
			if seen[b.ID] || depth > len(nodes) {
				t.Fatalf("%q is there twice", b.ID)
			}
			seen[b.ID] = true
			for _, c := range b.Children {
				chain := append([]string{c.Parent}, c.Above...)
				if c.Via >= len(chain) || chain[c.Via] != b.ID {
					t.Fatalf("%+v hangs under %q", c.Node, b.ID)
				}
				walk(c, depth+1)
			}
		}
		for _, r := range roots {
			walk(r, 0)
		}
		if len(seen) != len(ids) || strings.Count(Render(roots), "\n") != len(ids) {
			t.Fatalf("%d of %d nodes", len(seen), len(ids))
		}
	})
}

func TestADeepLineageIsDrawn(t *testing.T) {
	var nodes []Node
	for i := range 2000 {
		nodes = append(nodes, Node{ID: fmt.Sprint(i), Parent: fmt.Sprint(i - 1), Kind: NodeMemory})
	}
	if n := strings.Count(Render(BuildTree(nodes)), "\n"); n != 2000 {
		t.Errorf("%d lines", n)
	}
}
