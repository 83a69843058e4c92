package remote

import (
	"crypto/tls"
	"log/slog"
	"net/http"
	"time"

	"github.com/cove-sandbox/cove/internal/strangers"
	"github.com/cove-sandbox/cove/node"
)

// Server shows a node on a listener: ServeTLS(ln, "", "") runs it. mutual is of
// pki.InstallationCA.MutualTLS with the node's certificate, wanting a server. What
// somebody without one may hold of it is bounded: handshakes in time, number and
// by address.
func Server(n node.Node, mutual *tls.Config, log *slog.Logger) *http.Server {
	t := mutual.Clone()
	t.NextProtos = []string{"h2"}
	var h2 http.Protocols
	h2.SetHTTP2(true)
	s := &http.Server{Handler: Handler(n), TLSConfig: t, Protocols: &h2, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug),
		ReadHeaderTimeout: 10 * time.Second, // of the handshake too
		IdleTimeout:       5 * time.Minute, MaxHeaderBytes: 16 << 10,
		HTTP2: &http.HTTP2Config{MaxConcurrentStreams: maxStreams, MaxReceiveBufferPerConnection: byteWindow, MaxReceiveBufferPerStream: 1 << 20,
			SendPingTimeout: pingAfter, PingTimeout: pingTimeout}}
	strangers.New(strangers.Limits{Conns: 256, PerAddress: 128, Requests: 256, PerConn: 64}).Guard(s)
	return s
}
