package server

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"maps"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/snapshot"
)

// fakeState is what a fakeNode knows of snapshots, standby and volumes; guarded
// by fakeNode.mu.
type fakeState struct {
	onSnapshot   func(ctx context.Context, r SnapshotRequest) error // before anything is made
	onMade       func()                                             // between the content and its record; with mu
	onPause      func()                                             // before anything is frozen
	onCommitted  func()                                             // between the record and the end of what is stopped; with mu
	onCreateFrom func(sb sandbox.Sandbox) error
	onRestore    func() error
	onPrepare    func(ctx context.Context) error
	onCollect    func(ctx context.Context) error

	frozen    map[string]fakeFrozen // by manifest, kept
	passing   map[string]fakeFrozen // by checkpoint, until Release
	ofImage   map[string]fakeFrozen // what a prepared image holds
	standby   map[string]sandbox.Standby
	cold      map[string]string // by sandbox, what it went to disk as
	mounted   map[string]string // sandbox+path → manifest
	corrupt   map[string]bool
	made      int
	prepares  int
	collects  int
	litter    bool
	released  []string // manifests that were let go
	volumeSet *fakeVolumes
	sealed    bool
}

// fakeFrozen is the inside of a sandbox at one moment.
type fakeFrozen struct {
	files map[string][]byte
	procs map[string]*fakeProc
	kind  sandbox.SnapshotKind
}

func newFakeState() fakeState {
	return fakeState{frozen: map[string]fakeFrozen{}, passing: map[string]fakeFrozen{}, ofImage: map[string]fakeFrozen{}, standby: map[string]sandbox.Standby{}, cold: map[string]string{},
		mounted: map[string]string{}, corrupt: map[string]bool{}, volumeSet: &fakeVolumes{vols: map[string]*fakeVolume{}}}
}

func (g *fakeGuest) freeze(kind sandbox.SnapshotKind) fakeFrozen {
	f := fakeFrozen{files: maps.Clone(g.files), procs: map[string]*fakeProc{}, kind: kind}
	if kind == sandbox.MemorySnapshot {
		for id, p := range g.procs {
			f.procs[id] = &fakeProc{spec: p.spec, events: slices.Clone(p.events), changed: make(chan struct{}), ended: p.ended, bytes: p.bytes}
		}
	}
	return f
}

// thaw is another sandbox with the same inside.
func (f fakeFrozen) thaw(sb sandbox.Sandbox) *fakeGuest {
	g := newFakeGuest(sb)
	old := fakeGuest{files: f.files, procs: f.procs}
	again := old.freeze(f.kind)
	g.files, g.procs = again.files, again.procs
	return g
}

func (n *fakeNode) guestOfLocked(sb sandbox.Sandbox, img sandbox.Image) *fakeGuest {
	if f, ok := n.ofImage[img.ID]; ok {
		return f.thaw(sb)
	}
	return newFakeGuest(sb)
}

func (n *fakeNode) Pause(ctx context.Context, id string, cold bool) error {
	if n.onPause != nil {
		n.onPause()
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	g, err := n.find(id)
	if err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if cold {
		g.mu.Lock()
		defer g.mu.Unlock()
		if n.standby[id] != sandbox.Cold {
			n.cold[id], _ = n.storeLocked(g, sandbox.MemorySnapshot)
		}
		n.standby[id] = sandbox.Cold
	} else if n.standby[id] == "" {
		n.standby[id] = sandbox.Hot
	}
	return nil
}

func (n *fakeNode) Resume(ctx context.Context, id string) (time.Duration, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if _, err := n.find(id); err != nil {
		return 0, err
	}
	delete(n.standby, id)
	return time.Millisecond, nil
}

func (n *fakeNode) Standby() map[string]sandbox.Standby {
	n.mu.Lock()
	defer n.mu.Unlock()
	return maps.Clone(n.standby)
}

func (n *fakeNode) Snapshot(ctx context.Context, id string, r SnapshotRequest) (c sandbox.Content, paused time.Duration, err error) {
	n.mu.Lock()
	_, err = n.find(id)
	n.mu.Unlock()
	if err != nil {
		return c, 0, err
	}
	r.Progress(sandbox.Progress{Step: "freeze"})
	if n.onSnapshot != nil {
		if err := n.onSnapshot(ctx, r); err != nil {
			return c, 0, err
		}
	}
	if err := ctx.Err(); err != nil {
		return c, 0, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	g, err := n.find(id)
	if err != nil {
		return c, 0, err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	c = sandbox.Content{Size: 1000, Build: "fake"}
	cold := r.Kind == sandbox.MemorySnapshot && n.standby[id] == sandbox.Cold
	if !cold {
		delete(n.standby, id)
	}
	if r.Kind != sandbox.DirectorySnapshot {
		c.Base = g.sb.ImageID
	}
	switch {
	case cold: // it is its own snapshot
		c.Manifest = n.cold[id]
	case r.Keep && g.clean != "" && r.Kind == sandbox.MemorySnapshot:
		c.Manifest, c.Same = g.clean, g.clean
	case r.Keep:
		c.Manifest, c.Stored = n.storeLocked(g, r.Kind)
		if r.Kind == sandbox.MemorySnapshot {
			g.clean = c.Manifest
		}
	default:
		n.made++
		c.Plain = fmt.Sprintf("c%d", n.made)
		n.passing[c.Plain] = g.freeze(r.Kind)
	}
	if n.onMade != nil {
		n.onMade()
	}
	if r.Stop && r.Commit != nil {
		if err := r.Commit(c); err != nil {
			n.litter = true
			return sandbox.Content{}, 0, err
		}
		if n.onCommitted != nil {
			n.onCommitted()
		}
	}
	if r.Stop {
		n.endLocked(g, sandbox.End{Cause: sandbox.KilledByUser, Detail: "stopped by a snapshot", At: time.Now().UTC()})
	}
	return c, 5 * time.Millisecond, nil
}

// storeLocked puts what is inside into the store and says what that added; with
// g.mu.
func (n *fakeNode) storeLocked(g *fakeGuest, kind sandbox.SnapshotKind) (manifest string, added int64) {
	n.made++
	manifest = fmt.Sprintf("m%d", n.made)
	before := n.takesLocked()
	n.frozen[manifest] = g.freeze(kind)
	return manifest, n.takesLocked() - before
}

// blobs of some content: its manifest, with the small files in it, and each
// file of 100 bytes and more.
func (f fakeFrozen) blobs(manifest string) []snapshot.Blob {
	out := []snapshot.Blob{{Sum: sha256.Sum256([]byte("manifest " + manifest)), Stored: 10}}
	for _, data := range f.files {
		if len(data) >= 100 {
			out = append(out, snapshot.Blob{Sum: sha256.Sum256(data), Stored: int64(len(data))})
		}
	}
	return out
}

func (n *fakeNode) takesLocked() int64 {
	var h snapshot.Holding
	for m, f := range n.frozen {
		h.Add(f.blobs(m))
	}
	return h.Bytes()
}

func (n *fakeNode) Blobs(ctx context.Context, manifests []string) (map[string][]snapshot.Blob, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	out := map[string][]snapshot.Blob{}
	for _, m := range manifests {
		if f, ok := n.frozen[m]; ok {
			out[m] = f.blobs(m)
		}
	}
	return out, nil
}

func (n *fakeNode) contentLocked(c sandbox.Content) (fakeFrozen, error) {
	f, ok := n.frozen[c.Manifest]
	if !ok {
		f, ok = n.passing[c.Plain]
	}
	if !ok || n.corrupt[c.Manifest] {
		return f, sandbox.Errorf(sandbox.Corrupt, "node", "content %s%s is not whole", c.Manifest, c.Plain)
	}
	return f, nil
}

func (n *fakeNode) CreateFrom(ctx context.Context, sb sandbox.Sandbox, img sandbox.Image, from sandbox.Snapshot) (time.Duration, error) {
	if n.onCreateFrom != nil {
		if err := n.onCreateFrom(sb); err != nil {
			return 0, err
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	f, err := n.contentLocked(from.Content)
	if err != nil {
		return 0, err
	}
	n.created++
	n.live[sb.ID] = f.thaw(sb)
	return time.Millisecond, nil
}

func (n *fakeNode) PrepareImage(ctx context.Context, from sandbox.Snapshot, base sandbox.Image, progress func(sandbox.Progress)) (sandbox.Image, error) {
	n.mu.Lock()
	n.prepares++
	n.mu.Unlock()
	if n.onPrepare != nil {
		if err := n.onPrepare(ctx); err != nil {
			return sandbox.Image{}, err
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	f, err := n.contentLocked(from.Content)
	if err != nil {
		return sandbox.Image{}, err
	}
	img := n.lib.derive(strings.TrimPrefix(base.ID, "sha256:") + "-" + from.Content.Manifest)
	n.ofImage[img.ID] = f
	return img, nil
}

func (n *fakeNode) Restore(ctx context.Context, id string, img sandbox.Image, from sandbox.Snapshot) (int64, time.Duration, error) {
	if n.onRestore != nil {
		if err := n.onRestore(); err != nil {
			return 0, 0, err
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	g, err := n.find(id)
	if err != nil {
		return 0, 0, err
	}
	f, err := n.contentLocked(from.Content)
	if err != nil {
		return 0, 0, err
	}
	sb := g.sb
	sb.Episode++
	sb.ImageID = img.ID
	if from.Kind == sandbox.MemorySnapshot {
		sb.Spec.Resources.Disk = from.Spec.Resources.Disk
	}
	n.live[id] = f.thaw(sb)
	close(g.dead)
	return sb.Episode, time.Millisecond, nil
}

func (n *fakeNode) Mount(ctx context.Context, id string, from sandbox.Snapshot, p string, unpack bool) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if _, err := n.find(id); err != nil {
		return err
	}
	n.mounted[id+p] = from.Content.Manifest
	return nil
}

func (n *fakeNode) Tar(ctx context.Context, c sandbox.Content, w io.Writer) error {
	n.mu.Lock()
	f, err := n.contentLocked(c)
	n.mu.Unlock()
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(w, "tar of %d files", len(f.files))
	return err
}

func (n *fakeNode) Release(ctx context.Context, c sandbox.Content) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.passing, c.Plain)
	n.released = append(n.released, c.Manifest)
	return nil
}

func (n *fakeNode) Verify(ctx context.Context, c sandbox.Content) (int64, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	_, err := n.contentLocked(c)
	return c.Size, err
}

func (n *fakeNode) Collect(ctx context.Context, keep []string) (freed int64, err error) {
	if n.onCollect != nil {
		if err := n.onCollect(ctx); err != nil {
			return 0, err
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.collects++
	before := n.takesLocked()
	n.litter = false
	for m := range n.frozen {
		asleep := false
		for id := range n.live {
			asleep = asleep || n.standby[id] == sandbox.Cold && n.cold[id] == m
		}
		if !asleep && !slices.Contains(keep, m) {
			delete(n.frozen, m)
		}
	}
	freed = before - n.takesLocked()
	for _, g := range n.live {
		g.mu.Lock()
		if _, ok := n.frozen[g.clean]; !ok {
			g.clean = ""
		}
		g.mu.Unlock()
	}
	return freed, nil
}

func (n *fakeNode) Volumes() VolumeSet {
	if n.volumeSet == nil {
		return nil
	}
	return n.volumeSet
}

// contents lists what is stored, sorted.
func (n *fakeNode) contents() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Sorted(maps.Keys(n.frozen))
}

func (n *fakeNode) passingCount() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.passing)
}

// fakeVolumes are volumes in memory, by name.
type fakeVolumes struct {
	mu     sync.Mutex
	vols   map[string]*fakeVolume
	onMade func(manifest string) // between a snapshot's content and its record
}

type fakeVolume struct {
	sandbox.Volume
	files map[string][]byte
}

func (s *fakeVolumes) find(name string) (*fakeVolume, error) {
	for _, v := range s.vols {
		if v.Name == name || v.ID == name {
			return v, nil
		}
	}
	return nil, sandbox.Errorf(sandbox.NotFound, "volume", "no volume %s", name)
}

func (s *fakeVolumes) Create(ctx context.Context, v sandbox.Volume) (sandbox.Volume, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, err := s.find(v.Name); err == nil {
		return v, sandbox.Errorf(sandbox.AlreadyExists, "", "there is a volume %s already", v.Name)
	}
	s.vols[v.Name] = &fakeVolume{v, map[string][]byte{}}
	return v, nil
}

func (s *fakeVolumes) Get(ctx context.Context, name string) (sandbox.Volume, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	v, err := s.find(name)
	if err != nil {
		return sandbox.Volume{}, err
	}
	return v.Volume, nil
}

func (s *fakeVolumes) List(ctx context.Context) (out []sandbox.Volume, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(s.vols)) {
		out = append(out, s.vols[name].Volume)
	}
	return out, nil
}

func (s *fakeVolumes) Delete(ctx context.Context, name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	v, err := s.find(name)
	if err == nil {
		delete(s.vols, v.Name)
	}
	return err
}

func (s *fakeVolumes) Resize(ctx context.Context, name string, size int64) (sandbox.Volume, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	v, err := s.find(name)
	if err != nil {
		return sandbox.Volume{}, err
	}
	v.Size = size
	return v.Volume, nil
}

func (s *fakeVolumes) CreateFrom(ctx context.Context, v sandbox.Volume, c sandbox.Content) (sandbox.Volume, error) {
	if _, err := s.Create(ctx, v); err != nil {
		return v, err
	}
	_, err := s.WriteFile(ctx, v.Name, "/from", strings.NewReader(c.Manifest), 0o644)
	return v, err
}

func (s *fakeVolumes) Snapshot(ctx context.Context, name string) (sandbox.Content, error) {
	v, err := s.find(name)
	if err != nil {
		return sandbox.Content{}, err
	}
	c := sandbox.Content{Manifest: "volume-" + v.Name, Size: 7, Stored: 3}
	if s.onMade != nil {
		s.onMade(c.Manifest)
	}
	return c, nil
}

func (s *fakeVolumes) Clone(ctx context.Context, name string, to sandbox.Volume) (sandbox.Volume, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	v, err := s.find(name)
	if err != nil {
		return to, err
	}
	s.vols[to.Name] = &fakeVolume{to, maps.Clone(v.files)}
	return to, nil
}

func (v *fakeVolume) info(p string) sandbox.FileInfo {
	return sandbox.FileInfo{Path: p, Name: path.Base(p), Type: sandbox.Regular, Size: int64(len(v.files[p])), Mode: 0o644}
}

func (s *fakeVolumes) ListFiles(ctx context.Context, name, p string, depth int) (out []sandbox.FileInfo, truncated bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	v, err := s.find(name)
	if err != nil {
		return nil, false, err
	}
	for _, f := range slices.Sorted(maps.Keys(v.files)) {
		out = append(out, v.info(f))
	}
	return out, false, nil
}

func (s *fakeVolumes) file(name, p string) (*fakeVolume, error) {
	v, err := s.find(name)
	if err != nil {
		return nil, err
	}
	if _, ok := v.files[p]; !ok {
		return nil, sandbox.Errorf(sandbox.NotFound, "", "no file %s", p)
	}
	return v, nil
}

func (s *fakeVolumes) ReadFile(ctx context.Context, name, p string) (io.ReadCloser, sandbox.FileInfo, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	v, err := s.file(name, p)
	if err != nil {
		return nil, sandbox.FileInfo{}, err
	}
	return io.NopCloser(bytes.NewReader(v.files[p])), v.info(p), nil
}

func (s *fakeVolumes) WriteFile(ctx context.Context, name, p string, r io.Reader, mode uint32) (sandbox.FileInfo, error) {
	data, err := io.ReadAll(r)
	if err != nil {
		return sandbox.FileInfo{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	v, err := s.find(name)
	if err != nil {
		return sandbox.FileInfo{}, err
	}
	v.files[p] = data
	return v.info(p), nil
}

func (s *fakeVolumes) RemoveFile(ctx context.Context, name, p string, recursive bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	v, err := s.file(name, p)
	if err == nil {
		delete(v.files, p)
	}
	return err
}

func (n *fakeNode) Litter() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.litter
}

func (n *fakeNode) Sealed() bool { return n.sealed }
