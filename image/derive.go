package image

import (
	"context"
	"errors"
	"io"
	"os"
	"strings"

	"github.com/cove-sandbox/cove/image/erofs"
	"github.com/cove-sandbox/cove/sandbox"
)

// Sources of images that are not from outside.
const (
	SourceDerived = sandbox.ImageDerived // Derive
	SourceData    = sandbox.ImageData    // FromTar
)

// Derive makes an image of another one and a tar of changes to it: how a
// filesystem snapshot becomes something a sandbox starts from as from any
// image. The config is the base's. The result stands alone; the base may be
// deleted.
//
// The changes may have either form of removal: the overlay's, as gVisor's
// TarRootfsUpperLayer writes it (a character device 0:0 hides a name; a
// directory with the attribute trusted.overlay.opaque hides what is below it),
// and OCI's (empty files named ".wh."…). An empty file inside a sandbox whose
// name begins with ".wh." is therefore taken for a removal.
//
// The name follows from the resulting files and config alone: the same base
// and changes, in whatever order the tar has them, give the same image, and so
// does a chain of changes that ends in the same files.
//
// The result is written afresh, with the base's content copied in ranges, and
// not as the base with something appended: the digest reads every byte either
// way and neighbouring files become one range, so it costs about a sixth more
// (see BenchmarkDerive), and nothing dead is ever carried along a chain.
func (l *Library) Derive(ctx context.Context, baseID string, diff io.Reader, progress func(sandbox.Progress)) (sandbox.Image, error) {
	return l.build(ctx, "image.derive", progress, func(b *build) (sidecar, error) {
		b.prepare = b.mountPoints
		side, err := b.loadBase(baseID)
		if err != nil {
			return sidecar{}, err
		}
		b.progress.step("flatten", 0, 0)
		if err := b.change(b.ctx, &counted{diff, b.progress}); err != nil {
			return sidecar{}, err
		}
		return sidecar{Image: sandbox.Image{Source: SourceDerived, Platform: side.Image.Platform, Config: side.Image.Config}}, nil
	})
}

// change applies a tar of changes.
func (f *flattener) change(ctx context.Context, diff io.Reader) error {
	noted := f.setNotesAside()
	plain, err := decompress(contextReader{ctx, diff}, f.limits)
	if err != nil {
		return err
	}
	defer plain.Close()
	if err := f.apply(ctx, plain, formDiff); err != nil {
		return err
	}
	f.takeNotesBack(noted)
	return nil
}

// loadBase reads an image's tree. Its file stays open until the new image is
// written, so it may be deleted meanwhile.
func (b *build) loadBase(id string) (sidecar, error) { return b.flattener.loadBase(b.lib, id) }

func (f *flattener) loadBase(lib *Library, id string) (sidecar, error) {
	side, err := lib.sidecar(id)
	if err != nil {
		return side, err
	}
	p, err := lib.Path(id)
	if err != nil {
		return side, err
	}
	file, err := os.Open(p)
	if err != nil {
		return side, notHere("", id, err)
	}
	f.cleanup = append(f.cleanup, func() { file.Close() })
	r, err := erofs.Open(file)
	if err == nil {
		f.root, err = r.Tree(f.countBase)
	}
	if errors.Is(err, erofs.ErrFormat) {
		return side, (&sandbox.Error{Class: sandbox.Corrupt, Msg: "image " + id, Err: err}).
			WithHint("delete the image and pull, import or derive it again; check the disk")
	}
	f.notes = side.Notes
	return side, err
}

// countBase holds what is taken over from the base against the same limits as
// everything else.
func (f *flattener) countBase(name string, in *erofs.Inode) error {
	if in.IsRegular() {
		if f.unpacked += in.Size; f.unpacked > f.limits.Unpacked {
			return tooLarge("the base image's files are over %d bytes", f.limits.Unpacked)
		}
	}
	return f.count(len(name) + len(in.Target))
}

// noted is what the base's notes say of attributes, with the nodes they are of.
type noted struct {
	list  map[string]xattr
	nodes map[string]*erofs.Node
}

// setNotesAside makes room for the changes' own notes.
func (f *flattener) setNotesAside() noted {
	old := noted{f.notes.XattrList, map[string]*erofs.Node{}}
	for at := range old.list {
		old.nodes[at] = f.at(at)
	}
	f.notes.XattrList = nil
	return old
}

// takeNotesBack keeps the notes of files that are still the base's. A
// directory named again is the same node, and keeps its notes unless the
// changes brought new ones.
func (f *flattener) takeNotesBack(old noted) {
	for at, x := range old.list {
		n := f.at(at)
		if f.notes.XattrList[at] != nil || n == nil || n != old.nodes[at] {
			f.notes.Xattrs -= len(x)
			continue
		}
		if f.notes.XattrList == nil {
			f.notes.XattrList = map[string]xattr{}
		}
		f.notes.XattrList[at] = x
	}
}

// at finds a node by its own path, without following links.
func (f *flattener) at(name string) *erofs.Node {
	n := f.root
	for _, part := range strings.Split(strings.Trim(name, "/"), "/") {
		if n == nil || !n.IsDir() {
			return nil
		}
		n = n.Child(part)
	}
	return n
}

// FromTar makes an image of a plain tar as it is, to be mounted somewhere
// inside a sandbox: a directory snapshot, a data set, hidden tests. It has no
// config and no platform, nothing is added that a root file system would need,
// and no name in it means a removal. The tar may be packed with gzip or zstd.
func (l *Library) FromTar(ctx context.Context, r io.Reader, progress func(sandbox.Progress)) (sandbox.Image, error) {
	return l.build(ctx, "image.from_tar", progress, func(b *build) (sidecar, error) {
		b.prepare = func() error { return nil }
		b.progress.step("flatten", 0, 0)
		plain, err := decompress(&counted{contextReader{b.ctx, r}, b.progress}, b.limits)
		if err != nil {
			return sidecar{}, err
		}
		defer plain.Close()
		return sidecar{Image: sandbox.Image{Source: SourceData}}, b.apply(b.ctx, plain, formPlain)
	})
}
