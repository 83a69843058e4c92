package gvisor

import (
	"archive/tar"
	"bufio"
	"context"
	"errors"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

var _ runtime.Differ = (*Kernel)(nil)

// Diff writes the writable layer as a tar stream. See runtime.Differ.
//
// The sentry walks its layer by itself, so the kernel is paused around it; code
// inside sees no half-written file in its diff. Sockets are left out, as tar
// does.
func (k *Kernel) Diff(ctx context.Context, w *os.File) (err error) {
	const op = "gvisor.diff"
	k.mu.Lock()
	container, paused := k.container, k.paused
	k.mu.Unlock()
	if container == "" {
		return sandbox.Errorf(sandbox.Precondition, op, "kernel %s has no container", k.id)
	}
	if !paused {
		if err := k.Pause(ctx); err != nil {
			return sandbox.WithOp(op, err)
		}
		defer func() { err = errors.Join(err, k.Resume(context.WithoutCancel(ctx))) }()
	}
	// A plain pipe: the sentry writes to it as to any file.
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return k.explain(op, err)
	}
	r, pw := os.NewFile(uintptr(fds[0]), "diff"), os.NewFile(uintptr(fds[1]), "diff, sentry end")
	written := make(chan error, 1)
	go func() {
		err := k.sb.TarRootfsUpperLayer(container, pw)
		pw.Close()
		written <- err
	}()
	err = rewriteDiff(ctx, r, w)
	r.Close() // upon an error the sentry's next write fails
	werr := <-written
	if cerr := ctx.Err(); cerr != nil {
		return sandbox.Errorf(sandbox.Canceled, op, "%w", cerr)
	}
	if err == nil {
		err = werr
	}
	if err != nil {
		return k.explain(op, err)
	}
	return nil
}

// rewriteDiff gives every removed file an entry of its own. In gVisor they all
// share one inode, so that the sentry writes the second and every further one
// as a hard link to the first.
func rewriteDiff(ctx context.Context, from io.Reader, to io.Writer) error {
	// Headers are 512 bytes; a write for each would be most of the work.
	out := bufio.NewWriterSize(to, 256<<10)
	r, w := tar.NewReader(from), tar.NewWriter(out)
	whiteouts := map[string]bool{}
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err == nil {
			err = ctx.Err()
		}
		if err != nil {
			return err
		}
		h.Name = strings.TrimPrefix(h.Name, "./")
		h.Linkname = linkname(h)
		switch {
		case h.Name == "":
			h.Name = "./"
		case h.Typeflag == tar.TypeChar && h.Devmajor == 0 && h.Devminor == 0:
			whiteouts[h.Name] = true
		case h.Typeflag == tar.TypeLink && whiteouts[h.Linkname]:
			h = &tar.Header{Typeflag: tar.TypeChar, Name: h.Name, ModTime: h.ModTime}
		}
		if err := w.WriteHeader(h); err != nil {
			return err
		}
		if _, err := io.Copy(w, r); err != nil {
			return err
		}
	}
	if err := w.Close(); err != nil {
		return err
	}
	if err := out.Flush(); err != nil {
		return err
	}
	_, err := io.Copy(io.Discard, from) // the padding behind the end
	return err
}

// linkname is a hard link's target as names are written; a symlink's is its own.
func linkname(h *tar.Header) string {
	if h.Typeflag == tar.TypeLink {
		return strings.TrimPrefix(h.Linkname, "./")
	}
	return h.Linkname
}
