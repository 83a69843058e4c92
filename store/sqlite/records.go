package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/cove-sandbox/cove/sandbox"
)

// What the tables of named and owned things have in common: one is looked up, all are
// listed, one goes, one moves from state to state.

// scanner reads one row.
type scanner func(dest ...any) error

// scan is the one row of a constant query, once.
func (s *Store) scan(ctx context.Context, query string, args ...any) scanner {
	return func(dest ...any) error { return s.readRow(ctx, query, args, dest...) }
}

// one reads the row of a constant query; without it, the error is missing.
func one[T any](ctx context.Context, s *Store, op string, read func(scanner) (T, error), missing error, query string, args ...any) (T, error) {
	v, err := read(s.scan(ctx, query, args...))
	if errors.Is(err, sql.ErrNoRows) {
		return v, missing
	}
	return v, s.fault(ctx, op, err)
}

// listed reads all rows that the scope of ctx sees, of a query whose only argument is that.
func listed[T any](ctx context.Context, s *Store, op string, read func(scanner) (T, error), query string) ([]T, error) {
	who, err := whose(ctx)
	if err != nil {
		return nil, err
	}
	out, err := each(ctx, s, read, query, who)
	return out, s.fault(ctx, op, err)
}

// each reads all rows of a constant query.
func each[T any](ctx context.Context, s *Store, read func(scanner) (T, error), query string, args ...any) ([]T, error) {
	st, err := s.stmt(ctx, query)
	if err != nil {
		return nil, err
	}
	rows, err := st.QueryContext(ctx, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var out []T
	for rows.Next() {
		v, err := read(rows.Scan)
		if err != nil {
			return nil, err
		}
		out = append(out, v)
	}
	return out, rows.Err()
}

// change is a write of one statement; where it finds no row, the error is missing,
// which may be nil.
func (s *Store) change(ctx context.Context, op string, missing error, query string, args ...any) error {
	return s.write(ctx, op, func(t *tx) error {
		n, err := t.exec(query, args...)
		if err == nil && n == 0 {
			return missing
		}
		return err
	})
}

// changeSeen is change of what the scope of ctx sees, which is the last argument.
func (s *Store) changeSeen(ctx context.Context, op string, missing error, query string, args ...any) error {
	who, err := whose(ctx)
	if err != nil {
		return err
	}
	return s.change(ctx, op, missing, query, append(args, who)...)
}

// move takes a record from one state to another, by compare and set.
func (s *Store) move(ctx context.Context, what, id, update, state, from, to string, missing error) error {
	who, err := whose(ctx)
	if err != nil {
		return err
	}
	return s.write(ctx, "move_"+what, func(t *tx) error {
		n, err := t.exec(update, to, id, from, who)
		if err != nil || n > 0 {
			return err
		}
		var is string
		err = t.row(state, []any{id, who}, &is)
		if errors.Is(err, sql.ErrNoRows) {
			return missing
		}
		if err != nil {
			return err
		}
		return &sandbox.Error{Class: sandbox.Conflict, Msg: fmt.Sprintf("%s %s is %s, not %s", what, id, is, from), Hint: "ask again"}
	})
}

// encoded is a record as it is kept.
func encoded(what string, v any) (string, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return "", &sandbox.Error{Class: sandbox.Invalid, Msg: "the " + what + " cannot be recorded", Err: err}
	}
	return string(b), nil
}

// missing is that there is no such thing.
func missing(what, ref string) error {
	return &sandbox.Error{Class: sandbox.NotFound, Msg: fmt.Sprintf("no %s '%.80s'", what, ref)}
}
