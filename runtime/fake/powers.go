package fake

import (
	"archive/tar"
	"bufio"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

var (
	_ runtime.Blanker      = (*Driver)(nil)
	_ runtime.Restorer     = (*blank)(nil)
	_ runtime.Pauser       = (*kernel)(nil)
	_ runtime.Checkpointer = (*kernel)(nil)
	_ runtime.Differ       = (*kernel)(nil)
)

// blank is a machine that nobody has begun to use.
type blank struct{ *kernel }

// Blank makes a kernel in two steps, the second of which does nothing here.
func (d *Driver) Blank(ctx context.Context, id string) (runtime.Blank, error) {
	k, err := d.Boot(ctx, id)
	if err != nil {
		return nil, err
	}
	return &blank{k.(*kernel)}, nil
}

func (b *blank) Start(context.Context) (runtime.Kernel, error) { return b.kernel, nil }

// Pause holds requests back and stops deadlines. Processes are the host's and
// run on: what a test sees of a paused kernel is that it does not answer.
func (k *kernel) Pause(ctx context.Context) error {
	if err := k.d.enter(ctx, Pause, k.m.id); err != nil {
		return err
	}
	if k.Paused() {
		return nil
	}
	if k.m.guest != nil {
		if err := k.guest.Freeze(ctx); err != nil {
			return err
		}
	}
	if err := k.guest.Settle(ctx); err != nil {
		if k.m.guest != nil {
			err = errors.Join(err, k.guest.Thaw(context.WithoutCancel(ctx)))
		}
		return err
	}
	k.m.setPaused(true)
	return nil
}

func (k *kernel) Resume(ctx context.Context) error {
	if err := k.d.enter(ctx, Resume, k.m.id); err != nil {
		return err
	}
	if !k.Paused() {
		return nil
	}
	k.m.setPaused(false)
	k.guest.Release()
	if k.m.guest == nil {
		return nil
	}
	return k.guest.Thaw(ctx)
}

func (k *kernel) Paused() bool {
	k.m.mu.Lock()
	defer k.m.mu.Unlock()
	return k.m.paused
}

func (m *machine) setPaused(p bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.paused = p
}

const checkpointVersion = 1

// treeFile is the one file of a checkpoint: a tar of the machine's directory.
const treeFile = "tree.tar"

// Checkpoint writes the files, and nothing of the processes.
func (k *kernel) Checkpoint(ctx context.Context, dir string, opt runtime.CheckpointOptions) (cp runtime.Checkpoint, err error) {
	if err := k.d.enter(ctx, Checkpoint, k.m.id); err != nil {
		return cp, err
	}
	if !k.m.isAttached() {
		return cp, sandbox.Errorf(sandbox.Precondition, "fake.checkpoint", "kernel %s has no container", k.m.id)
	}
	if ents, err := os.ReadDir(dir); err != nil || len(ents) > 0 {
		return cp, sandbox.InvalidField("dir", "%s must be an empty directory (%d entries, %v)", dir, len(ents), err)
	}
	out := filepath.Join(dir, treeFile)
	f, err := os.OpenFile(out, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err == nil {
		err = errors.Join(k.writeTree(f), f.Close())
	}
	if isClosed(k.m.done) && err == nil {
		err = errors.New("the kernel is dead")
	}
	if err != nil {
		return cp, errors.Join(sandbox.Errorf(sandbox.Unavailable, "fake.checkpoint", "%w", err), os.RemoveAll(out))
	}
	if opt.Stop {
		k.m.die(runtime.Exit{Cause: sandbox.KilledByUser, Detail: "stopped with a checkpoint"})
	}
	return runtime.Checkpoint{Version: checkpointVersion, Driver: k.d.Name(), Build: build, Files: []string{treeFile}}, nil
}

// build of every fake there is; a test may write another into a checkpoint.
const build = "fake=v0"

// Restore makes a kernel with the files of a checkpoint and no processes.
func (b *blank) Restore(ctx context.Context, dir string, cp runtime.Checkpoint, c runtime.Container) (runtime.Kernel, error) {
	const op = "fake.restore"
	if cp.Driver != b.d.Name() || cp.Version != checkpointVersion || cp.Build != build {
		return nil, sandbox.Errorf(sandbox.Precondition, op, "checkpoint %s version %d of %q is not for this driver", cp.Driver, cp.Version, cp.Build).WithReason(sandbox.RestoreRefused)
	}
	f, err := os.Open(filepath.Join(dir, treeFile))
	if err != nil {
		return nil, sandbox.Errorf(sandbox.Precondition, op, "%w", err)
	}
	defer f.Close()
	err = b.d.enter(ctx, Restore, b.m.id)
	if err == nil {
		err = b.m.claim()
	}
	if err == nil && b.m.guest != nil {
		if err = readTree(f, b.m.root); err == nil {
			err = b.serve(ctx, c)
		}
	}
	if err != nil {
		b.hangUp()
		return nil, errors.Join(err, b.d.host.remove(b.m.id, runtime.Exit{Cause: sandbox.Infra, Detail: "restore failed"}))
	}
	return b.kernel, nil
}

// Diff is everything: the fake's images have no content.
func (k *kernel) Diff(ctx context.Context, w *os.File) error {
	if err := k.d.enter(ctx, Diff, k.m.id); err != nil {
		return err
	}
	if !k.m.isAttached() {
		return sandbox.Errorf(sandbox.Precondition, "fake.diff", "kernel %s has no container", k.m.id)
	}
	if err := k.writeTree(w); err != nil {
		return sandbox.Errorf(sandbox.Unavailable, "fake.diff", "%w", err)
	}
	return nil
}

// writeTree writes the machine's files; of a bare one, none.
func (k *kernel) writeTree(to io.Writer) error {
	out := bufio.NewWriter(to)
	w := tar.NewWriter(out)
	if k.m.root != "" {
		if err := w.AddFS(os.DirFS(k.m.root)); err != nil {
			return err
		}
	}
	return errors.Join(w.Close(), out.Flush())
}

// readTree unpacks what writeTree wrote. The root confines what names and
// links say.
func readTree(from io.Reader, dir string) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	for r := tar.NewReader(bufio.NewReader(from)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		mode := h.FileInfo().Mode().Perm()
		switch h.Typeflag {
		case tar.TypeDir:
			if err = root.Mkdir(filepath.Clean(h.Name), mode); errors.Is(err, os.ErrExist) {
				err = nil
			}
		case tar.TypeSymlink:
			err = root.Symlink(h.Linkname, h.Name)
		case tar.TypeReg:
			var f *os.File
			if f, err = root.OpenFile(h.Name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, mode); err == nil {
				_, err = io.Copy(f, r)
				err = errors.Join(err, f.Close())
			}
		}
		if err != nil {
			return err
		}
	}
}
