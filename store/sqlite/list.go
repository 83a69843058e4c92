package sqlite

import (
	"context"
	"database/sql"
	"encoding/base64"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// position is a place in the order of the list: newest first, then by id
// downwards. A page begins after the last of the page before, so that what is
// created or ended meanwhile moves nothing.
type position struct {
	created int64
	id      string
}

func positionOf(sb sandbox.Sandbox) position { return position{nanos(sb.CreatedAt), sb.ID} }

// before says whether p comes before q in the list.
func (p position) before(q position) bool {
	return p.created > q.created || p.created == q.created && p.id > q.id
}

// token writes a position so that callers do not come to rely on its form; the
// leading 1 is the version of that form.
func (p position) token() string {
	return base64.RawURLEncoding.EncodeToString(fmt.Appendf(nil, "1.%d.%s", p.created, p.id))
}

func parseToken(token string) (p position, err error) {
	raw, err := base64.RawURLEncoding.DecodeString(token)
	if err == nil {
		part := strings.SplitN(string(raw), ".", 3)
		if len(part) == 3 && part[0] == "1" && sandbox.ValidID(part[2]) {
			p.id = part[2]
			if p.created, err = strconv.ParseInt(part[1], 10, 64); err == nil {
				return p, nil
			}
		}
	}
	return p, sandbox.InvalidField("page_token", "is not one that a list returned; the next_page_token of the page before is accepted")
}

// ListSandboxes implements store.Sandboxes.
func (s *Store) ListSandboxes(ctx context.Context, f store.Filter) (sbs []sandbox.Sandbox, next string, err error) {
	size := f.PageSize
	if size == 0 {
		size = store.DefaultPageSize
	}
	if size < 0 {
		return nil, "", sandbox.InvalidField("page_size", "%d is not accepted; 1 and above is, or 0 for %d", size, store.DefaultPageSize)
	}
	var after *position
	if f.PageToken != "" {
		p, err := parseToken(f.PageToken)
		if err != nil {
			return nil, "", err
		}
		after = &p
	}
	who, err := whose(ctx)
	if err != nil {
		return nil, "", err
	}
	live, ended := []sandbox.State{}, false
	for _, st := range f.States {
		switch {
		case !st.Valid():
			return nil, "", sandbox.InvalidField("states", "%q is no state; creating, running, ending and ended are accepted", st)
		case st == sandbox.EndedState:
			ended = true
		default:
			live = append(live, st)
		}
	}

	// The living and the ended are two ranges of each index. Who asks for
	// both gets them merged from one snapshot, or a sandbox that ends in
	// between would be missed or seen twice.
	tx, err := s.read.BeginTx(ctx, &sql.TxOptions{ReadOnly: true})
	if err != nil {
		return nil, "", s.fault(ctx, "list_sandboxes", err)
	}
	defer tx.Rollback()
	if len(live) > 0 || !ended {
		if sbs, err = page(ctx, tx, who, 0, live, f, after, size+1); err != nil {
			return nil, "", s.fault(ctx, "list_sandboxes", err)
		}
	}
	if ended {
		more, err := page(ctx, tx, who, 1, nil, f, after, size+1)
		if err != nil {
			return nil, "", s.fault(ctx, "list_sandboxes", err)
		}
		sbs = append(sbs, more...)
		slices.SortFunc(sbs, func(a, b sandbox.Sandbox) int {
			if positionOf(a).before(positionOf(b)) {
				return -1
			}
			return 1
		})
	}
	if len(sbs) > size {
		sbs = sbs[:size]
		next = positionOf(sbs[size-1]).token()
	}
	return sbs, next, nil
}

// page reads one range in list order.
func page(ctx context.Context, tx *sql.Tx, who string, ended int, states []sandbox.State, f store.Filter, after *position, limit int) ([]sandbox.Sandbox, error) {
	query, args := pageQuery(who, ended, states, f, after, limit)
	rows, err := tx.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	return scanSandboxes(rows)
}

// scanSandboxes reads rows of id and record, and closes them.
func scanSandboxes(rows *sql.Rows) (sbs []sandbox.Sandbox, err error) {
	defer rows.Close()
	for rows.Next() {
		var id, record string
		if err := rows.Scan(&id, &record); err != nil {
			return nil, err
		}
		sb, err := decodeSandbox(id, record)
		if err != nil {
			return nil, err
		}
		sbs = append(sbs, sb)
	}
	return sbs, rows.Err()
}

// pageQuery is the statement of a page. The first label, if any, gives the
// order through its index; the others are looked up by sandbox.
func pageQuery(who string, ended int, states []sandbox.State, f store.Filter, after *position, limit int) (string, []any) {
	labels := f.Labels
	names := make([]string, 0, len(labels))
	for name := range labels {
		names = append(names, name)
	}
	slices.Sort(names) // the same filter is the same statement

	var q strings.Builder
	var args []any
	add := func(text string, a ...any) {
		q.WriteString(text)
		args = append(args, a...)
	}
	created, id := "s.created_at", "s.id"
	if len(names) == 0 {
		add("SELECT s.id, s.record FROM sandboxes s WHERE s.ended = ?", ended)
	} else {
		created, id = "l0.created_at", "l0.sandbox_id"
		add("SELECT s.id, s.record FROM sandbox_labels l0 JOIN sandboxes s ON s.id = l0.sandbox_id")
		for i, name := range names[1:] {
			add(fmt.Sprintf(" JOIN sandbox_labels l%d ON l%[1]d.sandbox_id = l0.sandbox_id AND l%[1]d.name = ? AND l%[1]d.value = ?", i+1), name, labels[name])
		}
		add(" WHERE l0.name = ? AND l0.value = ? AND l0.ended = ?", names[0], labels[names[0]], ended)
	}
	if f.Run != "" {
		add(" AND s.run = ? AND s.run <> ''", f.Run) // the latter is what its index is of
	}
	if who != everybody {
		add(" AND s.tenant = ?", who)
	}
	if len(states) > 0 {
		add(" AND s.state IN (" + strings.TrimSuffix(strings.Repeat("?, ", len(states)), ", ") + ")")
		for _, st := range states {
			args = append(args, string(st))
		}
	}
	if after != nil {
		add(" AND ("+created+", "+id+") < (?, ?)", after.created, after.id)
	}
	add(" ORDER BY "+created+" DESC, "+id+" DESC LIMIT ?", limit)

	return q.String(), args
}
