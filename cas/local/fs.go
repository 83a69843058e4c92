package local

import (
	"io"
	"io/fs"
	"os"
	"time"

	"github.com/cove-sandbox/cove/internal/durable"
)

// fsys is what the store needs of a file system, so that tests can put faults
// and crashes at every edge of it.
type fsys interface {
	MkdirAll(name string) error
	ReadDir(name string) ([]fs.DirEntry, error)
	Create(name string) (file, error) // must not exist; mode 0600
	Open(name string) (file, error)
	Stat(name string) (fs.FileInfo, error)
	Chtimes(name string, at time.Time) error
	Rename(from, to string) error
	Remove(name string) error
	SyncDir(name string) error
}

type file interface {
	io.Writer
	io.ReaderAt
	io.Closer
	Stat() (fs.FileInfo, error)
	Sync() error
}

// hostFS is the host's file system.
type hostFS struct{}

func (hostFS) MkdirAll(name string) error                 { return os.MkdirAll(name, 0o700) }
func (hostFS) ReadDir(name string) ([]fs.DirEntry, error) { return os.ReadDir(name) }
func (hostFS) Stat(name string) (fs.FileInfo, error)      { return os.Lstat(name) }
func (hostFS) Chtimes(name string, at time.Time) error    { return os.Chtimes(name, at, at) }
func (hostFS) Rename(from, to string) error               { return os.Rename(from, to) }
func (hostFS) Remove(name string) error                   { return os.Remove(name) }
func (hostFS) SyncDir(name string) error                  { return durable.Sync(name) }

// The nil file of a failed open must not become a non-nil interface.
func (hostFS) Create(name string) (file, error) {
	f, err := os.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	return f, nil
}

func (hostFS) Open(name string) (file, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	return f, nil
}
