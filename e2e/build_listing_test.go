package e2e

import (
	"archive/tar"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
)

// made is what a build gives: its config, and of its files what the base lacks.
type made struct {
	Config map[string]any    `json:"config"`
	Files  map[string]string `json:"files"`
}

// pulled reads images of a registry. That of the base is a layer of every image, so
// that layers are read once.
type pulled struct {
	layers map[v1.Hash][]tarEntry
}

type tarEntry struct {
	path, what string
	link       string // another name of this path
}

// image is what an image in a registry is.
func (p *pulled) image(t *testing.T, ref string, under map[string]string) (m made, all map[string]string) {
	t.Helper()
	r, err := name.ParseReference(ref, name.Insecure)
	if err != nil {
		t.Fatal(err)
	}
	img, err := remote.Image(r)
	if err != nil {
		t.Fatal(err)
	}
	return p.of(t, img, under)
}

// of is what an image is; files as they differ from those under it, and all of them.
func (p *pulled) of(t *testing.T, img v1.Image, under map[string]string) (m made, all map[string]string) {
	t.Helper()
	cf, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	all = map[string]string{}
	for _, l := range layers {
		p.apply(t, l, all)
	}
	m = made{Config: configOf(cf.Config), Files: map[string]string{}}
	if len(all) < 100 { // of nothing
		under = nil
	}
	for p, what := range all {
		if under[p] != what {
			m.Files[p] = what
		}
	}
	for p := range under {
		_, is := all[p]
		_, parent := all[path.Dir(p)]
		if !is && (parent || under[path.Dir(p)] == "") { // of a tree that is gone its top says enough
			m.Files[p] = "removed"
		}
	}
	return m, all
}

// apply puts a layer over files, as OCI has it.
func (p *pulled) apply(t *testing.T, l v1.Layer, all map[string]string) {
	t.Helper()
	id, err := l.Digest()
	if err != nil {
		t.Fatal(err)
	}
	entries, ok := p.layers[id]
	if !ok {
		entries = readLayer(t, l)
		p.layers[id] = entries
	}
	below := func(dir string) {
		maps.DeleteFunc(all, func(p, _ string) bool { return strings.HasPrefix(p, dir+"/") })
	}
	for _, e := range entries {
		dir, base := path.Split(e.path)
		gone, whiteout := strings.CutPrefix(base, ".wh.")
		switch {
		case base == ".wh..wh..opq":
			below(path.Clean(dir))
		case whiteout:
			delete(all, dir+gone)
			below(dir + gone)
		}
	}
	for _, e := range entries {
		if strings.HasPrefix(path.Base(e.path), ".wh.") {
			continue
		}
		if strings.HasPrefix(all[e.path], "5 ") && !strings.HasPrefix(e.what, "5 ") {
			below(e.path)
		}
		all[e.path] = e.what
	}
	for _, e := range entries {
		if e.link != "" {
			all[e.path] = all[e.link] // which of two names is the file is nobody's choice
		}
	}
}

func readLayer(t *testing.T, l v1.Layer) (out []tarEntry) {
	t.Helper()
	rc, err := l.Uncompressed()
	if err != nil {
		t.Fatal(err)
	}
	defer rc.Close()
	for tr := tar.NewReader(rc); ; {
		h, err := tr.Next()
		if err == io.EOF {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		e := tarEntry{path: path.Join("/", h.Name)}
		if e.path == "/" || ownOfSandbox(e.path) {
			continue
		}
		e.what = fmt.Sprintf("%c %o %d:%d", h.Typeflag, h.Mode&0o7777, h.Uid, h.Gid)
		switch h.Typeflag {
		case tar.TypeReg:
			sum := sha256.New()
			if _, err := io.Copy(sum, tr); err != nil {
				t.Fatal(err)
			}
			e.what += fmt.Sprintf(" %d %x", h.Size, sum.Sum(nil)[:8])
		case tar.TypeSymlink:
			e.what = "symlink " + h.Linkname
		case tar.TypeLink:
			e.link = path.Join("/", h.Linkname)
		}
		out = append(out, e)
	}
}

// ownOfSandbox are files that tools and sandboxes put there themselves.
func ownOfSandbox(p string) bool {
	for _, own := range []string{"/proc", "/sys", "/dev", "/run", "/tmp", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/etc/mtab"} {
		if p == own || strings.HasPrefix(p, own+"/") {
			return true
		}
	}
	return p == "/etc" || strings.HasPrefix(p, "/var/cache/thing") || p == "/mnt/input" || p == "/scratch"
}

// stable is what does not change with the Debian that the base is of: a file of
// the base that was changed is told without its content.
func (m made) stable(under map[string]string) made {
	out := made{Config: m.Config, Files: map[string]string{}}
	for p, what := range m.Files {
		if _, ok := under[p]; ok && strings.HasPrefix(what, "0 ") {
			what = strings.Join(strings.Fields(what)[:3], " ")
		}
		out.Files[p] = what
	}
	return out
}

func configOf(c v1.Config) map[string]any {
	m := map[string]any{}
	b, err := json.Marshal(c)
	if err == nil {
		err = json.Unmarshal(b, &m)
	}
	if err != nil {
		panic(err)
	}
	delete(m, "Image")
	delete(m, "Hostname") // of buildah's own container
	delete(m, "ArgsEscaped")
	delete(m, "OnBuild") // buildah writes Docker's format only where told to
	if labels, ok := m["Labels"].(map[string]any); ok {
		delete(labels, "io.buildah.version")
		if len(labels) == 0 {
			delete(m, "Labels")
		}
	}
	maps.DeleteFunc(m, func(_ string, v any) bool { return v == nil || v == "" })
	if env, ok := m["Env"].([]any); ok {
		slices.SortFunc(env, func(a, b any) int { return strings.Compare(a.(string), b.(string)) })
	}
	return m
}

func differ(t *testing.T, got, want made) {
	t.Helper()
	for k := range merged(got.Config, want.Config) {
		if g, w := fmt.Sprint(got.Config[k]), fmt.Sprint(want.Config[k]); g != w {
			t.Errorf("config %s is %s, want %s", k, g, w)
		}
	}
	for p := range merged(got.Files, want.Files) {
		if g, w := got.Files[p], want.Files[p]; g != w {
			t.Errorf("%s is %q, want %q", p, g, w)
		}
	}
}

func merged[V any](a, b map[string]V) map[string]V {
	m := maps.Clone(a)
	if m == nil {
		m = map[string]V{}
	}
	maps.Copy(m, b)
	return m
}
