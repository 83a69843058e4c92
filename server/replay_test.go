package server

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

func (w *world) replay(m *covev1.ReplayRequest) (*covev1.Replayed, error) {
	w.Helper()
	s, err := w.client.Runs.Replay(w.Context(), connect.NewRequest(m))
	if err != nil {
		return nil, err
	}
	defer s.Close()
	var last *covev1.ReplayEvent
	for s.Receive() {
		last = s.Msg()
	}
	return last.GetResult(), s.Err()
}

func (w *world) must(r *covev1.Replayed, err error) *covev1.Replayed {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
	return r
}

// alive waits for the number of live sandboxes: what is taken back goes a moment later.
func (w *world) alive(want int) {
	w.Helper()
	var n int
	for until := time.Now().Add(10 * time.Second); time.Now().Before(until); time.Sleep(20 * time.Millisecond) {
		resp, err := w.client.Sandboxes.List(w.Context(), connect.NewRequest(&covev1.ListSandboxesRequest{}))
		if err != nil {
			w.Fatal(err)
		}
		if n = len(resp.Msg.Sandboxes); n == want {
			return
		}
	}
	w.Errorf("%d sandboxes live, want %d", n, want)
}

func TestReplay(t *testing.T) {
	w, sb := stepping(t)
	big := strings.Repeat("0123456789", 4000)
	w.step(sb.Id, "a", "echo one > $HOME/f; echo out; echo err >&2; exit 3")
	w.step(sb.Id, "b", "cat $HOME/f; printf %s "+big) // longer than a step keeps of a command and of its output
	end, err := w.client.Processes.Start(t.Context(), connect.NewRequest(&covev1.StartProcessRequest{SandboxId: sb.Id,
		Process: &covev1.ProcessSpec{ExecId: "c", Command: "cat; echo $TOKEN", Env: map[string]string{"TOKEN": "hunter2"}, Input: []byte("typed")}}))
	if err != nil {
		t.Fatal(err)
	}
	for end.Receive() {
	}
	r := w.must(w.replay(&covev1.ReplayRequest{Sandbox: sb.Id}))
	if !r.Same || r.Steps != 3 || r.Replayed != 3 || len(r.Differences) != 0 || len(r.Gaps) != 0 || r.Kept != "" || r.Deterministic {
		t.Errorf("%v", r)
	}
	w.alive(1)
	// What may be secret is in no file of the log in clear.
	files, err := filepath.Glob(filepath.Join(w.server.cfg.StepDir, "*", "*", "*"))
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil || bytes.Contains(b, []byte("hunter2")) || bytes.Contains(b, []byte("dHlwZWQ")) {
			t.Errorf("%s has what was to be sealed (%v)", f, err)
		}
	}
	steps := w.steps(&covev1.ListStepsRequest{}).Steps
	if d := steps[1].Stdout; d.Digest == "" || d.Dropped == 0 || steps[2].Env[0] != "TOKEN" {
		t.Errorf("%v %v", d, steps[2])
	}
	// After the run is over, and by the name of the episode.
	if _, err := w.client.Runs.End(t.Context(), connect.NewRequest(&covev1.EndRunRequest{Run: "r"})); err != nil {
		t.Fatal(err)
	}
	if r := w.must(w.replay(&covev1.ReplayRequest{Run: "r", Episode: "e1"})); !r.Same || r.Sandbox != sb.Id {
		t.Errorf("%v", r)
	}
	kept := w.must(w.replay(&covev1.ReplayRequest{Run: "r", Sandbox: sb.Id, Keep: true}))
	w.alive(1)
	if got := w.get(kept.Kept); got.Spec.Template != "" || got.ExpiresAt == nil || got.Spec.Rollout != nil {
		t.Errorf("a sandbox that is kept is one like any other: %v", got)
	}
}

// The first observation that differs: of which step, where, and the rest is not run.
func TestReplayFindsTheFirstDifference(t *testing.T) {
	w, sb := stepping(t)
	now := filepath.Join(t.TempDir(), "now") // the host's: the fake driver has no walls
	w.step(sb.Id, "a", "echo same")
	w.step(sb.Id, "b", "printf 'abcdef'; if [ -e "+now+" ]; then printf X; else printf Y; fi; touch "+now)
	w.step(sb.Id, "c", "[ -e "+now+".2 ] && exit 4; touch "+now+".2")
	r := w.must(w.replay(&covev1.ReplayRequest{Sandbox: sb.Id}))
	if len(r.Differences) != 1 || r.Same || r.Replayed != 2 {
		t.Fatalf("%v", r)
	}
	if d := r.Differences[0]; d.Step != 2 || d.What != "stdout" || d.Offset != 6 || string(d.Expected) != "abcdefY" || string(d.Actual) != "abcdefX" {
		t.Errorf("%v", d)
	}
	r = w.must(w.replay(&covev1.ReplayRequest{Sandbox: sb.Id, All: true}))
	if len(r.Differences) != 2 || r.Replayed != 3 || r.Differences[1].What != "exit_code" || string(r.Differences[1].Actual) != "4" {
		t.Errorf("%v", r)
	}
	w.alive(1)
}

// Files that were changed through the API are changed again, at the same place among the
// steps. What is too much to keep is named: a difference may be for it.
func TestReplayChangesFilesAgain(t *testing.T) {
	w, sb := stepping(t)
	ctx := t.Context()
	must := func(_ any, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	write := func(path, data string, appends bool) {
		t.Helper()
		must(w.client.Files.Write(ctx, connect.NewRequest(&covev1.WriteFileRequest{SandboxId: sb.Id, Path: path, Data: []byte(data), Append: appends})))
	}
	write("/before", "hunter2", false) // before the first step
	w.step(sb.Id, "a", "wc -c < before; echo one > x")
	write("/x", "two", true)
	must(w.client.Files.Mkdir(ctx, connect.NewRequest(&covev1.MkdirRequest{SandboxId: sb.Id, Path: "/d"})))
	must(w.client.Files.Move(ctx, connect.NewRequest(&covev1.MoveFileRequest{SandboxId: sb.Id, From: "/x", To: "/d/y"})))
	must(w.client.Files.Chmod(ctx, connect.NewRequest(&covev1.ChmodRequest{SandboxId: sb.Id, Path: "/d/y", Mode: 0o640})))
	must(w.client.Files.Remove(ctx, connect.NewRequest(&covev1.RemoveFileRequest{SandboxId: sb.Id, Path: "/before"})))
	must(nil, w.server.UploadFile(builder(t, w), sb.Id, "/up", sandbox.WriteOptions{}, Upload{Reader: strings.NewReader("small"), Size: 5}))
	w.step(sb.Id, "b", "cat d/y; stat -c %a d/y; ls before; cat up")
	steps := w.steps(&covev1.ListStepsRequest{}).Steps
	if got := string(steps[0].Stdout.Head) + string(steps[1].Stdout.Head); got != "7\none\ntwo640\nsmall" {
		t.Fatalf("%q", got)
	}
	if r := w.must(w.replay(&covev1.ReplayRequest{Sandbox: sb.Id})); !r.Same || len(r.Gaps) != 0 || r.Replayed != 2 || r.Steps != 2 {
		t.Errorf("%v", r)
	}
	files, err := filepath.Glob(filepath.Join(w.server.cfg.StepDir, "*", "*", "*"))
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, f := range files {
		if b, err := os.ReadFile(f); err != nil || bytes.Contains(b, []byte("aHVudGVyMg")) {
			t.Errorf("%s has what was to be sealed (%v)", f, err)
		}
	}
	write("/large", strings.Repeat("x", int(sandbox.MaxStepInput)+1), false)
	w.step(sb.Id, "c", "wc -c large || true")
	r := w.must(w.replay(&covev1.ReplayRequest{Sandbox: sb.Id}))
	if len(r.Gaps) != 1 || r.Gaps[0].What != "file.write" || r.Gaps[0].AfterStep != 2 || r.Gaps[0].Detail != "/large" || r.Same || r.Differences[0].Step != 3 {
		t.Errorf("%v", r)
	}
	w.alive(1)
}

// An episode keeps so much of what was written beside its steps, and no more.
func TestReplayKeepsSoManyFiles(t *testing.T) {
	w, sb := stepping(t)
	most := sandbox.MaxStepInput
	n := maxKeptFiles / most
	for range n + 1 {
		if _, err := w.client.Files.Write(t.Context(), connect.NewRequest(&covev1.WriteFileRequest{SandboxId: sb.Id, Path: "/f", Data: make([]byte, most)})); err != nil {
			t.Fatal(err)
		}
	}
	w.step(sb.Id, "a", "wc -c < f")
	if r := w.must(w.replay(&covev1.ReplayRequest{Sandbox: sb.Id})); len(r.Gaps) != 1 || r.Gaps[0].AfterStep != 0 || !r.Same {
		t.Errorf("%v", r)
	}
}

// What an episode began with is gone: the error says what.
func TestReplayWithoutItsBeginning(t *testing.T) {
	w, sb := stepping(t)
	w.step(sb.Id, "a", "true")
	id := w.mustSnapshot(&covev1.CreateSnapshotRequest{Sandbox: sb.Id, Kind: "filesystem", Name: "start"}).Id
	spec := in("r", "g2")
	spec.Snapshot, spec.Rollout.Episode = "start", "e2"
	child := w.create(spec)
	w.step(child.Id, "a", "echo hi")
	if r := w.must(w.replay(&covev1.ReplayRequest{Run: "r", Episode: "e2"})); !r.Same || r.StartedFrom != "snapshot "+id {
		t.Errorf("%v", r)
	}
	kids, err := w.client.Sandboxes.Fork(t.Context(), connect.NewRequest(&covev1.ForkRequest{Id: sb.Id, Count: 1}))
	if err != nil {
		t.Fatal(err)
	}
	kid := kids.Msg.Results[0].Sandbox.Id
	w.step(kid, "a", "true")
	if _, err := w.replay(&covev1.ReplayRequest{Sandbox: kid}); sandbox.ClassOf(err) != sandbox.Precondition || sandbox.AsError(err).Reason != sandbox.NotReplayable || !strings.Contains(err.Error(), sb.Id) {
		t.Errorf("a copy of a running sandbox: %v", err)
	}
	if _, err := w.client.Snapshots.Delete(t.Context(), connect.NewRequest(&covev1.DeleteSnapshotRequest{Id: id})); err != nil {
		t.Fatal(err)
	}
	_, err = w.replay(&covev1.ReplayRequest{Run: "r", Episode: "e2"})
	if e := sandbox.AsError(err); e == nil || e.Class != sandbox.NotFound || e.Reason != sandbox.NotReplayable || !strings.Contains(e.Error(), id) {
		t.Errorf("the snapshot is deleted: %v", err)
	}
	if _, err := w.replay(&covev1.ReplayRequest{Run: "r", Episode: "nope"}); sandbox.ClassOf(err) != sandbox.NotFound {
		t.Error(err)
	}
}

// A caller that leaves leaves no sandbox behind.
func TestReplayWhoseCallerLeaves(t *testing.T) {
	w, sb := stepping(t)
	flag := filepath.Join(t.TempDir(), "again")
	w.step(sb.Id, "a", "if [ -e "+flag+" ]; then sleep 100; fi; touch "+flag)
	ctx, leave := context.WithCancel(t.Context())
	s, err := w.client.Runs.Replay(ctx, connect.NewRequest(&covev1.ReplayRequest{Sandbox: sb.Id}))
	if err != nil {
		t.Fatal(err)
	}
	if !s.Receive() {
		t.Fatal(s.Err())
	}
	w.alive(2)
	leave()
	w.alive(1)
}
