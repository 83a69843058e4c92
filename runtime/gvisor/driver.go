// Package gvisor is the default driver: each kernel is one gVisor sentry.
//
// runsc is used as a library. A kernel's root container holds only our guest,
// on a tiny EROFS of its own; the user's container is a subcontainer on the
// image's EROFS with a disk-backed overlay. Driving sandbox.Sandbox directly
// (not container.Container) skips runsc's state files and locks, since the
// node's journal is the truth, and lets us hand in the filestore, which
// container.Start cannot without a gofer. Attach takes 2-3 ms that way, 8 ms
// through container.Container.
//
// On the host a kernel is one process tree in its own pid, mount, ipc, uts,
// user and network namespaces (running as nobody), one cgroup, one directory
// and one control socket. Nothing of it is pinned elsewhere: killing the
// sentry frees the namespaces, and what is left has the kernel's id in its
// name, so that Sweep can find it without a record.
package gvisor

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/runsc/config"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/runtime/gvisor/spawn"
	"github.com/cove-sandbox/cove/sandbox"
)

// Config says where the driver finds and keeps things.
type Config struct {
	Dir       string // owned by the driver alone; kernels, control sockets, writable layers
	RunscPath string // the pinned runsc binary
	GuestPath string // the static cove-guest binary
	Platform  string // "" = systrap
	Logger    *slog.Logger
	DebugLog  string // a directory for the sentries' debug logs; "" = off
}

// Driver boots gVisor kernels. Safe for concurrent use.
type Driver struct {
	dir     string
	conf    *config.Config // as the sentry boots; treated as immutable
	start   *config.Config // as StartRoot sees it: loopback only, see newConf
	now     programs       // of the kernels that are booted
	sftp    bool           // they have cove-sftp
	build   build          // what checkpoints of theirs depend on
	groups  cgroups
	log     *slog.Logger
	spawner *spawn.Spawner // of sentries
	gofers  *spawn.Spawner // they need the mounts of volumes
	resets  resets
	kernels sync.Map // *Kernel → nothing; made or adopted and not destroyed

	// keeping is locked while programs are kept or removed, read-locked while a
	// kernel of earlier ones is made.
	keeping sync.RWMutex
	kept    map[programs]bool // there, durably, for checkpoints of this process
}

var (
	_ runtime.Driver  = (*Driver)(nil)
	_ runtime.Blanker = (*Driver)(nil)
)

const driverName = "gvisor"

var validID = regexp.MustCompile(`^[a-z0-9]{1,40}$`)

// Open prepares the driver's directory. It starts no kernel; what starts them must
// be of the same build, which is better known now than at the first boot.
func Open(ctx context.Context, c Config) (*Driver, error) {
	const op = "gvisor.open"
	if os.Geteuid() != 0 {
		return nil, sandbox.Errorf(sandbox.Precondition, op, "the gVisor driver needs root").WithHint("run as root (sudo)")
	}
	for _, p := range []string{c.RunscPath, c.GuestPath} {
		if st, err := os.Stat(p); err != nil || st.Mode()&0o111 == 0 {
			return nil, sandbox.Errorf(sandbox.Precondition, op, "no executable at %q", p).WithHint("run 'make build'")
		}
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	dir, err := filepath.Abs(c.Dir)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.Internal, op, "%w", err)
	}
	c.Dir = dir
	d := &Driver{dir: dir, kept: map[programs]bool{}, spawner: spawn.New(c.RunscPath, dir), gofers: spawn.New(c.RunscPath, ""), log: c.Logger.With("component", "gvisor")}
	for _, sub := range []string{"", "run", "k"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o711); err != nil {
			return nil, sandbox.Errorf(sandbox.Precondition, op, "%w", err)
		}
	}
	if d.groups, err = findCgroups(dir); err != nil {
		return nil, err
	}
	if d.conf, d.start, err = newConf(c, filepath.Join(dir, "run")); err != nil {
		return nil, sandbox.Errorf(sandbox.Internal, op, "%w", err)
	}
	// runsc re-executes itself to boot a sentry; from our process that must be
	// the runsc binary.
	setRunsc(c.RunscPath)
	guestfs, err := buildGuestFS(ctx, dir, c.GuestPath)
	if err != nil {
		return nil, err
	}
	_, serr := os.Stat(filepath.Join(filepath.Dir(c.GuestPath), sftpBinary))
	d.sftp = serr == nil
	if d.build, err = thisBuild(c.RunscPath, filepath.Base(guestfs)); err != nil {
		return nil, sandbox.Errorf(sandbox.Precondition, op, "%w", err)
	}
	if err := d.spawner.Ready(); err != nil {
		return nil, err
	}
	d.now = programs{gvisor: d.build.gvisor, form: d.build.form, runsc: c.RunscPath, guestfs: guestfs}
	return d, nil
}

func (d *Driver) Name() string { return driverName }

// SFTP is the program that speaks sftp on stdin and stdout, as processes of a
// user's container reach it; nil where the driver was given none.
func (d *Driver) SFTP() []string {
	if !d.sftp {
		return nil
	}
	return []string{guestMount + sftpBinary}
}

func (d *Driver) Capabilities() runtime.Capabilities {
	return runtime.Capabilities{Isolated: true, Limits: true, Adopt: true,
		Pause: true, Checkpoint: true, Hold: true, Processes: true, Diff: true, Mount: true, Volumes: true, Network: true, Reuse: true, Layer: true, Clock: true}
}

// Close leaves kernels running, without a connection to their guests: one that
// nobody uses any more would keep the next process from checkpointing.
func (d *Driver) Close() error {
	d.kernels.Range(func(k, _ any) bool {
		k.(*Kernel).letGo()
		return true
	})
	d.groups.removeParents()
	return errors.Join(d.spawner.Close(), d.gofers.Close())
}

// Boot starts a kernel. See runtime.Driver.
func (d *Driver) Boot(ctx context.Context, id string, c runtime.Class) (runtime.Kernel, error) {
	b, err := d.Blank(ctx, id, c)
	if err != nil {
		return nil, err
	}
	return b.Start(ctx)
}

// Blank makes a sentry without starting its guest. See runtime.Blanker.
func (d *Driver) Blank(ctx context.Context, id string, c runtime.Class) (runtime.Blank, error) {
	if err := c.Check(driverName, d.Capabilities()); err != nil {
		return nil, err
	}
	return d.blank(ctx, id, d.now)
}

// blankTries is how often a sentry that dies right at its start is started.
// Whoever waits for it, a create or one child of many, should not fail for one
// that did not come up in a burst of others.
const blankTries = 3

// errSentryStart is a sentry that died while it was being started.
var errSentryStart = errors.New("starting the sentry")

func (d *Driver) blank(ctx context.Context, id string, p programs) (runtime.Blank, error) {
	for try := 1; ; try++ {
		b, err := d.blankOnce(ctx, id, p)
		if err == nil || try == blankTries || !errors.Is(err, errSentryStart) || ctx.Err() != nil {
			return b, err
		}
		d.log.Warn("a sentry died at its start, the next is tried", "kernel", id, "try", try, "err", err)
	}
}

// blankOnce leaves nothing when it fails, so that id can be tried again.
func (d *Driver) blankOnce(ctx context.Context, id string, p programs) (runtime.Blank, error) {
	const op = "gvisor.blank"
	if !validID.MatchString(id) {
		return nil, sandbox.InvalidField("id", "kernel id %q must match %s", id, validID)
	}
	secret := make([]byte, 32)
	if _, err := rand.Read(secret); err != nil {
		return nil, sandbox.Errorf(sandbox.Internal, op, "%w", err)
	}
	k := newKernel(d, id, p)
	k.saved.Secret = hex.EncodeToString(secret)
	k.saved.Build, k.saved.Form = p.code(), p.form
	// The directory is the claim to the id: before it is ours nothing may be
	// undone, or a boot with a taken id would take the kernel that has it down.
	if err := os.Mkdir(k.dir(), 0o711); errors.Is(err, os.ErrExist) {
		return nil, sandbox.Errorf(sandbox.AlreadyExists, op, "there is a kernel %s", id)
	} else if err != nil {
		return nil, sandbox.Errorf(sandbox.Unavailable, op, "kernel %s: %w", id, err)
	}
	spec, err := k.blank()
	if err != nil {
		return nil, k.undo(ctx, op, err)
	}
	if err := ctx.Err(); err != nil {
		return nil, k.undo(ctx, op, err)
	}
	return &blank{k, spec}, nil
}

// blank is a kernel whose guest is not started.
type blank struct {
	*Kernel
	spec *specs.Spec
}

// Start starts the guest. See runtime.Blank.
func (b *blank) Start(ctx context.Context) (runtime.Kernel, error) {
	const op = "gvisor.boot"
	if err := b.start(ctx, b.spec); err != nil {
		return nil, b.undo(ctx, op, err)
	}
	if err := ctx.Err(); err != nil {
		return nil, b.undo(ctx, op, err)
	}
	return b.Kernel, nil
}

// undo destroys a half-made kernel and returns err as ours.
func (k *Kernel) undo(ctx context.Context, op string, err error) error {
	cctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 20*time.Second)
	defer cancel()
	if derr := k.Destroy(cctx); derr != nil {
		k.d.log.Error("undo of a failed boot", "kernel", k.id, "err", derr)
	}
	if ctx.Err() != nil {
		return sandbox.Errorf(sandbox.Canceled, op, "%w", ctx.Err())
	}
	var e *sandbox.Error
	if errors.As(err, &e) {
		return sandbox.WithOp(op, err)
	}
	return sandbox.Errorf(sandbox.Unavailable, op, "kernel %s: %w", k.id, err)
}

// Adopt takes back a kernel after a restart. See runtime.Driver.
func (d *Driver) Adopt(ctx context.Context, h runtime.Handle) (_ runtime.Kernel, err error) {
	const op = "gvisor.adopt"
	if h.Driver != driverName || h.Version != handleVersion {
		return nil, sandbox.Errorf(sandbox.Unsupported, op, "handle %s version %d is not for this driver", h.Driver, h.Version)
	}
	var was saved
	if err := json.Unmarshal(h.Data, &was); err != nil {
		return nil, sandbox.Errorf(sandbox.Corrupt, op, "handle of kernel %s: %w", h.ID, err)
	}
	k := newKernel(d, h.ID, d.programsOfKernel(was))
	k.saved = was
	defer func() {
		if err != nil {
			d.kernels.Delete(k)
		}
	}()
	err = k.adopt(ctx)
	if err != nil && k.gone() {
		return nil, sandbox.Errorf(sandbox.NotFound, op, "kernel %s: its process is gone", h.ID)
	}
	if err != nil {
		return nil, sandbox.Errorf(sandbox.Unavailable, op, "kernel %s: %w", h.ID, err)
	}
	return k, nil
}

// Sweep removes every kernel not in keep. See runtime.Driver.
func (d *Driver) Sweep(ctx context.Context, keep map[string]bool) ([]string, error) {
	ids := map[string]bool{}
	ents, err := os.ReadDir(filepath.Join(d.dir, "k"))
	if err != nil {
		return nil, sandbox.Errorf(sandbox.Unavailable, "gvisor.sweep", "%w", err)
	}
	for _, e := range ents {
		ids[e.Name()] = true
	}
	for _, id := range d.groups.list() {
		ids[id] = true
	}
	sentries := sync.OnceValue(d.findSentries) // mostly there is nothing to sweep
	var mu sync.Mutex                          // guards what follows
	var removed []string
	var errs []error
	var wg sync.WaitGroup
	slots := make(chan struct{}, sweepParallel)
	for id := range ids {
		if keep[id] || !validID.MatchString(id) || ctx.Err() != nil {
			continue
		}
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			k := newKernel(d, id, d.now)
			if pid := sentries()[id]; pid != 0 {
				k.saved.PID, k.saved.StartTime = pid, processStart(pid)
			}
			err := k.Destroy(ctx)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				errs = append(errs, err)
				return
			}
			removed = append(removed, id)
		})
	}
	wg.Wait()
	return removed, errors.Join(errs...)
}

// sweepParallel kernels are destroyed at a time: most of it is waiting.
const sweepParallel = 16

// findSentries finds the sentries of this driver by the bundle in their
// arguments: a boot interrupted between fork and journal leaves only that. One
// walk over /proc for all of them: with 500 kernels there are thousands of
// processes.
func (d *Driver) findSentries() map[string]int {
	prefix := "--bundle=" + filepath.Join(d.dir, "k") + "/"
	found := map[string]int{}
	procs, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, p := range procs {
		b, err := os.ReadFile(p)
		if err != nil || !strings.HasPrefix(string(b), "runsc-sandbox\x00") {
			continue
		}
		for _, arg := range strings.Split(string(b), "\x00") {
			id, ok := strings.CutPrefix(arg, prefix)
			if !ok {
				continue
			}
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(p)))
			// The stubs of a sentry share its command line; the leader of its
			// session is the sentry itself.
			if sid, err := unix.Getsid(pid); err == nil && sid == pid {
				found[id] = pid
			}
		}
	}
	return found
}

// stdio is an empty file that stands for no input and no output.
func (d *Driver) stdio() string { return filepath.Join(d.dir, "stdio") }

func (d *Driver) kernelDir(id string) string { return filepath.Join(d.dir, "k", id) }

// processStart is the start time of a process in clock ticks since boot, which
// with the pid names a process uniquely; 0 if there is none.
func processStart(pid int) uint64 {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	// The command in parentheses may hold spaces: fields count from the last ')'.
	s := string(b)
	f := strings.Fields(s[strings.LastIndexByte(s, ')')+1:])
	if len(f) < 20 {
		return 0
	}
	n, _ := strconv.ParseUint(f[19], 10, 64)
	return n
}
