package runtimetest

import (
	"errors"
	"testing"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// A kernel that was vacated serves another sandbox as a new one would: nothing that
// was written or runs is left, who called the one before does not reach the next, and
// limits and counters are the next one's.
func (s *suite) testVacate(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "able to use kernels again", d.Capabilities().Reuse)
	k := s.boot(t, d)
	u := k.(runtime.Reuser)
	if err := u.Vacate(deadline(t)); !errors.Is(err, sandbox.ErrPrecondition) {
		t.Fatalf("vacate of a kernel without a container: %v", err)
	}
	for use := range 4 {
		pids := int64(64 + 64*use)
		if err := k.Attach(deadline(t), s.container(t, func(c *runtime.Container) {
			c.Sandbox, c.Resources.Pids = "box", pids
			c.Env = map[string]string{"USE": string(rune('a' + use))}
		})); err != nil {
			t.Fatalf("attach %d: %v", use, err)
		}
		s.sh(t, k, "! test -e marker && test $USE = "+string(rune('a'+use)))
		if procs, _, err := k.Guest().Processes(deadline(t)); err != nil || len(procs) != 1 {
			t.Errorf("processes of the use before are listed: %+v, %v", procs, err)
		}
		if d.Capabilities().Limits {
			// Counted for a sandbox alone: what was burnt before is not its own.
			st, err := k.Stats(deadline(t))
			if err != nil || st.CPUTime <= 0 || use > 0 && st.CPUTime.Seconds() > 0.9 {
				t.Errorf("use %d begins with %v of CPU time, %v", use, st.CPUTime, err)
			}
			s.sh(t, k, "timeout 1 sh -c 'while :; do :; done' || true")
		}
		s.sh(t, k, "echo old > marker")
		if use == 2 { // also a container that was reset, and has the next one ready
			for range 2 {
				if err := k.Reset(deadline(t), s.container(t)); err != nil {
					t.Fatal(err)
				}
				s.sh(t, k, "echo old > marker")
			}
		}
		started, end := s.background(t, k, shell("echo up; sleep 1000"))
		waitFor(t, "the process", started)
		old := k.Guest()
		old.Retire()
		waitFor(t, "its caller", end)
		if err := u.Vacate(deadline(t)); err != nil {
			t.Fatalf("vacate %d: %v", use, err)
		}
		if _, err := old.Stat(deadline(t), "/"); !errors.Is(err, sandbox.ErrUnavailable) {
			t.Errorf("who called the one before: %v", err)
		}
		if _, err := k.Guest().Stat(deadline(t), "/"); !errors.Is(err, sandbox.ErrPrecondition) {
			t.Errorf("a call between two: %v", err)
		}
		if isDone(k) {
			t.Fatalf("vacating counts as the kernel's end: %+v", k.Exit())
		}
	}
}

// One that stands still cannot be vacated.
func (s *suite) testVacatePaused(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "able to use kernels again", d.Capabilities().Reuse && d.Capabilities().Pause)
	k := s.attached(t, d)
	if err := k.(runtime.Pauser).Pause(deadline(t)); err != nil {
		t.Fatal(err)
	}
	if err := k.(runtime.Reuser).Vacate(deadline(t)); !errors.Is(err, sandbox.ErrPrecondition) {
		t.Errorf("vacate of a paused kernel: %v", err)
	}
}
