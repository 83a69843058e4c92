package e2b

import (
	"encoding/json"
	"errors"
	"math"
	"net/http"
	"strconv"
	"strings"

	"connectrpc.com/connect"

	"github.com/cove-sandbox/cove/sandbox"
)

// statusOf is the HTTP status of a class: the SDKs choose their exception by it.
func statusOf(c sandbox.Class) int {
	switch c {
	case sandbox.Invalid, sandbox.Unsupported:
		return http.StatusBadRequest
	case sandbox.TooLarge:
		return http.StatusRequestEntityTooLarge
	case sandbox.NotFound, sandbox.ImageNotFound, sandbox.Ended:
		return http.StatusNotFound
	case sandbox.Unauthenticated:
		return http.StatusUnauthorized
	case sandbox.Denied:
		return http.StatusForbidden
	case sandbox.QuotaExceeded:
		return http.StatusTooManyRequests
	case sandbox.NoCapacity, sandbox.Unavailable:
		return http.StatusServiceUnavailable
	case sandbox.AlreadyExists, sandbox.Precondition, sandbox.Conflict:
		return http.StatusConflict
	case sandbox.DiskFull:
		return http.StatusInsufficientStorage
	case sandbox.DeadlineReached:
		return http.StatusGatewayTimeout
	case sandbox.Canceled:
		return 499
	}
	return http.StatusInternalServerError
}

// refusal is the body of every error. The JavaScript SDK looks at code, not at the
// status.
type refusal struct {
	Code      int    `json:"code"`
	Message   string `json:"message"`
	SandboxID string `json:"sandboxId,omitempty"`
	Port      int    `json:"port,omitempty"`
}

func writeError(w http.ResponseWriter, err error) {
	e := sandbox.AsError(err)
	status := statusOf(e.Class)
	if e.RetryAfter > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(int(math.Ceil(e.RetryAfter.Seconds()))))
	}
	writeRefusal(w, status, refusal{Code: status, Message: message(e)})
}

func writeRefusal(w http.ResponseWriter, status int, body refusal) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(body) // an error means that the client left
}

// message is an error with its way out: the SDKs show one line.
func message(e *sandbox.Error) string {
	msg := sandbox.Plain(e)
	if e.Hint != "" && e.Class != sandbox.Unauthenticated { // that hint is about the native client
		msg += " (" + e.Hint + ")"
	}
	return msg
}

// writeGone is what E2B's proxy says of a sandbox that does not run: the SDKs tell
// by it that it was killed, and by nothing else.
func writeGone(w http.ResponseWriter, id string) {
	writeRefusal(w, http.StatusBadGateway, refusal{Code: http.StatusBadGateway, Message: goneMessage, SandboxID: id})
}

const goneMessage = "The sandbox was not found"

// gone says whether an error means that there is no such running sandbox, as
// opposed to a file or process in it.
func gone(err error) bool {
	return errors.Is(err, sandbox.ErrNoSandbox) || errors.Is(err, sandbox.ErrEnded) || errors.Is(err, sandbox.ErrAsleep)
}

// codeOf is Connect's code of an error of the agent.
func codeOf(e *sandbox.Error) connect.Code {
	if gone(e) {
		return connect.CodeUnavailable
	}
	if e.Class == sandbox.Invalid && (e.Field == "user" || strings.HasSuffix(e.Field, ".user")) {
		return connect.CodeUnauthenticated // as E2B says of a user that is not there
	}
	switch e.Class {
	case sandbox.Invalid, sandbox.TooLarge, sandbox.Unsupported:
		return connect.CodeInvalidArgument
	case sandbox.NotFound, sandbox.ImageNotFound:
		return connect.CodeNotFound
	case sandbox.AlreadyExists:
		return connect.CodeAlreadyExists
	case sandbox.Unauthenticated:
		return connect.CodeUnauthenticated
	case sandbox.Denied:
		return connect.CodePermissionDenied
	case sandbox.QuotaExceeded, sandbox.NoCapacity:
		return connect.CodeResourceExhausted
	case sandbox.Precondition, sandbox.DiskFull: // the SDKs take "exhausted" for a rate limit, and try again
		return connect.CodeFailedPrecondition
	case sandbox.Conflict:
		return connect.CodeAborted
	case sandbox.Unavailable:
		return connect.CodeUnavailable
	case sandbox.DeadlineReached:
		return connect.CodeDeadlineExceeded
	case sandbox.Canceled:
		return connect.CodeCanceled
	}
	return connect.CodeInternal
}

// toConnect is an operation's error as the agent would say it.
func toConnect(_ string, err error) error {
	var already *connect.Error
	if errors.As(err, &already) {
		return err
	}
	e := sandbox.AsError(err)
	msg := message(e)
	if gone(e) {
		msg = goneMessage
	}
	return connect.NewError(codeOf(e), errors.New(msg))
}
