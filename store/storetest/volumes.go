package storetest

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

func newVolume(id, name string, minutes int) sandbox.Volume {
	return sandbox.Volume{ID: id, Name: name, Size: 1 << 40, State: sandbox.VolumeMaking, Labels: map[string]string{"a": "b"},
		Node: "n1", CreatedAt: at(minutes), From: "other"}
}

func newRecording(id, name string, minutes int) sandbox.Recording {
	return sandbox.Recording{ID: id, Name: name, Sandbox: "box", Node: "n1", State: sandbox.RecordingOpen, CreatedAt: at(minutes)}
}

func sameVolume(t *testing.T, what string, got, want sandbox.Volume) {
	t.Helper()
	want.Tenant, want.CreatedAt, got.CreatedAt = got.Tenant, want.CreatedAt.UTC(), got.CreatedAt.UTC()
	same(t, what, got, want)
}

func sameRecording(t *testing.T, what string, got, want sandbox.Recording) {
	t.Helper()
	want.Tenant, want.CreatedAt, want.FinishedAt = got.Tenant, want.CreatedAt.UTC(), want.FinishedAt.UTC()
	got.CreatedAt, got.FinishedAt = got.CreatedAt.UTC(), got.FinishedAt.UTC()
	same(t, what, got, want)
}

func volumeNames(t *testing.T, st store.Store, ctx context.Context) (out []string) {
	t.Helper()
	vols, err := st.ListVolumes(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range vols {
		out = append(out, v.Name)
	}
	return out
}

var volumeCases = []scenario{
	{"a volume is kept as it is, and found by name and id", func(t *testing.T, st store.Store) {
		ctx, want := in(t.Context()), newVolume("v1", "data", 0)
		if err := st.CreateVolume(ctx, want); err != nil {
			t.Fatal(err)
		}
		if err := st.CreateVolume(ctx, newVolume("v2", "v1", 0)); err != nil { // the id wins
			t.Fatal(err)
		}
		for _, ref := range []string{"data", "v1"} {
			got, err := st.GetVolume(ctx, ref)
			if err != nil || got.Tenant != sandbox.DefaultTenant {
				t.Fatal(got, err)
			}
			sameVolume(t, ref, got, want)
		}
		fails(t, "the name again", st.CreateVolume(ctx, newVolume("v3", "data", 0)), sandbox.ErrAlreadyExists)
		fails(t, "the id again", st.CreateVolume(ctx, newVolume("v1", "more", 0)), sandbox.ErrAlreadyExists)
		_, err := st.GetVolume(ctx, "dat")
		fails(t, "another", err, sandbox.ErrNotFound)
	}},
	{"a volume moves between states by compare and set", func(t *testing.T, st store.Store) {
		ctx, v := in(t.Context()), newVolume("v1", "data", 0)
		if err := st.CreateVolume(ctx, v); err != nil {
			t.Fatal(err)
		}
		if err := st.MoveVolume(ctx, "v1", sandbox.VolumeMaking, sandbox.VolumeReady); err != nil {
			t.Fatal(err)
		}
		if err := st.ResizeVolume(ctx, "v1", 7<<30); err != nil {
			t.Fatal(err)
		}
		var won atomic.Int64
		race(func(int) {
			if err := st.MoveVolume(ctx, "v1", sandbox.VolumeReady, sandbox.VolumeDeleting); err == nil {
				won.Add(1)
			} else {
				fails(t, "too late", err, sandbox.ErrConflict)
			}
		})
		if won.Load() != 1 {
			t.Errorf("%d deletes began", won.Load())
		}
		got, err := st.GetVolume(ctx, "data")
		if err != nil {
			t.Fatal(err)
		}
		v.State, v.Size = sandbox.VolumeDeleting, 7<<30
		sameVolume(t, "then", got, v)
		for range 2 {
			if err := st.DeleteVolume(ctx, "v1"); err != nil {
				t.Fatal(err)
			}
		}
		fails(t, "moving what is gone", st.MoveVolume(ctx, "v1", sandbox.VolumeReady, sandbox.VolumeDeleting), sandbox.ErrNotFound)
		fails(t, "resizing what is gone", st.ResizeVolume(ctx, "v1", 1), sandbox.ErrNotFound)
		if err := st.CreateVolume(ctx, newVolume("v2", "data", 1)); err != nil {
			t.Errorf("the name is not free: %v", err)
		}
	}},
	{"one name raced by many is one volume's and one recording's", func(t *testing.T, st store.Store) {
		ctx := in(t.Context())
		var volumes, recordings atomic.Int64
		race(func(i int) {
			id := fmt.Sprint("id", i)
			if st.CreateVolume(ctx, newVolume(id, "same", i)) == nil {
				volumes.Add(1)
			}
			if st.CreateRecording(ctx, newRecording(id, "same", i)) == nil {
				recordings.Add(1)
			}
		})
		if volumes.Load() != 1 || recordings.Load() != 1 {
			t.Errorf("%d volumes and %d recordings have one name", volumes.Load(), recordings.Load())
		}
	}},
	{"what is no volume and no recording is refused", func(t *testing.T, st store.Store) {
		ctx := in(t.Context())
		for what, break1 := range map[string]func(*sandbox.Volume){
			"no id": func(v *sandbox.Volume) { v.ID = "a b" }, "no name": func(v *sandbox.Volume) { v.Name = "" },
			"no size": func(v *sandbox.Volume) { v.Size = 0 }, "no state": func(v *sandbox.Volume) { v.State = "" },
			"going": func(v *sandbox.Volume) { v.State = sandbox.VolumeDeleting },
		} {
			v := newVolume("v1", "data", 0)
			break1(&v)
			fails(t, what, st.CreateVolume(ctx, v), sandbox.ErrInvalid)
		}
		r := newRecording("", "x", 0)
		fails(t, "no id", st.CreateRecording(ctx, r), sandbox.ErrInvalid)
		r = newRecording("r1", "x", 0)
		r.State = sandbox.RecordingDeleting
		fails(t, "going", st.CreateRecording(ctx, r), sandbox.ErrInvalid)
		fails(t, "a volume of nobody", st.CreateVolume(store.In(ctx, "nobody"), newVolume("v1", "data", 0)), sandbox.ErrNotFound)
		fails(t, "a recording of nobody", st.CreateRecording(store.In(ctx, "nobody"), newRecording("r1", "x", 0)), sandbox.ErrNotFound)
	}},
	{"a recording is kept, finished once, and listed newest first", func(t *testing.T, st store.Store) {
		ctx, want := in(t.Context()), newRecording("r1", "web", 1)
		for _, r := range []sandbox.Recording{want, newRecording("r2", "", 0), newRecording("r3", "", 2)} { // two without a name
			if err := st.CreateRecording(ctx, r); err != nil {
				t.Fatal(err)
			}
		}
		fails(t, "the name again", st.CreateRecording(ctx, newRecording("r4", "web", 0)), sandbox.ErrAlreadyExists)
		for _, ref := range []string{"web", "r1"} {
			got, err := st.GetRecording(ctx, ref)
			if err != nil || got.Tenant != sandbox.DefaultTenant {
				t.Fatal(got, err)
			}
			sameRecording(t, ref, got, want)
		}
		_, err := st.GetRecording(ctx, "")
		fails(t, "by no name", err, sandbox.ErrNotFound)
		want.State, want.FinishedAt, want.Exchanges, want.Bytes, want.Truncated, want.Dropped = sandbox.RecordingInterrupted, at(9), 7, 1<<40, 2, 3
		if err := st.FinishRecording(ctx, sandbox.Recording{ID: "r1", Name: "ignored", State: want.State, FinishedAt: want.FinishedAt, Exchanges: 7, Bytes: 1 << 40, Truncated: 2, Dropped: 3}); err != nil {
			t.Fatal(err)
		}
		for _, id := range []string{"r1", "gone"} {
			if err := st.FinishRecording(ctx, sandbox.Recording{ID: id, State: sandbox.RecordingFinished}); err != nil {
				t.Fatal(err)
			}
		}
		list, err := st.ListRecordings(ctx)
		if err != nil || len(list) != 3 || list[0].ID != "r3" || list[2].ID != "r2" {
			t.Fatal(list, err)
		}
		sameRecording(t, "finished", list[1], want)
		if err := st.MoveRecording(ctx, "r1", want.State, sandbox.RecordingDeleting); err != nil {
			t.Fatal(err)
		}
		fails(t, "again", st.MoveRecording(ctx, "r1", want.State, sandbox.RecordingDeleting), sandbox.ErrConflict)
		for range 2 {
			if err := st.DeleteRecording(ctx, "r1"); err != nil {
				t.Fatal(err)
			}
		}
		fails(t, "gone", st.MoveRecording(ctx, "r1", want.State, sandbox.RecordingDeleting), sandbox.ErrNotFound)
	}},
}

// ownVolumes is about whose volumes and recordings are.
func ownVolumes(t *testing.T, st store.Store, red, blue context.Context) {
	for i, ctx := range []context.Context{red, blue} {
		v, r := newVolume(fmt.Sprint("v", i), "data", i), newRecording(fmt.Sprint("r", i), "web", i)
		v.Tenant, r.Tenant = "somebody", "somebody" // the scope says whose it is
		if err := st.CreateVolume(ctx, v); err != nil {
			t.Fatal(err)
		}
		if err := st.CreateRecording(ctx, r); err != nil {
			t.Fatal(err)
		}
	}
	given := newVolume("v2", "given", 0)
	given.Tenant = "red"
	if err := st.CreateVolume(all(t.Context()), given); err != nil {
		t.Fatal(err)
	}
	if got := volumeNames(t, st, red); !slices.Equal(got, []string{"data", "given"}) {
		t.Errorf("red has %v", got)
	}
	if got := volumeNames(t, st, all(t.Context())); len(got) != 3 {
		t.Errorf("all have %v", got)
	}
	if v, err := st.GetVolume(red, "data"); err != nil || v.ID != "v0" || v.Tenant != "red" {
		t.Error(v, err)
	}
	if r, err := st.GetRecording(blue, "web"); err != nil || r.ID != "r1" || r.Tenant != "blue" {
		t.Error(r, err)
	}
	_, err := st.GetVolume(blue, "v0")
	fails(t, "another's by id", err, sandbox.ErrNotFound)
	_, err = st.GetRecording(blue, "r0")
	fails(t, "another's by id", err, sandbox.ErrNotFound)
	fails(t, "moving another's", st.MoveVolume(blue, "v0", sandbox.VolumeMaking, sandbox.VolumeReady), sandbox.ErrNotFound)
	fails(t, "moving another's", st.MoveRecording(blue, "r0", sandbox.RecordingOpen, sandbox.RecordingDeleting), sandbox.ErrNotFound)
	fails(t, "resizing another's", st.ResizeVolume(blue, "v0", 1), sandbox.ErrNotFound)
	for _, err := range []error{st.DeleteVolume(blue, "v0"), st.DeleteRecording(blue, "r0"),
		st.FinishRecording(blue, sandbox.Recording{ID: "r0", State: sandbox.RecordingFinished})} {
		if err != nil {
			t.Error(err)
		}
	}
	if v, err := st.GetVolume(red, "v0"); err != nil || v.State != sandbox.VolumeMaking || v.Size != 1<<40 {
		t.Error("another changed it:", v, err)
	}
	if r, err := st.GetRecording(red, "r0"); err != nil || r.State != sandbox.RecordingOpen {
		t.Error("another changed it:", r, err)
	}
	if list, err := st.ListRecordings(red); err != nil || len(list) != 1 {
		t.Error(list, err)
	}
	// Neither is forgotten with its tenant.
	for _, forget := range []func() error{func() error { return st.DeleteVolume(blue, "v1") }, func() error { return st.DeleteRecording(blue, "r1") }} {
		fails(t, "a tenant that has some", st.DeleteTenant(all(t.Context()), "blue"), sandbox.ErrPrecondition)
		if err := forget(); err != nil {
			t.Fatal(err)
		}
	}
	if err := st.DeleteTenant(all(t.Context()), "blue"); err != nil {
		t.Error(err)
	}
}
