package guest_test

import (
	"context"
	"net"
	"path/filepath"
	"testing"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/guest/agent"
)

// BenchmarkPing is what a call costs on both sides of the wire, without a kernel.
func BenchmarkPing(b *testing.B) {
	a := agent.New(agent.Config{Secret: secret, Space: agent.HostSpace(b.TempDir())})
	defer a.Close()
	l, err := net.Listen("unix", filepath.Join(b.TempDir(), "s"))
	if err != nil {
		b.Fatal(err)
	}
	go a.Serve(b.Context(), l)
	c := guest.NewClient(func(ctx context.Context) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", l.Addr().String())
	}, secret)
	defer c.Close()
	for b.Loop() {
		if err := c.Ping(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}
