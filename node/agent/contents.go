package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

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
	// checkpoint eight times, and who falls asleep often wakes soon: from what is
	// kept in the same time however large it is. Default 4 GiB, negative none.
	KeepPlain int64
	// ColdAfter is how long a sandbox that was paused for being idle stays hot;
	// default one minute, negative for ever.
	ColdAfter time.Duration
}

const (
	defaultKeepPlain = 4 << 30
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

	// removal is held for the removal of one blob, and for the beginning of a
	// pack: apart from mu, so that a restore does not wait for the disk. Taken
	// before mu.
	removal sync.Mutex

	extending sync.Mutex // held while a file of pages is continued; before mu

	mu struct {
		sync.Mutex
		plain   map[string]*plainDir // by manifest, or by name if it is not in the store
		files   map[string]*os.File  // tars that are not kept, by name
		pending map[cas.ID]time.Time // made here and not in any keep list yet
		packs   map[*pack]bool       // on their way into the store
		sweeps  map[*sweep]bool      // collections under way
		buildOf map[string]madeWith  // by manifest, as far as it was read; zero of files
		blobsOf map[string][]snapshot.Blob
		blobs   int // of blobsOf, in all

		removing []string // directories that unlock removes
	}
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
	stamp string // of its files; see stampOf
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
	c := &contents{cfg: cfg, next: newKernelID}
	c.mu.plain, c.mu.pending = map[string]*plainDir{}, map[cas.ID]time.Time{}
	c.mu.files = map[string]*os.File{}
	c.mu.packs, c.mu.sweeps = map[*pack]bool{}, map[*sweep]bool{}
	c.mu.buildOf, c.mu.blobsOf = map[string]madeWith{}, map[string][]snapshot.Blob{}
	return c, nil
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

// filesFor is how long a tar that is not kept waits for a Release that may have been
// lost with its caller: longer than any setup of a grade.
const filesFor = 15 * time.Minute

// offerFiles keeps a spool as content until it is dropped.
func (c *contents) offerFiles(f *os.File, base string) sandbox.Content {
	as := sandbox.Content{Plain: "files-" + c.next(), Base: base, Size: fileSize(f)}
	c.mu.Lock()
	c.mu.files[as.Plain] = f
	c.mu.Unlock()
	time.AfterFunc(filesFor, func() { c.drop(as.Plain) })
	return as
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
func (c *contents) store(ctx context.Context, dir string, cp runtime.Checkpoint, since *snapshot.Since) (sandbox.Content, error) {
	return c.pack(sandbox.Content{Build: cp.Build}, func() (snapshot.Manifest, error) {
		return snapshot.Memory{}.PackSince(ctx, c.cfg.Store, dir, append(slices.Clone(cp.Files), checkpointFile), since)
	})
}

// pack has f put content into the store beside any collection and returns the
// record of it.
func (c *contents) pack(as sandbox.Content, f func() (snapshot.Manifest, error)) (sandbox.Content, error) {
	p := c.beginPack()
	m, err := f()
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.mu.packs, p)
	if err != nil {
		return sandbox.Content{}, err
	}
	c.mu.pending[m.ID] = time.Now() // in one step with the end of the pack: a collection sees one or the other
	as.Manifest, as.Size, as.Stored = string(m.ID), m.Size, m.Stored
	return as, nil
}

// beginPack makes a pack known to the collections under way. None of them is
// amid the removal of a blob then.
func (c *contents) beginPack() *pack {
	c.removal.Lock()
	defer c.removal.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	p := &pack{began: time.Now()}
	c.mu.packs[p] = true
	for s := range c.mu.sweeps {
		s.spareLocked(p)
	}
	return p
}

// hold makes content that is there anew pending: somebody is about to name it.
func (c *contents) hold(id cas.ID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.pending[id] = time.Now()
}

// unhold is the end of hold. Who else is about to name the same content keeps
// collections away until then: see server.contentBook.
func (c *contents) unhold(id cas.ID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.mu.pending, id)
}

// holdIfStored holds content if it is there still. While a collection may be removing
// it nobody can say, and it is not. It is held before it is looked for: a
// collection that begins in between keeps it.
func (c *contents) holdIfStored(ctx context.Context, id cas.ID) bool {
	c.mu.Lock()
	if len(c.mu.sweeps) > 0 {
		c.mu.Unlock()
		return false
	}
	was, held := c.mu.pending[id]
	now := time.Now()
	c.mu.pending[id] = now
	c.mu.Unlock()
	_, err := c.cfg.Store.Stat(ctx, id)
	if err == nil {
		return true
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.pending[id].Equal(now) { // nobody else holds it since
		delete(c.mu.pending, id)
		if held {
			c.mu.pending[id] = was
		}
	}
	return false
}

// offer keeps a directory for the next restore of its content. name is its
// manifest, or that of a fork, which holds it until drop.
func (c *contents) offer(name, dir string, cp runtime.Checkpoint, held bool) {
	d := &plainDir{path: dir, ready: make(chan struct{}), cp: cp, size: sizeOf(dir), stamp: stampOf(dir), used: time.Now()}
	if held {
		d.refs = 1
	}
	close(d.ready)
	keep := c.keepPlain()
	c.mu.Lock()
	defer c.unlock()
	if c.mu.plain[name] != nil {
		d.gone = true
		c.removeLocked(d)
		return
	}
	c.mu.plain[name] = d
	c.trimLocked(keep)
}

// use gives a directory to restore from, read and verified from the store
// unless it is there as it was made.
func (c *contents) use(ctx context.Context, from sandbox.Content) (dir string, cp runtime.Checkpoint, release func(), err error) {
	d, name, release, err := c.borrowPlain(ctx, from)
	if err == nil && c.changed(d) {
		c.mu.Lock()
		if c.mu.plain[name] == d {
			delete(c.mu.plain, name)
			d.gone = true
		}
		c.mu.Unlock()
		release()
		if from.Manifest == "" {
			return "", cp, nil, sandbox.Errorf(sandbox.Corrupt, "node.restore", "the state of this fork was changed on its disk").WithHint("fork again")
		}
		d, _, release, err = c.borrowPlain(ctx, from)
	}
	if err != nil {
		return "", cp, nil, err
	}
	return d.path, d.cp, release, nil
}

// borrowPlain is use, without a look at whether the files are as they were.
func (c *contents) borrowPlain(ctx context.Context, from sandbox.Content) (d *plainDir, name string, release func(), err error) {
	name = from.Manifest
	if name == "" {
		name = from.Plain
	}
	c.mu.Lock()
	d = c.mu.plain[name]
	fill := d == nil
	if fill {
		if from.Manifest == "" {
			c.mu.Unlock()
			return nil, "", nil, sandbox.Errorf(sandbox.NotFound, "node.restore", "the state of this fork is gone").WithHint("fork again")
		}
		d = &plainDir{ready: make(chan struct{})}
		c.mu.plain[name] = d
	}
	d.refs++
	c.mu.Unlock()
	release = sync.OnceFunc(func() {
		keep := c.keepPlain()
		c.mu.Lock()
		defer c.unlock()
		d.refs--
		d.used = time.Now()
		c.removeLocked(d)
		c.trimLocked(keep)
	})
	if fill {
		d.path, d.cp, d.err = c.load(ctx, cas.ID(from.Manifest))
		if d.err == nil {
			d.size, d.stamp = sizeOf(d.path), stampOf(d.path)
		} else {
			c.mu.Lock()
			delete(c.mu.plain, name)
			d.gone = true
			c.mu.Unlock()
		}
		close(d.ready)
	}
	select {
	case <-d.ready:
	case <-ctx.Done():
		release()
		return nil, "", nil, contextError("node.restore", ctx)
	}
	if d.err != nil {
		release()
		return nil, "", nil, d.err
	}
	return d, name, release, nil
}

// changed says whether somebody has written to the files of d: what is restored from them is
// not compared with the store again, and a child has its memory there for as long as it lives.
func (c *contents) changed(d *plainDir) bool {
	if stampOf(d.path) == d.stamp {
		return false
	}
	c.extending.Lock() // it may be the node itself, amid it
	defer c.extending.Unlock()
	return stampOf(d.path) != d.stamp
}

// stampOf changes when somebody writes a file of dir. The node continues pages: it
// puts the time back, and their size is not looked at.
func stampOf(dir string) string {
	ents, err := os.ReadDir(dir)
	if err != nil {
		return err.Error()
	}
	var b strings.Builder
	for _, e := range ents {
		st, err := e.Info()
		if err != nil {
			return err.Error()
		}
		fmt.Fprint(&b, st.Name(), " ", st.ModTime().UnixNano())
		if st.Name() != runtime.PagesFile {
			fmt.Fprint(&b, " ", st.Size())
		}
		b.WriteByte('\n')
	}
	return b.String()
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

// drop lets go of a fork's directory.
func (c *contents) drop(name string) {
	c.mu.Lock()
	defer c.unlock()
	if f := c.mu.files[name]; f != nil {
		delete(c.mu.files, name)
		f.Close()
	}
	if d := c.mu.plain[name]; d != nil {
		delete(c.mu.plain, name)
		d.gone = true
		d.refs--
		c.removeLocked(d)
	}
}

// trimLocked removes the directories used longest ago until those that nobody
// uses are at most keep bytes.
func (c *contents) trimLocked(keep int64) {
	total := int64(0)
	var idle []string
	for name, d := range c.mu.plain {
		if d.refs == 0 {
			total += d.size
			idle = append(idle, name)
		}
	}
	slices.SortFunc(idle, func(a, b string) int { return c.mu.plain[a].used.Compare(c.mu.plain[b].used) })
	for _, name := range idle {
		if total <= keep {
			return
		}
		d := c.mu.plain[name]
		total -= d.size
		delete(c.mu.plain, name)
		d.gone = true
		c.removeLocked(d)
	}
}

// keepPlain is how many bytes may be kept now of what is only there to be quick.
func (c *contents) keepPlain() int64 { return keepPlain(c.cfg.KeepPlain, freeOn(c.cfg.Plain)) }

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
		c.mu.removing = append(c.mu.removing, d.path)
	}
}

// unlock lets mu go and then removes what removeLocked named. Done under mu, the
// disk's time was everybody's who packs or restores.
func (c *contents) unlock() {
	paths := c.mu.removing
	c.mu.removing = nil
	c.mu.Unlock()
	for _, p := range paths {
		_ = os.RemoveAll(p) // at the latest the next Open does
	}
}

// tar writes a filesystem or directory snapshot.
func (c *contents) tar(ctx context.Context, from sandbox.Content, w io.Writer) error {
	if from.Plain != "" {
		c.mu.Lock()
		f := c.mu.files[from.Plain]
		c.mu.Unlock()
		if f == nil {
			return sandbox.Errorf(sandbox.NotFound, "", "%s is not here any more", from.Plain)
		}
		_, err := io.Copy(w, io.NewSectionReader(f, 0, from.Size))
		return err
	}
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
	if sandbox.NoSpace(err) {
		return sandbox.Errorf(sandbox.DiskFull, "node.state", "%w", err).WithHint(diskHint)
	}
	return fmt.Errorf("node state: %w", err)
}
