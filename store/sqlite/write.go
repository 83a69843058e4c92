package sqlite

import (
	"context"
	"database/sql"
	"errors"

	"github.com/cove-sandbox/cove/sandbox"
)

// maxBatch bounds how long the first change of a batch waits for the others:
// 128 creates are about 20 ms of work.
//
// On 2 busy cores with an fsync of 0.2 ms, 64 creators make 2,000 sandboxes a
// second with a transaction each and 6,500 with shared ones (BenchmarkCreate).
// On disks where an fsync takes milliseconds the first number falls to some
// hundreds and the second hardly moves.
const maxBatch = 128

// writer is the one goroutine that changes the database.
type writer struct {
	ops     chan *change  // unbuffered: a change is either still the caller's to withdraw, or taken
	closing chan struct{} // closed by close
	done    chan struct{} // closed when run has returned

	// Of the goroutine alone, after startWriter.
	conn  *sql.Conn
	stmts map[string]*sql.Stmt
}

// change is one caller's write. do may be called again after a rollback, so it
// must set its results anew every time. It returns a *sandbox.Error only if it
// has written nothing: such a refusal leaves the others of its batch alone,
// while any other error rolls the whole batch back.
type change struct {
	do     func(*tx) error
	result chan error // buffered: the writer never waits for a caller
}

// tx is the transaction under way on the writer's connection.
type tx struct{ w *writer }

func startWriter(ctx context.Context, db *sql.DB) (*writer, error) {
	conn, err := db.Conn(ctx)
	if err != nil {
		return nil, err
	}
	w := &writer{
		ops:     make(chan *change),
		closing: make(chan struct{}),
		done:    make(chan struct{}),
		conn:    conn,
		stmts:   map[string]*sql.Stmt{},
	}
	go w.run()
	return w, nil
}

// close waits for the transaction under way. Call it once.
func (w *writer) close() error {
	close(w.closing)
	<-w.done
	// SQLite keeps a connection with open statements half alive, and with it
	// the WAL; what was prepared on a Conn is not closed with it.
	for _, st := range w.stmts {
		st.Close()
	}
	return w.conn.Close()
}

// write makes a change and returns when it is durable or refused. A context
// that ends while the change waits withdraws it; once it is in a transaction
// the outcome is milliseconds away and is waited for, so that a caller always
// learns it.
func (s *Store) write(ctx context.Context, op string, do func(*tx) error) error {
	if err := ctx.Err(); err != nil {
		return classify(ctx, op, err)
	}
	c := &change{do: do, result: make(chan error, 1)}
	select {
	case s.writer.ops <- c:
		return classify(context.WithoutCancel(ctx), op, <-c.result)
	case <-ctx.Done():
		return classify(ctx, op, ctx.Err())
	case <-s.writer.closing:
		return classify(ctx, op, errClosed)
	}
}

func (w *writer) run() {
	defer close(w.done)
	batch := make([]*change, 0, maxBatch)
	for {
		batch = batch[:0]
		select {
		case c := <-w.ops:
			batch = append(batch, c)
		case <-w.closing:
			return
		}
	waiting:
		for len(batch) < maxBatch {
			select {
			case c := <-w.ops:
				batch = append(batch, c)
			default:
				break waiting
			}
		}
		w.commit(batch)
	}
}

// commit makes a batch durable with one fsync and answers its callers. If one
// change breaks the transaction, each gets one of its own, so that only the
// broken one fails.
func (w *writer) commit(batch []*change) {
	answers := make([]error, len(batch))
	broken, err := w.transact(batch, answers)
	if broken && len(batch) > 1 {
		for _, c := range batch {
			w.commit([]*change{c})
		}
		return
	}
	for i, c := range batch {
		if err != nil {
			c.result <- err
		} else {
			c.result <- answers[i]
		}
	}
}

// transact runs changes in one transaction. On error none of them has happened;
// broken says that it was one of them and not the database's state, which
// would fail the others too.
func (w *writer) transact(batch []*change, answers []error) (broken bool, err error) {
	t := &tx{w}
	if _, err := t.exec("BEGIN IMMEDIATE"); err != nil {
		return false, err
	}
	for i, c := range batch {
		err := c.do(t)
		var refusal *sandbox.Error
		if err != nil && !errors.As(err, &refusal) {
			t.rollback()
			return true, err
		}
		answers[i] = err
	}
	if _, err := t.exec("COMMIT"); err != nil {
		t.rollback()
		return false, err
	}
	return false, nil
}

// rollback ends the transaction if SQLite has not done so itself, as it does on
// a full disk; it then says that there is none, which is what we want.
func (t *tx) rollback() { t.exec("ROLLBACK") }

// stmt prepares a constant query once. No context here or below: a caller who
// leaves must not interrupt the statements of the others in the batch.
func (t *tx) stmt(query string) (*sql.Stmt, error) {
	if st, ok := t.w.stmts[query]; ok {
		return st, nil
	}
	st, err := t.w.conn.PrepareContext(context.Background(), query)
	if err != nil {
		return nil, err
	}
	t.w.stmts[query] = st
	return st, nil
}

// exec runs a statement and says how many rows it changed.
func (t *tx) exec(query string, args ...any) (int64, error) {
	st, err := t.stmt(query)
	if err != nil {
		return 0, err
	}
	res, err := st.Exec(args...)
	if err != nil {
		return 0, err
	}
	return res.RowsAffected()
}

// row scans the one row of a query; sql.ErrNoRows if there is none.
func (t *tx) row(query string, args []any, dest ...any) error {
	st, err := t.stmt(query)
	if err != nil {
		return err
	}
	return st.QueryRow(args...).Scan(dest...)
}
