package guest

import (
	"context"
	"net"

	"github.com/cove-sandbox/cove/sandbox"
)

// Dialer opens one connection to the guest of a kernel.
type Dialer func(ctx context.Context) (net.Conn, error)

// Client is the host's side of the guest protocol. One request at a time runs
// on a connection; idle connections are kept and reused, and a stream that is
// left early costs its connection. Safe for concurrent use.
type Client struct {
	dial   Dialer
	secret []byte
}

// NewClient makes a client; it dials on first use.
func NewClient(dial Dialer, secret []byte) *Client { return &Client{dial: dial, secret: secret} }

// Container tells the guest which container it serves from now on.
type Container struct {
	InitPID    int      `json:"init_pid"` // of the user container's init, in the guest's pid namespace
	Env        []string `json:"env"`      // the environment every process starts from
	WorkingDir string   `json:"working_dir"`
	User       string   `json:"user"`
}

// ListOptions bound a directory listing.
type ListOptions struct {
	Depth int `json:"depth"` // 1 = the directory's own entries
	Limit int `json:"limit"`
}

func (c *Client) Close() error                                  { panic("todo") }
func (c *Client) Ping(ctx context.Context) error                { panic("todo") }
func (c *Client) Enter(ctx context.Context, ct Container) error { panic("todo") }
func (c *Client) Leave(ctx context.Context) error               { panic("todo") }
func (c *Client) Start(ctx context.Context, spec sandbox.ProcessSpec, offset int64, sink func(sandbox.ProcessEvent) error) error {
	panic("todo")
}
func (c *Client) Attach(ctx context.Context, execID string, offset int64, sink func(sandbox.ProcessEvent) error) error {
	panic("todo")
}
func (c *Client) SendInput(ctx context.Context, execID string, data []byte) error { panic("todo") }
func (c *Client) CloseInput(ctx context.Context, execID string) error             { panic("todo") }
func (c *Client) Signal(ctx context.Context, execID, signal string, processOnly bool) error {
	panic("todo")
}
func (c *Client) Resize(ctx context.Context, execID string, size sandbox.TermSize) error {
	panic("todo")
}
func (c *Client) Processes(ctx context.Context) ([]sandbox.Process, []sandbox.Task, error) {
	panic("todo")
}
func (c *Client) Wait(ctx context.Context, execID string) (sandbox.ProcessEnd, error) { panic("todo") }
func (c *Client) ReadFile(ctx context.Context, path string, offset, length int64) ([]byte, sandbox.FileInfo, error) {
	panic("todo")
}
func (c *Client) WriteFile(ctx context.Context, path string, data []byte, opt sandbox.WriteOptions) (sandbox.FileInfo, error) {
	panic("todo")
}
func (c *Client) Stat(ctx context.Context, path string) (sandbox.FileInfo, error) { panic("todo") }
func (c *Client) List(ctx context.Context, path string, opt ListOptions) (files []sandbox.FileInfo, truncated bool, err error) {
	panic("todo")
}
func (c *Client) Mkdir(ctx context.Context, path string, opt sandbox.WriteOptions) (sandbox.FileInfo, error) {
	panic("todo")
}
func (c *Client) Move(ctx context.Context, from, to string) (sandbox.FileInfo, error) { panic("todo") }
func (c *Client) Remove(ctx context.Context, path string, recursive bool) error       { panic("todo") }
func (c *Client) Chmod(ctx context.Context, path string, mode uint32, recursive bool) error {
	panic("todo")
}
func (c *Client) Chown(ctx context.Context, path, owner string, recursive bool) error { panic("todo") }
func (c *Client) Watch(ctx context.Context, path string, recursive bool, sink func(sandbox.FileChange) error) error {
	panic("todo")
}
