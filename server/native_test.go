package server_test

import (
	"net/http"

	"github.com/cove-sandbox/cove/server"
	"github.com/cove-sandbox/cove/server/e2b"
	"github.com/cove-sandbox/cove/server/native"
)

// The tests of package server act as clients of Cove's own dialect.
func init() {
	server.SpeakNative(native.Handler, native.HTTPServer, native.Routes, native.Procedures())
	server.SpeakE2B(func(s *server.Server, port server.ShowPort) http.Handler {
		return e2b.Wrap(e2b.Config{Server: s, Key: []byte("k"), Port: port}, http.NotFoundHandler())
	})
}
