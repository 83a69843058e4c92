package gvisor

import (
	"archive/tar"
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

var _ runtime.Differ = (*Kernel)(nil)

// briefDiff bytes are the most that is taken in a brief pause: some 10 ms. A sandbox that has
// more is asked again, and deadlines inside stand still meanwhile.
const briefDiff = 4 << 20

var errNotBrief = errors.New("more than a brief pause is for")

// Diff writes the writable layer as a tar stream. See runtime.Differ.
//
// The sentry walks its layer by itself, so the kernel is paused around it; code
// inside sees no half-written file in its diff. Sockets are left out, as tar
// does.
func (k *Kernel) Diff(ctx context.Context, w *os.File, most int64) error {
	const op = "gvisor.diff"
	k.mu.Lock()
	container, paused := k.mu.container, k.mu.paused
	k.mu.Unlock()
	if container == "" {
		return sandbox.Errorf(sandbox.Precondition, op, "kernel %s has no container", k.id)
	}
	diff := func(l diffLimits) error {
		if err := k.diff(ctx, container, w, l); err != nil {
			return k.explain(op, err)
		}
		return nil
	}
	if paused {
		return diff(diffLimits{most: most})
	}
	start, err := w.Seek(0, io.SeekCurrent)
	for _, brief := range []bool{err == nil, false} { // not into what cannot be rewound
		if err := k.pauseUnsettled(ctx, brief); err != nil {
			return k.explain(op, err)
		}
		err = diff(diffLimits{most: most, brief: brief})
		if rerr := k.Resume(context.WithoutCancel(ctx)); rerr != nil || !errors.Is(err, errNotBrief) {
			return errors.Join(err, rerr)
		}
		if err = w.Truncate(start); err == nil {
			_, err = w.Seek(start, io.SeekStart)
		}
		if err != nil {
			return k.explain(op, err)
		}
	}
	return err
}

// diff is Diff of a paused kernel.
func (k *Kernel) diff(ctx context.Context, container string, w io.Writer, l diffLimits) error {
	// A plain pipe: the sentry writes to it as to any file.
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return err
	}
	r, pw := os.NewFile(uintptr(fds[0]), "diff"), os.NewFile(uintptr(fds[1]), "diff, sentry end")
	written := make(chan error, 1)
	go func() {
		err := k.sb.TarRootfsUpperLayer(container, pw)
		pw.Close()
		written <- err
	}()
	err := rewriteDiff(ctx, r, w, l)
	r.Close() // upon an error the sentry's next write fails
	werr := <-written
	if cerr := ctx.Err(); cerr != nil {
		return sandbox.Errorf(sandbox.Canceled, "", "%w", cerr)
	}
	if err == nil {
		err = werr
	}
	return err
}

// diffLimits are how much of a layer is taken.
type diffLimits struct {
	most  int64 // bytes of its files; 0 = any
	brief bool  // no more than briefDiff
}

// rewriteDiff gives every removed file an entry of its own. In gVisor they all
// share one inode, so that the sentry writes the second and every further one
// as a hard link to the first.
func rewriteDiff(ctx context.Context, from io.Reader, to io.Writer, l diffLimits) error {
	// Headers are 512 bytes; a read and a write for each would be most of the work.
	in, out := bufio.NewReaderSize(from, 64<<10), bufio.NewWriterSize(to, 256<<10)
	r, w := tar.NewReader(in), tar.NewWriter(out)
	whiteouts := map[string]bool{}
	total, entries := int64(0), int64(0)
	buf := make([]byte, 32<<10) // io.Copy makes one for each file
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
		if total += h.Size; l.most > 0 && total > l.most {
			return &sandbox.Error{Class: sandbox.TooLarge, Msg: fmt.Sprintf("the changed files have more than %s, at '%.300s'", sandbox.FormatSize(l.most), h.Name)}
		}
		if entries++; l.brief && total+entries*1024 > briefDiff {
			return errNotBrief
		}
		if err := w.WriteHeader(h); err != nil {
			return err
		}
		if _, err := io.CopyBuffer(w, r, buf); err != nil {
			return err
		}
	}
	if err := w.Close(); err != nil {
		return err
	}
	if err := out.Flush(); err != nil {
		return err
	}
	_, err := io.Copy(io.Discard, in) // the padding behind the end
	return err
}

// linkname is a hard link's target as names are written; a symlink's is its own.
func linkname(h *tar.Header) string {
	if h.Typeflag == tar.TypeLink {
		return strings.TrimPrefix(h.Linkname, "./")
	}
	return h.Linkname
}
