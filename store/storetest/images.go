package storetest

import (
	"testing"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

func put(t *testing.T, st store.Store, img sandbox.Image, name string) {
	t.Helper()
	if err := st.PutImage(t.Context(), img, name); err != nil {
		t.Errorf("put %s as %q: %v", img.ID, name, err)
	}
}

func checkImage(t *testing.T, st store.Store, nameOrID string, want sandbox.Image, names ...string) {
	t.Helper()
	got, err := st.GetImage(t.Context(), nameOrID)
	if err != nil {
		t.Errorf("get %q: %v", nameOrID, err)
		return
	}
	want.Names = names
	same(t, "image "+nameOrID, got, want)
}

var imageCases = []scenario{
	{"an image is found by name and by id, whole", func(t *testing.T, st store.Store) {
		img := newImage("sha256:1", 0)
		img.Names = []string{"not", "mine"} // names are what PutImage was told, not what the image says
		put(t, st, img, "docker.io/library/python:3.12")
		checkImage(t, st, "docker.io/library/python:3.12", img, "docker.io/library/python:3.12")
		checkImage(t, st, "sha256:1", img, "docker.io/library/python:3.12")
	}},

	{"a missing image is image_not_found", func(t *testing.T, st store.Store) {
		put(t, st, newImage("sha256:1", 0), "base")
		for _, name := range []string{"", "bas", "Base", "base%", "sha256:", "sha256:2"} {
			_, err := st.GetImage(t.Context(), name)
			fails(t, "get "+name, err, sandbox.ErrImageNotFound)
			_, err = st.RemoveImageName(t.Context(), name)
			fails(t, "remove name "+name, err, sandbox.ErrImageNotFound)
			fails(t, "remove "+name, st.RemoveImage(t.Context(), name), sandbox.ErrImageNotFound)
		}
		_, err := st.RemoveImageName(t.Context(), "sha256:1")
		fails(t, "an id is not a name", err, sandbox.ErrImageNotFound)
	}},

	{"an image without an id is refused", func(t *testing.T, st store.Store) {
		fails(t, "put", st.PutImage(t.Context(), sandbox.Image{}, "x"), sandbox.ErrInvalid)
	}},

	{"a name moves, and the image it left stays", func(t *testing.T, st store.Store) {
		one, two := newImage("sha256:1", 0), newImage("sha256:2", 1)
		put(t, st, one, "base")
		put(t, st, one, "also")
		put(t, st, two, "base")
		checkImage(t, st, "base", two, "base")
		checkImage(t, st, "also", one, "also")
		put(t, st, two, "also")
		checkImage(t, st, "sha256:1", one)
		checkImage(t, st, "also", two, "also", "base")
		put(t, st, one, "base") // and back
		checkImage(t, st, "base", one, "base")
	}},

	{"an image put again is recorded as last given and keeps its names", func(t *testing.T, st store.Store) {
		img := newImage("sha256:1", 0)
		put(t, st, img, "base")
		img.Source, img.CreatedAt = "debian", at(5)
		put(t, st, img, "base")
		checkImage(t, st, "base", img, "base")
		put(t, st, img, "")
		checkImage(t, st, "sha256:1", img, "base")
	}},

	{"an image may have no name", func(t *testing.T, st store.Store) {
		put(t, st, newImage("sha256:1", 0), "")
		checkImage(t, st, "sha256:1", newImage("sha256:1", 0))
		_, err := st.GetImage(t.Context(), "")
		fails(t, "get by no name", err, sandbox.ErrImageNotFound)
	}},

	{"a name that looks like an id cannot stand in for it", func(t *testing.T, st store.Store) {
		one, two := newImage("sha256:1", 0), newImage("sha256:2", 0)
		put(t, st, one, "base")
		put(t, st, two, "sha256:1")
		checkImage(t, st, "sha256:1", one, "base")
	}},

	{"images are listed newest first with their names sorted", func(t *testing.T, st store.Store) {
		put(t, st, newImage("sha256:1", 1), "b")
		put(t, st, newImage("sha256:1", 1), "c")
		put(t, st, newImage("sha256:1", 1), "a")
		put(t, st, newImage("sha256:2", 1), "")
		put(t, st, newImage("sha256:0", 7), "z")
		imgs, err := st.ListImages(t.Context())
		if err != nil || len(imgs) != 3 {
			t.Fatalf("%v, %v", imgs, err)
		}
		for i, want := range []sandbox.Image{newImage("sha256:0", 7), newImage("sha256:2", 1), newImage("sha256:1", 1)} {
			want.Names = [][]string{{"z"}, nil, {"a", "b", "c"}}[i]
			same(t, "entry", imgs[i], want)
		}
	}},

	{"removing a name returns the image and leaves its other names", func(t *testing.T, st store.Store) {
		img := newImage("sha256:1", 0)
		put(t, st, img, "a")
		put(t, st, img, "b")
		got, err := st.RemoveImageName(t.Context(), "a")
		if err != nil {
			t.Fatal(err)
		}
		img.Names = []string{"b"}
		same(t, "returned", got, img)
		_, err = st.GetImage(t.Context(), "a")
		fails(t, "the removed name", err, sandbox.ErrImageNotFound)
		checkImage(t, st, "b", img, "b")
		if _, err := st.RemoveImageName(t.Context(), "b"); err != nil {
			t.Fatal(err)
		}
		checkImage(t, st, "sha256:1", img)
	}},

	{"an image goes only without names and without live users", func(t *testing.T, st store.Store) {
		put(t, st, newImage("sha256:base", 0), "base")
		put(t, st, newImage("sha256:other", 0), "")
		for i, s := range []sandbox.State{sandbox.Creating, sandbox.Running, sandbox.Ending} {
			sb := newSandbox(string(s), i) // of sha256:base
			sb.State = s
			create(t, st, sb)
		}
		fails(t, "with a name", st.RemoveImage(t.Context(), "sha256:base"), sandbox.ErrPrecondition)
		if _, err := st.RemoveImageName(t.Context(), "base"); err != nil {
			t.Fatal(err)
		}
		for _, s := range []sandbox.State{sandbox.Creating, sandbox.Running, sandbox.Ending} {
			fails(t, "with live sandboxes down to "+string(s), st.RemoveImage(t.Context(), "sha256:base"), sandbox.ErrPrecondition)
			end(t, st, string(s), 9)
		}
		checkImage(t, st, "sha256:base", newImage("sha256:base", 0))
		if err := st.RemoveImage(t.Context(), "sha256:base"); err != nil {
			t.Errorf("with ended sandboxes only: %v", err)
		}
		fails(t, "again", st.RemoveImage(t.Context(), "sha256:base"), sandbox.ErrImageNotFound)
		if get(t, st, "running").ImageID != "sha256:base" {
			t.Error("the ended sandbox lost its image id")
		}
		if err := st.RemoveImage(t.Context(), "sha256:other"); err != nil {
			t.Errorf("one that nothing ever used: %v", err)
		}
	}},
}
