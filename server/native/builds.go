package native

import (
	"context"
	"errors"
	"net/http"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/build"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/server"
	"github.com/cove-sandbox/cove/wire"
)

// Build streams what happens; the last event carries the build.
func (s images) Build(ctx context.Context, r *connect.Request[covev1.BuildImageRequest], out *connect.ServerStream[covev1.BuildImageEvent]) error {
	req, err := buildFrom(r.Msg)
	if err != nil {
		return err
	}
	b, err := s.BuildImage(ctx, req, sendBuild(out))
	if err != nil {
		return err
	}
	return out.Send(&covev1.BuildImageEvent{Build: imageBuild(b)})
}

func (s images) StartBuild(ctx context.Context, r *connect.Request[covev1.BuildImageRequest]) (*connect.Response[covev1.StartBuildResponse], error) {
	req, err := buildFrom(r.Msg)
	if err != nil {
		return nil, err
	}
	b, err := s.StartImageBuild(ctx, req)
	return answer(&covev1.StartBuildResponse{Build: imageBuild(b)}, err)
}

func (s images) GetBuild(ctx context.Context, r *connect.Request[covev1.GetBuildRequest]) (*connect.Response[covev1.GetBuildResponse], error) {
	b, err := s.GetImageBuild(ctx, r.Msg.Id)
	return answer(&covev1.GetBuildResponse{Build: imageBuild(b)}, err)
}

func (s images) FollowBuild(ctx context.Context, r *connect.Request[covev1.FollowBuildRequest], out *connect.ServerStream[covev1.BuildImageEvent]) error {
	b, err := s.FollowImageBuild(ctx, r.Msg.Id, int(r.Msg.Offset), sendBuild(out))
	if err != nil {
		return err
	}
	return out.Send(&covev1.BuildImageEvent{Build: imageBuild(b)})
}

func (s images) CancelBuild(ctx context.Context, r *connect.Request[covev1.CancelBuildRequest]) (*connect.Response[covev1.CancelBuildResponse], error) {
	b, err := s.CancelImageBuild(ctx, r.Msg.Id)
	return answer(&covev1.CancelBuildResponse{Build: imageBuild(b)}, err)
}

func (s images) HasFiles(ctx context.Context, r *connect.Request[covev1.HasFilesRequest]) (*connect.Response[covev1.HasFilesResponse], error) {
	has, err := s.HasBuildFiles(ctx, r.Msg.Key)
	return answer(&covev1.HasFilesResponse{Has: has}, err)
}

// Push streams progress; the last event carries the reference.
func (s images) Push(ctx context.Context, r *connect.Request[covev1.PushImageRequest], out *connect.ServerStream[covev1.PushImageEvent]) error {
	m := r.Msg
	req := server.PushRequest{Name: m.Name, Reference: m.Reference, As: sandbox.RegistryAccess{Username: m.Username, Password: m.Password}}
	ref, err := s.PushImage(ctx, req, func(p sandbox.Progress) error {
		return out.Send(&covev1.PushImageEvent{Step: p.Step, Done: p.Done, Total: p.Total})
	})
	if err != nil {
		return err
	}
	return out.Send(&covev1.PushImageEvent{Step: "done", Reference: ref})
}

// putBuildFiles is PUT /v1/build-files/{key} with a tar.
func (d *dialect) putBuildFiles(w http.ResponseWriter, r *http.Request) error {
	return writeMessage(w, &covev1.HasFilesResponse{Has: true}, d.server.PutBuildFiles(r.Context(), r.PathValue("key"), content(w, r)))
}

func sendBuild(out *connect.ServerStream[covev1.BuildImageEvent]) func(server.ImageBuildEvent) error {
	return func(ev server.ImageBuildEvent) error {
		return out.Send(&covev1.BuildImageEvent{At: wire.Time(ev.At), Kind: ev.Kind, Step: int32(ev.Step), Total: int32(ev.Total), Stage: ev.Stage,
			Line: int32(ev.Line), Text: ev.Text, Stderr: ev.Stream == sandbox.Stderr, Took: wire.Duration(ev.Took)})
	}
}

func buildFrom(m *covev1.BuildImageRequest) (r server.ImageBuildRequest, err error) {
	r = server.ImageBuildRequest{Name: m.Name, Tags: m.Tags, Shared: m.Shared, Dockerfile: []byte(m.Dockerfile), From: m.From, Context: m.Context,
		IgnoreFile: m.IgnoreFile, ContextPartial: m.ContextPartial, Args: m.Args, Target: m.Target, Secrets: m.SecretValues, NoCache: m.NoCache}
	for _, s := range m.Steps {
		r.Steps = append(r.Steps, build.Step{Op: s.Op, Args: s.Args, Files: s.Files, User: s.User, Mode: s.Mode, Force: s.Force})
	}
	if r.Network, err = wire.NetworkFrom(m.Network); err != nil {
		return r, err
	}
	if r.Resources, err = wire.ResourcesFrom(m.Resources); err != nil {
		return r, err
	}
	r.Timeout, err = wire.DurationFrom("timeout", m.Timeout)
	return r, err
}

func imageBuild(b server.ImageBuild) *covev1.ImageBuild {
	p := &covev1.ImageBuild{Id: b.ID, State: string(b.State), Name: b.Name, Steps: int32(b.Steps), Cached: int32(b.Cached),
		CreatedAt: wire.Time(b.CreatedAt), EndedAt: wire.Time(b.EndedAt)}
	if b.State == server.BuildDone {
		p.Image = wire.Image(b.Image)
	}
	var e *sandbox.Error
	if errors.As(b.Err, &e) {
		p.Error, p.ErrorClass, p.ErrorField, p.ErrorHint = e.Error(), string(e.Class), e.Field, e.Hint
	}
	return p
}
