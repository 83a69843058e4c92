package gvisor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"

	"gvisor.dev/gvisor/runsc/specutils"

	"github.com/cove-sandbox/cove/internal/durable"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

var _ runtime.BuildKeeper = (*Driver)(nil)

// programs is what a kernel runs: one runsc, and one file with a guest.
//
// A kernel can outlive the Cove that booted it, running or as a checkpoint, and
// needs the same programs then. Guests are in the driver's directory from the
// first boot on, a runsc from the first checkpoint on (keep): 83 MB, as often as
// the gVisor or its form changes. PruneBuilds removes what nothing needs.
type programs struct {
	gvisor  string // version
	form    int    // see stateForm
	runsc   string // path
	guestfs string // path
}

// code names the programs, but for the form.
func (p programs) code() string { return p.gvisor + "/" + filepath.Base(p.guestfs) }

var (
	guestName = regexp.MustCompile(`^guest-[0-9a-f]{16}\.erofs$`)
	// A version is a module's: it holds no slash, and reaches us in checkpoints.
	versionName = regexp.MustCompile(`^v[0-9][0-9A-Za-z.+-]{0,99}$`)
)

func (d *Driver) keptRunsc(gvisor string, form int) string {
	return filepath.Join(d.dir, "runsc-"+gvisor+"-"+strconv.Itoa(form))
}

// programsOf finds what a checkpoint of was needs.
func (d *Driver) programsOf(was build) (programs, error) {
	refuse := func(format string, args ...any) (programs, error) {
		return programs{}, refuseRestore(format+", and its programs are not kept here", args...)
	}
	p := d.now
	if was.guest != d.build.guest {
		if !guestName.MatchString(was.guest) || !isFile(filepath.Join(d.dir, was.guest)) {
			return refuse("the checkpoint was made with guest %q, this node has %q", was.guest, d.build.guest)
		}
		p.guestfs = filepath.Join(d.dir, was.guest)
	}
	if was.gvisor != d.build.gvisor || was.form > d.build.form {
		p.gvisor, p.form, p.runsc = was.gvisor, was.form, d.keptRunsc(was.gvisor, was.form)
		if !versionName.MatchString(was.gvisor) || !isFile(p.runsc) {
			return refuse("the checkpoint was made by gVisor %q (form %d), this is %q (form %d)", was.gvisor, was.form, d.build.gvisor, d.build.form)
		}
		if b, err := versionOf(p.runsc); err != nil || b.gvisor != was.gvisor || b.form != was.form {
			return programs{}, sandbox.Errorf(sandbox.Corrupt, "gvisor.restore", "%s is not the runsc it is named after (%v)", p.runsc, err)
		}
	}
	return p, nil
}

// programsOfKernel are those of an adopted kernel. It runs, so its runsc need
// not be kept (yet).
func (d *Driver) programsOfKernel(s saved) programs {
	gvisor, guest, ok := strings.Cut(s.Build, "/")
	if !ok || !versionName.MatchString(gvisor) || !guestName.MatchString(guest) {
		return d.now // from before that was noted
	}
	p := programs{gvisor: gvisor, form: s.Form, runsc: d.keptRunsc(gvisor, s.Form), guestfs: filepath.Join(d.dir, guest)}
	if gvisor == d.now.gvisor && s.Form == d.now.form {
		p.runsc = d.now.runsc
	}
	return p
}

// build is what a checkpoint of this kernel depends on.
func (k *Kernel) build() build {
	b := k.d.build
	b.gvisor, b.form, b.guest = k.programs.gvisor, k.programs.form, filepath.Base(k.programs.guestfs)
	return b
}

// Fits says whether a blank as Blank makes them has a build's programs. See
// runtime.BuildKeeper.
func (d *Driver) Fits(of string) bool { return of == "" || d.build.reads(parseBuild(of)) == nil }

// BlankOf is Blank with the programs of a build. See runtime.BuildKeeper.
func (d *Driver) BlankOf(ctx context.Context, id string, c runtime.Class, of string) (runtime.Blank, error) {
	if err := c.Check(driverName, d.Capabilities()); err != nil {
		return nil, err
	}
	d.keeping.RLock() // until the kernel is there to be seen by PruneBuilds
	defer d.keeping.RUnlock()
	was := parseBuild(of)
	if err := d.build.runs(was); err != nil {
		return nil, err
	}
	p, err := d.programsOf(was)
	if err != nil {
		return nil, err
	}
	return d.blank(ctx, id, p)
}

// keep sees to it that the kernel's programs are there, durably, as long as a
// checkpoint of it may be. The runsc is that of its own process: the file it was
// started from may have been replaced since.
func (k *Kernel) keep() error {
	d, p := k.d, k.programs
	from := fmt.Sprintf("/proc/%d/exe", k.saved.PID)
	if b, err := versionOf(from); err != nil {
		return fmt.Errorf("keeping runsc: %w", err)
	} else if b.gvisor != p.gvisor || b.form != p.form {
		return sandbox.Errorf(sandbox.Precondition, "", "kernel %s runs gVisor %q (form %d), not the %q (form %d) this node was started with", k.id, b.gvisor, b.form, p.gvisor, p.form).
			WithHint("runsc was replaced under a running server: start it again")
	}
	d.keeping.RLock()
	kept := d.kept[p]
	d.keeping.RUnlock()
	if kept {
		return nil
	}
	d.keeping.Lock()
	defer d.keeping.Unlock()
	if err := durable.Sync(p.guestfs); err != nil {
		return fmt.Errorf("keeping the guest: %w", err)
	}
	to := d.keptRunsc(p.gvisor, p.form)
	if !isFile(to) {
		if err := keepProgram(from, to); err != nil {
			return fmt.Errorf("keeping runsc: %w", err)
		}
	}
	if err := durable.Sync(d.dir); err != nil {
		return err
	}
	d.kept[p] = true
	return nil
}

// PruneBuilds removes programs. See runtime.BuildKeeper.
//
// Those of a checkpoint that this process made are spared whatever the caller
// knows of: it may be on its way into the store, and its kernel gone. The next
// process removes them.
func (d *Driver) PruneBuilds(ctx context.Context, builds func(context.Context) ([]string, error)) (freed int64, err error) {
	const op = "gvisor.prune"
	d.keeping.Lock()
	unneeded, err := d.unneededLocked(nil)
	d.keeping.Unlock()
	if err != nil || len(unneeded) == 0 {
		return 0, sandbox.WithOp(op, err)
	}
	of, err := builds(ctx)
	if err != nil {
		return 0, sandbox.WithOp(op, err)
	}
	d.keeping.Lock()
	defer d.keeping.Unlock()
	unneeded, err = d.unneededLocked(of)
	for _, path := range unneeded {
		st, serr := os.Lstat(path)
		if serr = errors.Join(serr, os.Remove(path)); serr != nil {
			err = errors.Join(err, sandbox.Errorf(sandbox.Unavailable, "", "%w", serr))
			continue
		}
		freed += st.Size()
	}
	return freed, sandbox.WithOp(op, err)
}

// unneededLocked lists programs that are neither the current ones nor of a
// kernel, of these builds, or of a checkpoint made here.
func (d *Driver) unneededLocked(builds []string) (paths []string, err error) {
	needed := map[string]bool{}
	need := func(gvisor string, form int, guest string) {
		needed[filepath.Base(d.keptRunsc(gvisor, form))] = true
		needed[guest] = true
	}
	for _, b := range builds {
		was := parseBuild(b)
		need(was.gvisor, was.form, was.guest)
	}
	use := func(p programs) { need(p.gvisor, p.form, filepath.Base(p.guestfs)) }
	use(d.now)
	for p := range d.kept {
		use(p)
	}
	d.kernels.Range(func(k, _ any) bool {
		use(k.(*Kernel).programs)
		return true
	})
	ents, err := os.ReadDir(d.dir)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.Unavailable, "", "%w", err)
	}
	for _, e := range ents {
		if name := e.Name(); !needed[name] && (guestName.MatchString(name) || strings.HasPrefix(name, "runsc-")) {
			paths = append(paths, filepath.Join(d.dir, name))
		}
	}
	return paths, nil
}

func isFile(path string) bool {
	st, err := os.Lstat(path)
	return err == nil && st.Mode().IsRegular() && st.Size() > 0
}

// keepProgram copies a file that can be executed. Its name is durable when its
// directory is synced.
func keepProgram(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	if err := durable.Stage(to+".tmp", in, 0o755); err != nil {
		return err
	}
	return os.Rename(to+".tmp", to)
}

// exe guards specutils.ExePath, the program that gVisor's code starts sentries
// with: a package variable of theirs, and so is what guards it.
var exe sync.RWMutex

// withRunsc runs f, which starts a sentry, with a runsc. One at a time with any
// but the usual one.
func withRunsc(path string, f func() error) error {
	exe.RLock()
	if specutils.ExePath == path {
		defer exe.RUnlock()
		return f()
	}
	exe.RUnlock()
	exe.Lock()
	defer exe.Unlock()
	defer func(was string) { specutils.ExePath = was }(specutils.ExePath)
	specutils.ExePath = path
	return f()
}

func setRunsc(path string) {
	exe.Lock()
	defer exe.Unlock()
	specutils.ExePath = path
}

// asKeepError is the error of a checkpoint whose programs could not be kept.
func (k *Kernel) asKeepError(op string, err error) error {
	var e *sandbox.Error
	switch {
	case k.gone(): // and its program with it
		return sandbox.Errorf(sandbox.Unavailable, op, "kernel %s: %w", k.id, err)
	case errors.As(err, &e):
		return sandbox.WithOp(op, e)
	case sandbox.NoSpace(err):
		return sandbox.Errorf(sandbox.DiskFull, op, "%w", err).WithHint("make room and try again; the sandbox goes on")
	case errors.Is(err, fs.ErrNotExist):
		// Cold standby would end its kernel for a state nothing here restores.
		return sandbox.Errorf(sandbox.Precondition, op, "%w", err).WithHint("its memory cannot be saved any more; a filesystem snapshot of it can be taken")
	}
	return sandbox.Errorf(sandbox.Unavailable, op, "%w", err)
}
