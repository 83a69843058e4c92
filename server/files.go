package server

import (
	"context"
	"fmt"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/wire"
)

type fileService struct{ *Server }

const (
	maxFile  = 16 << 20 // content of one Read or Write
	maxList  = 10_000   // entries of one List
	maxDepth = 256
	maxMode  = 0o7777
)

func (s fileService) Read(ctx context.Context, r *connect.Request[covev1.ReadFileRequest]) (*connect.Response[covev1.ReadFileResponse], error) {
	m := r.Msg
	if err := sandbox.ValidateFilePath("path", m.Path); err != nil {
		return nil, err
	}
	if err := validOffset(m.Offset); err != nil {
		return nil, err
	}
	if m.Length < 0 {
		return nil, sandbox.InvalidField("length", "%d is not accepted; 1 to %d is, or 0 for all", m.Length, maxFile)
	}
	if m.Length > maxFile {
		return nil, tooLargeFile("length", m.Length, "GET")
	}
	want := m.Length
	if want == 0 {
		want = maxFile
	}
	out := &covev1.ReadFileResponse{}
	return answer(out, s.withGuest(ctx, m.SandboxId, func(g Guest) error {
		data, info, err := g.ReadFile(ctx, m.Path, m.Offset, want)
		if err != nil {
			return err
		}
		if m.Length == 0 && info.Size-m.Offset > maxFile { // half a file must not pass for a whole one
			return tooLargeFile("length", info.Size-m.Offset, "GET")
		}
		out.Data, out.Info = data, wire.FileInfo(info)
		return nil
	}))
}

func tooLargeFile(field string, n int64, method string) error {
	return &sandbox.Error{Class: sandbox.TooLarge, Field: field,
		Msg:  fmt.Sprintf("%s in one call; at most %s are accepted", sandbox.FormatSize(n), sandbox.FormatSize(maxFile)),
		Hint: "larger content goes over " + method + " /v1/sandboxes/{id}/files?path=…"}
}

func (s fileService) Write(ctx context.Context, r *connect.Request[covev1.WriteFileRequest]) (*connect.Response[covev1.WriteFileResponse], error) {
	m := r.Msg
	opt := sandbox.WriteOptions{User: m.User, Mode: m.Mode, Atomic: m.Atomic, Append: m.Append, Parents: m.Parents}
	if err := validWrite(m.Path, opt); err != nil {
		return nil, err
	}
	if len(m.Data) > maxFile {
		return nil, tooLargeFile("data", int64(len(m.Data)), "PUT")
	}
	out := &covev1.WriteFileResponse{}
	return answer(out, s.withGuest(ctx, m.SandboxId, func(g Guest) error {
		info, err := g.WriteFile(ctx, m.Path, m.Data, opt)
		out.Info = wire.FileInfo(info)
		return err
	}))
}

func validWrite(path string, opt sandbox.WriteOptions) error {
	if err := sandbox.ValidateFilePath("path", path); err != nil {
		return err
	}
	if err := validMode(opt.Mode); err != nil {
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

func (s fileService) Stat(ctx context.Context, r *connect.Request[covev1.StatFileRequest]) (*connect.Response[covev1.StatFileResponse], error) {
	if err := sandbox.ValidateFilePath("path", r.Msg.Path); err != nil {
		return nil, err
	}
	out := &covev1.StatFileResponse{}
	return answer(out, s.withGuest(ctx, r.Msg.SandboxId, func(g Guest) error {
		info, err := g.Stat(ctx, r.Msg.Path)
		out.Info = wire.FileInfo(info)
		return err
	}))
}

func (s fileService) List(ctx context.Context, r *connect.Request[covev1.ListFilesRequest]) (*connect.Response[covev1.ListFilesResponse], error) {
	m := r.Msg
	if err := sandbox.ValidateFilePath("path", m.Path); err != nil {
		return nil, err
	}
	if m.Depth < 0 || m.Depth > maxDepth {
		return nil, sandbox.InvalidField("depth", "%d is not accepted; 1 to %d is, or 0 for 1", m.Depth, maxDepth)
	}
	if m.Limit < 0 || m.Limit > maxList {
		return nil, sandbox.InvalidField("limit", "%d is not accepted; 1 to %d is, or 0 for %d", m.Limit, maxList, maxList)
	}
	opt := guest.ListOptions{Depth: int(m.Depth), Limit: int(m.Limit)}
	if opt.Depth == 0 {
		opt.Depth = 1
	}
	if opt.Limit == 0 {
		opt.Limit = maxList
	}
	out := &covev1.ListFilesResponse{}
	return answer(out, s.withGuest(ctx, m.SandboxId, func(g Guest) error {
		files, truncated, err := g.List(ctx, m.Path, opt)
		for _, f := range files {
			out.Files = append(out.Files, wire.FileInfo(f))
		}
		out.Truncated = truncated
		return err
	}))
}

func (s fileService) Mkdir(ctx context.Context, r *connect.Request[covev1.MkdirRequest]) (*connect.Response[covev1.MkdirResponse], error) {
	m := r.Msg
	opt := sandbox.WriteOptions{User: m.User, Mode: m.Mode, Parents: m.Parents}
	if err := validWrite(m.Path, opt); err != nil {
		return nil, err
	}
	out := &covev1.MkdirResponse{}
	return answer(out, s.withGuest(ctx, m.SandboxId, func(g Guest) error {
		info, err := g.Mkdir(ctx, m.Path, opt)
		out.Info = wire.FileInfo(info)
		return err
	}))
}

func (s fileService) Move(ctx context.Context, r *connect.Request[covev1.MoveFileRequest]) (*connect.Response[covev1.MoveFileResponse], error) {
	if err := sandbox.ValidateFilePath("from", r.Msg.From); err != nil {
		return nil, err
	}
	if err := sandbox.ValidateFilePath("to", r.Msg.To); err != nil {
		return nil, err
	}
	out := &covev1.MoveFileResponse{}
	return answer(out, s.withGuest(ctx, r.Msg.SandboxId, func(g Guest) error {
		info, err := g.Move(ctx, r.Msg.From, r.Msg.To)
		out.Info = wire.FileInfo(info)
		return err
	}))
}

func (s fileService) Remove(ctx context.Context, r *connect.Request[covev1.RemoveFileRequest]) (*connect.Response[covev1.RemoveFileResponse], error) {
	if err := sandbox.ValidateFilePath("path", r.Msg.Path); err != nil {
		return nil, err
	}
	return answer(&covev1.RemoveFileResponse{}, s.withGuest(ctx, r.Msg.SandboxId, func(g Guest) error {
		return g.Remove(ctx, r.Msg.Path, r.Msg.Recursive)
	}))
}

func (s fileService) Chmod(ctx context.Context, r *connect.Request[covev1.ChmodRequest]) (*connect.Response[covev1.ChmodResponse], error) {
	if err := sandbox.ValidateFilePath("path", r.Msg.Path); err != nil {
		return nil, err
	}
	if err := validMode(r.Msg.Mode); err != nil {
		return nil, err
	}
	return answer(&covev1.ChmodResponse{}, s.withGuest(ctx, r.Msg.SandboxId, func(g Guest) error {
		return g.Chmod(ctx, r.Msg.Path, r.Msg.Mode, r.Msg.Recursive)
	}))
}

func (s fileService) Chown(ctx context.Context, r *connect.Request[covev1.ChownRequest]) (*connect.Response[covev1.ChownResponse], error) {
	if err := sandbox.ValidateFilePath("path", r.Msg.Path); err != nil {
		return nil, err
	}
	if r.Msg.User == "" {
		return nil, sandbox.InvalidField("user", "is missing; name, uid, name:group or uid:gid is accepted")
	}
	if err := sandbox.ValidateUser("user", r.Msg.User); err != nil {
		return nil, err
	}
	return answer(&covev1.ChownResponse{}, s.withGuest(ctx, r.Msg.SandboxId, func(g Guest) error {
		return g.Chown(ctx, r.Msg.Path, r.Msg.User, r.Msg.Recursive)
	}))
}

func (s fileService) Watch(ctx context.Context, r *connect.Request[covev1.WatchFilesRequest], out *connect.ServerStream[covev1.WatchFilesEvent]) error {
	if err := sandbox.ValidateFilePath("path", r.Msg.Path); err != nil {
		return err
	}
	return s.withGuest(ctx, r.Msg.SandboxId, func(g Guest) error {
		return g.Watch(ctx, r.Msg.Path, r.Msg.Recursive, func(c sandbox.FileChange) error {
			return out.Send(wire.FileChange(c))
		})
	})
}
