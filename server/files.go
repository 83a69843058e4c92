package server

import (
	"cmp"
	"context"
	"fmt"

	"github.com/cove-sandbox/cove/sandbox"
)

const (
	maxFile  = 16 << 20 // content of one ReadFile or WriteFile
	maxList  = 10_000   // entries of one ListFiles
	maxDepth = 256
	maxMode  = 0o7777
)

// ReadFile reads a part of a file; length 0 is all of it, if it is not too large.
func (s *Server) ReadFile(ctx context.Context, id, path string, offset, length int64) (data []byte, info sandbox.FileInfo, err error) {
	ctx, call, err := s.begin(ctx, "file.read", about("sandbox", id))
	if err != nil {
		return nil, info, err
	}
	defer call.end(&err)
	if err := firstError(sandbox.ValidateFilePath("path", path), validOffset(offset)); err != nil {
		return nil, info, err
	}
	if length < 0 {
		return nil, info, sandbox.InvalidField("length", "%d is not accepted; 1 to %d is, or 0 for all", length, maxFile)
	}
	if length > maxFile {
		return nil, info, tooLargeFile("length", length, "GET")
	}
	err = s.inside(ctx, id, func() error {
		data, info, err = s.node.ReadFile(ctx, id, path, offset, cmp.Or(length, maxFile))
		if err == nil && length == 0 && info.Size-offset > maxFile { // half a file must not pass for a whole one
			err = tooLargeFile("length", info.Size-offset, "GET")
		}
		return err
	})
	return data, info, err
}

func tooLargeFile(field string, n int64, method string) error {
	return &sandbox.Error{Class: sandbox.TooLarge, Field: field,
		Msg:  fmt.Sprintf("%s in one call; at most %s are accepted", sandbox.FormatSize(n), sandbox.FormatSize(maxFile)),
		Hint: "larger content goes over " + method + " /v1/sandboxes/{id}/files?path=…"}
}

// WriteFile writes a file.
func (s *Server) WriteFile(ctx context.Context, id, path string, data []byte, opt sandbox.WriteOptions) (info sandbox.FileInfo, err error) {
	ctx, call, err := s.begin(ctx, "file.write", about("sandbox", id))
	if err != nil {
		return info, err
	}
	defer call.end(&err)
	call.changes(fileChange{Path: path, Data: data, Options: opt})
	if err := validWrite(path, opt); err != nil {
		return info, err
	}
	if len(data) > maxFile {
		return info, tooLargeFile("data", int64(len(data)), "PUT")
	}
	err = s.inside(ctx, id, func() error {
		info, err = s.node.WriteFile(ctx, id, path, data, opt)
		return err
	})
	return info, err
}

func validWrite(path string, opt sandbox.WriteOptions) error {
	if err := firstError(sandbox.ValidateFilePath("path", path), validMode(opt.Mode)); err != nil {
		return err
	}
	if opt.Atomic && opt.Append {
		return sandbox.InvalidField("append", "cannot be atomic as well; one of append and atomic is accepted")
	}
	return sandbox.ValidateUser("user", opt.User)
}

func validMode(mode uint32) error {
	if mode > maxMode {
		return sandbox.InvalidField("mode", "%#o is not accepted; permission bits up to 07777 are", mode)
	}
	return nil
}

// StatFile says what is known of a file.
func (s *Server) StatFile(ctx context.Context, id, path string) (info sandbox.FileInfo, err error) {
	ctx, call, err := s.begin(ctx, "file.stat", about("sandbox", id))
	if err != nil {
		return info, err
	}
	defer call.end(&err)
	if err := sandbox.ValidateFilePath("path", path); err != nil {
		return info, err
	}
	err = s.inside(ctx, id, func() error {
		info, err = s.node.StatFile(ctx, id, path)
		return err
	})
	return info, err
}

// ListFiles lists what is below a directory: one level deep unless it is told more.
func (s *Server) ListFiles(ctx context.Context, id, path string, opt sandbox.ListOptions) (files []sandbox.FileInfo, truncated bool, err error) {
	ctx, call, err := s.begin(ctx, "file.list", about("sandbox", id))
	if err != nil {
		return nil, false, err
	}
	defer call.end(&err)
	if err := sandbox.ValidateFilePath("path", path); err != nil {
		return nil, false, err
	}
	if opt.Depth < 0 || opt.Depth > maxDepth {
		return nil, false, sandbox.InvalidField("depth", "%d is not accepted; 1 to %d is, or 0 for 1", opt.Depth, maxDepth)
	}
	if opt.Limit < 0 || opt.Limit > maxList {
		return nil, false, sandbox.InvalidField("limit", "%d is not accepted; 1 to %d is, or 0 for %d", opt.Limit, maxList, maxList)
	}
	opt.Depth, opt.Limit = cmp.Or(opt.Depth, 1), cmp.Or(opt.Limit, maxList)
	err = s.inside(ctx, id, func() error {
		files, truncated, err = s.node.ListFiles(ctx, id, path, opt)
		return err
	})
	return files, truncated, err
}

// MakeDirectory makes a directory.
func (s *Server) MakeDirectory(ctx context.Context, id, path string, opt sandbox.WriteOptions) (info sandbox.FileInfo, err error) {
	ctx, call, err := s.begin(ctx, "file.mkdir", about("sandbox", id))
	if err != nil {
		return info, err
	}
	defer call.end(&err)
	call.changes(fileChange{Path: path, Options: opt})
	if err := validWrite(path, opt); err != nil {
		return info, err
	}
	err = s.inside(ctx, id, func() error {
		info, err = s.node.MakeDir(ctx, id, path, opt)
		return err
	})
	return info, err
}

// MoveFile renames a file or directory.
func (s *Server) MoveFile(ctx context.Context, id, from, to string) (info sandbox.FileInfo, err error) {
	ctx, call, err := s.begin(ctx, "file.move", about("sandbox", id))
	if err != nil {
		return info, err
	}
	defer call.end(&err)
	call.changes(fileChange{Path: from, To: to})
	if err := firstError(sandbox.ValidateFilePath("from", from), sandbox.ValidateFilePath("to", to)); err != nil {
		return info, err
	}
	err = s.inside(ctx, id, func() error {
		info, err = s.node.MoveFile(ctx, id, from, to)
		return err
	})
	return info, err
}

// RemoveFile removes a file, or with recursive a directory with all in it.
func (s *Server) RemoveFile(ctx context.Context, id, path string, recursive bool) (err error) {
	ctx, call, err := s.begin(ctx, "file.remove", about("sandbox", id))
	if err != nil {
		return err
	}
	defer call.end(&err)
	call.changes(fileChange{Path: path, Recursive: recursive})
	if err := sandbox.ValidateFilePath("path", path); err != nil {
		return err
	}
	return s.inside(ctx, id, func() error { return s.node.RemoveFile(ctx, id, path, recursive) })
}

// ChangeMode sets the permission bits of a file.
func (s *Server) ChangeMode(ctx context.Context, id, path string, mode uint32, recursive bool) (err error) {
	ctx, call, err := s.begin(ctx, "file.chmod", about("sandbox", id))
	if err != nil {
		return err
	}
	defer call.end(&err)
	call.changes(fileChange{Path: path, Mode: mode, Recursive: recursive})
	if err := firstError(sandbox.ValidateFilePath("path", path), validMode(mode)); err != nil {
		return err
	}
	return s.inside(ctx, id, func() error { return s.node.Chmod(ctx, id, path, mode, recursive) })
}

// SetAttributes makes these all the extended attributes "user.*" of a file or
// directory.
func (s *Server) SetAttributes(ctx context.Context, id, path string, attrs map[string]string) (info sandbox.FileInfo, err error) {
	ctx, call, err := s.begin(ctx, "file.set_attributes", about("sandbox", id))
	if err != nil {
		return info, err
	}
	defer call.end(&err)
	call.changes(fileChange{Path: path, Attributes: attrs})
	if err := firstError(sandbox.ValidateFilePath("path", path), sandbox.ValidateAttributes("attributes", attrs)); err != nil {
		return info, err
	}
	err = s.inside(ctx, id, func() (err error) { info, err = s.node.SetAttributes(ctx, id, path, attrs); return err })
	return info, err
}

// ChangeOwner gives a file to a user.
func (s *Server) ChangeOwner(ctx context.Context, id, path, user string, recursive bool) (err error) {
	ctx, call, err := s.begin(ctx, "file.chown", about("sandbox", id))
	if err != nil {
		return err
	}
	defer call.end(&err)
	call.changes(fileChange{Path: path, Owner: user, Recursive: recursive})
	if err := sandbox.ValidateFilePath("path", path); err != nil {
		return err
	}
	if user == "" {
		return sandbox.InvalidField("user", "is missing; name, uid, name:group or uid:gid is accepted")
	}
	if err := sandbox.ValidateUser("user", user); err != nil {
		return err
	}
	return s.inside(ctx, id, func() error { return s.node.Chown(ctx, id, path, user, recursive) })
}

// WatchFiles tells what changes at a path until the caller leaves.
func (s *Server) WatchFiles(ctx context.Context, id, path string, recursive bool, sink func(sandbox.FileChange) error) (err error) {
	ctx, call, err := s.begin(ctx, "file.watch", about("sandbox", id))
	if err != nil {
		return err
	}
	defer call.end(&err)
	if err := sandbox.ValidateFilePath("path", path); err != nil {
		return err
	}
	return s.inside(ctx, id, func() error {
		for change, err := range s.node.Watch(ctx, id, path, recursive) {
			if err == nil {
				err = sink(change)
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
}
