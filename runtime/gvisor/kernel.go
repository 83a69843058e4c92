package gvisor

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/sentry/pgalloc"
	"gvisor.dev/gvisor/pkg/urpc"
	"gvisor.dev/gvisor/runsc/boot"
	gvsandbox "gvisor.dev/gvisor/runsc/sandbox"
	"gvisor.dev/gvisor/runsc/specutils"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/runtime/gvisor/spawn"
	"github.com/cove-sandbox/cove/sandbox"
)

const (
	handleVersion = 1
	userContainer = "user"
)

// Kernel is one sentry process. See runtime.Kernel for its concurrency.
type Kernel struct {
	d     *Driver
	id    string
	sb    *gvsandbox.Sandbox
	guest *guest.Client

	saved    saved
	programs programs
	bulks    gate // transfers under way, which a checkpoint must not meet

	done     chan struct{} // closed by finish
	doneOnce sync.Once
	exit     runtime.Exit // set before done is closed
	stop     context.CancelFunc
	watchers sync.WaitGroup

	mu struct {
		sync.Mutex
		container  string            // id of the user's container inside the kernel, "" before Attach
		served     int               // number of the last container that was vacated
		sized      sandbox.Resources // that the kernel has by Attach; zero = none
		initPID    int
		image      string // path of the container's image; "" if it was adopted
		spare      *spare // nil if none is there or being made
		spareTimer *time.Timer
		initTimer  *time.Timer   // until init is watched
		spareAgain func()        // ends the time without a spare that a pause began; nil unless paused
		cleaned    chan struct{} // closed unless containers that were left are being destroyed
		thawed     chan struct{} // closed unless the guest is being thawed
		paused     bool
		brief      bool // that pause is over in a moment; false in one adopted
		plugged    bool // has a network device; not known of an adopted one
		destroyed  bool
		left       bool // by letGo: another process has it, and nothing more is begun here
	}
}

// saved is what survives a restart of the node.
type saved struct {
	PID       int    `json:"pid"`
	StartTime uint64 `json:"start_time"` // with PID names the process uniquely
	Secret    string `json:"secret"`     // of the guest, hex
	UID       int    `json:"uid"`        // the sentry runs as
	Socket    string `json:"socket"`
	// BootMemory is what the sentry held before it joined its cgroup and is
	// therefore not counted there (v1 only).
	BootMemory int64 `json:"boot_memory"`
	// Build is the gVisor and the guest it was booted with, which are not
	// always those of the driver that adopts it; "" where that was not kept.
	Build string `json:"build,omitempty"`
	Form  int    `json:"form,omitempty"` // of the state that it writes; see stateForm
	// Before is the CPU time that sandboxes before this one used; see Vacate.
	Before time.Duration `json:"before,omitempty"`
	Reused bool          `json:"reused,omitempty"` // there were some
}

var _ runtime.Kernel = (*Kernel)(nil)

func newKernel(d *Driver, id string, p programs) *Kernel {
	k := &Kernel{d: d, id: id, programs: p, done: make(chan struct{})}
	k.mu.cleaned, k.mu.thawed = make(chan struct{}), make(chan struct{})
	close(k.mu.cleaned)
	close(k.mu.thawed)
	d.kernels.Store(k, nil)
	return k
}

// letGo ends what this process has to do with the kernel, which lives on.
func (k *Kernel) letGo() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.mu.left = true
	if k.guest != nil {
		k.guest.Close()
	}
	k.stopTimersLocked()
	if k.stop != nil {
		k.stop()
	}
}

func (k *Kernel) ID() string { return k.id }

// Handle is complete once Boot has returned. The container inside is not in
// it: adopt finds that by the init the guest serves.
func (k *Kernel) Handle() runtime.Handle {
	data, err := json.Marshal(k.saved)
	if err != nil {
		panic(err) // strings and numbers always marshal
	}
	return runtime.Handle{Version: handleVersion, Driver: driverName, ID: k.id, Data: data}
}

func (k *Kernel) Guest() *guest.Client          { return k.guest }
func (k *Kernel) Done() <-chan struct{}         { return k.done }
func (k *Kernel) dir() string                   { return k.d.kernelDir(k.id) }
func (k *Kernel) layer(container string) string { return filepath.Join(k.dir(), container+".upper") }

// Exit says why the kernel stopped. See runtime.Kernel.
func (k *Kernel) Exit() runtime.Exit {
	select {
	case <-k.done:
		return k.exit
	default:
		return runtime.Exit{}
	}
}

// blank starts the sentry without its guest. The caller destroys what a
// failure leaves behind.
func (k *Kernel) blank() (*specs.Spec, error) {
	d := k.d
	empty := filepath.Join(k.dir(), "empty")
	if err := os.Mkdir(empty, 0o711); err != nil {
		return nil, err
	}
	spec := rootSpec(empty, k.programs.guestfs, []string{
		"COVE_GUEST_SECRET=" + k.saved.Secret,
		"COVE_GUEST_PORT=" + strconv.Itoa(guestPort),
	})
	b, err := json.Marshal(spec)
	if err != nil {
		return nil, err
	}
	// The sentry reads its spec from here while it boots; the secret of the
	// guest is in it, so it goes away right after.
	bundle := filepath.Join(k.dir(), "config.json")
	if err := os.WriteFile(bundle, b, 0o600); err != nil {
		return nil, err
	}
	defer os.Remove(bundle)
	if err := d.groups.create(k.id); err != nil {
		return nil, fmt.Errorf("creating cgroup: %w", err)
	}
	hints, err := boot.NewPodMountHints(spec)
	if err != nil {
		return nil, err
	}
	group, err := d.groups.open(k.id)
	if err != nil {
		return nil, err
	}
	if group != nil {
		defer group.Close()
	}
	rootfs, err := os.Open(k.programs.guestfs)
	if err != nil {
		return nil, err
	}
	err = withStdio(d.stdio(), func() error {
		return withRunsc(k.programs.runsc, func() error {
			args := gvsandbox.Args{
				ID: k.id, Spec: spec, BundleDir: k.dir(), MountHints: hints, CloneIntoCgroupFD: group,
				IOFiles:         []*os.File{rootfs}, // closed by New
				GoferMountConfs: specutils.GoferMountConfFlags{{Lower: specutils.Erofs, Upper: specutils.NoOverlay}},
			}
			startBy(&args, d.spawner)
			k.sb, err = gvsandbox.New(d.conf, &args)
			return err
		})
	})
	if err != nil {
		return nil, fmt.Errorf("%w: %w%s", errSentryStart, err, k.logTail())
	}
	k.saved.PID = k.sb.Getpid()
	k.saved.StartTime = processStart(k.saved.PID)
	k.saved.UID = k.sb.UID
	k.saved.Socket = k.sb.ControlSocketPath
	if err := k.watch(); err != nil {
		return nil, err
	}
	k.saved.BootMemory, err = d.groups.join(k.id, k.saved.PID)
	return spec, err
}

// startBy has the sentry started by a spawner. The field is one of our edits: a
// build with gVisor as it is has none, and forks itself.
func startBy(args *gvsandbox.Args, s *spawn.Spawner) {
	if f := reflect.ValueOf(args).Elem().FieldByName("Start"); f.IsValid() {
		f.Set(reflect.ValueOf(s.Start))
	}
}

// start starts the guest of a blank kernel and waits for it to answer.
func (k *Kernel) start(ctx context.Context, spec *specs.Spec) error {
	if err := k.sb.StartRoot(k.d.start, spec); err != nil {
		return err
	}
	return k.connect(ctx)
}

// Rehearse runs the life of a sandbox once, in a container of the guest's own
// file system. Everything an attach and a first exec touch (code and heap of
// the sentry and of the guest, stub processes, the connection) is slow the
// first time: page faults are served by the sentry. A kernel has the time for
// that in its pool, a create does not: it takes 10 of 40 ms out of attach and
// first exec, and adds 45 ms and 0.4 MiB to a boot. See runtime.Rehearser.
func (k *Kernel) Rehearse(ctx context.Context) error {
	c := runtime.Container{Rootfs: runtime.Rootfs{Path: k.programs.guestfs, User: "0:0"}, Resources: sandbox.Resources{Disk: 1 << 20, Pids: 16},
		Resolvers: []netip.Addr{netip.IPv4Unspecified()}}
	k.mu.Lock()
	defer k.mu.Unlock()
	cid := containerName(0)
	init, err := k.launch(c, cid)
	if err == nil {
		err = k.guest.Enter(ctx, inGuest(c, init))
	}
	if err == nil {
		err = k.guest.Start(ctx, sandbox.ProcessSpec{ExecID: "rehearsal", Args: []string{guestBinary, "true"}}, 0, func(sandbox.ProcessEvent) error { return nil })
	}
	if err == nil {
		err = k.guest.Leave(ctx)
	}
	if err != nil {
		return fmt.Errorf("rehearsal: %w", err)
	}
	k.cleanLocked([]string{cid})
	<-k.mu.cleaned
	return nil
}

// connect makes the guest client and waits for the guest to answer. Right
// after the start the guest is not listening yet: port forwarding is refused
// until it is, which takes a few milliseconds.
func (k *Kernel) connect(ctx context.Context) error {
	secret, err := hex.DecodeString(k.saved.Secret)
	if err != nil {
		return err
	}
	k.guest = guest.NewClient(k.dial, secret)
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	patience := firstPing
	for wait := time.Millisecond; ; wait = min(wait*2, 20*time.Millisecond) {
		// Each on a connection of its own, with a bound of its own: one whose
		// answer never came took all of the time, 21 s of a recovery that
		// otherwise took 1 s.
		pctx, done := context.WithTimeout(ctx, patience)
		err := k.guest.Ping(pctx)
		done()
		if pctx.Err() != nil {
			patience *= 2
		}
		if err == nil {
			return nil
		}
		select {
		case <-k.done:
			return fmt.Errorf("the sentry died while its guest started: %s%s", k.exit.Detail, k.logTail())
		case <-ctx.Done():
			return fmt.Errorf("the guest does not answer: %w", err)
		case <-time.After(wait):
		}
	}
}

// firstPing is how long a guest gets to answer before it is asked again, for
// twice as long.
const firstPing = time.Second

// dial opens a connection to the guest: one end of a socket pair is handed to
// the sentry, which splices it to the guest's port on the loopback.
func (k *Kernel) dial(ctx context.Context) (net.Conn, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	ours := os.NewFile(uintptr(fds[0]), "guest connection")
	theirs := os.NewFile(uintptr(fds[1]), "guest connection, sentry end")
	defer ours.Close() // FileConn duplicates
	forwarded := make(chan error, 1)
	go func() { // gVisor's call knows no deadline; it ends with the sentry at the latest
		defer theirs.Close()
		forwarded <- k.sb.PortForward(&boot.PortForwardOpts{
			FilePayload: urpc.FilePayload{Files: []*os.File{theirs}},
			ContainerID: k.id, Port: guestPort,
		})
	}()
	select {
	case err = <-forwarded:
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err != nil {
		return nil, err
	}
	return net.FileConn(ours)
}

// adopt finds a kernel of an earlier process again. Without an error but with
// Done closed, it is dead and the cause is known.
func (k *Kernel) adopt(ctx context.Context) error {
	if k.saved.PID == 0 || k.gone() {
		if k.d.groups.oomKills(k.id) > 0 {
			k.finish(sandbox.OOM, overLimit)
			return nil
		}
		return sandbox.ErrNotFound
	}
	k.sb = &gvsandbox.Sandbox{ID: k.id, UID: k.saved.UID, GID: k.saved.UID, ControlSocketPath: k.saved.Socket}
	k.sb.Pid.Store(k.saved.PID)
	if err := k.watch(); err != nil {
		return err
	}
	if err := k.requota(); err != nil {
		k.d.log.Error("an adopted kernel keeps the whole CPU", "kernel", k.id, "err", err)
	}
	paused, err := k.adoptPaused(ctx)
	if paused {
		return nil
	}
	init := 0
	if err == nil {
		err = k.connect(ctx)
	}
	if err == nil {
		init, err = k.guest.Init(ctx)
	}
	if err == nil {
		// The process before us may have died amid a checkpoint. A guest of a
		// version that knows nothing of that refuses, and has nothing to thaw.
		if terr := k.guest.Thaw(ctx); terr != nil {
			k.d.log.Warn("thaw of an adopted kernel", "kernel", k.id, "err", terr)
		}
	}
	if err != nil {
		if k.guest != nil {
			k.guest.Close()
		}
		k.stop()
		k.watchers.Wait()
		return fmt.Errorf("asking the guest for its container: %w", err)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, cid := range k.containers() {
		// Beside the current one there may be a spare, which the next reset
		// destroys with it. Without an init, the process before us died amid a
		// reset, and any will do.
		if procs, err := k.sb.Processes(cid); init == 0 || err == nil && len(procs) == 1 && int(procs[0].PID) == init {
			k.mu.container = cid
		}
	}
	if k.mu.initPID = init; init != 0 {
		k.watchInitLocked()
	}
	return nil
}

// containers names the user containers there are or were, oldest first, by
// their layers. There is one, but for a reset that was cut off.
func (k *Kernel) containers() []string {
	layers, _ := filepath.Glob(filepath.Join(k.dir(), userContainer+"*.upper"))
	var cids []string
	for _, l := range layers {
		cids = append(cids, strings.TrimSuffix(filepath.Base(l), ".upper"))
	}
	slices.SortFunc(cids, func(a, b string) int { return episode(a) - episode(b) })
	return cids
}

func containerName(episode int) string { return userContainer + strconv.Itoa(episode) }

// episode is the number in a container's name.
func episode(cid string) int {
	n, _ := strconv.Atoi(strings.TrimPrefix(cid, userContainer)) // 0 for a name that is not ours
	return n
}

// Attach gives the kernel its container. See runtime.Kernel.
func (k *Kernel) Attach(ctx context.Context, c runtime.Container) error {
	const op = "gvisor.attach"
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.mu.container != "" {
		return sandbox.Errorf(sandbox.Precondition, op, "kernel %s has its container", k.id)
	}
	if k.mu.sized != c.Resources || !c.Clock.IsZero() { // mostly the next of a trust group is as large as the one before
		k.mu.sized = sandbox.Resources{}
		if err := k.d.groups.limit(k.id, c.Resources); err != nil {
			return sandbox.Errorf(sandbox.Unavailable, op, "kernel %s: %w", k.id, err)
		}
		if err := k.setSize(c); err != nil {
			return k.explain(op, err)
		}
		k.mu.sized = c.Resources
	}
	cid := containerName(k.mu.served + 1)
	init, err := k.launch(c, cid)
	if err != nil {
		return k.explain(op, err)
	}
	k.mu.container = cid
	if c.Device != nil {
		if err := k.plugLocked(*c.Device); err != nil {
			return k.explain(op, err)
		}
	}
	if err := k.enterLocked(ctx, c, init); err != nil {
		return k.explain(op, err)
	}
	if k.d.resets.likely(c.Rootfs.Path, time.Now()) {
		k.spareSoonLocked(c)
	}
	return nil
}

// Reset swaps the container for a pristine one. See runtime.Kernel.
func (k *Kernel) Reset(ctx context.Context, c runtime.Container) error {
	const op = "gvisor.reset"
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.mu.container == "" {
		return sandbox.Errorf(sandbox.Precondition, op, "kernel %s has no container", k.id)
	}
	if k.mu.paused {
		return k.errPaused(op)
	}
	<-k.mu.cleaned
	k.d.resets.note(c.Rootfs.Path, time.Now())
	next := k.takeSpareLocked(c)
	old := k.containers()
	if next == nil {
		last := k.mu.container
		if len(old) > 0 {
			last = old[len(old)-1]
		}
		next = &spare{cid: containerName(episode(last) + 1)}
		if next.init, next.err = k.launch(c, next.cid); next.err != nil {
			return k.explain(op, next.err)
		}
	}
	// Entering the new container, the guest leaves the old one, and nothing of
	// that lives when it has. What is left of it in the sentry and on disk can
	// go after the reset: 1 to 2 ms that nobody need wait for.
	k.mu.initPID = 0 // its death is ours, not the code's inside
	if err := k.enterLocked(ctx, c, next.init); err != nil {
		return k.explain(op, err)
	}
	k.mu.container = next.cid
	k.cleanLocked(slices.DeleteFunc(old, func(cid string) bool { return cid == next.cid }))
	// Unless it had so many files that the next episode would find no memory for its own.
	if k.d.groups.memory(k.id) > c.Resources.MemoryLimit/2 {
		<-k.mu.cleaned
	}
	k.spareSoonLocked(c)
	return nil
}

// cleanLocked destroys containers that were left, in the background; cleaned
// is closed when they are gone. A container that the sentry does not know (of a
// reset that was cut off) is as good as destroyed; one that resists keeps its
// layer, by which the next reset or checkpoint finds it and tries again.
func (k *Kernel) cleanLocked(cids []string) {
	cleaned := make(chan struct{})
	k.mu.cleaned = cleaned
	k.watchers.Go(func() {
		defer close(cleaned)
		for _, cid := range cids {
			if err := k.sb.DestroyContainer(cid); err != nil {
				if state, serr := k.sb.ContainerRuntimeState(cid); serr != nil || state != boot.RuntimeStateStopped {
					k.d.log.Warn("a container that was left resists", "kernel", k.id, "container", cid, "err", errors.Join(err, serr))
					continue
				}
			}
			if err := os.Remove(k.layer(cid)); err != nil {
				k.d.log.Warn("removing a layer", "kernel", k.id, "container", cid, "err", err)
			}
		}
	})
}

// explain prefers the kernel's own end over the broken call it caused.
func (k *Kernel) explain(op string, err error) error {
	select {
	case <-k.done:
		return sandbox.Errorf(sandbox.Unavailable, op, "kernel %s ended (%s: %s): %w", k.id, k.exit.Cause, k.exit.Detail, err)
	default:
	}
	var e *sandbox.Error
	if errors.As(err, &e) {
		return sandbox.WithOp(op, err)
	}
	if sandbox.NoSpace(err) {
		return sandbox.Errorf(sandbox.DiskFull, op, "kernel %s: %w", k.id, err)
	}
	return sandbox.Errorf(sandbox.Unavailable, op, "kernel %s: %w", k.id, err)
}

// launch starts a user container and returns the pid of its init in the
// guest's eyes.
func (k *Kernel) launch(c runtime.Container, cid string) (initPID int, err error) {
	d := k.d
	image, err := os.Open(c.Rootfs.Path)
	if err != nil {
		return 0, sandbox.Errorf(sandbox.ImageNotFound, "", "image content %s: %w", c.Rootfs.Path, err)
	}
	defer image.Close()
	guestfs, err := os.Open(k.programs.guestfs)
	if err != nil {
		return 0, err
	}
	defer guestfs.Close()
	layer, err := os.OpenFile(k.layer(cid), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return 0, err
	}
	defer layer.Close()
	// Outside the sentry, whose seccomp filter forbids it (runsc does the same).
	pgalloc.IMAWorkAroundForMemFile(layer.Fd())
	stdin, err := os.Open(d.stdio())
	if err != nil {
		return 0, err
	}
	defer stdin.Close()
	spec := userSpec(k.id, filepath.Join(k.dir(), "empty"), k.programs.guestfs)
	vols, err := k.serveVolumes(c.Volumes, cid)
	if err != nil {
		return 0, err
	}
	defer vols.close()
	spec.Mounts = append(spec.Mounts, vols.mounts...)
	files, confs := append([]*os.File{image, guestfs}, vols.files...), append([]specutils.GoferMountConf{
		{Lower: specutils.Erofs, Upper: specutils.AnonOverlay, Size: strconv.FormatInt(c.Resources.Disk, 10)},
		{Lower: specutils.Erofs, Upper: specutils.NoOverlay},
	}, vols.confs...)
	var ms []mount
	for _, m := range c.Mounts {
		id, err := superblockID(m.Source)
		if err != nil {
			return 0, err
		}
		f, err := os.Open(m.Source)
		if err != nil {
			return 0, err
		}
		defer f.Close()
		ms = append(ms, mount{Source: m.Source, ID: id, Path: m.Target, Key: m.Target})
		spec.Mounts = append(spec.Mounts, ms[len(ms)-1].spec())
		files, confs = append(files, f), append(confs, specutils.GoferMountConf{Lower: specutils.Erofs, Upper: specutils.NoOverlay})
	}
	if len(ms) > 0 {
		if err := k.keepMounts(cid, ms); err != nil {
			return 0, err
		}
	}
	if err := k.sb.CreateSubcontainer(d.conf, cid, nil); err != nil {
		return 0, err
	}
	err = k.sb.StartSubcontainer(spec, d.conf, cid,
		[]*os.File{stdin, stdin, stdin}, files, []*os.File{layer}, nil, confs)
	if err != nil {
		return 0, vols.explain(err)
	}
	procs, err := k.sb.Processes(cid)
	if err != nil {
		return 0, err
	}
	if len(procs) != 1 {
		return 0, fmt.Errorf("the new container has %d processes", len(procs))
	}
	return int(procs[0].PID), nil
}

// enterLocked lets the guest serve the container of an init.
func (k *Kernel) enterLocked(ctx context.Context, c runtime.Container, initPID int) error {
	if err := k.guest.Enter(ctx, inGuest(c, initPID)); err != nil {
		return fmt.Errorf("the guest cannot enter the container: %w", err)
	}
	k.mu.initPID, k.mu.image = initPID, c.Rootfs.Path
	k.watchInitLocked()
	return nil
}

// inGuest is the container of an init as the guest is told of it.
func inGuest(c runtime.Container, initPID int) guest.Container {
	return guest.Container{InitPID: initPID, Env: runtime.Environ(c), WorkingDir: c.Rootfs.WorkingDir, User: c.Rootfs.User, Pids: c.Resources.Pids, Hostname: c.Sandbox,
		Resolv: runtime.ResolvConf(c.Resolvers)}
}

// MemoryUse is Stats without what only the guest knows. See runtime.Meter.
func (k *Kernel) MemoryUse() (int64, error) {
	s, err := k.d.groups.stats(k.id)
	return s.Memory + k.saved.BootMemory, err
}

// CPUTime implements runtime.CPUMeter.
func (k *Kernel) CPUTime() (time.Duration, bool) { return k.d.groups.cpuTime(k.id) }

// Stats of the kernel. See runtime.Kernel.
func (k *Kernel) Stats(ctx context.Context) (sandbox.Stats, error) {
	s, err := k.d.groups.stats(k.id)
	if err != nil {
		return s, sandbox.Errorf(sandbox.NotFound, "gvisor.stats", "kernel %s: %w", k.id, err)
	}
	s.CPUTime -= k.saved.Before
	if k.saved.Reused && k.d.groups.v2 {
		s.MemoryPeak = 0 // cannot be set back, and is the peak of all
	}
	s.Memory += k.saved.BootMemory
	if s.MemoryPeak > 0 {
		s.MemoryPeak += k.saved.BootMemory
	}
	k.mu.Lock()
	cid, paused, guest := k.mu.container, k.mu.paused, k.guest
	k.mu.Unlock()
	if cid != "" && !paused {
		// The figures that come from inside. Without an answer they are left
		// out: the others are the host's and do not depend on it.
		if processes, kills, err := guest.Counts(ctx); err == nil {
			s.Processes, s.OOMKills = processes, kills
		}
	}
	var st unix.Stat_t
	if cid != "" && unix.Stat(k.layer(cid), &st) == nil {
		s.DiskUsed = st.Blocks * 512
	}
	return s, nil
}
