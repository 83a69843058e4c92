package cli

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/wire"
)

// fakeState is what the fake knows of snapshots, templates and volumes; guarded
// by fakeAPI.mu.
type fakeState struct {
	snapshots []*covev1.Snapshot
	templates []*covev1.Template
	volumes   []*covev1.Volume
	tree      []*covev1.TreeNode
	unchanged bool
	broken    int             // so many of a fork's children fail
	asked     []proto.Message // requests of the calls below, in order
	content   map[string]string
}

func (f *fakeAPI) handleState(mux *http.ServeMux, opt connect.HandlerOption) {
	f.content = map[string]string{}
	mux.Handle(covev1.NewSnapshotsHandler(fakeSnapshots{f}, opt))
	mux.Handle(covev1.NewTemplatesHandler(fakeTemplates{fakeAPI: f}, opt))
	mux.Handle(covev1.NewVolumesHandler(fakeVolumes{f}, opt))
	f.handleRecordings(mux, opt)
	mux.HandleFunc("GET /v1/snapshots/{id}/tar", func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "tar of "+r.PathValue("id")) })
	mux.HandleFunc("PUT /v1/volumes/{name}/files", func(w http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		f.mu.Lock()
		f.content[r.PathValue("name")+r.URL.Query().Get("path")] = string(b)
		f.queries = append(f.queries, r.URL.Query().Encode())
		f.mu.Unlock()
		out, _ := protojson.Marshal(&covev1.FileInfo{Path: r.URL.Query().Get("path"), Size: int64(len(b))})
		_, _ = w.Write(out)
	})
	mux.HandleFunc("GET /v1/volumes/{name}/files", func(w http.ResponseWriter, r *http.Request) {
		f.mu.Lock()
		defer f.mu.Unlock()
		c, ok := f.content[r.PathValue("name")+r.URL.Query().Get("path")]
		if !ok {
			wire.WriteError(w, r, &sandbox.Error{Class: sandbox.NotFound, Msg: "no file"})
			return
		}
		fmt.Fprint(w, c)
	})
}

// last is the request of the latest call.
func (f *fakeAPI) last() proto.Message {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.asked) == 0 {
		return nil
	}
	return f.asked[len(f.asked)-1]
}

func (f *fakeAPI) note(m proto.Message) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.asked = append(f.asked, m)
}

// goneAway is an error as often as f.away says.
func (f *fakeAPI) goneAway() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.away == 0 {
		return nil
	}
	f.away--
	return &sandbox.Error{Class: sandbox.Unavailable, Msg: "gone"}
}

func (f *fakeAPI) addSnapshot(id, name, kind string) *covev1.Snapshot {
	s := &covev1.Snapshot{Id: id, Name: name, Kind: kind, Sandbox: "abc", Size: 100 << 20, Stored: 3 << 20, Spec: &covev1.SandboxSpec{Image: "base"}}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.snapshots = append(f.snapshots, s)
	return s
}

func (f fakeSandboxes) Pause(ctx context.Context, r *connect.Request[covev1.PauseRequest]) (*connect.Response[covev1.PauseResponse], error) {
	f.note(r.Msg)
	f.mu.Lock()
	defer f.mu.Unlock()
	s, err := f.find(r.Msg.GetId())
	if err != nil {
		return nil, err
	}
	s.Standby = "hot"
	if r.Msg.Cold {
		s.Standby = "cold"
	}
	return connect.NewResponse(&covev1.PauseResponse{Sandbox: s}), nil
}
func (f fakeSandboxes) Resume(ctx context.Context, r *connect.Request[covev1.ResumeRequest]) (*connect.Response[covev1.ResumeResponse], error) {
	f.note(r.Msg)
	f.mu.Lock()
	defer f.mu.Unlock()
	s, err := f.find(r.Msg.GetId())
	if err != nil {
		return nil, err
	}
	s.Standby = ""
	return connect.NewResponse(&covev1.ResumeResponse{Sandbox: s, NodeTime: durationpb.New(2 * time.Millisecond)}), nil
}
func (f fakeSandboxes) Fork(ctx context.Context, r *connect.Request[covev1.ForkRequest]) (*connect.Response[covev1.ForkResponse], error) {
	f.note(r.Msg)
	if err := f.goneAway(); err != nil {
		return nil, err
	}
	if f.onCreate != nil {
		f.onCreate()
	}
	out := &covev1.ForkResponse{Paused: durationpb.New(40 * time.Millisecond)}
	for i := range int(r.Msg.GetCount()) {
		if i < f.broken {
			d, msg := wire.ErrorDetail(&sandbox.Error{Class: sandbox.NoCapacity, Msg: "full"})
			out.Results = append(out.Results, &covev1.ForkResult{Error: d, Message: msg})
			continue
		}
		out.Results = append(out.Results, &covev1.ForkResult{Sandbox: f.addSandbox(fmt.Sprintf("child%d", i+1), r.Msg.GetLabels())})
	}
	return connect.NewResponse(out), nil
}
func (f fakeSandboxes) Restore(ctx context.Context, r *connect.Request[covev1.RestoreRequest]) (*connect.Response[covev1.RestoreResponse], error) {
	f.note(r.Msg)
	f.mu.Lock()
	defer f.mu.Unlock()
	s, err := f.find(r.Msg.GetId())
	if err != nil {
		return nil, err
	}
	s.Episode++
	s.Parent = r.Msg.GetSnapshot()
	return connect.NewResponse(&covev1.RestoreResponse{Sandbox: s, NodeTime: durationpb.New(90 * time.Millisecond)}), nil
}
func (f fakeSandboxes) Tree(ctx context.Context, r *connect.Request[covev1.TreeRequest]) (*connect.Response[covev1.TreeResponse], error) {
	f.note(r.Msg)
	for _, n := range f.tree {
		if n.GetId() == r.Msg.GetId() {
			return connect.NewResponse(&covev1.TreeResponse{Nodes: f.tree}), nil
		}
	}
	return nil, &sandbox.Error{Class: sandbox.NotFound, Msg: "no sandbox or snapshot '" + r.Msg.GetId() + "'"}
}

type fakeSnapshots struct{ *fakeAPI }

func (f fakeSnapshots) Create(ctx context.Context, r *connect.Request[covev1.CreateSnapshotRequest], s *connect.ServerStream[covev1.CreateSnapshotEvent]) error {
	f.note(r.Msg)
	if err := f.goneAway(); err != nil {
		return err
	}
	snap := f.addSnapshot("snap1", r.Msg.GetName(), r.Msg.GetKind())
	for _, ev := range []*covev1.CreateSnapshotEvent{{Step: "freeze"}, {Step: "store", Done: 5, Total: 10},
		{Step: "done", Snapshot: snap, Unchanged: f.unchanged, Paused: durationpb.New(30 * time.Millisecond)}} {
		if err := s.Send(ev); err != nil {
			return err
		}
	}
	return nil
}
func (f fakeSnapshots) Get(ctx context.Context, r *connect.Request[covev1.GetSnapshotRequest]) (*connect.Response[covev1.GetSnapshotResponse], error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, s := range f.snapshots {
		if s.GetId() == r.Msg.GetId() || s.GetName() == r.Msg.GetId() {
			return connect.NewResponse(&covev1.GetSnapshotResponse{Snapshot: s}), nil
		}
	}
	return nil, &sandbox.Error{Class: sandbox.NotFound, Msg: "no snapshot '" + r.Msg.GetId() + "'; did you mean 'warm'?"}
}
func (f fakeSnapshots) List(ctx context.Context, r *connect.Request[covev1.ListSnapshotsRequest]) (*connect.Response[covev1.ListSnapshotsResponse], error) {
	f.note(r.Msg)
	f.mu.Lock()
	defer f.mu.Unlock()
	// Pages of one, so that every caller must page.
	from := 0
	fmt.Sscan(r.Msg.GetPageToken(), &from)
	out := &covev1.ListSnapshotsResponse{}
	if from < len(f.snapshots) {
		out.Snapshots = f.snapshots[from : from+1]
	}
	if from+1 < len(f.snapshots) {
		out.NextPageToken = fmt.Sprint(from + 1)
	}
	return connect.NewResponse(out), nil
}
func (f fakeSnapshots) Delete(ctx context.Context, r *connect.Request[covev1.DeleteSnapshotRequest]) (*connect.Response[covev1.DeleteSnapshotResponse], error) {
	f.note(r.Msg)
	return connect.NewResponse(&covev1.DeleteSnapshotResponse{Freed: 3 << 20}), nil
}
func (f fakeSnapshots) Prune(ctx context.Context, r *connect.Request[covev1.PruneSnapshotsRequest]) (*connect.Response[covev1.PruneSnapshotsResponse], error) {
	f.note(r.Msg)
	return connect.NewResponse(&covev1.PruneSnapshotsResponse{Removed: []*covev1.PrunedSnapshot{{Id: "s1", Reason: "keep_last", Stored: 2 << 20}, {Id: "s2", Reason: "max_age", Stored: 1 << 20}}}), nil
}
func (f fakeSnapshots) Mount(ctx context.Context, r *connect.Request[covev1.MountSnapshotRequest]) (*connect.Response[covev1.MountSnapshotResponse], error) {
	f.note(r.Msg)
	return connect.NewResponse(&covev1.MountSnapshotResponse{}), nil
}
func (f fakeSnapshots) Verify(ctx context.Context, r *connect.Request[covev1.VerifySnapshotRequest]) (*connect.Response[covev1.VerifySnapshotResponse], error) {
	f.note(r.Msg)
	return connect.NewResponse(&covev1.VerifySnapshotResponse{Bytes: 1 << 20}), nil
}

type fakeTemplates struct {
	covev1.UnimplementedTemplatesHandler
	*fakeAPI
}

func (f fakeTemplates) Build(ctx context.Context, r *connect.Request[covev1.BuildTemplateRequest], s *connect.ServerStream[covev1.BuildTemplateEvent]) error {
	f.note(r.Msg)
	for _, ev := range []*covev1.BuildTemplateEvent{{Step: "create"}, {Step: "start"}, {Step: "start", Output: []byte("listening \x1b]0;x\x07on\n80")}, {Step: "ready"}} {
		if err := s.Send(ev); err != nil {
			return err
		}
	}
	if strings.Contains(r.Msg.GetStart(), "crash") {
		return (&sandbox.Error{Class: sandbox.Precondition, Field: "start", Msg: "the start command exited with 3"}).WithHint("the start command printed:\nno port\x1b[2J free")
	}
	tpl := &covev1.Template{Name: r.Msg.GetName(), Version: 4, Spec: r.Msg.GetSpec(), Start: r.Msg.GetStart(), Size: 50 << 20, BuildTime: durationpb.New(3 * time.Second)}
	return s.Send(&covev1.BuildTemplateEvent{Step: "done", Template: tpl})
}
func (f fakeTemplates) Get(ctx context.Context, r *connect.Request[covev1.GetTemplateRequest]) (*connect.Response[covev1.GetTemplateResponse], error) {
	return connect.NewResponse(&covev1.GetTemplateResponse{Template: &covev1.Template{Name: r.Msg.GetName(), Version: 1}}), nil
}
func (f fakeTemplates) List(ctx context.Context, r *connect.Request[covev1.ListTemplatesRequest]) (*connect.Response[covev1.ListTemplatesResponse], error) {
	f.note(r.Msg)
	return connect.NewResponse(&covev1.ListTemplatesResponse{Templates: f.templates}), nil
}
func (f fakeTemplates) Tag(ctx context.Context, r *connect.Request[covev1.TagTemplateRequest]) (*connect.Response[covev1.TagTemplateResponse], error) {
	f.note(r.Msg)
	return connect.NewResponse(&covev1.TagTemplateResponse{Template: &covev1.Template{Name: "web", Version: 3, Tags: r.Msg.GetTags()}}), nil
}
func (f fakeTemplates) Untag(ctx context.Context, r *connect.Request[covev1.UntagTemplateRequest]) (*connect.Response[covev1.UntagTemplateResponse], error) {
	f.note(r.Msg)
	return connect.NewResponse(&covev1.UntagTemplateResponse{}), nil
}
func (f fakeTemplates) Delete(ctx context.Context, r *connect.Request[covev1.DeleteTemplateRequest]) (*connect.Response[covev1.DeleteTemplateResponse], error) {
	f.note(r.Msg)
	return connect.NewResponse(&covev1.DeleteTemplateResponse{Versions: []int64{1, 2}}), nil
}

type fakeVolumes struct{ *fakeAPI }

func (f fakeVolumes) Create(ctx context.Context, r *connect.Request[covev1.CreateVolumeRequest]) (*connect.Response[covev1.CreateVolumeResponse], error) {
	f.note(r.Msg)
	return connect.NewResponse(&covev1.CreateVolumeResponse{Volume: &covev1.Volume{Id: "v1", Name: r.Msg.GetName(), Size: r.Msg.GetSize()}}), nil
}
func (f fakeVolumes) Get(ctx context.Context, r *connect.Request[covev1.GetVolumeRequest]) (*connect.Response[covev1.GetVolumeResponse], error) {
	for _, v := range f.volumes {
		if v.GetName() == r.Msg.GetName() {
			return connect.NewResponse(&covev1.GetVolumeResponse{Volume: v}), nil
		}
	}
	return nil, &sandbox.Error{Class: sandbox.NotFound, Msg: "no volume '" + r.Msg.GetName() + "'; did you mean 'data'?"}
}
func (f fakeVolumes) List(ctx context.Context, r *connect.Request[covev1.ListVolumesRequest]) (*connect.Response[covev1.ListVolumesResponse], error) {
	return connect.NewResponse(&covev1.ListVolumesResponse{Volumes: f.volumes}), nil
}
func (f fakeVolumes) Delete(ctx context.Context, r *connect.Request[covev1.DeleteVolumeRequest]) (*connect.Response[covev1.DeleteVolumeResponse], error) {
	f.note(r.Msg)
	if r.Msg.GetName() == "held" {
		return nil, &sandbox.Error{Class: sandbox.Precondition, Msg: "volume held is mounted by abc"}
	}
	return connect.NewResponse(&covev1.DeleteVolumeResponse{}), nil
}
func (f fakeVolumes) Resize(ctx context.Context, r *connect.Request[covev1.ResizeVolumeRequest]) (*connect.Response[covev1.ResizeVolumeResponse], error) {
	f.note(r.Msg)
	return connect.NewResponse(&covev1.ResizeVolumeResponse{Volume: &covev1.Volume{Name: r.Msg.GetName(), Size: r.Msg.GetSize()}}), nil
}
func (f fakeVolumes) Snapshot(ctx context.Context, r *connect.Request[covev1.SnapshotVolumeRequest]) (*connect.Response[covev1.SnapshotVolumeResponse], error) {
	f.note(r.Msg)
	return connect.NewResponse(&covev1.SnapshotVolumeResponse{Snapshot: &covev1.Snapshot{Id: "snap1", Kind: "directory", Path: "/"}}), nil
}
func (f fakeVolumes) Clone(ctx context.Context, r *connect.Request[covev1.CloneVolumeRequest]) (*connect.Response[covev1.CloneVolumeResponse], error) {
	f.note(r.Msg)
	return connect.NewResponse(&covev1.CloneVolumeResponse{Volume: &covev1.Volume{Name: r.Msg.GetNewName()}}), nil
}
func (f fakeVolumes) ListFiles(ctx context.Context, r *connect.Request[covev1.ListVolumeFilesRequest]) (*connect.Response[covev1.ListVolumeFilesResponse], error) {
	f.note(r.Msg)
	return connect.NewResponse(&covev1.ListVolumeFilesResponse{Files: []*covev1.FileInfo{{Path: "/a\x1b[2J", Type: "file", Size: 5, Mode: 0o644}, {Path: "/d", Type: "dir", Mode: 0o755}}}), nil
}
func (f fakeVolumes) RemoveFile(ctx context.Context, r *connect.Request[covev1.RemoveVolumeFileRequest]) (*connect.Response[covev1.RemoveVolumeFileResponse], error) {
	f.note(r.Msg)
	return connect.NewResponse(&covev1.RemoveVolumeFileResponse{}), nil
}
