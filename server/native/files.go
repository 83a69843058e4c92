package native

import (
	"context"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/server"
	"github.com/cove-sandbox/cove/wire"
)

type files struct{ *server.Server }

func (s files) Read(ctx context.Context, r *connect.Request[covev1.ReadFileRequest]) (*connect.Response[covev1.ReadFileResponse], error) {
	data, info, err := s.ReadFile(ctx, r.Msg.SandboxId, r.Msg.Path, r.Msg.Offset, r.Msg.Length)
	return answer(&covev1.ReadFileResponse{Data: data, Info: wire.FileInfo(info)}, err)
}

func (s files) Write(ctx context.Context, r *connect.Request[covev1.WriteFileRequest]) (*connect.Response[covev1.WriteFileResponse], error) {
	m := r.Msg
	info, err := s.WriteFile(ctx, m.SandboxId, m.Path, m.Data, sandbox.WriteOptions{User: m.User, Mode: m.Mode, Atomic: m.Atomic, Append: m.Append, Parents: m.Parents})
	return answer(&covev1.WriteFileResponse{Info: wire.FileInfo(info)}, err)
}

func (s files) Stat(ctx context.Context, r *connect.Request[covev1.StatFileRequest]) (*connect.Response[covev1.StatFileResponse], error) {
	info, err := s.StatFile(ctx, r.Msg.SandboxId, r.Msg.Path)
	return answer(&covev1.StatFileResponse{Info: wire.FileInfo(info)}, err)
}

func (s files) List(ctx context.Context, r *connect.Request[covev1.ListFilesRequest]) (*connect.Response[covev1.ListFilesResponse], error) {
	list, truncated, err := s.ListFiles(ctx, r.Msg.SandboxId, r.Msg.Path, sandbox.ListOptions{Depth: int(r.Msg.Depth), Limit: int(r.Msg.Limit), Attributes: r.Msg.Attributes})
	return answer(&covev1.ListFilesResponse{Files: each(list, wire.FileInfo), Truncated: truncated}, err)
}

func (s files) Mkdir(ctx context.Context, r *connect.Request[covev1.MkdirRequest]) (*connect.Response[covev1.MkdirResponse], error) {
	m := r.Msg
	info, err := s.MakeDirectory(ctx, m.SandboxId, m.Path, sandbox.WriteOptions{User: m.User, Mode: m.Mode, Parents: m.Parents})
	return answer(&covev1.MkdirResponse{Info: wire.FileInfo(info)}, err)
}

func (s files) Move(ctx context.Context, r *connect.Request[covev1.MoveFileRequest]) (*connect.Response[covev1.MoveFileResponse], error) {
	info, err := s.MoveFile(ctx, r.Msg.SandboxId, r.Msg.From, r.Msg.To)
	return answer(&covev1.MoveFileResponse{Info: wire.FileInfo(info)}, err)
}

func (s files) Remove(ctx context.Context, r *connect.Request[covev1.RemoveFileRequest]) (*connect.Response[covev1.RemoveFileResponse], error) {
	return answer(&covev1.RemoveFileResponse{}, s.RemoveFile(ctx, r.Msg.SandboxId, r.Msg.Path, r.Msg.Recursive))
}

func (s files) Chmod(ctx context.Context, r *connect.Request[covev1.ChmodRequest]) (*connect.Response[covev1.ChmodResponse], error) {
	return answer(&covev1.ChmodResponse{}, s.ChangeMode(ctx, r.Msg.SandboxId, r.Msg.Path, r.Msg.Mode, r.Msg.Recursive))
}

func (s files) Chown(ctx context.Context, r *connect.Request[covev1.ChownRequest]) (*connect.Response[covev1.ChownResponse], error) {
	return answer(&covev1.ChownResponse{}, s.ChangeOwner(ctx, r.Msg.SandboxId, r.Msg.Path, r.Msg.User, r.Msg.Recursive))
}

func (s files) SetAttributes(ctx context.Context, r *connect.Request[covev1.SetAttributesRequest]) (*connect.Response[covev1.SetAttributesResponse], error) {
	info, err := s.Server.SetAttributes(ctx, r.Msg.SandboxId, r.Msg.Path, r.Msg.Attributes)
	return answer(&covev1.SetAttributesResponse{Info: wire.FileInfo(info)}, err)
}

func (s files) Watch(ctx context.Context, r *connect.Request[covev1.WatchFilesRequest], out *connect.ServerStream[covev1.WatchFilesEvent]) error {
	return s.WatchFiles(ctx, r.Msg.SandboxId, r.Msg.Path, r.Msg.Recursive, func(c sandbox.FileChange) error { return out.Send(wire.FileChange(c)) })
}
