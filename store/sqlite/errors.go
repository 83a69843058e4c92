package sqlite

import (
	"context"
	"errors"
	"fmt"

	driver "modernc.org/sqlite"
	lib "modernc.org/sqlite/lib"

	"github.com/cove-sandbox/cove/sandbox"
)

var errClosed = errors.New("the store is closed")

// fault classifies what went wrong in a call on s. database/sql has no value
// for "database is closed", so s says itself whether it is.
func (s *Store) fault(ctx context.Context, op string, err error) error {
	var known *sandbox.Error
	if err == nil || errors.As(err, &known) {
		return err
	}
	select {
	case <-s.writer.closing:
		err = errClosed
	default:
	}
	return classify(ctx, op, err)
}

// classify turns whatever went wrong into a *sandbox.Error. One that already is
// passes as it is: what the record says (not found, taken) is about the
// caller's operation, which names itself; only faults of the store are called
// "store.…".
func classify(ctx context.Context, op string, err error) error {
	var known *sandbox.Error
	if err == nil || errors.As(err, &known) {
		return err
	}
	e := &sandbox.Error{Class: sandbox.Internal, Op: "store." + op, Err: err}
	if cause := ctx.Err(); cause != nil || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		// The driver reports an interrupted query in several ways; the
		// context says what it was.
		if cause == nil {
			cause = err
		}
		e.Class, e.Err = sandbox.Canceled, cause
		if errors.Is(cause, context.DeadlineExceeded) {
			e.Class = sandbox.DeadlineReached
		}
		return e
	}
	if errors.Is(err, errClosed) {
		e.Class = sandbox.Unavailable
		return e
	}
	var se *driver.Error
	if !errors.As(err, &se) {
		return e
	}
	switch se.Code() & 0xff { // the low byte is the primary code
	case lib.SQLITE_CORRUPT, lib.SQLITE_NOTADB:
		e.Class = sandbox.Corrupt
		e.Hint = "the database file is damaged or no database: restore a backup, or move it away to begin anew"
	case lib.SQLITE_FULL:
		e.Class = sandbox.DiskFull
		e.Hint = "free space on the file system of the database; nothing was changed"
	case lib.SQLITE_BUSY, lib.SQLITE_LOCKED:
		e.Class = sandbox.Unavailable
		e.Hint = "another process has held the database's lock for 5 s"
	case lib.SQLITE_READONLY, lib.SQLITE_PERM, lib.SQLITE_CANTOPEN, lib.SQLITE_AUTH:
		e.Hint = "check the owner and mode of the database file and of its directory"
	case lib.SQLITE_NOMEM, lib.SQLITE_IOERR:
		e.Class = sandbox.Unavailable
	}
	return e
}

// damaged is a record that does not read back as what was written.
func damaged(what, id string, err error) error {
	return &sandbox.Error{Class: sandbox.Corrupt, Op: "store.read", Msg: fmt.Sprintf("the record of %s %q is damaged", what, id), Err: err,
		Hint: "restore a backup of the database"}
}
