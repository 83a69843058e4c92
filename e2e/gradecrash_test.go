package e2e

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/e2e/world"
	"github.com/cove-sandbox/cove/sandbox"
)

// graders is how many sandboxes there are beside those that are known.
func graders(t *testing.T, w *world.World, known ...*world.Box) (n int) {
	t.Helper()
	sbs, err := w.Running(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, sb := range sbs {
		mine := false
		for _, b := range known {
			mine = mine || b.ID == sb.ID
		}
		if !mine {
			n++
		}
	}
	return n
}

// A server that dies amid a grade leaves no grader, and a verdict that says so.
// With its key the grade is made after all.
func TestGradeServerDies(t *testing.T) {
	w := world.New(t, world.Options{})
	b := w.Create(t, world.Small())
	b.Must(t, "mkdir -p /work && echo here > /work/f")
	r := &covev1.CreateGradeRequest{Command: "while ! grep -q there /work/f && [ $SECONDS -lt 60 ]; do sleep 0.1; done; true", Artifacts: []string{"/work"}, IdempotencyKey: "once"}
	g, err := b.TryGrade(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	world.Eventually(t, 30*time.Second, "a grader is there", func() bool { return graders(t, w, b) == 1 })
	w.Restart(t)
	got := w.WaitGrade(t, g.Id)
	if got.State != "infra" || got.Reward != nil || got.GetError().GetCode() != string(sandbox.Unavailable) || got.Error.Hint == "" {
		t.Errorf("after a crash: %v", got)
	}
	if n := graders(t, w, b); n != 0 {
		t.Errorf("%d graders are left", n)
	}
	b.Must(t, "echo there > /work/f")
	again, err := b.TryGrade(t.Context(), r)
	if err != nil || again.Id != g.Id {
		t.Fatalf("the same key: %v %v", again, err)
	}
	graded(t, w.WaitGrade(t, g.Id), 1)
	if third, err := b.TryGrade(t.Context(), r); err != nil || third.Id != g.Id || third.State != "graded" {
		t.Errorf("a grade is made once: %v %v", third, err)
	}
	r.Command = "false"
	if _, err := b.TryGrade(t.Context(), r); sandbox.ClassOf(err) != sandbox.AlreadyExists {
		t.Errorf("another request with the key: %v", err)
	}
	world.Eventually(t, 30*time.Second, "no grader is there", func() bool { return graders(t, w, b) == 0 })
}

// A drain ends a grade that would last too long, with a verdict.
func TestGradeServerStops(t *testing.T) {
	w := world.New(t, world.Options{})
	b := w.Create(t, world.Small())
	b.Must(t, "mkdir -p /work && echo here > /work/f")
	g, err := b.TryGrade(t.Context(), &covev1.CreateGradeRequest{Command: "sleep 600", Artifacts: []string{"/work"}})
	if err != nil {
		t.Fatal(err)
	}
	world.Eventually(t, 30*time.Second, "a grader is there", func() bool { return graders(t, w, b) == 1 })
	w.Stop(t)
	w.Start(t)
	if got := w.WaitGrade(t, g.Id); got.State != "infra" || got.Reward != nil {
		t.Errorf("after a stop: %v", got)
	}
	world.Eventually(t, 30*time.Second, "no grader is left", func() bool { return graders(t, w, b) == 0 })
}

// The grade of a client that was killed is finished, and nothing is left of it.
func TestGradeClientDies(t *testing.T) {
	w := world.New(t, world.Options{})
	b := w.Create(t, world.Small())
	b.Must(t, "mkdir -p /work && echo here > /work/f")
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "run.sh"), []byte("sleep 2; grep -q here /work/f\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := w.Command(t, "grade", b.ID, "--tests", dir, "--command", "sh /tests/run.sh", "--artifact", "/work")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var id string
	world.Eventually(t, 30*time.Second, "the grade is under way", func() bool {
		page, err := w.Client().Grades.List(t.Context(), connect.NewRequest(&covev1.ListGradesRequest{Sandbox: b.ID}))
		if err != nil || len(page.Msg.Grades) != 1 {
			return false
		}
		id = page.Msg.Grades[0].Id
		return graders(t, w, b) == 1
	})
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // it was killed
	graded(t, w.WaitGrade(t, id), 1)
	world.Eventually(t, 30*time.Second, "no grader is left", func() bool { return graders(t, w, b) == 0 })
}

// Neither its timeout, nor its idle time, nor its lease ends a sandbox that is
// being graded; each does so after.
func TestNothingEndsWhatIsGraded(t *testing.T) {
	w := world.New(t, world.Options{})
	const most = 4 * time.Second // for a create, an exec and the asking for a grade, however loaded the machine
	for want, change := range map[sandbox.Cause]func(*testing.T, *sandbox.Spec){
		sandbox.TTL:  func(_ *testing.T, s *sandbox.Spec) { s.Timeout = most },
		sandbox.Idle: func(_ *testing.T, s *sandbox.Spec) { s.IdleTimeout = most },
		sandbox.LeaseExpired: func(t *testing.T, s *sandbox.Spec) {
			l, err := w.Client().Leases.Create(t.Context(), connect.NewRequest(&covev1.CreateLeaseRequest{Ttl: durationpb.New(most)}))
			if err != nil {
				t.Fatal(err)
			}
			s.Lease = l.Msg.Lease.Id
		},
	} {
		t.Run(string(want), func(t *testing.T) {
			t.Parallel() // it waits
			spec := world.Small()
			change(t, &spec)
			b := w.Create(t, spec)
			b.Must(t, "mkdir -p /work && echo here > /work/f")
			asked := time.Now()
			g, err := b.TryGrade(t.Context(), &covev1.CreateGradeRequest{Command: "sleep 8; grep -q here /work/f", Artifacts: []string{"/work"}})
			if err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Until(asked.Add(most + 1500*time.Millisecond))) // past every one of them: what is shown is that nothing happens
			b.WantRunning(t)
			graded(t, w.WaitGrade(t, g.Id), 1)
			b.WantEnd(t, 30*time.Second, want)
		})
	}
}

// With stop the sandbox ends with its grade; the verdict stays.
func TestGradeStops(t *testing.T) {
	w := world.New(t, world.Options{})
	b := w.Create(t, world.Small())
	b.Must(t, "mkdir -p /work && echo here > /work/f")
	g := b.Grade(t, &covev1.CreateGradeRequest{Command: "grep -q here /work/f", Artifacts: []string{"/work"}, Stop: true, Labels: map[string]string{"run": "r1"}})
	graded(t, g, 1)
	b.WantEnd(t, 10*time.Second, sandbox.KilledByUser)
	if got := w.WaitGrade(t, g.Id); got.GetReward() != 1 || got.Labels["run"] != "r1" {
		t.Errorf("%v", got)
	}
}

// As a stranger would use it.
func TestGradeCLI(t *testing.T) {
	w := world.New(t, world.Options{})
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "test_it.py"), []byte("from sol import f\ndef test_f(): assert f() == 1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	b := w.Create(t, world.Small())
	b.Must(t, "mkdir -p /work && echo 'def f(): return 1' > /work/sol.py && echo > /work/conftest.py")
	r := w.CLI(t, "grade", b.ID, "--tests", dir, "--artifact", "/work", "--json")
	var got struct {
		ID       string
		State    string
		Reward   *float64
		Tests    []struct{ ID, Outcome string }
		Findings []struct{ Kind, Path string }
	}
	if err := json.Unmarshal([]byte(r.Stdout), &got); err != nil || r.Code != 0 || got.State != "graded" || got.Reward == nil || *got.Reward != 1 || len(got.Tests) != 1 || len(got.Findings) != 1 {
		t.Fatalf("%v %v %+v", r, err, got)
	}
	if r := w.CLI(t, "grade", b.ID, "--tests", dir, "--artifact", "/work"); r.Code != 0 || r.Stdout != "1\n" || !strings.Contains(r.Stderr, "1 of 1 tests passed") || !strings.Contains(r.Stderr, "conftest.py") {
		t.Errorf("%+v", r)
	}
	b.Must(t, "echo 'def f(): return 2' > /work/sol.py")
	if r := w.CLI(t, "grade", b.ID, "--tests", dir, "--artifact", "/work"); r.Code != 0 || r.Stdout != "0\n" {
		t.Errorf("a reward of 0 is an answer: %+v", r)
	}
	if r := w.CLI(t, "grade", b.ID, "--command", "nosuchthing x", "--separate", "--results", "reward", "--artifact", "/work"); r.Code != 1 || r.Stdout != "" || !strings.Contains(r.Stderr, "grader_failed") {
		t.Errorf("no verdict is no 0: %+v", r)
	}
	if r := w.CLI(t, "grades", "ls"); r.Code != 0 || strings.Count(r.Stdout, "\n") != 5 || !strings.Contains(r.Stdout, got.ID) {
		t.Errorf("%+v", r)
	}
	if r := w.CLI(t, "grades", "show", got.ID, "--log"); r.Code != 0 || !strings.Contains(r.Stdout, "1 passed") {
		t.Errorf("%+v", r)
	}
	if r := w.CLI(t, "grade", b.ID, "--tests", filepath.Join(dir, "nowhere"), "--artifact", "/work"); r.Code == 0 || !strings.Contains(r.Stderr, "nowhere") {
		t.Errorf("%+v", r)
	}
	interrupted(t, w, b)
}

// interrupted is Ctrl-C: the grade goes on, and the way back to it is told.
func interrupted(t *testing.T, w *world.World, b *world.Box) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, w.Command(t, "grade").Path, "grade", b.ID, "--command", "sleep 2", "--artifact", "/work")
	cmd.Env = w.Command(t, "grade").Env
	var out strings.Builder
	cmd.Stderr = &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	world.Eventually(t, 30*time.Second, "the grade is under way", func() bool { return graders(t, w, b) == 1 })
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err == nil || !strings.Contains(out.String(), "cove grades show") {
		t.Errorf("%v: %s", err, out.String())
	}
	world.Eventually(t, 30*time.Second, "no grader is left", func() bool { return graders(t, w, b) == 0 })
}

// A grade that is cancelled has no reward, leaves no grader, and stays cancelled.
func TestGradeCanceled(t *testing.T) {
	w := world.New(t, world.Options{})
	b := w.Create(t, world.Small())
	b.Must(t, "mkdir -p /work && echo here > /work/f")
	r := &covev1.CreateGradeRequest{Command: "sleep 600", Artifacts: []string{"/work"}, IdempotencyKey: "once", Stop: true}
	g, err := b.TryGrade(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	world.Eventually(t, 30*time.Second, "a grader is there", func() bool { return graders(t, w, b) == 1 })
	if got := w.CLI(t, "grades", "cancel", g.Id).Stdout; got != g.Id+" canceled\n" {
		t.Errorf("%q", got)
	}
	got := w.WaitGrade(t, g.Id)
	if got.State != "canceled" || got.Reward != nil || got.GetError().GetCode() != string(sandbox.Canceled) {
		t.Errorf("%v", got)
	}
	world.Eventually(t, 30*time.Second, "no grader is left", func() bool { return graders(t, w, b) == 0 })
	b.WantRunning(t) // it was to end once it was graded, and was not
	if again, err := b.TryGrade(t.Context(), r); err != nil || again.Id != g.Id || again.State != "canceled" {
		t.Errorf("the same key: %v %v", again, err)
	}
}
