package e2b

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cove-sandbox/cove/internal/strangers"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/server"
)

// A template of E2B's is one of Cove's: an image that is built of steps, and a
// sandbox of it with the start command up, frozen. Its id is its name, and a build is
// a version. What has no start command is made of the image: that is faster than to
// wake what only waits.

// buildLabel names the build of a version, among the labels of its spec.
const buildLabel = "e2b.build"

// imagePrefix is of the images of templates.
const imagePrefix = "e2b-template/"

// templateName takes "name" or "name:tag" apart. E2B lets a name begin with that of
// its team, and has small letters of all.
func templateName(s string) (name, tag string, err error) {
	s = strings.ToLower(strings.TrimSpace(s))
	s = s[strings.LastIndexByte(s, '/')+1:]
	name, tag, tagged := strings.Cut(s, ":")
	if err := sandbox.ValidateTemplateName("name", name); err != nil {
		return "", "", err
	}
	if tagged {
		err = sandbox.ValidateTemplateTag("name", tag)
	}
	return name, tag, err
}

// template finds what an SDK calls by a name: with its tag, or else the version that
// has the default one, or else the newest.
func (d *dialect) template(ctx context.Context, ref string) (server.SizedTemplate, error) {
	tpl, err := d.server.GetTemplate(ctx, ref)
	if err != nil || strings.ContainsAny(ref, ":@") || slices.Contains(tpl.Tags, "default") || len(tpl.Tags) == 0 {
		return tpl, err
	}
	if by, err := d.server.GetTemplate(ctx, ref+defaultTag); err == nil {
		return by, nil
	}
	return tpl, nil
}

// requestBuild is POST /v3/templates: the name and size of a build that is begun
// with its steps.
func (d *dialect) requestBuild(w http.ResponseWriter, r *http.Request) error {
	var req struct {
		Name     string   `json:"name"`
		Alias    string   `json:"alias"` // of older SDKs
		Tags     []string `json:"tags"`
		CPUCount int64    `json:"cpuCount"`
		MemoryMB int64    `json:"memoryMB"`
	}
	if err := readJSON(r, &req); err != nil {
		return err
	}
	name, tag, err := templateName(cmp.Or(req.Name, req.Alias))
	if err != nil {
		return err
	}
	var tags []string
	for _, t := range req.Tags {
		tags = append(tags, strings.ToLower(strings.TrimSpace(t)))
	}
	if tag != "" {
		tags = append(tags, tag)
	}
	if len(tags) == 0 {
		tags = []string{strings.TrimPrefix(defaultTag, ":")}
	}
	for _, t := range tags {
		if err := sandbox.ValidateTemplateTag("tags", t); err != nil {
			return err
		}
	}
	if req.CPUCount < 0 || req.MemoryMB < 0 || req.CPUCount > 1<<20 || req.MemoryMB > 1<<30 {
		return sandbox.InvalidField("cpuCount", "%d CPUs and %d MiB are not accepted", req.CPUCount, req.MemoryMB)
	}
	b := &templateBuild{id: newBuildID(), tenant: server.CallerTenant(r.Context()), name: name, tags: tags,
		size: sandbox.Resources{MilliCPU: 1000 * req.CPUCount, Memory: req.MemoryMB * sandbox.MiB}}
	if err := d.builds.add(b, d.clock()); err != nil {
		return err
	}
	return writeJSON(w, http.StatusAccepted, map[string]any{"templateID": name, "buildID": b.id, "public": false, "names": []string{name}, "aliases": []string{name}, "tags": tags})
}

// filesLink is GET /templates/{id}/files/{hash}: whether files were given already, and
// where to give them. That address is good for an hour, for these files alone, and for
// as long as the key is.
func (d *dialect) filesLink(w http.ResponseWriter, r *http.Request) error {
	hash := r.PathValue("hash")
	has, err := d.server.HasBuildFiles(r.Context(), hash)
	if err != nil {
		return err
	}
	until := strconv.FormatInt(d.clock().Add(time.Hour).Unix(), 10)
	scheme := "http"
	if r.TLS != nil || strings.EqualFold(r.Header.Get("X-Forwarded-Proto"), "https") {
		scheme = "https"
	}
	token := d.uploads.mint(grant{hash + "-" + until, server.CallerKey(r.Context())})
	return writeJSON(w, http.StatusCreated, map[string]any{"present": has, "url": scheme + "://" + r.Host + filesPath + token})
}

const filesPath = "/e2b/build-files/"

// putBuildFiles is PUT at the address that filesLink gave.
func (d *dialect) putBuildFiles(w http.ResponseWriter, r *http.Request) {
	g, ok := d.uploads.check(r.PathValue("token"))
	hash, until, _ := cutLast(g.sandbox, "-")
	end, perr := strconv.ParseInt(until, 10, 64)
	if !ok || perr != nil || d.clock().Unix() > end {
		writeError(w, unauthenticated("the address of the upload is not one of ours, or its time is over"))
		return
	}
	ctx, err := d.server.Vouched(r.Context(), g.key, r.RemoteAddr)
	if err == nil {
		strangers.Known(ctx)
		err = d.server.PutBuildFiles(ctx, hash, content(w, r, r.Body, r.ContentLength))
	}
	if err != nil {
		writeError(w, err)
		return
	}
	w.WriteHeader(http.StatusOK)
}

func cutLast(s, sep string) (before, after string, found bool) {
	if i := strings.LastIndex(s, sep); i >= 0 {
		return s[:i], s[i+len(sep):], true
	}
	return s, "", false
}

// ofTemplate is GET /templates/aliases/{alias} and /templates/{id}/tags, which no
// pattern tells apart.
func (d *dialect) ofTemplate(w http.ResponseWriter, r *http.Request) error {
	switch {
	case r.PathValue("id") == "aliases":
		return d.templateExists(w, r)
	case r.PathValue("what") == "tags":
		return d.listTags(w, r)
	}
	return &sandbox.Error{Class: sandbox.NotFound, Msg: "no such path: " + r.URL.Path}
}

func (d *dialect) templateExists(w http.ResponseWriter, r *http.Request) error {
	name := r.PathValue("what")
	if err := d.origin(r.Context(), &sandbox.Spec{}, name); err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, map[string]any{"templateID": name, "public": false})
}

// listTemplates is GET /templates, which the CLI of E2B's asks.
func (d *dialect) listTemplates(w http.ResponseWriter, r *http.Request) error {
	list, err := d.server.ListTemplates(r.Context(), "")
	if err != nil {
		return err
	}
	out := []map[string]any{}
	for _, t := range list {
		out = append(out, templateInfo(t.Template))
	}
	return writeJSON(w, http.StatusOK, out)
}

// templateInfo is a template by its newest version.
func templateInfo(t sandbox.Template) map[string]any {
	info := versionInfo(t)
	for k, v := range map[string]any{"templateID": t.Name, "names": []string{t.Name}, "aliases": []string{t.Name}, "public": false, "buildStatus": buildReady,
		"spawnCount": 0, "buildCount": t.Version, "createdBy": nil, "lastSpawnedAt": nil} {
		info[k] = v
	}
	return info
}

// versionInfo is a version, which is a build to E2B.
func versionInfo(t sandbox.Template) map[string]any {
	res := t.Spec.Resources
	return map[string]any{"buildID": buildOf(t), "status": buildReady, "cpuCount": max(1, res.MilliCPU/1000), "memoryMB": res.Memory / sandbox.MiB, "diskSizeMB": res.Disk / sandbox.MiB,
		"createdAt": t.CreatedAt, "updatedAt": t.CreatedAt, "finishedAt": t.CreatedAt, "envdVersion": envdVersion}
}

// versions are those of the template that a path names.
func (d *dialect) versions(r *http.Request) (name string, versions []server.SizedTemplate, err error) {
	if name, _, err = templateName(r.PathValue("id")); err != nil {
		return "", nil, absent(err)
	}
	versions, err = d.server.ListTemplates(r.Context(), name)
	return name, versions, err
}

// getTemplate is GET /templates/{id}: a template with all its versions.
func (d *dialect) getTemplate(w http.ResponseWriter, r *http.Request) error {
	name, versions, err := d.versions(r)
	if err != nil {
		return err
	}
	if len(versions) == 0 {
		return &sandbox.Error{Class: sandbox.NotFound, Msg: fmt.Sprintf("template '%.100s' not found", name)}
	}
	newest := slices.MaxFunc(versions, func(a, b server.SizedTemplate) int { return cmp.Compare(a.Version, b.Version) })
	info, builds := templateInfo(newest.Template), []map[string]any{}
	for _, t := range versions {
		builds = append(builds, versionInfo(t.Template))
	}
	info["builds"] = builds
	return writeJSON(w, http.StatusOK, info)
}

// buildOf is the id of the build that made a version; one that no SDK of E2B's has
// made has one that follows from its name.
func buildOf(t sandbox.Template) string {
	return cmp.Or(t.Spec.Labels[buildLabel], fmt.Sprintf("00000000-0000-4000-8000-%012x", t.Version))
}

// deleteTemplate is DELETE /templates/{id}: a snapshot, or a template with its images
// and the builds of it that run.
func (d *dialect) deleteTemplate(w http.ResponseWriter, r *http.Request) error {
	ctx, id := r.Context(), r.PathValue("id")
	_, err := d.server.DeleteSnapshot(ctx, strings.TrimSuffix(id, defaultTag))
	if err != nil && missing(err) {
		err = d.dropTemplate(ctx, id)
	}
	if err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (d *dialect) dropTemplate(ctx context.Context, id string) error {
	name, tag, err := templateName(id)
	if err != nil {
		return absent(err)
	}
	canceled := tag == "" && d.builds.cancel(server.CallerTenant(ctx), name)
	versions, err := d.server.ListTemplates(ctx, name)
	ref := name
	if tag != "" {
		ref += ":" + tag
	}
	if err == nil {
		_, err = d.server.DeleteTemplate(ctx, ref)
	}
	if canceled && errors.Is(err, sandbox.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, t := range versions {
		if strings.HasPrefix(t.Spec.Image, imagePrefix) && (tag == "" || slices.Contains(t.Tags, tag)) {
			if err := d.server.RemoveImage(ctx, t.Spec.Image); err != nil && !missing(err) {
				d.log.Warn("the image of a deleted template stays", "image", t.Spec.Image, "err", err)
			}
		}
	}
	return nil
}

// tagNames checks tags as the SDKs give them: bare, or behind the template's name.
func tagNames(name string, given []string) (tags []string, err error) {
	for _, t := range given {
		t = strings.ToLower(strings.TrimSpace(t))
		of, tag, named := strings.Cut(t, ":")
		if !named {
			tag = t
		} else if of != name {
			return nil, sandbox.InvalidField("tags", "%.80q is no tag of %s", t, name)
		}
		if err := sandbox.ValidateTemplateTag("tags", tag); err != nil {
			return nil, err
		}
		tags = append(tags, tag)
	}
	return tags, nil
}

func (d *dialect) assignTags(w http.ResponseWriter, r *http.Request) error {
	var req struct {
		Target string   `json:"target"`
		Tags   []string `json:"tags"`
	}
	if err := readJSON(r, &req); err != nil {
		return err
	}
	name, tag, err := templateName(req.Target)
	if err != nil {
		return err
	}
	tags, err := tagNames(name, req.Tags)
	if err != nil {
		return err
	}
	ref := name
	if tag != "" {
		ref += ":" + tag
	}
	of, err := d.template(r.Context(), ref)
	if err != nil {
		return err
	}
	t, err := d.server.TagTemplate(r.Context(), of.Ref(), tags)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusCreated, map[string]any{"buildID": buildOf(t.Template), "tags": tags})
}

func (d *dialect) removeTags(w http.ResponseWriter, r *http.Request) error {
	var req struct {
		Name string   `json:"name"`
		Tags []string `json:"tags"`
	}
	if err := readJSON(r, &req); err != nil {
		return err
	}
	name, _, err := templateName(req.Name)
	if err != nil {
		return err
	}
	tags, err := tagNames(name, req.Tags)
	if err == nil {
		err = d.server.UntagTemplate(r.Context(), name, tags)
	}
	if err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (d *dialect) listTags(w http.ResponseWriter, r *http.Request) error {
	_, versions, err := d.versions(r)
	if err != nil {
		return err
	}
	out := []map[string]any{}
	for _, t := range versions {
		for _, tag := range t.Tags {
			out = append(out, map[string]any{"tag": tag, "buildID": buildOf(t.Template), "createdAt": t.CreatedAt})
		}
	}
	return writeJSON(w, http.StatusOK, out)
}
