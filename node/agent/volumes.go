package agent

import (
	"context"
	"fmt"
	"io"
	"slices"

	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/snapshot"
	"github.com/cove-sandbox/cove/volume"
)

// openVolumes takes the volumes back with those who hold them.
func (n *Node) openVolumes(ctx context.Context, was *state) error {
	if n.cfg.VolumeDir == "" || !slices.ContainsFunc(n.classes, func(c *kernelClass) bool { return c.can.Volumes }) {
		return nil
	}
	held := map[string][]volume.Holder{}
	for id, e := range was.entries {
		if e.End != nil {
			continue
		}
		for _, m := range e.Sandbox.Spec.Volumes {
			held[m.Volume] = append(held[m.Volume], volume.Holder{Holder: id, Mode: volume.Mode(m.Mode)})
		}
	}
	set, err := volume.Open(ctx, n.cfg.VolumeDir, volume.Options{Logger: n.log, Holders: held})
	if sandbox.ClassOf(err) == sandbox.Unsupported {
		n.log.Warn("no volumes on this machine", "err", err)
		return nil
	}
	n.volumes = set
	return err
}

// attachVolumes gives b the volumes of its spec, which names them by id. After
// an error b has those that it was given until then, for detachVolumes.
func (n *Node) attachVolumes(ctx context.Context, b *box) error {
	if len(b.sb.Spec.Volumes) == 0 {
		return nil
	}
	if n.volumes == nil {
		return sandbox.InvalidField("spec.volumes", "this node can have no volumes").WithHint("cove doctor says why")
	}
	var mounts []sandbox.VolumeMount
	var given []runtime.Volume
	defer func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		b.sb.Spec.Volumes, b.container.Volumes = mounts, given
	}()
	for i, m := range b.sb.Spec.Volumes {
		if m.Mode == "" {
			m.Mode = sandbox.VolumeReadWrite
		}
		dir, err := n.volumes.Attach(ctx, m.Volume, b.id, volume.Mode(m.Mode))
		if err != nil {
			return sandbox.WithField(fmt.Sprintf("spec.volumes[%d]", i), err)
		}
		mounts = append(mounts, m)
		given = append(given, runtime.Volume{Source: dir, Target: m.Path,
			ReadOnly: m.Mode == sandbox.VolumeReadOnly, Shared: m.Mode == sandbox.VolumeShared})
	}
	return nil
}

// volumesOver is what a sandbox gets that goes on from memory which was saved with the volumes
// had: what it has besides is marked, for it is mounted after the restore. Memory has the mounts
// that it was saved with, so each must be there; another volume may be at the same path.
func volumesOver(had []sandbox.VolumeMount, vols []runtime.Volume) ([]runtime.Volume, error) {
	for _, m := range had {
		if !slices.ContainsFunc(vols, func(v runtime.Volume) bool { return v.Target == m.Path }) {
			return nil, sandbox.Errorf(sandbox.Precondition, "", "the memory was saved with a volume at %s, and the sandbox would have none there", m.Path).
				WithHint("name a volume for %s too, or none at all for those it was saved with; a filesystem snapshot starts with any", m.Path)
		}
	}
	vols = slices.Clone(vols)
	for i, v := range vols {
		vols[i].Added = !slices.ContainsFunc(had, func(m sandbox.VolumeMount) bool { return m.Path == v.Target })
	}
	return vols, nil
}

// detachVolumes takes them back when nothing of b runs any more.
func (n *Node) detachVolumes(b *box) {
	if n.volumes == nil {
		return
	}
	for _, m := range b.sb.Spec.Volumes {
		err := n.volumes.Detach(context.Background(), m.Volume, b.id)
		if err != nil && sandbox.ClassOf(err) != sandbox.NotFound {
			n.log.Warn("detaching a volume", "sandbox", b.id, "volume", m.Volume, "err", err)
		}
	}
}

// Volumes are the node's.
func (n *Node) Volumes() node.Volumes {
	if n.volumes == nil {
		return node.NoVolumes{}
	}
	return &Volumes{n.volumes, n}
}

// Volumes speaks of volumes in the words of the domain; see node.Volumes.
type Volumes struct {
	set *volume.Set
	n   *Node
}

// maxVolumeFiles one listing gives.
const maxVolumeFiles = 10_000

func (v *Volumes) describe(d volume.Volume) sandbox.VolumeContent {
	out := sandbox.VolumeContent{ID: d.ID, Size: d.Size, Used: d.Used}
	for _, h := range d.Holders {
		out.Holders = append(out.Holders, sandbox.VolumeHolder{Sandbox: h.Holder, Mode: sandbox.VolumeMode(h.Mode)})
	}
	if o := d.Old; o != nil {
		out.Old = &sandbox.Volume{ID: d.ID, Name: o.Name, Size: d.Size, Labels: o.Labels, CreatedAt: o.Created, From: o.From}
	}
	return out
}

func (v *Volumes) Create(ctx context.Context, id string, size int64) error {
	_, err := v.set.Create(ctx, id, size)
	return err
}

// CreateFrom makes a volume with the content of a directory snapshot.
func (v *Volumes) CreateFrom(ctx context.Context, id string, size int64, c sandbox.Content) error {
	if v.n.states == nil {
		return sandbox.Errorf(sandbox.Unsupported, "node.volume", "this node keeps no state")
	}
	if c.Size > size { // it need not be tried
		return volume.TooSmall(size).
			WithHint("the files of the snapshot are %s; ask for more than that, some of a volume is its file system's own", sandbox.FormatSize(c.Size))
	}
	return v.n.states.piped(ctx, c, func(r io.Reader) error {
		_, err := v.set.Import(ctx, id, size, r)
		return err
	})
}

// Snapshot stores the content of a volume as it is at one instant.
func (v *Volumes) Snapshot(ctx context.Context, id string) (sandbox.Content, error) {
	const op = "node.volume_snapshot"
	if v.n.states == nil {
		return sandbox.Content{}, sandbox.Errorf(sandbox.Unsupported, op, "this node keeps no state")
	}
	pr, pw := io.Pipe()
	written := make(chan error, 1)
	go func() {
		err := v.set.Snapshot(ctx, id, pw)
		pw.CloseWithError(err)
		written <- err
	}()
	c, err := v.n.states.pack(sandbox.Content{}, func() (snapshot.Manifest, error) {
		m, err := snapshot.Filesystem{SpoolDir: v.n.states.cfg.Plain}.Pack(ctx, v.n.states.cfg.Store, pr)
		pr.CloseWithError(io.ErrClosedPipe)
		if werr := <-written; werr != nil {
			err = werr
		}
		return m, err
	})
	if err != nil && sandbox.ClassOf(err) != sandbox.NotFound {
		v.n.litter.Store(true)
	}
	return c, sandbox.WithOp(op, err)
}

// Clone makes a volume of the size and content of another.
func (v *Volumes) Clone(ctx context.Context, from, id string) error {
	_, err := v.set.Clone(ctx, from, id)
	return err
}

// Status describes volumes as they are now; one that is not here is left out.
func (v *Volumes) Status(ctx context.Context, ids []string) (map[string]sandbox.VolumeContent, error) {
	out := make(map[string]sandbox.VolumeContent, len(ids))
	for _, id := range ids {
		d, err := v.set.Get(ctx, id)
		switch {
		case err == nil:
			out[id] = v.describe(d)
		case sandbox.ClassOf(err) != sandbox.NotFound:
			return nil, err
		}
	}
	return out, nil
}

// List describes all volumes of the node.
func (v *Volumes) List(ctx context.Context) ([]sandbox.VolumeContent, error) {
	ds, err := v.set.List(ctx)
	out := make([]sandbox.VolumeContent, 0, len(ds))
	for _, d := range ds {
		out = append(out, v.describe(d))
	}
	return out, err
}

func (v *Volumes) Delete(ctx context.Context, id string) error { return v.set.Delete(ctx, id) }

// Resize returns the size the volume has then.
func (v *Volumes) Resize(ctx context.Context, id string, size int64) (int64, error) {
	d, err := v.set.Resize(ctx, id, size)
	return d.Size, err
}

// ListFiles lists a directory, and with depth more of what is below it.
func (v *Volumes) ListFiles(ctx context.Context, id, path string, depth int) (files []sandbox.FileInfo, truncated bool, err error) {
	dirs := []string{path}
	for level := 0; level < max(depth, 1) && len(dirs) > 0; level++ {
		var next []string
		for _, dir := range dirs {
			found, more, err := v.set.ListFiles(ctx, id, dir, maxVolumeFiles-len(files))
			if err != nil && level > 0 && sandbox.ClassOf(err) == sandbox.NotFound {
				continue // removed meanwhile
			}
			if err != nil {
				return nil, false, err
			}
			files = append(files, found...)
			if more {
				return files, true, nil
			}
			for _, f := range found {
				if f.Type == sandbox.Directory {
					next = append(next, f.Path)
				}
			}
		}
		dirs = next
	}
	return files, false, nil
}

func (v *Volumes) ReadFile(ctx context.Context, id, path string) (io.ReadCloser, sandbox.FileInfo, error) {
	return v.set.GetFile(ctx, id, path)
}

func (v *Volumes) WriteFile(ctx context.Context, id, path string, r io.Reader, as sandbox.VolumeFile) (sandbox.FileInfo, error) {
	return v.set.Put(ctx, id, path, r, putting(as, true))
}

func (v *Volumes) MakeDirectory(ctx context.Context, id, path string, parents bool, as sandbox.VolumeFile) (sandbox.FileInfo, error) {
	return v.set.Mkdir(ctx, id, path, putting(as, parents))
}

func (v *Volumes) ChangeFile(ctx context.Context, id, path string, to sandbox.VolumeFile) (sandbox.FileInfo, error) {
	return v.set.Change(ctx, id, path, to)
}

func putting(as sandbox.VolumeFile, parents bool) volume.PutOptions {
	o := volume.PutOptions{Parents: parents}
	for to, from := range map[*uint32]*uint32{&o.Mode: as.Mode, &o.UID: as.UID, &o.GID: as.GID} {
		if from != nil {
			*to = *from
		}
	}
	return o
}

func (v *Volumes) RemoveFile(ctx context.Context, id, path string, recursive bool) error {
	return v.set.Remove(ctx, id, path, recursive)
}
