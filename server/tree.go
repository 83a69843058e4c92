package server

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/snapshot"
	"github.com/cove-sandbox/cove/store"
)

// TreeNode is a sandbox or a snapshot in a tree, parents before children.
type TreeNode struct {
	ID, Parent string
	Kind       string // "sandbox", or the kind of a snapshot
	Name       string // of a snapshot
	State      string // of a sandbox
	CreatedAt  time.Time
}

// Tree is what lives of the tree of a sandbox or snapshot, and what leads to it:
// an ended sandbox is part of it only as the ancestor of something, a template's
// own snapshot likewise.
func (s *Server) Tree(ctx context.Context, ref string) (out []TreeNode, err error) {
	ctx, call, err := s.begin(ctx, "sandbox.tree", about("id", ref))
	if err != nil {
		return nil, err
	}
	defer call.end(&err)
	if err := sandbox.ValidateSnapshotRef("id", ref); err != nil {
		return nil, err
	}
	id := ref
	if snap, err := s.store.GetSnapshot(ctx, id); err == nil {
		id = snap.ID // a name
	} else if !errors.Is(err, sandbox.ErrNotFound) {
		return nil, err
	}
	tree, err := s.store.Tree(ctx, id)
	if errors.Is(err, sandbox.ErrNotFound) {
		return nil, &sandbox.Error{Class: sandbox.NotFound, Msg: "no sandbox or snapshot '" + ref + "'",
			Hint: `"cove ls" and "cove snapshot ls" list them; ended sandboxes are forgotten after a while`}
	}
	if err != nil {
		return nil, err
	}
	nodes := treeNodes(tree, s.standby(ctx))
	for _, root := range snapshot.BuildTree(shape(nodes, id)) {
		out = appendBranch(out, root, nodes)
	}
	return out, nil
}

// treeNode is a node of the answer with its lineage.
type treeNode struct {
	TreeNode
	lineage sandbox.Lineage
	passive bool // shown only if something that is shown descends from it
}

func treeNodes(tree store.Tree, standby map[string]sandbox.Standby) map[string]treeNode {
	nodes := make(map[string]treeNode, len(tree.Sandboxes)+len(tree.Snapshots))
	for _, sb := range tree.Sandboxes {
		state := string(sb.State)
		if st := standby[sb.ID]; st != sandbox.Awake {
			state = string(st)
		}
		nodes[sb.ID] = treeNode{TreeNode{ID: sb.ID, Kind: "sandbox", State: state, CreatedAt: sb.CreatedAt}, sb.Lineage, sb.State == sandbox.EndedState}
	}
	for _, snap := range tree.Snapshots {
		nodes[snap.ID] = treeNode{TreeNode{ID: snap.ID, Kind: string(snap.Kind), Name: snap.Name, CreatedAt: snap.CreatedAt}, snap.Lineage, snap.Hidden}
	}
	return nodes
}

// shape is the nodes to show, oldest first: the one that was asked for, what is
// not passive, and the ancestors of those.
func shape(nodes map[string]treeNode, asked string) []snapshot.Node {
	shown := map[string]bool{}
	for id, n := range nodes {
		if n.passive && id != asked {
			continue
		}
		shown[id] = true
		for _, a := range n.lineage.Ancestors {
			shown[a] = true
		}
	}
	var out []snapshot.Node
	for id, n := range nodes {
		if !shown[id] {
			continue
		}
		node := snapshot.Node{ID: id, Parent: n.lineage.Parent, Kind: snapshot.NodeKind(n.Kind)}
		if len(n.lineage.Ancestors) > 1 {
			node.Above = n.lineage.Ancestors[1:]
		}
		out = append(out, node)
	}
	slices.SortFunc(out, func(a, b snapshot.Node) int {
		return cmp.Or(nodes[a.ID].CreatedAt.Compare(nodes[b.ID].CreatedAt), cmp.Compare(a.ID, b.ID))
	})
	return out
}

// appendBranch writes parents before children, without recursion: a lineage may
// be thousands deep.
func appendBranch(out []TreeNode, root *snapshot.Branch, nodes map[string]treeNode) []TreeNode {
	type item struct {
		branch *snapshot.Branch
		parent string
	}
	stack := []item{{root, ""}}
	for len(stack) > 0 {
		it := stack[len(stack)-1]
		stack = stack[:len(stack)-1]
		n := nodes[it.branch.ID].TreeNode
		n.Parent = it.parent
		out = append(out, n)
		for _, c := range slices.Backward(it.branch.Children) {
			stack = append(stack, item{c, it.branch.ID})
		}
	}
	return out
}
