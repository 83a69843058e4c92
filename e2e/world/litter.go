package world

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/cas"
	"github.com/cove-sandbox/cove/cas/local"
	"github.com/cove-sandbox/cove/egress/recording"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/snapshot"
	"github.com/cove-sandbox/cove/store"
	"github.com/cove-sandbox/cove/store/sqlite"
)

// memoryDir is where a server with keys keeps plain state.
func memoryDir(dir string) string {
	sum := sha256.Sum256([]byte(dir))
	return "/dev/shm/cove-" + hex.EncodeToString(sum[:8])
}

// MemoryDir is where this server keeps plain state if it has keys.
func (w *World) MemoryDir() string { return memoryDir(w.Dir) }

// AssertNoLitter demands that everything on the host and in the data directory
// belongs to something on record, and that what the record needs is there and
// whole. It reads the records themselves (database, journal, volume records)
// rather than ask the server, and restarts the server for it: as after a crash,
// so that what counts is what a start cleans up.
func (w *World) AssertNoLitter(t testing.TB) {
	t.Helper()
	if w.serverAlive() {
		w.Kill(t)
	}
	w.Start(t)
	w.Stop(t)
	a := audit{t: t, w: w}
	a.readRecords()
	a.state()
	a.kernels()
	a.networks()
	a.images()
	a.volumes()
	a.recordings()
	a.rest()
	if len(a.litter) > 0 {
		t.Errorf("nothing refers to, %d:\n  %s", len(a.litter), tail(strings.Join(a.litter, "\n  "), 4<<10))
	}
	w.Start(t)
}

// Blobs counts what is in the content store.
func (w *World) Blobs() (n int) {
	files, _ := filepath.Glob(filepath.Join(w.Dir, "state", "??", "*"))
	return len(files)
}

// audit compares a data directory whose server has ended with its records.
type audit struct {
	t      testing.TB
	w      *World
	litter []string

	roots    map[string]string // manifest → who needs it
	onRecord map[string]bool   // ids on record: images, volumes, recordings
	live     map[string]entry  // sandboxes in the journal that have not ended
}

// entry is the part of the journal's that an audit needs.
type entry struct {
	Sandbox sandbox.Sandbox `json:"sandbox"`
	Kernel  struct {
		ID string `json:"id"`
	} `json:"kernel"`
	End   *sandbox.End     `json:"end"`
	Cold  *sandbox.Content `json:"cold"`
	Needs []string         `json:"needs"`
}

func (a *audit) found(format string, args ...any) {
	a.litter = append(a.litter, fmt.Sprintf(format, args...))
}

func (a *audit) names(parts ...string) (names []string) {
	ents, err := os.ReadDir(filepath.Join(append([]string{a.w.Dir}, parts...)...))
	if err != nil && !os.IsNotExist(err) {
		a.t.Errorf("looking for litter: %v", err)
	}
	for _, e := range ents {
		names = append(names, e.Name())
	}
	return names
}

func (a *audit) readRecords() {
	a.t.Helper()
	ctx := store.Installation(context.Background())
	db, err := sqlite.Open(ctx, filepath.Join(a.w.Dir, "cove.db"))
	if err != nil {
		a.t.Fatal(err)
	}
	defer db.Close()
	a.roots, a.onRecord = map[string]string{}, map[string]bool{}
	manifests, err := db.Manifests(ctx)
	if err != nil {
		a.t.Fatal(err)
	}
	for _, m := range manifests {
		a.roots[m] = "a snapshot"
	}
	imgs, err := db.ListImages(ctx)
	if err != nil {
		a.t.Fatal(err)
	}
	used, err := db.SnapshotImages(ctx)
	if err != nil {
		a.t.Fatal(err)
	}
	vols, err := db.ListVolumes(ctx)
	if err != nil {
		a.t.Fatal(err)
	}
	for _, v := range vols {
		a.onRecord[v.ID] = v.State == sandbox.VolumeReady
	}
	recs, err := db.ListRecordings(ctx)
	if err != nil {
		a.t.Fatal(err)
	}
	for _, r := range recs {
		a.onRecord[r.ID] = r.State != sandbox.RecordingMaking && r.State != sandbox.RecordingDeleting
	}
	a.live = readJournal(a.t, filepath.Join(a.w.Dir, "node", "journal"))
	for id, e := range a.live {
		used = append(used, e.Sandbox.ImageID)
		for _, m := range e.Needs {
			a.roots[m] = "a mount in " + id
		}
		if e.Cold != nil {
			a.roots[e.Cold.Manifest] = "the memory of " + id
			for _, m := range e.Cold.Needs {
				a.roots[m] = "a mount in " + id
			}
		}
	}
	for _, img := range imgs {
		// A name is a reason to be there; without one it takes a user.
		a.onRecord[img.ID] = len(img.Names) > 0 || slices.Contains(used, img.ID)
	}
}

// readJournal folds a node's journal; its format is in node/journal.go.
func readJournal(t testing.TB, path string) map[string]entry {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	live := map[string]entry{}
	for rest := b[12:]; len(rest) >= 8; {
		n := int(binary.LittleEndian.Uint32(rest))
		if n == 0 || n > len(rest)-8 {
			break // being written
		}
		var r struct {
			Kind  string           `json:"k"`
			ID    string           `json:"id"`
			Entry *entry           `json:"entry"`
			Cold  *sandbox.Content `json:"cold"`
			Needs []string         `json:"needs"`

			Network *sandbox.Network `json:"network"`
		}
		if err := json.Unmarshal(rest[8:8+n], &r); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		rest = rest[8+n:]
		e, ok := live[r.ID]
		switch {
		case r.Kind == "created" && r.Entry.End == nil:
			live[r.ID] = *r.Entry
			continue
		case r.Kind == "ended" || r.Kind == "forgot":
			delete(live, r.ID)
			continue
		case r.Kind == "cold":
			e.Cold = r.Cold
		case r.Kind == "mounted":
			e.Needs = r.Needs
		case r.Kind == "network" && r.Network != nil:
			e.Sandbox.Spec.Network = *r.Network
		}
		if ok {
			live[r.ID] = e
		}
	}
	return live
}

// state is the content store: each blob is needed, and each needed is whole.
func (a *audit) state() {
	for _, n := range a.names("state", "tmp") {
		a.found("state/tmp/%s", n)
	}
	ctx := context.Background()
	st, err := local.Open(filepath.Join(a.w.Dir, "state"), local.Options{Keys: a.w.opts.Keys})
	if err != nil {
		a.t.Fatal(err)
	}
	defer st.Close()
	needed := map[cas.ID]bool{}
	for m, who := range a.roots {
		refs, err := snapshot.Refs(ctx, st, cas.ID(m))
		if err == nil {
			err = snapshot.Verify(ctx, st, cas.ID(m))
		}
		if err != nil {
			a.t.Errorf("the content of %s, %s, is not whole: %v", who, m, err)
		}
		for _, id := range refs {
			needed[id] = true
		}
	}
	err = st.List(ctx, func(i cas.Info) error {
		if !needed[i.ID] {
			a.found("blob %s (%d bytes)", i.ID, i.Stored)
		}
		return nil
	})
	if err != nil {
		a.t.Errorf("listing blobs: %v", err)
	}
	for _, n := range a.names("checkpoints") {
		a.found("checkpoints/%s", n)
	}
	if _, err := os.Stat(a.w.MemoryDir()); err == nil {
		a.found("%s", a.w.MemoryDir())
	}
	for _, n := range a.names("node", "mounts") {
		if a.roots["sha256:"+strings.TrimSuffix(n, ".erofs")] == "" {
			a.found("node/mounts/%s", n)
		}
	}
}

// kernels are only those of sandboxes that are awake or hot.
func (a *audit) kernels() {
	want := map[string]string{}
	for id, e := range a.live {
		if e.Cold == nil {
			want[e.Kernel.ID] = id
		}
	}
	running := a.w.Kernels()
	for k := range running {
		if want[k] == "" {
			a.found("kernel %s", k)
		}
	}
	for k, pid := range running {
		fds, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
		for _, fd := range fds {
			var st unix.Stat_t
			// A file without a name takes space all the same. The pages of the checkpoint
			// that a kernel came from are its memory, until it has written all of them.
			to, err := os.Readlink(fd)
			if name := filepath.Base(strings.TrimSuffix(to, " (deleted)")); name == "pages.img" || name == "pages_meta.img" {
				continue
			}
			if err == nil && strings.HasPrefix(to, a.w.Dir+"/checkpoints/") && unix.Stat(fd, &st) == nil && st.Blocks > 0 {
				a.found("%d bytes of %s, open in kernel %s", st.Blocks*512, to, k)
			}
		}
	}
	for k, id := range want {
		if running[k] == 0 {
			a.t.Errorf("sandbox %s is on record with kernel %s, which does not run", id, k)
		}
	}
	for _, g := range cgroupsOf(a.w.Dir) {
		if want[filepath.Base(g)] == "" {
			a.found("cgroup %s", g)
		}
	}
	for _, f := range kernelFiles(a.w.Dir) {
		if k := kernelOf(f); k != "" && want[k] == "" {
			a.found("%s", f)
		}
	}
}

func (a *audit) images() {
	for _, n := range a.names("images", "blobs", "sha256") {
		hex, _, _ := strings.Cut(n, ".")
		if !a.onRecord["sha256:"+hex] {
			a.found("images/blobs/sha256/%s", n)
		}
	}
	for _, dir := range []string{"tmp", "partial"} {
		for _, n := range a.names("images", dir) {
			a.found("images/%s/%s", dir, n)
		}
	}
}

// volumes are mounted only where a sandbox holds them.
func (a *audit) volumes() {
	held := map[string]bool{}
	for _, e := range a.live {
		for _, m := range e.Sandbox.Spec.Volumes {
			held[m.Volume] = true
		}
	}
	for _, n := range a.names("volumes", "tmp") {
		a.found("volumes/tmp/%s", n)
	}
	all := a.names("volumes", "v")
	for _, n := range all {
		twin := strings.TrimSuffix(n, ".img") + ".json"
		if id, ok := strings.CutSuffix(n, ".json"); ok {
			twin = id + ".img"
		}
		if !slices.Contains(all, twin) {
			a.found("volumes/v/%s", n)
		}
		if id, ok := strings.CutSuffix(n, ".img"); ok && !a.onRecord[id] {
			a.found("volumes/v/%s, which is not on record", n)
		}
	}
	for _, n := range a.names("volumes", "mnt") {
		if !held[n] {
			a.found("volumes/mnt/%s", n)
		}
	}
	h := HostNow(a.w.Dir)
	networks := filepath.Join(a.w.Dir, "networks") + "/"
	for _, l := range append(h.Loops, h.Mounts...) {
		if strings.Contains(l, networks) {
			continue // see networks
		}
		if !slices.ContainsFunc(slices.Collect(maps.Keys(held)), func(id string) bool { return strings.Contains(l, id) }) {
			a.found("mount or loop device %s", l)
		}
	}
}

// networks are namespaces of kernels that are there, each mounted on its file.
// A server that ended by itself took its spares along.
func (a *audit) networks() {
	kernels := map[string]bool{}
	for _, e := range a.live {
		kernels[e.Kernel.ID] = true
	}
	names := a.names("networks")
	for _, n := range names {
		if !kernels[n] {
			a.found("networks/%s", n)
		}
	}
	mounts := 0
	for _, m := range HostNow(a.w.Dir).Mounts {
		if strings.Contains(m, filepath.Join(a.w.Dir, "networks")+"/") {
			mounts++
		}
	}
	if mounts != len(names) {
		a.found("%d namespaces are mounted on %d files", mounts, len(names))
	}
}

// recordings are open only while a sandbox records, and replays are remembered
// only of sandboxes that do.
func (a *audit) recordings() {
	records, replays := map[string]bool{}, map[string]bool{}
	for id, e := range a.live {
		if r := e.Sandbox.Spec.Network.Record; r != nil {
			records[r.ID] = true
		}
		if r := e.Sandbox.Spec.Network.Replay; r != nil {
			replays[recording.ReplayOf(id, r.Recording)+".at"] = true
		}
	}
	for _, n := range a.names("recordings") {
		id, isRecording := strings.CutSuffix(n, ".tape")
		if !isRecording {
			if !replays[n] {
				a.found("recordings/%s", n)
			}
			continue
		}
		if !a.onRecord[id] {
			a.found("recordings/%s, which is not on record", n)
		}
		if err := a.rec(id, records[id]); err != nil {
			a.t.Errorf("recordings/%s: %v", n, err)
		}
	}
}

func (a *audit) rec(id string, open bool) error {
	f, err := os.Open(filepath.Join(a.w.Dir, "recordings", id+".tape"))
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	var sealer recording.Sealer
	if s := a.w.opts.Keys.Stream("recording " + id); s != nil {
		sealer = s
	}
	t, err := recording.Read(f, st.Size(), sealer)
	if err == nil && !t.Finished() && !open {
		a.found("recordings/%s.tape, which is open and nobody writes", id)
	}
	return err
}

// rest is what the other looks have no eye for: names at the top.
func (a *audit) rest() {
	known := []string{"key", "url", "cove.db", "cove.db-shm", "cove.db-wal", "images", "node", "gvisor", "state", "state.keys", "checkpoints", "volumes", "networks", "egress.key", "secrets.key", "gateway.key", "recordings"}
	for _, n := range a.names() {
		if !slices.Contains(known, n) {
			a.found("%s", n)
		}
	}
	for _, n := range a.names("node") {
		if !slices.Contains([]string{"journal", "lock", "mounts"}, n) {
			a.found("node/%s", n)
		}
	}
}

// KernelOf is the kernel that a sandbox is in now.
func (w *World) KernelOf(t testing.TB, id string) string {
	t.Helper()
	return readJournal(t, filepath.Join(w.Dir, "node", "journal"))[id].Kernel.ID
}

// BlobsOf are the ids of all blobs of a snapshot; the server must have ended.
func (w *World) BlobsOf(t testing.TB, id string) (blobs []string) {
	t.Helper()
	ctx := store.Installation(context.Background())
	db, err := sqlite.Open(ctx, filepath.Join(w.Dir, "cove.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	s, err := db.GetSnapshot(ctx, id)
	if err != nil {
		t.Fatal(err)
	}
	st, err := local.Open(filepath.Join(w.Dir, "state"), local.Options{Keys: w.opts.Keys})
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	refs, err := snapshot.Refs(ctx, st, cas.ID(s.Content.Manifest))
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range refs {
		blobs = append(blobs, string(r))
	}
	return blobs
}

// FlipByte breaks the stored form of a blob at a random place; back mends it.
func (w *World) FlipByte(t testing.TB, id string) (back func()) {
	t.Helper()
	hex := cas.ID(id).Hex()
	path := filepath.Join(w.Dir, "state", hex[:2], hex[2:])
	st, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	at := rand.Int64N(st.Size())
	t.Logf("byte %d of %d", at, st.Size())
	flip := func() {
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		var b [1]byte
		if _, err := f.ReadAt(b[:], at); err != nil {
			t.Fatal(err)
		}
		b[0] ^= 0x10
		if _, err := f.WriteAt(b[:], at); err != nil {
			t.Fatal(err)
		}
	}
	flip()
	return flip
}
