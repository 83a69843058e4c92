package e2b

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"path"
	"strconv"
	"strings"
	"time"

	"github.com/cove-sandbox/cove/internal/strangers"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/server"
	"github.com/cove-sandbox/cove/server/edge"
)

// Volumes are Cove's. Their content is reached with a token of the volume, as with
// E2B, without a sandbox.

// volumeInfo is a volume as the SDKs have it.
type volumeInfo struct {
	VolumeID string  `json:"volumeID"`
	Name     string  `json:"name"`
	Token    string  `json:"token"`
	Domain   *string `json:"domain,omitempty"`
}

func (d *dialect) volumeInfo(r *http.Request, v sandbox.Volume) volumeInfo {
	out := volumeInfo{VolumeID: v.ID, Name: v.Name, Token: d.volumes.mint(grant{v.ID, server.CallerKey(r.Context())})}
	if d.domain != "" {
		out.Domain = &d.domain
	}
	return out
}

func (d *dialect) createVolume(w http.ResponseWriter, r *http.Request) error {
	var req struct {
		Name string `json:"name"`
	}
	if err := readJSON(r, &req); err != nil {
		return err
	}
	v, err := d.server.CreateVolume(r.Context(), req.Name, 0, nil, "")
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusCreated, d.volumeInfo(r, v))
}

func (d *dialect) listVolumes(w http.ResponseWriter, r *http.Request) error {
	vols, err := d.server.ListVolumes(r.Context(), nil)
	if err != nil {
		return err
	}
	out := make([]volumeInfo, 0, len(vols))
	for _, v := range vols {
		out = append(out, d.volumeInfo(r, v))
	}
	return writeJSON(w, http.StatusOK, out)
}

func (d *dialect) getVolume(w http.ResponseWriter, r *http.Request) error {
	v, err := d.server.GetVolume(r.Context(), r.PathValue("id"))
	if err != nil {
		return absent(err)
	}
	return writeJSON(w, http.StatusOK, d.volumeInfo(r, v))
}

func (d *dialect) deleteVolume(w http.ResponseWriter, r *http.Request) error {
	if err := d.server.DeleteVolume(r.Context(), r.PathValue("id")); err != nil {
		return absent(err)
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// absent says of what could be no name that there is no such thing.
func absent(err error) error {
	if errors.Is(err, sandbox.ErrInvalid) {
		return &sandbox.Error{Class: sandbox.NotFound, Msg: "not found", Err: err}
	}
	return err
}

// mounts are the volumes of a create: many sandboxes may write to one.
func mounts(of []volumeMount) (out []sandbox.VolumeMount) {
	for _, m := range of {
		out = append(out, sandbox.VolumeMount{Volume: m.Name, Path: m.Path, Mode: sandbox.VolumeShared})
	}
	return out
}

// volumeMounts are the volumes of a sandbox by their names. A key that may not look at
// volumes sees their ids.
func (d *dialect) volumeMounts(ctx context.Context, of []sandbox.VolumeMount) []volumeMount {
	out := []volumeMount{}
	for _, m := range of {
		name := m.Volume
		if v, err := d.server.GetVolume(ctx, m.Volume); err == nil {
			name = v.Name
		}
		out = append(out, volumeMount{name, m.Path})
	}
	return out
}

type volumeMount struct {
	Name string `json:"name"`
	Path string `json:"path"`
}

// entryStat is a file of a volume.
type entryStat struct {
	Name   string    `json:"name"`
	Type   string    `json:"type"`
	Path   string    `json:"path"`
	Size   int64     `json:"size"`
	Mode   uint32    `json:"mode"`
	UID    uint32    `json:"uid"`
	GID    uint32    `json:"gid"`
	Atime  time.Time `json:"atime"`
	Mtime  time.Time `json:"mtime"`
	Ctime  time.Time `json:"ctime"`
	Target string    `json:"target,omitempty"`
}

func statOf(f sandbox.FileInfo) entryStat {
	types := map[sandbox.FileType]string{sandbox.Regular: "file", sandbox.Directory: "directory", sandbox.Symlink: "symlink"}
	kind, known := types[f.Type]
	if !known {
		kind = "unknown"
	}
	return entryStat{f.Name, kind, f.Path, f.Size, f.Mode, f.UID, f.GID, f.ModTime, f.ModTime, f.ModTime, f.Target}
}

// inVolume serves the content of a volume to the bearer of its token.
func (d *dialect) inVolume(rt route) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		token, _ := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
		g, ok := d.volumes.check(token)
		if !ok || g.sandbox != r.PathValue("id") {
			writeError(w, unauthenticated("the token is not one of this volume"))
			return
		}
		ctx, err := d.server.Vouched(r.Context(), g.key, r.RemoteAddr)
		if err == nil {
			strangers.Known(ctx)
			err = d.server.Permit(ctx, rt.op)
		}
		if err == nil {
			err = rt.serve(w, r.WithContext(ctx))
		}
		if err != nil {
			writeError(w, sandbox.WithOp(string(rt.op), err))
		}
	})
}

// where is a path of a volume: absolute, in its one spelling.
func where(r *http.Request) string { return path.Clean("/" + r.URL.Query().Get("path")) }

func (d *dialect) listVolumeFiles(w http.ResponseWriter, r *http.Request) error {
	depth, err := strconv.Atoi(r.URL.Query().Get("depth"))
	if err != nil || depth < 1 {
		depth = 1
	}
	list, truncated, err := d.server.ListVolumeFiles(r.Context(), r.PathValue("id"), where(r), depth)
	if err != nil {
		return err
	}
	if truncated {
		return &sandbox.Error{Class: sandbox.TooLarge, Field: "path", Msg: "more entries than one list has", Hint: "list a smaller directory, or less deep"}
	}
	out := make([]entryStat, 0, len(list))
	for _, f := range list {
		out = append(out, statOf(f))
	}
	return writeJSON(w, http.StatusOK, out)
}

// statVolumeFile is of one path: its directory's list says it.
func (d *dialect) statVolumeFile(w http.ResponseWriter, r *http.Request) error {
	f, err := d.volumeFile(r)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, statOf(f))
}

func (d *dialect) volumeFile(r *http.Request) (sandbox.FileInfo, error) {
	p := where(r)
	if p == "/" {
		return sandbox.FileInfo{Path: "/", Name: "/", Type: sandbox.Directory, Mode: 0o755}, nil
	}
	list, _, err := d.server.ListVolumeFiles(r.Context(), r.PathValue("id"), path.Dir(p), 1)
	if err != nil {
		return sandbox.FileInfo{}, err
	}
	for _, f := range list {
		if f.Name == path.Base(p) {
			return f, nil
		}
	}
	return sandbox.FileInfo{}, &sandbox.Error{Class: sandbox.NotFound, Msg: "path '" + p + "' not found"}
}

func (d *dialect) removeVolumeFile(w http.ResponseWriter, r *http.Request) error {
	if err := d.server.RemoveVolumeFile(r.Context(), r.PathValue("id"), where(r), true); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (d *dialect) readVolumeFile(w http.ResponseWriter, r *http.Request) error {
	return edge.Sending(w, func(begun server.Sending) error {
		return d.server.DownloadVolumeFile(r.Context(), r.PathValue("id"), where(r), r.Method == http.MethodHead, begun)
	}, func(c server.FileContent) { edge.FileHeader(w, c, false) })
}

// attributes reads uid, gid and mode of a query.
func attributes(q url.Values) (as sandbox.VolumeFile, err error) {
	for name, to := range map[string]**uint32{"uid": &as.UID, "gid": &as.GID, "mode": &as.Mode} {
		if s := q.Get(name); s != "" {
			n, err := strconv.ParseUint(s, 10, 32)
			if err != nil {
				return as, sandbox.InvalidField(name, "%.20q is no number", s)
			}
			v := uint32(n)
			*to = &v
		}
	}
	return as, nil
}

// writeVolumeFile is PUT …/file. What is there is replaced only with force.
func (d *dialect) writeVolumeFile(w http.ResponseWriter, r *http.Request) error {
	as, err := attributes(r.URL.Query())
	if err != nil {
		return err
	}
	if r.URL.Query().Get("force") != "true" {
		switch _, err := d.volumeFile(r); {
		case err == nil:
			return &sandbox.Error{Class: sandbox.AlreadyExists, Msg: "path '" + where(r) + "' already exists"}
		case !errors.Is(err, sandbox.ErrNotFound):
			return err
		}
	}
	body := content(w, r, r.Body, r.ContentLength)
	info, err := d.server.UploadVolumeFile(r.Context(), r.PathValue("id"), server.VolumeUpload{Path: where(r), As: as, Content: &body})
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusCreated, statOf(info))
}

// makeVolumeDirectory is POST …/dir; with force the directories above are made, and
// one that is there is well.
func (d *dialect) makeVolumeDirectory(w http.ResponseWriter, r *http.Request) error {
	as, err := attributes(r.URL.Query())
	if err != nil {
		return err
	}
	info, err := d.server.UploadVolumeFile(r.Context(), r.PathValue("id"), server.VolumeUpload{Path: where(r), As: as, Directory: true, Parents: r.URL.Query().Get("force") == "true"})
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusCreated, statOf(info))
}

// changeVolumeFile is PATCH …/path.
func (d *dialect) changeVolumeFile(w http.ResponseWriter, r *http.Request) error {
	var to sandbox.VolumeFile
	r.Body = http.MaxBytesReader(w, r.Body, maxBody)
	if err := readJSON(r, &to); err != nil {
		return err
	}
	info, err := d.server.UploadVolumeFile(r.Context(), r.PathValue("id"), server.VolumeUpload{Path: where(r), As: to})
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, statOf(info))
}
