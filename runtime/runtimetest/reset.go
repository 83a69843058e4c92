package runtimetest

import (
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

func (s *suite) testResetLeavesNothing(t *testing.T) {
	k := s.attached(t, s.open(t))
	names := func() []string {
		list, _, err := k.Guest().List(deadline(t), "/", sandbox.ListOptions{Depth: 2, Limit: 100_000})
		if err != nil {
			t.Fatal(err)
		}
		var out []string
		for _, f := range list {
			out = append(out, f.Path)
		}
		return out
	}
	pristine := names()
	for range 3 {
		s.sh(t, k, "echo old > marker; mkdir -p a/b; echo old > a/b/c; mkfifo pipe; ln -s marker link")
		if err := k.Reset(deadline(t), s.container(t)); err != nil {
			t.Fatalf("reset: %v", err)
		}
		s.sh(t, k, "! test -e marker && ! test -e a && ! test -e pipe && ! test -L link")
		if got := names(); len(got) != len(pristine) {
			t.Errorf("the root has %d entries, had %d at first\n%v\n%v", len(got), len(pristine), got, pristine)
		}
		if _, err := k.Guest().Stat(deadline(t), "/marker"); !errors.Is(err, sandbox.ErrNotFound) {
			t.Errorf("the file API still sees it: %v", err)
		}
		if procs, _, err := k.Guest().Processes(deadline(t)); err != nil || len(procs) != 1 {
			t.Errorf("processes of the old episode are listed: %+v, %v", procs, err)
		}
	}
	if isDone(k) {
		t.Error("a reset counts as the kernel's end")
	}
}

func (s *suite) testResetEndsProcesses(t *testing.T) {
	k := s.attached(t, s.open(t))
	started, end := s.background(t, k, shell("echo up; sleep 1000"))
	waitFor(t, "the process", started)
	if err := k.Reset(deadline(t), s.container(t)); err != nil {
		t.Fatalf("reset: %v", err)
	}
	if r := waitFor(t, "its end", end); r.end.Cause != sandbox.ResetCause {
		t.Errorf("a process of the old episode ended as %+v", r.end)
	}
	s.sh(t, k, "true")
}

// testResetMeetsRequests: a request that came amid a reset is served in the new
// episode, and a process that was running ends with cause reset. Nobody is told
// that there is no container.
func (s *suite) testResetMeetsRequests(t *testing.T) {
	k := s.attached(t, s.open(t))
	ctx := deadline(t)
	over := make(chan struct{})
	var wg sync.WaitGroup
	for who := range 3 {
		wg.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-over:
					return
				default:
				}
				var end *sandbox.ProcessEnd
				err := k.Guest().Start(ctx, sandbox.ProcessSpec{ExecID: fmt.Sprintf("meets-%d-%d", who, i), Command: "true"}, 0, func(ev sandbox.ProcessEvent) error {
					end = ev.End
					return nil
				})
				if err != nil || end == nil || end.Cause != sandbox.ResetCause && (end.Cause != sandbox.Exited || end.ExitCode != 0) {
					t.Errorf("exec %d of %d: %v, %+v", i, who, err, end)
				}
				if _, err := k.Guest().Stat(ctx, "/"); err != nil {
					t.Errorf("stat %d of %d: %v", i, who, err)
				}
			}
		})
	}
	for range 25 {
		if err := k.Reset(ctx, s.container(t)); err != nil {
			t.Errorf("reset: %v", err)
			break
		}
	}
	close(over)
	wg.Wait()
}

func (s *suite) testResetTakesTheNewContainer(t *testing.T) {
	k := s.attached(t, s.open(t), func(c *runtime.Container) { c.Env = map[string]string{"OLD": "1", "BOTH": "old"} })
	err := k.Reset(deadline(t), s.container(t, func(c *runtime.Container) {
		c.Env = map[string]string{"NEW": "2", "BOTH": "new"}
		c.Rootfs.WorkingDir = "/other"
	}))
	if err != nil {
		t.Fatalf("reset: %v", err)
	}
	if got := s.sh(t, k, `echo "$OLD$NEW$BOTH"; echo x > here`); got != "2new" {
		t.Errorf("environment %q", got)
	}
	if _, err := k.Guest().Stat(deadline(t), "/other/here"); err != nil {
		t.Errorf("working directory: %v", err)
	}
}
