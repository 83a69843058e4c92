// Package sqlite keeps Cove's record in one SQLite file: the default store, and
// all that a single machine needs.
//
// # How it writes
//
// One goroutine owns the only writing connection. It takes every change that
// waits, makes them in one transaction and answers when that is on disk, so
// that creators who come together share one fsync (write.go). The journal is a
// WAL with synchronous=FULL: a change that was answered survives a power cut,
// which NORMAL would not promise.
//
// # How it reads
//
// Readers have connections of their own. In WAL mode they neither wait for the
// writer nor hold it up, and they see every change that has been answered.
//
// # What is portable
//
// The schema and the statements are also PostgreSQL's, and nothing relies on
// there being one writer except that a write need not be retried. Updates are
// compare-and-set on a version, so a caller's function never runs inside a
// transaction.
package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"

	driver "modernc.org/sqlite"

	"github.com/cove-sandbox/cove/internal/durable"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// Store is a store.Store in a SQLite file.
type Store struct {
	read  *sql.DB
	stmts sync.Map // query string → *sql.Stmt on read; only constant queries, so it stays small

	writeDB *sql.DB
	writer  *writer

	closeOnce sync.Once
	closeErr  error
}

var _ store.Store = (*Store)(nil)

// Open opens or creates the database at path, whose directory must exist, and
// brings its schema up to date. The file is readable by its owner only.
//
// A file that is no database or a damaged one is sandbox.ErrCorrupt, one with a
// schema newer than this binary sandbox.ErrPrecondition; both are left as they
// are.
func Open(ctx context.Context, path string) (_ *Store, err error) {
	defer func() { err = classify(ctx, "open", err) }()
	path, err = filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	if err := makePrivate(path); err != nil {
		return nil, err
	}

	s := &Store{}
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	if s.writeDB, err = openDB(path, "_txlock=immediate"); err != nil {
		return nil, err
	}
	s.writeDB.SetMaxOpenConns(1)
	if err := migrate(ctx, s.writeDB); err != nil {
		return nil, err
	}
	if s.writer, err = startWriter(ctx, s.writeDB); err != nil {
		return nil, err
	}

	// Reads are computation, not waiting: more connections than cores only
	// take memory (a page cache of 2 MiB each).
	readers := max(4, runtime.GOMAXPROCS(0))
	if s.read, err = openDB(path, "_query_only=1"); err != nil {
		return nil, err
	}
	s.read.SetMaxOpenConns(readers)
	s.read.SetMaxIdleConns(readers)
	return s, nil
}

// Close finishes the changes under way, refuses further ones and lets go of the
// file. It may be called more than once.
func (s *Store) Close() error {
	s.closeOnce.Do(func() {
		var errs []error
		if s.writer != nil {
			errs = append(errs, s.writer.close())
		}
		if s.read != nil {
			for _, st := range s.stmts.Range {
				st.(*sql.Stmt).Close()
			}
			errs = append(errs, s.read.Close())
		}
		// Last, so that this connection folds the WAL into the file.
		if s.writeDB != nil {
			errs = append(errs, s.writeDB.Close())
		}
		s.closeErr = classify(context.Background(), "close", errors.Join(errs...))
	})
	return s.closeErr
}

// openDB makes a pool of connections that all have our settings.
func openDB(path, extra string) (*sql.DB, error) {
	params := []string{
		"_busy_timeout=5000", // first (the driver sees to that): switching to WAL may find the file locked
		"_journal_mode=WAL",
		"_synchronous=FULL",
		"_foreign_keys=1",
		"_dqs=0",                               // "x" is never a string: a misspelt column is an error
		"_pragma=journal_size_limit(67108864)", // a burst's WAL does not stay on disk for good
		extra,
	}
	dsn := (&url.URL{Scheme: "file", Path: path, RawQuery: strings.Join(params, "&")}).String()
	c, err := driver.NewConnector(dsn)
	if err != nil {
		return nil, err
	}
	return sql.OpenDB(c), nil
}

// makePrivate creates the file with mode 0600 or gives it that mode. SQLite
// gives the WAL and its index the mode of the database.
//
// It never opens a file that exists: closing any descriptor of it would drop
// the POSIX locks that other connections of this process hold.
func makePrivate(path string) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if errors.Is(err, fs.ErrExist) {
		info, err := os.Stat(path)
		if err != nil {
			return err
		}
		if !info.Mode().IsRegular() {
			return (&sandbox.Error{Class: sandbox.Precondition, Op: "store.open", Msg: path + " is not a regular file"}).
				WithHint("give the path of the database file itself")
		}
		if info.Mode().Perm() == 0o600 {
			return nil
		}
		return os.Chmod(path, 0o600)
	}
	if err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	// The name must be as durable as what will be written under it.
	return durable.Sync(filepath.Dir(path))
}

// stmt prepares a constant query for the readers, once.
func (s *Store) stmt(ctx context.Context, query string) (*sql.Stmt, error) {
	if st, ok := s.stmts.Load(query); ok {
		return st.(*sql.Stmt), nil
	}
	st, err := s.read.PrepareContext(ctx, query)
	if err != nil {
		return nil, err
	}
	if kept, loaded := s.stmts.LoadOrStore(query, st); loaded {
		st.Close()
		return kept.(*sql.Stmt), nil
	}
	return st, nil
}

// readRow scans the one row of a constant query; sql.ErrNoRows if there is none.
func (s *Store) readRow(ctx context.Context, query string, args []any, dest ...any) error {
	st, err := s.stmt(ctx, query)
	if err != nil {
		return err
	}
	return st.QueryRowContext(ctx, args...).Scan(dest...)
}
