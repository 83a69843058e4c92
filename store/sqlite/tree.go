package sqlite

import (
	"context"
	"database/sql"
	"slices"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// insertLineage records where a new node stands.
func (t *tx) insertLineage(id string, l sandbox.Lineage) error {
	if len(l.Ancestors) == 0 {
		return nil
	}
	for _, a := range slices.Compact([]string{l.Ancestors[0], l.Ancestors[len(l.Ancestors)-1]}) {
		if _, err := t.exec(`INSERT INTO lineage (node_id, ancestor_id) VALUES (?, ?)`, id, a); err != nil {
			return err
		}
	}
	return nil
}

// moveLineage records that a sandbox stands somewhere else now.
func (t *tx) moveLineage(id string, l sandbox.Lineage) error {
	if _, err := t.exec(`DELETE FROM lineage WHERE node_id = ?`, id); err != nil {
		return err
	}
	return t.insertLineage(id, l)
}

// component is the ids that hang together with one, by edges in both
// directions. UNION drops what was seen, so a circle, which a sandbox restored
// to a snapshot of its own descendant makes, comes to an end.
const component = `WITH RECURSIVE component (id) AS (
		SELECT ?
		UNION
		SELECT CASE WHEN l.node_id = c.id THEN l.ancestor_id ELSE l.node_id END
		FROM component c JOIN lineage l ON l.node_id = c.id OR l.ancestor_id = c.id
	) `

// Tree implements store.Snapshots.
func (s *Store) Tree(ctx context.Context, id string) (tree store.Tree, err error) {
	const op = "tree"
	who, err := whose(ctx)
	if err != nil {
		return tree, err
	}
	// One snapshot of the database, or a node that moves is missed or seen twice.
	tx, err := s.read.BeginTx(ctx, &sql.TxOptions{ReadOnly: true})
	if err != nil {
		return tree, s.fault(ctx, op, err)
	}
	defer tx.Rollback()
	rows, err := tx.QueryContext(ctx, component+snapshotRow+` WHERE s.id IN (SELECT id FROM component) AND ? IN (s.tenant, '*')`, id, who)
	if err != nil {
		return tree, s.fault(ctx, op, err)
	}
	if tree.Snapshots, err = scanSnapshots(rows); err != nil {
		return store.Tree{}, s.fault(ctx, op, err)
	}
	rows, err = tx.QueryContext(ctx, component+`SELECT s.id, s.record FROM sandboxes s WHERE s.id IN (SELECT id FROM component) AND ? IN (s.tenant, '*')`, id, who)
	if err != nil {
		return store.Tree{}, s.fault(ctx, op, err)
	}
	if tree.Sandboxes, err = scanSandboxes(rows); err != nil {
		return store.Tree{}, s.fault(ctx, op, err)
	}
	isIt := func(other string) bool { return other == id }
	if !slices.ContainsFunc(tree.Snapshots, func(n sandbox.Snapshot) bool { return isIt(n.ID) }) &&
		!slices.ContainsFunc(tree.Sandboxes, func(n sandbox.Sandbox) bool { return isIt(n.ID) }) {
		return store.Tree{}, &sandbox.Error{Class: sandbox.NotFound, Msg: "no sandbox or snapshot " + id}
	}
	return tree, nil
}
