package sandbox

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
)

// Class is the stable, machine-readable kind of an error. It crosses every
// boundary unchanged: guest, node, server, wire and SDKs. The catalogue with
// the HTTP status of each is api/errors.json.
type Class string

const (
	Invalid         Class = "invalid_argument"    // a field is wrong; Field names it
	NotFound        Class = "not_found"           // no such sandbox, process, file, key, snapshot, template, volume
	ImageNotFound   Class = "image_not_found"     // no such image here or in the registry
	AlreadyExists   Class = "already_exists"      // the name or id is taken by something different
	Unauthenticated Class = "unauthenticated"     // no key or a wrong one
	Denied          Class = "permission_denied"   // a right key without the right
	NoCapacity      Class = "no_capacity"         // full now; RetryAfter says when to ask again
	QuotaExceeded   Class = "quota_exceeded"      // the tenant's own bound; RetryAfter says when to ask again
	TooLarge        Class = "too_large"           // a request or object above a limit
	Ended           Class = "sandbox_ended"       // the sandbox is over; its end cause says why
	Precondition    Class = "failed_precondition" // the thing is in the wrong state for this
	Conflict        Class = "conflict"            // lost a race with another writer; try again
	DiskFull        Class = "disk_full"           // the sandbox or the host has no space left
	Unavailable     Class = "unavailable"         // cannot be served now; safe to retry
	DeadlineReached Class = "deadline_exceeded"   // the caller's own deadline passed
	Canceled        Class = "canceled"            // the caller left
	Unsupported     Class = "unsupported"         // this driver or image cannot do that
	Corrupt         Class = "corrupt"             // stored content failed verification
	Internal        Class = "internal"            // a defect of ours
)

// One sentinel per class: errors.Is(err, ErrNotFound) holds for every *Error
// of that class, wherever it was made.
var (
	ErrInvalid         = &Error{Class: Invalid}
	ErrNotFound        = &Error{Class: NotFound}
	ErrImageNotFound   = &Error{Class: ImageNotFound}
	ErrAlreadyExists   = &Error{Class: AlreadyExists}
	ErrUnauthenticated = &Error{Class: Unauthenticated}
	ErrDenied          = &Error{Class: Denied}
	ErrNoCapacity      = &Error{Class: NoCapacity}
	ErrQuotaExceeded   = &Error{Class: QuotaExceeded}
	ErrTooLarge        = &Error{Class: TooLarge}
	ErrEnded           = &Error{Class: Ended}
	ErrPrecondition    = &Error{Class: Precondition}
	ErrConflict        = &Error{Class: Conflict}
	ErrDiskFull        = &Error{Class: DiskFull}
	ErrUnavailable     = &Error{Class: Unavailable}
	ErrDeadline        = &Error{Class: DeadlineReached}
	ErrCanceled        = &Error{Class: Canceled}
	ErrUnsupported     = &Error{Class: Unsupported}
	ErrCorrupt         = &Error{Class: Corrupt}
	ErrInternal        = &Error{Class: Internal}
)

// Reason is one case of a class that callers act on differently. Stable like a
// class; most errors have none.
type Reason string

const (
	PortClosed Reason = "port_closed" // of Precondition: nothing inside listens on the port
	PortTaken  Reason = "port_taken"  // of Precondition: a program inside has the port that was to be listened on
	Asleep     Reason = "asleep"      // of Precondition: on standby, and not woken for this
	Busy       Reason = "busy"        // of Precondition: processes run that the caller would not have frozen

	// As a shell's exit codes 127 and 126 tell them apart.
	CommandNotFound Reason = "command_not_found" // of NotFound: no such program inside, so nothing ran
	NotExecutable   Reason = "not_executable"    // of Denied and Invalid: the program is there and cannot be run

	NoSandbox      Reason = "no_sandbox"      // of NotFound: the sandbox itself, and not a file or process in it
	NoLease        Reason = "no_lease"        // of NotFound: the lease, which is over or never was
	NoRun          Reason = "no_run"          // of NotFound and Precondition: the run, which never was or is over
	RestoreRefused Reason = "restore_refused" // of Precondition and Unsupported: memory cannot go on here; other machine, other programs

	NotReplayable  Reason = "not_replayable"  // of Precondition, NotFound and ImageNotFound: not all is known that an episode needs to be run again
	ShipmentBehind Reason = "shipment_behind" // of NoCapacity: records of steps wait to be shipped, as many as may

	ReplayMissed    Reason = "replay_miss"      // of NotFound: no such request was recorded, or not as often
	ReplayTruncated Reason = "replay_truncated" // of NotFound: it was recorded, but not whole
)

var (
	ErrPortClosed = &Error{Class: Precondition, Reason: PortClosed}
	ErrPortTaken  = &Error{Class: Precondition, Reason: PortTaken}
	ErrAsleep     = &Error{Class: Precondition, Reason: Asleep}
	ErrBusy       = &Error{Class: Precondition, Reason: Busy}

	ErrNoSandbox       = &Error{Class: NotFound, Reason: NoSandbox}
	ErrNoLease         = &Error{Class: NotFound, Reason: NoLease}
	ErrNoRun           = &Error{Class: NotFound, Reason: NoRun}
	ErrCommandNotFound = &Error{Class: NotFound, Reason: CommandNotFound}

	ErrShipmentBehind = &Error{Class: NoCapacity, Reason: ShipmentBehind}

	ErrReplayMissed    = &Error{Class: NotFound, Reason: ReplayMissed}
	ErrReplayTruncated = &Error{Class: NotFound, Reason: ReplayTruncated}
)

// Error says what class of thing went wrong, in which operation, and the way
// out. It is immutable once returned.
type Error struct {
	Class      Class         `json:"class"`
	Op         string        `json:"op,omitempty"`     // e.g. "sandbox.create"
	Field      string        `json:"field,omitempty"`  // for Invalid: the request field
	Reason     Reason        `json:"reason,omitempty"` // which of the things a class covers, where callers must tell
	Msg        string        `json:"msg,omitempty"`
	Hint       string        `json:"hint,omitempty"` // what the user can do about it
	RetryAfter time.Duration `json:"retry_after,omitempty"`
	Err        error         `json:"-"` // cause; does not cross the wire
}

func (e *Error) Error() string {
	var b strings.Builder
	if e.Op != "" {
		b.WriteString(e.Op + ": ")
	}
	if e.Field != "" {
		b.WriteString(e.Field + ": ")
	}
	switch {
	case e.Msg != "":
		b.WriteString(e.Msg)
	case e.Err != nil:
		b.WriteString(e.Err.Error())
	default:
		b.WriteString(strings.ReplaceAll(string(e.Class), "_", " "))
	}
	if e.Msg != "" && e.Err != nil {
		b.WriteString(": " + e.Err.Error())
	}
	return b.String()
}

func (e *Error) Unwrap() error { return e.Err }

// Is matches a sentinel (an Error with only a class, or a class and a reason).
func (e *Error) Is(target error) bool {
	t, ok := target.(*Error)
	return ok && t.Class == e.Class && (t.Reason == "" || t.Reason == e.Reason) && t.Op == "" && t.Msg == "" && t.Field == "" && t.Err == nil
}

// ClassOf is the class of the outermost *Error in err's chain, Internal for
// any other error, and "" for nil.
func ClassOf(err error) Class {
	if err == nil {
		return ""
	}
	var e *Error
	if errors.As(err, &e) {
		return e.Class
	}
	return Internal
}

// Errorf makes an error of a class; a %w verb keeps the cause reachable.
func Errorf(c Class, op, format string, args ...any) *Error {
	return &Error{Class: c, Op: op, Err: fmt.Errorf(format, args...)}
}

// InvalidField names the request field that is wrong and what is accepted.
func InvalidField(field, format string, args ...any) *Error {
	return &Error{Class: Invalid, Field: field, Msg: fmt.Sprintf(format, args...)}
}

// Plain is an error as a person is told it: without the operation, which only a
// defect needs named.
func Plain(err error) string {
	if e, ok := err.(*Error); ok {
		c := *e
		c.Op = ""
		return c.Error()
	}
	return err.Error()
}

// WithHint returns a copy of e that carries a way out.
func (e *Error) WithHint(format string, args ...any) *Error {
	c := *e
	c.Hint = fmt.Sprintf(format, args...)
	return &c
}

// WithReason returns a copy of e that says which case of its class it is.
func (e *Error) WithReason(r Reason) *Error {
	c := *e
	c.Reason = r
	return &c
}

// AsError finds the *Error in err or makes one. A context error gets its own
// class, anything else is a defect of ours.
func AsError(err error) *Error {
	var e *Error
	switch {
	case errors.As(err, &e):
		return e
	case errors.Is(err, context.Canceled):
		return &Error{Class: Canceled, Err: err}
	case errors.Is(err, context.DeadlineExceeded):
		return &Error{Class: DeadlineReached, Err: err}
	}
	return &Error{Class: Internal, Err: err}
}

// WithField returns err with the field of the request set that it is about, where
// it names none yet.
func WithField(field string, err error) error {
	var e *Error
	if errors.As(err, &e) && e.Field == "" {
		c := *e
		c.Field = field
		return &c
	}
	return err
}

// WithOp returns err with the operation set where it has none yet.
func WithOp(op string, err error) error {
	var e *Error
	if errors.As(err, &e) && e.Op == "" {
		c := *e
		c.Op = op
		return &c
	}
	return err
}
