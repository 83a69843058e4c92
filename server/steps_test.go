package server

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// stepping is a world that keeps steps, with a run and a sandbox in it.
func stepping(t testing.TB, change ...func(*Config)) (w *world, sb *covev1.Sandbox) {
	dir := t.TempDir()
	w = newWorld(t, append([]func(*Config){func(c *Config) { c.StepDir = filepath.Join(dir, "steps") }}, change...)...)
	w.run(&covev1.CreateRunRequest{Name: "r"})
	return w, w.create(in("r", "g"))
}

func (w *world) steps(m *covev1.ListStepsRequest) *covev1.ListStepsResponse {
	w.Helper()
	m.Run = "r"
	r, err := w.client.Runs.ListSteps(w.Context(), connect.NewRequest(m))
	if err != nil {
		w.Fatal(err)
	}
	return r.Msg
}

func (w *world) step(id, execID, command string) *covev1.ProcessEnd {
	w.Helper()
	_, end, err := rest(w.start(id, execID, command))
	if err != nil {
		w.Fatal(err)
	}
	return end
}

// restart has another server take over where this one was killed.
func (w *world) restartSteps() {
	w.Helper()
	w.server.steps.stop()
	w.server.steps.work.Wait()
	_ = w.server.steps.logs.Load().Close() // of the old one nothing more is written
	w.server.steps.init(w.server.cfg.StepDir, w.server.ships.appended)
	if err := w.server.resumeSteps(w.all()); err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() {
		now, stop := context.WithCancel(context.Background())
		stop()
		w.server.Drain(now) // a call that ends has its step followed on: none does while that is waited for
		w.server.steps.stop()
		w.server.steps.work.Wait()
	})
}

func TestSteps(t *testing.T) {
	w, sb := stepping(t)
	w.step(sb.Id, "a", "echo hello")
	w.step(sb.Id, "b", "false")
	w.step(sb.Id, "a", "echo hello") // of the same exec: no second step
	outside := w.create(nil)
	w.step(outside.Id, "c", "true")
	page := w.steps(&covev1.ListStepsRequest{})
	if len(page.Steps) != 2 || page.More {
		t.Fatalf("%v", page)
	}
	a, b := page.Steps[0], page.Steps[1]
	if a.Seq != 1 || a.Id != a.Run+"-1" || a.Group != "g" || a.Episode != "e1" || a.Sandbox != sb.Id || a.ExecId != "a" || a.Command != "echo hello" || a.Reset_ != 1 ||
		string(a.Stdout.GetHead()) != "hello\n" || a.BytesOut != 6 || a.End.GetCause() != "exited" || a.EndedAt == nil || a.StartedAt == nil {
		t.Errorf("%v", a)
	}
	if b.Seq != 2 || b.End.GetExitCode() != 1 {
		t.Errorf("%v", b)
	}
	_, err := w.client.Processes.Start(t.Context(), connect.NewRequest(&covev1.StartProcessRequest{SandboxId: sb.Id, Process: &covev1.ProcessSpec{ExecId: "x", Args: []string{"nosuch"}}}))
	if err == nil {
		s, _ := w.client.Processes.Start(t.Context(), connect.NewRequest(&covev1.StartProcessRequest{SandboxId: sb.Id, Process: &covev1.ProcessSpec{ExecId: "x", Args: []string{"nosuch"}}}))
		for s.Receive() {
		}
		err = s.Err()
	}
	wantError(t, err, sandbox.ErrCommandNotFound)
	// A cursor goes on where it was, and steps outlive their sandbox and its run.
	w.step(sb.Id, "d", "true")
	w.kill(sb.Id)
	if _, err := w.client.Runs.End(t.Context(), connect.NewRequest(&covev1.EndRunRequest{Run: "r"})); err != nil {
		t.Fatal(err)
	}
	more := w.steps(&covev1.ListStepsRequest{Cursor: page.NextCursor, PageSize: 1})
	if len(more.Steps) != 1 || more.Steps[0].ExecId != "d" || w.getRun("r").Steps != 3 {
		t.Errorf("%v, %v", more, w.getRun("r"))
	}
	if got := w.steps(&covev1.ListStepsRequest{Group: "other"}); len(got.Steps) != 0 {
		t.Errorf("%v", got)
	}
	for _, bad := range []string{"x", "other.0", a.Run + ".3", a.Run + ".-1"} {
		_, err := w.client.Runs.ListSteps(t.Context(), connect.NewRequest(&covev1.ListStepsRequest{Run: "r", Cursor: bad}))
		if err == nil {
			t.Errorf("cursor %q is taken", bad)
		}
	}
	if _, err := w.client.Runs.Delete(t.Context(), connect.NewRequest(&covev1.DeleteRunRequest{Run: "r"})); err != nil {
		t.Fatal(err)
	}
	if left, _ := filepath.Glob(filepath.Join(w.server.cfg.StepDir, "*", "*")); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

// The steps of runs that are over take no memory and no open file for long, and are
// there when somebody asks; a run that goes on goes on with them.
func TestStepsOfRunsThatAreOverArePutAway(t *testing.T) {
	var ahead atomic.Int64
	w, sb := stepping(t, func(c *Config) { c.Clock = func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) } })
	id := sb.Spec.Rollout.Run
	held := func() bool {
		t.Helper()
		ahead.Add(int64(stepsRest))
		if err := w.server.putStepsAway(); err != nil {
			t.Fatal(err)
		}
		w.server.steps.mu.Lock()
		defer w.server.steps.mu.Unlock()
		return w.server.steps.mu.runs[id] != nil
	}
	w.step(sb.Id, "a", "echo hello")
	if !held() {
		t.Fatal("of a run that lasts they were put away")
	}
	w.run(&covev1.CreateRunRequest{Name: "r", Resume: true}) // the clock has gone past its lease
	w.kill(sb.Id)
	if _, err := w.client.Runs.End(t.Context(), connect.NewRequest(&covev1.EndRunRequest{Run: "r"})); err != nil {
		t.Fatal(err)
	}
	if held() {
		t.Fatal("they are held")
	}
	if got := w.steps(&covev1.ListStepsRequest{}); len(got.Steps) != 1 || string(got.Steps[0].Stdout.GetHead()) != "hello\n" {
		t.Errorf("%v", got)
	}
	if err := w.server.putStepsAway(); err != nil || w.getRun("r").Steps != 1 {
		t.Errorf("%v %v", err, w.getRun("r"))
	}
	if held() {
		t.Error("they are held after a look at them")
	}
	w.run(&covev1.CreateRunRequest{Name: "r", Resume: true})
	again := w.create(in("r", "g"))
	w.step(again.Id, "a", "echo again")
	if got := w.steps(&covev1.ListStepsRequest{}).Steps; len(got) != 2 || got[1].Seq != 2 {
		t.Errorf("%v", got)
	}
}

// Heartbeats and steps at the same time: each needs what the other holds.
func TestHeartbeatsBesideSteps(t *testing.T) {
	w, sb := stepping(t)
	run := sb.Spec.Rollout.Run
	m, _ := w.server.members.get(sb.Id)
	ctx := store.In(t.Context(), m.tenant)
	beating, done := make(chan error, 1), make(chan struct{})
	go func() {
		var err error
		for ctx := w.own(); err == nil; {
			select {
			case <-done:
				beating <- nil
				return
			default:
				_, err = w.client.Runs.Heartbeat(ctx, connect.NewRequest(&covev1.HeartbeatRunRequest{Run: run}))
			}
		}
		beating <- err
	}()
	begun := make(chan error, 4)
	for i := range 4 {
		go func() {
			for n := range 500 {
				st, err := w.server.beginStep(ctx, StartRequest{Sandbox: sb.Id, Process: sandbox.ProcessSpec{ExecID: fmt.Sprintf("%d-%d", i, n), Command: "true"}})
				if err != nil {
					begun <- err
					return
				}
				w.server.endStep(st, stepEnded, sandbox.ProcessEnd{End: sandbox.End{Cause: sandbox.Exited, At: time.Now()}})
			}
			begun <- nil
		}()
	}
	for range 4 {
		select {
		case err := <-begun:
			if err != nil {
				t.Fatal(err)
			}
		case <-time.After(60 * time.Second):
			t.Fatal("they wait for each other")
		}
	}
	close(done)
	if err := <-beating; err != nil {
		t.Error(err)
	}
}

// A step whose caller left is followed to its end, with what it printed before
// and after.
func TestStepWhoseCallerLeaves(t *testing.T) {
	w, sb := stepping(t)
	ctx, leave := context.WithCancel(t.Context())
	s, err := w.client.Processes.Start(ctx, connect.NewRequest(&covev1.StartProcessRequest{SandboxId: sb.Id, Process: &covev1.ProcessSpec{ExecId: "a", Command: "echo sleeping; exec cat", Stdin: true}}))
	if err != nil || !s.Receive() || !s.Receive() {
		t.Fatal(err)
	}
	running := w.steps(&covev1.ListStepsRequest{Running: true})
	if len(running.Steps) != 0 || len(running.Running) != 1 || running.Running[0].End != nil || string(running.Running[0].Stdout.GetHead()) != "sleeping\n" {
		t.Errorf("%v", running)
	}
	if _, err := w.client.Processes.SendInput(t.Context(), connect.NewRequest(&covev1.SendInputRequest{SandboxId: sb.Id, ExecId: "a", Data: []byte("12345")})); err != nil {
		t.Fatal(err)
	}
	leave()
	_ = s.Close()
	w.until("the server follows it", func() bool {
		r, _, _, _ := w.server.steps.of(sandbox.DefaultTenant, running.Running[0].Run, time.Now(), nil)
		r.mu.Lock()
		defer r.mu.Unlock()
		for _, st := range r.mu.open {
			st.mu.Lock()
			defer st.mu.Unlock()
			return st.mu.followers == 0
		}
		return false
	})
	w.until("what was written comes back", func() bool {
		r := w.steps(&covev1.ListStepsRequest{Running: true}).Running
		return len(r) == 1 && string(r[0].Stdout.GetHead()) == "sleeping\n12345"
	})
	if _, err := w.client.Processes.Signal(t.Context(), connect.NewRequest(&covev1.SignalRequest{SandboxId: sb.Id, ExecId: "a"})); err != nil {
		t.Fatal(err)
	}
	w.until("its end is on record", func() bool { return len(w.steps(&covev1.ListStepsRequest{}).Steps) == 1 })
	if st := w.steps(&covev1.ListStepsRequest{}).Steps[0]; st.End.GetCause() == "" || st.BytesIn != 5 || string(st.Stdout.GetHead()) != "sleeping\n12345" {
		t.Errorf("%v", st)
	}
}

// A server that is killed leaves steps under way; the next one goes on with them,
// and no step is there twice.
func TestStepsOfAKilledServer(t *testing.T) {
	w, sb := stepping(t, func(c *Config) { c.EndWait = 50 * time.Millisecond })
	w.step(sb.Id, "done", "echo 1")
	other := w.create(in("r", "g"))
	for id, exec := range map[string]string{sb.Id: "a", other.Id: "b"} {
		w.start(id, exec, sleeping)
	}
	w.restartSteps()
	if got := w.steps(&covev1.ListStepsRequest{Running: true}); len(got.Steps) != 1 || len(got.Running) != 2 {
		t.Fatalf("%v", got)
	}
	w.step(sb.Id, "done", "echo 1") // its caller asks again, of the new server
	w.kill(other.Id)
	w.until("the step ends with its sandbox", func() bool { return len(w.steps(&covev1.ListStepsRequest{}).Steps) == 2 })
	if st := w.steps(&covev1.ListStepsRequest{}).Steps[1]; st.ExecId != "b" || st.End.GetCause() != "killed_by_user" {
		t.Errorf("%v", st)
	}
	// Of one that the guest does not know either nothing is known but that it began.
	w.node.does(func(c *calls) { c.forgotten["a"] = true })
	w.restartSteps()
	w.until("the lost one is told as such", func() bool { return len(w.steps(&covev1.ListStepsRequest{}).Steps) == 3 })
	if st := w.steps(&covev1.ListStepsRequest{}).Steps[2]; st.End.GetCause() != "infra" || !strings.Contains(st.End.GetDetail(), "nothing is known") {
		t.Errorf("%v", st)
	}
	w.step(sb.Id, "next", "true")
	if st := w.steps(&covev1.ListStepsRequest{}).Steps[3]; st.Seq != 4 {
		t.Errorf("seq %d: numbers go on", st.Seq)
	}
}

// A server that is killed between the record of a beginning and the start: who asked
// asks the next one, and it is one step, which ran.
func TestStepThatAKilledServerDidNotStart(t *testing.T) {
	w, sb := stepping(t, func(c *Config) { c.EndWait = 30 * time.Second }) // its caller comes back in less
	m, _ := w.server.members.get(sb.Id)
	st, err := w.server.beginStep(store.In(t.Context(), m.tenant), StartRequest{Sandbox: sb.Id, Process: sandbox.ProcessSpec{ExecID: "a", Command: "echo ran"}})
	if err != nil || st == nil {
		t.Fatal(st, err)
	}
	w.restartSteps()
	w.until("the guest was asked", func() bool {
		r, err := w.server.stepsOf(m.tenant, m.Run)
		if err != nil {
			t.Fatal(err)
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		for _, st := range r.mu.open {
			st.mu.Lock()
			defer st.mu.Unlock()
			return !st.mu.unknownSince.IsZero()
		}
		return false
	})
	w.step(sb.Id, "a", "echo ran")
	got := w.steps(&covev1.ListStepsRequest{Running: true})
	if len(got.Steps) != 1 || len(got.Running) != 0 || got.Steps[0].End.GetCause() != "exited" || string(got.Steps[0].Stdout.GetHead()) != "ran\n" {
		t.Errorf("%v", got)
	}
}

func TestFollowSteps(t *testing.T) {
	w, sb := stepping(t)
	w.step(sb.Id, "a", "true")
	s, err := w.client.Runs.FollowSteps(t.Context(), connect.NewRequest(&covev1.FollowStepsRequest{Run: "r"}))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	next := func() *covev1.FollowStepsEvent {
		for s.Receive() {
			if s.Msg().Step != nil {
				return s.Msg()
			}
		}
		return nil
	}
	if ev := next(); ev == nil || ev.Step.ExecId != "a" {
		t.Fatal(ev, s.Err())
	}
	w.step(sb.Id, "b", "true")
	b := next()
	if b == nil || b.Step.ExecId != "b" {
		t.Fatal(b, s.Err())
	}
	w.step(sb.Id, "c", "true")
	if _, err := w.client.Runs.End(t.Context(), connect.NewRequest(&covev1.EndRunRequest{Run: "r"})); err != nil {
		t.Fatal(err)
	}
	if ev := next(); ev == nil || ev.Step.ExecId != "c" {
		t.Fatal(ev, s.Err())
	}
	if ev := next(); ev != nil || s.Err() != nil {
		t.Errorf("it ends with the run: %v %v", ev, s.Err())
	}
	// As lines, from a cursor.
	resp, text := w.http("GET", "/v1/runs/r/steps?cursor="+b.Cursor, nil)
	var ev struct {
		Step   struct{ ExecId string }
		Cursor string
	}
	n := 0
	for lines := bufio.NewScanner(strings.NewReader(text)); lines.Scan(); n++ {
		if err := json.Unmarshal(lines.Bytes(), &ev); err != nil {
			t.Fatal(err)
		}
	}
	if resp.StatusCode != 200 || n != 1 || ev.Step.ExecId != "c" || ev.Cursor == "" {
		t.Errorf("%d %s", resp.StatusCode, text)
	}
	if resp, _ := w.http("GET", "/v1/runs/nosuch/steps", nil); resp.StatusCode != 404 {
		t.Error(resp.StatusCode)
	}
}

// A disk without room for the log refuses to begin a step, before anything runs,
// and an end that finds none is written when there is.
func TestStepsOnAFullDisk(t *testing.T) {
	dir := t.TempDir()
	if err := syscall.Mount("cove-test", dir, "tmpfs", 0, "size=256k"); err != nil {
		t.Skipf("needs the right to mount: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	w, sb := stepping(t, func(c *Config) { c.StepDir = dir })
	s := w.start(sb.Id, "long", sleeping)
	ballast := filepath.Join(dir, "ballast")
	if err := os.WriteFile(ballast, make([]byte, 1<<20), 0o600); !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	// What is left of the log's last page takes some more.
	var err error
	n := 0
	for ; err == nil && n < 100; n++ {
		_, err = w.execError(sb.Id, "x"+strings.Repeat("y", n%10)+string(rune('a'+n%26))+string(rune('a'+n/26)), "echo "+strings.Repeat("z", 900))
	}
	wantError(t, err, sandbox.ErrDiskFull, "cove runs rm")
	if _, err := w.client.Processes.Signal(t.Context(), connect.NewRequest(&covev1.SignalRequest{SandboxId: sb.Id, ExecId: "long"})); err != nil {
		t.Fatal(err)
	}
	if _, end, err := rest(s); err != nil || end == nil {
		t.Fatal("the end is told all the same:", end, err)
	}
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	w.step(sb.Id, "after", "true")
	seen := map[string]bool{}
	for _, st := range w.steps(&covev1.ListStepsRequest{PageSize: 1000}).Steps {
		seen[st.ExecId] = true
	}
	if !seen["long"] || !seen["after"] {
		t.Errorf("%v", seen)
	}
}

func (w *world) execError(id, exec, command string) (*covev1.ProcessEnd, error) {
	s, err := w.client.Processes.Start(w.Context(), connect.NewRequest(&covev1.StartProcessRequest{SandboxId: id, Process: &covev1.ProcessSpec{ExecId: exec, Command: command}}))
	if err != nil {
		return nil, err
	}
	defer s.Close()
	_, end, err := rest(s)
	return end, err
}

// A tenant whose steps take as much as they may begins no more.
func TestStepQuota(t *testing.T) {
	w, sb := stepping(t, func(c *Config) { c.MaxStepBytes = 2000 })
	var err error
	for i := 0; err == nil && i < 50; i++ {
		_, err = w.execError(sb.Id, "", "true")
	}
	wantError(t, err, sandbox.ErrQuotaExceeded, "cove runs rm")
}
