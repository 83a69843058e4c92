package native

import (
	"net/http"
	"time"

	"github.com/cove-sandbox/cove/internal/strangers"
)

// HTTPServer is an http.Server set up as the API needs it: HTTP/1.1 and
// HTTP/2, the latter without TLS too, because a client holds one stream per
// running process and HTTP/1.1 would cost it a connection each.
func HTTPServer(h http.Handler) *http.Server {
	var p http.Protocols
	p.SetHTTP1(true)
	p.SetHTTP2(true)
	p.SetUnencryptedHTTP2(true)
	s := &http.Server{
		Handler:           h,
		Protocols:         &p,
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       5 * time.Minute,
		MaxHeaderBytes:    64 << 10,
		HTTP2: &http.HTTP2Config{
			// The usual 250 would stop a trainer that watches a thousand
			// processes over one connection. Who has shown no key has far fewer.
			MaxConcurrentStreams:          100_000,
			MaxReceiveBufferPerStream:     4 << 20,
			MaxReceiveBufferPerConnection: 64 << 20,
			// A client machine that vanished is noticed within a minute.
			SendPingTimeout: 30 * time.Second,
			PingTimeout:     30 * time.Second,
		},
	}
	strangers.New(strangers.Limits{}).Guard(s)
	return s
}
