package server

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/snapshot"
	"github.com/cove-sandbox/cove/store"
	"github.com/cove-sandbox/cove/wire"
)

// Tree answers with what lives and what leads to it: an ended sandbox is part
// of the tree only as the ancestor of something, a template's own snapshot
// likewise.
func (s sandboxService) Tree(ctx context.Context, r *connect.Request[covev1.TreeRequest]) (*connect.Response[covev1.TreeResponse], error) {
	if err := sandbox.ValidateSnapshotRef("id", r.Msg.Id); err != nil {
		return nil, err
	}
	id := r.Msg.Id
	if snap, err := s.store.GetSnapshot(ctx, id); err == nil {
		id = snap.ID // a name
	} else if !errors.Is(err, sandbox.ErrNotFound) {
		return nil, err
	}
	tree, err := s.store.Tree(ctx, id)
	if errors.Is(err, sandbox.ErrNotFound) {
		return nil, &sandbox.Error{Class: sandbox.NotFound, Msg: "no sandbox or snapshot '" + r.Msg.Id + "'",
			Hint: `"cove ls" and "cove snapshot ls" list them; ended sandboxes are forgotten after a while`}
	}
	if err != nil {
		return nil, err
	}
	nodes := treeNodes(tree, s.node.Standby())
	out := &covev1.TreeResponse{}
	for _, root := range snapshot.BuildTree(shape(nodes, id)) {
		appendBranch(out, root, "", nodes)
	}
	return connect.NewResponse(out), nil
}

// treeNode is a node of the answer with its lineage.
type treeNode struct {
	*covev1.TreeNode
	lineage sandbox.Lineage
	created time.Time
	passive bool // shown only if something that is shown descends from it
}

func treeNodes(tree store.Tree, standby map[string]sandbox.Standby) map[string]treeNode {
	nodes := make(map[string]treeNode, len(tree.Sandboxes)+len(tree.Snapshots))
	for _, sb := range tree.Sandboxes {
		state := string(sb.State)
		if st := standby[sb.ID]; st != sandbox.Awake {
			state = string(st)
		}
		nodes[sb.ID] = treeNode{&covev1.TreeNode{Id: sb.ID, Kind: "sandbox", State: state, CreatedAt: wire.Time(sb.CreatedAt)},
			sb.Lineage, sb.CreatedAt, sb.State == sandbox.EndedState}
	}
	for _, snap := range tree.Snapshots {
		nodes[snap.ID] = treeNode{&covev1.TreeNode{Id: snap.ID, Kind: string(snap.Kind), Name: snap.Name, CreatedAt: wire.Time(snap.CreatedAt)},
			snap.Lineage, snap.CreatedAt, snap.Hidden}
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
		return cmp.Or(nodes[a.ID].created.Compare(nodes[b.ID].created), cmp.Compare(a.ID, b.ID))
	})
	return out
}

// appendBranch writes parents before children, without recursion: a lineage may
// be thousands deep.
func appendBranch(out *covev1.TreeResponse, root *snapshot.Branch, parent string, nodes map[string]treeNode) {
	type item struct {
		branch *snapshot.Branch
		parent string
	}
	stack := []item{{root, parent}}
	for len(stack) > 0 {
		it := stack[len(stack)-1]
		stack = stack[:len(stack)-1]
		n := nodes[it.branch.ID].TreeNode
		n.Parent = it.parent
		out.Nodes = append(out.Nodes, n)
		for _, c := range slices.Backward(it.branch.Children) {
			stack = append(stack, item{c, it.branch.ID})
		}
	}
}
