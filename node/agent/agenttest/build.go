package agenttest

import (
	"archive/tar"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/netip"
	"os"

	"github.com/cove-sandbox/cove/build"
	"github.com/cove-sandbox/cove/node/agent"
	"github.com/cove-sandbox/cove/sandbox"
)

// Unpacked takes plain tars only.
func (l *Library) Unpacked(r io.Reader) (io.ReadCloser, error) { return io.NopCloser(r), nil }

// CopyLayer is a directory, of WORKDIR, or a file that says what was copied: the same
// from any files. All of it is there already at /etc.
func (l *Library) CopyLayer(_ context.Context, c sandbox.Copying, _ func(sandbox.Content) (io.ReadCloser, error),
	_ func(string, netip.AddrPort) bool, w io.Writer) (string, error) {
	what := build.Key(c.Sources, c.Inline, c.Dest, c.Owner, c.Mode)
	tw := tar.NewWriter(w)
	if c.Dest == "/etc" {
		return "", tw.Close()
	}
	if len(c.Sources) == 0 && len(c.Inline) == 0 {
		err := tw.WriteHeader(&tar.Header{Name: c.Dest[1:] + "/", Typeflag: tar.TypeDir, Mode: 0o755})
		return what, errors.Join(err, tw.Close())
	}
	if err := tw.WriteHeader(&tar.Header{Name: "copied-" + what[:16], Mode: 0o644, Size: int64(len(what))}); err != nil {
		return "", err
	}
	_, err := io.WriteString(tw, what)
	return what, errors.Join(err, tw.Close())
}

// Compose puts the tars of a base and its layers one after the other.
func (l *Library) Compose(_ context.Context, c sandbox.Composition, open func(sandbox.Content) (io.ReadCloser, error), progress func(sandbox.Progress)) (sandbox.Image, error) {
	img := sandbox.Image{Source: sandbox.ImageDerived, Config: c.Config}
	if c.Built {
		img.Source = sandbox.ImageBuilt
	}
	c.History = nil
	of, err := json.Marshal(c)
	if err != nil {
		return sandbox.Image{}, err
	}
	pr, pw := io.Pipe()
	go func() { pw.CloseWithError(l.compose(c, open, pw)) }()
	img, err = l.kept(img, string(of), pr, progress)
	pr.CloseWithError(io.ErrClosedPipe) // for a writer that is not done
	return img, err
}

func (l *Library) compose(c sandbox.Composition, open func(sandbox.Content) (io.ReadCloser, error), w io.Writer) error {
	tw := tar.NewWriter(w)
	add := func(r io.ReadCloser) error {
		defer r.Close()
		for tr := tar.NewReader(r); ; {
			h, err := tr.Next()
			if errors.Is(err, io.EOF) {
				return nil
			}
			if err == nil {
				err = tw.WriteHeader(h)
			}
			if err == nil {
				_, err = io.Copy(tw, tr)
			}
			if err != nil {
				return err
			}
		}
	}
	if f, err := os.Open(l.file(c.Base)); err == nil {
		if err := add(f); err != nil {
			return err
		}
	} else if !errors.Is(err, os.ErrNotExist) { // one without content
		return err
	}
	for _, layer := range c.Layers {
		r, err := open(layer.Content)
		if err == nil {
			err = add(r)
		}
		if err != nil {
			return err
		}
	}
	return tw.Close()
}

// Push goes nowhere.
func (l *Library) Push(context.Context, sandbox.RegistryAccess, string, string, func(sandbox.Progress)) (string, error) {
	return "sha256:pushed", nil
}

var _ agent.Builder = (*Library)(nil)
