// Package api holds the description of the HTTP surface that servers hand out.
// The protos and what is generated from them are in cove/v1.
package api

import _ "embed"

// OpenAPI is openapi.json, made from the protos by "make proto".
//
//go:embed openapi.json
var OpenAPI []byte
