package agent

import (
	"context"
	"crypto/rand"
	"encoding/base32"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cove-sandbox/cove/egress"
	"github.com/cove-sandbox/cove/egress/policy"
	"github.com/cove-sandbox/cove/egress/recording"
	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/volume"
)

// Config is what a node is opened with.
type Config struct {
	Dir  string // the journal and the lock; made if missing
	Name string
	// Classes of kernels; the first is that of sandboxes which name none.
	Classes []Class
	Images  Images
	Limits  Limits       // of the node, whatever the class
	State   *StateConfig // nil: no snapshots and no cold standby
	// VolumeDir holds the volumes; "" = none.
	VolumeDir string
	// Networks of sandboxes that have one; nil: none can. Stays the caller's to close.
	Networks *egress.Networks
	// Recordings of their traffic; nil: none can be made or replayed. Stays the caller's to close.
	Recordings *recording.Library
	// Authorities that every sandbox trusts beside its image's, in PEM form; nil = none.
	Authorities []byte
	Logger      *slog.Logger // nil = discard

	// SweepEvery is how often what runs is compared with what should; default
	// one minute, zero takes it, negative never.
	SweepEvery time.Duration

	// Tests only.
	fsys    fsys
	bootID  string
	inspect func(ctx context.Context, k runtime.Kernel) (inside, error)
	host    func() (Host, error)
}

// Images finds the content a sandbox was created from.
type Images interface {
	// Path of the image's file; sandbox.ErrImageNotFound.
	Path(id string) (string, error)
}

// Deriver is an Images that can make new ones, for snapshots of files.
type Deriver interface {
	// Derive makes the image that base with the changes of a tar is.
	Derive(ctx context.Context, baseID string, diff io.Reader, progress func(sandbox.Progress)) (sandbox.Image, error)
	// FromTar makes an image of just the files of a tar.
	FromTar(ctx context.Context, r io.Reader, progress func(sandbox.Progress)) (sandbox.Image, error)
}

// Node is safe for concurrent use.
type Node struct {
	cfg        Config
	log        *slog.Logger
	lock       *os.File
	journal    *journal
	classes    []*kernelClass // the first is the default; set by Open
	creates    *creates
	timers     *timers
	notices    *notices
	kernels    *kernelSet
	states     *contents   // nil: no snapshots and no cold standby
	mounts     *mountFiles // nil with states
	volumes    *volume.Set // nil: none
	recordings boxRecordings
	secrets    tenantSecrets
	holds      holds
	staged     staged
	incoming   incoming
	expected   expectations
	progress   progresses
	silent     atomic.Int64 // calls lost between node and guest, since Open
	unparking  atomic.Bool  // a parked sandbox is being woken
	litter     atomic.Bool  // stored content became useless since the last Collect

	ctx    context.Context // ends what runs in the background, at Close
	cancel context.CancelCauseFunc
	calls  sync.WaitGroup // API calls under way; counted in under mu, never once closing
	tasks  sync.WaitGroup // background goroutines; started under mu, never once stopping

	mu struct {
		sync.Mutex
		closing      bool // no new calls
		stopping     bool // and none under way: no new tasks either
		reservations *Reservations
		live         map[string]*box // from admission until nothing is left
		ends         map[string]sandbox.End
	}
}

// box is one sandbox on this node.
type box struct {
	id     string
	class  *kernelClass
	op     chan struct{} // capacity 1; full while Attach, Reset, SetExpiry or Destroy has the kernel
	ctx    context.Context
	cancel context.CancelCauseFunc // at the first end
	ready  chan struct{}           // closed when created, or gone without having been
	gone   chan struct{}           // closed when nothing is left
	stuck  chan struct{}           // closed when Destroy failed and is being retried
	asleep atomic.Bool             // sb.Standby is not Awake: for who asks with every write
	heard  atomic.Int64            // when a connection from outside last brought bytes, in Unix nanoseconds

	// Guarded by Node.mu. kernel, standby, cold
	// and image change only for who also has op. container does not need op: its
	// environment follows PutSecrets, so who uses it takes a copy.
	sb         sandbox.Sandbox // its Standby is the box's
	policy     *policy.Policy  // of sb.Spec.Network; nil until a network is first made of it
	resources  sandbox.Resources
	container  runtime.Container
	image      sandbox.ImageConfig
	kernel     runtime.Kernel // nil until one was taken, and while cold
	placed     runtime.Kernel // that Create gave it; another has come by a way that forbids to reuse it
	uses       int            // sandboxes that placed has served, this one included
	held       bool           // resources are reserved: not while cold
	cold       *sandbox.Content
	waiting    *guest.Client // while cold: what was attached goes on with it
	parked     bool          // cold by the node, for want of memory: it is woken when there is room
	since      time.Time     // of the standby it is in
	idled      bool          // it was paused for being idle: time makes it cold
	needs      []string      // manifests mounted inside
	touched    int64         // +1 for all that may change what is inside
	same       unchanged
	lineage    *lineage       // nil: the next checkpoint is whole
	callbacks  *listener      // nil: none
	hooked     runtime.Kernel // whose guest's client has its hooks
	active     int            // calls under way
	calm       chan struct{}  // closed when none is any more; nil unless somebody waits for that
	lastActive time.Time
	metered    int    // execs that are counted, or were left
	overlaps   uint64 // +1 for each that began beside another
	beginning  beginning
	marks      map[string]*sandbox.UpperLayer
	clock      *stepClock // nil: the host's
	end        *sandbox.End
}

// Open starts a node on cfg.Dir. It takes back every sandbox that still runs,
// records the end of those that do not, and removes from the machine whatever
// belongs to neither. Nobody else may use the directory meanwhile.
func Open(ctx context.Context, cfg Config) (_ *Node, err error) {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.fsys == nil {
		cfg.fsys = hostFS{}
	}
	if cfg.bootID == "" {
		cfg.bootID = bootID()
	}
	if cfg.inspect == nil {
		cfg.inspect = inspect
	}
	if cfg.SweepEvery == 0 {
		cfg.SweepEvery = time.Minute
	}
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, sandbox.Errorf(sandbox.Unavailable, "node.open", "%w", err)
	}
	lock, err := lockDir(ctx, cfg.Dir)
	if err != nil {
		return nil, err
	}
	n := &Node{cfg: cfg, log: cfg.Logger, lock: lock, notices: newNotices(), kernels: newKernelSet(), creates: &creates{}}
	n.mu.live, n.mu.ends = map[string]*box{}, map[string]sandbox.End{}
	n.ctx, n.cancel = context.WithCancelCause(context.Background())
	n.timers = newTimers(n.due)
	defer func() {
		if err != nil {
			n.stop()
		}
	}()

	limits, err := machineLimits(cfg.Limits, cfg.Dir)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.Unavailable, "node.open", "size the machine: %w", err)
	}
	n.mu.reservations = NewReservations(limits)
	if cfg.State != nil {
		if n.states, err = openContents(*cfg.State); err == nil {
			n.mounts, err = openMountFiles(filepath.Join(cfg.Dir, "mounts"))
		}
		if err != nil {
			return nil, sandbox.Errorf(sandbox.Unavailable, "node.open", "%w", err)
		}
	}
	if n.cfg.host == nil {
		n.cfg.host = func() (Host, error) { return readHost(cfg.Dir) }
	}
	if err := n.openClasses(); err != nil {
		return nil, err
	}
	var was *state
	if n.journal, was, err = openJournal(cfg.fsys, filepath.Join(cfg.Dir, "journal"), n.log); err != nil {
		return nil, err
	}
	if err := n.openVolumes(ctx, was); err != nil {
		return nil, err
	}
	if err := n.recover(ctx, was); err != nil {
		return nil, err
	}
	for _, c := range n.classes {
		c.pool.start()
		n.tasks.Go(func() { c.blanks.run(n.ctx) })
		n.tasks.Go(func() { c.ahead.run(n.ctx) })
	}
	n.tasks.Go(func() { n.timers.run(n.ctx) })
	n.tasks.Go(n.collect)
	n.tasks.Go(n.guardHost)
	return n, nil
}

// Close waits for the calls under way, destroys the warm kernels and lets go
// of the directory. Sandboxes go on running; the next Open takes them back.
func (n *Node) Close() error {
	n.mu.Lock()
	if n.mu.closing {
		n.mu.Unlock()
		return nil
	}
	n.mu.closing = true
	n.mu.Unlock()
	n.calls.Wait()
	n.abortAll()
	return n.stop()
}

// Shutdown is Close; with killAll every sandbox is ended first, as evicted.
func (n *Node) Shutdown(ctx context.Context, killAll bool) error {
	if killAll {
		if err := n.evictAll(ctx); err != nil {
			return err
		}
	}
	return n.Close()
}

// stop ends what Open began, however far it came.
func (n *Node) stop() error {
	n.mu.Lock()
	n.mu.closing, n.mu.stopping = true, true
	n.mu.Unlock()
	for _, c := range n.classes {
		c.pool.close()
		if c.rests != nil {
			c.rests.close()
		}
	}
	n.cancel(errClosing)
	n.holds.stop()
	n.tasks.Wait()
	var err error
	if n.volumes != nil {
		err = n.volumes.Close()
	}
	err = errors.Join(err, n.closeRecordings())
	if n.journal != nil {
		err = errors.Join(err, n.journal.close())
	}
	_ = n.lock.Close()
	return err
}

// Info is what the node is and what it can do.
func (n *Node) Info(context.Context) (node.Info, error) {
	return node.Info{Name: n.cfg.Name, Sealed: n.sealed(), Litter: n.litter.Load(), Volumes: n.volumes != nil, Recordings: n.cfg.Recordings != nil}, nil
}

// Capacity is what the node has and has given out.
func (n *Node) Capacity(context.Context) (sandbox.Capacity, error) {
	classes := make([]sandbox.ClassCapacity, len(n.classes))
	for i, c := range n.classes {
		classes[i] = sandbox.ClassCapacity{Name: c.Name, Runtime: c.Driver.Name(), Devices: c.Devices, MaxSandboxes: c.Most}
		classes[i].WarmKernels, classes[i].WarmTarget = c.pool.counts()
		classes[i].HeldKernels, classes[i].HeldTarget = c.ahead.counts()
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	used, count := n.mu.reservations.Used()
	total := n.mu.reservations.Total()
	used.Memory, used.Disk = used.Reserve, max(total.Disk-n.mu.reservations.host.Disk, 0)
	all := sandbox.Capacity{Runtime: n.classes[0].Driver.Name(), Total: total, Used: used,
		MaxSandboxes: n.mu.reservations.limits.MaxSandboxes, Sandboxes: count, LostCalls: n.silent.Load(), Classes: classes}
	if full := n.mu.reservations.Full(); full != nil {
		all.Full, all.FullHint = full.Msg, full.Hint
	}
	for i := range classes {
		classes[i].Sandboxes = n.mu.reservations.Of(classes[i].Name)
		all.WarmKernels += classes[i].WarmKernels
		all.WarmTarget += classes[i].WarmTarget
		all.HeldKernels += classes[i].HeldKernels
		all.HeldTarget += classes[i].HeldTarget
	}
	return all, nil
}

// call counts an API call in, unless the node is closing. The caller must
// call n.calls.Done.
func (n *Node) call() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.mu.closing {
		return errClosing
	}
	n.calls.Add(1)
	return nil
}

// goLocked runs f in the background, unless the node is stopping.
func (n *Node) goLocked(f func()) bool {
	if n.mu.stopping {
		return false
	}
	n.tasks.Go(f)
	return true
}

// newToken names something that only its holder may end.
func newToken() string { return strings.ToLower(rand.Text()) }

// background runs f in the background, or where the node is stopping now. No
// lock is held.
func (n *Node) background(f func()) {
	n.mu.Lock()
	started := n.goLocked(f)
	n.mu.Unlock()
	if !started {
		f()
	}
}

// newKernelID is 80 random bits in the alphabet of sandbox ids.
func newKernelID() string {
	var b [10]byte
	_, _ = rand.Read(b[:]) // never fails
	return strings.ToLower(base32.HexEncoding.WithPadding(base32.NoPadding).EncodeToString(b[:]))
}
