package storetest

import (
	"maps"
	"slices"
	"strings"

	"pgregory.net/rapid"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// stateModel is the part of the model that snapshots and templates are.
type stateModel struct {
	snapshots map[string]sandbox.Snapshot
	templates map[string][]sandbox.Template // by name, oldest first
	versions  map[string]int64              // the last ever given out
}

func newStateModel() stateModel {
	return stateModel{snapshots: map[string]sandbox.Snapshot{}, templates: map[string][]sandbox.Template{}, versions: map[string]int64{}}
}

var (
	genSnapID   = rapid.SampledFrom([]string{"s1", "s2", "s3", "s4", "s5", "s6"}) // never a sandbox's
	genSnapName = rapid.SampledFrom([]string{"", "", "warm", "cold", "s1"})
	genTplName  = rapid.SampledFrom([]string{"py", "js"})
	genNode     = rapid.OneOf(genID, genSnapID)
)

func genLineage(rt *rapid.T) (l sandbox.Lineage) {
	return below(rapid.SliceOfN(genNode, 0, 3).Draw(rt, "ancestors")...)
}

func genSnapshot(rt *rapid.T) sandbox.Snapshot {
	s := newSnapshot(genSnapID.Draw(rt, "id"), genMinute.Draw(rt, "created"))
	s.Kind = rapid.SampledFrom([]sandbox.SnapshotKind{sandbox.MemorySnapshot, sandbox.FilesystemSnapshot, sandbox.DirectorySnapshot}).Draw(rt, "kind")
	s.Labels, s.ImageID, s.Sandbox = genLabels.Draw(rt, "labels"), genImage.Draw(rt, "image"), genID.Draw(rt, "sandbox")
	s.Content.Base = rapid.OneOf(genImage, rapid.Just("")).Draw(rt, "base")
	s.Lineage = genLineage(rt)
	return s
}

func (m *model) stateActions() map[string]func(*rapid.T) {
	return map[string]func(*rapid.T){
		"createSnapshot": m.createSnapshot, "getSnapshot": m.getSnapshot, "listSnapshots": m.listSnapshots, "setSnapshotImage": m.setSnapshotImage,
		"deleteSnapshot": m.deleteSnapshot, "manifests": m.manifests, "moveSandbox": m.moveSandbox, "tree": m.tree,
		"createTemplate": m.createTemplate, "getTemplate": m.getTemplate, "listTemplates": m.listTemplates, "deleteTemplate": m.deleteTemplate, "tagTemplate": m.tagTemplate,
	}
}

// takeName moves a name in the model.
func (m *model) takeName(name string) {
	for id, s := range m.snapshots {
		if name != "" && s.Name == name {
			s.Name = ""
			m.snapshots[id] = s
		}
	}
}

func (m *model) createSnapshot(rt *rapid.T) {
	s := genSnapshot(rt)
	s.Name = genSnapName.Draw(rt, "name")
	got, err := m.st.CreateSnapshot(m.t.Context(), s)
	if _, taken := m.snapshots[s.ID]; taken {
		expect(rt, "create snapshot", err, sandbox.AlreadyExists, nil, nil)
		return
	}
	expect(rt, "create snapshot", err, "", got, s)
	m.takeName(s.Name)
	m.snapshots[s.ID] = s
	if sb, ok := m.sandboxes[s.Sandbox]; ok && sb.State != sandbox.EndedState && s.Kind != sandbox.DirectorySnapshot {
		sb.Lineage = s.Lineage.Below(s.ID)
		m.sandboxes[sb.ID] = sb
	}
}

func (m *model) getSnapshot(rt *rapid.T) {
	which := rapid.OneOf(genSnapID, genSnapName).Draw(rt, "name or id")
	got, err := m.st.GetSnapshot(m.t.Context(), which)
	if s, ok := m.snapshots[which]; ok {
		expect(rt, "get snapshot", err, "", got, s)
		return
	}
	for _, s := range m.snapshots {
		if s.Name == which && which != "" {
			expect(rt, "get snapshot", err, "", got, s)
			return
		}
	}
	expect(rt, "get snapshot", err, sandbox.NotFound, nil, nil)
}

func (m *model) listSnapshots(rt *rapid.T) {
	f := store.SnapshotFilter{Labels: genLabels.Draw(rt, "labels"), Sandbox: rapid.OneOf(genID, rapid.Just("")).Draw(rt, "sandbox"),
		Kind:   rapid.SampledFrom([]sandbox.SnapshotKind{"", sandbox.MemorySnapshot}).Draw(rt, "kind"),
		Hidden: rapid.Bool().Draw(rt, "hidden"), PageSize: rapid.IntRange(0, 3).Draw(rt, "page")}
	got, err := walkSnapshots(m.t.Context(), m.st, f)
	var want []sandbox.Snapshot
	for _, s := range m.snapshots {
		match := s.Hidden == f.Hidden && (f.Sandbox == "" || s.Sandbox == f.Sandbox) && (f.Kind == "" || s.Kind == f.Kind)
		for k, v := range f.Labels {
			have, ok := s.Labels[k]
			match = match && ok && have == v
		}
		if match {
			want = append(want, s)
		}
	}
	slices.SortFunc(want, func(a, b sandbox.Snapshot) int {
		if c := b.CreatedAt.Compare(a.CreatedAt); c != 0 {
			return c
		}
		return strings.Compare(b.ID, a.ID)
	})
	ids := []string{}
	for _, s := range want {
		ids = append(ids, s.ID)
	}
	expect(rt, "list snapshots", err, "", got, ids)
}

func (m *model) setSnapshotImage(rt *rapid.T) {
	id, img := genSnapID.Draw(rt, "id"), genImage.Draw(rt, "image")
	err := m.st.SetSnapshotImage(m.t.Context(), id, img)
	s, ok := m.snapshots[id]
	if !ok {
		expect(rt, "set image", err, sandbox.NotFound, nil, nil)
		return
	}
	expect(rt, "set image", err, "", nil, nil)
	s.Content.Image = img
	m.snapshots[id] = s
}

func (m *model) templateOf(snap string) bool {
	for _, versions := range m.templates {
		for _, tpl := range versions {
			if tpl.Snapshot == snap {
				return true
			}
		}
	}
	return false
}

func (m *model) deleteSnapshot(rt *rapid.T) {
	id := genSnapID.Draw(rt, "id")
	got, err := m.st.DeleteSnapshot(m.t.Context(), id)
	s, ok := m.snapshots[id]
	switch {
	case !ok:
		expect(rt, "delete snapshot", err, sandbox.NotFound, nil, nil)
	case m.templateOf(id):
		expect(rt, "delete snapshot", err, sandbox.Precondition, nil, nil)
	default:
		expect(rt, "delete snapshot", err, "", got, s)
		delete(m.snapshots, id)
	}
}

func (m *model) manifests(rt *rapid.T) {
	got, err := m.st.Manifests(m.t.Context())
	want, images := map[string]bool{}, map[string]bool{}
	for _, s := range m.snapshots {
		want[s.Content.Manifest] = true
		for _, img := range store.ImagesOf(s) {
			images[img] = true
		}
	}
	expect(rt, "manifests", err, "", strings.Join(got, " "), strings.Join(slices.Sorted(maps.Keys(want)), " "))
	used, err := m.st.SnapshotImages(m.t.Context())
	expect(rt, "images", err, "", strings.Join(used, " "), strings.Join(slices.Sorted(maps.Keys(images)), " "))
}

func (m *model) moveSandbox(rt *rapid.T) {
	id, l := genID.Draw(rt, "id"), genLineage(rt)
	got, err := m.st.UpdateSandbox(m.t.Context(), id, func(sb *sandbox.Sandbox) error { sb.Lineage = l; return nil })
	sb, ok := m.sandboxes[id]
	switch {
	case !ok:
		expect(rt, "move", err, sandbox.NotFound, nil, nil)
	case sb.State == sandbox.EndedState:
		expect(rt, "move", err, sandbox.Ended, nil, nil)
	default:
		sb.Lineage = l
		expect(rt, "move", err, "", got, sb)
		m.sandboxes[id] = sb
	}
}

// tree is what edges to the nearest and the farthest ancestor connect.
func (m *model) tree(rt *rapid.T) {
	id := genNode.Draw(rt, "id")
	edges := map[string][]string{}
	connect := func(id string, l sandbox.Lineage) {
		if n := len(l.Ancestors); n > 0 {
			for _, a := range []string{l.Ancestors[0], l.Ancestors[n-1]} {
				edges[id], edges[a] = append(edges[id], a), append(edges[a], id)
			}
		}
	}
	for _, sb := range m.sandboxes {
		connect(sb.ID, sb.Lineage)
	}
	for _, s := range m.snapshots {
		connect(s.ID, s.Lineage)
	}
	seen, left := map[string]bool{id: true}, []string{id}
	for len(left) > 0 {
		at := left[0]
		left = left[1:]
		for _, next := range edges[at] {
			if !seen[next] {
				seen[next] = true
				left = append(left, next)
			}
		}
	}
	want := map[string]bool{}
	for n := range seen {
		_, isBox := m.sandboxes[n]
		_, isSnap := m.snapshots[n]
		if isBox || isSnap {
			want[n] = true
		}
	}
	tree, err := m.st.Tree(m.t.Context(), id)
	if !want[id] {
		expect(rt, "tree", err, sandbox.NotFound, nil, nil)
		return
	}
	var got []string
	for _, sb := range tree.Sandboxes {
		got = append(got, sb.ID)
	}
	for _, s := range tree.Snapshots {
		got = append(got, s.ID)
	}
	slices.Sort(got)
	expect(rt, "tree", err, "", strings.Join(got, " "), strings.Join(slices.Sorted(maps.Keys(want)), " "))
}

func (m *model) createTemplate(rt *rapid.T) {
	s := genSnapshot(rt)
	tpl := sandbox.Template{Name: genTplName.Draw(rt, "name"), Start: "x", CreatedAt: at(genMinute.Draw(rt, "built"))}
	got, err := m.st.CreateTemplateVersion(m.t.Context(), tpl, s)
	if _, taken := m.snapshots[s.ID]; taken {
		expect(rt, "create template", err, sandbox.AlreadyExists, nil, nil)
		return
	}
	m.versions[tpl.Name]++
	tpl.Version, tpl.Snapshot, s.Hidden = m.versions[tpl.Name], s.ID, true
	expect(rt, "create template", err, "", got, tpl)
	m.snapshots[s.ID] = s
	m.templates[tpl.Name] = append(m.templates[tpl.Name], tpl)
}

func (m *model) getTemplate(rt *rapid.T) {
	name, version := genTplName.Draw(rt, "name"), rapid.Int64Range(0, 4).Draw(rt, "version")
	got, err := m.st.GetTemplate(m.t.Context(), name, version)
	for _, tpl := range slices.Backward(m.templates[name]) {
		if version == 0 || tpl.Version == version {
			expect(rt, "get template", err, "", got, tpl)
			return
		}
	}
	expect(rt, "get template", err, sandbox.NotFound, nil, nil)
}

func (m *model) listTemplates(rt *rapid.T) {
	name := rapid.OneOf(genTplName, rapid.Just("")).Draw(rt, "name")
	got, err := m.st.ListTemplates(m.t.Context(), name)
	var want []sandbox.Template
	if name != "" {
		want = slices.Clone(m.templates[name])
		slices.Reverse(want)
	} else {
		for _, n := range slices.Sorted(maps.Keys(m.templates)) {
			if v := m.templates[n]; len(v) > 0 {
				want = append(want, v[len(v)-1])
			}
		}
	}
	expect(rt, "list templates", err, "", refs(got), refs(want))
}

func (m *model) tagTemplate(rt *rapid.T) {
	name, version := genTplName.Draw(rt, "name"), rapid.Int64Range(0, 4).Draw(rt, "version")
	tag := rapid.SampledFrom([]string{"default", "v1", "v2"}).Draw(rt, "tag")
	err := m.st.TagTemplate(m.t.Context(), name, version, []string{tag})
	versions := m.templates[name]
	if len(versions) == 0 || version > 0 && !slices.ContainsFunc(versions, func(t sandbox.Template) bool { return t.Version == version }) {
		expect(rt, "tag template", err, sandbox.NotFound, nil, nil)
		return
	}
	expect(rt, "tag template", err, "", nil, nil)
	for i, tpl := range versions {
		tags := slices.DeleteFunc(slices.Clone(tpl.Tags), func(t string) bool { return t == tag })
		if tpl.Version == version {
			tags = append(tags, tag)
		}
		slices.Sort(tags)
		if len(tags) == 0 {
			tags = nil
		}
		versions[i].Tags = tags
	}
}

func (m *model) deleteTemplate(rt *rapid.T) {
	name, version := genTplName.Draw(rt, "name"), rapid.Int64Range(0, 4).Draw(rt, "version")
	got, err := m.st.DeleteTemplate(m.t.Context(), name, version)
	var gone, left []sandbox.Template
	for _, tpl := range m.templates[name] {
		if version == 0 || tpl.Version == version {
			gone = append(gone, tpl)
			delete(m.snapshots, tpl.Snapshot)
		} else {
			left = append(left, tpl)
		}
	}
	if len(gone) == 0 {
		expect(rt, "delete template", err, sandbox.NotFound, nil, nil)
		return
	}
	slices.Reverse(gone)
	expect(rt, "delete template", err, "", refs(got), refs(gone))
	m.templates[name] = left
}
