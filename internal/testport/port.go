// Package testport finds ports for what a test cannot hand a listener.
package testport

import (
	"math/rand/v2"
	"net"
	"strconv"
	"testing"
)

// Free finds a port of host that nobody listens on, below the ephemeral range.
// Inside it, anybody who connects may be given the port before it is listened on;
// and a client that redials a dead server would sooner or later be given the
// server's own port as its source, connect to itself, and keep the server from
// coming back.
func Free(t testing.TB, host string) int {
	t.Helper()
	for range 200 {
		port := 20000 + rand.IntN(12000)
		l, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port)))
		if err == nil {
			l.Close()
			return port
		}
	}
	t.Fatal("no free port")
	return 0
}
