package agent

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/cove-sandbox/cove/cas"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// mountFiles are directory snapshots as EROFS files, one for each manifest, that
// kernels mount. A kernel that is restored finds them under the same name; they
// are made of the store's content, the same every time, if they are not there.
type mountFiles struct {
	dir    string
	making sync.Mutex // one is made at a time

	mu struct { // names in dir change
		sync.Mutex
		using map[string]int // by manifest: not to be removed
	}
}

func openMountFiles(dir string) (*mountFiles, error) {
	if err := os.MkdirAll(dir, 0o711); err != nil {
		return nil, err
	}
	m := &mountFiles{dir: dir}
	m.mu.using = map[string]int{}
	return m, nil
}

func (m *mountFiles) path(manifest string) string {
	return filepath.Join(m.dir, cas.ID(manifest).Hex()+".erofs")
}

// hold keeps the file of a manifest, as soon as there is one, until release: a
// kernel that has opened it does not need its name any more.
func (m *mountFiles) hold(manifest string) (release func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.mu.using[manifest]++
	return sync.OnceFunc(func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.mu.using[manifest]--; m.mu.using[manifest] == 0 {
			delete(m.mu.using, manifest)
		}
	})
}

// get returns the file of a manifest that the caller holds, made by build if it
// is not there.
func (m *mountFiles) get(manifest string, build func() (path string, err error)) (string, error) {
	if _, err := cas.ParseID(manifest); err != nil {
		return "", err
	}
	path := m.path(manifest)
	if _, err := os.Stat(path); err == nil {
		return path, nil // and stays, for the caller holds it
	}
	m.making.Lock()
	defer m.making.Unlock()
	_, err := os.Stat(path)
	if err == nil || !errors.Is(err, fs.ErrNotExist) {
		return path, err
	}
	made, err := build()
	if err != nil {
		return "", err
	}
	// A link: the library may drop its own name for it at any time.
	if err := os.Link(made, path); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", asDiskError(err)
	}
	return path, nil
}

// sweep removes the files of all manifests but those to keep and those held.
func (m *mountFiles) sweep(keep map[string]bool) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	ents, err := os.ReadDir(m.dir)
	if err != nil {
		return err
	}
	for _, e := range ents {
		hex, ok := strings.CutSuffix(e.Name(), ".erofs")
		if id := "sha256:" + hex; !ok || !keep[id] && m.mu.using[id] == 0 {
			err = errors.Join(err, os.Remove(filepath.Join(m.dir, e.Name())))
		}
	}
	return err
}

// sweepSealed removes the plain form of encrypted directories that no kernel has
// mounted: what sleeps gets its own again when it wakes. Where nothing is
// encrypted they stay for the next use, until a Collect.
func (n *Node) sweepSealed() {
	if !n.sealed() {
		return
	}
	keep := map[string]bool{}
	n.mu.Lock()
	for _, b := range n.mu.live {
		if b.kernel != nil {
			for _, m := range b.needs {
				keep[m] = true
			}
		}
	}
	n.mu.Unlock()
	if err := n.mounts.sweep(keep); err != nil {
		n.log.Error("plain directories that nobody has mounted are still on disk", "err", err)
	}
}

// holdMounts has the files of all manifests there until release.
func (n *Node) holdMounts(ctx context.Context, manifests []string) (release func(), err error) {
	d, ok := n.cfg.Images.(Deriver)
	if !ok || len(manifests) == 0 {
		return func() {}, nil
	}
	var held []func()
	release = func() {
		for _, r := range held {
			r()
		}
	}
	for _, m := range manifests {
		_, r, err := n.mountFile(ctx, d, sandbox.Content{Manifest: m})
		if err != nil {
			release()
			n.sweepSealed()
			return nil, err
		}
		held = append(held, r)
	}
	return release, nil
}

// mountFile is the EROFS file of a directory snapshot, there until release.
func (n *Node) mountFile(ctx context.Context, d Deriver, c sandbox.Content) (path string, release func(), err error) {
	release = n.mounts.hold(c.Manifest)
	defer func() {
		if err != nil {
			release()
		}
	}()
	made := ""
	path, err = n.mounts.get(c.Manifest, func() (string, error) {
		var img sandbox.Image
		err := n.states.piped(ctx, c, func(r io.Reader) (err error) {
			img, err = d.FromTar(ctx, r, func(sandbox.Progress) {})
			return err
		})
		if err != nil {
			return "", err
		}
		made = img.ID
		return n.cfg.Images.Path(img.ID)
	})
	// No record names it as an image: left in the library it would stay until
	// the next start.
	if lib, ok := n.cfg.Images.(interface {
		Delete(ctx context.Context, id string) error
	}); ok && made != "" {
		if derr := lib.Delete(context.WithoutCancel(ctx), made); derr != nil {
			n.log.Warn("a mounted snapshot is in the image library too, until the next start", "image", made, "err", derr)
		}
	}
	return path, release, err
}

// startMounts gives the container of b what it is to start with. The files are there
// until unhold, and while b is, which the record of its creation says.
func (n *Node) startMounts(ctx context.Context, b *box) (unhold func(), err error) {
	mounts := b.sb.Spec.Mounts
	if len(mounts) == 0 {
		return func() {}, nil
	}
	d, ok := n.cfg.Images.(Deriver)
	if !ok || n.states == nil || !b.class.can.Mount {
		return func() {}, b.class.unsupported("mount")
	}
	var held []func()
	unhold = func() {
		for _, release := range held {
			release()
		}
	}
	for _, m := range mounts {
		file, release, err := n.mountFile(ctx, d, sandbox.Content{Manifest: m.Manifest})
		if err != nil {
			return unhold, err
		}
		held = append(held, release)
		b.container.Mounts = append(b.container.Mounts, runtime.Mount{Source: file, Target: m.Path})
		n.mu.Lock()
		b.needs = append(b.needs, m.Manifest)
		n.mu.Unlock()
	}
	return unhold, nil
}

// mounted records that b needs a manifest from now on, before it does.
func (n *Node) mounted(b *box, manifest string) error {
	n.mu.Lock()
	needs := slices.Clone(b.needs)
	n.mu.Unlock()
	if slices.Contains(needs, manifest) {
		return nil
	}
	needs = append(needs, manifest)
	if err := n.journal.append(record{Kind: recMounted, ID: b.id, Needs: needs}); err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	b.needs = needs
	return nil
}
