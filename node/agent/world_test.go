package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/runtime/fake"
	"github.com/cove-sandbox/cove/sandbox"
)

// tb is what testing.T and rapid.T have in common.
type tb interface {
	Helper()
	Errorf(string, ...any)
	Fatalf(string, ...any)
}

// world is a machine in virtual time: bare kernels, a disk that can crash and
// a node that can be killed and started again.
type world struct {
	t    tb
	dir  string
	host *fake.Host
	// reading is what the node sees of its machine; nil = plenty.
	reading atomic.Pointer[func() (Host, error)]
	opened  atomic.Pointer[Node] // Node, for what it calls itself
	drv     *fake.Driver
	more    []*fake.Host // of further classes; cfg opens their drivers
	disk    *memFS
	boot    string
	cfg     func(*Config)
	inside  sync.Map    // kernel id → inside: what its guest would say
	ended   chan string // of the node that is open
	*Node
}

func inWorld(t *testing.T, f func(t *testing.T, w *world)) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, dir)
		w.open()
		defer w.finish()
		f(t, w)
	})
}

func newWorld(t tb, dir string) *world {
	return &world{t: t, dir: dir, host: fake.NewHost("", fake.Options{Bare: true}), disk: newMemFS(), boot: "boot-1"}
}

// open starts a node process on the machine.
func (w *world) open() {
	w.t.Helper()
	if err := w.tryOpen(); err != nil {
		w.t.Fatalf("open: %v", err)
	}
}

func (w *world) tryOpen() error {
	w.drv = w.host.Open()
	cfg := Config{Dir: w.dir, Name: "n1", Images: testImages{}, fsys: w.disk, bootID: w.boot,
		Limits:  Limits{MilliCPU: 4000, Memory: 64 * gib, MemoryReserve: 64 * gib / 10, Disk: 1000 * gib, MaxSandboxes: 100},
		Classes: []Class{{Driver: w.drv, Pool: PoolSettings{Min: 2, Max: 8, Parallel: 2, Background: 1}}},
		host: func() (Host, error) {
			if now := w.reading.Load(); now != nil {
				return (*now)()
			}
			return Host{Memory: 64 * gib, Disk: 100 * gib}, nil
		},
		inspect: func(_ context.Context, k runtime.Kernel) (inside, error) {
			v, _ := w.inside.Load(k.ID())
			in, _ := v.(inside)
			in.attached = w.host.IsAttached(k.ID())
			for _, h := range w.more {
				in.attached = in.attached || h.IsAttached(k.ID())
			}
			return in, nil
		},
	}
	if w.cfg != nil {
		w.cfg(&cfg)
	}
	n, err := Open(context.Background(), cfg)
	if err != nil {
		return err
	}
	w.Node = n
	w.opened.Store(n)
	w.listen(n)
	return nil
}

// listen collects what a node tells of ends that come by themselves.
func (w *world) listen(n *Node) {
	ended := make(chan string, 10_000)
	w.ended = ended
	go func() {
		for e, err := range n.Ended(context.Background()) {
			if err == nil && n.notices.rung(e.ID) { // not what was found when it opened
				ended <- e.ID
			}
		}
	}()
}

// crash kills the node's process at this very moment: nothing it still does
// reaches the machine or the disk. torn is how much of what was written but
// not synced the disk keeps.
func (w *world) crash(torn func(int) int) {
	w.drv.Crash()
	w.disk = w.disk.crash(torn)
	_ = w.Node.Close() // ends its goroutines, in vain otherwise
}

func (w *world) finish() {
	if err := w.Node.Shutdown(context.Background(), true); err != nil {
		w.t.Errorf("shutdown: %v", err)
	}
	for _, h := range append([]*fake.Host{w.host}, w.more...) {
		if ids := h.IDs(); len(ids) != 0 {
			w.t.Errorf("left on the machine: %v", ids)
		}
	}
}

type testImages struct{}

func (testImages) Path(id string) (string, error) {
	if id != "sha256:base" {
		return "", sandbox.Errorf(sandbox.ImageNotFound, "image.path", "no image %s", id)
	}
	return "", nil // the fake driver starts from an empty root
}

var baseImage = sandbox.Image{ID: "sha256:base", Config: sandbox.ImageConfig{Env: []string{"PATH=/bin"}, User: "user"}}

func smallBox(id string, edits ...func(*sandbox.Spec)) sandbox.Sandbox {
	sb := sandbox.Sandbox{ID: id, Spec: sandbox.Spec{Image: "base", Resources: sandbox.Resources{MilliCPU: 100, Memory: gib, MemoryLimit: gib, Disk: gib}}}
	for _, e := range edits {
		e(&sb.Spec)
	}
	return sb
}

func timeout(d time.Duration) func(*sandbox.Spec) { return func(s *sandbox.Spec) { s.Timeout = d } }
func idle(d time.Duration) func(*sandbox.Spec)    { return func(s *sandbox.Spec) { s.IdleTimeout = d } }

func (w *world) create(id string, edits ...func(*sandbox.Spec)) {
	w.t.Helper()
	if _, err := w.Create(context.Background(), smallBox(id, edits...), baseImage); err != nil {
		w.t.Fatalf("create %s: %v", id, err)
	}
}

// kernelOf is the id of the kernel that serves a sandbox.
func (w *world) kernelOf(id string) string {
	w.Node.mu.Lock()
	defer w.Node.mu.Unlock()
	if b := w.Node.mu.live[id]; b != nil && b.kernel != nil {
		return b.kernel.ID()
	}
	return ""
}

// consistent checks the promise of the package: what runs is what the node
// says and what it has accounted for, and nothing else.
func (w *world) consistent(want ...string) {
	w.t.Helper()
	synctest.Wait()
	slices.Sort(want)
	sbs, _ := w.Live(context.Background())
	var live []string
	for _, sb := range sbs {
		live = append(live, sb.ID)
	}
	slices.Sort(live)
	if !slices.Equal(live, want) {
		w.t.Errorf("live on the node: %v, want %v", live, want)
	}
	w.Node.mu.Lock()
	var kernels []string
	var sum sandbox.Resources
	for _, b := range w.Node.mu.live {
		if b.kernel == nil { // cold: it takes nothing
			continue
		}
		kernels = append(kernels, b.kernel.ID())
		sum.MilliCPU += b.resources.MilliCPU
		sum.Memory += b.resources.Memory
		sum.MemoryLimit += b.resources.MemoryLimit
		sum.Disk += b.resources.Disk
		sum.Reserve += b.resources.Reserved()
	}
	used, count := w.Node.mu.reservations.Used()
	w.Node.mu.Unlock()
	slices.Sort(kernels)
	attached, machines := w.host.Attached(), w.host.IDs()
	for _, h := range w.more {
		attached, machines = append(attached, h.Attached()...), append(machines, h.IDs()...)
	}
	slices.Sort(attached)
	if got := attached; !slices.Equal(got, kernels) {
		w.t.Errorf("attached on the machine: %v, on the node: %v", got, kernels)
	}
	if used != sum || int(count) != len(kernels) {
		w.t.Errorf("accounted for %d: %+v, live %d: %+v", count, used, len(kernels), sum)
	}
	known := w.Node.kernels.snapshot()
	for _, id := range machines {
		if !known[id] {
			w.t.Errorf("kernel %s runs and nobody knows", id)
		}
	}
}

func (w *world) endOf(id string) sandbox.Cause {
	ends, _ := w.Ends(context.Background())
	return ends[id].Cause
}

func (w *world) expectEnd(id string, cause sandbox.Cause, says string) {
	w.t.Helper()
	ends, _ := w.Ends(context.Background())
	end, ok := ends[id]
	if !ok || end.Cause != cause || !strings.Contains(end.Detail, says) || end.At.IsZero() {
		w.t.Errorf("end of %s: %+v (known %v), want %s with %q", id, end, ok, cause, says)
	}
}

// expectNotice waits for the next id from Ended.
func (w *world) expectNotice(id string) {
	w.t.Helper()
	select {
	case got := <-w.ended:
		if got != id {
			w.t.Errorf("told of the end of %q, want %q", got, id)
		}
	case <-time.After(time.Minute):
		w.t.Errorf("not told of the end of %q", id)
	}
}

func (w *world) expectNoNotice() {
	w.t.Helper()
	synctest.Wait()
	select {
	case got := <-w.ended:
		w.t.Errorf("told of the end of %q", got)
	default:
	}
}

func expectClass(t tb, err error, want *sandbox.Error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("got %v, want %s", err, want.Class)
	}
}

var errBroken = sandbox.Errorf(sandbox.Unavailable, "fake", "broken")

func ids(prefix string, n int) []string {
	var out []string
	for i := range n {
		out = append(out, fmt.Sprintf("%s%d", prefix, i))
	}
	return out
}

// reads has the node see this of its machine; nil = plenty.
func (w *world) reads(now func() (Host, error)) {
	if now == nil {
		w.reading.Store(nil)
		return
	}
	w.reading.Store(&now)
}
