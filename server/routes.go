package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"runtime/debug"
	"strings"
	"time"
	"unicode"

	"connectrpc.com/connect"

	"github.com/cove-sandbox/cove/api"
	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/wire"
)

// maxMessage bounds one request message: a file of 16 MiB with room around it,
// as base64 in JSON (21.4 MiB) too.
const maxMessage = 24 << 20

// routes puts every service behind one door: recover, track, authenticate.
// Only /healthz and the description of the API, which is the same everywhere and
// public, are outside, so a new route cannot forget its key.
func (s *Server) routes() http.Handler {
	opts := []connect.HandlerOption{
		connect.WithReadMaxBytes(maxMessage),
		// Answers are not compressed, whatever a client accepts: gzip is slower
		// than the loopback and than a data centre's network. Compressed
		// requests are understood.
		connect.WithCompressMinBytes(1 << 30),
		connect.WithCodec(strictJSON{"json"}),
		connect.WithCodec(strictJSON{"json; charset=utf-8"}),
		connect.WithInterceptors(&callInterceptor{log: s.log, audit: &s.audit, rights: s.rights}),
	}
	mux := http.NewServeMux()
	mux.Handle(covev1.NewSandboxesHandler(sandboxService{s}, opts...))
	mux.Handle(covev1.NewProcessesHandler(processService{s}, opts...))
	mux.Handle(covev1.NewFilesHandler(fileService{s}, opts...))
	mux.Handle(covev1.NewImagesHandler(imageService{s}, opts...))
	mux.Handle(covev1.NewKeysHandler(keyService{s}, opts...))
	mux.Handle(covev1.NewSystemHandler(systemService{s}, opts...))
	mux.Handle(covev1.NewSnapshotsHandler(snapshotService{s}, opts...))
	mux.Handle(covev1.NewTemplatesHandler(templateService{s}, opts...))
	mux.Handle(covev1.NewVolumesHandler(volumeService{s}, opts...))
	mux.Handle(covev1.NewRecordingsHandler(recordingService{s}, opts...))
	mux.Handle(covev1.NewTenantsHandler(tenantService{s}, opts...))
	mux.Handle(covev1.NewPortsHandler(portService{s}, opts...))
	mux.Handle(covev1.NewSecretsHandler(secretService{s}, opts...))
	mux.Handle(covev1.NewLeasesHandler(leaseService{s}, opts...))
	mux.Handle(covev1.NewCallbacksHandler(callbackService{s}, opts...))
	for pattern, h := range s.httpRoutes() {
		mux.Handle(pattern, s.rights.route(pattern, &s.audit, h))
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		wire.WriteError(w, r, &sandbox.Error{Class: sandbox.Unsupported, Msg: "no such call: " + r.Method + " " + r.URL.Path,
			Hint: "the calls are /cove.v1.SERVICE/METHOD and /v1/…; GET /openapi.json and the protos in api/ describe them"})
	})

	outer := http.NewServeMux()
	outer.HandleFunc("GET /healthz", s.healthz)
	outer.HandleFunc("GET /openapi.json", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(api.OpenAPI) // an error means that the client left
	})
	outer.Handle("/", s.recover(s.calls.track(s.authenticate(limitBody(batched(mux))))))
	return outer
}

// httpRoutes are the endpoints beside Connect, each with its operation's name.
func (s *Server) httpRoutes() map[string]http.Handler {
	return map[string]http.Handler{
		"GET /v1/sandboxes/{id}/files":                    s.plain("file.download", s.getFile), // HEAD comes with it
		"PUT /v1/sandboxes/{id}/files":                    s.plain("file.upload", s.putFile),
		"GET /v1/sandboxes/{id}/tar":                      s.plain("file.download_tar", s.getTar),
		"PUT /v1/sandboxes/{id}/tar":                      s.plain("file.upload_tar", s.putTar),
		"POST /v1/sandboxes/{id}/exec":                    s.plain("process.exec", s.exec),
		"GET /v1/sandboxes/{id}/connect":                  s.plain("port.connect", s.connectPort),
		"PUT /v1/images":                                  s.plain("image.import", s.importImage),
		"GET /v1/snapshots/{id}/tar":                      s.plain("snapshot.download_tar", s.getSnapshotTar),
		"GET /v1/recordings/{id}/archive":                 s.plain("recording.export", s.getRecording),
		"PUT /v1/recordings":                              s.plain("recording.import", s.putRecording),
		"GET /v1/volumes/{id}/files":                      s.plain("volume.download", s.getVolumeFile),
		"PUT /v1/volumes/{id}/files":                      s.plain("volume.upload", s.putVolumeFile),
		"GET /v1/sandboxes/{id}/callbacks/{request}/body": s.plain("callback.body", s.getCallbackBody),
		"PUT /v1/sandboxes/{id}/callbacks/{request}":      s.plain("callback.answer", s.putCallback),
	}
}

// plain turns a handler that returns an error into one that answers it.
func (s *Server) plain(opName string, h func(http.ResponseWriter, *http.Request) error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		began := time.Now()
		body := &touchedBody{ReadCloser: r.Body}
		r.Body = body
		err := h(w, r)
		logCall(r.Context(), s.log, opName, began, err)
		if (r.Method == http.MethodPut || r.Method == http.MethodPost) && !answering[opName] {
			s.audit.note(r.Context(), opName, thingsOfRoute(opName, r), err)
		}
		if err != nil {
			wire.WriteError(w, r, outcome(r.Context(), opName, err))
			lingerOver(w, r, body.touched)
		}
	})
}

// lingerOver takes in some of the content of a refused HTTP/1.1 upload after
// the answer is sent. A client that writes on would otherwise find its
// connection reset, and many then never look at the answer. Those that sent
// "Expect: 100-continue" and were not told to continue know better.
func lingerOver(w http.ResponseWriter, r *http.Request, touched bool) {
	const most, atMost = 256 << 20, 10 * time.Second
	if r.ProtoMajor != 1 || r.ContentLength == 0 || r.Header.Get("Expect") != "" && !touched {
		return
	}
	rc := http.NewResponseController(w)
	if rc.Flush() == nil && rc.SetReadDeadline(time.Now().Add(atMost)) == nil {
		_, _ = io.CopyN(io.Discard, r.Body, most)
	}
}

// touchedBody knows whether the handler asked for the body, which is when
// net/http tells the client to continue. For one goroutine at a time.
type touchedBody struct {
	io.ReadCloser
	touched bool
}

func (b *touchedBody) Read(p []byte) (int, error) {
	b.touched = true
	return b.ReadCloser.Read(p)
}

// outcome is the error a caller is told: the reason its context ended, if the
// server ended it, and otherwise what the handler said, with its operation.
func outcome(ctx context.Context, opName string, err error) error {
	var cause *sandbox.Error
	if ctx.Err() != nil && errors.As(context.Cause(ctx), &cause) {
		err = cause
	}
	return sandbox.WithOp(opName, err)
}

func logCall(ctx context.Context, log *slog.Logger, opName string, began time.Time, err error) {
	if sandbox.ClassOf(err) == sandbox.Internal && ctx.Err() == nil {
		log.Error("a call failed by our fault", "op", opName, "err", err)
		return
	}
	if log.Enabled(ctx, slog.LevelDebug) {
		log.Debug("call", "op", opName, "took", time.Since(began), "key", keyFrom(ctx), "err", err)
	}
}

// recover logs a panic outside Connect's handlers and breaks the connection:
// content may be on its way already, and an error behind half a file would
// look like the other half.
func (s *Server) recover(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer func() {
			p := recover()
			if p != nil && p != http.ErrAbortHandler {
				s.log.Error("panic in a handler", "path", r.URL.Path, "panic", p, "stack", string(debug.Stack()))
				p = http.ErrAbortHandler
			}
			if p != nil {
				panic(p)
			}
		}()
		next.ServeHTTP(w, r)
	})
}

// limitBody refuses an announced message over the limit by our own class;
// Connect would call it resource_exhausted, which is no_capacity's code. The
// endpoints for bulk content have limits of their own.
func limitBody(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost && r.ContentLength > maxMessage {
			wire.WriteError(w, r, &sandbox.Error{
				Class: sandbox.TooLarge,
				Msg:   fmt.Sprintf("the message has %s; at most %s are accepted", sandbox.FormatSize(r.ContentLength), sandbox.FormatSize(maxMessage)),
				Hint:  "larger content goes over PUT /v1/sandboxes/{id}/files",
			})
			return
		}
		next.ServeHTTP(w, r)
	})
}

// callInterceptor names the operation in errors, turns them into Connect's,
// and logs.
type callInterceptor struct {
	log    *slog.Logger
	audit  *auditor
	rights *rights
}

func (i *callInterceptor) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (resp connect.AnyResponse, err error) {
		began := time.Now()
		func() {
			defer i.recover(req.Spec().Procedure, &err)
			if err = checkParts(callerOf(ctx).key, req.Spec().Procedure, req.Any()); err == nil {
				resp, err = next(ctx, req)
			}
		}()
		logCall(ctx, i.log, req.Spec().Procedure, began, err)
		if i.rights.changes(req.Spec()) {
			things := thingsOf(req.Any())
			if err == nil {
				things = append(things, thingsOf(resp.Any())...)
			}
			i.audit.note(ctx, opOf(req.Spec().Procedure), things, err)
		}
		if err != nil {
			return nil, wire.ToConnect(outcome(ctx, opOf(req.Spec().Procedure), err))
		}
		return resp, nil
	}
}

func (i *callInterceptor) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

func (i *callInterceptor) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		began := time.Now()
		var err error
		// A stream may last for days: it is on the log once it has begun to
		// answer, and again if it then fails.
		seen := &seenConn{StreamingHandlerConn: conn, check: func(m any) error {
			return checkParts(callerOf(ctx).key, conn.Spec().Procedure, m)
		}}
		if i.rights.changes(conn.Spec()) {
			seen.begun = func() { i.audit.note(ctx, opOf(conn.Spec().Procedure), seen.things, nil) }
		}
		func() {
			defer i.recover(conn.Spec().Procedure, &err)
			err = next(ctx, seen)
		}()
		logCall(ctx, i.log, conn.Spec().Procedure, began, err)
		if i.rights.changes(conn.Spec()) && (err != nil || !seen.sent) {
			i.audit.note(ctx, opOf(conn.Spec().Procedure), seen.things, err)
		}
		if err != nil {
			return wire.ToConnect(outcome(ctx, opOf(conn.Spec().Procedure), err))
		}
		return nil
	}
}

// recover makes an Internal error for one caller out of a panic.
func (i *callInterceptor) recover(procedure string, err *error) {
	if p := recover(); p != nil {
		i.log.Error("panic in a call", "procedure", procedure, "panic", p, "stack", string(debug.Stack()))
		*err = &sandbox.Error{Class: sandbox.Internal, Msg: "the server hit a defect; its log has the stack"}
	}
}

// opOf is "sandbox.kill_by_label" for "/cove.v1.Sandboxes/KillByLabel".
func opOf(procedure string) string {
	service, method, _ := strings.Cut(strings.TrimPrefix(procedure, "/cove.v1."), "/")
	noun := map[string]string{"Sandboxes": "sandbox", "Processes": "process", "Files": "file", "Images": "image", "Keys": "key",
		"System": "system", "Snapshots": "snapshot", "Templates": "template", "Volumes": "volume", "Tenants": "tenant", "Ports": "port", "Secrets": "secret", "Recordings": "recording", "Callbacks": "callback", "Leases": "lease"}[service]
	var b strings.Builder
	b.WriteString(noun + ".")
	for i, r := range method {
		if unicode.IsUpper(r) {
			if i > 0 {
				b.WriteByte('_')
			}
			r = unicode.ToLower(r)
		}
		b.WriteRune(r)
	}
	return b.String()
}
