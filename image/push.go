package image

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"net/http"
	"os"
	"path"
	"strings"
	"sync"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/cove-sandbox/cove/image/erofs"
	"github.com/cove-sandbox/cove/sandbox"
)

// Push sends an image to a registry and returns its digest there. Of one that was
// built, what it was built on is a layer of its own, with the same bytes every
// time, so that a registry has it once; what came over it is another.
func (l *Library) Push(ctx context.Context, who sandbox.RegistryAccess, id, ref string, progress func(sandbox.Progress)) (digest string, err error) {
	const op = "image.push"
	r, err := name.ParseReference(ref)
	if err != nil {
		return "", sandbox.WithOp(op, sandbox.InvalidField("reference", "%v", err))
	}
	if _, ok := r.(name.Digest); ok {
		return "", sandbox.WithOp(op, sandbox.InvalidField("reference", "%q is a digest; a push gives one", clip(ref)))
	}
	err = l.work(ctx, op, progress, func(b *build) error {
		rt, err := l.login(b.ctx, who, r.Context(), transport.PushScope)
		if err == nil {
			err = l.knows(b.ctx, rt, r.Context().Registry) // before minutes of packing
		}
		if err != nil {
			return err
		}
		img, err := b.asOCI(id)
		if err != nil {
			return err
		}
		b.progress.step("upload", 0, 0)
		if err := b.upload(r, img, rt); err != nil {
			return l.registryError(r.Context().Registry, err)
		}
		h, err := img.Digest()
		digest = h.String()
		return err
	})
	return digest, err
}

// upload writes an image and reports how far it is.
func (b *build) upload(r name.Reference, img v1.Image, rt http.RoundTripper) error {
	updates := make(chan v1.Update, 16) // closed by Write
	told := make(chan struct{})
	go func() {
		defer close(told)
		for u := range updates {
			if u.Error == nil {
				b.progress.step("upload", u.Complete, u.Total)
			}
		}
	}()
	err := remote.Write(r, img, remote.WithContext(b.ctx), remote.WithTransport(rt), remote.WithProgress(updates))
	<-told
	return err
}

// asOCI is an image as registries have it.
func (b *build) asOCI(id string) (v1.Image, error) {
	side, err := b.loadBase(id)
	if err != nil {
		return nil, err
	}
	b.progress.step("pack", 0, 0)
	var layers []v1.Layer
	under, over := erofs.NewDir(0o755, 0, 0), ""
	if side.Base != "" && b.lib.Have(side.Base) {
		base := newFlattener(b.limits, b.ws)
		b.cleanup = append(b.cleanup, base.close) // it may be read until all is sent
		of, err := base.loadBase(b.lib, side.Base)
		switch {
		case errors.Is(err, sandbox.ErrImageNotFound): // deleted meanwhile
		case err != nil:
			return nil, err
		default:
			layer, err := b.layer(side.Base, under, base.root, of.Notes)
			if err != nil {
				return nil, err
			}
			layers, under, over = append(layers, layer), base.root, " over "+side.Base
		}
	}
	layer, err := b.layer(id+over, under, b.root, side.Notes)
	if err != nil {
		return nil, err
	}
	layers = append(layers, layer)
	img := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	if img, err = mutate.Append(img, addenda(side, layers)...); err != nil {
		return nil, err
	}
	cf, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	cf = cf.DeepCopy()
	p, err := parsePlatform(side.Image.Platform)
	if err != nil {
		return nil, err
	}
	cf.OS, cf.Architecture, cf.Variant = p.OS, p.Architecture, p.Variant
	cf.Created = v1.Time{Time: side.Image.CreatedAt}
	cf.Config = ociConfig(side.Image.Config)
	return mutate.ConfigFile(img, cf)
}

// addenda are the layers with the history: every line of it, and as many lines
// with a layer as there are.
func addenda(side sidecar, layers []v1.Layer) (out []mutate.Addendum) {
	made := v1.Time{Time: side.Image.CreatedAt}
	if len(layers) > 1 {
		out = append(out, mutate.Addendum{Layer: layers[0], History: v1.History{Created: made, CreatedBy: "cove " + side.Base}})
	}
	last := -1
	for i, h := range side.History {
		if !h.Empty {
			last = i
		}
	}
	top := mutate.Addendum{Layer: layers[len(layers)-1], History: v1.History{Created: made, CreatedBy: "cove " + side.Image.Source}}
	for i, h := range side.History {
		line := v1.History{Created: v1.Time{Time: h.CreatedAt}, CreatedBy: h.CreatedBy, EmptyLayer: true}
		if i == last {
			line.EmptyLayer = false
			out = append(out, mutate.Addendum{Layer: top.Layer, History: line})
			continue
		}
		out = append(out, mutate.Addendum{History: line})
	}
	if last < 0 {
		out = append(out, top)
	}
	return out
}

func ociConfig(c sandbox.ImageConfig) v1.Config {
	set := func(names []string) map[string]struct{} {
		if len(names) == 0 {
			return nil
		}
		m := map[string]struct{}{}
		for _, n := range names {
			m[n] = struct{}{}
		}
		return m
	}
	out := v1.Config{Env: c.Env, WorkingDir: c.WorkingDir, User: c.User, Entrypoint: c.Entrypoint, Cmd: c.Cmd, Labels: c.Labels,
		ExposedPorts: set(c.ExposedPorts), Volumes: set(c.Volumes), StopSignal: c.StopSignal, Shell: c.Shell, OnBuild: c.OnBuild}
	if h := c.Healthcheck; h != nil {
		out.Healthcheck = &v1.HealthConfig{Test: h.Test, Interval: h.Interval, Timeout: h.Timeout, StartPeriod: h.StartPeriod, Retries: h.Retries}
	}
	return out
}

// layer is what is in one tree and not in another as a packed OCI layer. What was
// packed before is packed again only for a registry that lacks it.
func (b *build) layer(key string, under, top *erofs.Node, notes Notes) (_ v1.Layer, err error) {
	l := &packedLayer{pack: func() (*os.File, packing, error) {
		b.packing.Lock() // an upload asks for several layers at once
		defer b.packing.Unlock()
		f, p, err := b.pack(under, top, notes)
		return f, p, asError(b.ctx, "image.push", err) // a full disk is no answer of the registry
	}}
	if l.packing, err = b.lib.packings.of(key, func() (p packing, err error) {
		l.mu.f, p, err = l.pack()
		return p, err
	}); err != nil {
		return nil, err
	}
	return l, nil
}

func (b *build) pack(under, top *erofs.Node, notes Notes) (f *os.File, p packing, err error) {
	if f, err = b.newSpool(); err != nil {
		return nil, p, err
	}
	packed, plain := sha256.New(), sha256.New()
	zw, err := gzip.NewWriterLevel(io.MultiWriter(f, packed), gzip.BestSpeed)
	if err != nil {
		return nil, p, err
	}
	t := &treeTar{ctx: b.ctx, w: tar.NewWriter(io.MultiWriter(zw, &counting{plain, b.progress})), sum: sha256.New(), names: map[*erofs.Node]string{}, xattrs: notes.XattrList}
	if err := t.changes("", under, top); err != nil {
		return nil, p, err
	}
	if err := errors.Join(t.w.Close(), zw.Close()); err != nil {
		return nil, p, err
	}
	size, err := f.Seek(0, io.SeekEnd)
	return f, packing{size: size, packed: hashOf(packed.Sum(nil)), plain: hashOf(plain.Sum(nil))}, err
}

func hashOf(sum []byte) v1.Hash { return v1.Hash{Algorithm: "sha256", Hex: hex.EncodeToString(sum)} }

type counting struct {
	io.Writer
	progress *reporter
}

func (c *counting) Write(p []byte) (int, error) {
	c.progress.add(int64(len(p)))
	return c.Writer.Write(p)
}

// packing is what a layer is once it is packed.
type packing struct {
	size          int64
	packed, plain v1.Hash
}

// packings are those of this process: another version of Go may pack differently.
type packings struct {
	mu struct {
		sync.Mutex
		byKey map[string]packing
	}
}

// mostPackings are a few hundred KiB.
const mostPackings = 1000

// of is the packing of a key, or the one that make makes.
func (p *packings) of(key string, make func() (packing, error)) (packing, error) {
	p.mu.Lock()
	known, ok := p.mu.byKey[key]
	p.mu.Unlock()
	if ok {
		return known, nil
	}
	made, err := make()
	if err != nil {
		return made, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.byKey == nil || len(p.mu.byKey) >= mostPackings {
		p.mu.byKey = map[string]packing{}
	}
	p.mu.byKey[key] = made
	return made, nil
}

// packedLayer is a layer in a spool file, where it was or has to be packed.
type packedLayer struct {
	packing
	pack func() (*os.File, packing, error)

	mu struct {
		sync.Mutex
		f *os.File // nil = not packed yet
	}
}

func (l *packedLayer) Digest() (v1.Hash, error)            { return l.packed, nil }
func (l *packedLayer) DiffID() (v1.Hash, error)            { return l.plain, nil }
func (l *packedLayer) Size() (int64, error)                { return l.size, nil }
func (l *packedLayer) MediaType() (types.MediaType, error) { return types.OCILayer, nil }

func (l *packedLayer) Compressed() (io.ReadCloser, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.f == nil {
		f, p, err := l.pack()
		if err != nil {
			return nil, err
		}
		if p != l.packing {
			return nil, corrupt("layer %s was packed as %s this time", l.packed, p.packed)
		}
		l.mu.f = f
	}
	return io.NopCloser(io.NewSectionReader(l.mu.f, 0, l.size)), nil
}

func (l *packedLayer) Uncompressed() (io.ReadCloser, error) {
	r, err := l.Compressed()
	if err != nil {
		return nil, err
	}
	return gzip.NewReader(r)
}

// changes writes what a directory has besides another: what it lacks as OCI's
// whiteouts, then what is new or different.
func (t *treeTar) changes(at string, under, top *erofs.Node) error {
	for _, base := range under.Names() {
		if top.Child(base) == nil {
			h := &tar.Header{Name: path.Join(at, ".wh."+base), Typeflag: tar.TypeReg, Mode: 0o644, ModTime: time.Unix(0, 0)}
			if err := t.w.WriteHeader(h); err != nil {
				return err
			}
		}
	}
	for _, base := range top.Names() {
		if strings.HasPrefix(base, ".wh.") {
			continue // no layer can have such a name
		}
		name, was, is := path.Join(at, base), under.Child(base), top.Child(base)
		same, err := t.same(was, is)
		if err != nil {
			return err
		}
		if !same {
			if err := t.entry(name, is); err != nil {
				return err
			}
		}
		if is.IsDir() {
			if was == nil || !was.IsDir() {
				was = erofs.NewDir(0, 0, 0)
			}
			if err := t.changes(name, was, is); err != nil {
				return err
			}
		}
	}
	return nil
}

// same says whether two nodes are alike, of files the content too: a time can be
// set back.
func (t *treeTar) same(a, b *erofs.Node) (bool, error) {
	if a == nil || a.Mode != b.Mode || a.UID != b.UID || a.GID != b.GID || a.Mtime != b.Mtime || a.MtimeNsec != b.MtimeNsec ||
		a.Size != b.Size || a.Target != b.Target || a.Rdev != b.Rdev {
		return false, nil
	}
	if !a.IsRegular() || a.Size == 0 {
		return true, nil
	}
	x, err := a.Open()
	if err != nil {
		return false, err
	}
	defer x.Close()
	y, err := b.Open()
	if err != nil {
		return false, err
	}
	defer y.Close()
	return sameBytes(t.ctx, x, y)
}

func sameBytes(ctx context.Context, x, y io.Reader) (bool, error) {
	p, q := make([]byte, 64<<10), make([]byte, 64<<10)
	for ctx.Err() == nil {
		n, err := io.ReadFull(x, p)
		m, merr := io.ReadFull(y, q[:max(n, 1)])
		switch {
		case n != m || string(p[:n]) != string(q[:m]):
			return false, nil
		case err == io.EOF || err == io.ErrUnexpectedEOF:
			return true, nil
		case err != nil:
			return false, err
		case merr != nil:
			return false, merr
		}
	}
	return false, ctx.Err()
}
