// Package edge is what every dialect over HTTP does at its edge, whatever it
// speaks: a panic ends one call and not the server, and the errors of operations
// become those of the wire in one place.
package edge

import (
	"context"
	"log/slog"
	"net/http"
	"runtime/debug"

	"connectrpc.com/connect"

	"github.com/cove-sandbox/cove/sandbox"
)

// Recover logs a panic outside Connect's handlers and breaks the connection:
// content may be on its way already, and an error behind half a file would
// look like the other half.
func Recover(log *slog.Logger, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer func() {
			p := recover()
			if p != nil && p != http.ErrAbortHandler {
				log.Error("panic in a handler", "path", r.URL.Path, "panic", p, "stack", string(debug.Stack()))
				p = http.ErrAbortHandler
			}
			if p != nil {
				panic(p)
			}
		}()
		next.ServeHTTP(w, r)
	})
}

// Errors is an interceptor of Connect's that turns the errors of operations into
// the dialect's, and a panic outside operations into one.
type Errors struct {
	Log *slog.Logger
	// Translate is never asked of nil.
	Translate func(procedure string, err error) error
}

func (e Errors) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (resp connect.AnyResponse, err error) {
		defer e.convert(req.Spec().Procedure, &err)
		return next(ctx, req)
	}
}

func (e Errors) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

func (e Errors) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) (err error) {
		defer e.convert(conn.Spec().Procedure, &err)
		return next(ctx, conn)
	}
}

func (e Errors) convert(procedure string, err *error) {
	if p := recover(); p == http.ErrAbortHandler { // the dialect breaks the connection
		panic(p)
	} else if p != nil {
		e.Log.Error("panic in a call", "procedure", procedure, "panic", p, "stack", string(debug.Stack()))
		*err = &sandbox.Error{Class: sandbox.Internal, Msg: "the server hit a defect; its log has the stack"}
	}
	if *err != nil {
		*err = e.Translate(procedure, *err)
	}
}
