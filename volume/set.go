package volume

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/internal/durable"
	"github.com/cove-sandbox/cove/sandbox"
)

const (
	format = "cove volumes 1\n"
)

var (
	validID   = regexp.MustCompile(`^[a-z0-9]{1,40}$`)
	validName = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{0,126}$`) // of a record of version 1
)

// Volume describes one. A copy: changing it changes nothing.
type Volume struct {
	ID      string
	Size    int64    // the limit, in bytes; a little less is for files
	Used    int64    // what it takes on the host's disk
	Holders []Holder // who has it attached, sorted
	Old     *Old     // nil since the set keeps no names
}

// Old is what a set that kept names too says of a volume: for who records them
// now. From is the id of the volume it was cloned from.
type Old struct {
	Name    string
	Created time.Time
	From    string
	Labels  map[string]string
}

// Options of a Set.
type Options struct {
	Logger *slog.Logger
	// Capacity bounds the sum of all sizes. 0 = what the disk has: volumes are
	// sparse, but a node does not promise more than it could give.
	Capacity int64
	// Linger is how long a volume nobody uses stays mounted: a mount costs some
	// 10 ms, which a client that puts file after file should pay once. 0 = 5 s,
	// negative = not at all.
	Linger time.Duration
	// Holders are the attachments that live on from an earlier process: volume
	// id → who. Their mounts are kept, or made again; all others are undone.
	Holders map[string][]Holder

	// step is called before each change of the disk. A test kills the process
	// or fails the change there.
	step func(string) error
}

// Set is the volumes of one directory. Safe for concurrent use.
type Set struct {
	dir  string
	opts Options
	log  *slog.Logger
	lock *os.File

	mu struct {
		sync.Mutex
		volumes map[string]*volume // by id, also those being made
		closed  bool
	}
}

// volume is one with its state in this process.
type volume struct {
	id string

	// slow is held (it has one place) by whoever mounts, unmounts, copies,
	// resizes or deletes. Taken before Set.mu.
	slow    chan struct{}
	mounted bool // guarded by slow

	// Guarded by Set.mu.
	rec     record
	holders map[string]Mode
	users   int // calls under way that need it mounted
	idle    *time.Timer
	dead    bool // deleted, or being
}

// Open opens the volumes of a directory, made if it is not there. It is also
// recovery: see the package comment.
func Open(ctx context.Context, dir string, opts Options) (_ *Set, err error) {
	const op = "volume.open"
	if err := Supported(); err != nil {
		return nil, err
	}
	dir, err = filepath.Abs(dir)
	if err == nil {
		// Mounts and loop devices are known by the path without symlinks.
		if err = os.MkdirAll(dir, 0o700); err == nil {
			dir, err = filepath.EvalSymlinks(dir)
		}
	}
	if err != nil {
		return nil, fail(op, err)
	}
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	if opts.Linger == 0 {
		opts.Linger = 5 * time.Second
	}
	s := &Set{dir: dir, opts: opts, log: opts.Logger.With("component", "volume")}
	s.mu.volumes = map[string]*volume{}
	for _, sub := range []string{"v", "tmp", "mnt"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o700); err != nil {
			return nil, fail(op, err)
		}
	}
	if s.lock, err = os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600); err != nil {
		return nil, fail(op, err)
	}
	defer func() {
		if err != nil {
			s.lock.Close()
		}
	}()
	if err := lock(s.lock); err != nil {
		return nil, sandbox.Errorf(sandbox.Precondition, op, "another process has the volumes in %s open: %w", dir, err)
	}
	if err := s.checkFormat(); err != nil {
		return nil, err
	}
	if err := s.recover(ctx); err != nil {
		return nil, fail(op, err)
	}
	return s, nil
}

// lock takes the lock of a directory. A process that has just died may have
// left it to a child between fork and exec: a few milliseconds, waited for.
func lock(f *os.File) (err error) {
	for range 10 {
		if err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); !errors.Is(err, unix.EWOULDBLOCK) {
			return err
		}
		time.Sleep(10 * time.Millisecond)
	}
	return err
}

func (s *Set) checkFormat() error {
	const op = "volume.open"
	p := filepath.Join(s.dir, "format")
	b, err := os.ReadFile(p)
	if errors.Is(err, os.ErrNotExist) {
		if err := durable.WriteVia(filepath.Join(s.dir, "tmp", "format"), p, []byte(format), 0o600); err != nil {
			return fail(op, err)
		}
		return nil
	}
	if err != nil {
		return fail(op, err)
	}
	if string(b) != format {
		return sandbox.Errorf(sandbox.Unsupported, op, "%s is of another version: %q", s.dir, strings.TrimSpace(string(b))).
			WithHint("use the cove that wrote it, or a newer one")
	}
	return nil
}

func (s *Set) image(id string) string   { return filepath.Join(s.dir, "v", id+".img") }
func (s *Set) point(id string) string   { return filepath.Join(s.dir, "mnt", id) }
func (s *Set) temp(name string) string  { return filepath.Join(s.dir, "tmp", name) }
func (s *Set) hostdir(id string) string { return filepath.Join(s.point(id), dataDir) }

// at is a point where a test may make the disk fail or the process die.
func (s *Set) at(step string) error {
	if s.opts.step == nil {
		return nil
	}
	return s.opts.step(step)
}

func (s *Set) findLocked(op, id string) (*volume, error) {
	v := s.mu.volumes[id]
	if v == nil || v.dead {
		return nil, sandbox.Errorf(sandbox.NotFound, op, "no volume %q", id)
	}
	if s.mu.closed {
		return nil, sandbox.Errorf(sandbox.Unavailable, op, "the volumes are closed")
	}
	return v, nil
}

// take holds v.slow until the function returned is called.
func (v *volume) take(ctx context.Context) (func(), error) {
	select {
	case v.slow <- struct{}{}:
		return func() { <-v.slow }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func newVolume(rec record) *volume {
	return &volume{id: rec.ID, slow: make(chan struct{}, 1), rec: rec, holders: map[string]Mode{}}
}

func (s *Set) describeLocked(v *volume) Volume {
	d := Volume{ID: v.id, Size: v.rec.Size, Holders: v.holdersLocked()}
	if v.rec.Name != "" {
		d.Old = &Old{Name: v.rec.Name, Created: v.rec.Created, From: v.rec.From, Labels: maps.Clone(v.rec.Labels)}
	}
	var st unix.Stat_t
	if unix.Stat(s.image(v.id), &st) == nil {
		d.Used = st.Blocks * 512
	}
	return d
}

// Get describes a volume.
func (s *Set) Get(_ context.Context, id string) (Volume, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	v, err := s.findLocked("volume.get", id)
	if err != nil {
		return Volume{}, err
	}
	return s.describeLocked(v), nil
}

// List describes all volumes, by id.
func (s *Set) List(context.Context) ([]Volume, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := []Volume{}
	for _, v := range s.mu.volumes {
		if !v.dead {
			out = append(out, s.describeLocked(v))
		}
	}
	slices.SortFunc(out, func(a, b Volume) int { return strings.Compare(a.ID, b.ID) })
	return out, nil
}

// Close unmounts what nobody holds. Volumes that sandboxes hold stay mounted,
// for the next Open.
func (s *Set) Close() error {
	s.mu.Lock()
	if s.mu.closed {
		s.mu.Unlock()
		return nil
	}
	s.mu.closed = true
	all := make([]*volume, 0, len(s.mu.volumes))
	for _, v := range s.mu.volumes {
		if v.idle != nil {
			v.idle.Stop()
		}
		all = append(all, v)
	}
	s.mu.Unlock()
	var errs []error
	for _, v := range all {
		if err := s.unmountIdle(context.Background(), v); err != nil {
			errs = append(errs, err)
		}
	}
	// Unlocked, not only closed: see lock.
	return errors.Join(append(errs, unix.Flock(int(s.lock.Fd()), unix.LOCK_UN), s.lock.Close())...)
}

// fail makes an error of the file system one of ours.
func fail(op string, err error) error {
	var e *sandbox.Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, &e):
		return sandbox.WithOp(op, err)
	case errors.Is(err, context.DeadlineExceeded):
		return sandbox.Errorf(sandbox.DeadlineReached, op, "%w", err)
	case errors.Is(err, context.Canceled):
		return sandbox.Errorf(sandbox.Canceled, op, "%w", err)
	case sandbox.NoSpace(err):
		return sandbox.Errorf(sandbox.DiskFull, op, "%w", err)
	}
	return sandbox.Errorf(sandbox.Unavailable, op, "%w", err)
}

// Supported says whether this host can have volumes, and if not, what to do.
func Supported() error {
	const op = "volume.supported"
	if os.Geteuid() != 0 {
		return sandbox.Errorf(sandbox.Unsupported, op, "volumes are mounted, which needs root").WithHint("run the server as root")
	}
	for _, name := range []string{"mkfs.ext4", "e2fsck", "resize2fs"} {
		if _, err := e2fs(name); err != nil {
			return sandbox.Errorf(sandbox.Unsupported, op, "volumes need e2fsprogs: %w", err).WithHint("apt-get install -y e2fsprogs")
		}
	}
	f, err := os.OpenFile("/dev/loop-control", os.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return sandbox.Errorf(sandbox.Unsupported, op, "volumes need loop devices: %w", err).
			WithHint("modprobe loop; in a container, give it /dev/loop-control, the loop devices and CAP_SYS_ADMIN")
	}
	f.Close()
	b, err := os.ReadFile("/proc/filesystems")
	if err != nil {
		return fail(op, err)
	}
	if !slices.Contains(strings.Fields(string(b)), "ext4") {
		return sandbox.Errorf(sandbox.Unsupported, op, "this kernel has no ext4, or has not loaded it").WithHint("modprobe ext4")
	}
	return nil
}
