package native

import (
	"context"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/server"
	"github.com/cove-sandbox/cove/wire"
)

type templates struct{ *server.Server }

func template(t server.SizedTemplate) *covev1.Template {
	p := wire.Template(t.Template)
	p.Size = t.Size
	return p
}

func (s templates) Build(ctx context.Context, r *connect.Request[covev1.BuildTemplateRequest], out *connect.ServerStream[covev1.BuildTemplateEvent]) error {
	spec, err := wire.SpecFrom(r.Msg.Spec)
	if err != nil {
		return err
	}
	ready, err := wire.ReadinessFrom(r.Msg)
	if err != nil {
		return err
	}
	tpl, err := s.BuildTemplate(ctx, server.BuildRequest{Name: r.Msg.Name, Spec: spec, Start: r.Msg.Start, Ready: ready}, func(ev server.BuildEvent) error {
		return out.Send(&covev1.BuildTemplateEvent{Step: ev.Step, Output: ev.Output})
	})
	if err != nil {
		return err
	}
	return out.Send(&covev1.BuildTemplateEvent{Step: "done", Template: template(tpl)})
}

func (s templates) Get(ctx context.Context, r *connect.Request[covev1.GetTemplateRequest]) (*connect.Response[covev1.GetTemplateResponse], error) {
	tpl, err := s.GetTemplate(ctx, r.Msg.Name)
	return answer(&covev1.GetTemplateResponse{Template: template(tpl)}, err)
}

func (s templates) List(ctx context.Context, r *connect.Request[covev1.ListTemplatesRequest]) (*connect.Response[covev1.ListTemplatesResponse], error) {
	list, err := s.ListTemplates(ctx, r.Msg.Name)
	return answer(&covev1.ListTemplatesResponse{Templates: each(list, template)}, err)
}

func (s templates) Tag(ctx context.Context, r *connect.Request[covev1.TagTemplateRequest]) (*connect.Response[covev1.TagTemplateResponse], error) {
	tpl, err := s.TagTemplate(ctx, r.Msg.Name, r.Msg.Tags)
	return answer(&covev1.TagTemplateResponse{Template: template(tpl)}, err)
}

func (s templates) Untag(ctx context.Context, r *connect.Request[covev1.UntagTemplateRequest]) (*connect.Response[covev1.UntagTemplateResponse], error) {
	return answer(&covev1.UntagTemplateResponse{}, s.UntagTemplate(ctx, r.Msg.Name, r.Msg.Tags))
}

func (s templates) Delete(ctx context.Context, r *connect.Request[covev1.DeleteTemplateRequest]) (*connect.Response[covev1.DeleteTemplateResponse], error) {
	versions, err := s.DeleteTemplate(ctx, r.Msg.Name)
	return answer(&covev1.DeleteTemplateResponse{Versions: versions}, err)
}
