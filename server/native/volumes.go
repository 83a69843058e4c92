package native

import (
	"context"
	"net/http"
	"strconv"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/server"
	"github.com/cove-sandbox/cove/server/edge"
	"github.com/cove-sandbox/cove/wire"
)

type volumes struct{ *server.Server }

func (s volumes) Create(ctx context.Context, r *connect.Request[covev1.CreateVolumeRequest]) (*connect.Response[covev1.CreateVolumeResponse], error) {
	v, err := s.CreateVolume(ctx, r.Msg.Name, r.Msg.Size, r.Msg.Labels, r.Msg.Snapshot)
	return answer(&covev1.CreateVolumeResponse{Volume: wire.Volume(v)}, err)
}

func (s volumes) Snapshot(ctx context.Context, r *connect.Request[covev1.SnapshotVolumeRequest]) (*connect.Response[covev1.SnapshotVolumeResponse], error) {
	snap, err := s.SnapshotVolume(ctx, r.Msg.Name, r.Msg.SnapshotName, r.Msg.Labels)
	return answer(&covev1.SnapshotVolumeResponse{Snapshot: wire.Snapshot(snap)}, err)
}

func (s volumes) Get(ctx context.Context, r *connect.Request[covev1.GetVolumeRequest]) (*connect.Response[covev1.GetVolumeResponse], error) {
	v, err := s.GetVolume(ctx, r.Msg.Name)
	return answer(&covev1.GetVolumeResponse{Volume: wire.Volume(v)}, err)
}

func (s volumes) List(ctx context.Context, r *connect.Request[covev1.ListVolumesRequest]) (*connect.Response[covev1.ListVolumesResponse], error) {
	vols, err := s.ListVolumes(ctx, r.Msg.Labels)
	return answer(&covev1.ListVolumesResponse{Volumes: each(vols, wire.Volume)}, err)
}

func (s volumes) Delete(ctx context.Context, r *connect.Request[covev1.DeleteVolumeRequest]) (*connect.Response[covev1.DeleteVolumeResponse], error) {
	return answer(&covev1.DeleteVolumeResponse{}, s.DeleteVolume(ctx, r.Msg.Name))
}

func (s volumes) Resize(ctx context.Context, r *connect.Request[covev1.ResizeVolumeRequest]) (*connect.Response[covev1.ResizeVolumeResponse], error) {
	v, err := s.ResizeVolume(ctx, r.Msg.Name, r.Msg.Size)
	return answer(&covev1.ResizeVolumeResponse{Volume: wire.Volume(v)}, err)
}

func (s volumes) Clone(ctx context.Context, r *connect.Request[covev1.CloneVolumeRequest]) (*connect.Response[covev1.CloneVolumeResponse], error) {
	v, err := s.CloneVolume(ctx, r.Msg.Name, r.Msg.NewName, r.Msg.Labels)
	return answer(&covev1.CloneVolumeResponse{Volume: wire.Volume(v)}, err)
}

func (s volumes) ListFiles(ctx context.Context, r *connect.Request[covev1.ListVolumeFilesRequest]) (*connect.Response[covev1.ListVolumeFilesResponse], error) {
	list, truncated, err := s.ListVolumeFiles(ctx, r.Msg.Name, r.Msg.Path, int(r.Msg.Depth))
	return answer(&covev1.ListVolumeFilesResponse{Files: each(list, wire.FileInfo), Truncated: truncated}, err)
}

func (s volumes) RemoveFile(ctx context.Context, r *connect.Request[covev1.RemoveVolumeFileRequest]) (*connect.Response[covev1.RemoveVolumeFileResponse], error) {
	return answer(&covev1.RemoveVolumeFileResponse{}, s.RemoveVolumeFile(ctx, r.Msg.Name, r.Msg.Path, r.Msg.Recursive))
}

// getVolumeFile is GET /v1/volumes/{name}/files?path=P, and HEAD.
func (d *dialect) getVolumeFile(w http.ResponseWriter, r *http.Request) error {
	return edge.Sending(w, func(begun server.Sending) error {
		return d.server.DownloadVolumeFile(r.Context(), r.PathValue("id"), r.URL.Query().Get("path"), r.Method == http.MethodHead, begun)
	}, func(c server.FileContent) { edge.FileHeader(w, c, false) })
}

// putVolumeFile is PUT /v1/volumes/{name}/files?path=P&mode=0644&uid=N&gid=N; with
// directory=true it makes one, and those above it, and no body is read.
func (d *dialect) putVolumeFile(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	var as sandbox.VolumeFile
	var mode uint32
	if err := queryMode(q, &mode); err != nil {
		return err
	}
	if mode != 0 {
		as.Mode = &mode
	}
	for name, to := range map[string]**uint32{"uid": &as.UID, "gid": &as.GID} {
		if s := q.Get(name); s != "" {
			n, err := strconv.ParseUint(s, 10, 32)
			if err != nil {
				return sandbox.InvalidField(name, "%.20q is no number of a user or group", s)
			}
			id := uint32(n)
			*to = &id
		}
	}
	body := content(w, r)
	info, err := d.server.UploadVolumeFile(r.Context(), r.PathValue("id"),
		server.VolumeUpload{Path: q.Get("path"), As: as, Content: &body, Directory: q.Get("directory") == "true", Parents: true})
	return writeMessage(w, wire.FileInfo(info), err)
}

// writeMessage answers a plain request with a message of the protos, unless there
// is an error.
func writeMessage(w http.ResponseWriter, m proto.Message, err error) error {
	if err != nil {
		return err
	}
	b, err := protojson.Marshal(m)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(append(b, '\n')) // an error means that the client left
	return nil
}
