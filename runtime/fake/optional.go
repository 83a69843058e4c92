package fake

import (
	"archive/tar"
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/internal/untar"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

var (
	_ runtime.Blanker      = (*Driver)(nil)
	_ runtime.Restorer     = (*blank)(nil)
	_ runtime.Holder       = (*blank)(nil)
	_ runtime.Pauser       = (*kernel)(nil)
	_ runtime.Checkpointer = (*kernel)(nil)
	_ runtime.Differ       = (*kernel)(nil)
	_ runtime.Plugger      = (*kernel)(nil)
	_ runtime.Mounter      = (*kernel)(nil)
)

// blank is a machine that nobody has begun to use.
type blank struct{ *kernel }

// Blank makes a kernel in two steps, the second of which does nothing here.
func (d *Driver) Blank(ctx context.Context, id string, c runtime.Class) (runtime.Blank, error) {
	k, err := d.Boot(ctx, id, c)
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
	return k.m.mu.paused
}

func (m *machine) setPaused(p bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.mu.paused = p
}

// Plug takes note of a network device, as Attach does.
func (k *kernel) Plug(context.Context, runtime.Device) error {
	if !k.d.host.opts.Network {
		return sandbox.Errorf(sandbox.Unsupported, "fake.plug", "the fake driver has no networks")
	}
	return nil
}

// Mount unpacks an image. Code inside can write to it.
func (k *kernel) Mount(ctx context.Context, image, path string) error {
	if !k.d.host.opts.Mount {
		return sandbox.Errorf(sandbox.Unsupported, "fake.mount", "the fake driver cannot mount")
	}
	dir := filepath.Join(k.m.root, path)
	err := os.MkdirAll(dir, 0o755)
	if err == nil {
		err = unpack(ctx, image, dir)
	}
	if err != nil {
		return sandbox.Errorf(sandbox.Unavailable, "fake.mount", "%w", err)
	}
	return nil
}

const checkpointVersion = 1

// A checkpoint is a tar of the machine's directory, and what ran in it.
const (
	treeFile = "tree.tar"
	execFile = "execs.json"
)

// Checkpoint writes the files, and of the processes how they were started.
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
	out, execs := filepath.Join(dir, treeFile), filepath.Join(dir, execFile)
	f, err := os.OpenFile(out, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err == nil {
		err = errors.Join(k.writeTree(f), f.Close(), k.m.writeExecs(ctx, execs))
	}
	if isClosed(k.m.done) && err == nil {
		err = errors.New("the kernel is dead")
	}
	if err != nil {
		return cp, errors.Join(sandbox.Errorf(sandbox.Unavailable, "fake.checkpoint", "%w", err), os.RemoveAll(out), os.RemoveAll(execs))
	}
	if opt.Stop {
		k.m.die(runtime.Exit{Cause: sandbox.KilledByUser, Detail: "stopped with a checkpoint"})
	}
	return runtime.Checkpoint{Version: checkpointVersion, Driver: k.d.Name(), Build: build, Files: []string{treeFile, execFile}}, nil
}

// build of every fake there is; a test may write another into a checkpoint.
const build = "fake=v0"

// Restore makes a kernel with the files of a checkpoint. What ran begins anew: a
// command that prints the same each time is found where it was.
func (b *blank) Restore(ctx context.Context, dir string, cp runtime.Checkpoint, c runtime.Container) (runtime.Kernel, error) {
	procs, err := b.restorable(dir, cp)
	if err != nil {
		return nil, err
	}
	if err = b.d.enter(ctx, Restore, b.m.id); err == nil {
		err = b.unpack(ctx, dir)
	}
	if err == nil {
		err = b.goOn(ctx, procs, c)
	}
	if err != nil {
		b.hangUp()
		return nil, errors.Join(err, b.d.host.remove(b.m.id, runtime.Exit{Cause: sandbox.Infra, Detail: "restore failed"}))
	}
	return b.kernel, nil
}

func (b *blank) restorable(dir string, cp runtime.Checkpoint) ([]sandbox.Process, error) {
	const op = "fake.restore"
	if cp.Driver != b.d.Name() || cp.Version != checkpointVersion || cp.Build != build {
		return nil, sandbox.Errorf(sandbox.Precondition, op, "checkpoint %s version %d of %q is not for this driver", cp.Driver, cp.Version, cp.Build).WithReason(sandbox.RestoreRefused)
	}
	procs, err := readExecs(filepath.Join(dir, execFile))
	if err != nil {
		return nil, sandbox.Errorf(sandbox.Precondition, op, "%w", err)
	}
	return procs, nil
}

// unpack is the files of a checkpoint.
func (b *blank) unpack(ctx context.Context, dir string) error {
	if b.m.guest == nil {
		return nil
	}
	return unpack(ctx, filepath.Join(dir, treeFile), b.m.root)
}

// goOn is the rest of a restore.
func (b *blank) goOn(ctx context.Context, procs []sandbox.Process, c runtime.Container) error {
	if err := b.m.claim(c.Sandbox); err != nil || b.m.guest == nil {
		return err
	}
	if err := b.serve(ctx, c); err != nil {
		return err
	}
	return b.startAgain(ctx, procs)
}

// held has the files of a checkpoint, and nothing runs.
type held struct {
	*blank
	procs []sandbox.Process
}

func (b *blank) Hold(ctx context.Context, dir string, cp runtime.Checkpoint, c runtime.Container) (runtime.Held, error) {
	procs, err := b.restorable(dir, cp)
	if err != nil {
		return nil, err
	}
	if err = b.d.enter(ctx, Hold, b.m.id); err == nil {
		err = b.unpack(ctx, dir)
	}
	if err != nil {
		b.hangUp()
		return nil, errors.Join(err, b.d.host.remove(b.m.id, runtime.Exit{Cause: sandbox.Infra, Detail: "hold failed"}))
	}
	return &held{b, procs}, nil
}

func (h *held) Take(ctx context.Context, c runtime.Container) (runtime.Kernel, error) {
	if err := h.d.enter(ctx, Take, h.m.id); err != nil {
		return nil, err
	}
	if err := h.goOn(ctx, h.procs, c); err != nil {
		return nil, err
	}
	return h.kernel, nil
}

// Diff is everything: the fake's images have no content.
func (k *kernel) Diff(ctx context.Context, w *os.File, most int64) error {
	if err := k.d.enter(ctx, Diff, k.m.id); err != nil {
		return err
	}
	if !k.m.isAttached() {
		return sandbox.Errorf(sandbox.Precondition, "fake.diff", "kernel %s has no container", k.m.id)
	}
	if err := k.writeTree(w); err != nil {
		return sandbox.Errorf(sandbox.Unavailable, "fake.diff", "%w", err)
	}
	if fi, err := w.Stat(); most > 0 && (err != nil || fi.Size() > most) {
		return sandbox.Errorf(sandbox.TooLarge, "fake.diff", "the tar has more than %d bytes", most)
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

// writeExecs lists what runs. It asks by a connection of its own: the kernel's
// are held back while it is paused.
func (m *machine) writeExecs(ctx context.Context, file string) error {
	var running []sandbox.Process
	if m.guest != nil {
		g := guest.NewClient(m.dial, m.secret)
		defer g.Close()
		procs, _, err := g.Processes(ctx)
		if err != nil {
			return err
		}
		running = slices.DeleteFunc(procs, func(p sandbox.Process) bool { return p.End != nil })
	}
	b, err := json.Marshal(running)
	if err != nil {
		return err
	}
	return os.WriteFile(file, b, 0o600)
}

func readExecs(file string) (procs []sandbox.Process, err error) {
	b, err := os.ReadFile(file)
	if err == nil {
		err = json.Unmarshal(b, &procs)
	}
	return procs, err
}

// startAgain starts what ran, under its names, and returns when it runs.
func (b *blank) startAgain(ctx context.Context, procs []sandbox.Process) error {
	begun := errors.New("begun")
	for _, p := range procs {
		spec := sandbox.ProcessSpec{ExecID: p.ExecID, Args: p.Args, Cwd: p.Cwd, User: p.User}
		if p.PTY {
			spec.PTY = &sandbox.TermSize{Rows: 24, Cols: 80}
		}
		err := b.guest.Start(ctx, spec, 0, func(sandbox.ProcessEvent) error { return begun })
		if err != nil && !errors.Is(err, begun) {
			return err
		}
	}
	return nil
}

// unpack is the tree of a tar in a directory.
func unpack(ctx context.Context, file, dir string) error {
	from, err := os.Open(file)
	if err != nil {
		return err
	}
	defer from.Close()
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	return untar.Extract(ctx, root, bufio.NewReader(from), untar.Options{Bytes: math.MaxInt64, Entries: math.MaxInt, Modes: fs.ModePerm, Chroot: true})
}
