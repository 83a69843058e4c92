package world

import (
	"context"
	"io"
	"testing"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/wire"
)

// Take is what to take of a sandbox.
type Take struct {
	Kind sandbox.SnapshotKind
	Path string
	Stop bool
}

// TrySnapshot takes a snapshot.
func (b *Box) TrySnapshot(ctx context.Context, k Take) (sandbox.Snapshot, error) {
	ctx, cancel := context.WithTimeout(ctx, callWithin)
	defer cancel()
	s, err := b.W.Client().Snapshots.Create(ctx, connect.NewRequest(&covev1.CreateSnapshotRequest{Sandbox: b.ID, Kind: string(k.Kind), Path: k.Path, Stop: k.Stop}))
	if err != nil {
		return sandbox.Snapshot{}, err
	}
	defer s.Close()
	for s.Receive() {
		if p := s.Msg().Snapshot; p != nil {
			return wire.SnapshotFrom(p)
		}
	}
	return sandbox.Snapshot{}, streamEnd(s.Err())
}

// streamEnd is why a stream brought no result.
func streamEnd(err error) error {
	if err != nil {
		return err
	}
	return &sandbox.Error{Class: sandbox.Unavailable, Msg: "the stream ended before the result", Err: io.ErrUnexpectedEOF}
}

// Snapshot is TrySnapshot for those that must work.
func (b *Box) Snapshot(t testing.TB, k Take) sandbox.Snapshot {
	t.Helper()
	s, err := b.TrySnapshot(t.Context(), k)
	if err != nil {
		t.Fatalf("%s snapshot of %s: %v", k.Kind, b.ID, err)
	}
	return s
}

// TryPause puts the sandbox on standby.
func (b *Box) TryPause(ctx context.Context, cold bool) error {
	ctx, cancel := context.WithTimeout(ctx, callWithin)
	defer cancel()
	_, err := b.W.Client().Sandboxes.Pause(ctx, connect.NewRequest(&covev1.PauseRequest{Id: b.ID, Cold: cold}))
	return err
}

// Pause is TryPause that must work.
func (b *Box) Pause(t testing.TB, cold bool) {
	t.Helper()
	if err := b.TryPause(t.Context(), cold); err != nil {
		t.Fatalf("pause %s: %v", b.ID, err)
	}
}

// TryResume wakes the sandbox.
func (b *Box) TryResume(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, callWithin)
	defer cancel()
	_, err := b.W.Client().Sandboxes.Resume(ctx, connect.NewRequest(&covev1.ResumeRequest{Id: b.ID}))
	return err
}

// TryRestore rolls the sandbox back in place.
func (b *Box) TryRestore(ctx context.Context, snapshot string) error {
	ctx, cancel := context.WithTimeout(ctx, callWithin)
	defer cancel()
	_, err := b.W.Client().Sandboxes.Restore(ctx, connect.NewRequest(&covev1.RestoreRequest{Id: b.ID, Snapshot: snapshot}))
	return err
}

// TryFork makes n children, all or none.
func (b *Box) TryFork(ctx context.Context, n int, labels map[string]string) ([]*Box, error) {
	ctx, cancel := context.WithTimeout(ctx, callWithin)
	defer cancel()
	r, err := b.W.Client().Sandboxes.Fork(ctx, connect.NewRequest(&covev1.ForkRequest{Id: b.ID, Count: int32(n), Labels: labels}))
	if err != nil {
		return nil, err
	}
	var out []*Box
	for _, res := range r.Msg.Results {
		out = append(out, &Box{b.W, res.Sandbox.Id})
	}
	return out, nil
}

// TryMount puts a directory snapshot into the sandbox.
func (b *Box) TryMount(ctx context.Context, snapshot, path string, unpack bool) error {
	ctx, cancel := context.WithTimeout(ctx, callWithin)
	defer cancel()
	_, err := b.W.Client().Snapshots.Mount(ctx, connect.NewRequest(&covev1.MountSnapshotRequest{Sandbox: b.ID, Snapshot: snapshot, Path: path, Unpack: unpack}))
	return err
}

// Snapshots lists every snapshot.
func (w *World) Snapshots(t testing.TB) []sandbox.Snapshot {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), callWithin)
	defer cancel()
	var all []sandbox.Snapshot
	for token := ""; ; {
		r, err := w.Client().Snapshots.List(ctx, connect.NewRequest(&covev1.ListSnapshotsRequest{PageToken: token}))
		if err != nil {
			t.Fatalf("listing snapshots: %v", err)
		}
		for _, p := range r.Msg.Snapshots {
			s, err := wire.SnapshotFrom(p)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, s)
		}
		if token = r.Msg.NextPageToken; token == "" {
			return all
		}
	}
}

// Verify reads every byte of a snapshot.
func (w *World) Verify(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, callWithin)
	defer cancel()
	_, err := w.Client().Snapshots.Verify(ctx, connect.NewRequest(&covev1.VerifySnapshotRequest{Id: id}))
	return err
}

// DeleteSnapshot forgets a snapshot.
func (w *World) DeleteSnapshot(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, callWithin)
	defer cancel()
	_, err := w.Client().Snapshots.Delete(ctx, connect.NewRequest(&covev1.DeleteSnapshotRequest{Id: id}))
	return err
}

// From is a small spec that starts from a snapshot.
func From(snapshot string) sandbox.Spec {
	s := Small()
	s.Snapshot = snapshot
	return s
}

// BuildTemplate makes the next version of a template of the base image.
func (w *World) BuildTemplate(ctx context.Context, name, start, ready string) (sandbox.Template, error) {
	ctx, cancel := context.WithTimeout(ctx, callWithin)
	defer cancel()
	s, err := w.Client().Templates.Build(ctx, connect.NewRequest(&covev1.BuildTemplateRequest{Name: name, Spec: wire.Spec(Small()), Start: start, ReadyCommand: ready}))
	if err != nil {
		return sandbox.Template{}, err
	}
	defer s.Close()
	for s.Receive() {
		if p := s.Msg().Template; p != nil {
			return wire.TemplateFrom(p)
		}
	}
	return sandbox.Template{}, streamEnd(s.Err())
}

// Templates lists every version of every template.
func (w *World) Templates(t testing.TB) []sandbox.Template {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), callWithin)
	defer cancel()
	var all []sandbox.Template
	newest, err := w.Client().Templates.List(ctx, connect.NewRequest(&covev1.ListTemplatesRequest{}))
	if err != nil {
		t.Fatalf("listing templates: %v", err)
	}
	for _, n := range newest.Msg.Templates {
		r, err := w.Client().Templates.List(ctx, connect.NewRequest(&covev1.ListTemplatesRequest{Name: n.Name}))
		if err != nil {
			t.Fatalf("listing templates: %v", err)
		}
		for _, p := range r.Msg.Templates {
			tpl, err := wire.TemplateFrom(p)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, tpl)
		}
	}
	return all
}

// Volumes lists every volume.
func (w *World) Volumes(t testing.TB) []sandbox.Volume {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), callWithin)
	defer cancel()
	r, err := w.Client().Volumes.List(ctx, connect.NewRequest(&covev1.ListVolumesRequest{}))
	if err != nil {
		t.Fatalf("listing volumes: %v", err)
	}
	var all []sandbox.Volume
	for _, p := range r.Msg.Volumes {
		all = append(all, wire.VolumeFrom(p))
	}
	return all
}

// Forget deletes every sandbox, snapshot, template and volume.
func (w *World) Forget(t testing.TB) {
	t.Helper()
	w.killAll(t)
	ctx, cancel := context.WithTimeout(context.Background(), callWithin)
	defer cancel()
	w.checkpoints.Lock()
	w.checkpoints.of = nil
	w.checkpoints.Unlock()
	for _, s := range w.Snapshots(t) {
		if err := w.DeleteSnapshot(ctx, s.ID); err != nil {
			t.Errorf("deleting snapshot %s: %v", s.ID, err)
		}
	}
	for _, tpl := range w.Templates(t) {
		if _, err := w.Client().Templates.Delete(ctx, connect.NewRequest(&covev1.DeleteTemplateRequest{Name: tpl.Ref()})); err != nil {
			t.Errorf("deleting template %s: %v", tpl.Ref(), err)
		}
	}
	for _, v := range w.Volumes(t) {
		if _, err := w.Client().Volumes.Delete(ctx, connect.NewRequest(&covev1.DeleteVolumeRequest{Name: v.ID})); err != nil {
			t.Errorf("deleting volume %s: %v", v.Name, err)
		}
	}
}
