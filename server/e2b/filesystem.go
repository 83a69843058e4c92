package e2b

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/server/e2b/envd/filesystem"
)

// files is the agent's filesystem service. E2B's agent is root inside and gives what
// it makes to the caller's user: code written for E2B writes to /app without asking
// whose it is. So it is done here.
type files struct{ *dialect }

func (s files) Stat(ctx context.Context, r *connect.Request[filesystem.StatRequest]) (*connect.Response[filesystem.StatResponse], error) {
	p, err := s.resolve(ctx, r.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	info, err := s.server.StatFile(ctx, meant(ctx).sandbox.ID, p)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&filesystem.StatResponse{Entry: s.entry(ctx, info)}), nil
}

// mostLinks is how many links of one list are followed: each is a call.
const mostLinks = 1000

// entry describes a file. A link is described as what it leads to, with the name
// of the link.
func (s files) entry(ctx context.Context, info sandbox.FileInfo) *filesystem.EntryInfo {
	e := entryOf(info)
	if info.Type != sandbox.Symlink {
		return e
	}
	target := info.Target
	if !path.IsAbs(target) {
		target = path.Join(path.Dir(info.Path), target)
	}
	e.IsSymlink, e.SymlinkTarget = true, &target
	for range 8 { // as deep as anybody makes them; a loop stays a link
		to, err := s.server.StatFile(ctx, meant(ctx).sandbox.ID, target)
		if err != nil {
			return e
		}
		if to.Type != sandbox.Symlink {
			e.Type, e.Size, e.Mode = typeOf(to.Type), to.Size, to.Mode
			return e
		}
		next := to.Target
		if !path.IsAbs(next) {
			next = path.Join(path.Dir(target), next)
		}
		target = next
	}
	return e
}

func entryOf(info sandbox.FileInfo) *filesystem.EntryInfo {
	return &filesystem.EntryInfo{Name: info.Name, Type: typeOf(info.Type), Path: info.Path, Size: info.Size, Mode: info.Mode, Permissions: permissions(info),
		Owner: name(info.Owner, info.UID), Group: name(info.Group, info.GID), ModifiedTime: timestamppb.New(info.ModTime), Metadata: metadataOf(info)}
}

func name(name string, id uint32) string {
	if name == "" {
		return fmt.Sprint(id)
	}
	return name
}

func typeOf(t sandbox.FileType) filesystem.FileType {
	switch t {
	case sandbox.Regular:
		return filesystem.FileType_FILE_TYPE_FILE
	case sandbox.Directory:
		return filesystem.FileType_FILE_TYPE_DIRECTORY
	case sandbox.Symlink:
		return filesystem.FileType_FILE_TYPE_SYMLINK
	}
	return filesystem.FileType_FILE_TYPE_UNSPECIFIED
}

// permissions are as Go writes them, which is what E2B's agent does.
func permissions(info sandbox.FileInfo) string {
	m := fs.FileMode(info.Mode & 0o777)
	switch info.Type {
	case sandbox.Directory:
		m |= fs.ModeDir
	case sandbox.Symlink:
		m |= fs.ModeSymlink
	}
	return m.String()
}

func (s files) ListDir(ctx context.Context, r *connect.Request[filesystem.ListDirRequest]) (*connect.Response[filesystem.ListDirResponse], error) {
	p, err := s.directory(ctx, r.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	list, truncated, err := s.server.ListFiles(ctx, meant(ctx).sandbox.ID, p, sandbox.ListOptions{Depth: int(min(r.Msg.GetDepth(), 1<<20)), Attributes: true})
	if err != nil {
		return nil, err
	}
	if truncated {
		return nil, &sandbox.Error{Class: sandbox.TooLarge, Field: "path", Msg: fmt.Sprintf("more than %d entries", len(list)), Hint: "list a smaller directory, or less deep"}
	}
	out := &filesystem.ListDirResponse{}
	links := 0
	for _, info := range list {
		if info.Type == sandbox.Symlink && links < mostLinks {
			links++
			out.Entries = append(out.Entries, s.entry(ctx, info))
			continue
		}
		out.Entries = append(out.Entries, entryOf(info))
	}
	return connect.NewResponse(out), nil
}

// directory is the path of one that is there.
func (s files) directory(ctx context.Context, p string) (string, error) {
	p, err := s.resolve(ctx, p)
	if err != nil {
		return "", err
	}
	info, err := s.server.StatFile(ctx, meant(ctx).sandbox.ID, p)
	if err != nil {
		return "", err
	}
	if t := s.entry(ctx, info).Type; t != filesystem.FileType_FILE_TYPE_DIRECTORY {
		return "", sandbox.InvalidField("path", "path is not a directory: %.200s", p)
	}
	return p, nil
}

func (s files) MakeDir(ctx context.Context, r *connect.Request[filesystem.MakeDirRequest]) (*connect.Response[filesystem.MakeDirResponse], error) {
	p, err := s.resolve(ctx, r.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	info, err := s.server.StatFile(ctx, meant(ctx).sandbox.ID, p)
	switch {
	case err == nil && s.entry(ctx, info).Type == filesystem.FileType_FILE_TYPE_DIRECTORY:
		return nil, &sandbox.Error{Class: sandbox.AlreadyExists, Msg: "directory already exists: " + p}
	case err == nil:
		return nil, sandbox.InvalidField("path", "path already exists but it is not a directory: %.200s", p)
	case !errors.Is(err, sandbox.ErrNotFound) || gone(err):
		return nil, err
	}
	if err := s.makeDirectories(ctx, p); err != nil {
		return nil, err
	}
	if info, err = s.server.StatFile(ctx, meant(ctx).sandbox.ID, p); err != nil {
		return nil, err
	}
	return connect.NewResponse(&filesystem.MakeDirResponse{Entry: entryOf(info)}), nil
}

// makeDirectories makes a directory and those above it that are missing, for the
// caller's user.
func (d *dialect) makeDirectories(ctx context.Context, p string) error {
	_, err := d.server.MakeDirectory(ctx, meant(ctx).sandbox.ID, p, sandbox.WriteOptions{User: d.owner(ctx), Parents: true, Mode: 0o755})
	return err
}

func (s files) Move(ctx context.Context, r *connect.Request[filesystem.MoveRequest]) (*connect.Response[filesystem.MoveResponse], error) {
	from, err := s.resolve(ctx, r.Msg.GetSource())
	if err != nil {
		return nil, err
	}
	to, err := s.resolve(ctx, r.Msg.GetDestination())
	if err != nil {
		return nil, err
	}
	if _, err := s.server.StatFile(ctx, meant(ctx).sandbox.ID, from); err != nil {
		return nil, err
	}
	if err := s.makeDirectories(ctx, path.Dir(to)); err != nil {
		return nil, err
	}
	info, err := s.server.MoveFile(ctx, meant(ctx).sandbox.ID, from, to)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&filesystem.MoveResponse{Entry: s.entry(ctx, info)}), nil
}

// Remove takes away what is there and does not mind what is not.
func (s files) Remove(ctx context.Context, r *connect.Request[filesystem.RemoveRequest]) (*connect.Response[filesystem.RemoveResponse], error) {
	p, err := s.resolve(ctx, r.Msg.GetPath())
	if err == nil {
		err = s.server.RemoveFile(ctx, meant(ctx).sandbox.ID, p, true)
	}
	if errors.Is(err, sandbox.ErrNotFound) && !gone(err) {
		err = nil
	}
	return connect.NewResponse(&filesystem.RemoveResponse{}), err
}
