package server_test

import (
	"github.com/cove-sandbox/cove/server"
	"github.com/cove-sandbox/cove/server/native"
)

// The tests of package server act as clients of Cove's own dialect.
func init() {
	server.SpeakNative(native.Handler, native.HTTPServer, native.Routes, native.Procedures())
}
