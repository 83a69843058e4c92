package sqlite

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"io/fs"
	"time"

	driver "modernc.org/sqlite"
	lib "modernc.org/sqlite/lib"

	"github.com/cove-sandbox/cove/sandbox"
)

// migrations are the steps of the schema, in the order of their names; step n
// is the n-th file. A file that was released never changes.
//
//go:embed migrations/*.sql
var migrations embed.FS

// migrate brings the schema up to what this binary knows, in one transaction
// that holds the write lock: of several that open a new file at once one does
// it, and a crash leaves the old schema or the new one.
//
// Not goose, which was tried: on SQLite it takes no lock, so that of eight
// openers three failed with "table already exists", and it answers a damaged
// file by trying to create its own table for three seconds, which hides the
// damage. What it adds, steps back, is what we would not use on a record.
func migrate(ctx context.Context, db *sql.DB) (err error) {
	steps, err := fs.ReadDir(migrations, "migrations")
	if err != nil {
		return err
	}
	tx, err := begin(ctx, db)
	if err != nil {
		return err
	}
	defer tx.Rollback() // after Commit it does nothing

	var tables, ours int
	err = tx.QueryRowContext(ctx, `SELECT count(*), coalesce(sum(name = 'schema_version'), 0) FROM sqlite_master WHERE type = 'table'`).Scan(&tables, &ours)
	if err != nil {
		return err
	}
	have := 0
	if ours > 0 {
		if err := tx.QueryRowContext(ctx, `SELECT coalesce(max(version), 0) FROM schema_version`).Scan(&have); err != nil {
			return err
		}
	}
	switch {
	case ours == 0 && tables > 0:
		return sandbox.Errorf(sandbox.Precondition, "store.open", "the file is a database of something else").
			WithHint("give the path of Cove's own database, or of a file that is not there yet")
	case have > len(steps):
		// An old binary would write records that lack what the new one
		// relies on.
		return sandbox.Errorf(sandbox.Precondition, "store.open", "the database has schema %d, this binary knows up to %d", have, len(steps)).
			WithHint("start the newer cove that wrote it, or restore a backup made before the upgrade")
	case have == len(steps):
		return nil
	}
	if have == 0 {
		if _, err := tx.ExecContext(ctx, `CREATE TABLE schema_version (version BIGINT NOT NULL PRIMARY KEY)`); err != nil {
			return err
		}
	}
	for i := have; i < len(steps); i++ {
		text, err := fs.ReadFile(migrations, "migrations/"+steps[i].Name())
		if err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, string(text)); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, `INSERT INTO schema_version (version) VALUES (?)`, i+1); err != nil {
			return err
		}
	}
	return tx.Commit()
}

// begin takes the write lock on a new connection. Turning a new file into WAL
// mode does not wait for busy_timeout when somebody else is doing the same, so
// that one error is waited out here; theirs takes milliseconds.
func begin(ctx context.Context, db *sql.DB) (*sql.Tx, error) {
	for wait := time.Millisecond; ; wait *= 2 {
		tx, err := db.BeginTx(ctx, nil) // immediate, by the settings of db
		var e *driver.Error
		if err == nil || !errors.As(err, &e) || e.Code()&0xff != lib.SQLITE_BUSY || wait > time.Second {
			return tx, err
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}
