package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// CreateGrade implements store.Grades.
func (s *Store) CreateGrade(ctx context.Context, g sandbox.Grade) error {
	if _, err := whose(ctx); err != nil {
		return err
	}
	if err := store.CheckGrade(g); err != nil {
		return err
	}
	g.Tenant = store.ScopeOf(ctx).Owner(g.Tenant)
	record, err := encodeGrade(g)
	if err != nil {
		return err
	}
	return s.write(ctx, "create_grade", func(t *tx) error {
		if err := t.wantTenant(g.Tenant); err != nil {
			return err
		}
		n, err := t.exec(`INSERT INTO grades (id, tenant, sandbox, state, created_at, unlogged, record) VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING`,
			g.ID, g.Tenant, g.Spec.Sandbox, string(g.State), nanos(g.CreatedAt), unlogged(g), record)
		if err == nil && n == 0 {
			return &sandbox.Error{Class: sandbox.AlreadyExists, Msg: fmt.Sprintf("there is a grade '%s' already", g.ID)}
		}
		return err
	})
}

// UpdateGrade implements store.Grades.
func (s *Store) UpdateGrade(ctx context.Context, id string, f func(*sandbox.Grade) error) (g sandbox.Grade, err error) {
	who, err := whose(ctx)
	if err != nil {
		return g, err
	}
	err = s.write(ctx, "update_grade", func(t *tx) error {
		var record string
		err := t.row(`SELECT record FROM grades WHERE id = ? AND ? IN (tenant, '*')`, []any{id, who}, &record)
		if errors.Is(err, sql.ErrNoRows) {
			return noGrade(id)
		}
		if err != nil {
			return err
		}
		old, err := decodeGrade(id, record)
		if err != nil {
			return err
		}
		g = old
		if err := f(&g); err != nil {
			return err
		}
		if g.ID, g.Tenant, g.CreatedAt = old.ID, old.Tenant, old.CreatedAt; !sandbox.ValidID(g.ID) {
			return noGrade(id)
		}
		if err := store.CheckGrade(g); err != nil {
			return err
		}
		if record, err = encodeGrade(g); err != nil {
			return err
		}
		_, err = t.exec(`UPDATE grades SET state = ?, unlogged = ?, record = ? WHERE id = ?`, string(g.State), unlogged(g), record, id)
		return err
	})
	if err != nil {
		return sandbox.Grade{}, err
	}
	return g, nil
}

// GetGrade implements store.Grades.
func (s *Store) GetGrade(ctx context.Context, id string) (sandbox.Grade, error) {
	who, err := whose(ctx)
	if err != nil {
		return sandbox.Grade{}, err
	}
	var record string
	err = s.readRow(ctx, `SELECT record FROM grades WHERE id = ? AND ? IN (tenant, '*')`, []any{id, who}, &record)
	if errors.Is(err, sql.ErrNoRows) {
		return sandbox.Grade{}, noGrade(id)
	}
	if err != nil {
		return sandbox.Grade{}, s.fault(ctx, "get_grade", err)
	}
	return decodeGrade(id, record)
}

// ListGrades implements store.Grades.
func (s *Store) ListGrades(ctx context.Context, f store.GradeFilter) (grades []sandbox.Grade, next string, err error) {
	size := f.PageSize
	if size == 0 {
		size = store.DefaultPageSize
	}
	if size < 0 {
		return nil, "", sandbox.InvalidField("page_size", "%d is not accepted; 1 and above is, or 0 for %d", size, store.DefaultPageSize)
	}
	who, err := whose(ctx)
	if err != nil {
		return nil, "", err
	}
	query, args := `SELECT id, record FROM grades WHERE 1 = 1`, []any{}
	where := func(part string, values ...any) { query, args = query+part, append(args, values...) }
	if who != everybody {
		where(` AND tenant = ?`, who)
	}
	if f.Sandbox != "" {
		where(` AND sandbox = ?`, f.Sandbox)
	}
	if f.State != "" {
		where(` AND state = ?`, string(f.State))
	}
	if f.Unlogged {
		where(` AND unlogged <> 0`)
	}
	if f.PageToken != "" {
		p, err := parseToken(f.PageToken)
		if err != nil {
			return nil, "", err
		}
		where(` AND (created_at, id) < (?, ?)`, p.created, p.id)
	}
	rows, err := s.read.QueryContext(ctx, query+` ORDER BY created_at DESC, id DESC LIMIT ?`, append(args, size+1)...)
	if err != nil {
		return nil, "", s.fault(ctx, "list_grades", err)
	}
	defer rows.Close()
	for rows.Next() {
		var id, record string
		if err := rows.Scan(&id, &record); err != nil {
			return nil, "", s.fault(ctx, "list_grades", err)
		}
		g, err := decodeGrade(id, record)
		if err != nil {
			return nil, "", err
		}
		grades = append(grades, g)
	}
	if err := rows.Err(); err != nil {
		return nil, "", s.fault(ctx, "list_grades", err)
	}
	if len(grades) > size {
		grades = grades[:size]
		last := grades[size-1]
		next = position{nanos(last.CreatedAt), last.ID}.token()
	}
	return grades, next, nil
}

// ForgetGrades implements store.Grades.
func (s *Store) ForgetGrades(ctx context.Context, before time.Time, limit int) (n int, err error) {
	if err := store.ScopeOf(ctx).CheckAll(); err != nil {
		return 0, err
	}
	err = s.write(ctx, "forget_grades", func(t *tx) error {
		gone, err := t.exec(`DELETE FROM grades WHERE id IN (SELECT id FROM grades WHERE created_at < ? AND state <> ? LIMIT ?)`,
			nanos(before), string(sandbox.Grading), limit)
		n = int(gone)
		return err
	})
	return n, err
}

func unlogged(g sandbox.Grade) int {
	if g.Unlogged {
		return 1
	}
	return 0
}

func encodeGrade(g sandbox.Grade) (string, error) {
	g.CreatedAt, g.FinishedAt = g.CreatedAt.UTC(), g.FinishedAt.UTC()
	b, err := json.Marshal(g)
	if err != nil {
		return "", &sandbox.Error{Class: sandbox.Invalid, Msg: "the grade cannot be recorded", Err: err}
	}
	return string(b), nil
}

func decodeGrade(id, record string) (g sandbox.Grade, err error) {
	if err := json.Unmarshal([]byte(record), &g); err != nil {
		return sandbox.Grade{}, damaged("grade", id, err)
	}
	return g, nil
}

func noGrade(id string) error {
	return &sandbox.Error{Class: sandbox.NotFound, Msg: fmt.Sprintf("no grade '%.80s'", id), Hint: `"cove grades ls" lists them`}
}
