package image

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"maps"
	"math"
	"net/http"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/sync/errgroup"
)

const (
	parallelLayers = 3 // as docker pull
	maxLayers      = 512
	maxConfig      = 8 * mib
)

// Pull fetches an image by reference from its registry, with the credentials of
// the server's machine; platform "" is the node's own. What was downloaded of an interrupted pull is used by the next.
func (l *Library) Pull(ctx context.Context, ref, platform string, progress func(sandbox.Progress)) (sandbox.Image, error) {
	return l.PullAs(ctx, sandbox.RegistryAccess{Operator: true}, ref, platform, progress)
}

// PullAs is Pull as somebody else than the operator.
func (l *Library) PullAs(ctx context.Context, who sandbox.RegistryAccess, ref, platform string, progress func(sandbox.Progress)) (sandbox.Image, error) {
	const op = "image.pull"
	r, err := name.ParseReference(ref)
	if err != nil {
		return sandbox.Image{}, sandbox.WithOp(op, sandbox.InvalidField("reference", "%v", err))
	}
	want, err := parsePlatform(platform)
	if err != nil {
		return sandbox.Image{}, sandbox.WithOp(op, err)
	}
	return l.build(ctx, op, progress, func(b *build) (sidecar, error) {
		b.progress.step("resolve", 0, 0)
		rt, err := l.login(b.ctx, who, r.Context(), transport.PullScope)
		if err != nil {
			return sidecar{}, err
		}
		manifest, digest, err := l.resolve(b.ctx, r, want, rt)
		if err != nil {
			return sidecar{}, err
		}
		blobs := &blobs{lib: l, repo: r.Context(), progress: b.progress,
			client: &http.Client{Transport: rt}}
		side, err := b.pullImage(blobs, manifest, want)
		// A download is worth keeping for the next attempt only where that
		// could end differently, and where it does not fill the disk.
		if class := sandbox.ClassOf(asError(b.ctx, op, err)); class != sandbox.Canceled && class != sandbox.DeadlineReached && class != sandbox.Unavailable {
			l.forgetPartials(r.Context(), manifest)
		}
		side.Image.Source = r.Context().Name() + "@" + digest.String()
		return side, err
	})
}

func (b *build) pullImage(blobs *blobs, m *v1.Manifest, want v1.Platform) (sidecar, error) {
	files, config, err := b.download(blobs, m)
	defer func() {
		for _, f := range files {
			f.Close()
		}
	}()
	if err != nil {
		return sidecar{}, err
	}
	return b.applyImage(config, want, len(m.Layers), func(i int) (io.ReadCloser, error) {
		d := m.Layers[i]
		return io.NopCloser(io.NewSectionReader(files[d.Digest], 0, d.Size)), nil
	})
}

// forgetPartials removes the blobs of an image from the partial directory,
// except those another pull is at.
func (l *Library) forgetPartials(repo name.Repository, m *v1.Manifest) {
	for _, d := range append(slices.Clone(m.Layers), m.Config) {
		path := l.partialPath(repo, d.Digest)
		f, err := os.Open(path)
		if err != nil {
			continue
		}
		if tryFlock(f) == nil {
			os.Remove(path)
		}
		f.Close()
	}
}

// resolve finds the manifest for a platform, through an index if there is one.
func (l *Library) resolve(ctx context.Context, ref name.Reference, want v1.Platform, rt http.RoundTripper) (*v1.Manifest, v1.Hash, error) {
	for range 3 { // an index may point at an index
		desc, err := remote.Get(ref, remote.WithContext(ctx), remote.WithTransport(rt))
		if err != nil {
			return nil, v1.Hash{}, l.registryError(ref.Context().Registry, err)
		}
		switch desc.MediaType {
		case types.OCIImageIndex, types.DockerManifestList:
			index, err := v1.ParseIndexManifest(bytes.NewReader(desc.Manifest))
			if err != nil {
				return nil, v1.Hash{}, invalid("the image's index cannot be read")
			}
			child, err := choose(index.Manifests, want)
			if err != nil {
				return nil, v1.Hash{}, err
			}
			ref = ref.Context().Digest(child.Digest.String())
		case types.OCIManifestSchema1, types.DockerManifestSchema2:
			m, err := v1.ParseManifest(bytes.NewReader(desc.Manifest))
			if err != nil {
				return nil, v1.Hash{}, invalid("the image's manifest cannot be read")
			}
			return m, desc.Digest, nil
		default:
			return nil, v1.Hash{}, sandbox.Errorf(sandbox.Unsupported, "", "%s is no image that is known here", ref).
				WithHint("rebuild it as an OCI or Docker schema 2 image")
		}
	}
	return nil, v1.Hash{}, invalid("image indexes nested too deep")
}

// download fetches the config and all layers, a few at a time.
func (b *build) download(blobs *blobs, m *v1.Manifest) (files map[v1.Hash]*os.File, config []byte, err error) {
	if len(m.Layers) > maxLayers {
		return nil, nil, tooLarge("%d layers, more than %d", len(m.Layers), maxLayers)
	}
	if m.Config.Size < 0 || m.Config.Size > maxConfig {
		return nil, nil, tooLarge("config of %d bytes", m.Config.Size)
	}
	sizes := map[v1.Hash]int64{}
	total := m.Config.Size
	for _, d := range m.Layers {
		if !d.MediaType.IsDistributable() {
			return nil, nil, sandbox.Errorf(sandbox.Unsupported, "", "layer %s is kept outside the registry (%s)", d.Digest, d.MediaType)
		}
		if d.Size < 0 || d.Size > math.MaxInt64-total {
			return nil, nil, invalid("layer %s has size %d", d.Digest, d.Size)
		}
		if _, again := sizes[d.Digest]; !again {
			sizes[d.Digest] = d.Size
			total += d.Size
		}
	}
	if total > b.limits.Download {
		return nil, nil, tooLarge("image of %d bytes, more than %d", total, b.limits.Download)
	}
	b.progress.step("download", 0, total)
	files = map[v1.Hash]*os.File{}
	var mu sync.Mutex
	g, ctx := errgroup.WithContext(b.ctx)
	g.SetLimit(parallelLayers)
	get := func(d v1.Descriptor) {
		g.Go(func() error {
			f, err := blobs.fetch(ctx, d)
			if err != nil {
				return err
			}
			mu.Lock()
			defer mu.Unlock()
			files[d.Digest] = f
			return nil
		})
	}
	get(m.Config)
	for d, size := range sizes {
		if d != m.Config.Digest {
			get(v1.Descriptor{Digest: d, Size: size})
		}
	}
	if err := g.Wait(); err != nil {
		return files, nil, err
	}
	config, err = io.ReadAll(io.NewSectionReader(files[m.Config.Digest], 0, m.Config.Size))
	return files, config, err
}

// applyImage flattens the layers of an OCI image, checking each against the
// config's digest of its unpacked content.
func (b *build) applyImage(config []byte, want v1.Platform, layers int, open func(i int) (io.ReadCloser, error)) (sidecar, error) {
	cf, err := v1.ParseConfigFile(bytes.NewReader(config))
	if err != nil {
		return sidecar{}, invalid("image config: %w", err)
	}
	got := v1.Platform{OS: cf.OS, Architecture: cf.Architecture, Variant: cf.Variant}
	if got.OS != "" && !runsOn(got, want) {
		return sidecar{}, wrongPlatform(want, []string{platformName(got)})
	}
	if got.OS == "" {
		got = want
	}
	if len(cf.RootFS.DiffIDs) != layers {
		return sidecar{}, invalid("%d layers, and a config for %d", layers, len(cf.RootFS.DiffIDs))
	}
	b.progress.step("flatten", 0, 0)
	for i, diff := range cf.RootFS.DiffIDs {
		if err := b.applyLayer(diff, func() (io.ReadCloser, error) { return open(i) }); err != nil {
			return sidecar{}, err
		}
	}
	return sidecar{Image: sandbox.Image{Platform: platformName(got), Config: imageConfig(cf.Config)}}, nil
}

func (b *build) applyLayer(diff v1.Hash, open func() (io.ReadCloser, error)) error {
	packed, err := open()
	if err != nil {
		return err
	}
	defer packed.Close()
	plain, err := decompress(packed, b.limits)
	if err != nil {
		return err
	}
	defer plain.Close()
	sum := sha256.New()
	if err := b.apply(b.ctx, &counted{io.TeeReader(plain, sum), b.progress}, formLayer); err != nil {
		return err
	}
	if got := hex.EncodeToString(sum.Sum(nil)); diff.Algorithm != "sha256" || got != diff.Hex {
		return corrupt("a layer unpacks to sha256:%s, and the config says %s", got, diff)
	}
	return nil
}

type counted struct {
	r        io.Reader
	progress *reporter
}

func (c *counted) Read(b []byte) (int, error) {
	n, err := c.r.Read(b)
	c.progress.add(int64(n))
	return n, err
}

// imageConfig takes what Cove honours. Entries no process could be given are
// left out rather than failing every exec later.
func imageConfig(c v1.Config) sandbox.ImageConfig {
	return sandbox.ImageConfig{
		Env: slices.DeleteFunc(slices.Clone(c.Env), func(e string) bool {
			return strings.Index(e, "=") < 1 || strings.IndexByte(e, 0) >= 0
		}),
		WorkingDir: c.WorkingDir,
		User:       c.User,
		Entrypoint: c.Entrypoint,
		Cmd:        c.Cmd,

		Labels:       c.Labels,
		ExposedPorts: slices.Sorted(maps.Keys(c.ExposedPorts)),
		Volumes:      slices.Sorted(maps.Keys(c.Volumes)),
		StopSignal:   c.StopSignal,
		Shell:        c.Shell,
		OnBuild:      c.OnBuild,
		Healthcheck:  healthcheck(c.Healthcheck),
	}
}

func healthcheck(h *v1.HealthConfig) *sandbox.Healthcheck {
	if h == nil {
		return nil
	}
	return &sandbox.Healthcheck{Test: h.Test, Interval: h.Interval, Timeout: h.Timeout, StartPeriod: h.StartPeriod, Retries: h.Retries}
}

func parsePlatform(s string) (v1.Platform, error) {
	if s == "" {
		return v1.Platform{OS: "linux", Architecture: runtime.GOARCH}, nil
	}
	p, err := v1.ParsePlatform(s)
	if err != nil || p.OS != "linux" || p.Architecture == "" {
		return v1.Platform{}, sandbox.InvalidField("platform", "%q is not like linux/amd64 or linux/arm64/v8", s)
	}
	return *p, nil
}

func runsOn(got, want v1.Platform) bool {
	return got.OS == want.OS && got.Architecture == want.Architecture && (want.Variant == "" || got.Variant == want.Variant)
}

// choose picks the manifest of an index for a platform.
func choose(manifests []v1.Descriptor, want v1.Platform) (v1.Descriptor, error) {
	var offered []string
	for _, d := range manifests {
		switch {
		case d.Platform == nil:
			if len(manifests) == 1 {
				return d, nil // its config will tell
			}
		case runsOn(*d.Platform, want):
			return d, nil
		case d.Platform.OS != "unknown": // build attestations
			if p := platformName(*d.Platform); !slices.Contains(offered, p) {
				offered = append(offered, p)
			}
		}
	}
	return v1.Descriptor{}, wrongPlatform(want, offered)
}

func wrongPlatform(want v1.Platform, offered []string) error {
	slices.Sort(offered)
	e := sandbox.Errorf(sandbox.Unsupported, "", "the image is not made for %s", platformName(want))
	if len(offered) > 0 {
		e = e.WithHint("it is offered for %s", strings.Join(offered, ", "))
	}
	return e
}

func platformName(p v1.Platform) string {
	s := p.OS + "/" + p.Architecture
	if p.Variant != "" {
		s += "/" + p.Variant
	}
	return s
}
