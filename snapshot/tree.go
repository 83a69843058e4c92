package snapshot

import (
	"slices"
	"strconv"
	"strings"
	"unicode"
)

// NodeKind says what a node of the tree is.
type NodeKind string

const (
	NodeSandbox    NodeKind = "sandbox"
	NodeMemory     NodeKind = "memory"
	NodeFilesystem NodeKind = "filesystem"
	NodeDirectory  NodeKind = "directory"
)

// Node is a sandbox or a snapshot, and where it came from.
type Node struct {
	ID     string
	Parent string   // "" at a root
	Above  []string // the ancestors above Parent, nearest first, as they were when it was made
	Kind   NodeKind
	Label  string // text for people
}

// Branch is a node with what descends from it.
type Branch struct {
	Node
	// Via counts the ancestors between this node and the one it hangs under
	// that are not there any more.
	Via      int
	Children []*Branch
}

// BuildTree hangs each node under its nearest ancestor that is there, or makes
// it a root. Order of input is kept among siblings. Whatever the input (an id
// twice, a node that is its own ancestor), each node is in the tree exactly
// once: a second one of the same id is dropped, and a circle is cut at the node
// that comes first in the input, which becomes a root.
func BuildTree(nodes []Node) []*Branch {
	byID := make(map[string]*Branch, len(nodes))
	var order []*Branch
	for _, n := range nodes {
		if byID[n.ID] == nil {
			b := &Branch{Node: n}
			byID[n.ID] = b
			order = append(order, b)
		}
	}
	above := make(map[*Branch]*Branch, len(order))
	for _, b := range order {
		for via, id := range append([]string{b.Parent}, b.Above...) {
			if a := byID[id]; a != nil && a != b {
				above[b], b.Via = a, via
				break
			}
		}
	}
	cutCircles(order, above)
	var roots []*Branch
	for _, b := range order {
		if a := above[b]; a != nil {
			a.Children = append(a.Children, b)
		} else {
			roots = append(roots, b)
		}
	}
	return roots
}

// cutCircles walks up from each node once: a walk that meets itself has found a
// circle; one that meets an earlier walk ends there.
func cutCircles(order []*Branch, above map[*Branch]*Branch) {
	place := make(map[*Branch]int, len(order)) // in the input
	for i, b := range order {
		place[b] = i
	}
	walk := make(map[*Branch]int, len(order)) // 1 + the walk that came by
	for i, start := range order {
		b := start
		for ; b != nil && walk[b] == 0; b = above[b] {
			walk[b] = i + 1
		}
		if b == nil || walk[b] != i+1 {
			continue
		}
		first := b // the circle goes through b
		for c := above[b]; c != b; c = above[c] {
			if place[c] < place[first] {
				first = c
			}
		}
		delete(above, first)
		first.Via = 0
	}
}

// Render draws trees as plain text, one node a line:
//
//	web-1  sandbox  running
//	├── 4f2a  memory  before the migration
//	│   └── 9c1e  filesystem
//	└┄┄ 77b0  memory  (2 deleted between)
//
// Text from users is shown without control characters: a label must not be able
// to draw a line of its own.
func Render(roots []*Branch) string {
	var b strings.Builder
	for _, r := range roots {
		render(&b, r, "", "")
	}
	return b.String()
}

// render is iterative: lineages of a long training run are thousands deep.
func render(b *strings.Builder, root *Branch, first, rest string) {
	type line struct {
		branch      *Branch
		first, rest string // what stands before its own line, and before those below
	}
	stack := []line{{root, first, rest}}
	for len(stack) > 0 {
		l := stack[len(stack)-1]
		stack = stack[:len(stack)-1]
		b.WriteString(l.first + describe(l.branch) + "\n")
		for i, c := range slices.Backward(l.branch.Children) {
			joint, below := "├", "│   "
			if i == len(l.branch.Children)-1 {
				joint, below = "└", "    "
			}
			dash := "── "
			if c.Via > 0 {
				dash = "┄┄ "
			}
			stack = append(stack, line{c, l.rest + joint + dash, l.rest + below})
		}
	}
}

func describe(br *Branch) string {
	s := plain(br.ID) + "  " + plain(string(br.Kind))
	if br.Label != "" {
		s += "  " + plain(br.Label)
	}
	if br.Via > 0 {
		s += "  (" + strconv.Itoa(br.Via) + " deleted between)"
	}
	return s
}

// plain drops what a terminal would act on.
func plain(s string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return -1
		}
		return r
	}, s)
}
