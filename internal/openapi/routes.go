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
)

// Routes are all of them.
var Routes = []Route{
	{Pattern: "POST /v1/sandboxes/{id}/exec", name: "exec", tag: "Processes", body: jsonText, answer: jsonText, schema: "Exec",
		words: "Runs a command to its end and answers with its output, exit code and cause. A command that fails is an answer (200); an error means that it did not run. A client that leaves does not end it: asked again with the same exec_id, the call waits for the same run and replays its output."},
	{Pattern: "GET /v1/sandboxes/{id}/files", name: "downloadFile", tag: "Files", query: []query{thePath}, answer: anyBytes, words: "The content of a file; Range is honoured."},
	{Pattern: "PUT /v1/sandboxes/{id}/files", name: "uploadFile", tag: "Files", query: append([]query{thePath}, writing...), body: anyBytes, answer: jsonText, words: "Writes a file of any size."},
	{Pattern: "GET /v1/sandboxes/{id}/tar", name: "downloadTar", tag: "Files", query: []query{thePath}, answer: tarBytes, words: "A directory as a tar."},
	{Pattern: "PUT /v1/sandboxes/{id}/tar", name: "uploadTar", tag: "Files", query: []query{thePath, writing[1]}, body: tarBytes, answer: jsonText, words: "Unpacks a tar into a directory."},
	{Pattern: "GET /v1/sandboxes/{id}/connect", name: "connectPort", tag: "Ports", query: []query{{"port", "integer", "a TCP port inside", true}}, answer: anyBytes,
		words: "A TCP connection to a port inside: HTTP/1.1 with Connection: Upgrade and Upgrade: cove-tcp, answered by 101."},
	{Pattern: "PUT /v1/images", name: "importImage", tag: "Images", query: []query{{"name", "string", "name of the image", true}, {"shared", "boolean", "for every tenant; root only", false}}, body: tarBytes, answer: jsonText, words: "Imports an image: a tar of an OCI layout, docker save, or a root file system."},
	{Pattern: "GET /v1/snapshots/{id}/tar", name: "downloadSnapshot", tag: "Snapshots", answer: tarBytes, words: "A filesystem or directory snapshot as a tar."},
	{Pattern: "GET /v1/recordings/{id}/archive", name: "exportRecording", tag: "Recordings", query: []query{{"format", "string", "tape (default) or har", false}}, answer: anyBytes, words: "A recording as a file."},
	{Pattern: "PUT /v1/recordings", name: "importRecording", tag: "Recordings", query: []query{{"name", "string", "its new name", false}}, body: anyBytes, answer: jsonText, words: "Imports a recording."},
	{Pattern: "GET /v1/volumes/{id}/files", name: "downloadVolumeFile", tag: "Volumes", query: []query{{"path", "string", "absolute, in the volume", true}}, answer: anyBytes, words: "A file of a volume."},
	{Pattern: "PUT /v1/volumes/{id}/files", name: "uploadVolumeFile", tag: "Volumes", query: []query{{"path", "string", "absolute, in the volume", true}, writing[0]}, body: anyBytes, answer: jsonText, words: "Writes a file of a volume that no sandbox uses."},
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
