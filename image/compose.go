package image

import (
	"context"
	"io"

	"github.com/cove-sandbox/cove/sandbox"
)

// Opener gives the tar of a layer's or an upload's content, as the node keeps it.
type Opener func(sandbox.Content) (io.ReadCloser, error)

// Compose makes the image of a composition: what a step of a build runs on, and
// what a build ends with. As with Derive the name follows from files and config
// alone.
func (l *Library) Compose(ctx context.Context, c sandbox.Composition, open func(sandbox.Content) (io.ReadCloser, error), progress func(sandbox.Progress)) (sandbox.Image, error) {
	return l.build(ctx, "image.compose", progress, func(b *build) (sidecar, error) {
		b.prepare = b.mountPoints
		if c.Base == "" {
			b.prepare = b.complete
		}
		b.progress.step("flatten", 0, 0)
		base, err := b.stack(b.ctx, l, c, open)
		if err != nil {
			return sidecar{}, err
		}
		side := sidecar{Image: sandbox.Image{Source: SourceDerived, Platform: base.Image.Platform, Config: c.Config}}
		if c.Built {
			side.Image.Source = sandbox.ImageBuilt
			side.History = append(base.History, c.History...)
			if side.Base = base.Base; side.Base == "" {
				side.Base = c.Base
			}
		}
		return side, nil
	})
}

// stack is the tree of a composition: its base, and every layer over it.
func (f *flattener) stack(ctx context.Context, l *Library, c sandbox.Composition, open Opener) (base sidecar, err error) {
	if c.Base != "" {
		if base, err = f.loadBase(l, c.Base); err != nil {
			return base, err
		}
	}
	if len(c.Layers) > maxLayers {
		return base, tooLarge("%d layers, more than %d", len(c.Layers), maxLayers)
	}
	for _, layer := range c.Layers {
		r, err := open(layer.Content)
		if err != nil {
			return base, err
		}
		f.without = layer.Without
		err = f.change(ctx, r)
		f.without = nil
		if cerr := r.Close(); err == nil {
			err = cerr
		}
		if err != nil {
			return base, err
		}
	}
	return base, nil
}

// Unpacked reads a tar that may be packed with gzip or zstd, within the limits.
func (l *Library) Unpacked(r io.Reader) (io.ReadCloser, error) { return decompress(r, l.limits) }
