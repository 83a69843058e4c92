package fake

import (
	"context"
	"net"
	"os"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// guestAgent is what a machine needs of guest/agent.
type guestAgent interface {
	ServeConn(conn net.Conn)
	Close() error
}

var errBare = &sandbox.Error{Class: sandbox.Unsupported, Op: "fake", Msg: "a bare kernel has no guest"}

func (m *machine) start() error { return errBare }

func (m *machine) dial(ctx context.Context) (net.Conn, error) { return nil, errBare }

func (m *machine) bulk(op guest.BulkOp, stdin, stdout *os.File) error { return errBare }

func (k *kernel) Stats(ctx context.Context) (sandbox.Stats, error) {
	return sandbox.Stats{Memory: 10 << 20, Processes: 1}, nil
}

func (k *kernel) populate(ctx context.Context, c runtime.Container) error { return nil }
func (k *kernel) evacuate(ctx context.Context) error                      { return nil }
