package node

import (
	"context"
	"io"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/snapshot"
	"github.com/cove-sandbox/cove/volume"
)

// openVolumes takes the volumes back with those who hold them.
func (n *Node) openVolumes(ctx context.Context, was *state) error {
	if n.cfg.VolumeDir == "" || !n.cfg.Driver.Capabilities().Volumes {
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

// attachVolumes gives b the volumes of its spec, which then names them by id.
func (n *Node) attachVolumes(ctx context.Context, b *box) error {
	if len(b.sb.Spec.Volumes) == 0 {
		return nil
	}
	if n.volumes == nil {
		return sandbox.InvalidField("spec.volumes", "this node can have no volumes").WithHint("cove doctor says why")
	}
	mounts := make([]sandbox.VolumeMount, 0, len(b.sb.Spec.Volumes))
	for _, m := range b.sb.Spec.Volumes {
		if m.Mode == "" {
			m.Mode = sandbox.VolumeReadWrite
		}
		v, err := n.volumes.Get(ctx, m.Volume)
		if err != nil {
			return err
		}
		m.Volume = v.ID
		mounts = append(mounts, m)
		dir, err := n.volumes.Attach(ctx, v.ID, b.id, volume.Mode(m.Mode))
		if err != nil {
			b.sb.Spec.Volumes = mounts
			return err
		}
		b.container.Volumes = append(b.container.Volumes, runtime.Volume{Source: dir, Target: m.Path,
			ReadOnly: m.Mode == sandbox.VolumeReadOnly, Shared: m.Mode == sandbox.VolumeShared})
	}
	b.sb.Spec.Volumes = mounts
	return nil
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

// Volumes are the node's, or nil where it can have none.
func (n *Node) Volumes() *Volumes {
	if n.volumes == nil {
		return nil
	}
	return &Volumes{n.volumes, n}
}

// Volumes speaks of volumes in the words of the domain; see server.VolumeSet.
type Volumes struct {
	set *volume.Set
	n   *Node
}

// maxVolumeFiles one listing gives.
const maxVolumeFiles = 10_000

func (v *Volumes) describe(d volume.Volume) sandbox.Volume {
	out := sandbox.Volume{ID: d.ID, Name: d.Name, Size: d.Size, Used: d.Used, Labels: d.Labels, Node: v.n.cfg.Name, CreatedAt: d.Created, From: d.From}
	for _, h := range d.Holders {
		out.Holders = append(out.Holders, sandbox.VolumeHolder{Sandbox: h.Holder, Mode: sandbox.VolumeMode(h.Mode)})
	}
	return out
}

func (v *Volumes) described(d volume.Volume, err error) (sandbox.Volume, error) {
	if err != nil {
		return sandbox.Volume{}, err
	}
	return v.describe(d), nil
}

// labelled finishes a new volume, or takes it back.
func (v *Volumes) labelled(ctx context.Context, d volume.Volume, err error, labels map[string]string) (sandbox.Volume, error) {
	if err != nil || len(labels) == 0 {
		return v.described(d, err)
	}
	l, err := v.set.SetLabels(ctx, d.ID, labels)
	if err != nil {
		_ = v.set.Delete(context.WithoutCancel(ctx), d.ID)
	}
	return v.described(l, err)
}

func (v *Volumes) Create(ctx context.Context, s sandbox.Volume) (sandbox.Volume, error) {
	d, err := v.set.Create(ctx, s.Name, s.Size)
	return v.labelled(ctx, d, err, s.Labels)
}

// CreateFrom makes a volume with the content of a directory snapshot.
func (v *Volumes) CreateFrom(ctx context.Context, s sandbox.Volume, c sandbox.Content) (sandbox.Volume, error) {
	if v.n.states == nil {
		return sandbox.Volume{}, sandbox.Errorf(sandbox.Unsupported, "node.volume", "this node keeps no state")
	}
	if c.Size > s.Size { // it need not be tried
		return sandbox.Volume{}, volume.TooSmall(s.Name, s.Size).
			WithHint("the files of the snapshot are %s; ask for more than that, some of a volume is its file system's own", sandbox.FormatSize(c.Size))
	}
	var d volume.Volume
	err := v.n.states.piped(ctx, c, func(r io.Reader) (err error) {
		d, err = v.set.Import(ctx, s.Name, s.Size, r)
		return err
	})
	return v.labelled(ctx, d, err, s.Labels)
}

// Snapshot stores the content of a volume as it is at one instant.
func (v *Volumes) Snapshot(ctx context.Context, name string) (sandbox.Content, error) {
	const op = "node.volume_snapshot"
	if v.n.states == nil {
		return sandbox.Content{}, sandbox.Errorf(sandbox.Unsupported, op, "this node keeps no state")
	}
	pr, pw := io.Pipe()
	written := make(chan error, 1)
	go func() {
		err := v.set.Snapshot(ctx, name, pw)
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

func (v *Volumes) Clone(ctx context.Context, name string, to sandbox.Volume) (sandbox.Volume, error) {
	d, err := v.set.Clone(ctx, name, to.Name)
	return v.labelled(ctx, d, err, to.Labels)
}

func (v *Volumes) Get(ctx context.Context, name string) (sandbox.Volume, error) {
	return v.described(v.set.Get(ctx, name))
}

func (v *Volumes) List(ctx context.Context) ([]sandbox.Volume, error) {
	ds, err := v.set.List(ctx)
	out := make([]sandbox.Volume, 0, len(ds))
	for _, d := range ds {
		out = append(out, v.describe(d))
	}
	return out, err
}

func (v *Volumes) Delete(ctx context.Context, name string) error { return v.set.Delete(ctx, name) }

func (v *Volumes) Resize(ctx context.Context, name string, size int64) (sandbox.Volume, error) {
	return v.described(v.set.Resize(ctx, name, size))
}

// ListFiles lists a directory, and with depth more of what is below it.
func (v *Volumes) ListFiles(ctx context.Context, name, path string, depth int) (files []sandbox.FileInfo, truncated bool, err error) {
	dirs := []string{path}
	for level := 0; level < max(depth, 1) && len(dirs) > 0; level++ {
		var next []string
		for _, dir := range dirs {
			found, more, err := v.set.ListFiles(ctx, name, dir, maxVolumeFiles-len(files))
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

func (v *Volumes) ReadFile(ctx context.Context, name, path string) (io.ReadCloser, sandbox.FileInfo, error) {
	return v.set.GetFile(ctx, name, path)
}

func (v *Volumes) WriteFile(ctx context.Context, name, path string, r io.Reader, mode uint32) (sandbox.FileInfo, error) {
	return v.set.Put(ctx, name, path, r, volume.PutOptions{Mode: mode, Parents: true})
}

func (v *Volumes) RemoveFile(ctx context.Context, name, path string, recursive bool) error {
	return v.set.Remove(ctx, name, path, recursive)
}
