// Package openapi makes api/openapi.json: the plain HTTP routes, and every unary
// call of the Connect services, which is a POST of JSON.
//
// Calls, fields and types come from the descriptors that are linked in, words
// from the comments of the protos (descriptors lose them), and the plain routes
// from a table, which a test of the server holds against what it serves.
// Rejected: a generator that reads protos by itself, gnostic and the like: they
// know neither the routes beside Connect nor our errors.
package openapi

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	_ "github.com/cove-sandbox/cove/api/cove/v1" // the descriptors
)

const apiPackage = "cove.v1"

type object = map[string]any

// Document is the description as it is committed: indented, keys sorted. protos
// is the directory of the proto files, for their comments.
func Document(protos string) ([]byte, error) {
	words, err := readComments(protos)
	if err != nil {
		return nil, err
	}
	paths, schemas := object{}, object{}
	for _, r := range Routes {
		item, _ := paths[r.path()].(object)
		if item == nil {
			item = object{}
			paths[r.path()] = item
		}
		item[strings.ToLower(r.method())] = r.operation()
	}
	maps.Copy(schemas, routeSchemas)
	s := schemaMaker{words: words, schemas: schemas}
	for _, svc := range services() {
		for i := range svc.Methods().Len() {
			m := svc.Methods().Get(i)
			if m.IsStreamingClient() || m.IsStreamingServer() {
				continue // envelopes in a stream, which OpenAPI has no words for
			}
			paths[fmt.Sprintf("/%s/%s", svc.FullName(), m.Name())] = object{"post": s.call(svc, m)}
		}
	}
	doc := object{
		"openapi": "3.1.0",
		"info": object{
			"title":   "Cove",
			"version": "v1",
			"description": "Sandboxes over HTTP. Plain routes are below /v1; every other path is a Connect call: POST a JSON object, get one back. " +
				"Calls that stream (Processes/Start and Attach, Files/Watch, builds and pulls) are in the protos, api/cove/v1, and not here. " +
				"64-bit numbers are strings in Connect's JSON, durations are \"1.5s\". Fields that a message does not have are refused.",
			"license": object{"name": "Apache-2.0", "identifier": "Apache-2.0"},
		},
		"servers":    []any{object{"url": "/"}},
		"security":   []any{object{"key": []any{}}},
		"paths":      paths,
		"components": object{"schemas": schemas, "responses": responses, "securitySchemes": object{"key": object{"type": "http", "scheme": "bearer", "description": "an API key, cove_…"}}},
	}
	b, err := json.MarshalIndent(doc, "", " ")
	return append(b, '\n'), err
}

// services of the API, in order of their names.
func services() (out []protoreflect.ServiceDescriptor) {
	protoregistry.GlobalFiles.RangeFilesByPackage(apiPackage, func(f protoreflect.FileDescriptor) bool {
		for i := range f.Services().Len() {
			out = append(out, f.Services().Get(i))
		}
		return true
	})
	slices.SortFunc(out, func(a, b protoreflect.ServiceDescriptor) int {
		return strings.Compare(string(a.Name()), string(b.Name()))
	})
	return out
}

var responses = object{
	"Error": object{
		"description": "What went wrong. code is Connect's; details hold a cove.v1.ErrorDetail with the code of api/errors.json, the reason, the field and a hint.",
		"content":     jsonContent(object{"$ref": "#/components/schemas/Error"}),
	},
}

func jsonContent(schema object) object { return object{"application/json": object{"schema": schema}} }

func reference(name string) object { return object{"$ref": "#/components/schemas/" + name} }
