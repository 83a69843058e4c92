package agent

import (
	"io"
	"os"

	"github.com/cove-sandbox/cove/internal/durable"
)

// fsys is what the journal needs of a file system, so that tests can put
// faults at every edge of it.
type fsys interface {
	ReadFile(name string) ([]byte, error)
	Create(name string) (logFile, error) // new or truncated, mode 0600
	Rename(from, to string) error
	Remove(name string) error
	SyncDir(name string) error
}

type logFile interface {
	io.WriteCloser
	Sync() error
}

// hostFS is the host's file system.
type hostFS struct{}

func (hostFS) ReadFile(name string) ([]byte, error) { return os.ReadFile(name) }
func (hostFS) Rename(from, to string) error         { return os.Rename(from, to) }
func (hostFS) Remove(name string) error             { return os.Remove(name) }
func (hostFS) SyncDir(name string) error            { return durable.Sync(name) }

func (hostFS) Create(name string) (logFile, error) {
	return os.OpenFile(name, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
}
