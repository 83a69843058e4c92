//go:build !race

package agent_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/cas"
	"github.com/cove-sandbox/cove/cas/local"
	"github.com/cove-sandbox/cove/egress"
	"github.com/cove-sandbox/cove/egress/authority"
	"github.com/cove-sandbox/cove/egress/proxy"
	"github.com/cove-sandbox/cove/egress/recording"
	"github.com/cove-sandbox/cove/image"
	"github.com/cove-sandbox/cove/image/imagetest"
	"github.com/cove-sandbox/cove/internal/testbin"
	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/node/agent"
	"github.com/cove-sandbox/cove/runtime/gvisor"
	"github.com/cove-sandbox/cove/sandbox"
)

// machine is a node on real gVisor that can be started again.
type machine struct {
	authorities []byte // that every sandbox trusts
	t           testing.TB
	dir         string
	lib         *image.Library
	img         sandbox.Image
	store       *local.Store
	drv         *gvisor.Driver
	up          *proxy.Upstream  // nil: no networks
	nets        *egress.Networks // nil without up
	recordings  *recording.Library
	edit        func(*agent.Config)        // nil: as it is
	opened      atomic.Pointer[agent.Node] // the one below, for whoever it is not yet set for
	*agent.Node
	execs int
}

func newMachine(t *testing.T) *machine { return newMachineOn(t, nil) }

// newMachineOn has networks that leave by up.
func newMachineOn(t testing.TB, up *proxy.Upstream) *machine {
	t.Helper()
	return newMachineTrusting(t, up, nil)
}

func newMachineTrusting(t testing.TB, up *proxy.Upstream, authorities []byte) *machine {
	t.Helper()
	m := &machine{up: up, authorities: authorities}
	m.start(t)
	return m
}

// start opens a machine for a test.
func (m *machine) start(t testing.TB) {
	t.Helper()
	m.t, m.dir = t, t.TempDir()
	m.lib, m.img = imagetest.Base(t)
	m.open()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := m.Shutdown(ctx, true); err != nil {
			t.Error(err)
		}
		if _, err := m.drv.Sweep(ctx, nil); err != nil {
			t.Error(err)
		}
		if err := m.drv.Close(); err != nil { // or its empty cgroups stay
			t.Error(err)
		}
		if err := m.closeNetworks(); err != nil {
			t.Error(err)
		}
		_ = m.store.Close()
		_ = m.recordings.Close()
	})
}

func (m *machine) open() {
	m.t.Helper()
	ctx := context.Background()
	var err error
	if m.drv, err = gvisor.Open(ctx, gvisor.Config{Dir: m.dir + "/gvisor", RunscPath: testbin.Runsc(m.t), GuestPath: testbin.Guest(m.t)}); err != nil {
		m.t.Fatal(err)
	}
	if m.store, err = local.Open(m.dir+"/state", local.Options{}); err != nil {
		m.t.Fatal(err)
	}
	if m.up != nil {
		ca, err := authority.Open(m.dir + "/egress.key")
		if err != nil {
			m.t.Fatal(err)
		}
		if m.nets, err = egress.Open(egress.Config{Dir: m.dir + "/networks", Upstream: m.up, Authorities: ca}); err != nil {
			m.t.Fatal(err)
		}
	}
	if m.recordings, err = recording.OpenLibrary(recording.Config{Dir: m.dir + "/recordings", Node: "n1"}); err != nil {
		m.t.Fatal(err)
	}
	cfg := agent.Config{Dir: m.dir + "/node", Name: "n1", Networks: m.nets, Images: m.lib, Classes: []agent.Class{{Driver: m.drv, Pool: agent.PoolSettings{Min: 1, Max: 4, Ahead: -1}}},
		State: &agent.StateConfig{Store: m.store, Plain: m.dir + "/plain"}, VolumeDir: m.dir + "/volumes", Recordings: m.recordings, Authorities: m.authorities}
	if m.edit != nil {
		m.edit(&cfg)
	}
	n, err := agent.Open(ctx, cfg)
	m.Node = n
	m.opened.Store(n)
	if err != nil {
		m.t.Fatal(err)
	}
}

func (m *machine) closeNetworks() error {
	if m.nets == nil {
		return nil
	}
	return m.nets.Close()
}

func (m *machine) restart() {
	m.t.Helper()
	if err := m.Node.Close(); err != nil {
		m.t.Fatal(err)
	}
	if err := errors.Join(m.drv.Close(), m.store.Close(), m.closeNetworks(), m.recordings.Close()); err != nil {
		m.t.Fatal(err)
	}
	m.open()
}

func spec() sandbox.Spec {
	return sandbox.Spec{Image: "base", Resources: sandbox.Resources{MilliCPU: 1000, Memory: 128 << 20, MemoryLimit: 256 << 20, Disk: 1 << 30, Pids: 512}}
}

func (m *machine) create(id string, edits ...func(*sandbox.Spec)) {
	m.t.Helper()
	s := spec()
	for _, e := range edits {
		e(&s)
	}
	if _, err := m.Create(m.t.Context(), sandbox.Sandbox{ID: id, Spec: s}, m.img); err != nil {
		m.t.Fatal(err)
	}
}

// sh runs a command and returns its output.
func (m *machine) sh(id, command string) string {
	m.t.Helper()
	g, release, err := m.Guest(m.t.Context(), id)
	if err != nil {
		m.t.Fatalf("%s: %v", id, err)
	}
	defer release()
	m.execs++
	var out strings.Builder
	err = g.Start(m.t.Context(), sandbox.ProcessSpec{ExecID: fmt.Sprint("e", m.execs), Command: command, User: "root"}, 0, func(e sandbox.ProcessEvent) error {
		if e.Output != nil {
			out.Write(e.Output.Data)
		}
		return nil
	})
	if err != nil {
		m.t.Fatalf("%s: %s: %v", id, command, err)
	}
	return strings.TrimSpace(out.String())
}

func (m *machine) snapshot(id string, kind sandbox.SnapshotKind, path string) sandbox.Snapshot {
	m.t.Helper()
	c, _, err := m.Take(m.t.Context(), id, node.SnapshotRequest{Kind: kind, Path: path, Keep: true})
	if err != nil {
		m.t.Fatal(err)
	}
	return sandbox.Snapshot{ID: "s", Kind: kind, Sandbox: id, Content: c}
}

// A counter counts on in every standby, wherever it was.
const counter = `nohup sh -c 'i=0; while :; do i=$((i+1)); echo $i > /tmp/count; sleep 0.01; done' >/dev/null 2>&1 &
while [ ! -s /tmp/count ]; do sleep 0.01; done`

func (m *machine) counts(id string) {
	m.t.Helper()
	if got := m.sh(id, `a=$(cat /tmp/count); n=0; while b=$(cat /tmp/count); [ "$a" = "$b" ] && [ $n -lt 500 ]; do n=$((n+1)); sleep 0.01; done; [ "$a" != "$b" ] && echo yes`); got != "yes" {
		m.t.Errorf("%s does not count: %q", id, got)
	}
}

func TestStandbyOnGVisor(t *testing.T) {
	m := newMachine(t)
	ctx := t.Context()
	m.create("a")
	m.sh("a", counter)
	for _, cold := range []bool{false, true, false} {
		if err := m.Pause(ctx, "a", cold); err != nil {
			t.Fatal(err)
		}
		if err := m.Pause(ctx, "a", cold); err != nil {
			t.Errorf("again: %v", err)
		}
		want := map[bool]sandbox.Standby{false: sandbox.Hot, true: sandbox.Cold}[cold]
		if got := m.StandbyNow(); got["a"] != want {
			t.Errorf("standby %v", got)
		}
		if _, err := m.Stats(ctx, "a"); err != nil {
			t.Error(err)
		}
		m.restart()
		if got := m.StandbyNow(); got["a"] != want {
			t.Errorf("after a restart: %v", got)
		}
		m.counts("a")
	}
	// Hot, then cold, then rolled over by a kill.
	for _, cold := range []bool{false, true} {
		if err := m.Pause(ctx, "a", cold); err != nil {
			t.Fatal(err)
		}
	}
	if got := m.CapacityNow(); got.Used.Memory != 0 {
		t.Errorf("cold it still takes %d bytes of memory", got.Used.Memory)
	}
	if err := m.Kill(ctx, "a", sandbox.End{Cause: sandbox.KilledByUser}); err != nil {
		t.Error(err)
	}
	if freed, err := m.Collect(ctx, nil); err != nil || freed == 0 {
		t.Errorf("freed %d, %v", freed, err)
	}
}

// Who reads the output of a process reads on after a sleep of any depth, and
// misses nothing.
func TestAReaderSleepsAlongOnGVisor(t *testing.T) {
	m := newMachine(t)
	m.create("a")
	g, release, err := m.Guest(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	lines := make(chan string, 10000)
	done := make(chan error, 1)
	go func() {
		var part string
		done <- g.Start(t.Context(), sandbox.ProcessSpec{ExecID: "talk", Command: "i=0; while [ $i -lt 600 ]; do i=$((i+1)); echo $i; sleep 0.01; done"}, 0, func(e sandbox.ProcessEvent) error {
			if e.Lost != nil {
				t.Errorf("lost %+v", e.Lost)
			}
			if e.Output != nil {
				part += string(e.Output.Data)
				for {
					line, rest, ok := strings.Cut(part, "\n")
					if !ok {
						return nil
					}
					lines <- line
					part = rest
				}
			}
			return nil
		})
	}()
	for n, next := 0, 1; n < 4; n++ {
		for range 20 {
			if got := <-lines; got != fmt.Sprint(next) {
				t.Fatalf("got %q, want %d", got, next)
			}
			next++
		}
		if err := m.Pause(t.Context(), "a", n%2 == 0); err != nil {
			t.Fatal(err)
		}
		if _, err := m.Resume(t.Context(), "a"); err != nil {
			t.Fatal(err)
		}
		if n == 3 {
			for ; next <= 600; next++ {
				if got := <-lines; got != fmt.Sprint(next) {
					t.Fatalf("got %q, want %d", got, next)
				}
			}
		}
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestSnapshotsOnGVisor(t *testing.T) {
	m := newMachine(t)
	ctx := t.Context()
	m.create("a")
	m.sh("a", counter+"; mkdir -p /data/x; echo one > /data/x/file; rm -r /usr/share/doc; echo me > /etc/motd")
	mem := m.snapshot("a", sandbox.MemorySnapshot, "")
	files := m.snapshot("a", sandbox.FilesystemSnapshot, "")
	dir := m.snapshot("a", sandbox.DirectorySnapshot, "/data")
	m.counts("a")
	m.sh("a", "echo two > /data/x/file")

	var wg sync.WaitGroup
	for i := range 3 {
		wg.Go(func() {
			if _, err := m.CreateFrom(ctx, sandbox.Sandbox{ID: fmt.Sprint("child", i), Spec: spec()}, m.img, mem); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	random := map[string]bool{}
	for i := range 3 {
		id := fmt.Sprint("child", i)
		m.counts(id)
		if got := m.sh(id, "cat /data/x/file; echo "+id+" > /data/x/file"); got != "one" {
			t.Errorf("%s has %q", id, got)
		}
		random[m.sh(id, "head -c 16 /dev/urandom | od -An -tx1")] = true
	}
	if len(random) != 3 {
		t.Errorf("children share their randomness: %v", slices.Collect(maps.Keys(random)))
	}

	img, err := m.PrepareImage(ctx, files, m.img, "")
	if err != nil {
		t.Fatal(err)
	}
	if again, err := m.PrepareImage(ctx, files, m.img, ""); err != nil || again.ID != img.ID {
		t.Errorf("prepared again: %v, %v", again, err)
	}
	if _, err := m.Create(ctx, sandbox.Sandbox{ID: "b", Spec: spec()}, img); err != nil {
		t.Fatal(err)
	}
	if got := m.sh("b", "cat /data/x/file /etc/motd; ls /usr/share/doc 2>&1 | head -1; cat /tmp/count >/dev/null && echo tmp"); !strings.HasPrefix(got, "one\nme\nls: cannot access") || !strings.HasSuffix(got, "tmp") {
		t.Errorf("from the files: %q", got)
	}

	m.create("c")
	if err := m.Mount(ctx, "c", dir, "/mnt/data", false); err != nil {
		t.Fatal(err)
	}
	if err := m.Mount(ctx, "c", dir, "/own", true); err != nil {
		t.Fatal(err)
	}
	if got := m.sh("c", "cat /mnt/data/x/file; echo no > /mnt/data/x/file; echo own > /own/x/file && cat /own/x/file"); !strings.HasPrefix(got, "one\n") || !strings.HasSuffix(got, "own") || !strings.Contains(got, "Read-only") {
		t.Errorf("mounted: %q", got)
	}
	// The mount wakes with its sandbox, also when its snapshot is gone.
	if err := m.Pause(ctx, "c", true); err != nil {
		t.Fatal(err)
	}
	if _, err := m.Collect(ctx, []string{mem.Content.Manifest, files.Content.Manifest}); err != nil {
		t.Fatal(err)
	}
	m.restart()
	if _, err := m.Collect(ctx, []string{mem.Content.Manifest, files.Content.Manifest}); err != nil {
		t.Fatal(err)
	}
	if got := m.sh("c", "cat /mnt/data/x/file"); got != "one" {
		t.Errorf("after a cold sleep: %q", got)
	}

	// Back to the snapshots, in place and out of any standby.
	for i, snap := range []sandbox.Snapshot{mem, files, mem} {
		to := m.img
		if snap.Kind == sandbox.FilesystemSnapshot {
			to = img
		}
		if i > 0 {
			if err := m.Pause(ctx, "a", i == 2); err != nil {
				t.Fatal(err)
			}
		}
		episode, _, err := m.Restore(ctx, "a", to, snap)
		if err != nil || episode != int64(i+2) {
			t.Fatalf("restore: episode %d, %v", episode, err)
		}
		if got := m.sh("a", "cat /data/x/file; echo changed > /data/x/file"); got != "one" {
			t.Errorf("back in time: %q", got)
		}
	}
	m.counts("a")
	m.restart()
	m.counts("a")
}

// A snapshot of what did nothing since the last is the last.
func TestSnapshotOfNothingNew(t *testing.T) {
	m := newMachine(t)
	m.create("a")
	m.sh("a", "echo x > /x")
	for _, kind := range []sandbox.SnapshotKind{sandbox.MemorySnapshot, sandbox.FilesystemSnapshot} {
		first := m.snapshot("a", kind, "").Content
		again := m.snapshot("a", kind, "").Content
		if first.Same != "" || again.Same != first.Manifest || again.Manifest != first.Manifest {
			t.Errorf("%s: %+v then %+v", kind, first, again)
		}
		m.sh("a", "true")
		if c := m.snapshot("a", kind, "").Content; c.Same != "" {
			t.Errorf("%s after an exec: %+v", kind, c)
		}
		if _, err := m.Collect(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
	}
	m.sh("a", "nohup sleep 1000 >/dev/null 2>&1 &")
	m.snapshot("a", sandbox.MemorySnapshot, "")
	if c := m.snapshot("a", sandbox.MemorySnapshot, "").Content; c.Same != "" {
		t.Errorf("with a process inside: %+v", c)
	}
}

// A volume is written by others too, while the sandbox does nothing; and one that
// sleeps is told which file of it must come back.
func TestVolumeChangesBehindASandbox(t *testing.T) {
	m := newMachine(t)
	ctx := t.Context()
	if err := m.Volumes().Create(ctx, "data", 32<<20); err != nil {
		t.Fatal(err)
	}
	m.create("a", func(s *sandbox.Spec) {
		s.Volumes = []sandbox.VolumeMount{{Volume: "data", Path: "/data", Mode: sandbox.VolumeShared}}
	})
	put := func(name string) {
		t.Helper()
		if _, err := m.Volumes().WriteFile(ctx, "data", name, strings.NewReader("x"), sandbox.VolumeFile{}); err != nil {
			t.Fatal(err)
		}
	}
	first := m.snapshot("a", sandbox.DirectorySnapshot, "/data").Content
	put("/new")
	if again := m.snapshot("a", sandbox.DirectorySnapshot, "/data").Content; again.Manifest == first.Manifest {
		t.Error("a directory on a volume that has a new file counts as unchanged")
	}
	m.sh("a", "exec 3</data/new; sleep 1000 >/dev/null 2>&1 &")
	if err := m.Pause(ctx, "a", true); err != nil {
		t.Fatal(err)
	}
	if err := m.Volumes().RemoveFile(ctx, "data", "/new", false); err != nil {
		t.Fatal(err)
	}
	if _, err := m.Resume(ctx, "a"); !errors.Is(err, sandbox.ErrPrecondition) || !strings.Contains(err.Error(), "/data/new") {
		t.Errorf("without a file it has open it wakes with %v", err)
	}
	put("/new")
	if got := m.sh("a", "cat /data/new"); got != "x" {
		t.Errorf("with the file again: %q", got)
	}
}

// Whoever leaves a snapshot leaves the sandbox running, and nothing else.
func TestACallerLeavesASnapshotOnGVisor(t *testing.T) {
	m := newMachine(t)
	m.create("a")
	m.sh("a", counter)
	for _, r := range []node.SnapshotRequest{
		{Kind: sandbox.MemorySnapshot, Keep: true},
		{Kind: sandbox.MemorySnapshot, Keep: true, Stop: true},
		{Kind: sandbox.FilesystemSnapshot, Keep: true, Stop: true},
		{Kind: sandbox.DirectorySnapshot, Path: "/etc", Keep: true},
	} {
		ctx, leave := context.WithCancel(t.Context())
		r.Op = "leaving"
		go func() {
			for range m.Progress(ctx, r.Op) {
				leave() // it is about to stand still
				return
			}
		}()
		c, _, err := m.Take(ctx, "a", r)
		leave()
		if err == nil {
			t.Errorf("%s, stop %v: %+v", r.Kind, r.Stop, c)
		}
		m.counts("a")
	}
	if _, err := m.Collect(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	if err := m.store.List(t.Context(), func(i cas.Info) error { return fmt.Errorf("%s is left", i.ID) }); err != nil {
		t.Error(err)
	}
}

func TestForkAndTarOnGVisor(t *testing.T) {
	m := newMachine(t)
	ctx := t.Context()
	m.create("a")
	m.sh("a", counter)
	c, paused, err := m.Take(ctx, "a", node.SnapshotRequest{Kind: sandbox.MemorySnapshot})
	if err != nil || paused <= 0 || c.Manifest != "" {
		t.Fatalf("%+v, paused %v, %v", c, paused, err)
	}
	snap := sandbox.Snapshot{Kind: sandbox.MemorySnapshot, Content: c}
	for i := range 2 {
		if _, err := m.CreateFrom(ctx, sandbox.Sandbox{ID: fmt.Sprint("f", i), Spec: spec()}, m.img, snap); err != nil {
			t.Fatal(err)
		}
		m.counts(fmt.Sprint("f", i))
	}
	if err := m.Release(ctx, c); err != nil {
		t.Error(err)
	}
	if _, err := m.CreateFrom(ctx, sandbox.Sandbox{ID: "late", Spec: spec()}, m.img, snap); sandbox.ClassOf(err) != sandbox.NotFound {
		t.Errorf("after release: %v", err)
	}
	var blobs int
	if err := m.Tar(ctx, m.snapshot("a", sandbox.DirectorySnapshot, "/etc").Content, writerFunc(func(p []byte) { blobs += len(p) })); err != nil || blobs == 0 {
		t.Errorf("tar of %d bytes, %v", blobs, err)
	}
}

type writerFunc func([]byte)

func (f writerFunc) Write(p []byte) (int, error) { f(p); return len(p), nil }

var _ io.Writer = writerFunc(nil)
