package guest

import (
	"context"
	"encoding/json"

	"github.com/cove-sandbox/cove/guest/wire"
	"github.com/cove-sandbox/cove/sandbox"
)

// ReadFile returns length bytes from offset; 0 = to the end. Symlinks are
// followed. More than wire.MaxContent at once is sandbox.ErrTooLarge: use Bulk.
func (c *Client) ReadFile(ctx context.Context, path string, offset, length int64) ([]byte, sandbox.FileInfo, error) {
	var data []byte
	var res wire.Res
	anew := func(r wire.Req, content []byte) (wire.Req, []byte) {
		data = nil
		return r, content
	}
	err := c.run(ctx, wire.Req{Op: wire.OpRead, Path: path, Offset: offset, Length: length}, nil, anew, func(k wire.Kind, p []byte) (bool, error) {
		switch k {
		case wire.Data:
			if len(data)+len(p) > wire.MaxContent {
				return false, errStop{sandbox.Errorf(sandbox.Internal, "guest.read", "more content than asked for")}
			}
			data = append(data, p...)
			return false, nil
		case wire.Reply:
			return true, json.Unmarshal(p, &res)
		}
		return false, unexpected(wire.OpRead, k)
	})
	if err != nil {
		return nil, sandbox.FileInfo{}, err
	}
	info, err := fileOf(wire.OpRead, res, nil)
	return data, info, err
}

// WriteFile replaces or, with opt.Append, extends a file.
func (c *Client) WriteFile(ctx context.Context, path string, data []byte, opt sandbox.WriteOptions) (sandbox.FileInfo, error) {
	res, err := c.call(ctx, wire.Req{Op: wire.OpWrite, Path: path, Write: &opt}, data)
	return fileOf(wire.OpWrite, res, err)
}

// Untar unpacks a tar of at most wire.MaxUntar into a directory. Of an older
// guest it is sandbox.ErrUnsupported: use Bulk.
func (c *Client) Untar(ctx context.Context, path string, tar []byte, opt sandbox.WriteOptions) error {
	_, err := c.call(ctx, wire.Req{Op: wire.OpUntar, Path: path, Write: &opt}, tar)
	return err
}

// Trust adds a certificate to those of the stores that are there, making the
// first of another, and then writes it to path: where it is there already nothing
// is done. missing says that there is no store, and that nothing was done.
func (c *Client) Trust(ctx context.Context, path string, stores []string, cert []byte) (missing bool, err error) {
	res, err := c.call(ctx, wire.Req{Op: wire.OpTrust, Path: path, Paths: stores}, cert)
	return res.Missing, err
}

// Stat describes a path. A symlink itself is described, not what it points to.
func (c *Client) Stat(ctx context.Context, path string) (sandbox.FileInfo, error) {
	res, err := c.call(ctx, wire.Req{Op: wire.OpStat, Path: path}, nil)
	return fileOf(wire.OpStat, res, err)
}

// List returns what is below a directory, parents before children.
func (c *Client) List(ctx context.Context, path string, opt sandbox.ListOptions) (files []sandbox.FileInfo, truncated bool, err error) {
	res, err := c.call(ctx, wire.Req{Op: wire.OpList, Path: path, Depth: opt.Depth, Limit: opt.Limit, Flag: opt.Attributes}, nil)
	return res.Files, res.Truncated, err
}

// Mkdir makes a directory. With opt.Parents it makes what is missing above it
// and one that is already there is no error.
func (c *Client) Mkdir(ctx context.Context, path string, opt sandbox.WriteOptions) (sandbox.FileInfo, error) {
	res, err := c.call(ctx, wire.Req{Op: wire.OpMkdir, Path: path, Write: &opt}, nil)
	return fileOf(wire.OpMkdir, res, err)
}

// Move renames, replacing a file at to. Across file systems it fails with
// sandbox.ErrPrecondition.
func (c *Client) Move(ctx context.Context, from, to string) (sandbox.FileInfo, error) {
	res, err := c.call(ctx, wire.Req{Op: wire.OpMove, Path: from, To: to}, nil)
	return fileOf(wire.OpMove, res, err)
}

// Remove removes a file, a symlink or an empty directory; recursive, a
// directory with all below it. It never follows symlinks.
func (c *Client) Remove(ctx context.Context, path string, recursive bool) error {
	_, err := c.call(ctx, wire.Req{Op: wire.OpRemove, Path: path, Flag: recursive}, nil)
	return err
}

// Chmod sets permission bits (07777). Symlinks found below path are left alone.
func (c *Client) Chmod(ctx context.Context, path string, mode uint32, recursive bool) error {
	_, err := c.call(ctx, wire.Req{Op: wire.OpChmod, Path: path, Mode: mode, Flag: recursive}, nil)
	return err
}

// Chown sets the owner (name, uid, name:group or uid:gid) of path itself, a
// symlink included.
func (c *Client) Chown(ctx context.Context, path, owner string, recursive bool) error {
	_, err := c.call(ctx, wire.Req{Op: wire.OpChown, Path: path, User: owner, Flag: recursive}, nil)
	return err
}

// SetAttributes makes these all the extended attributes "user.*" of a path.
func (c *Client) SetAttributes(ctx context.Context, path string, attrs map[string]string) (sandbox.FileInfo, error) {
	res, err := c.call(ctx, wire.Req{Op: wire.OpSetAttrs, Path: path, Attributes: attrs}, nil)
	return fileOf(wire.OpSetAttrs, res, err)
}

// Watch reports changes below a path until ctx ends or sink fails. The first
// report has Op "ready": what happens after it is seen. "overflow" says that
// changes were dropped.
func (c *Client) Watch(ctx context.Context, path string, recursive bool, sink func(sandbox.FileChange) error) error {
	ready := false
	return c.run(ctx, wire.Req{Op: wire.OpWatch, Path: path, Flag: recursive}, nil, nil, func(k wire.Kind, p []byte) (bool, error) {
		if k == wire.Reply { // the watched path is gone, or the episode is over
			return true, nil
		}
		if k != wire.Change {
			return false, unexpected(wire.OpWatch, k)
		}
		var ch sandbox.FileChange
		if err := json.Unmarshal(p, &ch); err != nil {
			return false, err
		}
		if ch.Op == "ready" && ready { // watched anew after a checkpoint; what came between was not seen
			ch.Op = "overflow"
		}
		ready = ready || ch.Op == "ready"
		if err := sink(ch); err != nil {
			return false, errStop{err}
		}
		return false, nil
	})
}

func fileOf(op string, res wire.Res, err error) (sandbox.FileInfo, error) {
	if err != nil {
		return sandbox.FileInfo{}, err
	}
	if res.File == nil {
		return sandbox.FileInfo{}, sandbox.Errorf(sandbox.Internal, "guest."+op, "answer without a file")
	}
	return *res.File, nil
}
