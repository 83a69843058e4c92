package node

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
	"github.com/cove-sandbox/cove/sandbox"
)

// mountFiles are directory snapshots as EROFS files, one for each manifest, that
// kernels mount. They are made of the store's content and could be again, but a
// kernel that wakes needs them under the same name: they stay while a sandbox or
// a snapshot needs them.
type mountFiles struct {
	dir string
	mu  sync.Mutex // one is made at a time
}

func openMountFiles(dir string) (*mountFiles, error) {
	if err := os.MkdirAll(dir, 0o711); err != nil {
		return nil, err
	}
	return &mountFiles{dir: dir}, nil
}

func (m *mountFiles) path(manifest string) string {
	return filepath.Join(m.dir, cas.ID(manifest).Hex()+".erofs")
}

// get returns the file of a manifest, made by build if it is not there.
func (m *mountFiles) get(manifest string, build func() (path string, err error)) (string, error) {
	if _, err := cas.ParseID(manifest); err != nil {
		return "", err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	path := m.path(manifest)
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

// sweep removes the files of all manifests but those to keep.
func (m *mountFiles) sweep(keep map[string]bool) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	ents, err := os.ReadDir(m.dir)
	if err != nil {
		return err
	}
	for _, e := range ents {
		if hex, ok := strings.CutSuffix(e.Name(), ".erofs"); !ok || !keep["sha256:"+hex] {
			err = errors.Join(err, os.Remove(filepath.Join(m.dir, e.Name())))
		}
	}
	return err
}

// mountFile is the EROFS file of a directory snapshot.
func (n *Node) mountFile(ctx context.Context, d Deriver, c sandbox.Content) (string, error) {
	made := ""
	path, err := n.mounts.get(c.Manifest, func() (string, error) {
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
	// No record names it as an image: left in the library it would stay for ever.
	if lib, ok := n.cfg.Images.(interface {
		Delete(ctx context.Context, id string) error
	}); ok && made != "" {
		if derr := lib.Delete(context.WithoutCancel(ctx), made); derr != nil {
			n.log.Warn("a mounted snapshot is in the image library too; an image prune removes it", "image", made, "err", derr)
		}
	}
	return path, err
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
