package image

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io"
	"os"
	"path"
	"strings"

	"github.com/cove-sandbox/cove/sandbox"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// ImportTar makes an image of a tarball: what docker save writes, an OCI
// layout, or a plain root file system, each as it is or packed with gzip or
// zstd. A plain one has an empty config.
func (l *Library) ImportTar(ctx context.Context, r io.Reader, progress func(sandbox.Progress)) (sandbox.Image, error) {
	return l.build(ctx, "image.import_tar", progress, func(b *build) (sidecar, error) {
		// The kind of an archive may only show at its end (docker save puts
		// manifest.json last), so all of it is kept first.
		b.progress.step("download", 0, 0)
		a, err := b.spoolArchive(r)
		if err != nil {
			return sidecar{}, err
		}
		want, _ := parsePlatform("")
		var side sidecar
		switch {
		case a.isOCI():
			side, err = b.importOCI(a, want)
		case a.isDocker():
			side, err = b.importDocker(a, want)
		default:
			b.progress.step("flatten", 0, a.size)
			err = b.applySpooled(b.ctx, &counted{io.NewSectionReader(a.f, 0, a.size), b.progress}, a.f, io.Discard, formRoot)
		}
		side.Image.Source = "tar"
		return side, err
	})
}

// archive is an uncompressed tar in a temporary file, with an index of its
// members.
type archive struct {
	f       *os.File
	size    int64
	members map[string]member
}

type member struct {
	off, size int64
	link      string // another member: old docker save links layers that occur twice
}

// Bounds of the index: real image archives have a few members per layer. A
// root file system has more, and then it is not an image archive.
const maxMembers = 10_000

func (b *build) spoolArchive(r io.Reader) (*archive, error) {
	f, err := os.OpenFile(b.ws.path("archive.tar"), os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	b.spools = append(b.spools, f) // open until the image is written
	a := &archive{f: f, members: map[string]member{}}
	return a, a.fill(b, r)
}

func (a *archive) fill(b *build, r io.Reader) error {
	packed := &counter{r: contextReader{b.ctx, r}}
	plain, err := decompress(&counted{packed, b.progress}, b.limits)
	if err != nil {
		return err
	}
	defer plain.Close()
	// An archive holds packed layers or plain files; both count as download.
	limit := b.limits.Download
	a.size, err = io.Copy(a.f, io.LimitReader(plain, limit+1))
	if err != nil {
		return err
	}
	if a.size > limit {
		return tooLarge("archive over %d bytes", limit)
	}
	if a.size == 0 {
		return invalid("the archive is empty")
	}
	return a.index(b.ctx)
}

func (a *archive) index(ctx context.Context) error {
	in := io.NewSectionReader(a.f, 0, a.size) // seekable: members are skipped, not read
	tr := tar.NewReader(in)
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		hdr, err := tr.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return invalid("not a readable tar archive: %w", err)
		}
		if len(a.members) > maxMembers {
			clear(a.members)
			return nil
		}
		name := path.Clean(strings.TrimPrefix(hdr.Name, "/"))
		switch hdr.Typeflag {
		case tar.TypeReg:
			if isSparse(hdr) {
				continue
			}
			off, err := in.Seek(0, io.SeekCurrent)
			if err != nil {
				return err
			}
			a.members[name] = member{off: off, size: hdr.Size}
		case tar.TypeSymlink:
			a.members[name] = member{link: path.Join(path.Dir(name), hdr.Linkname)}
		case tar.TypeLink:
			a.members[name] = member{link: path.Clean(hdr.Linkname)}
		}
	}
}

// open finds a member by name, through at most one link.
func (a *archive) open(name string) (*io.SectionReader, bool) {
	m, ok := a.members[path.Clean(name)]
	if ok && m.link != "" {
		m, ok = a.members[m.link]
	}
	if !ok || m.link != "" {
		return nil, false
	}
	return io.NewSectionReader(a.f, m.off, m.size), true
}

// readJSON decodes a small member.
func (a *archive) readJSON(name string, v any) error {
	r, ok := a.open(name)
	if !ok {
		return invalid("the archive lacks %q", clip(name))
	}
	if r.Size() > maxConfig {
		return tooLarge("%q has %d bytes", clip(name), r.Size())
	}
	if err := json.NewDecoder(r).Decode(v); err != nil {
		return invalid("%q in the archive: %w", clip(name), err)
	}
	return nil
}

// dockerManifest is docker save's manifest.json.
type dockerManifest []struct {
	Config   string
	RepoTags []string
	Layers   []string
}

// isDocker is true only if what manifest.json names is there: a root file
// system may have a file of that name.
func (a *archive) isDocker() bool {
	var m dockerManifest
	if a.readJSON("manifest.json", &m) != nil || len(m) == 0 {
		return false
	}
	for _, img := range m {
		if _, ok := a.open(img.Config); !ok {
			return false
		}
	}
	return true
}

func (b *build) importDocker(a *archive, want v1.Platform) (sidecar, error) {
	var m dockerManifest
	if err := a.readJSON("manifest.json", &m); err != nil {
		return sidecar{}, err
	}
	if len(m) > 1 {
		return sidecar{}, invalid("the archive holds %d images; save one at a time", len(m))
	}
	if len(m[0].Layers) > maxLayers {
		return sidecar{}, tooLarge("%d layers, more than %d", len(m[0].Layers), maxLayers)
	}
	config, err := a.blob(m[0].Config, maxConfig)
	if err != nil {
		return sidecar{}, err
	}
	return b.applyImage(config, want, len(m[0].Layers), func(i int) (io.ReadCloser, error) {
		r, ok := a.open(m[0].Layers[i])
		if !ok {
			return nil, invalid("the archive lacks layer %q", clip(m[0].Layers[i]))
		}
		return io.NopCloser(r), nil
	})
}

// blob reads a small member whole.
func (a *archive) blob(name string, limit int64) ([]byte, error) {
	r, ok := a.open(name)
	if !ok {
		return nil, invalid("the archive lacks %q", clip(name))
	}
	if r.Size() > limit {
		return nil, tooLarge("%q has %d bytes", clip(name), r.Size())
	}
	return io.ReadAll(r)
}

func (a *archive) isOCI() bool {
	var layout struct {
		Version string `json:"imageLayoutVersion"`
	}
	_, hasIndex := a.members["index.json"]
	return hasIndex && a.readJSON("oci-layout", &layout) == nil && layout.Version != ""
}

func (b *build) importOCI(a *archive, want v1.Platform) (sidecar, error) {
	data, err := a.blob("index.json", maxConfig)
	if err != nil {
		return sidecar{}, err
	}
	for range 4 { // index.json may point at an index
		index, err := v1.ParseIndexManifest(bytes.NewReader(data))
		if err != nil {
			return sidecar{}, invalid("index.json: %w", err)
		}
		d, err := chooseFromLayout(index.Manifests, want)
		if err != nil {
			return sidecar{}, err
		}
		if data, err = a.ociBlob(d, maxConfig); err != nil {
			return sidecar{}, err
		}
		if d.MediaType != types.OCIImageIndex && d.MediaType != types.DockerManifestList {
			return b.importOCIManifest(a, data, want)
		}
	}
	return sidecar{}, invalid("image indexes nested too deep")
}

// chooseFromLayout is choose for index.json, whose entries often have no
// platform: several of those are several images.
func chooseFromLayout(manifests []v1.Descriptor, want v1.Platform) (v1.Descriptor, error) {
	d, err := choose(manifests, want)
	if err == nil {
		return d, nil
	}
	images := 0
	for _, m := range manifests {
		if m.Platform == nil {
			images++
		}
	}
	if images > 1 {
		return d, invalid("the archive holds %d images; save one at a time", images)
	}
	return d, err
}

func (b *build) importOCIManifest(a *archive, data []byte, want v1.Platform) (sidecar, error) {
	m, err := v1.ParseManifest(bytes.NewReader(data))
	if err != nil {
		return sidecar{}, invalid("image manifest: %w", err)
	}
	if len(m.Layers) > maxLayers {
		return sidecar{}, tooLarge("%d layers, more than %d", len(m.Layers), maxLayers)
	}
	config, err := a.ociBlob(m.Config, maxConfig)
	if err != nil {
		return sidecar{}, err
	}
	return b.applyImage(config, want, len(m.Layers), func(i int) (io.ReadCloser, error) {
		r, err := a.openDigest(m.Layers[i].Digest)
		if err != nil {
			return nil, err
		}
		// The unpacked digest in the config is checked by applyLayer.
		return io.NopCloser(r), nil
	})
}

func (a *archive) openDigest(d v1.Hash) (*io.SectionReader, error) {
	r, ok := a.open("blobs/" + d.Algorithm + "/" + d.Hex)
	if !ok {
		return nil, invalid("the archive lacks blob %s", d)
	}
	return r, nil
}

// ociBlob reads a small blob and compares it with its digest.
func (a *archive) ociBlob(d v1.Descriptor, limit int64) ([]byte, error) {
	r, err := a.openDigest(d.Digest)
	if err != nil {
		return nil, err
	}
	if r.Size() > limit {
		return nil, tooLarge("blob %s has %d bytes", d.Digest, r.Size())
	}
	data, err := io.ReadAll(r)
	if err != nil {
		return nil, err
	}
	if sum := sha256.Sum256(data); d.Digest.Algorithm != "sha256" || hex.EncodeToString(sum[:]) != d.Digest.Hex {
		return nil, corrupt("blob %s of the archive has other content", d.Digest)
	}
	return data, nil
}
