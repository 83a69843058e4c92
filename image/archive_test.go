package image_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/image"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/klauspost/compress/zstd"
)

// ociTar makes an OCI layout of an index and packs it; spoil may damage it.
func ociTar(t *testing.T, index v1.ImageIndex, spoil func(dir string)) []byte {
	t.Helper()
	root := t.TempDir()
	if _, err := layout.Write(root, index); err != nil {
		t.Fatal(err)
	}
	if spoil != nil {
		spoil(root)
	}
	var hdrs []tar.Header
	err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		data, err := os.ReadFile(p)
		rel, _ := filepath.Rel(root, p)
		hdrs = append(hdrs, reg(rel, string(data)))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return packAny(t, hdrs)
}

// packAny is pack for contents a PAX record cannot hold.
func packAny(t *testing.T, hdrs []tar.Header) []byte {
	t.Helper()
	var buf bytes.Buffer
	tw := tar.NewWriter(&buf)
	for _, h := range hdrs {
		content := h.PAXRecords["TEST.content"]
		h.PAXRecords = nil
		if err := tw.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		tw.Write([]byte(content))
	}
	if err := tw.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

func TestImportTarKnowsItsKind(t *testing.T) {
	cfg := v1.Config{Env: []string{"K=v"}, User: "nobody"}
	img := ociImage(t, "linux/amd64", cfg, layer(t, pack(t, reg("a", "1"), reg("b", "1"))), layer(t, pack(t, reg(".wh.a", ""))))
	var docker bytes.Buffer
	tag, _ := name.NewTag("app:latest")
	if err := tarball.Write(tag, img, &docker); err != nil {
		t.Fatal(err)
	}
	oci := ociTar(t, mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: img}), nil)
	// As docker buildx writes it: index.json points at an index with platforms.
	nested := ociTar(t, mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: mutate.AppendManifests(empty.Index,
		mutate.IndexAddendum{Add: ociImage(t, "linux/arm64", v1.Config{}, layer(t, pack(t, reg("arm", "")))),
			Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "arm64"}}},
		mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "amd64"}}})}), nil)
	plain := pack(t, reg("b", "1"), reg(".wh.kept", ""), reg("manifest.json", "{}"), reg("index.json", "{}"))

	lib := library(t, image.Options{})
	for kind, c := range map[string]struct {
		data []byte
		want string
		user string
	}{
		"docker save":         {docker.Bytes(), "/b", "nobody"},
		"OCI layout":          {oci, "/b", "nobody"},
		"OCI layout, nested":  {nested, "/b", "nobody"},
		"plain root":          {plain, "/.wh.kept /b /index.json /manifest.json", ""},
		"docker save, gzip":   {gz(t, docker.Bytes()), "/b", "nobody"},
		"OCI layout, zstd":    {zst(t, oci), "/b", "nobody"},
		"plain root, gzip":    {gz(t, plain), "/.wh.kept /b /index.json /manifest.json", ""},
		"plain root, zstd":    {zst(t, plain), "/.wh.kept /b /index.json /manifest.json", ""},
		"plain root, gzip ×2": {gz(t, plain[:1024], plain[1024:]), "/.wh.kept /b /index.json /manifest.json", ""},
	} {
		t.Run(kind, func(t *testing.T) {
			got := importTar(t, lib, c.data)
			if paths := strings.Join(own(files(t, lib, got.ID)), " "); paths != c.want {
				t.Errorf("files: %s", paths)
			}
			if got.Config.User != c.user || got.Source != "tar" {
				t.Errorf("user %q, source %q", got.Config.User, got.Source)
			}
		})
	}
}

// gz packs each part as a gzip member of its own, as pigz and estargz do.
func gz(t *testing.T, parts ...[]byte) []byte {
	t.Helper()
	var buf bytes.Buffer
	for _, p := range parts {
		w := gzip.NewWriter(&buf)
		w.Write(p)
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
	}
	return buf.Bytes()
}

func zst(t *testing.T, data []byte) []byte {
	t.Helper()
	var buf bytes.Buffer
	w, err := zstd.NewWriter(&buf)
	if err != nil {
		t.Fatal(err)
	}
	w.Write(data)
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

func TestImportTarRefusesDamage(t *testing.T) {
	img := ociImage(t, "linux/amd64", v1.Config{}, layer(t, pack(t, reg("a", noise(5000)))))
	index := mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: img})
	mf, _ := img.Manifest()
	blob := func(dir string, h v1.Hash) string { return filepath.Join(dir, "blobs", "sha256", h.Hex) }
	other := gz(t, pack(t, reg("a", "something else")))
	arm := ociImage(t, "linux/arm64", v1.Config{}, layer(t, pack(t, reg("a", ""))))
	for name, c := range map[string]struct {
		data  []byte
		class sandbox.Class
	}{
		"layer exchanged": {ociTar(t, index, func(dir string) { os.WriteFile(blob(dir, mf.Layers[0].Digest), other, 0o600) }), sandbox.Corrupt},
		"config changed":  {ociTar(t, index, func(dir string) { os.WriteFile(blob(dir, mf.Config.Digest), []byte("{}"), 0o600) }), sandbox.Corrupt},
		"layer missing":   {ociTar(t, index, func(dir string) { os.Remove(blob(dir, mf.Layers[0].Digest)) }), sandbox.Invalid},
		"two images": {ociTar(t, mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: img}, mutate.IndexAddendum{Add: arm}), nil),
			sandbox.Invalid},
		"another machine": {ociTar(t, mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: arm}), nil), sandbox.Unsupported},
		"cut gzip":        {gz(t, pack(t, reg("a", noise(5000))))[:2000], sandbox.Invalid},
		"not a tar":       {[]byte(strings.Repeat("hello ", 1000)), sandbox.Invalid},
	} {
		t.Run(name, func(t *testing.T) {
			lib := library(t, image.Options{})
			_, err := lib.ImportTar(t.Context(), bytes.NewReader(c.data), nil)
			wantClass(t, err, c.class)
			if all, _ := lib.Contents(t.Context()); len(all) != 0 {
				t.Errorf("left behind: %v", all)
			}
		})
	}
}

// zeros is an endless source of them.
type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }

func TestImportTarStopsABomb(t *testing.T) {
	// 300 MiB of zeros in a few dozen KiB of zstd, more than 200:1.
	var bomb bytes.Buffer
	w, err := zstd.NewWriter(&bomb, zstd.WithEncoderLevel(zstd.SpeedFastest))
	if err != nil {
		t.Fatal(err)
	}
	tw := tar.NewWriter(w)
	const size = 300 << 20
	tw.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "bomb", Size: size})
	buf := make([]byte, 1<<20)
	for range size >> 20 {
		tw.Write(buf)
	}
	tw.Close()
	w.Close()
	lib := library(t, image.Options{})
	_, err = lib.ImportTar(t.Context(), &bomb, nil)
	wantClass(t, err, sandbox.TooLarge)

	lib = library(t, image.Options{Limits: image.Limits{Download: 1 << 20}})
	_, err = lib.ImportTar(t.Context(), zeros{}, nil)
	wantClass(t, err, sandbox.TooLarge)
}
