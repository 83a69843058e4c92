package agenttest

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"maps"
	"os"
	"path/filepath"
	"sync"

	"github.com/cove-sandbox/cove/node/agent"
	"github.com/cove-sandbox/cove/sandbox"
)

// Library keeps images as tars, which is what the fake driver starts from. One that
// was only said to be there has no content.
type Library struct {
	// Remote is what can be pulled, by reference. Set before use.
	Remote map[string]sandbox.Image

	dir string
	mu  struct {
		sync.Mutex
		images map[string]sandbox.Image
	}
}

// NewLibrary keeps its tars in dir. It has Image and nothing else, and can pull
// "docker.io/library/tiny".
func NewLibrary(dir string) (*Library, error) {
	l := &Library{dir: dir, Remote: map[string]sandbox.Image{
		"docker.io/library/tiny": {ID: "sha256:tiny", Source: "sha256:from-registry", Platform: "linux/amd64", Size: 1000}}}
	l.mu.images = map[string]sandbox.Image{}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	l.Add(Image)
	return l, os.WriteFile(l.file(Image.ID), base(), 0o600)
}

// base is what Image holds.
func base() []byte {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, f := range [][2]string{
		{"etc/passwd", "root:x:0:0::/:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n"},
		{"proc/1/net/tcp", "  sl  local_address rem_address   st\n"}, // the fake driver has no /proc; programs of tests write here what they listen on
	} {
		_ = w.WriteHeader(&tar.Header{Name: f[0], Mode: 0o644, Size: int64(len(f[1]))})
		_, _ = io.WriteString(w, f[1])
	}
	_ = w.Close() // into memory: none of these fails
	return b.Bytes()
}

func (l *Library) file(id string) string { return filepath.Join(l.dir, id) }

// Add says that an image is there.
func (l *Library) Add(img sandbox.Image) sandbox.Image {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.images[img.ID] = img
	return img
}

func notFound(id string) error {
	return &sandbox.Error{Class: sandbox.ImageNotFound, Op: "image.get", Msg: "no image " + id}
}

// Path is the tar of an image; "" if it has no content.
func (l *Library) Path(id string) (string, error) {
	if _, err := l.Get(id); err != nil {
		return "", err
	}
	if _, err := os.Stat(l.file(id)); err != nil {
		return "", nil
	}
	return l.file(id), nil
}

func (l *Library) Get(id string) (sandbox.Image, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	img, ok := l.mu.images[id]
	if !ok {
		return sandbox.Image{}, notFound(id)
	}
	return img, nil
}

func (l *Library) Delete(_ context.Context, id string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, ok := l.mu.images[id]; !ok {
		return notFound(id)
	}
	delete(l.mu.images, id)
	if err := os.Remove(l.file(id)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

func (l *Library) Contents(context.Context) (map[string]int64, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := map[string]int64{}
	for id, img := range maps.All(l.mu.images) {
		out[id] = img.Size
	}
	return out, nil
}

func (l *Library) PullAs(ctx context.Context, _ sandbox.RegistryAccess, ref, _ string, progress func(sandbox.Progress)) (sandbox.Image, error) {
	img, ok := l.Remote[ref]
	if !ok {
		return sandbox.Image{}, notFound(ref)
	}
	progress(sandbox.Progress{Step: "download", Total: img.Size})
	progress(sandbox.Progress{Step: "done", Done: img.Size, Total: img.Size})
	return l.Add(img), ctx.Err()
}

// ImportTar keeps no content: nobody starts from what tests import.
func (l *Library) ImportTar(_ context.Context, r io.Reader, progress func(sandbox.Progress)) (sandbox.Image, error) {
	return l.made(sandbox.Image{Source: "tar"}, "", r, progress, io.Discard)
}

// Derive is agent.Deriver's. What the fake driver says has changed is everything.
func (l *Library) Derive(_ context.Context, base string, diff io.Reader, progress func(sandbox.Progress)) (sandbox.Image, error) {
	of, err := l.Get(base)
	if err != nil {
		return sandbox.Image{}, err
	}
	return l.kept(sandbox.Image{Source: sandbox.ImageDerived, Config: of.Config}, base, diff, progress)
}

func (l *Library) FromTar(_ context.Context, r io.Reader, progress func(sandbox.Progress)) (sandbox.Image, error) {
	return l.kept(sandbox.Image{Source: sandbox.ImageData}, "", r, progress)
}

// kept is made with its content.
func (l *Library) kept(img sandbox.Image, base string, r io.Reader, progress func(sandbox.Progress)) (sandbox.Image, error) {
	f, err := os.CreateTemp(l.dir, "new-")
	if err != nil {
		return sandbox.Image{}, err
	}
	img, err = l.made(img, base, r, progress, f)
	if err = errors.Join(err, f.Close()); err != nil {
		return sandbox.Image{}, errors.Join(err, os.Remove(f.Name()))
	}
	return img, os.Rename(f.Name(), l.file(img.ID))
}

// made is named after what it is made of.
func (l *Library) made(img sandbox.Image, base string, r io.Reader, progress func(sandbox.Progress), to io.Writer) (sandbox.Image, error) {
	h := sha256.New()
	io.WriteString(h, base)
	n, err := io.Copy(io.MultiWriter(h, to), r)
	if err != nil {
		return sandbox.Image{}, err
	}
	progress(sandbox.Progress{Step: "done", Done: n, Total: n})
	img.ID, img.Platform, img.Size = "sha256:"+hex.EncodeToString(h.Sum(nil)), "linux/amd64", n
	return l.Add(img), nil
}

var (
	_ agent.Images  = (*Library)(nil)
	_ agent.Deriver = (*Library)(nil)
	_ agent.Library = (*Library)(nil)
)
