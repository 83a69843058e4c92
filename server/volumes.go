package server

import (
	"context"
	"errors"
	"io"
	"maps"
	"net/http"
	"slices"
	"strconv"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protojson"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/wire"
)

type volumeService struct{ *Server }

// volumes of the node, or why it has none.
func (s *Server) volumes() (VolumeSet, error) {
	if v := s.node.Volumes(); v != nil {
		return v, nil
	}
	return nil, &sandbox.Error{Class: sandbox.Unsupported, Msg: "node " + s.node.Name() + " keeps no volumes"}
}

// withVolume runs f for a volume given by name or id. A miss says what was
// probably meant; one that is about a file inside passes.
func (s *Server) withVolume(ctx context.Context, field, name string, f func(VolumeSet) error) error {
	set, err := s.volumes()
	if err == nil {
		err = sandbox.ValidateVolumeName(field, name) // every id is such a name too
	}
	if err != nil {
		return err
	}
	err = f(set)
	if !errors.Is(err, sandbox.ErrNotFound) {
		return err
	}
	if _, gerr := set.Get(ctx, name); !errors.Is(gerr, sandbox.ErrNotFound) {
		return err
	}
	e := &sandbox.Error{Class: sandbox.NotFound, Msg: "no volume '" + name + "'", Hint: `"cove volume ls" lists them`}
	if vols, lerr := set.List(ctx); lerr == nil {
		var names []string
		for _, v := range vols {
			names = append(names, v.Name)
		}
		slices.Sort(names)
		if did := sandbox.DidYouMean(name, names); did != "" {
			e.Msg += "; " + did
		}
	}
	return e
}

// newVolume is a volume to be made.
func (s *Server) newVolume(name string, size int64, labels map[string]string) sandbox.Volume {
	return sandbox.Volume{ID: sandbox.NewID(s.cfg.Rand), Name: name, Size: size, Labels: maps.Clone(labels), Node: s.node.Name(), CreatedAt: s.cfg.Clock().UTC()}
}

func (s volumeService) Create(ctx context.Context, r *connect.Request[covev1.CreateVolumeRequest]) (*connect.Response[covev1.CreateVolumeResponse], error) {
	m := r.Msg
	size := m.Size
	if size == 0 {
		size = sandbox.DefaultVolume
	}
	if err := firstError(sandbox.ValidateVolumeName("name", m.Name), sandbox.ValidateVolumeSize("size", size), sandbox.ValidateLabels("labels", m.Labels)); err != nil {
		return nil, err
	}
	set, err := s.volumes()
	if err != nil {
		return nil, err
	}
	settle, err := s.admitVolume(ctx, size)
	if err != nil {
		return nil, err
	}
	defer settle()
	if m.Snapshot == "" {
		v, err := set.Create(ctx, s.newVolume(m.Name, size, m.Labels))
		return answer(&covev1.CreateVolumeResponse{Volume: wire.Volume(v)}, err)
	}
	snap, release, err := s.useSnapshot(ctx, m.Snapshot)
	if err != nil {
		return nil, err
	}
	defer release()
	if snap.Kind != sandbox.DirectorySnapshot {
		return nil, sandbox.InvalidField("snapshot", "'%s' is a %s snapshot; one of kind directory is accepted", nameOf(snap), snap.Kind)
	}
	v, err := set.CreateFrom(ctx, s.newVolume(m.Name, size, m.Labels), snap.Content)
	return answer(&covev1.CreateVolumeResponse{Volume: wire.Volume(v)}, err)
}

func (s volumeService) Snapshot(ctx context.Context, r *connect.Request[covev1.SnapshotVolumeRequest]) (*connect.Response[covev1.SnapshotVolumeResponse], error) {
	m := r.Msg
	if err := sandbox.ValidateLabels("labels", m.Labels); err != nil {
		return nil, err
	}
	if m.SnapshotName != "" {
		if err := sandbox.ValidateSnapshotName("snapshot_name", m.SnapshotName); err != nil {
			return nil, err
		}
	}
	out := &covev1.SnapshotVolumeResponse{}
	if err := s.admitSnapshot(ctx); err != nil {
		return nil, err
	}
	return answer(out, s.withVolume(ctx, "name", m.Name, func(set VolumeSet) error {
		end, err := s.content.begin(ctx)
		if err != nil {
			return err
		}
		defer end()
		c, err := set.Snapshot(ctx, m.Name)
		if err != nil {
			if s.node.Litter() {
				s.content.want()
			}
			return err
		}
		work, cancel, err := onRecord(ctx)
		if err != nil {
			s.letGo(c)
			return err
		}
		defer cancel()
		// Of no sandbox: a root of its own.
		snap := s.newSnapshot(sandbox.Sandbox{}, taking{kind: sandbox.DirectorySnapshot, path: "/", name: m.SnapshotName, labels: m.Labels}, c)
		if snap, err = s.store.CreateSnapshot(work, snap); err != nil {
			s.letGo(c)
			return err
		}
		out.Snapshot = wire.Snapshot(snap)
		return nil
	}))
}

func (s volumeService) Get(ctx context.Context, r *connect.Request[covev1.GetVolumeRequest]) (*connect.Response[covev1.GetVolumeResponse], error) {
	out := &covev1.GetVolumeResponse{}
	return answer(out, s.withVolume(ctx, "name", r.Msg.Name, func(set VolumeSet) error {
		v, err := set.Get(ctx, r.Msg.Name)
		out.Volume = wire.Volume(v)
		return err
	}))
}

func (s volumeService) List(ctx context.Context, r *connect.Request[covev1.ListVolumesRequest]) (*connect.Response[covev1.ListVolumesResponse], error) {
	if err := sandbox.ValidateLabels("labels", r.Msg.Labels); err != nil {
		return nil, err
	}
	set, err := s.volumes()
	if err != nil {
		return nil, err
	}
	vols, err := set.List(ctx)
	if err != nil {
		return nil, err
	}
	out := &covev1.ListVolumesResponse{}
	for _, v := range vols {
		if hasAll(v.Labels, r.Msg.Labels) {
			out.Volumes = append(out.Volumes, wire.Volume(v))
		}
	}
	return connect.NewResponse(out), nil
}

func hasAll(have, want map[string]string) bool {
	for k, v := range want {
		if got, ok := have[k]; !ok || got != v {
			return false
		}
	}
	return true
}

func (s volumeService) Delete(ctx context.Context, r *connect.Request[covev1.DeleteVolumeRequest]) (*connect.Response[covev1.DeleteVolumeResponse], error) {
	return answer(&covev1.DeleteVolumeResponse{}, s.withVolume(ctx, "name", r.Msg.Name, func(set VolumeSet) error {
		return set.Delete(ctx, r.Msg.Name)
	}))
}

func (s volumeService) Resize(ctx context.Context, r *connect.Request[covev1.ResizeVolumeRequest]) (*connect.Response[covev1.ResizeVolumeResponse], error) {
	if err := sandbox.ValidateVolumeSize("size", r.Msg.Size); err != nil {
		return nil, err
	}
	out := &covev1.ResizeVolumeResponse{}
	return answer(out, s.withVolume(ctx, "name", r.Msg.Name, func(set VolumeSet) error {
		old, err := set.Get(ctx, r.Msg.Name)
		if err != nil {
			return err
		}
		settle, err := s.admitVolume(ctx, r.Msg.Size-old.Size)
		if err != nil {
			return err
		}
		defer settle()
		v, err := set.Resize(ctx, r.Msg.Name, r.Msg.Size)
		out.Volume = wire.Volume(v)
		return err
	}))
}

// Clone makes a volume of the size of the one it is made of.
func (s volumeService) Clone(ctx context.Context, r *connect.Request[covev1.CloneVolumeRequest]) (*connect.Response[covev1.CloneVolumeResponse], error) {
	m := r.Msg
	if err := firstError(sandbox.ValidateVolumeName("new_name", m.NewName), sandbox.ValidateLabels("labels", m.Labels)); err != nil {
		return nil, err
	}
	out := &covev1.CloneVolumeResponse{}
	return answer(out, s.withVolume(ctx, "name", m.Name, func(set VolumeSet) error {
		from, err := set.Get(ctx, m.Name)
		if err != nil {
			return err
		}
		settle, err := s.admitVolume(ctx, from.Size)
		if err != nil {
			return err
		}
		defer settle()
		to := s.newVolume(m.NewName, from.Size, m.Labels)
		to.From = from.ID
		v, err := set.Clone(ctx, m.Name, to)
		out.Volume = wire.Volume(v)
		return err
	}))
}

func (s volumeService) ListFiles(ctx context.Context, r *connect.Request[covev1.ListVolumeFilesRequest]) (*connect.Response[covev1.ListVolumeFilesResponse], error) {
	m := r.Msg
	path, depth := m.Path, int(m.Depth)
	if path == "" {
		path = "/"
	}
	if err := sandbox.ValidatePath("path", path); err != nil {
		return nil, err
	}
	if depth < 0 || depth > maxDepth {
		return nil, sandbox.InvalidField("depth", "%d is not accepted; 1 to %d is, or 0 for 1", depth, maxDepth)
	}
	if depth == 0 {
		depth = 1
	}
	out := &covev1.ListVolumeFilesResponse{}
	return answer(out, s.withVolume(ctx, "name", m.Name, func(set VolumeSet) error {
		files, truncated, err := set.ListFiles(ctx, m.Name, path, depth)
		for _, f := range files {
			out.Files = append(out.Files, wire.FileInfo(f))
		}
		out.Truncated = truncated
		return err
	}))
}

func (s volumeService) RemoveFile(ctx context.Context, r *connect.Request[covev1.RemoveVolumeFileRequest]) (*connect.Response[covev1.RemoveVolumeFileResponse], error) {
	if err := sandbox.ValidatePath("path", r.Msg.Path); err != nil {
		return nil, err
	}
	return answer(&covev1.RemoveVolumeFileResponse{}, s.withVolume(ctx, "name", r.Msg.Name, func(set VolumeSet) error {
		return set.RemoveFile(ctx, r.Msg.Name, r.Msg.Path, r.Msg.Recursive)
	}))
}

// getVolumeFile is GET /v1/volumes/{name}/files?path=P, and HEAD.
func (s *Server) getVolumeFile(w http.ResponseWriter, r *http.Request) error {
	name, path := r.PathValue("id"), r.URL.Query().Get("path")
	if err := sandbox.ValidatePath("path", path); err != nil {
		return err
	}
	return s.withVolume(r.Context(), "name", name, func(set VolumeSet) error {
		body, info, err := set.ReadFile(r.Context(), name, path)
		if err != nil {
			return err
		}
		defer body.Close()
		h := w.Header()
		h.Set("Content-Type", "application/octet-stream")
		h.Set("Content-Length", strconv.FormatInt(info.Size, 10))
		if !info.ModTime.IsZero() {
			h.Set("Last-Modified", info.ModTime.UTC().Format(http.TimeFormat))
		}
		if r.Method == http.MethodHead {
			return nil
		}
		n, err := io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{io.LimitReader(body, info.Size)}, make([]byte, copyBuffer))
		if err != nil || n != info.Size { // the file shrank or the disk failed: no client takes this for a whole file
			s.log.Debug("a download from a volume broke off", "volume", name, "sent", n, "err", err)
			panic(http.ErrAbortHandler)
		}
		return nil
	})
}

// putVolumeFile is PUT /v1/volumes/{name}/files?path=P&mode=0644.
func (s *Server) putVolumeFile(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	name, path := r.PathValue("id"), q.Get("path")
	var mode uint32
	if err := firstError(sandbox.ValidatePath("path", path), queryMode(q, &mode)); err != nil {
		return err
	}
	body, err := s.body(w, r, s.cfg.MaxUpload)
	if err != nil {
		return err
	}
	var info sandbox.FileInfo
	err = s.withVolume(r.Context(), "name", name, func(set VolumeSet) error {
		var err error
		info, err = set.WriteFile(r.Context(), name, path, body, mode)
		return err
	})
	if body.err != nil {
		err = body.err // the volume saw only that its content broke off
	}
	if err != nil {
		return err
	}
	b, err := protojson.Marshal(wire.FileInfo(info))
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(append(b, '\n'))
	return nil
}
