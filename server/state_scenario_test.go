package server

import (
	"context"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// addState gives a world a snapshot of each kind ("warm", "files", "dir"), a
// template "py" in one version, and a recording "web".
func (w *world) addState() {
	w.Helper()
	spec := sandbox.Spec{Image: "base", Labels: map[string]string{"of": "snap"}}.WithDefaults(sandbox.StandardDefaults())
	w.place(sandbox.Sandbox{ID: "source", Spec: spec, Episode: 1, CreatedAt: time.Now().UTC()})
	for _, s := range []struct {
		name string
		kind sandbox.SnapshotKind
		path string
	}{{"warm", sandbox.MemorySnapshot, ""}, {"files", sandbox.FilesystemSnapshot, ""}, {"dir", sandbox.DirectorySnapshot, "/etc"}, {"py", sandbox.MemorySnapshot, ""}} {
		p, err := w.node.Machine.PrepareSnapshot(w.Context(), "source", node.SnapshotRequest{Kind: s.kind, Path: s.path, Keep: true})
		if err == nil {
			err = w.node.Machine.CommitSnapshot(w.Context(), p.Token)
		}
		if err != nil {
			w.Fatal(err)
		}
		snap := sandbox.Snapshot{ID: "snap" + s.name, Name: s.name, Kind: s.kind, Path: s.path, Sandbox: live, Spec: spec, ImageID: "sha256:base", Node: "n1",
			CreatedAt: time.Now().UTC(), Content: p.Content}
		if s.name == "py" {
			snap.Name = ""
			_, err = w.store.Store.CreateTemplateVersion(w.all(), sandbox.Template{Name: "py", Spec: spec, CreatedAt: time.Now().UTC()}, snap)
		} else {
			_, err = w.store.Store.CreateSnapshot(w.all(), snap)
		}
		if err != nil {
			w.Fatal(err)
		}
	}
	w.node.lose(w, "source")
	w.recorded(sandbox.DefaultTenant, "rec1", "web", "http://a.test/")
}

// addVolume gives a world the volume "data" with the file /f.
func (w *world) addVolume() {
	w.Helper()
	w.volume(sandbox.DefaultTenant, "vol1", "data")
	if _, err := w.node.Volumes().WriteFile(w.Context(), "vol1", "/f", strings.NewReader("content"), sandbox.VolumeFile{}); err != nil {
		w.Fatal(err)
	}
}

// volume gives a tenant one of a gibibyte.
func (w *world) volume(tenant, id, name string) {
	w.Helper()
	err := w.store.Store.CreateVolume(store.Installation(w.Context()), sandbox.Volume{ID: id, Tenant: tenant, Name: name, Size: sandbox.GiB,
		State: sandbox.VolumeReady, Node: "n1", CreatedAt: time.Now().UTC()})
	if err == nil {
		err = w.node.Volumes().Create(w.Context(), id, sandbox.GiB)
	}
	if err != nil {
		w.Fatal(err)
	}
}

func stateScenarios() (list []scenario) {
	invalid, notFound, ended := sandbox.ErrInvalid, sandbox.ErrNotFound, sandbox.ErrEnded
	type call = func(context.Context, *world) error
	add := func(proc, name string, c call, want *sandbox.Error, field, says string) {
		list = append(list, scenario{proc, name, c, want, field, says})
	}
	create := func(spec *covev1.SandboxSpec) call {
		return func(ctx context.Context, w *world) error {
			_, err := w.client.Sandboxes.Create(ctx, connect.NewRequest(&covev1.CreateSandboxRequest{Spec: spec}))
			return err
		}
	}
	for name, ref := range map[string]string{"a memory snapshot": "warm", "a snapshot by id": "snapwarm", "a filesystem snapshot": "files"} {
		add("Sandboxes/Create", name, create(&covev1.SandboxSpec{Snapshot: ref}), nil, "", "")
	}
	add("Sandboxes/Create", "a template", create(&covev1.SandboxSpec{Template: "py"}), nil, "", "")
	add("Sandboxes/Create", "a template's version", create(&covev1.SandboxSpec{Template: "py@1"}), nil, "", "")
	add("Sandboxes/Create", "a directory snapshot", create(&covev1.SandboxSpec{Snapshot: "dir"}), invalid, "spec.snapshot", "cove snapshot mount dir")
	add("Sandboxes/Create", "an unknown snapshot", create(&covev1.SandboxSpec{Snapshot: "wram"}), notFound, "", "did you mean 'warm'?")
	add("Sandboxes/Create", "an unknown template", create(&covev1.SandboxSpec{Template: "pyy"}), notFound, "", "did you mean 'py'?")
	add("Sandboxes/Create", "an unknown version", create(&covev1.SandboxSpec{Template: "py@2"}), notFound, "", "the newest is py@1")
	add("Sandboxes/Create", "image and snapshot", create(&covev1.SandboxSpec{Image: "base", Snapshot: "warm"}), invalid, "spec.image", "snapshot")
	add("Sandboxes/Create", "version 0", create(&covev1.SandboxSpec{Template: "py@0"}), invalid, "spec.template", "")
	add("Sandboxes/Create", "memory beside a snapshot", create(&covev1.SandboxSpec{Snapshot: "warm", Resources: &covev1.Resources{Memory: 1}}), invalid, "spec.resources.memory", "")
	add("Sandboxes/Create", "on_idle", create(&covev1.SandboxSpec{OnIdle: "nap"}), invalid, "spec.on_idle", "pause")
	add("Sandboxes/Create", "volume path", create(&covev1.SandboxSpec{Volumes: []*covev1.VolumeMount{{Volume: "data", Path: "/proc/x"}}}), invalid, "spec.volumes[0].path", "kernel")

	// What takes a sandbox.
	for _, id := range []string{live, dead, none, "B/"} {
		var want *sandbox.Error
		field, says := "", ""
		switch id {
		case dead:
			want, says = ended, "oom"
		case none:
			want = notFound
		case "B/":
			want, field = invalid, "id"
		}
		add("Sandboxes/Pause", id, func(ctx context.Context, w *world) error {
			_, err := w.client.Sandboxes.Pause(ctx, connect.NewRequest(&covev1.PauseRequest{Id: id}))
			return err
		}, want, field, says)
		add("Sandboxes/Resume", id, func(ctx context.Context, w *world) error {
			_, err := w.client.Sandboxes.Resume(ctx, connect.NewRequest(&covev1.ResumeRequest{Id: id}))
			return err
		}, want, field, says)
		add("Sandboxes/Fork", id, func(ctx context.Context, w *world) error {
			_, err := w.client.Sandboxes.Fork(ctx, connect.NewRequest(&covev1.ForkRequest{Id: id, Count: 2}))
			return err
		}, want, field, says)
		add("Sandboxes/Restore", id, func(ctx context.Context, w *world) error {
			_, err := w.client.Sandboxes.Restore(ctx, connect.NewRequest(&covev1.RestoreRequest{Id: id, Snapshot: "warm"}))
			return err
		}, want, field, says)
		if id == "B/" {
			field = "sandbox"
		}
		add("Snapshots/Create", id, drain(func(ctx context.Context, w *world) (*connect.ServerStreamForClient[covev1.CreateSnapshotEvent], error) {
			return w.client.Snapshots.Create(ctx, connect.NewRequest(&covev1.CreateSnapshotRequest{Sandbox: id}))
		}), want, field, says)
		add("Snapshots/Mount", id, func(ctx context.Context, w *world) error {
			_, err := w.client.Snapshots.Mount(ctx, connect.NewRequest(&covev1.MountSnapshotRequest{Sandbox: id, Snapshot: "dir"}))
			return err
		}, want, field, says)
	}

	fork := func(m *covev1.ForkRequest) call {
		return func(ctx context.Context, w *world) error {
			_, err := w.client.Sandboxes.Fork(ctx, connect.NewRequest(m))
			return err
		}
	}
	add("Sandboxes/Fork", "a snapshot", fork(&covev1.ForkRequest{Snapshot: "warm", Count: 3}), nil, "", "")
	add("Sandboxes/Fork", "a filesystem snapshot", fork(&covev1.ForkRequest{Snapshot: "files", Count: 3}), nil, "", "")
	add("Sandboxes/Fork", "nothing", fork(&covev1.ForkRequest{Count: 1}), invalid, "id", "exactly one")
	add("Sandboxes/Fork", "both", fork(&covev1.ForkRequest{Id: live, Snapshot: "warm", Count: 1}), invalid, "snapshot", "exactly one")
	add("Sandboxes/Fork", "none", fork(&covev1.ForkRequest{Id: live}), invalid, "count", "256")
	add("Sandboxes/Fork", "min_ready", fork(&covev1.ForkRequest{Id: live, Count: 1, MinReady: 2}), invalid, "min_ready", "")
	add("Sandboxes/Fork", "labels", fork(&covev1.ForkRequest{Id: live, Count: 1, Labels: map[string]string{"-": ""}}), invalid, "labels", "")
	add("Sandboxes/Fork", "env", fork(&covev1.ForkRequest{Id: live, Count: 1, Env: map[string]string{"-": ""}}), invalid, "env", "")
	add("Sandboxes/Fork", "timeout", fork(&covev1.ForkRequest{Id: live, Count: 1, Timeout: durationpb.New(-1)}), invalid, "timeout", "")
	add("Sandboxes/Fork", "directory", fork(&covev1.ForkRequest{Snapshot: "dir", Count: 1}), invalid, "snapshot", "directory")
	add("Sandboxes/Fork", "unknown snapshot", fork(&covev1.ForkRequest{Snapshot: "zzz", Count: 1}), notFound, "", "cove snapshot ls")
	restore := func(snap string) call {
		return func(ctx context.Context, w *world) error {
			_, err := w.client.Sandboxes.Restore(ctx, connect.NewRequest(&covev1.RestoreRequest{Id: live, Snapshot: snap}))
			return err
		}
	}
	add("Sandboxes/Restore", "filesystem", restore("files"), nil, "", "")
	add("Sandboxes/Restore", "directory", restore("dir"), invalid, "snapshot", "directory")
	add("Sandboxes/Restore", "no snapshot", restore(""), invalid, "snapshot", "")
	add("Sandboxes/Restore", "unknown snapshot", restore("fils"), notFound, "", "did you mean 'files'?")
	tree := func(id string) call {
		return func(ctx context.Context, w *world) error {
			_, err := w.client.Sandboxes.Tree(ctx, connect.NewRequest(&covev1.TreeRequest{Id: id}))
			return err
		}
	}
	add("Sandboxes/Tree", "a sandbox", tree(live), nil, "", "")
	add("Sandboxes/Tree", "an ended one", tree(dead), nil, "", "")
	add("Sandboxes/Tree", "a snapshot by name", tree("warm"), nil, "", "")
	add("Sandboxes/Tree", "unknown", tree(none), notFound, "", "cove snapshot ls")
	add("Sandboxes/Tree", "no id", tree("../x"), invalid, "id", "")

	take := func(f func(*covev1.CreateSnapshotRequest)) call {
		m := &covev1.CreateSnapshotRequest{Sandbox: live}
		f(m)
		return drain(func(ctx context.Context, w *world) (*connect.ServerStreamForClient[covev1.CreateSnapshotEvent], error) {
			return w.client.Snapshots.Create(ctx, connect.NewRequest(m))
		})
	}
	add("Snapshots/Create", "filesystem", take(func(m *covev1.CreateSnapshotRequest) { m.Kind = "filesystem" }), nil, "", "")
	add("Snapshots/Create", "directory", take(func(m *covev1.CreateSnapshotRequest) { m.Kind, m.Path, m.Name = "directory", "/etc", "x" }), nil, "", "")
	add("Snapshots/Create", "kind", take(func(m *covev1.CreateSnapshotRequest) { m.Kind = "disk" }), invalid, "kind", "memory, filesystem and directory")
	add("Snapshots/Create", "directory of nothing", take(func(m *covev1.CreateSnapshotRequest) { m.Kind = "directory" }), invalid, "path", "absolute")
	add("Snapshots/Create", "path of memory", take(func(m *covev1.CreateSnapshotRequest) { m.Path = "/a" }), invalid, "path", "")
	add("Snapshots/Create", "name", take(func(m *covev1.CreateSnapshotRequest) { m.Name = "a b" }), invalid, "name", "63")
	add("Snapshots/Create", "labels", take(func(m *covev1.CreateSnapshotRequest) { m.Labels = map[string]string{"": ""} }), invalid, "labels", "")
	get := func(id string) call {
		return func(ctx context.Context, w *world) error {
			_, err := w.client.Snapshots.Get(ctx, connect.NewRequest(&covev1.GetSnapshotRequest{Id: id}))
			return err
		}
	}
	add("Snapshots/Get", "by name", get("warm"), nil, "", "")
	add("Snapshots/Get", "by id", get("snapwarm"), nil, "", "")
	add("Snapshots/Get", "unknown", get("warn"), notFound, "", "did you mean 'warm'?")
	add("Snapshots/Get", "no id", get(""), invalid, "id", "")
	ls := func(m *covev1.ListSnapshotsRequest) call {
		return func(ctx context.Context, w *world) error {
			_, err := w.client.Snapshots.List(ctx, connect.NewRequest(m))
			return err
		}
	}
	add("Snapshots/List", "all", ls(&covev1.ListSnapshotsRequest{}), nil, "", "")
	add("Snapshots/List", "kind", ls(&covev1.ListSnapshotsRequest{Kind: "disk"}), invalid, "kind", "")
	add("Snapshots/List", "directories", ls(&covev1.ListSnapshotsRequest{Kind: "directory"}), nil, "", "")
	add("Snapshots/List", "sandbox", ls(&covev1.ListSnapshotsRequest{Sandbox: "A"}), invalid, "sandbox", "")
	add("Snapshots/List", "labels", ls(&covev1.ListSnapshotsRequest{Labels: map[string]string{" ": ""}}), invalid, "labels", "")
	add("Snapshots/List", "page size", ls(&covev1.ListSnapshotsRequest{PageSize: 1001}), invalid, "page_size", "")
	add("Snapshots/List", "page token", ls(&covev1.ListSnapshotsRequest{PageToken: "x"}), invalid, "page_token", "")
	rm := func(id string) call {
		return func(ctx context.Context, w *world) error {
			_, err := w.client.Snapshots.Delete(ctx, connect.NewRequest(&covev1.DeleteSnapshotRequest{Id: id}))
			return err
		}
	}
	add("Snapshots/Delete", "by name", rm("warm"), nil, "", "")
	add("Snapshots/Delete", "unknown", rm("warn"), notFound, "", "did you mean 'warm'?")
	add("Snapshots/Delete", "a template's", rm("snappy"), sandbox.ErrPrecondition, "", "py@1")
	add("Snapshots/Delete", "no id", rm(""), invalid, "id", "")
	prune := func(m *covev1.PruneSnapshotsRequest) call {
		return func(ctx context.Context, w *world) error {
			_, err := w.client.Snapshots.Prune(ctx, connect.NewRequest(m))
			return err
		}
	}
	add("Snapshots/Prune", "good", prune(&covev1.PruneSnapshotsRequest{KeepLast: 1}), nil, "", "")
	add("Snapshots/Prune", "no rule", prune(&covev1.PruneSnapshotsRequest{}), invalid, "keep_last", "no rule")
	add("Snapshots/Prune", "age", prune(&covev1.PruneSnapshotsRequest{MaxAge: durationpb.New(-1)}), invalid, "max_age", "")
	add("Snapshots/Prune", "sandbox", prune(&covev1.PruneSnapshotsRequest{KeepLast: 1, Sandbox: "A"}), invalid, "sandbox", "")
	mount := func(m *covev1.MountSnapshotRequest) call {
		m.Sandbox = live
		return func(ctx context.Context, w *world) error {
			_, err := w.client.Snapshots.Mount(ctx, connect.NewRequest(m))
			return err
		}
	}
	add("Snapshots/Mount", "elsewhere", mount(&covev1.MountSnapshotRequest{Snapshot: "dir", Path: "/opt"}), nil, "", "")
	add("Snapshots/Mount", "over the root", mount(&covev1.MountSnapshotRequest{Snapshot: "dir", Path: "/"}), invalid, "path", "root")
	add("Snapshots/Mount", "memory", mount(&covev1.MountSnapshotRequest{Snapshot: "warm"}), invalid, "snapshot", "cove create --snapshot warm")
	add("Snapshots/Mount", "unknown", mount(&covev1.MountSnapshotRequest{Snapshot: "zzz"}), notFound, "", "")
	verify := func(id string) call {
		return func(ctx context.Context, w *world) error {
			_, err := w.client.Snapshots.Verify(ctx, connect.NewRequest(&covev1.VerifySnapshotRequest{Id: id}))
			return err
		}
	}
	add("Snapshots/Verify", "good", verify("warm"), nil, "", "")
	add("Snapshots/Verify", "unknown", verify("zzz"), notFound, "", "")
	add("Snapshots/Verify", "no id", verify("/"), invalid, "id", "")
	return append(list, templateAndVolumeScenarios()...)
}

// drain reads a stream to its end.
func drain[A any](open func(context.Context, *world) (*connect.ServerStreamForClient[A], error)) func(context.Context, *world) error {
	return func(ctx context.Context, w *world) error {
		_, err := stream2(open)(ctx, w)
		return err
	}
}

func templateAndVolumeScenarios() (list []scenario) {
	invalid, notFound := sandbox.ErrInvalid, sandbox.ErrNotFound
	type call = func(context.Context, *world) error
	add := func(proc, name string, c call, want *sandbox.Error, field, says string) {
		list = append(list, scenario{proc, name, c, want, field, says})
	}
	build := func(f func(*covev1.BuildTemplateRequest)) call {
		m := &covev1.BuildTemplateRequest{Name: "py", Spec: &covev1.SandboxSpec{}, Start: sleeping}
		f(m)
		return drain(func(ctx context.Context, w *world) (*connect.ServerStreamForClient[covev1.BuildTemplateEvent], error) {
			return w.client.Templates.Build(ctx, connect.NewRequest(m))
		})
	}
	type req = covev1.BuildTemplateRequest
	add("Templates/Build", "good", build(func(m *req) {}), nil, "", "")
	add("Templates/Build", "no start command", build(func(m *req) { m.Start = "" }), nil, "", "")
	add("Templates/Build", "of a snapshot", build(func(m *req) { m.Spec.Snapshot = "warm" }), nil, "", "")
	add("Templates/Build", "ready by command", build(func(m *req) { m.ReadyCommand = "true" }), nil, "", "")
	add("Templates/Build", "ready by port", build(func(m *req) { m.Start, m.ReadyPort = serving, 8080 }), nil, "", "")
	add("Templates/Build", "name", build(func(m *req) { m.Name = "a@1" }), invalid, "name", "63")
	add("Templates/Build", "both checks", build(func(m *req) { m.ReadyCommand, m.ReadyPort = "true", 1 }), invalid, "ready_port", "")
	add("Templates/Build", "timeout", build(func(m *req) { m.ReadyTimeout = durationpb.New(-1) }), invalid, "ready_timeout", "")
	add("Templates/Build", "start", build(func(m *req) { m.Start = "\x00" }), invalid, "start", "NUL")
	add("Templates/Build", "of a template", build(func(m *req) { m.Spec.Template = "py" }), invalid, "spec.template", "")
	add("Templates/Build", "with a volume", build(func(m *req) { m.Spec.Volumes = []*covev1.VolumeMount{{Volume: "data", Path: "/d"}} }), invalid, "spec.volumes", "")
	add("Templates/Build", "memory", build(func(m *req) { m.Spec.Resources = &covev1.Resources{Memory: 1} }), invalid, "spec.resources.memory", "")
	add("Templates/Build", "unknown image", build(func(m *req) { m.Spec.Image = "bse" }), sandbox.ErrImageNotFound, "", "did you mean 'base'?")
	add("Templates/Build", "a start command that fails", build(func(m *req) { m.Start, m.ReadyPort = crashing, 80 }), sandbox.ErrPrecondition, "start", "no port free")
	get := func(name string) call {
		return func(ctx context.Context, w *world) error {
			_, err := w.client.Templates.Get(ctx, connect.NewRequest(&covev1.GetTemplateRequest{Name: name}))
			return err
		}
	}
	add("Templates/Get", "newest", get("py"), nil, "", "")
	add("Templates/Get", "version", get("py@1"), nil, "", "")
	add("Templates/Get", "unknown", get("pi"), notFound, "", "did you mean 'py'?")
	add("Templates/Get", "name", get("@"), invalid, "name", "")
	ls := func(name string) call {
		return func(ctx context.Context, w *world) error {
			_, err := w.client.Templates.List(ctx, connect.NewRequest(&covev1.ListTemplatesRequest{Name: name}))
			return err
		}
	}
	add("Templates/List", "all", ls(""), nil, "", "")
	add("Templates/List", "versions", ls("py"), nil, "", "")
	add("Templates/List", "unknown", ls("pz"), notFound, "", "did you mean 'py'?")
	add("Templates/List", "name", ls("a b"), invalid, "name", "")
	rm := func(name string) call {
		return func(ctx context.Context, w *world) error {
			_, err := w.client.Templates.Delete(ctx, connect.NewRequest(&covev1.DeleteTemplateRequest{Name: name}))
			return err
		}
	}
	add("Templates/Delete", "all versions", rm("py"), nil, "", "")
	add("Templates/Delete", "one", rm("py@1"), nil, "", "")
	add("Templates/Delete", "unknown version", rm("py@7"), notFound, "", "py@1")
	add("Templates/Delete", "name", rm(""), invalid, "name", "")

	tag := func(name string, tags ...string) call {
		return func(ctx context.Context, w *world) error {
			_, err := w.client.Templates.Tag(ctx, connect.NewRequest(&covev1.TagTemplateRequest{Name: name, Tags: tags}))
			if err == nil {
				_, err = w.client.Templates.Get(ctx, connect.NewRequest(&covev1.GetTemplateRequest{Name: "py:" + tags[0]}))
			}
			return err
		}
	}
	untag := func(name string, tags ...string) call {
		return func(ctx context.Context, w *world) error {
			_, err := w.client.Templates.Untag(ctx, connect.NewRequest(&covev1.UntagTemplateRequest{Name: name, Tags: tags}))
			return err
		}
	}
	add("Templates/Tag", "newest", tag("py", "v1", "stable"), nil, "", "")
	add("Templates/Tag", "unknown", tag("pi", "v1"), notFound, "", "did you mean 'py'?")
	add("Templates/Tag", "tags", tag("py", ":v1"), invalid, "tags", "")
	add("Templates/Get", "unknown tag", get("py:v9"), notFound, "", "py")
	add("Templates/Untag", "one", untag("py", "v1"), nil, "", "")
	add("Templates/Untag", "unknown", untag("pi", "v1"), notFound, "", "did you mean 'py'?")
	add("Templates/Untag", "tags", untag("py"), invalid, "tags", "")

	vol := func(f func(context.Context, *world) (any, error)) call {
		return func(ctx context.Context, w *world) error { _, err := f(ctx, w); return err }
	}
	mk := func(m *covev1.CreateVolumeRequest) call {
		return vol(func(ctx context.Context, w *world) (any, error) {
			return w.client.Volumes.Create(ctx, connect.NewRequest(m))
		})
	}
	add("Volumes/Create", "default size", mk(&covev1.CreateVolumeRequest{Name: "new"}), nil, "", "")
	add("Volumes/Create", "taken", mk(&covev1.CreateVolumeRequest{Name: "data"}), sandbox.ErrAlreadyExists, "", "data")
	add("Volumes/Create", "name", mk(&covev1.CreateVolumeRequest{Name: "A"}), invalid, "name", "lower-case")
	add("Volumes/Create", "size", mk(&covev1.CreateVolumeRequest{Name: "a", Size: 5}), invalid, "size", "16MiB")
	add("Volumes/Create", "below what a volume can be", mk(&covev1.CreateVolumeRequest{Name: "a", Size: 16<<20 - 1}), invalid, "size", "16MiB")
	add("Volumes/Create", "labels", mk(&covev1.CreateVolumeRequest{Name: "a", Labels: map[string]string{"": ""}}), invalid, "labels", "")
	add("Volumes/List", "all", vol(func(ctx context.Context, w *world) (any, error) {
		return w.client.Volumes.List(ctx, connect.NewRequest(&covev1.ListVolumesRequest{}))
	}), nil, "", "")
	add("Volumes/List", "labels", vol(func(ctx context.Context, w *world) (any, error) {
		return w.client.Volumes.List(ctx, connect.NewRequest(&covev1.ListVolumesRequest{Labels: map[string]string{"": ""}}))
	}), invalid, "labels", "")
	// What takes a volume.
	for _, name := range []string{"data", "vol1", "dat", "B/"} {
		var want *sandbox.Error
		field, says := "", ""
		switch name {
		case "dat":
			want, says = notFound, "did you mean 'data'?"
		case "B/":
			want, field = invalid, "name"
		}
		add("Volumes/Get", name, vol(func(ctx context.Context, w *world) (any, error) {
			return w.client.Volumes.Get(ctx, connect.NewRequest(&covev1.GetVolumeRequest{Name: name}))
		}), want, field, says)
		add("Volumes/Delete", name, vol(func(ctx context.Context, w *world) (any, error) {
			return w.client.Volumes.Delete(ctx, connect.NewRequest(&covev1.DeleteVolumeRequest{Name: name}))
		}), want, field, says)
		add("Volumes/Resize", name, vol(func(ctx context.Context, w *world) (any, error) {
			return w.client.Volumes.Resize(ctx, connect.NewRequest(&covev1.ResizeVolumeRequest{Name: name, Size: 2 << 30}))
		}), want, field, says)
		add("Volumes/Snapshot", name, vol(func(ctx context.Context, w *world) (any, error) {
			return w.client.Volumes.Snapshot(ctx, connect.NewRequest(&covev1.SnapshotVolumeRequest{Name: name}))
		}), want, field, says)
		add("Volumes/Clone", name, vol(func(ctx context.Context, w *world) (any, error) {
			return w.client.Volumes.Clone(ctx, connect.NewRequest(&covev1.CloneVolumeRequest{Name: name, NewName: "copy"}))
		}), want, field, says)
		add("Volumes/ListFiles", name, vol(func(ctx context.Context, w *world) (any, error) {
			return w.client.Volumes.ListFiles(ctx, connect.NewRequest(&covev1.ListVolumeFilesRequest{Name: name}))
		}), want, field, says)
		add("Volumes/RemoveFile", name, vol(func(ctx context.Context, w *world) (any, error) {
			return w.client.Volumes.RemoveFile(ctx, connect.NewRequest(&covev1.RemoveVolumeFileRequest{Name: name, Path: "/f"}))
		}), want, field, says)
	}
	for _, p := range []struct {
		proc string
		call func(ctx context.Context, w *world, id string, port int32) error
	}{
		{"Ports/Url", func(ctx context.Context, w *world, id string, port int32) error {
			_, err := w.client.Ports.Url(ctx, connect.NewRequest(&covev1.PortUrlRequest{SandboxId: id, Port: port}))
			return err
		}},
		{"Ports/Set", func(ctx context.Context, w *world, id string, port int32) error {
			_, err := w.client.Ports.Set(ctx, connect.NewRequest(&covev1.SetPortRequest{SandboxId: id, Port: port}))
			return err
		}},
		{"Ports/WaitReady", func(ctx context.Context, w *world, id string, port int32) error {
			_, err := w.client.Ports.WaitReady(ctx, connect.NewRequest(&covev1.WaitReadyRequest{SandboxId: id, Port: port}))
			return err
		}},
	} {
		add(p.proc, "no such sandbox", func(ctx context.Context, w *world) error { return p.call(ctx, w, "nosuch", 80) }, notFound, "", "")
		add(p.proc, "port", func(ctx context.Context, w *world) error { return p.call(ctx, w, "nosuch", 70000) }, invalid, "port", "")
	}
	for _, c := range []struct {
		name         string
		m            *covev1.ServeCallbacksRequest
		want         *sandbox.Error
		field, words string
	}{
		{"no such sandbox", &covev1.ServeCallbacksRequest{SandboxId: "nosuch", Name: "llm"}, notFound, "", ""},
		{"name", &covev1.ServeCallbacksRequest{SandboxId: "nosuch", Name: "L/M"}, invalid, "name", "a-z"},
		{"port", &covev1.ServeCallbacksRequest{SandboxId: "nosuch", Name: "llm", Port: 70000}, invalid, "port", ""},
		{"owner", &covev1.ServeCallbacksRequest{SandboxId: "nosuch", Name: "llm", Owner: strings.Repeat("x", 65)}, invalid, "owner", "64"},
	} {
		add("Callbacks/Serve", c.name, func(ctx context.Context, w *world) error {
			s, err := w.client.Callbacks.Serve(ctx, connect.NewRequest(c.m))
			if err != nil {
				return err
			}
			defer s.Close()
			for s.Receive() {
			}
			return s.Err()
		}, c.want, c.field, c.words)
	}
	add("Callbacks/Close", "nobody serves", func(ctx context.Context, w *world) error {
		_, err := w.client.Callbacks.Close(ctx, connect.NewRequest(&covev1.CloseCallbacksRequest{SandboxId: live, Name: "llm"}))
		return err
	}, notFound, "", "llm")
	add("Ports/SignSsh", "no such sandbox", func(ctx context.Context, w *world) error {
		_, err := w.client.Ports.SignSsh(ctx, connect.NewRequest(&covev1.SignSshRequest{SandboxId: "nosuch", PublicKey: "x"}))
		return err
	}, notFound, "", "")
	add("Volumes/Resize", "size", vol(func(ctx context.Context, w *world) (any, error) {
		return w.client.Volumes.Resize(ctx, connect.NewRequest(&covev1.ResizeVolumeRequest{Name: "data"}))
	}), invalid, "size", "")
	add("Volumes/Clone", "new name", vol(func(ctx context.Context, w *world) (any, error) {
		return w.client.Volumes.Clone(ctx, connect.NewRequest(&covev1.CloneVolumeRequest{Name: "data"}))
	}), invalid, "new_name", "")
	add("Volumes/ListFiles", "depth", vol(func(ctx context.Context, w *world) (any, error) {
		return w.client.Volumes.ListFiles(ctx, connect.NewRequest(&covev1.ListVolumeFilesRequest{Name: "data", Depth: -1}))
	}), invalid, "depth", "")
	add("Volumes/ListFiles", "path", vol(func(ctx context.Context, w *world) (any, error) {
		return w.client.Volumes.ListFiles(ctx, connect.NewRequest(&covev1.ListVolumeFilesRequest{Name: "data", Path: "x"}))
	}), invalid, "path", "")
	add("Volumes/RemoveFile", "missing", vol(func(ctx context.Context, w *world) (any, error) {
		return w.client.Volumes.RemoveFile(ctx, connect.NewRequest(&covev1.RemoveVolumeFileRequest{Name: "data", Path: "/none"}))
	}), notFound, "", "/none")
	add("Volumes/RemoveFile", "path", vol(func(ctx context.Context, w *world) (any, error) {
		return w.client.Volumes.RemoveFile(ctx, connect.NewRequest(&covev1.RemoveVolumeFileRequest{Name: "data"}))
	}), invalid, "path", "")
	return list
}
