// Package runtimetest is the suite every runtime driver passes. What a driver
// promises beyond the contract, it says in its capabilities, and the suite
// holds it to them.
//
// Commands run in it are sh and coreutils, so that the fake driver can use the
// host's; where only an isolated driver is tested, an image like Debian's is
// expected, with python3 for the few checks that need sockets.
package runtimetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// Factory makes what the suite tests.
type Factory struct {
	// Open opens a driver that keeps its things under dir. Opening the same
	// dir again, after Crash, is a restart of the process.
	Open func(t *testing.T, dir string) runtime.Driver
	// Class is of the kernels that the suite boots; zero = the driver's plain one.
	Class runtime.Class
	// Crash lets go of a driver as the death of its process would: its
	// kernels live on. nil = Close.
	Crash func(d runtime.Driver)
	// Rootfs is an image with sh and coreutils, and a user "user" (1000) where
	// the driver is isolated.
	Rootfs func(t *testing.T) runtime.Rootfs
	// Kill ends the kernel from outside as a fault of the host would. nil =
	// such tests are skipped.
	Kill func(t *testing.T, k runtime.Kernel)
	// Erofs makes an EROFS file of a directory. nil = mounts are not tested.
	Erofs func(t *testing.T, tree string) string
	// SmallDir is an empty directory on a disk of its own of that size. nil =
	// a full disk is not tested.
	SmallDir func(t *testing.T, size int64) string
	// Dial connects to the guest of a kernel as the driver does, and Secret is
	// what it would say then. nil = that children cannot be taken for one
	// another is not tested.
	Dial   func(ctx context.Context, k runtime.Kernel) (net.Conn, error)
	Secret func(t *testing.T, k runtime.Kernel) []byte
}

// patience bounds every wait: it is never reached by what works.
const patience = 60 * time.Second

// Run holds a driver to its contract.
func Run(t *testing.T, f Factory) {
	s := &suite{Factory: f, abandoned: map[runtime.Driver]bool{}}
	for _, c := range []struct {
		name string
		run  func(*testing.T)
	}{
		{"Boot", s.testBoot},
		{"BootRefusesATakenID", s.testBootTakenID},
		{"BootCancelledLeavesNothing", s.testBootCancelled},
		{"BootClass", s.testBootClass},
		{"Blank", s.testBlank},
		{"AttachOnce", s.testAttachOnce},
		{"Destroy", s.testDestroy},
		{"DestroyUnattached", s.testDestroyUnattached},
		{"Concurrent", s.testConcurrent},
		{"Sweep", s.testSweep},
		{"Killed", s.testKilled},
		{"Stats", s.testStats},
		{"Process", s.testProcess},
		{"Environment", s.testEnvironment},
		{"Replay", s.testReplay},
		{"Output", s.testOutput},
		{"Files", s.testFiles},
		{"BulkFile", s.testBulkFile},
		{"BulkTree", s.testBulkTree},
		{"BulkDiskFull", s.testBulkDiskFull},
		{"ResetLeavesNothing", s.testResetLeavesNothing},
		{"ResetEndsProcesses", s.testResetEndsProcesses},
		{"ResetMeetsRequests", s.testResetMeetsRequests},
		{"ResetTakesTheNewContainer", s.testResetTakesTheNewContainer},
		{"Adopt", s.testAdopt},
		{"AdoptWhatIsGone", s.testAdoptGone},
		{"AdoptUnattached", s.testAdoptUnattached},
		{"AdoptAmidAReset", s.testAdoptAmidAReset},
		{"AdoptBetweenResets", s.testAdoptBetweenResets},
		{"AdoptAmidACheckpoint", s.testAdoptAmidACheckpoint},
		{"Isolation", s.testIsolation},
		{"IsolationOfEpisodes", s.testIsolationOfEpisodes},
		{"IsolationOfUsers", s.testUsers},
		{"InitKilled", s.testInitKilled},
		{"KillEverything", s.testKillEverything},
		{"MemoryLimit", s.testMemoryLimit},
		{"Size", s.testSize},
		{"Hostname", s.testHostname},
		{"DiskLimit", s.testDiskLimit},
		{"PidsLimit", s.testPidsLimit},
		{"CPULimit", s.testCPULimit},
		{"CheckpointFiles", s.testCheckpointFiles},
		{"CheckpointAfterResets", s.testCheckpointAfterResets},
		{"ConnectionsOverACheckpoint", s.testConnectionsOverACheckpoint},
		{"CheckpointProcesses", s.testCheckpointProcesses},
		{"CheckpointKeepsReaders", s.testCheckpointKeepsReaders},
		{"CheckpointSecrets", s.testCheckpointSecrets},
		{"CheckpointStop", s.testCheckpointStop},
		{"CheckpointKilled", s.testCheckpointKilled},
		{"CheckpointDiskFull", s.testCheckpointDiskFull},
		{"RestoreRefuses", s.testRestoreRefuses},
		{"RestoreConcurrent", s.testRestoreConcurrent},
		{"CheckpointAdoptedAfterReset", s.testCheckpointAdoptedAfterReset},
		{"RestoredAdopt", s.testRestoredAdopt},
		{"Hold", s.testHold},
		{"HeldUnseen", s.testHeldUnseen},
		{"HeldDies", s.testHeldDies},
		{"SharedMemory", s.testSharedMemory},
		{"CheckpointSince", s.testCheckpointSince},
		{"Pause", s.testPause},
		{"PauseStopsDeadlines", s.testPauseStopsDeadlines},
		{"PauseAmongCalls", s.testPauseAmongCalls},
		{"PausedDestroy", s.testPausedDestroy},
		{"PausedAdopt", s.testPausedAdopt},
		{"PausedCheckpoint", s.testPausedCheckpoint},
		{"Vacate", s.testVacate},
		{"VacatePaused", s.testVacatePaused},
		{"Diff", s.testDiff},
		{"ListLayer", s.testListLayer},
		{"Clock", s.testClock},
		{"Mount", s.testMount},
		{"Volume", s.testVolume},
		{"VolumeCheckpoint", s.testVolumeCheckpoint},
		{"VolumeAdded", s.testVolumeAdded},
		{"VolumeReadOnly", s.testVolumeReadOnly},
		{"VolumeShared", s.testVolumeShared},
		{"VolumeReset", s.testVolumeReset},
		{"VolumeAdopt", s.testVolumeAdopt},
		{"VolumeRefused", s.testVolumeRefused},
		{"VolumeEscape", s.testVolumeEscape},
	} {
		t.Run(c.name, c.run)
	}
}

type suite struct {
	Factory
	seq       atomic.Int64
	abandoned map[runtime.Driver]bool // those that "died"; tests run one at a time
}

// open makes a driver and checks in the end that the test left no kernel.
func (s *suite) open(t *testing.T) runtime.Driver {
	t.Helper()
	return s.openIn(t, t.TempDir())
}

func (s *suite) openIn(t *testing.T, dir string) runtime.Driver {
	t.Helper()
	d := s.Open(t, dir)
	t.Cleanup(func() {
		if s.abandoned[d] {
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		removed, err := d.Sweep(ctx, nil)
		if err != nil {
			t.Errorf("sweep after the test: %v", err)
		}
		if len(removed) > 0 {
			t.Errorf("the test or the driver left kernels: %v", removed)
		}
		if err := d.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return d
}

func (s *suite) id() string { return fmt.Sprintf("rt%d", s.seq.Add(1)) }

func (s *suite) need(t *testing.T, d runtime.Driver, what string, has bool) {
	t.Helper()
	if !has {
		t.Skipf("driver %s is not %s", d.Name(), what)
	}
}

func (s *suite) boot(t *testing.T, d runtime.Driver) runtime.Kernel {
	t.Helper()
	k, err := d.Boot(deadline(t), s.id(), s.Class)
	if err != nil {
		t.Fatalf("boot: %v", err)
	}
	destroyAtEnd(t, k)
	return k
}

func destroyAtEnd(t *testing.T, k runtime.Kernel) {
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := k.Destroy(ctx); err != nil {
			t.Errorf("destroy: %v", err)
		}
	})
}

// attached is a kernel with the suite's image in it.
func (s *suite) attached(t *testing.T, d runtime.Driver, edits ...func(*runtime.Container)) runtime.Kernel {
	t.Helper()
	k := s.boot(t, d)
	if err := k.Attach(deadline(t), s.container(t, edits...)); err != nil {
		t.Fatalf("attach: %v", err)
	}
	return k
}

func (s *suite) container(t *testing.T, edits ...func(*runtime.Container)) runtime.Container {
	t.Helper()
	c := runtime.Container{Rootfs: s.Rootfs(t), Resources: sandbox.Resources{
		MilliCPU: 1000, Memory: 256 << 20, MemoryLimit: 512 << 20, Disk: 1 << 30, Pids: 512}}
	for _, e := range edits {
		e(&c)
	}
	return c
}

func deadline(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

// result is how a process went.
type result struct {
	stdout, stderr string
	end            sandbox.ProcessEnd
}

// collector gathers the events of one process.
type collector struct {
	result
	started sandbox.ProcessStarted
	offset  int64
	ended   bool
	errs    []error
}

func (c *collector) sink(e sandbox.ProcessEvent) error {
	switch {
	case e.Started != nil:
		c.started = *e.Started
	case e.Output != nil:
		if e.Output.Offset != c.offset {
			c.errs = append(c.errs, fmt.Errorf("output at %d follows %d", e.Output.Offset, c.offset))
		}
		c.offset = e.Output.Offset + int64(len(e.Output.Data))
		if e.Output.Stream == sandbox.Stderr {
			c.stderr += string(e.Output.Data)
		} else {
			c.stdout += string(e.Output.Data)
		}
	case e.Lost != nil:
		c.errs = append(c.errs, fmt.Errorf("lost bytes %d to %d", e.Lost.From, e.Lost.To))
	case e.End != nil:
		c.end, c.ended = *e.End, true
	}
	return nil
}

// exec runs a process to its end. An ExecID is made up where there is none.
func (s *suite) exec(t *testing.T, k runtime.Kernel, spec sandbox.ProcessSpec) result {
	t.Helper()
	r, err := s.tryExec(deadline(t), k, spec)
	if err != nil {
		t.Fatalf("exec %v: %v", spec.Args, err)
	}
	return r
}

func (s *suite) tryExec(ctx context.Context, k runtime.Kernel, spec sandbox.ProcessSpec) (result, error) {
	if spec.ExecID == "" {
		spec.ExecID = "x" + s.id()
	}
	var c collector
	if err := k.Guest().Start(ctx, spec, 0, c.sink); err != nil {
		return c.result, err
	}
	if !c.ended {
		c.errs = append(c.errs, errors.New("the stream ended without an end"))
	}
	return c.result, errors.Join(c.errs...)
}

// sh runs a script that must succeed and returns its standard output, trimmed.
func (s *suite) sh(t *testing.T, k runtime.Kernel, script string) string {
	t.Helper()
	r := s.exec(t, k, shell(script))
	if r.end.Cause != sandbox.Exited || r.end.ExitCode != 0 {
		t.Fatalf("%q: %v\n%s", script, r.end, r.stderr)
	}
	return strings.TrimSpace(r.stdout)
}

// fails runs a script that must not succeed.
func (s *suite) fails(t *testing.T, k runtime.Kernel, script string) result {
	t.Helper()
	r := s.exec(t, k, shell(script))
	if r.end.Cause == sandbox.Exited && r.end.ExitCode == 0 {
		t.Errorf("%q succeeded: %s", script, r.stdout)
	}
	return r
}

func shell(script string) sandbox.ProcessSpec {
	return sandbox.ProcessSpec{Args: []string{"sh", "-c", script}, User: "root"}
}

// background starts a process and hands back its end when it comes.
func (s *suite) background(t *testing.T, k runtime.Kernel, spec sandbox.ProcessSpec) (started <-chan struct{}, end <-chan result) {
	t.Helper()
	if spec.ExecID == "" {
		spec.ExecID = "x" + s.id()
	}
	st, en := make(chan struct{}), make(chan result, 1)
	ctx := deadline(t)
	go func() {
		var c collector
		first := true
		_ = k.Guest().Start(ctx, spec, 0, func(e sandbox.ProcessEvent) error {
			if first {
				first = false
				close(st)
			}
			return c.sink(e)
		})
		if first {
			close(st)
		}
		en <- c.result
	}()
	return st, en
}

func waitFor[T any](t *testing.T, what string, c <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-c:
	case <-time.After(patience):
		t.Fatalf("waited in vain for %s", what)
	}
	return v
}

func isDone(k runtime.Kernel) bool {
	select {
	case <-k.Done():
		return true
	default:
		return false
	}
}

func expectClass(t *testing.T, what string, err error, want sandbox.Class) {
	t.Helper()
	if got := sandbox.ClassOf(err); got != want {
		t.Errorf("%s: %v (%q), want %q", what, err, got, want)
	}
}

// pattern is n bytes in which every block differs, so that a block lost or
// doubled shows.
func pattern(n int) []byte {
	var b bytes.Buffer
	for i := 0; b.Len() < n; i++ {
		fmt.Fprintf(&b, "%015d\n", i)
	}
	return b.Bytes()[:n]
}
