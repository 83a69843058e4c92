package sqlite

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/sandbox"
)

// The tree's query walks edges by index in both directions; a scan of the
// table per node would be quadratic in what is on record.
func TestTreeUsesTheIndexes(t *testing.T) {
	s := open(t)
	for i := range 200 {
		sb := newSandbox(fmt.Sprintf("a%d", i))
		sb.Lineage = sandbox.Lineage{}.Below("root").Below(fmt.Sprintf("p%d", i%7))
		create(t, s, sb)
	}
	rows, err := s.read.Query("EXPLAIN QUERY PLAN "+component+"SELECT id FROM component", "a1")
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	var plan strings.Builder
	for rows.Next() {
		var id, parent, unused int
		var detail string
		if err := rows.Scan(&id, &parent, &unused, &detail); err != nil {
			t.Fatal(err)
		}
		plan.WriteString(detail + "\n")
	}
	if text := plan.String(); strings.Contains(text, "SCAN l") || !strings.Contains(text, "lineage_by_ancestor") {
		t.Errorf("the plan:\n%s", text)
	}
	tree, err := s.Tree(everywhere(), "a1")
	if err != nil || len(tree.Sandboxes) != 200 {
		t.Errorf("%d sandboxes, %v", len(tree.Sandboxes), err)
	}
}
