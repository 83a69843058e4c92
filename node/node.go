package node

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
	"github.com/cove-sandbox/cove/egress/tape"
	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/volume"
)

// Config is what a node is opened with.
type Config struct {
	Dir    string // the journal and the lock; made if missing
	Name   string
	Driver runtime.Driver // stays the caller's to close
	Images Images
	Limits Limits
	Pool   PoolSettings
	State  *StateConfig // nil: no snapshots and no cold standby
	// VolumeDir holds the volumes; "" = none.
	VolumeDir string
	// Networks of sandboxes that have one; nil: none can. Stays the caller's to close.
	Networks *egress.Networks
	// Recordings of their traffic; nil: none can be made or replayed. Stays the caller's to close.
	Recordings *tape.Library
	// Authorities that every sandbox trusts beside its image's, in PEM form; nil = none.
	Authorities []byte
	Logger      *slog.Logger // nil = discard

	// SweepEvery is how often what runs is compared with what should; default
	// one minute, zero takes it, negative never.
	SweepEvery time.Duration

	// Tests only.
	fsys       fsys
	bootID     string
	inspect    func(ctx context.Context, k runtime.Kernel) (inside, error)
	freeMemory func() int64
	freeDisk   func() (int64, error)
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
	cfg     Config
	log     *slog.Logger
	lock    *os.File
	journal *journal
	pool    *pool
	blanks  *blanks
	timers  *timers
	notices *notices
	kernels *kernelSet
	states  *contents   // nil: no snapshots and no cold standby
	mounts  *mountFiles // nil with states
	volumes *volume.Set // nil: none
	tapes   tapeBook
	secrets secretBook
	silent  atomic.Int64 // calls lost between node and guest, since Open
	litter  atomic.Bool  // stored content became useless since the last Collect

	ctx    context.Context // ends what runs in the background, at Close
	cancel context.CancelCauseFunc
	calls  sync.WaitGroup // API calls under way; counted in under mu, never once closing
	tasks  sync.WaitGroup // background goroutines; started under mu, never once stopping

	mu       sync.Mutex
	closing  bool // no new calls
	stopping bool // and none under way: no new tasks either
	ledger   *Ledger
	live     map[string]*box // from admission until nothing is left
	ends     map[string]sandbox.End
}

// box is one sandbox on this node.
type box struct {
	id        string
	resources sandbox.Resources
	container runtime.Container
	image     sandbox.ImageConfig
	op        chan struct{} // capacity 1; full while Attach, Reset, SetExpiry or Destroy has the kernel
	ctx       context.Context
	cancel    context.CancelCauseFunc // at the first end
	ready     chan struct{}           // closed when created, or gone without having been
	gone      chan struct{}           // closed when nothing is left
	stuck     chan struct{}           // closed when Destroy failed and is being retried
	asleep    atomic.Bool             // sb.Standby is not Awake: for who asks with every write
	heard     atomic.Int64            // when a connection from outside last brought bytes, in Unix nanoseconds

	// Guarded by Node.mu. kernel, standby and cold change only for who also has
	// op; container and image too.
	sb         sandbox.Sandbox // its Standby is the box's
	kernel     runtime.Kernel  // nil until one was taken, and while cold
	held       bool            // resources are in the ledger: not while cold
	cold       *sandbox.Content
	waiting    *guest.Client // while cold: what was attached goes on with it
	since      time.Time     // of the standby it is in
	idled      bool          // it was paused for being idle: time makes it cold
	needs      []string      // manifests mounted inside
	touched    int64         // +1 for all that may change what is inside
	same       unchanged
	callbacks  *listener      // nil: none
	tended     runtime.Kernel // whose guest's client has its hooks
	active     int            // calls under way
	lastActive time.Time
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
	n := &Node{cfg: cfg, log: cfg.Logger, lock: lock, notices: newNotices(), kernels: newKernelSet(),
		live: map[string]*box{}, ends: map[string]sandbox.End{}}
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
	n.ledger = NewLedger(limits)
	if cfg.State != nil {
		if n.states, err = openContents(*cfg.State); err == nil {
			n.mounts, err = openMountFiles(filepath.Join(cfg.Dir, "mounts"))
		}
		if err != nil {
			return nil, sandbox.Errorf(sandbox.Unavailable, "node.open", "%w", err)
		}
	}
	if n.cfg.freeMemory == nil {
		n.cfg.freeMemory = func() int64 { return freeAboveReserve(limits.Memory) }
	}
	if n.cfg.freeDisk == nil {
		n.cfg.freeDisk = func() (int64, error) { return freeDisk(cfg.Dir) }
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
	pool := cfg.Pool.withDefaults(limits.Memory)
	n.pool = newPool(pool, n.boot, n.discard, n.cfg.freeMemory, n.log)
	n.blanks = newBlanks(n, pool.Blank)
	n.pool.start()
	n.tasks.Go(func() { n.blanks.run(n.ctx) })
	n.tasks.Go(func() { n.timers.run(n.ctx) })
	n.tasks.Go(func() { n.notices.run(n.ctx) })
	n.tasks.Go(n.collect)
	return n, nil
}

// Close waits for the calls under way, destroys the warm kernels and lets go
// of the directory. Sandboxes go on running; the next Open takes them back.
func (n *Node) Close() error {
	n.mu.Lock()
	if n.closing {
		n.mu.Unlock()
		return nil
	}
	n.closing = true
	n.mu.Unlock()
	n.calls.Wait()
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
	n.closing, n.stopping = true, true
	n.mu.Unlock()
	if n.pool != nil {
		n.pool.close()
	}
	n.cancel(errClosing)
	n.tasks.Wait()
	var err error
	if n.volumes != nil {
		err = n.volumes.Close()
	}
	err = errors.Join(err, n.closeTapes())
	if n.journal != nil {
		err = errors.Join(err, n.journal.close())
	}
	_ = n.lock.Close()
	return err
}

// Name of the node.
func (n *Node) Name() string { return n.cfg.Name }

// Ended delivers the id of each sandbox that ends on its own; it is in Ends
// then. For one receiver; closed by Close.
func (n *Node) Ended() <-chan string { return n.notices.ch }

// Capacity is what the node has and has given out.
func (n *Node) Capacity() sandbox.Capacity {
	ready, target := n.pool.counts()
	n.mu.Lock()
	defer n.mu.Unlock()
	used, count := n.ledger.Used()
	return sandbox.Capacity{Runtime: n.cfg.Driver.Name(), Total: n.ledger.Total(), Used: used,
		MaxSandboxes: n.ledger.limits.MaxSandboxes, Sandboxes: count, WarmKernels: ready, WarmTarget: target, LostCalls: n.silent.Load()}
}

// call counts an API call in, unless the node is closing. The caller must
// call n.calls.Done.
func (n *Node) call() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closing {
		return errClosing
	}
	n.calls.Add(1)
	return nil
}

// goLocked runs f in the background, unless the node is stopping.
func (n *Node) goLocked(f func()) bool {
	if n.stopping {
		return false
	}
	n.tasks.Go(f)
	return true
}

// newKernelID is 80 random bits in the alphabet of sandbox ids.
func newKernelID() string {
	var b [10]byte
	_, _ = rand.Read(b[:]) // never fails
	return strings.ToLower(base32.HexEncoding.WithPadding(base32.NoPadding).EncodeToString(b[:]))
}
