package server

import (
	"context"
	"errors"
	"io"
	"iter"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/cas"
	guestwire "github.com/cove-sandbox/cove/guest/wire"
	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/node/agent"
	"github.com/cove-sandbox/cove/node/agent/agenttest"
	"github.com/cove-sandbox/cove/node/nodetest"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/snapshot"
	"github.com/cove-sandbox/cove/volume"
)

// The double is a node: it keeps all of the contract.
func TestDoubleKeepsTheContract(t *testing.T) {
	nodetest.Run(t, func(t *testing.T) nodetest.World {
		n := newDouble(t)
		n.anyPort = false
		w := nodetest.World{Node: n, Image: agenttest.Image, Remote: "reg/tiny"}
		w.Loopback()
		return w
	})
}

// Commands that run until they are ended, listen on port 8080, and fail.
const (
	sleeping = "echo sleeping; exec sleep 1000"
	serving  = "echo '   0: 00000000:1F90 00000000:0000 0A 0' >> proc/1/net/tcp; echo serving; exec sleep 1000"
	crashing = "echo no port free; exit 3"
)

// double is the node of these tests: a real agent over the fake driver, of which a
// test can fail, hold and watch calls.
type double struct {
	*agenttest.Machine
	dir string
	lib *library

	// Each comes before the agent is asked, and its error instead. They are set
	// before the call they are for.
	onCreate     func(context.Context, sandbox.Sandbox) error
	onCreateFrom func(sandbox.Sandbox) error
	onReset      func() error
	onRestore    func() error
	onPause      func()
	onSnapshot   func(context.Context, node.SnapshotRequest) error
	onPrepare    func(context.Context) error // of an image
	onCollect    func(context.Context) error
	onListen     func(port int) error
	onUpload     func(context.Context, node.Upload) error
	onDownload   func(node.Download) error
	onVolume     func(op string) error
	onDial       func(port int) int // where a port inside is on this machine

	most   int        // sandboxes it has room for; 0 = as the agent says
	making sync.Mutex // so that no more are made

	onCreated   func()                       // of a sandbox, before it is told
	onEvent     func(sandbox.ProcessEvent)   // before it is told
	onMade      func()                       // between content, of a volume too, and its record
	onCommitted func()                       // between a record and the end of what is stopped for it
	onStatus    func(*sandbox.NetworkStatus) // before it is told
	onRecording func(*sandbox.Recording)     // before it is told
	onLive      func([]sandbox.Sandbox)      // before they are told

	cut       chan struct{} // closed, it breaks the connections of processes
	sealed    bool
	noVolumes bool
	anyPort   bool // callbacks are listened for on ports that are free: sandboxes have one loopback here

	mu sync.Mutex
	calls
}

// calls is what a double has seen; guarded by its mu.
type calls struct {
	created  int
	prepares int // of images
	collects int
	held     int // streams, and other calls that may take long, that are not over
	holds    int // leases that are not given back
	secrets  map[string][]sandbox.Secret
	putErr   error // of the next PutSecrets
	prepared map[string]prepared
	passing  map[string]bool // content of forks that is not released
	released []string        // manifests that were let go
	ports    map[string]int  // of callbacks, by sandbox
	silent   map[string]bool // sandboxes whose end nobody is told
	old      map[string]*sandbox.Volume

	used      map[string]sandbox.Stats // in place of what was measured
	forgotten map[string]bool          // processes that the guest does not know any more
}

type prepared struct {
	sandbox string
	stop    bool
	content sandbox.Content
}

func newDouble(t testing.TB) *double {
	t.Helper()
	n := &double{dir: t.TempDir(), cut: make(chan struct{}), anyPort: true, calls: calls{secrets: map[string][]sandbox.Secret{}, prepared: map[string]prepared{}, passing: map[string]bool{},
		ports: map[string]int{}, silent: map[string]bool{}, old: map[string]*sandbox.Volume{}, used: map[string]sandbox.Stats{}, forgotten: map[string]bool{}}}
	var err error
	n.Machine, err = agenttest.Open(t.Context(), n.dir, agenttest.Options{Volumes: volume.Supported() == nil, Networks: true,
		Edit: func(m *agenttest.Machine, c *agent.Config) {
			n.lib = newLibrary(m.Library)
			c.Images = n.lib
		}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	return n
}

// does notes something that a call did.
func (n *double) does(f func(*calls)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	f(&n.calls)
}

// saw is what a double has seen.
func (n *double) saw() calls {
	n.mu.Lock()
	defer n.mu.Unlock()
	c := n.calls
	c.secrets, c.prepared, c.passing, c.ports, c.silent, c.old = maps.Clone(c.secrets), maps.Clone(c.prepared), maps.Clone(c.passing), maps.Clone(c.ports), maps.Clone(c.silent), maps.Clone(c.old)
	c.used, c.forgotten = maps.Clone(c.used), maps.Clone(c.forgotten)
	c.released = slices.Clone(c.released)
	return c
}

// hold counts a call that keeps a sandbox awake.
func (n *double) hold() (over func()) {
	n.does(func(c *calls) { c.held++ })
	return func() { n.does(func(c *calls) { c.held-- }) }
}

// ranged is a stream that is held for as long as it is ranged over.
func ranged[T any](n *double, seq iter.Seq2[T, error]) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		defer n.hold()()
		seq(yield)
	}
}

func (n *double) Info(ctx context.Context) (node.Info, error) {
	i, err := n.Machine.Info(ctx)
	i.Sealed, i.Volumes = n.sealed, i.Volumes && !n.noVolumes
	return i, err
}

func (n *double) Dial(ctx context.Context, id string, port int) (node.Conn, error) {
	if n.onDial != nil {
		port = n.onDial(port)
	}
	return n.Machine.Dial(ctx, id, port)
}

// room is for one more, until leave.
func (n *double) room() (leave func(), err error) {
	if n.most == 0 {
		return func() {}, nil
	}
	n.making.Lock()
	if n.liveCount() >= n.most {
		n.making.Unlock()
		return nil, sandbox.Errorf(sandbox.NoCapacity, "node.create", "the node is full")
	}
	return n.making.Unlock, nil
}

func (n *double) Capacity(ctx context.Context) (sandbox.Capacity, error) {
	c, err := n.Machine.Capacity(ctx)
	if n.most > 0 {
		c.MaxSandboxes, c.Total = int64(n.most), sandbox.Resources{}
	}
	return c, err
}

func (n *double) Stats(ctx context.Context, id string) (sandbox.Stats, error) {
	st, err := n.Machine.Stats(ctx, id)
	if used, ok := n.saw().used[id]; ok && err == nil {
		return used, nil
	}
	return st, err
}

// expiryOf is when the node ends a sandbox; zero = never.
func (n *double) expiryOf(id string) time.Time {
	if sb := n.sandbox(id); sb != nil {
		return sb.ExpiresAt
	}
	return time.Time{}
}

func (n *double) Create(ctx context.Context, sb sandbox.Sandbox, img sandbox.Image) (time.Duration, error) {
	if n.onCreate != nil {
		if err := n.onCreate(ctx, sb); err != nil {
			return 0, err
		}
	}
	leave, err := n.room()
	if err != nil {
		return 0, err
	}
	defer leave()
	took, err := n.Machine.Create(ctx, sb, img)
	if err == nil {
		n.does(func(c *calls) { c.created++ })
		if n.onCreated != nil {
			n.onCreated()
		}
	}
	return took, err
}

func (n *double) CreateFrom(ctx context.Context, sb sandbox.Sandbox, img sandbox.Image, from sandbox.Snapshot) (time.Duration, error) {
	if n.onCreateFrom != nil {
		if err := n.onCreateFrom(sb); err != nil {
			return 0, err
		}
	}
	leave, err := n.room()
	if err != nil {
		return 0, err
	}
	defer leave()
	took, err := n.Machine.CreateFrom(ctx, sb, img, from)
	if err == nil {
		n.does(func(c *calls) { c.created++ })
	}
	return took, err
}

func (n *double) Reset(ctx context.Context, id string) (int64, time.Duration, error) {
	if n.onReset != nil {
		if err := n.onReset(); err != nil {
			return 0, 0, err
		}
	}
	return n.Machine.Reset(ctx, id)
}

func (n *double) Restore(ctx context.Context, id string, img sandbox.Image, from sandbox.Snapshot) (int64, time.Duration, error) {
	if n.onRestore != nil {
		if err := n.onRestore(); err != nil {
			return 0, 0, err
		}
	}
	return n.Machine.Restore(ctx, id, img, from)
}

func (n *double) Pause(ctx context.Context, id string, cold bool) error {
	if n.onPause != nil {
		n.onPause()
	}
	return n.Machine.Pause(ctx, id, cold)
}

func (n *double) PrepareSnapshot(ctx context.Context, id string, r node.SnapshotRequest) (node.Prepared, error) {
	if n.onSnapshot != nil {
		if err := n.onSnapshot(ctx, r); err != nil {
			return node.Prepared{}, err
		}
	}
	p, err := n.Machine.PrepareSnapshot(ctx, id, r)
	if err != nil {
		return p, err
	}
	n.does(func(c *calls) {
		c.prepared[p.Token] = prepared{id, r.Stop, p.Content}
		if p.Content.Plain != "" {
			c.passing[p.Content.Plain] = true
		}
	})
	if n.onMade != nil {
		n.onMade()
	}
	return p, nil
}

func (n *double) CommitSnapshot(ctx context.Context, token string) error {
	if n.onCommitted != nil && n.saw().prepared[token].stop {
		n.onCommitted()
	}
	return n.Machine.CommitSnapshot(ctx, token)
}

func (n *double) AbortSnapshot(ctx context.Context, token string) error {
	n.does(func(c *calls) { c.letGo(c.prepared[token].content) })
	return n.Machine.AbortSnapshot(ctx, token)
}

func (n *double) Release(ctx context.Context, content sandbox.Content) error {
	n.does(func(c *calls) { c.letGo(content) })
	return n.Machine.Release(ctx, content)
}

func (c *calls) letGo(content sandbox.Content) {
	delete(c.passing, content.Plain)
	c.released = append(c.released, content.Manifest)
}

func (n *double) PrepareImage(ctx context.Context, from sandbox.Snapshot, base sandbox.Image, op string) (sandbox.Image, error) {
	n.does(func(c *calls) { c.prepares++ })
	if n.onPrepare != nil {
		if err := n.onPrepare(ctx); err != nil {
			return sandbox.Image{}, err
		}
	}
	return n.Machine.PrepareImage(ctx, from, base, op)
}

func (n *double) Collect(ctx context.Context, keep []string) (int64, error) {
	if n.onCollect != nil {
		if err := n.onCollect(ctx); err != nil {
			return 0, err
		}
	}
	n.does(func(c *calls) { c.collects++ })
	return n.Machine.Collect(ctx, keep)
}

func (n *double) Hold(ctx context.Context, id string, ttl time.Duration) (node.Hold, error) {
	h, err := n.Machine.Hold(ctx, id, ttl)
	if err == nil {
		n.does(func(c *calls) { c.holds++ })
	}
	return h, err
}

func (n *double) ReleaseHold(ctx context.Context, token string) error {
	n.does(func(c *calls) { c.holds-- })
	return n.Machine.ReleaseHold(ctx, token)
}

func (n *double) Start(ctx context.Context, id string, spec sandbox.ProcessSpec, offset int64) iter.Seq2[sandbox.ProcessEvent, error] {
	return ranged(n, func(yield func(sandbox.ProcessEvent, error) bool) {
		ctx, cancel := context.WithCancelCause(ctx)
		defer cancel(nil)
		go func() {
			select {
			case <-n.cut:
				cancel(errCut)
			case <-ctx.Done():
			}
		}()
		n.Machine.Start(ctx, id, spec, offset)(func(ev sandbox.ProcessEvent, err error) bool {
			if n.onEvent != nil && err == nil {
				n.onEvent(ev)
			}
			if err != nil && context.Cause(ctx) == errCut {
				err = errCut
			}
			return yield(ev, err)
		})
	})
}

var errForgotten = sandbox.Errorf(sandbox.NotFound, "guest", "no such process")

var errCut = sandbox.Errorf(sandbox.Unavailable, "guest", "connection reset")

func (n *double) Attach(ctx context.Context, id, exec string, offset int64) iter.Seq2[sandbox.ProcessEvent, error] {
	if n.saw().forgotten[exec] {
		return func(yield func(sandbox.ProcessEvent, error) bool) { yield(sandbox.ProcessEvent{}, errForgotten) }
	}
	return ranged(n, n.Machine.Attach(ctx, id, exec, offset))
}

func (n *double) Watch(ctx context.Context, id, path string, recursive bool) iter.Seq2[sandbox.FileChange, error] {
	return ranged(n, n.Machine.Watch(ctx, id, path, recursive))
}

func (n *double) Wait(ctx context.Context, id, exec string) (sandbox.ProcessEnd, error) {
	defer n.hold()()
	if n.saw().forgotten[exec] {
		return sandbox.ProcessEnd{}, errForgotten
	}
	return n.Machine.Wait(ctx, id, exec)
}

func (n *double) Callbacks(ctx context.Context, id string, port int) iter.Seq2[node.Callback, error] {
	return ranged(n, func(yield func(node.Callback, error) bool) {
		if n.onListen != nil {
			if err := n.onListen(port); err != nil {
				yield(node.Callback{}, err)
				return
			}
		}
		if !n.anyPort {
			n.does(func(c *calls) { c.ports[id] = port })
			n.Machine.Callbacks(ctx, id, port)(yield)
			return
		}
		for range 100 { // below the ports that the kernel gives to anybody who connects
			port, taken := 10000+rand.IntN(20000), false
			n.does(func(c *calls) { c.ports[id] = port })
			n.Machine.Callbacks(ctx, id, port)(func(c node.Callback, err error) bool {
				taken = errors.Is(err, sandbox.ErrPortTaken)
				return !taken && yield(c, err)
			})
			if !taken {
				return
			}
		}
		yield(node.Callback{}, sandbox.ErrPortTaken)
	})
}

// callbackURL is where code inside a sandbox finds its callbacks.
func (n *double) callbackURL(id string) string {
	return "http://" + net.JoinHostPort(guestwire.CallbackAddr, strconv.Itoa(n.saw().ports[id]))
}

// full is where nothing can be written.
const full = "/full/"

func noSpace(path string) error {
	if !strings.HasPrefix(path, full) {
		return nil
	}
	return sandbox.Errorf(sandbox.DiskFull, "guest.write", "no space left")
}

// sizes of what is below /proc are what a kernel says: nothing.
func sized(f sandbox.FileInfo) sandbox.FileInfo {
	if strings.HasPrefix(f.Path, "/proc/") {
		f.Size = 0
	}
	return f
}

func (n *double) ReadFile(ctx context.Context, id, path string, offset, length int64) ([]byte, sandbox.FileInfo, error) {
	b, f, err := n.Machine.ReadFile(ctx, id, path, offset, length)
	return b, sized(f), err
}

func (n *double) StatFile(ctx context.Context, id, path string) (sandbox.FileInfo, error) {
	f, err := n.Machine.StatFile(ctx, id, path)
	return sized(f), err
}

func (n *double) WriteFile(ctx context.Context, id, path string, data []byte, opt sandbox.WriteOptions) (sandbox.FileInfo, error) {
	if err := noSpace(path); err != nil {
		return sandbox.FileInfo{}, err
	}
	return n.Machine.WriteFile(ctx, id, path, data, opt)
}

func (n *double) Upload(ctx context.Context, id string, to node.Upload, r io.Reader) error {
	err := noSpace(to.Path)
	if n.onUpload != nil && err == nil {
		err = n.onUpload(ctx, to)
	}
	if err != nil {
		go func() { _, _ = r.Read(make([]byte, 1<<20)) }() // one may be under way
		return err
	}
	defer n.hold()()
	return n.Machine.Upload(ctx, id, to, r)
}

func (n *double) Download(ctx context.Context, id string, from node.Download, w io.Writer) error {
	if n.onDownload != nil {
		if err := n.onDownload(from); err != nil {
			return err
		}
	}
	defer n.hold()()
	return n.Machine.Download(ctx, id, from, w)
}

func (n *double) PutSecrets(ctx context.Context, tenant string, secrets []sandbox.Secret) (err error) {
	n.does(func(c *calls) { err, c.putErr = c.putErr, nil })
	if err != nil {
		return err
	}
	if err = n.Machine.PutSecrets(ctx, tenant, secrets); err == nil {
		n.does(func(c *calls) { c.secrets[tenant] = secrets })
	}
	return err
}

func (n *double) NetworkStatus(ctx context.Context, id string, flows int) (sandbox.NetworkStatus, error) {
	s, err := n.Machine.NetworkStatus(ctx, id, flows)
	if n.onStatus != nil && err == nil {
		n.onStatus(&s)
	}
	return s, err
}

func (n *double) Live(ctx context.Context) ([]sandbox.Sandbox, error) {
	all, err := n.Machine.Live(ctx)
	if n.onLive != nil {
		n.onLive(all)
	}
	return all, err
}

// metered is an end with what the test says was used.
func (n *double) metered(id string, end sandbox.End) sandbox.End {
	if used, ok := n.saw().used[id]; ok {
		end.Usage = &sandbox.Usage{CPUTime: used.CPUTime, Memory: used.Memory, DiskUsed: used.DiskUsed}
	}
	return end
}

func (n *double) Ends(ctx context.Context) (map[string]sandbox.End, error) {
	ends, err := n.Machine.Ends(ctx)
	for id, end := range ends {
		ends[id] = n.metered(id, end)
	}
	return ends, err
}

func (n *double) Ended(ctx context.Context) iter.Seq2[node.Ended, error] {
	return func(yield func(node.Ended, error) bool) {
		n.Machine.Ended(ctx)(func(e node.Ended, err error) bool {
			e.End = n.metered(e.ID, e.End)
			return err == nil && n.saw().silent[e.ID] || yield(e, err)
		})
	}
}

// lose has the agent know nothing of a sandbox, without a word.
func (n *double) lose(t testing.TB, id string) {
	t.Helper()
	n.does(func(c *calls) { c.silent[id] = true })
	if err := n.Machine.Kill(t.Context(), id, sandbox.End{Cause: sandbox.Infra}); err != nil {
		t.Fatal(err)
	}
	if err := n.AckEnd(t.Context(), id); err != nil {
		t.Fatal(err)
	}
}

// root is the directory of a sandbox on this machine.
func (n *double) root(id string) string { return filepath.Join(n.dir, "kernels", n.Host.Kernel(id)) }

// ends are those that nobody has acknowledged.
func (n *double) ends() map[string]sandbox.End {
	ends, _ := n.Machine.Ends(context.Background()) // has no error in one process
	return ends
}

// die ends a sandbox as its kernel would.
func (n *double) die(id string, cause sandbox.Cause) {
	n.Host.Kill(n.Host.Kernel(id), runtime.Exit{Cause: cause, Detail: "by itself"})
}

// sandbox is what the node says of one; nil = it has none such.
func (n *double) sandbox(id string) *sandbox.Sandbox {
	all, _ := n.Machine.Live(context.Background()) // has no error in one process
	for _, sb := range all {
		if sb.ID == id {
			return &sb
		}
	}
	return nil
}

func (n *double) liveCount() int {
	all, _ := n.Machine.Live(context.Background())
	return len(all)
}

// contents are the manifests that are stored, sorted.
func (n *double) contents() (out []string) {
	err := n.Store.List(context.Background(), func(b cas.Info) error {
		if _, err := snapshot.Refs(context.Background(), n.Store, b.ID); err == nil {
			out = append(out, string(b.ID))
		}
		return nil
	})
	if err != nil {
		panic(err)
	}
	slices.Sort(out)
	return out
}

// spoil damages what is stored.
func (n *double) spoil(t testing.TB, id cas.ID) {
	t.Helper()
	name := filepath.Join(n.dir, "state", id.Hex()[:2], id.Hex()[2:])
	b, err := os.ReadFile(name)
	if err == nil {
		b[len(b)/2] ^= 1
		err = os.WriteFile(name, b, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// stored is what all content takes.
func (n *double) stored() (bytes int64) {
	_ = n.Store.List(context.Background(), func(b cas.Info) error { bytes += b.Stored; return nil }) // a local one has no error
	return bytes
}

// volumes are the ids of all there are, sorted.
func (n *double) volumes() (ids []string) {
	all, err := n.Machine.Volumes().List(context.Background())
	if err != nil {
		panic(err)
	}
	for _, v := range all {
		ids = append(ids, v.ID)
	}
	slices.Sort(ids)
	return ids
}

func (n *double) passingCount() int { return len(n.saw().passing) }

func (n *double) Recordings() node.Recordings { return doubleRecordings{n.Machine.Recordings(), n} }

// doubleRecordings are the agent's.
type doubleRecordings struct {
	node.Recordings
	n *double
}

func (r doubleRecordings) Status(ctx context.Context, ids []string) (map[string]sandbox.Recording, error) {
	all, err := r.Recordings.Status(ctx, ids)
	for id, is := range all {
		if r.n.onRecording != nil {
			r.n.onRecording(&is)
			all[id] = is
		}
	}
	return all, err
}

func (n *double) Volumes() node.Volumes {
	if n.noVolumes {
		return node.NoVolumes{}
	}
	return doubleVolumes{n.Machine.Volumes(), n}
}

// doubleVolumes are the agent's, some of which may be from before there were records.
type doubleVolumes struct {
	node.Volumes
	n *double
}

func (v doubleVolumes) failing(op string) error {
	if v.n.onVolume == nil {
		return nil
	}
	return v.n.onVolume(op)
}

func (v doubleVolumes) Create(ctx context.Context, id string, size int64) error {
	if err := v.failing("create"); err != nil {
		return err
	}
	return v.Volumes.Create(ctx, id, size)
}

func (v doubleVolumes) Resize(ctx context.Context, id string, size int64) (int64, error) {
	if err := v.failing("resize"); err != nil {
		return 0, err
	}
	return v.Volumes.Resize(ctx, id, size)
}

func (v doubleVolumes) Delete(ctx context.Context, id string) error {
	if err := v.failing("delete"); err != nil {
		return err
	}
	return v.Volumes.Delete(ctx, id)
}

func (v doubleVolumes) Snapshot(ctx context.Context, id string) (sandbox.Content, error) {
	c, err := v.Volumes.Snapshot(ctx, id)
	if v.n.onMade != nil && err == nil {
		v.n.onMade()
	}
	return c, err
}

func (v doubleVolumes) List(ctx context.Context) ([]sandbox.VolumeContent, error) {
	all, err := v.Volumes.List(ctx)
	for i := range all {
		all[i].Old = v.n.saw().old[all[i].ID]
	}
	return all, err
}
