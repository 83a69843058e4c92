// Package native is Cove's own dialect: the cove.v1 API over Connect, plain HTTP
// for content and curl, and /healthz. It turns wire types into domain types and
// back, and asks the operations of package server for everything else: rights,
// scopes, quotas, the audit log and idempotency are theirs.
//
// One file per service, with the plain routes of the same resource. Every error
// is a *sandbox.Error and crosses the wire as one (package wire).
package native

import (
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"time"
	"unicode"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/cove-sandbox/cove/api"
	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/internal/strangers"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/server"
	"github.com/cove-sandbox/cove/server/edge"
	"github.com/cove-sandbox/cove/wire"
)

// maxMessage bounds one request message: a file of 16 MiB with room around it,
// as base64 in JSON (21.4 MiB) too.
const maxMessage = 24 << 20

// dialect serves one server's operations.
type dialect struct {
	server *server.Server
	log    *slog.Logger
}

// Handler serves the whole API: Connect, plain HTTP and /healthz.
//
// Every service is behind one door. Only /healthz and the description of the API,
// which is the same everywhere and public, are outside, so a new route cannot
// forget its key.
func Handler(s *server.Server, log *slog.Logger) http.Handler {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	d := &dialect{s, log}
	opts := []connect.HandlerOption{
		connect.WithReadMaxBytes(maxMessage),
		// Answers are not compressed, whatever a client accepts: gzip is slower
		// than the loopback and than a data centre's network. Compressed
		// requests are understood.
		connect.WithCompressMinBytes(1 << 30),
		connect.WithCodec(strictJSON{"json"}),
		connect.WithCodec(strictJSON{"json; charset=utf-8"}),
	}
	mux := http.NewServeMux()
	opts = append(opts, connect.WithInterceptors(edge.Errors{Log: d.log, Translate: toConnect}))
	mux.Handle(covev1.NewSandboxesHandler(sandboxes{s}, opts...))
	mux.Handle(covev1.NewProcessesHandler(processes{s}, opts...))
	mux.Handle(covev1.NewFilesHandler(files{s}, opts...))
	mux.Handle(covev1.NewSnapshotsHandler(snapshots{s}, opts...))
	mux.Handle(covev1.NewTemplatesHandler(templates{s}, opts...))
	mux.Handle(covev1.NewVolumesHandler(volumes{s}, opts...))
	mux.Handle(covev1.NewRecordingsHandler(recordings{s}, opts...))
	mux.Handle(covev1.NewKeysHandler(keys{s}, opts...))
	mux.Handle(covev1.NewTenantsHandler(tenants{s}, opts...))
	mux.Handle(covev1.NewSecretsHandler(secrets{s}, opts...))
	mux.Handle(covev1.NewLeasesHandler(leases{s}, opts...))
	mux.Handle(covev1.NewRunsHandler(runs{s}, opts...))
	mux.Handle(covev1.NewShipmentsHandler(shipments{s}, opts...))
	mux.Handle(covev1.NewGradesHandler(grades{s}, opts...))
	mux.Handle(covev1.NewImagesHandler(images{s}, opts...))
	mux.Handle(covev1.NewSystemHandler(system{s}, opts...))
	mux.Handle(covev1.NewPortsHandler(ports{s}, opts...))
	mux.Handle(covev1.NewCallbacksHandler(callbacks{s}, opts...))
	for pattern, r := range d.routes() {
		mux.Handle(pattern, d.plain(r))
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		wire.WriteError(w, r, &sandbox.Error{Class: sandbox.Unsupported, Msg: "no such call: " + r.Method + " " + r.URL.Path,
			Hint: "the calls are /cove.v1.SERVICE/METHOD and /v1/…; GET /openapi.json and the protos in api/ describe them"})
	})

	outer := http.NewServeMux()
	outer.HandleFunc("GET /healthz", d.healthz)
	outer.HandleFunc("GET /openapi.json", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(api.OpenAPI) // an error means that the client left
	})
	outer.Handle("/", edge.Recover(d.log, d.authenticate(limitBody(batched(mux)))))
	return outer
}

// route is an endpoint beside Connect.
type route struct {
	op    server.Operation
	serve func(http.ResponseWriter, *http.Request) error
}

// routes are those by their pattern. HEAD comes with GET.
func (d *dialect) routes() map[string]route {
	return map[string]route{
		"POST /v1/sandboxes/{id}/exec":                            {"process.exec", d.exec},
		"POST /v1/sandboxes/{id}/code":                            {"code.run", d.runCode},
		"GET /v1/sandboxes/{id}/code/contexts":                    {"code.list_contexts", d.listCodeContexts},
		"POST /v1/sandboxes/{id}/code/contexts":                   {"code.create_context", d.createCodeContext},
		"DELETE /v1/sandboxes/{id}/code/contexts/{context}":       {"code.remove_context", d.removeCodeContext},
		"POST /v1/sandboxes/{id}/code/contexts/{context}/restart": {"code.restart_context", d.restartCodeContext},
		"GET /v1/sandboxes/{id}/files":                            {"file.download", d.getFile},
		"PUT /v1/sandboxes/{id}/files":                            {"file.upload", d.putFile},
		"GET /v1/sandboxes/{id}/tar":                              {"file.download_tar", d.getTar},
		"PUT /v1/sandboxes/{id}/tar":                              {"file.upload_tar", d.putTar},
		"GET /v1/snapshots/{id}/tar":                              {"snapshot.download_tar", d.getSnapshotTar},
		"GET /v1/recordings/{id}/archive":                         {"recording.export", d.getRecording},
		"PUT /v1/recordings":                                      {"recording.import", d.putRecording},
		"GET /v1/volumes/{id}/files":                              {"volume.download", d.getVolumeFile},
		"PUT /v1/volumes/{id}/files":                              {"volume.upload", d.putVolumeFile},
		"PUT /v1/images":                                          {"image.import", d.putImage},
		"GET /v1/sandboxes/{id}/connect":                          {"port.connect", d.connectPort},
		"GET /v1/sandboxes/{id}/callbacks/{request}/body":         {"callback.body", d.getCallbackBody},
		"PUT /v1/sandboxes/{id}/callbacks/{request}":              {"callback.answer", d.putCallback},
		"PUT /v1/build-files/{key}":                               {"image.put_files", d.putBuildFiles},
		"POST /v1/replays":                                        {"run.replay", d.postReplay},
		"POST /v1/groups":                                         {"run.group", d.postGroup},
		"GET /v1/runs/{id}/steps":                                 {"run.list_steps", d.getSteps},
		"GET /v1/runs/{id}/export":                                {"run.export", d.exportRun},
		"GET /v1/shipments/{id}/records":                          {"shipment.read", d.getShipmentRecords},
		"PUT /v1/grades/tests":                                    {"grade.put_tests", d.putTests},
	}
}

// Routes is the operation of every plain route, by its pattern.
func Routes(s *server.Server) map[string]server.Operation {
	ops := map[string]server.Operation{}
	for pattern, r := range (&dialect{server: s}).routes() {
		ops[pattern] = r.op
	}
	return ops
}

// plain serves a route: who may not is told so before anything is read, and an
// error that it returns is answered.
func (d *dialect) plain(rt route) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := d.server.Permit(r.Context(), rt.op); err != nil {
			wire.WriteError(w, r, err)
			return
		}
		body := &touchedBody{ReadCloser: r.Body}
		r.Body = body
		if err := rt.serve(w, r); err != nil {
			wire.WriteError(w, r, sandbox.WithOp(string(rt.op), err))
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

// authenticate lets nothing through without a good key, and no call of Connect's
// that names no operation, or one that the key has no right to.
func (d *dialect) authenticate(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		scheme, secret, _ := strings.Cut(r.Header.Get("Authorization"), " ")
		if scheme != "" && !strings.EqualFold(scheme, "Bearer") {
			wire.WriteError(w, r, &sandbox.Error{Class: sandbox.Unauthenticated, Op: "auth", Msg: "Authorization is not a Bearer key", Hint: server.KeyHint})
			return
		}
		// Headers of proxies say nothing of who it is: anybody can write them.
		ctx, err := d.server.Authenticate(r.Context(), strings.TrimSpace(secret), r.RemoteAddr)
		if err != nil {
			wire.WriteError(w, r, err)
			return
		}
		strangers.Known(ctx)
		if op, ok := procedures[r.URL.Path]; ok {
			if err := d.server.Permit(ctx, op); err != nil {
				wire.WriteError(w, r, err)
				return
			}
		}
		next.ServeHTTP(w, r.WithContext(ctx))
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

// toConnect is an operation's error as Connect's. It has its operation already,
// unless the request itself was wrong.
func toConnect(procedure string, err error) error {
	return wire.ToConnect(sandbox.WithOp(string(procedures[procedure]), err))
}

// procedures is the operation of every method in the protos. One that names none
// in the server's table is refused there.
var procedures = func() map[string]server.Operation {
	ops := map[string]server.Operation{}
	protoregistry.GlobalFiles.RangeFilesByPackage("cove.v1", func(f protoreflect.FileDescriptor) bool {
		for i := range f.Services().Len() {
			svc := f.Services().Get(i)
			for j := range svc.Methods().Len() {
				m := svc.Methods().Get(j)
				ops["/"+string(svc.FullName())+"/"+string(m.Name())] = operationOf(string(svc.Name()), string(m.Name()))
			}
		}
		return true
	})
	return ops
}()

// Procedures is the operation of every Connect procedure, by its path.
func Procedures() map[string]server.Operation { return procedures }

// operationOf is "sandbox.kill_by_label" for Sandboxes/KillByLabel.
func operationOf(service, method string) server.Operation {
	noun := strings.ToLower(strings.TrimSuffix(service, "s"))
	switch service {
	case "Sandboxes", "Processes":
		noun = strings.ToLower(strings.TrimSuffix(service, "es"))
	case "System":
		noun = "system"
	}
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
	return server.Operation(b.String())
}

// answer is the response, unless there is an error.
func answer[T any](m *T, err error) (*connect.Response[T], error) {
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(m), nil
}

// each converts all of a list.
func each[D, W any](list []D, convert func(D) W) []W {
	if len(list) == 0 {
		return nil
	}
	out := make([]W, len(list))
	for i, d := range list {
		out[i] = convert(d)
	}
	return out
}

// healthz needs no key and tells nothing but whether to send work here. A
// draining server is 503, which is what a load balancer looks at.
func (d *dialect) healthz(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	if d.server.Draining() {
		w.WriteHeader(http.StatusServiceUnavailable)
		_, _ = io.WriteString(w, "draining\n")
		return
	}
	_, _ = io.WriteString(w, "ok\n")
}
