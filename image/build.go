package image

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"os"
	"runtime"
	"sync"

	"github.com/cove-sandbox/cove/image/erofs"
	"github.com/cove-sandbox/cove/internal/durable"
	"github.com/cove-sandbox/cove/sandbox"
)

// build is one image in the making: its tree and the workspace its contents
// are spooled in.
type build struct {
	*flattener
	lib      *Library
	ctx      context.Context
	ws       *workspace
	progress *reporter
	prepare  func() error // the tree, before it is written; complete unless said otherwise
	packing  sync.Mutex   // held by who packs a layer, for its spool
}

// build runs make in a fresh workspace and commits what it describes. Whatever
// happens, the workspace is gone afterwards.
func (l *Library) build(ctx context.Context, op string, progress func(sandbox.Progress),
	make func(b *build) (sidecar, error)) (img sandbox.Image, err error) {
	err = l.work(ctx, op, progress, func(b *build) error {
		side, err := make(b)
		if err == nil {
			side, err = b.commit(side)
		}
		if err != nil {
			return err
		}
		img = side.Image
		b.progress.step("done", img.Size, img.Size)
		return nil
	})
	return img, err
}

// work runs do in a fresh workspace, which is gone afterwards.
func (l *Library) work(ctx context.Context, op string, progress func(sandbox.Progress), do func(b *build) error) error {
	ctx, done, err := l.begin(ctx)
	if err != nil {
		return sandbox.WithOp(op, err)
	}
	defer done()
	ws, err := l.newWorkspace(ctx)
	if err != nil {
		return asError(ctx, op, err)
	}
	defer func() {
		if cerr := ws.close(); cerr != nil {
			l.log.Warn("workspace not removed; the next start will", "dir", ws.dir, "err", cerr)
		}
	}()
	b := &build{lib: l, ctx: ctx, ws: ws, progress: newReporter(progress), flattener: newFlattener(l.limits, ws)}
	b.prepare = b.complete
	defer b.flattener.close()
	return asError(ctx, op, do(b))
}

// commit completes the tree, writes it and moves it into place: temporary
// file, fsync, rename, fsync of the directory. The sidecar goes first, so an
// image that can be seen always has one.
func (b *build) commit(side sidecar) (sidecar, error) {
	if err := b.prepare(); err != nil {
		return side, err
	}
	if side.Image.Platform == "" && side.Image.Source != SourceData {
		side.Image.Platform = "linux/" + runtime.GOARCH
	}
	if side.Image.Source != SourceData {
		var err error
		if side.Image.Config.Authorities, err = b.authorities(); err != nil {
			return side, err
		}
	}
	side.Notes = b.notes
	uuid, err := configUUID(side)
	if err != nil {
		return side, err
	}
	b.progress.step("erofs", 0, b.contentBytes())
	tmp := b.ws.path("image.erofs")
	digest, size, err := b.writeImage(tmp, uuid)
	if err != nil {
		return side, err
	}
	// A few ms for 10,000 files; without it a defect here would only be seen
	// by a sandbox.
	if err := erofs.Check(tmp); err != nil {
		return side, err
	}
	side.Image.ID = "sha256:" + digest
	side.Image.Size = size
	side.Image.CreatedAt = b.lib.opts.Now().UTC()
	old, oldErr := b.lib.sidecar(side.Image.ID)
	if oldErr == nil && side.Recipe == "" {
		side.Recipe = old.Recipe // the content is still what that recipe made
	}
	if oldErr == nil && side.Image.Source == SourceDerived {
		side.Image.Source = old.Image.Source // no changes at all
	}
	data, err := json.MarshalIndent(side, "", "  ")
	if err != nil {
		return side, err
	}
	sideTmp := b.ws.path("image.json")
	if err := durable.Stage(sideTmp, bytes.NewReader(data), 0o600); err != nil {
		return side, err
	}
	unlock, err := b.lib.lockNames(b.ctx)
	if err != nil {
		return side, err
	}
	defer unlock()
	if err := durable.Rename(sideTmp, b.lib.sidecarPath(digest)); err != nil {
		return side, err
	}
	if info, err := os.Stat(b.lib.blobPath(digest)); err == nil && info.Size() == size {
		// Already here. Keep the file whose pages running sandboxes share.
		return side, nil
	}
	return side, durable.Rename(tmp, b.lib.blobPath(digest))
}

// configUUID makes the config part of the content: the same files with another
// environment are another image. Its bits are a digest's, marked as version 8
// (made by the application) so that tools print a valid UUID.
func configUUID(side sidecar) (u [16]byte, err error) {
	data, err := json.Marshal(struct {
		Config   sandbox.ImageConfig
		Platform string
		Xattrs   map[string]xattr
	}{side.Image.Config, side.Image.Platform, side.Notes.XattrList})
	sum := sha256.Sum256(data)
	copy(u[:], sum[:])
	u[6] = u[6]&0x0f | 0x80
	u[8] = u[8]&0x3f | 0x80
	return u, err
}

func (b *build) writeImage(path string, uuid [16]byte) (digest string, size int64, err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return "", 0, err
	}
	defer f.Close()
	w := newSink(b.ctx, f, b.progress)
	defer w.close()
	if size, err = erofs.Write(w, b.root, uuid); err != nil {
		return "", 0, err
	}
	// Read-only: an image never changes, and the sentry opens it that way.
	if err := f.Chmod(0o400); err != nil {
		return "", 0, err
	}
	if err := f.Sync(); err != nil {
		return "", 0, err
	}
	digest, err = w.digest() // last: it is computed while the disk works
	return digest, size, err
}
