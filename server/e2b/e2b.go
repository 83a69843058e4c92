// Package e2b is the dialect of E2B's SDKs, so that code written for E2B runs on
// Cove unchanged: the REST API of the control plane and, on behalf of every
// sandbox, the surface of the agent that E2B has inside (package envd), which the
// SDKs address at port 49983. It converts and asks the operations of package
// server; rights, scopes, quotas and the audit log are theirs.
//
// Both surfaces share one listener with the native API: no path of theirs begins
// with /v1/ or /cove.v1. Which sandbox is meant, a header says.
package e2b

import (
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/cove-sandbox/cove/internal/strangers"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/server"
	"github.com/cove-sandbox/cove/server/e2b/envd/filesystem"
	"github.com/cove-sandbox/cove/server/e2b/envd/process"
	"github.com/cove-sandbox/cove/server/edge"
)

const (
	// maxBody bounds a REST request: a few kilobytes of metadata and variables.
	maxBody = 1 << 20
	// maxMessage bounds one message to a sandbox: MaxInput as base64.
	maxMessage = 24 << 20
	// envdVersion is what the SDKs choose their ways by.
	envdVersion = "0.6.13"
	// envdPort is where the SDKs look for the agent.
	envdPort = 49983
)

// Config of the dialect. Server and Key are required.
type Config struct {
	Server *server.Server
	Key    []byte // secret of this installation, for the tokens of sandboxes
	Domain string // below which ports have hosts, "" for none: what getHost is made of
	// Port shows a port of a sandbox to who was admitted by the API key with that id,
	// for as long as the key lives; without one, as the port's own rules say. nil where
	// nobody does.
	Port   func(w http.ResponseWriter, r *http.Request, id string, port int, key string)
	Logger *slog.Logger
	Clock  func() time.Time // nil = time.Now
}

// dialect serves one server's operations.
type dialect struct {
	server   *server.Server
	tokens   *tokens // of the agent
	traffic  *tokens // of private ports
	volumes  *tokens // of the content of volumes
	uploads  *tokens // of the files of builds
	builds   *builds
	port     func(w http.ResponseWriter, r *http.Request, id string, port int, key string)
	watchers *watchers
	users    *users
	domain   string
	log      *slog.Logger
	clock    func() time.Time
}

func newDialect(c Config) *dialect {
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Clock == nil {
		c.Clock = time.Now
	}
	access := newTokens(c.Key, "access")
	access.holders = c.Server.Reach().Holders
	return &dialect{server: c.Server, tokens: access, traffic: newTokens(c.Key, "traffic"), volumes: newTokens(c.Key, "volume"), uploads: newTokens(c.Key, "upload"), builds: newBuilds(), port: c.Port, watchers: newWatchers(c.Clock), users: newUsers(), domain: c.Domain, log: c.Logger, clock: c.Clock}
}

// route is one call of the SDKs and the operation it is, which is asked for before
// a body is read.
type route struct {
	op    server.Operation
	serve func(http.ResponseWriter, *http.Request) error
}

// controlPlane are the REST routes by their pattern.
func (d *dialect) controlPlane() map[string]route {
	return map[string]route{
		"POST /sandboxes":                           {"sandbox.create", d.create(15 * time.Second)},
		"POST /v2/sandboxes":                        {"sandbox.create", d.create(300 * time.Second)},
		"GET /sandboxes":                            {"sandbox.list", d.list},
		"GET /v2/sandboxes":                         {"sandbox.list", d.list},
		"GET /sandboxes/{id}":                       {"sandbox.get", d.get},
		"DELETE /sandboxes/{id}":                    {"sandbox.kill", d.kill},
		"POST /sandboxes/{id}/connect":              {"sandbox.resume", d.connect(15 * time.Second)},
		"POST /v2/sandboxes/{id}/connect":           {"sandbox.resume", d.connect(300 * time.Second)},
		"POST /sandboxes/{id}/resume":               {"sandbox.resume", d.connect(15 * time.Second)},
		"POST /sandboxes/{id}/timeout":              {"sandbox.set_timeout", d.setTimeout},
		"POST /sandboxes/{id}/refreshes":            {"sandbox.set_timeout", d.refresh},
		"POST /sandboxes/{id}/pause":                {"sandbox.pause", d.pause},
		"POST /sandboxes/{id}/fork":                 {"sandbox.fork", d.fork},
		"POST /sandboxes/{id}/snapshots":            {"snapshot.create", d.snapshot},
		"GET /snapshots":                            {"snapshot.list", d.listSnapshots},
		"DELETE /templates/{id}":                    {"template.delete", d.deleteTemplate},
		"GET /templates":                            {"template.list", d.listTemplates},
		"GET /v2/templates":                         {"template.list", d.listTemplates},
		"GET /templates/{id}":                       {"template.list", d.getTemplate},
		"POST /v3/templates":                        {"template.build", d.requestBuild},
		"POST /v2/templates":                        {"template.build", d.requestBuild},
		"GET /templates/{id}/files/{hash}":          {"image.has_files", d.filesLink},
		"POST /v2/templates/{id}/builds/{build}":    {"template.build", d.startBuild},
		"GET /templates/{id}/builds/{build}/status": {"template.get", d.buildStatus},
		"GET /templates/{id}/builds/{build}/logs":   {"template.get", d.buildLogs},
		"POST /templates/tags":                      {"template.tag", d.assignTags},
		"DELETE /templates/tags":                    {"template.untag", d.removeTags},
		"GET /templates/{id}/{what}":                {"template.get", d.ofTemplate},
		"GET /sandboxes/metrics":                    {"sandbox.stats", d.manyMetrics},
		"GET /sandboxes/{id}/metrics":               {"sandbox.stats", d.sandboxMetrics},
		"PUT /sandboxes/{id}/network":               {"sandbox.set_network", d.setNetwork},
		"POST /volumes":                             {"volume.create", d.createVolume},
		"GET /volumes":                              {"volume.list", d.listVolumes},
		"GET /volumes/{id}":                         {"volume.get", d.getVolume},
		"DELETE /volumes/{id}":                      {"volume.delete", d.deleteVolume},
		"POST /secrets":                             {"secret.create", d.createSecret},
		"GET /secrets":                              {"secret.list", d.listSecrets},
		"GET /secrets/{id}":                         {"secret.list", d.getSecret},
		"POST /secrets/{id}":                        {"secret.update", d.updateSecret},
		"DELETE /secrets/{id}":                      {"secret.delete", d.deleteSecret},
	}
}

// volumeContent are the routes to what is in a volume by their pattern.
func (d *dialect) volumeContent() map[string]route {
	return map[string]route{
		"GET /volumecontent/{id}/dir":     {"volume.list_files", d.listVolumeFiles},
		"GET /volumecontent/{id}/path":    {"volume.list_files", d.statVolumeFile},
		"DELETE /volumecontent/{id}/path": {"volume.remove_file", d.removeVolumeFile},
		"GET /volumecontent/{id}/file":    {"volume.download", d.readVolumeFile},
		"PUT /volumecontent/{id}/file":    {"volume.upload", d.writeVolumeFile},
		"POST /volumecontent/{id}/dir":    {"volume.upload", d.makeVolumeDirectory},
		"PATCH /volumecontent/{id}/path":  {"volume.upload", d.changeVolumeFile},
	}
}

// agent are the plain routes of a sandbox by their pattern.
func (d *dialect) agent() map[string]route {
	return map[string]route{
		"GET /files":   {"file.download", d.getFile},
		"POST /files":  {"file.upload", d.postFiles},
		"GET /metrics": {"sandbox.stats", d.agentMetrics},
		"GET /envs":    {"sandbox.get", d.envs},
	}
}

// procedures is the operation of every method of the agent's services.
var procedures = map[string]server.Operation{
	process.ProcessListProcedure:        "process.list",
	process.ProcessConnectProcedure:     "process.attach",
	process.ProcessStartProcedure:       "process.start",
	process.ProcessUpdateProcedure:      "process.resize",
	process.ProcessStreamInputProcedure: "process.send_input",
	process.ProcessSendInputProcedure:   "process.send_input",
	process.ProcessSendSignalProcedure:  "process.signal",
	process.ProcessCloseStdinProcedure:  "process.close_input",

	filesystem.FilesystemStatProcedure:             "file.stat",
	filesystem.FilesystemMakeDirProcedure:          "file.mkdir",
	filesystem.FilesystemMoveProcedure:             "file.move",
	filesystem.FilesystemListDirProcedure:          "file.list",
	filesystem.FilesystemRemoveProcedure:           "file.remove",
	filesystem.FilesystemWatchDirProcedure:         "file.watch",
	filesystem.FilesystemCreateWatcherProcedure:    "file.watch",
	filesystem.FilesystemGetWatcherEventsProcedure: "file.watch",
	filesystem.FilesystemRemoveWatcherProcedure:    "file.watch",
}

// Routes is the operation of every route, by its pattern or path.
func Routes() map[string]server.Operation {
	d := &dialect{}
	ops := map[string]server.Operation{}
	for _, routes := range []map[string]route{d.controlPlane(), d.agent(), d.interpreterRoutes(), d.volumeContent()} {
		for pattern, r := range routes {
			ops[pattern] = r.op
		}
	}
	for path, op := range procedures {
		ops[path] = op
	}
	ops["a port"] = visitOp
	return ops
}

// Wrap gives the calls of E2B's SDKs to the dialect and all others to next.
func Wrap(c Config, next http.Handler) http.Handler {
	d := newDialect(c)
	mux := http.NewServeMux()
	for pattern, r := range d.controlPlane() {
		mux.Handle(pattern, shared(edge.Recover(d.log, d.authenticated(r))))
	}
	for pattern, r := range d.agent() {
		mux.Handle(pattern, shared(edge.Recover(d.log, d.inside(r))))
	}
	for pattern, r := range d.volumeContent() {
		mux.Handle(pattern, shared(edge.Recover(d.log, d.inVolume(r))))
	}
	mux.Handle("PUT "+filesPath+"{token}", shared(edge.Recover(d.log, http.HandlerFunc(d.putBuildFiles))))
	mux.Handle("GET /health", shared(edge.Recover(d.log, http.HandlerFunc(d.health))))
	opts := []connect.HandlerOption{connect.WithReadMaxBytes(maxMessage), connect.WithCompressMinBytes(1 << 30), connect.WithInterceptors(edge.Errors{Log: d.log, Translate: toConnect})}
	for _, service := range []func() (string, http.Handler){
		func() (string, http.Handler) { return process.NewProcessHandler(processes{d}, opts...) },
		func() (string, http.Handler) { return filesystem.NewFilesystemHandler(files{d}, opts...) },
	} {
		path, h := service()
		mux.Handle(path, shared(edge.Recover(d.log, d.called(h))))
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("X-API-KEY") != "" { // an SDK of E2B's: the native answer would be that it has no key
			writeError(w, unsupported("", r.Method+" "+r.URL.Path+" of the E2B API"))
			return
		}
		next.ServeHTTP(w, r)
	})
	return d.interpreting(d.front(mux, next))
}

// authenticated serves a REST route to the bearer of a key.
func (d *dialect) authenticated(rt route) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, err := d.server.Authenticate(r.Context(), nativeSecret(r.Header.Get("X-API-KEY")), r.RemoteAddr)
		if err == nil {
			strangers.Known(ctx)
			err = d.server.Permit(ctx, rt.op)
		}
		if err == nil {
			r.Body = http.MaxBytesReader(w, r.Body, maxBody)
			err = rt.serve(w, r.WithContext(ctx))
		}
		if err != nil {
			writeError(w, sandbox.WithOp(string(rt.op), err))
		}
	})
}

// readJSON reads a body that may be missing. Fields that nobody knows are passed
// over: the SDKs' next version has more of them.
func readJSON(r *http.Request, into any) error {
	body, err := io.ReadAll(r.Body)
	var large *http.MaxBytesError
	switch {
	case errors.As(err, &large):
		return &sandbox.Error{Class: sandbox.TooLarge, Msg: "the body is larger than " + sandbox.FormatSize(large.Limit)}
	case err != nil:
		return sandbox.Errorf(sandbox.Canceled, "", "reading the body: %w", err)
	case strings.TrimSpace(string(body)) == "":
		return nil
	}
	if err := json.Unmarshal(body, into); err != nil {
		var wrong *json.UnmarshalTypeError
		if errors.As(err, &wrong) {
			return sandbox.InvalidField(wrong.Field, "a %s is not accepted; %s is", wrong.Value, wrong.Type)
		}
		return &sandbox.Error{Class: sandbox.Invalid, Msg: "the body is no JSON of this call", Err: err}
	}
	return nil
}

func writeJSON(w http.ResponseWriter, status int, v any) error {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v) // an error means that the client left
	return nil
}
