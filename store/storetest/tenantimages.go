package storetest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

func imageSight(t *testing.T, st store.Store, red, blue context.Context) {
	put := func(ctx context.Context, id, name string) {
		t.Helper()
		if err := st.PutImage(ctx, newImage(id, 0), name); err != nil {
			t.Fatal(err)
		}
	}
	put(all(t.Context()), "sha256:base", "base")
	put(red, "sha256:secret", "mine")
	put(all(t.Context()), "sha256:used", "")
	put(all(t.Context()), "sha256:held", "")
	find := func(ctx context.Context, name string) string {
		img, err := st.GetImage(ctx, name)
		if err != nil && !errors.Is(err, sandbox.ErrImageNotFound) {
			t.Fatal(err)
		}
		return img.ID
	}
	list := func(ctx context.Context) (ids []string) {
		imgs, err := st.ListImages(ctx)
		if err != nil {
			t.Fatal(err)
		}
		for _, i := range imgs {
			ids = append(ids, i.ID)
		}
		slices.Sort(ids)
		return ids
	}
	sb := newSandbox("blubox", 0)
	sb.ImageID = "sha256:used"
	if _, _, err := st.CreateSandbox(blue, sb, store.Idempotency{}); err != nil {
		t.Fatal(err)
	}
	snap := tenantSnapshot("blusnap", "")
	snap.ImageID = "sha256:held"
	if _, err := st.CreateSnapshot(blue, snap); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		ctx        context.Context
		name, want string
	}{
		{red, "base", "sha256:base"}, {blue, "base", "sha256:base"}, {blue, "sha256:base", "sha256:base"},
		{red, "mine", "sha256:secret"}, {red, "sha256:secret", "sha256:secret"}, {blue, "mine", ""}, {blue, "sha256:secret", ""},
		{blue, "sha256:used", "sha256:used"}, {red, "sha256:used", ""}, {blue, "sha256:held", "sha256:held"}, {red, "sha256:held", ""},
	} {
		if got := find(c.ctx, c.name); got != c.want {
			t.Errorf("%s finds %q by %q, want %q", store.ScopeOf(c.ctx).Tenant(), got, c.name, c.want)
		}
	}
	if got := list(red); !slices.Equal(got, []string{"sha256:base", "sha256:secret"}) {
		t.Error(got)
	}
	if got := list(blue); !slices.Equal(got, []string{"sha256:base", "sha256:held", "sha256:used"}) {
		t.Error(got)
	}
	_, err := st.RemoveImageName(blue, "mine")
	fails(t, "another's name", err, sandbox.ErrImageNotFound)
	_, err = st.RemoveImageName(blue, "base")
	fails(t, "everybody's name", err, sandbox.ErrDenied)

	// A name of its own hides everybody's, and for itself only.
	put(red, "sha256:secret", "base")
	if r, b := find(red, "base"), find(blue, "base"); r != "sha256:secret" || b != "sha256:base" {
		t.Error(r, b)
	}
	if img, _ := st.GetImage(red, "sha256:base"); slices.Contains(img.Names, "base") {
		t.Error("the hidden name is shown:", img.Names)
	}
	if _, err := st.RemoveImageName(red, "base"); err != nil || find(red, "base") != "sha256:base" {
		t.Error(err)
	}
	// Names of all tenants keep content.
	fails(t, "named by red", st.RemoveImage(all(t.Context()), "sha256:secret"), sandbox.ErrPrecondition)
}

// imageOrigin: that two tenants have the same content is nothing either learns of.
func imageOrigin(t *testing.T, st store.Store, red, blue context.Context) {
	brought := func(ctx context.Context, source string, day int) sandbox.Image {
		t.Helper()
		img := newImage("sha256:same", day)
		img.Source = source
		if err := st.PutImage(ctx, img, "python"); err != nil {
			t.Fatal(err)
		}
		return img
	}
	seen := func(ctx context.Context, want sandbox.Image) {
		t.Helper()
		one, err := st.GetImage(ctx, "python")
		list, lerr := st.ListImages(ctx)
		if err != nil || lerr != nil || len(list) != 1 {
			t.Fatalf("%v, %v, %d", err, lerr, len(list))
		}
		for _, got := range []sandbox.Image{one, list[0]} {
			if got.Source != want.Source || !got.CreatedAt.Equal(want.CreatedAt) {
				t.Errorf("from %s at %s; it was brought from %s at %s", got.Source, got.CreatedAt, want.Source, want.CreatedAt)
			}
		}
	}
	reds := brought(red, "docker.io/library/python@sha256:1", 1)
	blues := brought(blue, "registry.blue.example/secret-project@sha256:2", 2)
	seen(red, reds)
	seen(blue, blues)
	everybodys := brought(all(t.Context()), "docker.io/library/python@sha256:3", 3)
	seen(red, reds)
	seen(blue, blues)
	green := store.In(t.Context(), "green")
	if err := st.CreateTenant(all(t.Context()), sandbox.Tenant{ID: "green", Name: "green", CreatedAt: at(0)}); err != nil {
		t.Fatal(err)
	}
	seen(green, everybodys)
	reds = brought(red, "docker.io/library/python@sha256:4", 4)
	seen(red, reds)
	seen(blue, blues)
	seen(green, everybodys)
	gone, err := st.RemoveImageName(blue, "python")
	if err != nil || gone.Source != blues.Source {
		t.Errorf("%+v, %v", gone, err)
	}
}

func imageBytes(t *testing.T, st store.Store, red, blue context.Context) {
	image := func(id string, size int64) sandbox.Image {
		img := newImage("sha256:"+id, 0)
		img.Size = size
		return img
	}
	put := func(ctx context.Context, id string, size int64, name string, most int64) error {
		return st.PutImageWithin(ctx, image(id, size), name, most)
	}
	holds := func(what string, ctx context.Context, want int64) {
		t.Helper()
		if n, err := st.ImageBytes(ctx); err != nil || n != want {
			t.Errorf("%s: %d bytes, %v; want %d", what, n, err, want)
		}
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Error(err)
		}
	}
	must(st.PutImage(all(t.Context()), image("base", 1000), "base"))
	holds("everybody's", red, 0)
	must(put(red, "a", 60, "one", 100))
	must(put(red, "a", 60, "two", 100)) // the content once
	must(put(blue, "a", 60, "one", 60)) // for each who names it
	holds("red", red, 60)
	holds("blue", blue, 60)
	fails(t, "more than it may", put(red, "b", 50, "three", 100), sandbox.ErrQuotaExceeded)
	if _, err := st.GetImage(all(t.Context()), "sha256:b"); err == nil {
		t.Error("what was refused is on record")
	}
	fails(t, "a name that moves, where another keeps the content", put(red, "b", 50, "one", 100), sandbox.ErrQuotaExceeded)
	must(put(red, "b", 40, "one", 100))
	holds("red", red, 100)
	must(put(red, "c", 40, "one", 100)) // b goes with its only name
	holds("red", red, 100)
	must(put(red, "d", 30, "one", 50)) // over the bound and on its way down
	holds("red", red, 90)
	must(put(red, "d", 30, "", 1)) // no name, nothing counts
	if _, err := st.RemoveImageName(red, "two"); err != nil {
		t.Fatal(err)
	}
	holds("red", red, 30)
	// Its last name gone, an image is still here for what uses it.
	must(put(red, "kept", 50, "kept", 100))
	sb := newSandbox("redbox", 0)
	sb.ImageID = "sha256:kept"
	if _, _, err := st.CreateSandbox(red, sb, store.Idempotency{}); err != nil {
		t.Fatal(err)
	}
	snap := tenantSnapshot("redsnap", "")
	snap.ImageID = "sha256:kept"
	_, err := st.CreateSnapshot(red, snap)
	must(err)
	_, err = st.RemoveImageName(red, "kept")
	must(err)
	holds("red, of a sandbox", red, 80)
	_, err = st.EndSandbox(red, sb.ID, sandbox.End{Cause: sandbox.KilledByUser, At: at(1)})
	must(err)
	holds("red, of a snapshot", red, 80)
	fails(t, "beside what a snapshot keeps", put(red, "e", 30, "e", 100), sandbox.ErrQuotaExceeded)
	must(put(red, "kept", 50, "again", 80)) // it counts already
	must(st.PutImage(all(t.Context()), image("kept", 50), "everybodys"))
	_, err = st.RemoveImageName(red, "again")
	must(err)
	holds("red, of what is everybody's", red, 30)
	_, err = st.DeleteSnapshot(red, snap.ID)
	must(err)
	holds("red", red, 30)

	var made atomic.Int64
	race(func(i int) {
		err := put(blue, fmt.Sprint("r", i), 10, fmt.Sprint("r", i), 100)
		switch {
		case err == nil:
			made.Add(1)
		case !errors.Is(err, sandbox.ErrQuotaExceeded):
			t.Error(err)
		}
	})
	if made.Load() != 4 {
		t.Errorf("%d of 10 bytes beside 60 fit into 100", made.Load())
	}
}
