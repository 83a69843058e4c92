package server

import (
	"context"
	"errors"
	"slices"
	"strings"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/wire"
)

type templateService struct{ *Server }

// findTemplate reads "name" or "name@version" and on a miss says what was
// probably meant.
func (s *Server) findTemplate(ctx context.Context, field, ref string) (sandbox.Template, error) {
	name, version, err := sandbox.ParseTemplateRef(field, ref)
	if err != nil {
		return sandbox.Template{}, err
	}
	tpl, err := s.store.GetTemplate(ctx, name, version)
	if errors.Is(err, sandbox.ErrNotFound) {
		return tpl, s.noTemplate(ctx, ref, name)
	}
	return tpl, err
}

func (s *Server) noTemplate(ctx context.Context, ref, name string) error {
	e := &sandbox.Error{Class: sandbox.NotFound, Msg: "no template '" + ref + "'", Hint: `"cove template ls" lists them`}
	tpls, err := s.store.ListTemplates(ctx, "")
	if err != nil {
		return e
	}
	var names []string
	for _, tpl := range tpls {
		if tpl.Name == name { // it is the version that is not there
			return e.WithHint(`"cove template ls %s" lists its versions; the newest is %s`, name, tpl.Ref())
		}
		names = append(names, tpl.Name)
	}
	if did := sandbox.DidYouMean(name, names); did != "" {
		e.Msg += "; " + did
	}
	return e
}

func (s templateService) Get(ctx context.Context, r *connect.Request[covev1.GetTemplateRequest]) (*connect.Response[covev1.GetTemplateResponse], error) {
	tpl, err := s.findTemplate(ctx, "name", r.Msg.Name)
	if err != nil {
		return nil, err
	}
	p, err := s.protoTemplate(ctx, tpl)
	return answer(&covev1.GetTemplateResponse{Template: p}, err)
}

// protoTemplate is a template with the size of its snapshot.
func (s *Server) protoTemplate(ctx context.Context, tpl sandbox.Template) (*covev1.Template, error) {
	p := wire.Template(tpl)
	snap, err := s.store.GetSnapshot(ctx, tpl.Snapshot)
	if err != nil && !errors.Is(err, sandbox.ErrNotFound) { // deleted since it was listed
		return nil, err
	}
	p.Size = snap.Content.Size
	return p, nil
}

func (s templateService) List(ctx context.Context, r *connect.Request[covev1.ListTemplatesRequest]) (*connect.Response[covev1.ListTemplatesResponse], error) {
	if r.Msg.Name != "" {
		if err := sandbox.ValidateTemplateName("name", r.Msg.Name); err != nil {
			return nil, err
		}
	}
	tpls, err := s.store.ListTemplates(ctx, r.Msg.Name)
	if err != nil {
		return nil, err
	}
	if r.Msg.Name != "" && len(tpls) == 0 {
		return nil, s.noTemplate(ctx, r.Msg.Name, r.Msg.Name)
	}
	out := &covev1.ListTemplatesResponse{}
	for _, tpl := range tpls {
		p, err := s.protoTemplate(ctx, tpl)
		if err != nil {
			return nil, err
		}
		out.Templates = append(out.Templates, p)
	}
	return connect.NewResponse(out), nil
}

// Delete forgets versions with their snapshots. Sandboxes made of them go on.
func (s templateService) Delete(ctx context.Context, r *connect.Request[covev1.DeleteTemplateRequest]) (*connect.Response[covev1.DeleteTemplateResponse], error) {
	name, version, err := sandbox.ParseTemplateRef("name", r.Msg.Name)
	if err != nil {
		return nil, err
	}
	gone, err := s.store.DeleteTemplate(ctx, name, version)
	if errors.Is(err, sandbox.ErrNotFound) {
		return nil, s.noTemplate(ctx, r.Msg.Name, name)
	}
	if err != nil {
		return nil, err
	}
	s.content.want()
	out := &covev1.DeleteTemplateResponse{}
	for _, tpl := range gone {
		out.Versions = append(out.Versions, tpl.Version)
	}
	slices.Sort(out.Versions)
	return connect.NewResponse(out), nil
}

// buildMark is the version a sandbox carries while a template is built in it.
// No request can ask for version 0, so nobody else's sandbox has it.
const buildMark = "@0"

// isBuild says whether a sandbox is one that a template was being built in.
func isBuild(sb sandbox.Sandbox) bool { return strings.HasSuffix(sb.Spec.Template, buildMark) }
