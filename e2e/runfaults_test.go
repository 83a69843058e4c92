package e2e

import (
	"context"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/e2e/world"
	"github.com/cove-sandbox/cove/sandbox"
)

// trainer is a run that is kept alive until its client is killed.
type trainer struct {
	w   *world.World
	run *covev1.Run
	die func() // no heartbeat comes after it
}

func newTrainer(t *testing.T, w *world.World, name string, ttl time.Duration) *trainer {
	t.Helper()
	resp, err := w.Client().Runs.Create(t.Context(), connect.NewRequest(&covev1.CreateRunRequest{Name: name, Ttl: durationpb.New(ttl)}))
	if err != nil {
		t.Fatal(err)
	}
	beats, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan struct{})
	go func() {
		defer close(done)
		for beats.Err() == nil {
			_, _ = w.Client().Runs.Heartbeat(beats, connect.NewRequest(&covev1.HeartbeatRunRequest{Run: resp.Msg.Run.Id})) // the server may be down
			select {
			case <-beats.Done():
			case <-time.After(ttl / 10):
			}
		}
	}()
	tr := &trainer{w: w, run: resp.Msg.Run, die: sync.OnceFunc(func() { cancel(); <-done })}
	t.Cleanup(func() {
		tr.die()
		_, _ = w.Client().Runs.Reap(context.WithoutCancel(t.Context()), connect.NewRequest(&covev1.ReapRunRequest{Run: name}))
	})
	return tr
}

func (tr *trainer) info(t *testing.T) *covev1.Run {
	t.Helper()
	resp, err := tr.w.Client().Runs.Get(t.Context(), connect.NewRequest(&covev1.GetRunRequest{Run: tr.run.Id}))
	if err != nil {
		t.Fatal(err)
	}
	return resp.Msg.Run
}

func (tr *trainer) steps(t *testing.T, running bool) []*covev1.Step {
	t.Helper()
	resp, err := tr.w.Client().Runs.ListSteps(t.Context(), connect.NewRequest(&covev1.ListStepsRequest{Run: tr.run.Id, PageSize: 1000, Running: running}))
	if err != nil {
		t.Fatal(err)
	}
	if running {
		return resp.Msg.Running
	}
	return resp.Msg.Steps
}

func (tr *trainer) box(t *testing.T) *world.Box {
	t.Helper()
	spec := world.Small()
	spec.Rollout = sandbox.Rollout{Run: tr.run.Id, Group: "g"}
	return tr.w.Create(t, spec)
}

// reaped is that all of a run is gone within one lease period, and what a loaded
// machine needs beside it.
func (tr *trainer) reaped(t *testing.T, ttl time.Duration) {
	t.Helper()
	world.Eventually(t, ttl+30*time.Second, "the run is over", func() bool { return tr.info(t).State == "ended" })
	run := tr.info(t)
	if run.Sandboxes != 0 || run.End.GetCause() != string(sandbox.LeaseExpired) {
		t.Errorf("it ended as %v with %d sandboxes", run.End, run.Sandboxes)
	}
	world.Eventually(t, 10*time.Second, "no sandbox is left", func() bool {
		sbs, err := tr.w.Running(t.Context())
		return err == nil && len(sbs) == 0
	})
}

// kill ends a client as kill -9 does, and the heartbeats with it.
func (tr *trainer) kill(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // it was killed
	tr.die()
}

// A trainer that is killed amid a create, an exec or a grade leaves nothing after
// one lease period, and each end says what it was.
func TestRunClientDies(t *testing.T) {
	const ttl = 3 * time.Second
	w := world.New(t, world.Options{})
	t.Run("create", func(t *testing.T) {
		tr := newTrainer(t, w, "create", ttl)
		cmd := w.Command(t, "runs", "group", "create", "create", "--count", "12", "--memory", "64MiB")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		world.Eventually(t, 60*time.Second, "some of the group are there", func() bool { return tr.info(t).Sandboxes > 0 })
		tr.kill(t, cmd)
		tr.reaped(t, ttl)
	})
	t.Run("exec", func(t *testing.T) {
		tr := newTrainer(t, w, "exec", ttl)
		b := tr.box(t)
		b.Must(t, "echo first")
		cmd := w.Command(t, "exec", b.ID, "--", "sleep", "1000")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		world.Eventually(t, 60*time.Second, "the step has begun", func() bool { return len(tr.steps(t, true)) == 1 })
		tr.kill(t, cmd)
		tr.reaped(t, ttl)
		steps := tr.steps(t, false)
		if len(steps) != 2 || steps[0].End.GetCause() != "exited" || steps[1].End.GetCause() != string(sandbox.LeaseExpired) {
			t.Errorf("%v", steps)
		}
	})
	t.Run("grade", func(t *testing.T) {
		tr := newTrainer(t, w, "grade", ttl)
		b := tr.box(t)
		b.Must(t, "mkdir -p /work && echo here > /work/f")
		cmd := w.Command(t, "grade", b.ID, "--command", "sleep 8; grep -q here /work/f", "--artifact", "/work")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		var id string
		world.Eventually(t, 60*time.Second, "the grade is under way", func() bool {
			page, err := w.Client().Grades.List(t.Context(), connect.NewRequest(&covev1.ListGradesRequest{Sandbox: b.ID}))
			if err == nil && len(page.Msg.Grades) == 1 {
				id = page.Msg.Grades[0].Id
			}
			return id != "" && graders(t, w, b) == 1
		})
		tr.kill(t, cmd)
		graded(t, w.WaitGrade(t, id), 1) // no lease ends what is graded, however long it lasts
		tr.reaped(t, ttl)
	})
}

// A server that is killed amid a create, an exec, a grade or a plan: the next one
// goes on, nothing runs twice, and nothing is left that nobody knows of.
func TestRunServerDies(t *testing.T) {
	w := world.New(t, world.Options{})
	tr := newTrainer(t, w, "r", 20*time.Second)
	again := func() { w.Kill(t); w.Start(t) }
	t.Run("create", func(t *testing.T) {
		spec := world.Small()
		args := []string{"runs", "group", "create", "r", "--count", "6", "--memory", sandbox.FormatSize(spec.Resources.Memory), "--idempotency-key", "once"}
		cmd := w.Command(t, args...)
		var out strings.Builder
		cmd.Stdout = &out
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		world.Eventually(t, 60*time.Second, "some of the group are there", func() bool { return tr.info(t).Sandboxes > 0 })
		again()
		if err := cmd.Wait(); err != nil { // it asks again by the key
			t.Fatal(err)
		}
		ids := strings.Fields(out.String())
		if len(ids) != 6 {
			t.Errorf("%d of 6 stand: %v", len(ids), ids)
		}
		world.Eventually(t, 30*time.Second, "those that nobody learned of are gone", func() bool { return tr.info(t).Sandboxes == 6 })
		w.CLI(t, append([]string{"rm"}, ids...)...)
	})
	t.Run("exec", func(t *testing.T) {
		b := tr.box(t)
		before := len(tr.steps(t, false))
		cmd := w.Command(t, "exec", b.ID, "--", "sh", "-c", "sleep 3; echo ran >> /tmp/ran")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		world.Eventually(t, 60*time.Second, "the step has begun", func() bool { return len(tr.steps(t, true)) == 1 })
		again()
		_ = cmd.Wait() // the command may have given up
		world.Eventually(t, 60*time.Second, "the step has ended", func() bool { return len(tr.steps(t, false)) == before+1 })
		if s := tr.steps(t, false)[before]; s.End.GetCause() != "exited" || s.End.GetExitCode() != 0 {
			t.Errorf("%v", s.End)
		}
		if got := b.Must(t, "cat /tmp/ran"); got != "ran" {
			t.Errorf("it ran as %q", got)
		}
	})
	t.Run("grade and plan", func(t *testing.T) {
		b := tr.box(t)
		b.Must(t, "mkdir -p /work && echo here > /work/f")
		plan, err := w.Client().Runs.SetPlan(t.Context(), connect.NewRequest(&covev1.SetPlanRequest{Run: "r", Items: []*covev1.PlanItem{{Image: "base", Count: 4}}}))
		if err != nil {
			t.Fatal(err)
		}
		g, err := b.TryGrade(t.Context(), &covev1.CreateGradeRequest{Command: "sleep 600", Artifacts: []string{"/work"}})
		if err != nil {
			t.Fatal(err)
		}
		again()
		if got := w.WaitGrade(t, g.Id); got.State != "infra" || got.Reward != nil {
			t.Errorf("a grade that nobody saw the end of: %v", got)
		}
		b.WantRunning(t)
		world.Eventually(t, 60*time.Second, "the plan is staged again", func() bool {
			got, err := w.Client().Runs.GetPlan(t.Context(), connect.NewRequest(&covev1.GetPlanRequest{Run: "r", Wait: durationpb.New(time.Second)}))
			return err == nil && got.Msg.Plan.State == "ready" && got.Msg.Plan.Version == plan.Msg.Plan.Version
		})
	})
	if _, err := w.Client().Runs.End(t.Context(), connect.NewRequest(&covev1.EndRunRequest{Run: "r"})); err != nil {
		t.Fatal(err)
	}
	if run := tr.info(t); run.Sandboxes != 0 || run.State != "ended" {
		t.Errorf("%v", run)
	}
}

// Steps that end badly say how, and the sandbox takes the next.
func TestRunStepsEndTyped(t *testing.T) {
	w := world.New(t, world.Options{})
	tr := newTrainer(t, w, "r", time.Minute)
	b := tr.box(t)
	for _, c := range []struct {
		what, line, cause string
		code              int32
	}{
		{"memory", `exec python3 -c 'x = b"1" * (1 << 30)'`, string(sandbox.OOM), 0},
		{"disk", "dd if=/dev/zero of=/big bs=1M 2>/dev/null", "exited", 1},
		{"full", "rm /big", "exited", 0},
		{"pipes", "sleep 1000 & echo done", "exited", 0},
		{"pipes, another session", "setsid sleep 1000 & exit 3", "exited", 3},
		{"signal", "kill -SEGV $$", string(sandbox.Signalled), 0},
	} {
		began := len(tr.steps(t, false))
		t.Log(c.what, b.Exec(t, sandbox.ProcessSpec{Command: c.line, User: "root"}).End)
		steps := tr.steps(t, false)
		if len(steps) != began+1 {
			t.Fatalf("%s: %d steps of %d are on record", c.what, len(steps), began+1)
		}
		if end := steps[began].End; end.GetCause() != c.cause || c.cause == "exited" && end.GetExitCode() != c.code {
			t.Errorf("%s: %v", c.what, end)
		}
	}
	b.Must(t, "echo on")
	if _, err := w.Client().Runs.End(t.Context(), connect.NewRequest(&covev1.EndRunRequest{Run: "r"})); err != nil {
		t.Fatal(err)
	}
	if run := tr.info(t); run.Sandboxes != 0 || run.State != "ended" {
		t.Errorf("%v", run)
	}
}
