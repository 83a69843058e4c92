package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"
	"unique"

	"github.com/cove-sandbox/cove/cas"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/snapshot"
)

// StateConfig is where a node keeps the state of sandboxes outside of kernels.
type StateConfig struct {
	Store cas.Store
	// Plain is a directory for checkpoints in the form a driver restores from.
	// It is emptied at Open. Where Store encrypts it must be in memory.
	Plain string
	// Sealed says that Store encrypts. What is made of its content for kernels
	// to read then goes as soon as none does.
	Sealed bool
	// KeepPlain bytes of them, and at most a quarter of what is free on the
	// disk, are kept for the next restore of the same: a fork of eight reads one
	// checkpoint eight times, and who falls asleep often wakes soon. Default
	// 1 GiB, negative none.
	KeepPlain int64
	// ColdAfter is how long a sandbox that was paused for being idle stays hot;
	// default one minute, negative for ever.
	ColdAfter time.Duration
}

const (
	defaultKeepPlain = 1 << 30
	defaultColdAfter = time.Minute
	// checkpointFile describes the other files of a checkpoint. It is stored
	// with them, because the guest's key is in it.
	checkpointFile = "checkpoint.json"
	// pendingFor is how long content that no keep list has named yet is kept: a
	// server that made it records it within seconds.
	pendingFor = 10 * time.Minute
)

// contents holds the state of sandboxes outside of kernels: in the store, and
// as plain directories while a driver reads them. Safe for concurrent use.
type contents struct {
	cfg  StateConfig
	next func() string // names

	mu      sync.Mutex
	plain   map[string]*plainDir // by manifest, or by name if it is not in the store
	pending map[cas.ID]time.Time // made here and not in any keep list yet
	packs   map[*pack]bool       // on their way into the store
	sweeps  map[*sweep]bool      // collections under way
	buildOf map[string]string    // by manifest, as far as it was read; "" of files
	blobsOf map[string][]snapshot.Blob
	blobs   int // of blobsOf, in all

	removing []string // directories that unlock removes
}

// mostBlobs are remembered: 40 bytes each, one per 4 MiB of memory.
const mostBlobs = 1 << 20

// pack is content on its way into the store; no list of roots can name it.
type pack struct{ began time.Time }

// plainDir is a checkpoint as a driver wants it.
type plainDir struct {
	path  string
	ready chan struct{} // closed when the rest is set
	cp    runtime.Checkpoint
	size  int64
	err   error

	// Guarded by contents.mu.
	refs int
	used time.Time
	gone bool // out of the map: the last user removes it
}

func openContents(cfg StateConfig) (*contents, error) {
	if cfg.KeepPlain == 0 {
		cfg.KeepPlain = defaultKeepPlain
	}
	if cfg.ColdAfter == 0 {
		cfg.ColdAfter = defaultColdAfter
	}
	// The content, not the directory: it may be a mount.
	if err := os.MkdirAll(cfg.Plain, 0o700); err != nil {
		return nil, err
	}
	ents, err := os.ReadDir(cfg.Plain)
	if err != nil {
		return nil, err
	}
	for _, e := range ents {
		if err := os.RemoveAll(filepath.Join(cfg.Plain, e.Name())); err != nil {
			return nil, err
		}
	}
	return &contents{cfg: cfg, next: newKernelID, plain: map[string]*plainDir{}, pending: map[cas.ID]time.Time{},
		packs: map[*pack]bool{}, sweeps: map[*sweep]bool{}, buildOf: map[string]string{}, blobsOf: map[string][]snapshot.Blob{}}, nil
}

// scratch is a new empty directory; undo removes it.
func (c *contents) scratch() (path string, undo func(), err error) {
	path = filepath.Join(c.cfg.Plain, c.next())
	if err := os.Mkdir(path, 0o700); err != nil {
		return "", nil, asDiskError(err)
	}
	return path, func() { _ = os.RemoveAll(path) }, nil
}

// spool is a file without a name.
func (c *contents) spool() (*os.File, error) {
	f, err := os.CreateTemp(c.cfg.Plain, "spool-")
	if err != nil {
		return nil, asDiskError(err)
	}
	if err := os.Remove(f.Name()); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// describe puts the description of a checkpoint beside its files.
func describe(dir string, cp runtime.Checkpoint) error {
	b, err := json.Marshal(cp)
	if err != nil {
		return err
	}
	return asDiskError(os.WriteFile(filepath.Join(dir, checkpointFile), b, 0o600))
}

// store puts a checkpoint into the store, durably.
func (c *contents) store(ctx context.Context, dir string, cp runtime.Checkpoint) (sandbox.Content, error) {
	return c.pack(sandbox.Content{Build: cp.Build}, func() (snapshot.Manifest, error) {
		return snapshot.Memory{}.PackDir(ctx, c.cfg.Store, dir, append(slices.Clone(cp.Files), checkpointFile))
	})
}

// pack has f put content into the store beside any collection and returns the
// record of it.
func (c *contents) pack(as sandbox.Content, f func() (snapshot.Manifest, error)) (sandbox.Content, error) {
	p := &pack{began: time.Now()}
	c.mu.Lock()
	c.packs[p] = true
	for s := range c.sweeps {
		s.spareLocked(p)
	}
	c.mu.Unlock()
	m, err := f()
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.packs, p)
	if err != nil {
		return sandbox.Content{}, err
	}
	c.pending[m.ID] = time.Now() // in one step with the end of the pack: a collection sees one or the other
	as.Manifest, as.Size, as.Stored = string(m.ID), m.Size, m.Stored
	return as, nil
}

// hold makes content that is there anew pending: somebody is about to name it.
func (c *contents) hold(id cas.ID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pending[id] = time.Now()
}

// unhold is the end of hold. Who else is about to name the same content keeps
// collections away until then: see server.contentBook.
func (c *contents) unhold(id cas.ID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.pending, id)
}

// again holds content if it is there still. While a collection may be removing
// it nobody can say, and it is not.
func (c *contents) again(ctx context.Context, id cas.ID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.sweeps) > 0 {
		return false
	}
	if _, err := c.cfg.Store.Stat(ctx, id); err != nil {
		return false
	}
	c.pending[id] = time.Now()
	return true
}

// offer keeps a directory for the next restore of its content. name is its
// manifest, or that of a fork, which holds it until drop.
func (c *contents) offer(name, dir string, cp runtime.Checkpoint, held bool) {
	d := &plainDir{path: dir, ready: make(chan struct{}), cp: cp, size: sizeOf(dir), used: time.Now()}
	if held {
		d.refs = 1
	}
	close(d.ready)
	c.mu.Lock()
	defer c.unlock()
	if c.plain[name] != nil {
		d.gone = true
		c.removeLocked(d)
		return
	}
	c.plain[name] = d
	c.trimLocked()
}

// use gives a directory to restore from, read and verified from the store
// unless it is there.
func (c *contents) use(ctx context.Context, from sandbox.Content) (dir string, cp runtime.Checkpoint, release func(), err error) {
	name := from.Manifest
	if name == "" {
		name = from.Plain
	}
	c.mu.Lock()
	d := c.plain[name]
	fill := d == nil
	if fill {
		if from.Manifest == "" {
			c.mu.Unlock()
			return "", cp, nil, sandbox.Errorf(sandbox.NotFound, "node.restore", "the state of this fork is gone").WithHint("fork again")
		}
		d = &plainDir{ready: make(chan struct{})}
		c.plain[name] = d
	}
	d.refs++
	c.mu.Unlock()
	release = sync.OnceFunc(func() {
		c.mu.Lock()
		defer c.unlock()
		d.refs--
		d.used = time.Now()
		c.removeLocked(d)
		c.trimLocked()
	})
	if fill {
		d.path, d.cp, d.err = c.load(ctx, cas.ID(from.Manifest))
		if d.err == nil {
			d.size = sizeOf(d.path)
		} else {
			c.mu.Lock()
			delete(c.plain, name)
			d.gone = true
			c.mu.Unlock()
		}
		close(d.ready)
	}
	select {
	case <-d.ready:
	case <-ctx.Done():
		release()
		return "", cp, nil, contextError("node.restore", ctx)
	}
	if d.err != nil {
		release()
		return "", cp, nil, d.err
	}
	return d.path, d.cp, release, nil
}

func (c *contents) load(ctx context.Context, id cas.ID) (dir string, cp runtime.Checkpoint, err error) {
	dir, undo, err := c.scratch()
	if err != nil {
		return "", cp, err
	}
	defer func() {
		if err != nil {
			undo()
		}
	}()
	if err := (snapshot.Memory{}).UnpackDir(ctx, c.cfg.Store, id, dir); err != nil {
		return "", cp, err
	}
	b, err := os.ReadFile(filepath.Join(dir, checkpointFile))
	if err == nil {
		err = json.Unmarshal(b, &cp)
	}
	if err != nil {
		return "", cp, sandbox.Errorf(sandbox.Corrupt, "node.restore", "%s is not a memory snapshot: %w", id, err)
	}
	return dir, cp, nil
}

// builds lists what the checkpoints among kept, and those at hand, were made
// with. What it has read it remembers: with programs of an earlier build there,
// every collection asks.
func (c *contents) builds(ctx context.Context, kept map[string]bool) ([]string, error) {
	found := map[string]bool{}
	c.mu.Lock()
	known := maps.Clone(c.buildOf)
	c.mu.Unlock()
	for id := range kept {
		if build, ok := known[id]; ok {
			found[build] = true
			continue
		}
		var cp runtime.Checkpoint
		b, err := snapshot.Memory{}.ReadFile(ctx, c.cfg.Store, cas.ID(id), checkpointFile)
		switch {
		case err == nil:
			err = json.Unmarshal(b, &cp)
		case errors.Is(err, sandbox.ErrNotFound): // of files
			err = nil
		}
		if err != nil {
			return nil, err
		}
		known[id] = unique.Make(cp.Build).Value() // a kilobyte each, and mostly the same
		found[cp.Build] = true
	}
	maps.DeleteFunc(known, func(id, _ string) bool { return !kept[id] })
	c.mu.Lock()
	defer c.mu.Unlock()
	c.buildOf = known
	for _, d := range c.plain {
		select {
		case <-d.ready:
			found[d.cp.Build] = true
		default: // in the store, and so among kept
		}
	}
	return slices.Collect(maps.Keys(found)), nil
}

// inBlobs says what content is in. It never changes, so what was read is
// remembered: a tenant with a quota has all of its own asked for with every
// snapshot.
func (c *contents) inBlobs(ctx context.Context, manifest string) ([]snapshot.Blob, error) {
	c.mu.Lock()
	known, ok := c.blobsOf[manifest]
	c.mu.Unlock()
	if ok {
		return known, nil
	}
	id, err := cas.ParseID(manifest)
	if err != nil {
		return nil, err
	}
	found, whole, err := snapshot.Blobs(ctx, c.cfg.Store, id)
	if err != nil || !whole {
		return found, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.blobs+len(found) > mostBlobs {
		clear(c.blobsOf)
		c.blobs = 0
	}
	if _, ok := c.blobsOf[manifest]; !ok {
		c.blobsOf[manifest] = found
		c.blobs += len(found)
	}
	return found, nil
}

// forgetBlobsLocked forgets what content was in that is gone.
func (c *contents) forgetBlobsLocked(kept map[cas.ID]bool) {
	for m, blobs := range c.blobsOf {
		if !kept[cas.ID(m)] {
			delete(c.blobsOf, m)
			c.blobs -= len(blobs)
		}
	}
}

// drop lets go of a fork's directory.
func (c *contents) drop(name string) {
	c.mu.Lock()
	defer c.unlock()
	if d := c.plain[name]; d != nil {
		delete(c.plain, name)
		d.gone = true
		d.refs--
		c.removeLocked(d)
	}
}

// trimLocked removes the directories used longest ago until they fit.
func (c *contents) trimLocked() {
	total := int64(0)
	var idle []string
	for name, d := range c.plain {
		if d.refs == 0 {
			total += d.size
			idle = append(idle, name)
		}
	}
	slices.SortFunc(idle, func(a, b string) int { return c.plain[a].used.Compare(c.plain[b].used) })
	keep := keepPlain(c.cfg.KeepPlain, freeOn(c.cfg.Plain))
	for _, name := range idle {
		if total <= keep {
			return
		}
		d := c.plain[name]
		total -= d.size
		delete(c.plain, name)
		d.gone = true
		c.removeLocked(d)
	}
}

// keepPlain is how many bytes may be kept of what is only there to be quick.
func keepPlain(limit, free int64) int64 { return max(min(limit, free/4), 0) }

// freeOn is what a disk can still take; nothing where it does not say.
func freeOn(dir string) int64 {
	var st syscall.Statfs_t
	if err := syscall.Statfs(dir, &st); err != nil {
		return 0
	}
	return int64(st.Bavail) * st.Bsize
}

// removeLocked has unlock remove a directory that nobody uses any more.
func (c *contents) removeLocked(d *plainDir) {
	if d.gone && d.refs == 0 && d.path != "" {
		c.removing = append(c.removing, d.path)
	}
}

// unlock lets mu go and then removes what removeLocked named. Done under mu, the
// disk's time was everybody's who packs or restores.
func (c *contents) unlock() {
	paths := c.removing
	c.removing = nil
	c.mu.Unlock()
	for _, p := range paths {
		_ = os.RemoveAll(p) // at the latest the next Open does
	}
}

// collect removes what neither keep nor pending content needs, and says what
// it kept.
func (c *contents) collect(ctx context.Context, keep []string) (freed int64, kept map[string]bool, err error) {
	roots := map[cas.ID]bool{}
	kept = map[string]bool{}
	for _, k := range keep {
		id, err := cas.ParseID(k)
		if err != nil {
			return 0, nil, err
		}
		roots[id] = true
	}
	now := time.Now()
	s := &sweep{Store: c.cfg.Store, c: c}
	c.mu.Lock()
	for p := range c.packs {
		s.spareLocked(p)
	}
	c.sweeps[s] = true
	for id, at := range c.pending {
		switch {
		case roots[id] || now.Sub(at) > pendingFor:
			delete(c.pending, id)
		default:
			roots[id] = true
		}
	}
	for name, d := range c.plain {
		if id := cas.ID(name); !roots[id] && d.refs == 0 {
			delete(c.plain, name)
			d.gone = true
			c.removeLocked(d)
		}
	}
	c.unlock()
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.sweeps, s)
		c.forgetBlobsLocked(roots)
	}()
	removed, err := snapshot.Collector{Grace: -1}.Collect(ctx, s, slices.Sorted(maps.Keys(roots)), false)
	for _, b := range removed {
		freed += b.Stored
	}
	for id := range roots {
		kept[string(id)] = true
	}
	return freed, kept, err
}

// sweep is the store as one collection sees it. What a pack stored, or found
// there and relies on, since the roots were listed is in none of them; the store
// spares it only until the pack's batch ends. A sweep therefore spares all that
// is as young as the oldest pack it ran beside. A lock that keeps the two apart
// was rejected: a collection reads every manifest.
type sweep struct {
	cas.Store
	c *contents

	oldest time.Time // beginning of a pack; guarded by c.mu
}

// tick is how far the time of a file may lie before the clock's, on file systems
// that count whole seconds.
const tick = 2 * time.Second

func (s *sweep) spareLocked(p *pack) {
	if s.oldest.IsZero() || p.began.Before(s.oldest) {
		s.oldest = p.began
	}
}

// Sweep is one step with the beginning of a pack: that finds the blob gone, or
// is spared.
func (s *sweep) Sweep(ctx context.Context, id cas.ID, before time.Time) (bool, error) {
	sw, ok := s.Store.(cas.Sweeper)
	if !ok {
		return false, sandbox.Errorf(sandbox.Unsupported, "node.collect", "the store cannot sweep")
	}
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	if young := s.oldest.Add(-tick); !s.oldest.IsZero() && young.Before(before) {
		before = young
	}
	return sw.Sweep(ctx, id, before)
}

// tar writes a filesystem or directory snapshot.
func (c *contents) tar(ctx context.Context, from sandbox.Content, w io.Writer) error {
	return snapshot.Filesystem{SpoolDir: c.cfg.Plain}.Unpack(ctx, c.cfg.Store, cas.ID(from.Manifest), w)
}

// piped gives the tar of content to f.
func (c *contents) piped(ctx context.Context, from sandbox.Content, f func(io.Reader) error) error {
	pr, pw := io.Pipe()
	read := make(chan error, 1)
	go func() {
		err := c.tar(ctx, from, pw)
		pw.CloseWithError(err)
		read <- err
	}()
	err := f(pr)
	pr.CloseWithError(errStopped)
	if rerr := <-read; rerr != nil && err != nil && !errors.Is(rerr, errStopped) {
		return rerr // why it could not be read is why f failed
	}
	return err
}

// errStopped is what the writer of a pipe meets whose reader needs no more.
var errStopped = errors.New("the reader has stopped")

func sizeOf(dir string) (n int64) {
	ents, _ := os.ReadDir(dir)
	for _, e := range ents {
		if fi, err := e.Info(); err == nil {
			n += fi.Size()
		}
	}
	return n
}

const diskHint = "free disk space on the host; the sandbox goes on"

// hintDisk adds the way out of a full disk where a driver named none.
func hintDisk(err error) error {
	var e *sandbox.Error
	if errors.As(err, &e) && e.Class == sandbox.DiskFull && e.Hint == "" {
		return e.WithHint(diskHint)
	}
	return err
}

// asDiskError gives a full disk its class.
func asDiskError(err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return sandbox.Errorf(sandbox.DiskFull, "node.state", "%w", err).WithHint(diskHint)
	}
	return fmt.Errorf("node state: %w", err)
}
