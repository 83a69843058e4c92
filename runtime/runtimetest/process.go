package runtimetest

import (
	"strings"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

func (s *suite) testProcess(t *testing.T) {
	k := s.attached(t, s.open(t))
	t.Run("output and exit code", func(t *testing.T) {
		r := s.exec(t, k, shell("echo out; echo err >&2; exit 7"))
		if r.stdout != "out\n" || r.stderr != "err\n" || r.end.Cause != sandbox.Exited || r.end.ExitCode != 7 || r.end.OutputBytes != 8 {
			t.Errorf("%+v", r)
		}
	})
	t.Run("a signal", func(t *testing.T) {
		r := s.exec(t, k, shell("kill -TERM $$"))
		if r.end.Cause != sandbox.Signalled || r.end.Signal != "SIGTERM" || r.end.ExitCode != 128+15 {
			t.Errorf("%+v", r.end)
		}
	})
	t.Run("a command line", func(t *testing.T) {
		if r := s.exec(t, k, sandbox.ProcessSpec{Command: "echo a | tr a b && exit 3"}); r.stdout != "b\n" || r.end.ExitCode != 3 {
			t.Errorf("%+v", r)
		}
	})
	t.Run("input", func(t *testing.T) {
		r := s.exec(t, k, sandbox.ProcessSpec{Args: []string{"cat"}, Input: []byte("hello")})
		if r.stdout != "hello" {
			t.Errorf("%+v", r)
		}
	})
	t.Run("no such program", func(t *testing.T) {
		if _, err := s.tryExec(deadline(t), k, sandbox.ProcessSpec{Args: []string{"no-such-program-here"}}); err == nil {
			t.Error("it ran")
		}
	})
	t.Run("a deadline kills the tree and keeps the output", func(t *testing.T) {
		spec := shell("echo begun; sleep 1000 & sleep 1000")
		spec.Timeout = 300 * time.Millisecond
		r := s.exec(t, k, spec)
		if r.end.Cause != sandbox.Deadline || r.stdout != "begun\n" {
			t.Errorf("%+v", r)
		}
	})
	t.Run("a child that holds the pipes does not keep it from ending", func(t *testing.T) {
		r := s.exec(t, k, shell("sleep 1000 & echo done"))
		if r.end.Cause != sandbox.Exited || r.stdout != "done\n" {
			t.Errorf("%+v", r)
		}
	})
}

func (s *suite) testEnvironment(t *testing.T) {
	k := s.attached(t, s.open(t), func(c *runtime.Container) {
		c.Rootfs.Env = append(c.Rootfs.Env, "IMAGE_ONLY=image", "BOTH=image", "ALL=image")
		c.Rootfs.WorkingDir = "/work/deep"
		c.Env = map[string]string{"SANDBOX_ONLY": "sandbox", "BOTH": "sandbox", "ALL": "sandbox"}
	})
	spec := shell(`echo "$IMAGE_ONLY $SANDBOX_ONLY $BOTH $ALL $PROCESS_ONLY"`)
	spec.Env = map[string]string{"ALL": "process", "PROCESS_ONLY": "process value"}
	if got, want := s.exec(t, k, spec).stdout, "image sandbox sandbox process process value\n"; got != want {
		t.Errorf("environment %q, want %q", got, want)
	}
	if got := s.sh(t, k, `echo "$PROCESS_ONLY$ALL"`); got != "sandbox" {
		t.Errorf("one process's environment is in the next: %q", got)
	}

	s.sh(t, k, "echo here > marker; mkdir sub; echo below > sub/marker")
	f, _, err := k.Guest().ReadFile(deadline(t), "/work/deep/marker", 0, 0)
	if err != nil || string(f) != "here\n" {
		t.Errorf("the image's working directory is not where processes start: %q, %v", f, err)
	}
	spec = shell("cat marker")
	spec.Cwd = "/work/deep/sub"
	if got := s.exec(t, k, spec).stdout; got != "below\n" {
		t.Errorf("cwd: %q", got)
	}
	spec.Cwd = "/no/such/dir"
	if _, err := s.tryExec(deadline(t), k, spec); err == nil {
		t.Error("it ran in a directory that is not there")
	}
}

func (s *suite) testReplay(t *testing.T) {
	k := s.attached(t, s.open(t))
	spec := shell("echo once >> count; cat count; echo end")
	spec.ExecID = "the-same"
	first := s.exec(t, k, spec)
	second := s.exec(t, k, spec)
	if first.stdout != "once\nend\n" || second.stdout != first.stdout {
		t.Errorf("the same exec id twice: %q then %q", first.stdout, second.stdout)
	}
	c := collector{offset: 5}
	if err := k.Guest().Attach(deadline(t), "the-same", 5, c.sink); err != nil || c.stdout != "end\n" {
		t.Errorf("from offset 5: %q, %v", c.stdout, err)
	}
	end, err := k.Guest().Wait(deadline(t), "the-same")
	if err != nil || end.ExitCode != 0 || end.Cause != sandbox.Exited {
		t.Errorf("wait: %+v, %v", end, err)
	}
	procs, _, err := k.Guest().Processes(deadline(t))
	if err != nil || len(procs) != 1 || procs[0].ExecID != "the-same" || procs[0].End == nil {
		t.Errorf("processes %+v, %v", procs, err)
	}
}

func (s *suite) testOutput(t *testing.T) {
	k := s.attached(t, s.open(t))
	r := s.exec(t, k, shell("i=0; while [ $i -lt 20000 ]; do echo $i; i=$((i+1)); done"))
	lines := strings.Split(strings.TrimSpace(r.stdout), "\n")
	if len(lines) != 20000 || lines[19999] != "19999" {
		t.Errorf("%d lines came, want 20000", len(lines))
	}
	big := 0
	err := k.Guest().Start(deadline(t), sandbox.ProcessSpec{ExecID: "big", Args: []string{"head", "-c", "33554432", "/dev/zero"}}, 0,
		func(e sandbox.ProcessEvent) error {
			if e.Output != nil {
				big += len(e.Output.Data)
			}
			if e.Lost != nil {
				t.Errorf("a reader that kept up lost %+v", *e.Lost)
			}
			return nil
		})
	if err != nil || big != 32<<20 {
		t.Errorf("%d bytes of 32 MiB came: %v", big, err)
	}
}
