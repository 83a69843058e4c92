package server

import (
	"cmp"
	"context"
	"io"
	"maps"
	"math"
	"slices"

	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/sandbox"
)

// CreateVolume makes a volume; size 0 is the default one. snapshot, if it is given,
// is that of a directory, which it then holds.
func (s *Server) CreateVolume(ctx context.Context, name string, size int64, labels map[string]string, snapshot string) (v sandbox.Volume, err error) {
	ctx, call, err := s.begin(ctx, "volume.create", about("name", name), about("snapshot", snapshot))
	if err != nil {
		return v, err
	}
	defer call.end(&err)
	if snapshot != "" {
		err = call.needs(reads("snapshot", "snapshots"))
	}
	size = cmp.Or(size, sandbox.DefaultVolume)
	if err := firstError(err, sandbox.ValidateVolumeName("name", name), sandbox.ValidateVolumeSize("size", size), sandbox.ValidateLabels("labels", labels)); err != nil {
		return v, err
	}
	content := func(set node.Volumes, id string) error { return set.Create(ctx, id, size) }
	if snapshot != "" {
		snap, release, err := s.useSnapshot(ctx, snapshot)
		if err != nil {
			return v, err
		}
		defer release()
		if snap.Kind != sandbox.DirectorySnapshot {
			return v, sandbox.InvalidField("snapshot", "'%s' is a %s snapshot; one of kind directory is accepted", nameOf(snap), snap.Kind)
		}
		content = func(set node.Volumes, id string) error { return set.CreateFrom(ctx, id, size, snap.Content) }
	}
	v, err = s.makeVolume(ctx, sandbox.Volume{Name: name, Size: size, Labels: maps.Clone(labels)}, content)
	call.concerns("volume", v.ID)
	return v, err
}

// SnapshotVolume takes a snapshot of all that is in a volume.
func (s *Server) SnapshotVolume(ctx context.Context, name, snapshotName string, labels map[string]string) (snap sandbox.Snapshot, err error) {
	ctx, call, err := s.begin(ctx, "volume.snapshot", about("name", name))
	if err != nil {
		return snap, err
	}
	defer call.end(&err)
	if err := firstError(call.needs(writes("", "snapshots")), sandbox.ValidateLabels("labels", labels)); err != nil {
		return snap, err
	}
	if snapshotName != "" {
		if err := sandbox.ValidateSnapshotName("snapshot_name", snapshotName); err != nil {
			return snap, err
		}
	}
	if err := s.admitSnapshot(ctx); err != nil {
		return snap, err
	}
	err = s.withVolume(ctx, "name", name, func(set node.Volumes, v sandbox.Volume) error {
		end, err := s.content.begin(ctx)
		if err != nil {
			return err
		}
		defer end()
		c, err := set.Snapshot(ctx, v.ID)
		if err != nil {
			if s.littered(ctx) {
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
		snap = s.newSnapshot(sandbox.Sandbox{}, taking{kind: sandbox.DirectorySnapshot, path: "/", name: snapshotName, labels: labels}, c)
		if snap, err = s.store.CreateSnapshot(work, snap); err != nil {
			s.letGo(c)
			return err
		}
		if err := s.node.Release(work, c); err != nil { // a delete of it soon frees nothing yet
			s.log.Warn("the node holds content that is on record", "snapshot", snap.ID, "err", err)
		}
		return nil
	})
	call.concerns("snapshot", snap.ID)
	return snap, err
}

// GetVolume finds a volume by its name or id.
func (s *Server) GetVolume(ctx context.Context, name string) (v sandbox.Volume, err error) {
	ctx, call, err := s.begin(ctx, "volume.get", about("name", name))
	if err != nil {
		return v, err
	}
	defer call.end(&err)
	err = s.withVolume(ctx, "name", name, func(set node.Volumes, found sandbox.Volume) error {
		v, err = describedOne(ctx, set, found)
		return err
	})
	return v, err
}

// ListVolumes lists those that have the labels. It costs one query, and one look
// at those it found.
func (s *Server) ListVolumes(ctx context.Context, labels map[string]string) (vols []sandbox.Volume, err error) {
	ctx, call, err := s.begin(ctx, "volume.list")
	if err != nil {
		return nil, err
	}
	defer call.end(&err)
	if err := sandbox.ValidateLabels("labels", labels); err != nil {
		return nil, err
	}
	set, err := s.volumes()
	if err != nil {
		return nil, err
	}
	if vols, err = readyVolumes(ctx, s.store); err != nil {
		return nil, err
	}
	return described(ctx, set, slices.DeleteFunc(vols, func(v sandbox.Volume) bool { return !hasAll(v.Labels, labels) }))
}

func hasAll(have, want map[string]string) bool {
	for k, v := range want {
		if got, ok := have[k]; !ok || got != v {
			return false
		}
	}
	return true
}

// DeleteVolume removes a volume that no sandbox holds.
func (s *Server) DeleteVolume(ctx context.Context, name string) (err error) {
	ctx, call, err := s.begin(ctx, "volume.delete", about("name", name))
	if err != nil {
		return err
	}
	defer call.end(&err)
	return s.withVolume(ctx, "name", name, func(set node.Volumes, v sandbox.Volume) error { return s.deleteVolume(ctx, set, v) })
}

// ResizeVolume gives a volume another size.
func (s *Server) ResizeVolume(ctx context.Context, name string, size int64) (v sandbox.Volume, err error) {
	ctx, call, err := s.begin(ctx, "volume.resize", about("name", name))
	if err != nil {
		return v, err
	}
	defer call.end(&err)
	if err := sandbox.ValidateVolumeSize("size", size); err != nil {
		return v, err
	}
	err = s.withVolume(ctx, "name", name, func(set node.Volumes, found sandbox.Volume) error {
		v, err = s.resizeVolume(ctx, set, found, size)
		return err
	})
	call.concerns("volume", v.ID)
	return v, err
}

// CloneVolume makes a volume of the size and content of another.
func (s *Server) CloneVolume(ctx context.Context, name, newName string, labels map[string]string) (v sandbox.Volume, err error) {
	ctx, call, err := s.begin(ctx, "volume.clone", about("name", name), about("name", newName))
	if err != nil {
		return v, err
	}
	defer call.end(&err)
	if err := firstError(sandbox.ValidateVolumeName("new_name", newName), sandbox.ValidateLabels("labels", labels)); err != nil {
		return v, err
	}
	err = s.withVolume(ctx, "name", name, func(_ node.Volumes, from sandbox.Volume) error {
		to := sandbox.Volume{Name: newName, Size: from.Size, Labels: maps.Clone(labels), From: from.ID}
		v, err = s.makeVolume(ctx, to, func(set node.Volumes, id string) error { return set.Clone(ctx, from.ID, id) })
		return err
	})
	call.concerns("volume", v.ID)
	return v, err
}

// ListVolumeFiles lists what is below a directory of a volume.
func (s *Server) ListVolumeFiles(ctx context.Context, name, path string, depth int) (files []sandbox.FileInfo, truncated bool, err error) {
	ctx, call, err := s.begin(ctx, "volume.list_files", about("name", name))
	if err != nil {
		return nil, false, err
	}
	defer call.end(&err)
	path = cmp.Or(path, "/")
	if err := sandbox.ValidatePath("path", path); err != nil {
		return nil, false, err
	}
	if depth < 0 || depth > maxDepth {
		return nil, false, sandbox.InvalidField("depth", "%d is not accepted; 1 to %d is, or 0 for 1", depth, maxDepth)
	}
	err = s.withVolume(ctx, "name", name, func(set node.Volumes, v sandbox.Volume) error {
		files, truncated, err = set.ListFiles(ctx, v.ID, path, cmp.Or(depth, 1))
		return err
	})
	return files, truncated, err
}

// RemoveVolumeFile removes a file of a volume, or with recursive a directory.
func (s *Server) RemoveVolumeFile(ctx context.Context, name, path string, recursive bool) (err error) {
	ctx, call, err := s.begin(ctx, "volume.remove_file", about("name", name))
	if err != nil {
		return err
	}
	defer call.end(&err)
	if err := sandbox.ValidatePath("path", path); err != nil {
		return err
	}
	return s.withVolume(ctx, "name", name, func(set node.Volumes, v sandbox.Volume) error { return set.RemoveFile(ctx, v.ID, path, recursive) })
}

// DownloadVolumeFile sends a file of a volume; with headOnly only what it would be.
func (s *Server) DownloadVolumeFile(ctx context.Context, name, path string, headOnly bool, to Sending) (err error) {
	ctx, call, err := s.begin(ctx, "volume.download", about("id", name))
	if err != nil {
		return err
	}
	defer call.end(&err)
	if err := sandbox.ValidatePath("path", path); err != nil {
		return err
	}
	return s.withVolume(ctx, "name", name, func(set node.Volumes, v sandbox.Volume) error {
		body, info, err := set.ReadFile(ctx, v.ID, path)
		if err != nil {
			return err
		}
		defer body.Close()
		w := to(FileContent{Info: info, Length: info.Size})
		if headOnly {
			return nil
		}
		n, err := io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{io.LimitReader(body, info.Size)}, make([]byte, copyBuffer))
		if err != nil || n != info.Size { // the file shrank, the disk failed, or the reader left
			return &sandbox.Error{Class: sandbox.Canceled, Msg: "the file broke off after " + sandbox.FormatSize(n), Err: err}
		}
		return nil
	})
}

// VolumeUpload is what is put at a path of a volume: a file with its content, a
// directory, or nothing but another owner and mode.
type VolumeUpload struct {
	Path      string
	As        sandbox.VolumeFile
	Content   *Upload // nil = the file that is there keeps its own
	Directory bool    // which has no content
	Parents   bool    // of a directory are made too, and one that is there is well; those of a file always are
}

// UploadVolumeFile puts something into a volume.
func (s *Server) UploadVolumeFile(ctx context.Context, name string, u VolumeUpload) (info sandbox.FileInfo, err error) {
	ctx, call, err := s.begin(ctx, "volume.upload", about("id", name))
	if err != nil {
		return info, err
	}
	defer call.end(&err)
	if err := firstError(sandbox.ValidatePath("path", u.Path), validVolumeFile(u.As)); err != nil {
		return info, err
	}
	if u.Directory || u.Content == nil {
		err = s.withVolume(ctx, "name", name, func(set node.Volumes, v sandbox.Volume) error {
			if u.Directory {
				info, err = set.MakeDirectory(ctx, v.ID, u.Path, u.Parents, u.As)
			} else {
				info, err = set.ChangeFile(ctx, v.ID, u.Path, u.As)
			}
			return err
		})
		return info, err
	}
	body, err := boundedUpload(*u.Content, s.cfg.MaxUpload)
	if err != nil {
		return info, err
	}
	err = s.withVolume(ctx, "name", name, func(set node.Volumes, v sandbox.Volume) error {
		info, err = set.WriteFile(ctx, v.ID, u.Path, body, u.As)
		return err
	})
	return info, body.or(err)
}

func validVolumeFile(f sandbox.VolumeFile) error {
	if f.Mode != nil {
		if err := validMode(*f.Mode); err != nil {
			return err
		}
	}
	for field, id := range map[string]*uint32{"uid": f.UID, "gid": f.GID} {
		if id != nil && *id > math.MaxInt32 {
			return sandbox.InvalidField(field, "%d is not accepted; 0 to %d is", *id, math.MaxInt32)
		}
	}
	return nil
}
