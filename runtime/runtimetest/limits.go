package runtimetest

import (
	"strings"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

func (s *suite) testMemoryLimit(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "limiting", d.Capabilities().Limits)
	for name, bomb := range map[string]string{
		"anonymous": "head -c 2000000000 /dev/zero | tail -c 2000000000 > /dev/null",
		"shared":    "head -c 2000000000 /dev/zero > /dev/shm/big",
	} {
		t.Run(name, func(t *testing.T) {
			k := s.attached(t, d, func(c *runtime.Container) { c.Resources.Memory, c.Resources.MemoryLimit = 64<<20, 128<<20 })
			neighbour := s.attached(t, d)
			s.background(t, k, shell(bomb))
			waitFor(t, "the end", k.Done())
			if x := k.Exit(); x.Cause != sandbox.OOM || x.Detail == "" {
				t.Errorf("exit %+v", x)
			}
			s.sh(t, neighbour, "true")
		})
	}
	t.Run("what is written to disk is not memory", func(t *testing.T) {
		k := s.attached(t, d, func(c *runtime.Container) { c.Resources.Memory, c.Resources.MemoryLimit = 64<<20, 128<<20 })
		s.sh(t, k, "head -c 300000000 /dev/zero > /big && wc -c < /big && rm /big")
		if isDone(k) {
			t.Errorf("exit %+v", k.Exit())
		}
	})
}

func (s *suite) testDiskLimit(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "limiting", d.Capabilities().Limits)
	k := s.attached(t, d, func(c *runtime.Container) { c.Resources.Disk = 64 << 20 })
	r := s.fails(t, k, "head -c 200000000 /dev/zero > /big")
	if !strings.Contains(r.stderr, "No space left") {
		t.Errorf("it failed with %q", r.stderr)
	}
	if got := s.sh(t, k, "test $(wc -c < /big) -gt 30000000 && rm /big && echo again > /small && cat /small"); got != "again" {
		t.Errorf("after making room: %q", got)
	}
	st, err := k.Stats(deadline(t))
	if err != nil || st.DiskUsed > 100<<20 {
		t.Errorf("stats %+v, %v", st, err)
	}
}

func (s *suite) testPidsLimit(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "limiting", d.Capabilities().Limits)
	k := s.attached(t, d, func(c *runtime.Container) { c.Resources.Pids = 64 })
	neighbour := s.attached(t, d)
	spec := shell("i=0; while [ $i -lt 200 ]; do sleep 1000 & i=$((i+1)); done; echo all; wait")
	spec.ExecID = "bomb"
	_, end := s.background(t, k, spec)
	s.sh(t, neighbour, "true")
	// The shell gives up at its first fork that fails, or goes on and waits:
	// in both cases never 200 live.
	deadlineAt := time.Now().Add(patience)
	for {
		_, tasks, err := k.Guest().Processes(deadline(t))
		if err != nil {
			t.Fatal(err)
		}
		if len(tasks) > 70 {
			t.Errorf("%d processes with a limit of 64", len(tasks))
		}
		if len(tasks) > 40 || time.Now().After(deadlineAt) {
			break
		}
		select {
		case r := <-end:
			if strings.Contains(r.stdout, "all") {
				t.Errorf("all 200 were started: %+v", r)
			}
			return
		case <-time.After(20 * time.Millisecond):
		}
	}
	if err := k.Guest().Signal(deadline(t), "bomb", "SIGKILL", false); err != nil && sandbox.ClassOf(err) != sandbox.NotFound && sandbox.ClassOf(err) != sandbox.Precondition {
		t.Fatalf("kill the bomb: %v", err)
	}
	if r := waitFor(t, "the bomb", end); strings.Contains(r.stdout, "all") {
		t.Error("all 200 were started")
	}
}

func (s *suite) testCPULimit(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "limiting", d.Capabilities().Limits)
	k := s.attached(t, d, func(c *runtime.Container) { c.Resources.MilliCPU = 200 })
	before, err := k.Stats(deadline(t))
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	spec := shell("(while :; do :; done) & (while :; do :; done) & wait")
	spec.Timeout = 2 * time.Second
	s.exec(t, k, spec)
	after, err := k.Stats(deadline(t))
	if err != nil {
		t.Fatal(err)
	}
	// A busy machine can only make the share smaller.
	if share := float64(after.CPUTime-before.CPUTime) / float64(time.Since(start)); share > 0.35 {
		t.Errorf("two busy loops used %.2f of a core, limit 0.2", share)
	}
}
