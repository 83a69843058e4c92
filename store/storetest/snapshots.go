package storetest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// newSnapshot is a record with every field set.
func newSnapshot(id string, minutes int) sandbox.Snapshot {
	return sandbox.Snapshot{
		ID: id, Kind: sandbox.MemorySnapshot, Labels: map[string]string{"run": "r1", "n": id}, Sandbox: "sb1",
		Lineage: sandbox.Lineage{}, Spec: newSandbox("sb1", 0).Spec, ImageID: "sha256:base", Node: "node1", CreatedAt: at(minutes),
		Content: sandbox.Content{Manifest: "m-" + id, Size: 1 << 33, Stored: 77, Base: "sha256:under", Plain: "p", Build: "gv1"},
	}
}

func keep(t *testing.T, st store.Store, s sandbox.Snapshot) sandbox.Snapshot {
	t.Helper()
	got, err := st.CreateSnapshot(t.Context(), s)
	if err != nil {
		t.Errorf("create %s: %v", s.ID, err)
	}
	return got
}

func checkSnapshot(t *testing.T, st store.Store, nameOrID string, want sandbox.Snapshot) {
	t.Helper()
	got, err := st.GetSnapshot(t.Context(), nameOrID)
	if err != nil {
		t.Errorf("get %q: %v", nameOrID, err)
		return
	}
	same(t, "snapshot "+nameOrID, got, want)
}

// walkSnapshots reads every page of a list.
func walkSnapshots(ctx context.Context, st store.Store, f store.SnapshotFilter) (ids []string, err error) {
	ids = []string{}
	for {
		page, next, err := st.ListSnapshots(ctx, f)
		if err != nil {
			return nil, err
		}
		if f.PageSize > 0 && len(page) > f.PageSize || next != "" && len(page) == 0 {
			return nil, fmt.Errorf("a page of %d where %d were asked for, next %q", len(page), f.PageSize, next)
		}
		for _, s := range page {
			if slices.Contains(ids, s.ID) {
				return nil, fmt.Errorf("%s is on two pages", s.ID)
			}
			ids = append(ids, s.ID)
		}
		if next == "" {
			return ids, nil
		}
		f.PageToken = next
	}
}

var snapshotCases = []scenario{
	{"a snapshot is found by name and by id, whole", func(t *testing.T, st store.Store) {
		s := newSnapshot("a", 0)
		s.Name, s.Lineage = "warm", sandbox.Lineage{}.Below("x").Below("y")
		same(t, "returned", keep(t, st, s), s)
		checkSnapshot(t, st, "a", s)
		checkSnapshot(t, st, "warm", s)
	}},

	{"a missing snapshot is not_found", func(t *testing.T, st store.Store) {
		s := newSnapshot("a", 0)
		s.Name = "warm"
		keep(t, st, s)
		for _, name := range []string{"", "A", "war", "Warm", "b", "a%"} {
			_, err := st.GetSnapshot(t.Context(), name)
			fails(t, "get "+name, err, sandbox.ErrNotFound)
			_, err = st.DeleteSnapshot(t.Context(), name)
			fails(t, "delete "+name, err, sandbox.ErrNotFound)
			fails(t, "set image of "+name, st.SetSnapshotImage(t.Context(), name, "sha256:1"), sandbox.ErrNotFound)
		}
		_, err := st.DeleteSnapshot(t.Context(), "warm")
		fails(t, "a name is not an id", err, sandbox.ErrNotFound)
	}},

	{"a snapshot that expires is found when it has", func(t *testing.T, st store.Store) {
		never, soon, later := newSnapshot("a", 0), newSnapshot("b", 1), newSnapshot("c", 2)
		soon.ExpiresAt, later.ExpiresAt = at(10), at(20)
		for _, s := range []sandbox.Snapshot{never, soon, later} {
			keep(t, st, s)
		}
		checkSnapshot(t, st, "b", soon)
		hidden := newSnapshot("d", 3)
		hidden.ExpiresAt = at(5)
		if _, err := st.CreateTemplateVersion(t.Context(), sandbox.Template{Name: "tpl"}, hidden); err != nil {
			t.Fatal(err)
		}
		if s, err := st.GetSnapshot(t.Context(), "d"); err != nil || !s.ExpiresAt.IsZero() {
			t.Errorf("a template's expires at %v, %v", s.ExpiresAt, err)
		}
		for minutes, want := range map[int]string{9: "[]", 10: "[b]", 25: "[c b]"} {
			ids, err := walkSnapshots(t.Context(), st, store.SnapshotFilter{ExpiredAt: at(minutes), PageSize: 1})
			if err != nil || fmt.Sprint(ids) != want {
				t.Errorf("expired after %d minutes: %v, %v; want %s", minutes, ids, err, want)
			}
		}
	}},

	{"ages are summed up, beyond what a duration holds", func(t *testing.T, st store.Store) {
		if a, err := st.SnapshotAges(t.Context(), at(0)); a != (store.SnapshotAges{}) || err != nil {
			t.Errorf("of none: %+v, %v", a, err)
		}
		for i := range 12 {
			keep(t, st, newSnapshot(fmt.Sprintf("s%d", i), i))
		}
		if _, err := st.CreateTemplateVersion(t.Context(), sandbox.Template{Name: "tpl"}, newSnapshot("t", -9)); err != nil {
			t.Fatal(err)
		}
		const years = 60 * 24 * 365 * 100
		a, err := st.SnapshotAges(t.Context(), at(years))
		if err != nil || a.Count != 12 || !a.Oldest.Equal(at(0)) || a.Seconds != 12*years*60-66*60 {
			t.Errorf("%+v, %v", a, err)
		}
	}},

	{"what is no snapshot is refused", func(t *testing.T, st store.Store) {
		for field, spoil := range map[string]func(*sandbox.Snapshot){
			"id":       func(s *sandbox.Snapshot) { s.ID = "A/b" },
			"kind":     func(s *sandbox.Snapshot) { s.Kind = "disk" },
			"manifest": func(s *sandbox.Snapshot) { s.Content.Manifest = "" },
		} {
			s := newSnapshot("a", 0)
			spoil(&s)
			_, err := st.CreateSnapshot(t.Context(), s)
			fails(t, field, err, sandbox.ErrInvalid)
		}
		keep(t, st, newSnapshot("a", 0))
		again := newSnapshot("a", 1)
		again.Name = "other"
		_, err := st.CreateSnapshot(t.Context(), again)
		fails(t, "the same id again", err, sandbox.ErrAlreadyExists)
		_, err = st.GetSnapshot(t.Context(), "other")
		fails(t, "its name", err, sandbox.ErrNotFound)
	}},

	{"a name moves to the newest, and a refusal does not move it", func(t *testing.T, st store.Store) {
		one, two := newSnapshot("a", 0), newSnapshot("b", 1)
		one.Name, two.Name = "warm", "warm"
		keep(t, st, one)
		_, err := st.CreateSnapshot(t.Context(), one)
		fails(t, "again", err, sandbox.ErrAlreadyExists)
		checkSnapshot(t, st, "warm", one)
		keep(t, st, two)
		checkSnapshot(t, st, "warm", two)
		one.Name = ""
		checkSnapshot(t, st, "a", one)
		if _, err := st.DeleteSnapshot(t.Context(), "b"); err != nil {
			t.Fatal(err)
		}
		_, err = st.GetSnapshot(t.Context(), "warm")
		fails(t, "the name of what is gone", err, sandbox.ErrNotFound)
	}},

	{"a name that looks like an id cannot stand in for it", func(t *testing.T, st store.Store) {
		one, two := newSnapshot("a", 0), newSnapshot("b", 1)
		two.Name = "a"
		keep(t, st, one)
		keep(t, st, two)
		checkSnapshot(t, st, "a", one)
	}},

	{"snapshots are listed newest first, by every filter, in pages", func(t *testing.T, st store.Store) {
		for i, id := range []string{"a", "b", "c", "d", "e"} {
			s := newSnapshot(id, i/2) // pairs of one instant
			s.Hidden = id == "e"
			if id == "c" {
				s.Kind, s.Sandbox, s.Labels = sandbox.DirectorySnapshot, "sb2", map[string]string{"run": "r2"}
			}
			keep(t, st, s)
		}
		for name, c := range map[string]struct {
			f    store.SnapshotFilter
			want string
		}{
			"all":       {store.SnapshotFilter{}, "d c b a"},
			"hidden":    {store.SnapshotFilter{Hidden: true}, "e"},
			"sandbox":   {store.SnapshotFilter{Sandbox: "sb1"}, "d b a"},
			"kind":      {store.SnapshotFilter{Kind: sandbox.DirectorySnapshot}, "c"},
			"label":     {store.SnapshotFilter{Labels: map[string]string{"run": "r1"}}, "d b a"},
			"labels":    {store.SnapshotFilter{Labels: map[string]string{"run": "r1", "n": "b"}}, "b"},
			"no such":   {store.SnapshotFilter{Labels: map[string]string{"run": "r1", "n": "c"}}, ""},
			"everybody": {store.SnapshotFilter{Sandbox: "sb3"}, ""},
		} {
			for size := range 4 { // 0 is the default
				c.f.PageSize = size
				got, err := walkSnapshots(t.Context(), st, c.f)
				if err != nil || strings.Join(got, " ") != c.want {
					t.Errorf("%s by %d: %v, %v; want %s", name, size, got, err, c.want)
				}
			}
		}
		_, _, err := st.ListSnapshots(t.Context(), store.SnapshotFilter{PageToken: "x"})
		fails(t, "page token", err, sandbox.ErrInvalid)
		_, _, err = st.ListSnapshots(t.Context(), store.SnapshotFilter{PageSize: -1})
		fails(t, "page size", err, sandbox.ErrInvalid)
	}},

	{"a deleted snapshot is gone with its name, labels and content", func(t *testing.T, st store.Store) {
		one, two := newSnapshot("a", 0), newSnapshot("b", 1)
		one.Name, two.Content.Manifest = "warm", "m-a" // two records of one content
		keep(t, st, one)
		keep(t, st, two)
		manifests := func(want ...string) {
			t.Helper()
			if got, err := st.Manifests(t.Context()); err != nil || !slices.Equal(got, want) {
				t.Errorf("manifests %v, %v; want %v", got, err, want)
			}
		}
		manifests("m-a")
		got, err := st.DeleteSnapshot(t.Context(), "a")
		if err != nil {
			t.Fatal(err)
		}
		same(t, "returned", got, one)
		manifests("m-a")
		if _, err := st.DeleteSnapshot(t.Context(), "b"); err != nil {
			t.Fatal(err)
		}
		manifests()
		_, err = st.DeleteSnapshot(t.Context(), "a")
		fails(t, "again", err, sandbox.ErrNotFound)
		keep(t, st, one) // nothing of it is in the way
	}},

	{"an image that a snapshot needs does not go", func(t *testing.T, st store.Store) {
		for _, id := range []string{"sha256:base", "sha256:under", "sha256:made", "sha256:free"} {
			put(t, st, newImage(id, 0), "")
		}
		s := newSnapshot("a", 0)
		keep(t, st, s)
		if err := st.SetSnapshotImage(t.Context(), "a", "sha256:made"); err != nil {
			t.Fatal(err)
		}
		s.Content.Image = "sha256:made"
		checkSnapshot(t, st, "a", s)
		used, err := st.SnapshotImages(t.Context())
		if want := []string{"sha256:base", "sha256:made", "sha256:under"}; err != nil || !slices.Equal(used, want) {
			t.Errorf("images %v, %v", used, err)
		}
		for _, id := range used {
			fails(t, id, st.RemoveImage(t.Context(), id), sandbox.ErrPrecondition)
		}
		if err := st.RemoveImage(t.Context(), "sha256:free"); err != nil {
			t.Error(err)
		}
		if _, err := st.DeleteSnapshot(t.Context(), "a"); err != nil {
			t.Fatal(err)
		}
		for _, id := range used {
			if err := st.RemoveImage(t.Context(), id); err != nil {
				t.Errorf("%s after its snapshot: %v", id, err)
			}
		}
		dir := newSnapshot("d", 0)
		dir.Kind, dir.Content.Base = sandbox.DirectorySnapshot, ""
		keep(t, st, dir)
		put(t, st, newImage("sha256:base", 0), "")
		if err := st.RemoveImage(t.Context(), "sha256:base"); err != nil {
			t.Errorf("a directory needs no image: %v", err)
		}
	}},

	{"a prepared image goes without its snapshots, not without those over it", func(t *testing.T, st store.Store) {
		put(t, st, newImage("sha256:made", 0), "")
		var made [2]sandbox.Snapshot
		for i, id := range []string{"a", "b"} {
			made[i] = newSnapshot(id, i)
			keep(t, st, made[i])
			if err := st.SetSnapshotImage(t.Context(), id, "sha256:made"); err != nil {
				t.Fatal(err)
			}
			made[i].Content.Image = "sha256:made"
		}
		kept := func(what string) {
			t.Helper()
			fails(t, what, st.RemovePreparedImage(t.Context(), "sha256:made"), sandbox.ErrPrecondition)
			checkImage(t, st, "sha256:made", newImage("sha256:made", 0))
			for _, s := range made {
				checkSnapshot(t, st, s.ID, s)
			}
		}
		over := newSnapshot("c", 2)
		over.Kind, over.Content.Base = sandbox.FilesystemSnapshot, "sha256:made"
		keep(t, st, over)
		kept("under a snapshot")
		if _, err := st.DeleteSnapshot(t.Context(), "c"); err != nil {
			t.Fatal(err)
		}
		put(t, st, newImage("sha256:made", 0), "name")
		fails(t, "with a name", st.RemovePreparedImage(t.Context(), "sha256:made"), sandbox.ErrPrecondition)
		if _, err := st.RemoveImageName(t.Context(), "name"); err != nil {
			t.Fatal(err)
		}
		sb := newSandbox("s", 0)
		sb.ImageID = "sha256:made"
		create(t, st, sb)
		kept("under a sandbox")
		end(t, st, "s", 1)
		if err := st.RemovePreparedImage(t.Context(), "sha256:made"); err != nil {
			t.Fatal(err)
		}
		for _, s := range made {
			s.Content.Image = ""
			checkSnapshot(t, st, s.ID, s)
		}
		fails(t, "again", st.RemovePreparedImage(t.Context(), "sha256:made"), sandbox.ErrImageNotFound)
	}},

	{"of snapshots that take one name at once, one has it", func(t *testing.T, st store.Store) {
		var wg sync.WaitGroup
		for i := range 20 {
			wg.Go(func() {
				s := newSnapshot(fmt.Sprintf("a%d", i), i)
				s.Name = "warm"
				keep(t, st, s)
			})
		}
		wg.Wait()
		named := 0
		page, _, err := st.ListSnapshots(t.Context(), store.SnapshotFilter{})
		for _, s := range page {
			if s.Name == "warm" {
				named++
			}
		}
		if err != nil || len(page) != 20 || named != 1 {
			t.Errorf("%d snapshots, %d with the name, %v", len(page), named, err)
		}
	}},
}

// treeOf is the ids of a tree, sorted, snapshots first.
func treeOf(t *testing.T, st store.Store, id string) string {
	t.Helper()
	tree, err := st.Tree(t.Context(), id)
	if err != nil {
		t.Errorf("tree of %s: %v", id, err)
	}
	var ids []string
	for _, s := range tree.Snapshots {
		ids = append(ids, s.ID)
	}
	slices.Sort(ids)
	var boxes []string
	for _, s := range tree.Sandboxes {
		boxes = append(boxes, s.ID)
	}
	slices.Sort(boxes)
	return strings.Join(append(ids, boxes...), " ")
}

// below makes the lineage of a child of the last of a chain, root first.
func below(chain ...string) (l sandbox.Lineage) {
	for _, id := range chain {
		l = l.Below(id)
	}
	return l
}

var treeCases = []scenario{
	{"a tree is whole from wherever it is asked", func(t *testing.T, st store.Store) {
		sb := func(id string, l sandbox.Lineage) {
			s := newSandbox(id, 0)
			s.Lineage = l
			same(t, "created", create(t, st, s), s)
		}
		snap := func(id string, l sandbox.Lineage) {
			s := newSnapshot(id, 0)
			s.Lineage = l
			keep(t, st, s)
		}
		sb("stranger", sandbox.Lineage{})
		sb("root", sandbox.Lineage{})
		sb("early", below("root")) // a live fork, before the first snapshot
		snap("s1", sandbox.Lineage{})
		if _, err := st.UpdateSandbox(t.Context(), "root", func(sb *sandbox.Sandbox) error { sb.Lineage = below("s1"); return nil }); err != nil {
			t.Fatal(err)
		}
		snap("s2", below("s1"))
		snap("s3", below("s1", "s2"))
		sb("leaf", below("s1", "s2", "s3"))
		sb("twig", below("s1", "s2"))

		const all = "s1 s2 s3 early leaf root twig"
		for _, id := range strings.Fields(all) {
			if got := treeOf(t, st, id); got != all {
				t.Errorf("from %s: %s", id, got)
			}
		}
		if got := treeOf(t, st, "stranger"); got != "stranger" {
			t.Error(got)
		}
		// A node in the middle goes; its descendants still hang together.
		if _, err := st.DeleteSnapshot(t.Context(), "s2"); err != nil {
			t.Fatal(err)
		}
		for _, id := range []string{"leaf", "twig", "s1", "early"} {
			if got := treeOf(t, st, id); got != "s1 s3 early leaf root twig" {
				t.Errorf("without s2, from %s: %s", id, got)
			}
		}
		_, err := st.Tree(t.Context(), "s2")
		fails(t, "tree of what is gone", err, sandbox.ErrNotFound)
		_, err = st.Tree(t.Context(), "nothing")
		fails(t, "tree of nothing", err, sandbox.ErrNotFound)

		end(t, st, "leaf", 1)
		if got := treeOf(t, st, "s1"); got != "s1 s3 early leaf root twig" {
			t.Errorf("an ended one: %s", got)
		}
		if n, err := st.ForgetEnded(t.Context(), at(2), 10); n != 1 || err != nil {
			t.Fatal(n, err)
		}
		if err := st.ForgetSandbox(t.Context(), "twig"); err != nil {
			t.Fatal(err)
		}
		if got := treeOf(t, st, "s1"); got != "s1 s3 early root" {
			t.Errorf("after forgetting: %s", got)
		}
		sb("leaf", sandbox.Lineage{}) // its old place is not waiting for it
		if got := treeOf(t, st, "leaf"); got != "leaf" {
			t.Error(got)
		}
	}},

	{"a circle comes to an end", func(t *testing.T, st store.Store) {
		a := newSandbox("a", 0)
		a.Lineage = below("s")
		create(t, st, a)
		s := newSnapshot("s", 0)
		s.Lineage = below("a")
		keep(t, st, s)
		if got := treeOf(t, st, "a"); got != "s a" {
			t.Error(got)
		}
	}},

	{"standby is no record", func(t *testing.T, st store.Store) {
		a := newSandbox("a", 0)
		a.Standby = sandbox.Cold
		create(t, st, a)
		if got := get(t, st, "a").Standby; got != "" {
			t.Errorf("stored %q", got)
		}
	}},
}

func build(t *testing.T, st store.Store, name, snap string) sandbox.Template {
	t.Helper()
	tpl, err := st.CreateTemplateVersion(t.Context(), sandbox.Template{Name: name, Version: 99, Spec: newSandbox("x", 0).Spec, Start: "serve",
		Ready: sandbox.Readiness{Port: 80}, CreatedAt: at(3), BuildTime: 5}, newSnapshot(snap, 3))
	if err != nil {
		t.Errorf("build %s: %v", name, err)
	}
	return tpl
}

func refs(tpls []sandbox.Template) string {
	var out []string
	for _, tpl := range tpls {
		out = append(out, tpl.Ref())
	}
	return strings.Join(out, " ")
}

var templateCases = []scenario{
	{"versions count up, each stays, the newest answers to the name", func(t *testing.T, st store.Store) {
		one := build(t, st, "py", "a")
		two := build(t, st, "py", "b")
		build(t, st, "js", "c")
		if one.Ref() != "py@1" || two.Ref() != "py@2" || one.Snapshot != "a" || one.Start != "serve" {
			t.Errorf("%+v, %+v", one, two)
		}
		for version, want := range map[int64]sandbox.Template{0: two, 1: one, 2: two} {
			got, err := st.GetTemplate(t.Context(), "py", version)
			if err != nil {
				t.Errorf("get %d: %v", version, err)
			}
			same(t, fmt.Sprint("version ", version), got, want)
		}
		for name, want := range map[string]string{"": "js@1 py@2", "py": "py@2 py@1", "js": "js@1", "p": ""} {
			if got, err := st.ListTemplates(t.Context(), name); err != nil || refs(got) != want {
				t.Errorf("list %q: %s, %v", name, refs(got), err)
			}
		}
		for _, v := range []int64{3, -1} {
			_, err := st.GetTemplate(t.Context(), "py", v)
			fails(t, "no such version", err, sandbox.ErrNotFound)
		}
		_, err := st.GetTemplate(t.Context(), "Py", 0)
		fails(t, "no such name", err, sandbox.ErrNotFound)
	}},

	{"a template's snapshot is hidden and goes only with it", func(t *testing.T, st store.Store) {
		build(t, st, "py", "a")
		build(t, st, "py", "b")
		if got, err := walkSnapshots(t.Context(), st, store.SnapshotFilter{}); err != nil || len(got) != 0 {
			t.Errorf("listed %v, %v", got, err)
		}
		_, err := st.DeleteSnapshot(t.Context(), "a")
		fails(t, "delete", err, sandbox.ErrPrecondition)
		if err == nil || !strings.Contains(err.Error(), "py@1") {
			t.Errorf("the template is not named: %v", err)
		}
		gone, err := st.DeleteTemplate(t.Context(), "py", 1)
		if err != nil || refs(gone) != "py@1" || gone[0].Snapshot != "a" {
			t.Errorf("%s, %v", refs(gone), err)
		}
		_, err = st.GetSnapshot(t.Context(), "a")
		fails(t, "its snapshot", err, sandbox.ErrNotFound)
		if _, err := st.GetSnapshot(t.Context(), "b"); err != nil {
			t.Error(err)
		}
	}},

	{"a deleted version is not given out again", func(t *testing.T, st store.Store) {
		build(t, st, "py", "a")
		build(t, st, "py", "b")
		if gone, err := st.DeleteTemplate(t.Context(), "py", 0); err != nil || refs(gone) != "py@2 py@1" {
			t.Errorf("%s, %v", refs(gone), err)
		}
		_, err := st.GetTemplate(t.Context(), "py", 0)
		fails(t, "get", err, sandbox.ErrNotFound)
		_, err = st.DeleteTemplate(t.Context(), "py", 0)
		fails(t, "again", err, sandbox.ErrNotFound)
		if got := build(t, st, "py", "c").Ref(); got != "py@3" {
			t.Error(got)
		}
	}},

	{"a refused version uses no number and leaves nothing", func(t *testing.T, st store.Store) {
		keep(t, st, newSnapshot("a", 0))
		_, err := st.CreateTemplateVersion(t.Context(), sandbox.Template{Name: "py"}, newSnapshot("a", 0))
		fails(t, "a taken snapshot", err, sandbox.ErrAlreadyExists)
		_, err = st.CreateTemplateVersion(t.Context(), sandbox.Template{}, newSnapshot("b", 0))
		fails(t, "no name", err, sandbox.ErrInvalid)
		if got := build(t, st, "py", "b").Ref(); got != "py@1" {
			t.Error(got)
		}
	}},

	{"builds at once get different versions", func(t *testing.T, st store.Store) {
		var mu sync.Mutex
		seen := map[int64]bool{}
		var wg sync.WaitGroup
		for i := range 20 {
			wg.Go(func() {
				tpl := build(t, st, "py", fmt.Sprintf("s%d", i))
				mu.Lock()
				defer mu.Unlock()
				seen[tpl.Version] = true
			})
		}
		wg.Wait()
		if len(seen) != 20 || !seen[1] || !seen[20] {
			t.Errorf("%v", seen)
		}
	}},

	{"a closed context changes nothing", func(t *testing.T, st store.Store) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err := st.CreateSnapshot(ctx, newSnapshot("a", 0))
		if !errors.Is(err, sandbox.ErrCanceled) {
			t.Errorf("%v", err)
		}
		_, err = st.GetSnapshot(t.Context(), "a")
		fails(t, "get", err, sandbox.ErrNotFound)
	}},
}
