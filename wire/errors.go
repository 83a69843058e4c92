package wire

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/anypb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

// codes maps every class to the Connect code that carries it. api/errors.json
// says the same to the other SDKs; a test holds the two together.
var codes = map[sandbox.Class]connect.Code{
	sandbox.Invalid:         connect.CodeInvalidArgument,
	sandbox.NotFound:        connect.CodeNotFound,
	sandbox.ImageNotFound:   connect.CodeNotFound,
	sandbox.AlreadyExists:   connect.CodeAlreadyExists,
	sandbox.Unauthenticated: connect.CodeUnauthenticated,
	sandbox.Denied:          connect.CodePermissionDenied,
	sandbox.NoCapacity:      connect.CodeResourceExhausted,
	sandbox.QuotaExceeded:   connect.CodeResourceExhausted,
	sandbox.TooLarge:        connect.CodeOutOfRange,
	sandbox.Ended:           connect.CodeFailedPrecondition,
	sandbox.Precondition:    connect.CodeFailedPrecondition,
	sandbox.Conflict:        connect.CodeAborted,
	sandbox.DiskFull:        connect.CodeResourceExhausted,
	sandbox.Unavailable:     connect.CodeUnavailable,
	sandbox.DeadlineReached: connect.CodeDeadlineExceeded,
	sandbox.Canceled:        connect.CodeCanceled,
	sandbox.Unsupported:     connect.CodeUnimplemented,
	sandbox.Corrupt:         connect.CodeDataLoss,
	sandbox.Internal:        connect.CodeInternal,
}

// classes is for errors that carry no detail: made by Connect itself, by a
// proxy, or by an older or newer server. Where two classes share a code it is
// the one that promises less.
var classes = map[connect.Code]sandbox.Class{
	connect.CodeInvalidArgument:    sandbox.Invalid,
	connect.CodeNotFound:           sandbox.NotFound,
	connect.CodeAlreadyExists:      sandbox.AlreadyExists,
	connect.CodeUnauthenticated:    sandbox.Unauthenticated,
	connect.CodePermissionDenied:   sandbox.Denied,
	connect.CodeResourceExhausted:  sandbox.TooLarge, // Connect's own: a message over the read limit
	connect.CodeOutOfRange:         sandbox.TooLarge,
	connect.CodeFailedPrecondition: sandbox.Precondition,
	connect.CodeAborted:            sandbox.Conflict,
	connect.CodeUnavailable:        sandbox.Unavailable,
	connect.CodeDeadlineExceeded:   sandbox.DeadlineReached,
	connect.CodeCanceled:           sandbox.Canceled,
	connect.CodeUnimplemented:      sandbox.Unsupported,
	connect.CodeDataLoss:           sandbox.Corrupt,
	connect.CodeInternal:           sandbox.Internal,
	connect.CodeUnknown:            sandbox.Internal,
}

// ToConnect makes the error the client gets: the class as code and detail,
// the message without the operation (the detail has it), and a Retry-After
// header where the error says when to come back. An error that is already a
// *connect.Error passes unchanged. nil stays nil.
func ToConnect(err error) *connect.Error {
	if err == nil {
		return nil
	}
	var ce *connect.Error
	if errors.As(err, &ce) {
		return ce
	}
	e := sandbox.AsError(err)
	code, ok := codes[e.Class]
	if !ok {
		code = connect.CodeInternal
	}
	ce = connect.NewError(code, errors.New(message(e)))
	detail, derr := connect.NewErrorDetail(&covev1.ErrorDetail{
		Code:         string(e.Class),
		Op:           utf8String(e.Op),
		Field:        utf8String(e.Field),
		Hint:         utf8String(e.Hint),
		Reason:       string(e.Reason),
		RetryAfterMs: e.RetryAfter.Milliseconds(),
	})
	if derr == nil {
		ce.AddDetail(detail)
	}
	if e.RetryAfter > 0 {
		// The header counts whole seconds; rounding up keeps a caller from coming early.
		ce.Meta().Set("Retry-After", strconv.FormatInt(int64((e.RetryAfter+time.Second-1)/time.Second), 10))
	}
	return ce
}

// message is what a reader of the bare JSON sees: "field: what is wrong".
func message(e *sandbox.Error) string {
	c := *e
	c.Op = ""
	return utf8String(c.Error())
}

// FromConnect rebuilds the *sandbox.Error that ToConnect was given. An error
// that never reached the server becomes Unavailable. Errors of other kinds,
// and nil, pass unchanged.
func FromConnect(err error) error {
	var e *sandbox.Error
	if err == nil || errors.As(err, &e) {
		return err
	}
	var ce *connect.Error
	if !errors.As(err, &ce) || errors.Is(err, io.EOF) { // Connect codes the plain end of a stream, too
		return err
	}
	out := &sandbox.Error{Class: classes[ce.Code()], Msg: ce.Message()}
	if out.Class == "" {
		out.Class = sandbox.Internal
	}
	for _, d := range ce.Details() {
		v, derr := d.Value()
		if derr != nil {
			continue
		}
		if ed, ok := v.(*covev1.ErrorDetail); ok {
			// A class this client has never heard of keeps its name: errors.Is
			// then matches nothing, and Class is still readable.
			if ed.Code != "" {
				out.Class = sandbox.Class(ed.Code)
			}
			out.Op, out.Field, out.Hint, out.Reason = ed.Op, ed.Field, ed.Hint, sandbox.Reason(ed.Reason)
			out.RetryAfter = time.Duration(ed.RetryAfterMs) * time.Millisecond
			out.Msg = strings.TrimPrefix(out.Msg, ed.Field+": ")
			return out
		}
	}
	if s, perr := strconv.Atoi(ce.Meta().Get("Retry-After")); perr == nil && s > 0 {
		out.RetryAfter = time.Duration(s) * time.Second
	}
	if connect.IsWireError(ce) {
		return out
	}
	var lost *net.OpError
	switch {
	case out.Class == sandbox.Canceled, out.Class == sandbox.DeadlineReached: // what broke then is what the caller gave up
	case errors.Is(ce, io.ErrUnexpectedEOF), errors.As(ce, &lost) && (lost.Op == "read" || lost.Op == "write"):
		// Whatever Connect calls it: the server died, or the network did.
		return &sandbox.Error{Class: sandbox.Unavailable, Msg: "the server went away in the middle of the call", Hint: wentAwayHint}
	case ce.Code() == connect.CodeUnavailable:
		out.Hint = unreachedHint(ce)
	case ce.Code() == connect.CodeInvalidArgument, ce.Code() == connect.CodeUnknown:
		// Connect's own for the same in other words.
		out.Class, out.Hint = sandbox.Unavailable, wentAwayHint
	}
	return out
}

// WriteError answers a plain HTTP request with the same error as a Connect
// unary call: {"code", "message", "details"}, status and headers alike.
func WriteError(w http.ResponseWriter, r *http.Request, err error) {
	b := &bufferedAnswer{ResponseWriter: w}
	_ = errorWriter.Write(b, r, ToConnect(err))
	// With its length, so that a client that is still sending need not wait for
	// the end of the connection to know that this is all.
	w.Header().Set("Content-Length", strconv.Itoa(b.Len()))
	w.WriteHeader(b.status)
	_, _ = w.Write(b.Bytes()) // a failing write means that the client has gone
}

// ErrorJSON is what WriteError would answer r with: for an error in the middle of a
// stream.
func ErrorJSON(r *http.Request, err error) []byte {
	b := &bufferedAnswer{ResponseWriter: headers{}}
	_ = errorWriter.Write(b, r, ToConnect(err)) // into memory
	return b.Bytes()
}

// headers is an answer of which nothing but its header is asked.
type headers http.Header

func (h headers) Header() http.Header       { return http.Header(h) }
func (headers) Write(p []byte) (int, error) { return len(p), nil }
func (headers) WriteHeader(int)             {}

type bufferedAnswer struct {
	http.ResponseWriter
	bytes.Buffer
	status int
}

func (b *bufferedAnswer) WriteHeader(status int)      { b.status = status }
func (b *bufferedAnswer) Write(p []byte) (int, error) { return b.Buffer.Write(p) }

// unreachedHint says what to do about a call that found no server, or one that
// it cannot believe.
func unreachedHint(err error) string {
	var unknown x509.UnknownAuthorityError
	var name x509.HostnameError
	var bad *tls.CertificateVerificationError
	switch {
	case errors.As(err, &unknown):
		return "COVE_CA names the file with the authority to trust: the server's DATA/tls/ca.crt, if it made its own (--tls-self)"
	case errors.As(err, &name):
		return "name the server in COVE_URL as its certificate does"
	case errors.As(err, &bad):
		return "the server has another certificate to show, or this machine's clock is wrong"
	case errors.Is(err, http.ErrSchemeMismatch):
		return "the server speaks no TLS; COVE_URL begins with http:// then"
	}
	return `is the server running? "make start" or "cove serve" starts it, COVE_URL names it`
}

const wentAwayHint = `sandboxes and what is on record are not lost: when it is back ("make start" or "cove serve"), look whether it was done, and ask again if not`

// errorWriter holds no state.
var errorWriter = connect.NewErrorWriter()

// decodeError reads a Connect unary error body; nil if it is something else,
// such as a proxy's HTML page.
func decodeError(body []byte) *connect.Error {
	var b struct {
		Code    string `json:"code"`
		Message string `json:"message"`
		Details []struct {
			Type  string `json:"type"`
			Value string `json:"value"`
		} `json:"details"`
	}
	var code connect.Code
	if json.Unmarshal(body, &b) != nil || code.UnmarshalText([]byte(b.Code)) != nil {
		return nil
	}
	ce := connect.NewWireError(code, errors.New(b.Message))
	for _, d := range b.Details {
		v, err := base64.RawStdEncoding.DecodeString(strings.TrimRight(d.Value, "="))
		if err != nil {
			continue
		}
		detail, err := connect.NewErrorDetail(&anypb.Any{TypeUrl: "type.googleapis.com/" + d.Type, Value: v})
		if err == nil {
			ce.AddDetail(detail)
		}
	}
	return ce
}

// fromResponse reads the error WriteError wrote; body is at most a few KiB.
func fromResponse(status int, body []byte) error {
	if ce := decodeError(body); ce != nil {
		return FromConnect(ce)
	}
	c := sandbox.Internal
	switch {
	case status == http.StatusNotFound:
		c = sandbox.NotFound
	case status == http.StatusUnauthorized:
		c = sandbox.Unauthenticated
	case status == http.StatusRequestEntityTooLarge:
		c = sandbox.TooLarge
	case status == http.StatusBadGateway || status == http.StatusServiceUnavailable || status == http.StatusGatewayTimeout:
		c = sandbox.Unavailable
	}
	return &sandbox.Error{Class: c, Msg: fmt.Sprintf("HTTP %d: %.200s", status, body)}
}
