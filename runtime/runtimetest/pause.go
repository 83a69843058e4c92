package runtimetest

import (
	"context"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

func pause(t *testing.T, k runtime.Kernel) {
	t.Helper()
	for range 2 { // idempotent
		if err := k.(runtime.Pauser).Pause(deadline(t)); err != nil {
			t.Fatalf("pause: %v", err)
		}
	}
	if !k.(runtime.Pauser).Paused() {
		t.Error("paused, and it says it is not")
	}
}

func resume(t *testing.T, k runtime.Kernel) {
	t.Helper()
	for range 2 {
		if err := k.(runtime.Pauser).Resume(deadline(t)); err != nil {
			t.Fatalf("resume: %v", err)
		}
	}
	if k.(runtime.Pauser).Paused() {
		t.Error("resumed, and it says it is not")
	}
}

// expectStill checks that requests wait while a kernel is paused.
func (s *suite) expectStill(t *testing.T, k runtime.Kernel) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := k.Guest().Ping(ctx); sandbox.ClassOf(err) != sandbox.DeadlineReached {
		t.Errorf("a paused kernel answers a ping: %v", err)
	}
}

// busy is a process that burns the CPU and counts.
const busy = "i=0; while :; do i=$((i+1)); echo $i > count; done"

func (s *suite) count(t *testing.T, k runtime.Kernel) int {
	t.Helper()
	n, _ := strconv.Atoi(s.sh(t, k, "while ! test -s count; do :; done; cat count"))
	return n
}

func (s *suite) testPause(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "able to pause", d.Capabilities().Pause)
	k := s.attached(t, d)
	spec := shell(busy)
	spec.ExecID = "busy"
	started, _ := s.background(t, k, spec)
	waitFor(t, "the process", started)
	s.count(t, k)
	pause(t, k)
	before, err := k.Stats(deadline(t)) // the host's figures need no answer from inside
	if err != nil {
		t.Fatal(err)
	}
	s.expectStill(t, k)
	after, err := k.Stats(deadline(t))
	if err != nil {
		t.Fatal(err)
	}
	if d.Capabilities().Limits { // the driver counts the CPU: a busy process would have had all of it
		if used := after.CPUTime - before.CPUTime; used > 10*time.Millisecond {
			t.Errorf("a paused kernel used %v of 50 ms", used)
		}
	}
	asked := make(chan error, 1)
	go func() { asked <- k.Guest().Ping(deadline(t)) }()
	resume(t, k)
	if err := waitFor(t, "the request that waited", asked); err != nil {
		t.Error(err)
	}
	n := s.count(t, k)
	for s.count(t, k) == n {
	}
}

// What a process has of its time does not run while its kernel stands still.
func (s *suite) testPauseStopsDeadlines(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "able to pause", d.Capabilities().Pause)
	k := s.attached(t, d)
	spec := shell("until test -e done; do sleep 0.01; done; exit 3")
	spec.ExecID, spec.Timeout = "short", 2*time.Second
	started, end := s.background(t, k, spec)
	waitFor(t, "the process", started)
	pause(t, k)
	// Real time, for once: the clock in question is the kernel's.
	time.Sleep(spec.Timeout + 500*time.Millisecond)
	resume(t, k)
	s.sh(t, k, "touch done")
	if r := waitFor(t, "its end", end); r.end.Cause != sandbox.Exited || r.end.ExitCode != 3 || r.end.Duration > spec.Timeout {
		t.Errorf("it ended as %+v", r.end)
	}
	spec = shell("sleep 1000")
	spec.Timeout = 50 * time.Millisecond
	if r := s.exec(t, k, spec); r.end.Cause != sandbox.Deadline {
		t.Errorf("deadlines no longer work: %+v", r.end)
	}
}

func (s *suite) testPausedDestroy(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "able to pause", d.Capabilities().Pause)
	k := s.attached(t, d)
	pause(t, k)
	if err := k.Destroy(deadline(t)); err != nil {
		t.Errorf("destroy: %v", err)
	}
	waitFor(t, "done", k.Done())
}

func (s *suite) testPausedAdopt(t *testing.T) {
	dir := t.TempDir()
	d := s.openIn(t, dir)
	s.need(t, d, "able to pause and adopt", d.Capabilities().Pause && d.Capabilities().Adopt)
	k := s.mortal(t, d)
	h := journaled(t, k)
	if err := k.Attach(deadline(t), s.container(t)); err != nil {
		t.Fatal(err)
	}
	spec := shell("until test -e done; do sleep 0.01; done; exit 3")
	spec.ExecID, spec.Timeout = "short", patience
	started, _ := s.background(t, k, spec)
	waitFor(t, "the process", started)
	pause(t, k)
	d = s.restart(t, d, dir)
	k, err := d.Adopt(deadline(t), h)
	if err != nil {
		t.Fatalf("adopt: %v", err)
	}
	destroyAtEnd(t, k)
	if !k.(runtime.Pauser).Paused() {
		t.Fatal("an adopted kernel is no longer paused")
	}
	s.expectStill(t, k)
	resume(t, k)
	s.sh(t, k, "touch done")
	if end, err := k.Guest().Wait(deadline(t), "short"); err != nil || end.ExitCode != 3 {
		t.Errorf("its process ended as %+v, %v", end, err)
	}
	if err := k.Reset(deadline(t), s.container(t)); err != nil {
		t.Errorf("reset: %v", err)
	}
}

func (s *suite) testPausedCheckpoint(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "able to pause and checkpoint", d.Capabilities().Pause && d.Capabilities().Checkpoint)
	k := s.attached(t, d)
	s.sh(t, k, "echo kept > file")
	spec := shell("until test -e done; do sleep 0.01; done; exit 3")
	spec.ExecID, spec.Timeout = "short", 2*time.Second
	if d.Capabilities().Processes {
		started, _ := s.background(t, k, spec)
		waitFor(t, "the process", started)
	}
	pause(t, k)
	dir, cp := s.checkpoint(t, k)
	if !k.(runtime.Pauser).Paused() {
		t.Error("a checkpoint ended the pause")
	}
	s.expectStill(t, k)
	time.Sleep(spec.Timeout) // as a checkpoint lies on disk; see testPauseStopsDeadlines
	child := s.restore(t, d, dir, cp)
	for i, k := range []runtime.Kernel{child, k} {
		resume(t, k) // the child runs, and it is no error
		if got := s.sh(t, k, "cat file; touch done"); got != "kept" {
			t.Errorf("%d: the file has %q", i, got)
		}
		if !d.Capabilities().Processes {
			continue
		}
		if end, err := k.Guest().Wait(deadline(t), "short"); err != nil || end.ExitCode != 3 {
			t.Errorf("%d: its process ended as %+v, %v", i, end, err)
		}
	}
}

// A pause lets calls that end by themselves end, and freezes none of them.
func (s *suite) testPauseAmongCalls(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "able to pause", d.Capabilities().Pause)
	k := s.attached(t, d)
	var one sync.Mutex // pauses or resumes at a time, as a node has it
	var resumes sync.WaitGroup
	k.Guest().OnHeld(func() {
		resumes.Go(func() {
			one.Lock()
			defer one.Unlock()
			if err := k.(runtime.Pauser).Resume(deadline(t)); err != nil {
				t.Error(err)
			}
		})
	})
	defer resumes.Wait() // one that is under way ends with the test's context
	defer k.Guest().OnHeld(nil)
	stop, done := make(chan struct{}), make(chan error, 1)
	go func() {
		for {
			select {
			case <-stop:
				done <- nil
				return
			default:
			}
			if _, err := k.Guest().Stat(deadline(t), "/"); err != nil {
				done <- err
				return
			}
		}
	}()
	for range 5 {
		one.Lock()
		err := k.(runtime.Pauser).Pause(deadline(t))
		one.Unlock()
		if err != nil {
			t.Fatal(err)
		}
		for k.(runtime.Pauser).Paused() { // a call that met the pause resumes it
			time.Sleep(time.Millisecond)
		}
	}
	close(stop)
	if err := waitFor(t, "the calls", done); err != nil {
		t.Error(err)
	}
}
