package server

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/cove-sandbox/cove/sandbox"
)

// findTemplate reads "name", "name@version" or "name:tag" and on a miss says what
// was probably meant.
func (s *Server) findTemplate(ctx context.Context, field, ref string) (sandbox.Template, error) {
	r, err := sandbox.ParseTemplateRef(field, ref)
	if err != nil {
		return sandbox.Template{}, err
	}
	if r.Tag != "" {
		all, err := s.store.ListTemplates(ctx, r.Name)
		if err != nil {
			return sandbox.Template{}, err
		}
		for _, tpl := range all {
			if slices.Contains(tpl.Tags, r.Tag) {
				return tpl, nil
			}
		}
		return sandbox.Template{}, s.noTemplate(ctx, ref, r.Name)
	}
	tpl, err := s.store.GetTemplate(ctx, r.Name, r.Version)
	if errors.Is(err, sandbox.ErrNotFound) {
		return tpl, s.noTemplate(ctx, ref, r.Name)
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

// SizedTemplate is a template with the size of its snapshot.
type SizedTemplate struct {
	sandbox.Template
	Size int64
}

// GetTemplate finds a version by "name" (the newest), "name@version" or "name:tag".
func (s *Server) GetTemplate(ctx context.Context, ref string) (tpl SizedTemplate, err error) {
	ctx, call, err := s.begin(ctx, "template.get", about("name", ref))
	if err != nil {
		return tpl, err
	}
	defer call.end(&err)
	found, err := s.findTemplate(ctx, "name", ref)
	if err != nil {
		return tpl, err
	}
	return s.sized(ctx, found)
}

func (s *Server) sized(ctx context.Context, tpl sandbox.Template) (SizedTemplate, error) {
	snap, err := s.store.GetSnapshot(ctx, tpl.Snapshot)
	if errors.Is(err, sandbox.ErrNotFound) {
		err = nil // deleted since it was listed
	}
	return SizedTemplate{tpl, snap.Content.Size}, err
}

// ListTemplates lists the newest version of each, or all versions of one.
func (s *Server) ListTemplates(ctx context.Context, name string) (list []SizedTemplate, err error) {
	ctx, call, err := s.begin(ctx, "template.list", about("name", name))
	if err != nil {
		return nil, err
	}
	defer call.end(&err)
	if name != "" {
		if err := sandbox.ValidateTemplateName("name", name); err != nil {
			return nil, err
		}
	}
	tpls, err := s.store.ListTemplates(ctx, name)
	if err != nil {
		return nil, err
	}
	if name != "" && len(tpls) == 0 {
		return nil, s.noTemplate(ctx, name, name)
	}
	for _, tpl := range tpls {
		one, err := s.sized(ctx, tpl)
		if err != nil {
			return nil, err
		}
		list = append(list, one)
	}
	return list, nil
}

// DeleteTemplate forgets a version, or all, with their snapshots, and says which.
// Sandboxes made of them go on.
func (s *Server) DeleteTemplate(ctx context.Context, ref string) (versions []int64, err error) {
	ctx, call, err := s.begin(ctx, "template.delete", about("name", ref))
	if err != nil {
		return nil, err
	}
	defer call.end(&err)
	r, err := sandbox.ParseTemplateRef("name", ref)
	if err != nil {
		return nil, err
	}
	if r.Tag != "" {
		tpl, err := s.findTemplate(ctx, "name", ref)
		if err != nil {
			return nil, err
		}
		r.Version = tpl.Version
	}
	gone, err := s.store.DeleteTemplate(ctx, r.Name, r.Version)
	if errors.Is(err, sandbox.ErrNotFound) {
		return nil, s.noTemplate(ctx, ref, r.Name)
	}
	if err != nil {
		return nil, err
	}
	s.content.want()
	for _, tpl := range gone {
		versions = append(versions, tpl.Version)
	}
	slices.Sort(versions)
	return versions, nil
}

// maxTags of one version of a template.
const maxTags = 100

// TagTemplate has a version of a template carry tags, which no other version of its
// name then does, and returns it.
func (s *Server) TagTemplate(ctx context.Context, ref string, tags []string) (tpl SizedTemplate, err error) {
	ctx, call, err := s.begin(ctx, "template.tag", about("name", ref))
	if err != nil {
		return tpl, err
	}
	defer call.end(&err)
	if err := validTags(tags); err != nil {
		return tpl, err
	}
	found, err := s.findTemplate(ctx, "name", ref)
	if err != nil {
		return tpl, err
	}
	then := slices.Concat(found.Tags, tags)
	slices.Sort(then)
	if n := len(slices.Compact(then)); n > maxTags {
		return tpl, sandbox.InvalidField("tags", "the version would have %d tags; at most %d are accepted", n, maxTags)
	}
	if err := s.store.TagTemplate(ctx, found.Name, found.Version, tags); err != nil {
		return tpl, err
	}
	if found, err = s.store.GetTemplate(ctx, found.Name, found.Version); err != nil {
		return tpl, err
	}
	return s.sized(ctx, found)
}

// UntagTemplate takes tags off whichever version of a template carries them.
func (s *Server) UntagTemplate(ctx context.Context, name string, tags []string) (err error) {
	ctx, call, err := s.begin(ctx, "template.untag", about("name", name))
	if err != nil {
		return err
	}
	defer call.end(&err)
	if err := firstError(validTags(tags), sandbox.ValidateTemplateName("name", name)); err != nil {
		return err
	}
	err = s.store.TagTemplate(ctx, name, 0, tags)
	if errors.Is(err, sandbox.ErrNotFound) {
		return s.noTemplate(ctx, name, name)
	}
	return err
}

func validTags(tags []string) error {
	if len(tags) == 0 || len(tags) > maxTags {
		return sandbox.InvalidField("tags", "%d tags; 1 to %d are accepted", len(tags), maxTags)
	}
	for _, tag := range tags {
		if err := sandbox.ValidateTemplateTag("tags", tag); err != nil {
			return err
		}
	}
	return nil
}

// buildMark is the version a sandbox carries while a template is built in it.
// No request can ask for version 0, so nobody else's sandbox has it.
const buildMark = "@0"

// isBuild says whether a sandbox is one that a template was being built in.
func isBuild(sb sandbox.Sandbox) bool { return strings.HasSuffix(sb.Spec.Template, buildMark) }
