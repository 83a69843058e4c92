package agent

import (
	"context"
	"io"
	"log/slog"
	"net"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/sandbox"
)

// Config is what an agent needs. Logger may be nil.
type Config struct {
	Secret []byte
	Space  Space
	Logger *slog.Logger
}

// Space is where an agent acts.
type Space interface{ space() }

type hostSpace struct{}

func (hostSpace) space() {}

// NewContainerSpace acts in the container entered by Enter's init pid.
func NewContainerSpace() Space { return hostSpace{} }

// HostSpace acts on a directory of this machine, without isolation.
func HostSpace(root string) Space { return hostSpace{} }

// Agent serves the guest protocol.
type Agent struct{}

// New makes an agent.
func New(cfg Config) *Agent { return &Agent{} }

// Serve accepts connections until ctx ends or Close.
func (a *Agent) Serve(ctx context.Context, l net.Listener) error { return sandbox.ErrUnsupported }

// ServeConn serves one connection to its end.
func (a *Agent) ServeConn(c net.Conn) { c.Close() }

// Close ends every process and connection and waits.
func (a *Agent) Close() {}

// RunBulk runs one transfer.
func RunBulk(space Space, op guest.BulkOp, stdin io.Reader, stdout io.Writer) error {
	return sandbox.ErrUnsupported
}
