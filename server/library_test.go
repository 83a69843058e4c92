package server

import (
	"bytes"
	"context"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/node/agent/agenttest"
	"github.com/cove-sandbox/cove/sandbox"
)

// library has images by the names that tests give them: "reg/NAME" pulls as
// sha256:NAME, and so does a file imported that has nothing but a name in it.
type library struct {
	*agenttest.Library

	mu       sync.Mutex
	pulledAs []sandbox.RegistryAccess
	gate     chan struct{} // if set, a pull waits for it (or for its context)
	left     chan struct{} // if set, closed when a pull was cancelled
}

func newLibrary(l *agenttest.Library) *library { return &library{Library: l} }

func (l *library) PullAs(ctx context.Context, who sandbox.RegistryAccess, ref, _ string, progress func(sandbox.Progress)) (sandbox.Image, error) {
	l.mu.Lock()
	l.pulledAs = append(l.pulledAs, who)
	gate := l.gate
	l.mu.Unlock()
	progress(sandbox.Progress{Step: "download", Done: 1, Total: 2})
	if gate != nil {
		select {
		case <-gate:
		case <-ctx.Done():
			close(l.left)
			return sandbox.Image{}, ctx.Err()
		}
	}
	name, ok := strings.CutPrefix(ref, "reg/")
	if !ok {
		return sandbox.Image{}, &sandbox.Error{Class: sandbox.ImageNotFound, Msg: "the registry has no " + ref}
	}
	progress(sandbox.Progress{Step: "done", Done: 2, Total: 2})
	return l.add(name), nil
}

func (l *library) ImportTar(ctx context.Context, r io.Reader, progress func(sandbox.Progress)) (sandbox.Image, error) {
	head, err := io.ReadAll(io.LimitReader(r, 100))
	if err != nil {
		return sandbox.Image{}, sandbox.Errorf(sandbox.Invalid, "image.import", "broken tar: %w", err)
	}
	if len(head) < 100 {
		return l.add(strings.TrimSpace(string(head))), nil
	}
	return l.Library.ImportTar(ctx, io.MultiReader(bytes.NewReader(head), r), progress)
}

// add says that an image is there, of 100 bytes.
func (l *library) add(name string) sandbox.Image { return l.of(name, "test") }

// of is add of an image from a source.
func (l *library) of(name, source string) sandbox.Image {
	return l.Add(sandbox.Image{ID: "sha256:" + name, Size: 100, Source: source, Platform: "linux/amd64", CreatedAt: time.Unix(1e9, 0).UTC(), Config: agenttest.Image.Config})
}

func (l *library) Have(id string) bool {
	_, err := l.Get(id)
	return err == nil
}

func (l *library) pulls() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.pulledAs)
}

// ids of all content, or of what was made of snapshots, sorted.
func (l *library) ids(derived bool) (out []string) {
	all, _ := l.Contents(context.Background()) // has no error
	for id := range all {
		if img, err := l.Get(id); err == nil && (!derived || img.Source == sandbox.ImageDerived) {
			out = append(out, id)
		}
	}
	slices.Sort(out)
	return out
}
