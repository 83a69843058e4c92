package server

import (
	"context"
	"io"
	"net"
	"os"
	"time"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/sandbox"
)

// Node is what the server needs of a node. In an all-in-one process it is the
// node itself; on a fleet it will be a stream to one. All errors are
// *sandbox.Error; of a sandbox that the node does not have, sandbox.ErrNoSandbox.
type Node interface {
	Name() string

	// Create admits sb, attaches its container and returns when the node's own
	// record of it is durable. On error nothing of it is left.
	Create(ctx context.Context, sb sandbox.Sandbox, img sandbox.Image) (took time.Duration, err error)
	Reset(ctx context.Context, id string) (episode int64, took time.Duration, err error)
	// Kill ends a sandbox with a cause and returns when nothing is left of it.
	// sandbox.ErrNoSandbox if the node does not have it.
	Kill(ctx context.Context, id string, end sandbox.End) error
	// SetExpiry moves the end of a sandbox's life; zero = never.
	SetExpiry(ctx context.Context, id string, at time.Time) error
	Stats(ctx context.Context, id string) (sandbox.Stats, error)

	// Guest returns the machine inside, marks the sandbox active until release
	// is called, and fails with sandbox.ErrEnded or ErrNoSandbox.
	Guest(ctx context.Context, id string) (g Guest, release func(), err error)
	// Dial opens a byte stream to a TCP port inside and marks the sandbox active
	// until release is called. sandbox.ErrPortClosed if nothing listens there.
	Dial(ctx context.Context, id string, port int) (c net.Conn, release func(), err error)
	// Listen takes the connections that code inside makes to the callback
	// address, until the sandbox ends; they stand still with it on standby. One
	// at a time. sandbox.ErrPortTaken if a program inside has the port.
	Listen(ctx context.Context, id string, port int) (net.Listener, error)
	// Bulk moves content between a host descriptor and the sandbox.
	Bulk(ctx context.Context, id string, op guest.BulkOp, stdin, stdout *os.File) error

	// Live lists the sandboxes running here. Ends lists those that ended here
	// and that the server has not yet acknowledged with AckEnd.
	Live(ctx context.Context) ([]sandbox.Sandbox, error)
	Ends(ctx context.Context) (map[string]sandbox.End, error)
	AckEnd(ctx context.Context, id string) error
	// Ended delivers the id of each sandbox that ends on its own (its end is
	// then in Ends). One receiver.
	Ended() <-chan string

	Capacity() Capacity
	Images() ImageLibrary

	StateNode
	NetworkNode
	SecretNode
}

// Capacity is what a node has and has given out.
type Capacity = sandbox.Capacity

// Guest is the machine inside a sandbox; *guest.Client is one.
type Guest interface {
	Start(ctx context.Context, spec sandbox.ProcessSpec, offset int64, sink func(sandbox.ProcessEvent) error) error
	Attach(ctx context.Context, execID string, offset int64, sink func(sandbox.ProcessEvent) error) error
	SendInput(ctx context.Context, execID string, data []byte) error
	CloseInput(ctx context.Context, execID string) error
	Signal(ctx context.Context, execID, signal string, processOnly bool) error
	Resize(ctx context.Context, execID string, size sandbox.TermSize) error
	Processes(ctx context.Context) ([]sandbox.Process, []sandbox.Task, error)
	Wait(ctx context.Context, execID string) (sandbox.ProcessEnd, error)

	ReadFile(ctx context.Context, path string, offset, length int64) ([]byte, sandbox.FileInfo, error)
	WriteFile(ctx context.Context, path string, data []byte, opt sandbox.WriteOptions) (sandbox.FileInfo, error)
	Stat(ctx context.Context, path string) (sandbox.FileInfo, error)
	List(ctx context.Context, path string, opt guest.ListOptions) (files []sandbox.FileInfo, truncated bool, err error)
	Mkdir(ctx context.Context, path string, opt sandbox.WriteOptions) (sandbox.FileInfo, error)
	Move(ctx context.Context, from, to string) (sandbox.FileInfo, error)
	Remove(ctx context.Context, path string, recursive bool) error
	Chmod(ctx context.Context, path string, mode uint32, recursive bool) error
	Chown(ctx context.Context, path, owner string, recursive bool) error
	Watch(ctx context.Context, path string, recursive bool, sink func(sandbox.FileChange) error) error
}

// ImageLibrary makes and keeps image content on a node; names are the store's.
type ImageLibrary interface {
	// PullAs fetches a reference as somebody; platform "" is the node's own.
	PullAs(ctx context.Context, who sandbox.RegistryAccess, ref, platform string, progress func(ImageProgress)) (sandbox.Image, error)
	// ImportTar takes a docker-save or OCI-layout tar, or a plain root file system.
	ImportTar(ctx context.Context, r io.Reader, progress func(ImageProgress)) (sandbox.Image, error)
	// Have says whether the content is here.
	Have(id string) bool
	// Get says what is known of content, without names; sandbox.ErrImageNotFound.
	Get(id string) (sandbox.Image, error)
	// Delete removes content. The caller knows that nothing uses it.
	Delete(ctx context.Context, id string) error
	// Contents lists every content id with its size.
	Contents(ctx context.Context) (map[string]int64, error)
}

// ImageProgress is one step of a long image operation.
type ImageProgress = sandbox.Progress

var _ Guest = (*guest.Client)(nil)
