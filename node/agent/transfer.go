package agent

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/guest/wire"
	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// A transfer runs beside the guest with a descriptor of ours as its stdin or
// stdout: a pipe, or the caller's own file where it is one.

const (
	// copyBuffer and the pipe's size: what the kernel allows an unprivileged pipe.
	copyBuffer = 1 << 20
	// tidyTimeout bounds removing what a failed upload left.
	tidyTimeout = 10 * time.Second
)

// Upload writes content to a file or unpacks it. An atomic file goes to one of
// our own beside the target first. The guest could do that itself, but a transfer
// learns that its content is complete from the end of a pipe, and that also comes
// when the content breaks off or this process dies; so the node says when the
// file takes its place, and removes it if it never will.
func (n *Node) Upload(ctx context.Context, id string, to node.Upload, r io.Reader) (err error) {
	b, release, err := n.hold(ctx, id)
	if err != nil {
		return err
	}
	defer release()
	g := n.inside(b).Guest()
	if to.Path, err = absolute(ctx, g, to.Path); err != nil {
		return err
	}
	op := guest.BulkOp{Kind: "write", Path: to.Path, Write: to.Write}
	if to.Tar {
		op.Kind = "untar"
		return n.untar(ctx, b, op, to, r)
	}
	target := path.Clean(to.Path)
	old, oldErr := g.Stat(ctx, target)
	if oldErr == nil && (old.Type == sandbox.Symlink || old.Type == sandbox.OtherFile) {
		op.Write.Atomic = false // written through or into, as the guest does it
	}
	if !op.Write.Atomic || target == "/" {
		return n.feed(ctx, b, op, r)
	}
	// What replaces a file looks like it.
	if oldErr == nil && old.Type == sandbox.Regular {
		if op.Write.Mode == 0 {
			op.Write.Mode = old.Mode
		}
		if op.Write.User == "" {
			op.Write.User = fmt.Sprintf("%d:%d", old.UID, old.GID)
		}
	}
	op.Write.Atomic = false
	op.Path = path.Join(path.Dir(target), ".cove-upload-"+newKernelID())
	if err = n.feed(ctx, b, op, r); err == nil {
		_, err = g.Move(ctx, op.Path, target)
	}
	if err != nil {
		tidy, cancel := context.WithTimeout(context.WithoutCancel(ctx), tidyTimeout)
		defer cancel()
		_ = g.Remove(tidy, op.Path, false) // it may not even have been made, or the sandbox be gone
	}
	return err
}

// untar hands a small tar to the guest itself and a large one to a process of its
// own: that takes 20 ms to start, which is most of a grade or of a small upload. One for
// whom paths are opened, by ids, goes to the kernel where that can unpack it, before both.
func (n *Node) untar(ctx context.Context, b *box, op guest.BulkOp, as node.Upload, r io.Reader) error {
	k := n.inside(b)
	to := runtime.Unpacking{Dir: path.Clean(op.Path), Remove: as.Remove, Open: as.Open}
	if as.Open != nil {
		if _, err := fmt.Sscanf(op.Write.User, "%d:%d", &to.UID, &to.GID); err != nil {
			return sandbox.InvalidField("write.user", "%q is not UID:GID", op.Write.User)
		}
	}
	if _, ok := r.(*os.File); ok { // which the process reads itself
		if err := clearFor(ctx, k.Guest(), to, op.Write.User); err != nil {
			return err
		}
		return n.feed(ctx, b, op, r)
	}
	var head bytes.Buffer
	read := make(chan error, 1)
	go func() {
		_, err := io.CopyN(&head, whileThere{ctx, b.ctx, r}, wire.MaxUntar+1)
		read <- err
	}()
	var err error
	select {
	case err = <-read:
	case <-ctx.Done(): // a sender that stalls keeps nobody
		return contextError("node.transfer", ctx)
	case <-b.ctx.Done():
		return context.Cause(b.ctx)
	}
	small := errors.Is(err, io.EOF)
	if err != nil && !small {
		return err
	}
	if u, ok := k.(runtime.Unpacker); ok && small && as.Open != nil && op.Write.Parents {
		done, err := u.Unpack(ctx, to, head.Bytes())
		if len(done.There) > 0 {
			if err := removeAll(ctx, k.Guest(), done.There); err != nil {
				return err
			}
			done, err = u.Unpack(ctx, to, head.Bytes())
		}
		if err == nil {
			return nil
		}
		n.log.Info("a kernel leaves a tar to its guest", "sandbox", b.id, "err", err)
		if done.Opened { // not again: what was unpacked may lead it elsewhere
			to.Remove, to.Open = nil, nil
		}
	}
	if err := clearFor(ctx, k.Guest(), to, op.Write.User); err != nil {
		return err
	}
	if !small {
		return n.feed(ctx, b, op, io.MultiReader(&head, r))
	}
	err = k.Guest().Untar(ctx, op.Path, head.Bytes(), op.Write)
	if errors.Is(err, sandbox.ErrUnsupported) {
		return n.feed(ctx, b, op, &head)
	}
	return err
}

func removeAll(ctx context.Context, g *guest.Client, paths []string) error {
	for _, p := range paths {
		if err := g.Remove(ctx, p, true); err != nil && !errors.Is(err, sandbox.ErrNotFound) {
			return err
		}
	}
	return nil
}

// clearFor removes what is to be removed and opens what is to be opened to a user.
func clearFor(ctx context.Context, g *guest.Client, to runtime.Unpacking, user string) error {
	if err := removeAll(ctx, g, to.Remove); err != nil {
		return err
	}
	for _, p := range to.Open {
		for dir := path.Dir(p); dir != "/"; dir = path.Dir(dir) {
			info, err := g.Stat(ctx, dir)
			if err == nil && info.Type == sandbox.Directory && info.Mode&0o001 == 0 {
				err = g.Chmod(ctx, dir, info.Mode|0o011, false)
			}
			if err != nil && !errors.Is(err, sandbox.ErrNotFound) {
				return err
			}
		}
		info, err := g.Stat(ctx, p)
		if err == nil && info.Type == sandbox.Directory && info.UID != to.UID {
			err = g.Chown(ctx, p, user, false)
		}
		if err != nil && !errors.Is(err, sandbox.ErrNotFound) {
			return err
		}
	}
	return nil
}

// whileThere reads while both the caller and the sandbox are there.
type whileThere struct {
	caller, sandbox context.Context
	r               io.Reader
}

func (w whileThere) Read(p []byte) (int, error) {
	if err := cmp.Or(w.caller.Err(), w.sandbox.Err()); err != nil {
		return 0, err
	}
	return w.r.Read(p)
}

// Download gives content to w.
func (n *Node) Download(ctx context.Context, id string, from node.Download, w io.Writer) (err error) {
	b, release, err := n.hold(ctx, id)
	if err != nil {
		return err
	}
	defer release()
	if from.Path, err = absolute(ctx, n.inside(b).Guest(), from.Path); err != nil {
		return err
	}
	op := guest.BulkOp{Kind: "read", Path: from.Path, Offset: from.Offset, Length: from.Length}
	if from.Tar {
		op = guest.BulkOp{Kind: "tar", Path: from.Path}
	}
	if f, ok := w.(*os.File); ok {
		return n.bulk(ctx, b, op, nil, f)
	}
	pr, pw, err := bulkPipe()
	if err != nil {
		return err
	}
	defer pr.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan error, 1)
	go func() {
		err := n.bulk(ctx, b, op, nil, pw)
		pw.Close() // ours was the last writing end: the reader sees the end
		done <- err
	}()
	_, copyErr := io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{pr}, make([]byte, copyBuffer))
	if copyErr != nil { // of w: it takes no more
		cancel()
		pr.Close()
		<-done
		return copyErr
	}
	return <-done
}

// feed gives r to an op. If r breaks off, op is cancelled before its stdin ends:
// an end would mean that this was all.
func (n *Node) feed(ctx context.Context, b *box, op guest.BulkOp, r io.Reader) error {
	if f, ok := r.(*os.File); ok {
		return n.bulk(ctx, b, op, f, nil)
	}
	pr, pw, err := bulkPipe()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	over := make(chan struct{}) // closed when op has ended
	fed := make(chan error, 1)
	go func() {
		from := &source{r: r}
		_, _ = io.CopyBuffer(struct{ io.Writer }{pw}, from, make([]byte, copyBuffer))
		if from.err != nil {
			cancel(brokenOff{from.err})
			<-over
		}
		pw.Close()
		if from.err == nil && !from.end && ctx.Err() == nil {
			// It took no more and was content, as untar is with padding behind the
			// end of its tar. Whether r is whole says its end.
			_, _ = io.Copy(io.Discard, from)
		}
		fed <- from.err
	}()
	err = n.bulk(ctx, b, op, pr, nil)
	if err != nil {
		cancel(err)
	}
	pr.Close() // ours was the last reading end: a writer that still writes fails
	close(over)
	if err != nil {
		if broken, ok := errors.AsType[brokenOff](context.Cause(ctx)); ok {
			return broken.error
		}
		return err
	}
	return <-fed
}

// brokenOff is why content is not whole.
type brokenOff struct{ error }

// source remembers how reading ended, so that it is not mistaken for a failure of
// what consumes it.
type source struct {
	r   io.Reader
	end bool
	err error
}

func (s *source) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	s.end = err == io.EOF
	if err != nil && err != io.EOF {
		s.err = err
	}
	return n, err
}

// bulk runs one transfer in a sandbox that is held.
func (n *Node) bulk(ctx context.Context, b *box, op guest.BulkOp, stdin, stdout *os.File) error {
	op.User = b.image.User
	err := n.inside(b).Bulk(ctx, op, stdin, stdout)
	switch {
	case err != nil && b.ctx.Err() != nil:
		return context.Cause(b.ctx)
	case err != nil && ctx.Err() != nil:
		return contextError("node.transfer", ctx)
	}
	return err
}

// absolute is where a path leads in a transfer, which does not know the working
// directory.
func absolute(ctx context.Context, g *guest.Client, p string) (string, error) {
	if path.IsAbs(p) {
		return p, nil
	}
	here, err := g.Stat(ctx, ".")
	if err != nil {
		return "", err
	}
	return path.Join(here.Path, p), nil
}

// bulkPipe is a pipe with room for a whole buffer, so that the two sides
// switch once per MiB.
func bulkPipe() (r, w *os.File, err error) {
	r, w, err = os.Pipe()
	if err != nil {
		return nil, nil, sandbox.Errorf(sandbox.Unavailable, "node.transfer", "no pipe: %w", err)
	}
	// Not w.Fd(), which would make the descriptor blocking. Smaller is only
	// slower: past the user's quota of pipe pages the kernel refuses.
	if c, err := w.SyscallConn(); err == nil {
		_ = c.Control(func(fd uintptr) { _, _ = unix.FcntlInt(fd, unix.F_SETPIPE_SZ, copyBuffer) })
	}
	return r, w, nil
}
