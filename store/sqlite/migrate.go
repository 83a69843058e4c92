package sqlite

import (
	"context"
	"database/sql"
	"embed"
	"io/fs"

	"github.com/pressly/goose/v3"

	"github.com/cove-sandbox/cove/sandbox"
)

//go:embed migrations/*.sql
var migrations embed.FS

// migrate brings the schema up to what this binary knows.
func migrate(ctx context.Context, db *sql.DB) error {
	// A file that is no database is told from here; goose would try it
	// several times with pauses first.
	var tables int
	if err := db.QueryRowContext(ctx, "SELECT count(*) FROM sqlite_master").Scan(&tables); err != nil {
		return err
	}
	dir, err := fs.Sub(migrations, "migrations")
	if err != nil {
		return err
	}
	p, err := goose.NewProvider(goose.DialectSQLite3, db, dir, goose.WithDisableGlobalRegistry(true))
	if err != nil {
		return err
	}
	have, know, err := p.GetVersions(ctx)
	if err != nil {
		return err
	}
	// An old binary on a new schema would write records that lack what the
	// new one relies on.
	if have > know {
		return sandbox.Errorf(sandbox.Precondition, "store.open", "the database has schema %d, this binary knows up to %d", have, know).
			WithHint("start the newer cove that wrote it, or restore a backup made before the upgrade")
	}
	if have == know {
		return nil
	}
	_, err = p.Up(ctx)
	return err
}
