package openapi

import (
	"fmt"
	"strings"
)

// Route is one endpoint beside Connect.
type Route struct {
	Pattern string // as net/http has it: "GET /v1/…/{id}"
	name    string
	tag     string
	words   string
	query   []query
	body    string // media type of the request's content, "" for none
	answer  string // media type of the answer
	schema  string // of body and answer, where they are JSON: the names are schema+"Request" and schema+"Response"
}

type query struct {
	name, kind, words string
	required          bool
}

var thePath = query{"path", "string", "a path inside; a relative one is below the working directory of the image", true}

// writing are the parameters of an upload.
var writing = []query{
	{"mode", "string", "permission bits in octal, 0644 unless told", false},
	{"user", "string", "name, uid, name:group or uid:gid", false},
	{"atomic", "boolean", "the old content or the new, never half of it", false},
	{"append", "boolean", "add to what is there", false},
	{"parents", "boolean", "make missing directories", false},
}

const (
	anyBytes = "application/octet-stream"
	tarBytes = "application/x-tar"
	jsonText = "application/json"
	ndjson   = "application/x-ndjson"
)

// Routes are all of them.
var Routes = []Route{
	{Pattern: "POST /v1/sandboxes/{id}/exec", name: "exec", tag: "Processes", body: jsonText, answer: jsonText, schema: "Exec",
		words: "Runs a command to its end and answers with its output, exit code and cause. A command that fails is an answer (200); an error means that it did not run. A client that leaves does not end it: asked again with the same exec_id, the call waits for the same run and replays its output."},
	{Pattern: "POST /v1/sandboxes/{id}/code", name: "runCode", tag: "Code", body: jsonText, answer: ndjson, schema: "RunCode",
		words: "Executes code in a kernel of the sandbox and streams what comes of it, a JSON object a line, by its type: stdout and stderr (text), result (text, html, png, …), error (name, value, traceback), number_of_executions (execution_count), keepalive; the last is end_of_execution, unexpected_end_of_execution where the kernel died, or failure with an error of the API. A client that leaves interrupts the kernel."},
	{Pattern: "GET /v1/sandboxes/{id}/code/contexts", name: "listCodeContexts", tag: "Code", answer: jsonText, words: "The contexts of the code interpreter, the languages' own first."},
	{Pattern: "POST /v1/sandboxes/{id}/code/contexts", name: "createCodeContext", tag: "Code", body: jsonText, answer: jsonText, words: "Starts a kernel of its own: language (python unless told) and cwd."},
	{Pattern: "DELETE /v1/sandboxes/{id}/code/contexts/{context}", name: "removeCodeContext", tag: "Code", answer: jsonText, words: "Ends a context."},
	{Pattern: "POST /v1/sandboxes/{id}/code/contexts/{context}/restart", name: "restartCodeContext", tag: "Code", answer: jsonText, words: "Gives a context a new kernel; what ran in it ends."},
	{Pattern: "POST /v1/groups", name: "createGroup", tag: "Runs", body: jsonText, answer: ndjson,
		words: "Runs/Group as lines of JSON: the body is a GroupRequest, each line a GroupEvent, the last one with the results. A group that fails after the first line ends with a line that has code, message and details as an error has."},
	{Pattern: "POST /v1/replays", name: "replayEpisode", tag: "Runs", body: jsonText, answer: ndjson,
		words: "Runs/Replay as lines of JSON: the body is a ReplayRequest, each line a ReplayEvent, the last one with the result. One that fails after the first line ends with a line that has code, message and details as an error has. A client that leaves ends it and leaves nothing."},
	{Pattern: "GET /v1/runs/{id}/steps", name: "readSteps", tag: "Runs", query: []query{{"cursor", "string", "from where; the cursor of a line read before", false}, {"follow", "boolean", "go on with each step that ends, until the run is over", false}}, answer: ndjson,
		words: "The steps of a run as lines of JSON: {\"step\": Step, \"cursor\": …}."},
	{Pattern: "GET /v1/runs/{id}/export", name: "exportRun", tag: "Runs", query: []query{{"format", "string", "jsonl (default), parquet or atif", false}, {"cursor", "string", "of jsonl: from where; the cursor of a record read before", false}, {"follow", "boolean", "of jsonl: go on with each record, until the run is over", false}}, answer: ndjson,
		words: "The records of a run (docs/trajectories.md): a line of JSON each, one Parquet file, or a trajectory of ATIF a line. An empty line says that the server is there. What breaks off in lines of JSON ends with one that has code, message and details as an error has."},
	{Pattern: "GET /v1/shipments/{id}/records", name: "readShipment", tag: "Shipments", query: []query{{"cursor", "string", "instead of where its run was acknowledged", false}, {"follow", "boolean", "do not end", false}}, answer: ndjson,
		words: "The records of a shipment of kind pull that were not acknowledged (Shipments/Ack), a line of JSON each, with the cursor after it."},
	{Pattern: "GET /v1/sandboxes/{id}/files", name: "downloadFile", tag: "Files", query: []query{thePath}, answer: anyBytes, words: "The content of a file; Range is honoured."},
	{Pattern: "PUT /v1/sandboxes/{id}/files", name: "uploadFile", tag: "Files", query: append([]query{thePath}, writing...), body: anyBytes, answer: jsonText, words: "Writes a file of any size."},
	{Pattern: "GET /v1/sandboxes/{id}/tar", name: "downloadTar", tag: "Files", query: []query{thePath}, answer: tarBytes, words: "A directory as a tar."},
	{Pattern: "PUT /v1/sandboxes/{id}/tar", name: "uploadTar", tag: "Files", query: []query{thePath, writing[1]}, body: tarBytes, answer: jsonText, words: "Unpacks a tar into a directory."},
	{Pattern: "GET /v1/sandboxes/{id}/connect", name: "connectPort", tag: "Ports", query: []query{{"port", "integer", "a TCP port inside", true}}, answer: anyBytes,
		words: "A TCP connection to a port inside: HTTP/1.1 with Connection: Upgrade and Upgrade: cove-tcp, answered by 101."},
	{Pattern: "PUT /v1/images", name: "importImage", tag: "Images", query: []query{{"name", "string", "name of the image", true}, {"shared", "boolean", "for every tenant; root only", false}}, body: tarBytes, answer: jsonText, words: "Imports an image: a tar of an OCI layout, docker save, or a root file system."},
	{Pattern: "PUT /v1/build-files/{key}", name: "putBuildFiles", tag: "Images", body: tarBytes, answer: jsonText, words: "Keeps files for builds of images to copy from: a tar, plain or packed with gzip or zstd."},
	{Pattern: "PUT /v1/grades/tests", name: "putTests", tag: "Grades", query: []query{{"digest", "string", "SHA-256 of the tar, in hex: the same tests are then made once", false}}, body: tarBytes, answer: jsonText, words: "Makes a directory snapshot of tests, for grades to mount; the answer has its id as snapshot. It is deleted after 30 days."},
	{Pattern: "GET /v1/snapshots/{id}/tar", name: "downloadSnapshot", tag: "Snapshots", answer: tarBytes, words: "A filesystem or directory snapshot as a tar."},
	{Pattern: "GET /v1/recordings/{id}/archive", name: "exportRecording", tag: "Recordings", query: []query{{"format", "string", "tape (default) or har", false}}, answer: anyBytes, words: "A recording as a file."},
	{Pattern: "PUT /v1/recordings", name: "importRecording", tag: "Recordings", query: []query{{"name", "string", "its new name", false}}, body: anyBytes, answer: jsonText, words: "Imports a recording."},
	{Pattern: "GET /v1/volumes/{id}/files", name: "downloadVolumeFile", tag: "Volumes", query: []query{{"path", "string", "absolute, in the volume", true}}, answer: anyBytes, words: "A file of a volume."},
	{Pattern: "PUT /v1/volumes/{id}/files", name: "uploadVolumeFile", tag: "Volumes", query: []query{{"path", "string", "absolute, in the volume", true}, writing[0], {"uid", "integer", "owner, 0 unless told", false}, {"gid", "integer", "group, 0 unless told", false}, {"directory", "boolean", "makes a directory, and those above it; no body is read", false}}, body: anyBytes, answer: jsonText, words: "Writes a file of a volume."},
	{Pattern: "GET /v1/sandboxes/{id}/callbacks/{request}/body", name: "readCallback", tag: "Callbacks", answer: anyBytes, words: "The body of a request that code inside made, once."},
	{Pattern: "PUT /v1/sandboxes/{id}/callbacks/{request}", name: "answerCallback", tag: "Callbacks", query: []query{{"status", "integer", "200 unless told", false}}, body: anyBytes, answer: jsonText, words: "Answers a request that code inside made."},
}

func (r Route) method() string { m, _, _ := strings.Cut(r.Pattern, " "); return m }
func (r Route) path() string   { _, p, _ := strings.Cut(r.Pattern, " "); return p }

func (r Route) operation() object {
	var params []any
	for part := range strings.SplitSeq(r.path(), "/") {
		if name, ok := strings.CutPrefix(part, "{"); ok {
			params = append(params, object{"name": strings.TrimSuffix(name, "}"), "in": "path", "required": true, "schema": object{"type": "string"}})
		}
	}
	for _, q := range r.query {
		p := object{"name": q.name, "in": "query", "schema": object{"type": q.kind}, "description": q.words}
		if q.required {
			p["required"] = true
		}
		params = append(params, p)
	}
	answer := object{"description": "done"}
	switch {
	case r.answer == ndjson:
		answer["content"] = object{ndjson: object{}}
	case r.schema != "":
		answer["content"] = jsonContent(reference(r.schema + "Response"))
	case r.answer == jsonText:
		answer["content"] = jsonContent(object{"type": "object"})
	default:
		answer["content"] = object{r.answer: object{}}
	}
	op := object{"operationId": r.name, "tags": []any{r.tag}, "description": r.words, "parameters": params,
		"responses": object{"200": answer, "default": object{"$ref": "#/components/responses/Error"}}}
	switch {
	case r.schema != "":
		op["requestBody"] = object{"required": true, "content": jsonContent(reference(r.schema + "Request"))}
	case r.body != "":
		op["requestBody"] = object{"required": true, "content": object{r.body: object{}}}
	}
	return op
}

// routeSchemas are the JSON of plain routes, and the error of all. A test of the
// server holds Exec against its Go types.
var routeSchemas = object{
	"Error": fields("code", text("Connect's code"), "message", text(""), "details", object{"type": "array", "items": object{"type": "object"}}),
	"RunCodeRequest": fields(
		"code", text(""),
		"context", text("id of a context; the language's own unless told"),
		"language", text("python unless told, javascript, typescript or bash; not beside a context"),
		"env", object{"type": "object", "additionalProperties": text("")},
		"timeout", object{"description": "seconds, or a duration like 1m30s, after which the kernel is interrupted; none unless told"},
	),
	"ExecRequest": fields(
		"args", object{"type": "array", "items": text(""), "description": "the program and its arguments; either this or command"},
		"command", text("a line for the sandbox's shell"),
		"cwd", text("absolute; the image's working directory unless told"),
		"env", object{"type": "object", "additionalProperties": text("")},
		"user", text("name, uid, name:group or uid:gid"),
		"stdin", text("what the command reads"),
		"stdin_base64", object{"type": "string", "contentEncoding": "base64", "description": "the same as bytes"},
		"timeout", object{"type": []any{"number", "string"}, "description": `seconds (90) or a duration ("1m30s"); the command and its children are killed then, cause deadline`},
		"exec_id", text("name of this run: the same id never runs twice in a sandbox"),
		"kill_on_cancel", object{"type": "boolean", "description": "kill the process if the caller leaves before it has ended; it runs on otherwise"},
		"max_output", object{"type": "integer", "description": "bytes of stdout and stderr together that the answer holds: 1 MiB unless told, at most 16 MiB. What is over it is dropped and truncated is true"},
		"base64", object{"type": "boolean", "description": "output as base64 in any case"},
	),
	"ExecResponse": fields(
		"sandbox_id", text(""), "exec_id", text(""),
		"replayed", object{"type": "boolean", "description": "the exec_id had run before, and this is its output"},
		"stdout", text("where it is UTF-8"), "stderr", text("where it is UTF-8"),
		"stdout_base64", object{"type": "string", "contentEncoding": "base64", "description": "where it is not, instead of stdout"},
		"stderr_base64", object{"type": "string", "contentEncoding": "base64", "description": "where it is not, instead of stderr"},
		"truncated", object{"type": "boolean"},
		"output_bytes", object{"type": "integer", "description": "all that was printed"},
		"cause", text("exited, signalled, deadline, oom, killed_by_user, reset, …"),
		"exit_code", object{"type": "integer", "description": "of cause exited, and 128+n of signalled"},
		"signal", text(""), "detail", text(""),
		"duration_s", object{"type": "number"},
		"egress_denied", object{"type": "integer"}, "replay_missed", object{"type": "integer"},
	),
}

func text(words string) object {
	if words == "" {
		return object{"type": "string"}
	}
	return object{"type": "string", "description": words}
}

// fields is the schema of an object from names and schemas in turn.
func fields(pairs ...any) object {
	props := object{}
	for i := 0; i < len(pairs); i += 2 {
		props[fmt.Sprint(pairs[i])] = pairs[i+1]
	}
	return object{"type": "object", "properties": props}
}

// Fields are the names of a route's JSON.
func Fields(schema string) (names []string) {
	for name := range routeSchemas[schema].(object)["properties"].(object) {
		names = append(names, name)
	}
	return names
}
