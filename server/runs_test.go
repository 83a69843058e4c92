package server

import (
	"context"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

func (w *world) run(r *covev1.CreateRunRequest) *covev1.Run {
	w.Helper()
	resp, err := w.client.Runs.Create(w.Context(), connect.NewRequest(r))
	if err != nil {
		w.Fatal(err)
	}
	return resp.Msg.Run
}

func (w *world) getRun(ref string) *covev1.Run {
	w.Helper()
	resp, err := w.client.Runs.Get(w.Context(), connect.NewRequest(&covev1.GetRunRequest{Run: ref}))
	if err != nil {
		w.Fatal(err)
	}
	return resp.Msg.Run
}

func in(run, group string) *covev1.SandboxSpec {
	return &covev1.SandboxSpec{Rollout: &covev1.Rollout{Run: run, Group: group, Episode: "e1"}}
}

// A run that is not heard of: its sandboxes, a child of a fork, one that nobody
// learned of and one on standby end with a typed cause, and the record stays.
func TestSandboxesEndWithTheirRun(t *testing.T) {
	w, pass, _ := leased(t)
	run := w.run(&covev1.CreateRunRequest{Name: "grpo-7", Ttl: durationpb.New(time.Minute)})
	sb, other := w.create(in("grpo-7", "p1")), w.create(nil)
	if r := sb.Spec.Rollout; r.Run != run.Id || r.Group != "p1" || r.Episode != "e1" || sb.ExpiresAt != nil {
		t.Errorf("%v", sb)
	}
	kids, err := w.client.Sandboxes.Fork(t.Context(), connect.NewRequest(&covev1.ForkRequest{Id: sb.Id, Count: 2}))
	if err != nil {
		t.Fatal(err)
	}
	kid := kids.Msg.Results[1].Sandbox
	if r := kid.Spec.Rollout; r.Run != run.Id || r.Group != "p1" || r.Episode != "" {
		t.Errorf("a child is of the same run: %v", r)
	}
	if _, err := w.client.Sandboxes.Pause(t.Context(), connect.NewRequest(&covev1.PauseRequest{Id: kid.Id, Cold: true})); err != nil {
		t.Fatal(err)
	}
	kept := w.create(in(run.Id, "p1"))
	if _, err := w.client.Sandboxes.SetLease(t.Context(), connect.NewRequest(&covev1.SetLeaseRequest{Id: kept.Id})); err != nil {
		t.Fatal(err)
	}
	if got := w.getRun("grpo-7"); got.Sandboxes != 4 || got.State != "active" || got.ExpiresAt == nil {
		t.Errorf("%v", got)
	}
	for range 3 {
		pass(50 * time.Second)
		if _, err := w.client.Runs.Heartbeat(t.Context(), connect.NewRequest(&covev1.HeartbeatRunRequest{Run: run.Id})); err != nil {
			t.Fatal(err)
		}
		w.reap()
	}
	pass(time.Minute)
	w.reap()
	for _, id := range []string{sb.Id, kids.Msg.Results[0].Sandbox.Id, kid.Id} {
		if end := w.get(id).End; end.GetCause() != "lease_expired" || !strings.Contains(end.GetDetail(), `run "grpo-7"`) {
			t.Errorf("ended with %v", end)
		}
	}
	for _, id := range []string{other.Id, kept.Id} {
		if end := w.get(id).End; end != nil {
			t.Errorf("%s ended: %v", id, end)
		}
	}
	got := w.getRun(run.Id)
	if got.State != "ended" || got.End.GetCause() != "lease_expired" || got.Sandboxes != 1 || got.ExpiresAt != nil {
		t.Errorf("%v", got)
	}
	_, err = w.client.Runs.Heartbeat(t.Context(), connect.NewRequest(&covev1.HeartbeatRunRequest{Run: "grpo-7"}))
	if e := wantError(t, err, sandbox.ErrPrecondition, "resume"); e.Reason != sandbox.NoRun {
		t.Errorf("%v", e)
	}
	_, err = w.createWith(t.Context(), "", in("grpo-7", ""))
	if e := wantError(t, err, sandbox.ErrPrecondition, "has ended"); e.Field != "spec.rollout.run" {
		t.Errorf("field %q", e.Field)
	}
	// What was kept can be forked; its children are of no run.
	kids, err = w.client.Sandboxes.Fork(t.Context(), connect.NewRequest(&covev1.ForkRequest{Id: kept.Id, Count: 1}))
	if err != nil || kids.Msg.Results[0].Sandbox.Spec.Rollout != nil {
		t.Error(kids, err)
	}
	list, err := w.client.Sandboxes.List(t.Context(), connect.NewRequest(&covev1.ListSandboxesRequest{Run: "grpo-7",
		States: []covev1.SandboxState{covev1.SandboxState_SANDBOX_STATE_RUNNING, covev1.SandboxState_SANDBOX_STATE_ENDED}}))
	if err != nil || len(list.Msg.Sandboxes) != 4 {
		t.Error(len(list.Msg.Sandboxes), err)
	}
	// Reaping takes the kept one too.
	reaped, err := w.client.Runs.Reap(t.Context(), connect.NewRequest(&covev1.ReapRunRequest{Run: "grpo-7"}))
	if err != nil || len(reaped.Msg.Ids) != 1 || w.get(kept.Id).End.GetCause() != "killed_by_user" {
		t.Error(reaped, err)
	}
}

func TestRunIsBegunOnce(t *testing.T) {
	w, pass, _ := leased(t)
	first := w.run(&covev1.CreateRunRequest{Name: "r", IdempotencyKey: "k"})
	again, err := w.client.Runs.Create(t.Context(), connect.NewRequest(&covev1.CreateRunRequest{Name: "r", IdempotencyKey: "k"}))
	if err != nil || again.Msg.Run.Id != first.Id || !again.Msg.Existed {
		t.Error(again, err)
	}
	_, err = w.client.Runs.Create(t.Context(), connect.NewRequest(&covev1.CreateRunRequest{Name: "r", IdempotencyKey: "other"}))
	wantError(t, err, sandbox.ErrAlreadyExists, "resume")
	_, err = w.client.Runs.Delete(t.Context(), connect.NewRequest(&covev1.DeleteRunRequest{Run: "r"}))
	wantError(t, err, sandbox.ErrPrecondition, "active")
	sb := w.create(in("r", ""))
	ended, err := w.client.Runs.End(t.Context(), connect.NewRequest(&covev1.EndRunRequest{Run: "r", Detail: "done with epoch 3"}))
	if err != nil || len(ended.Msg.Ids) != 1 || ended.Msg.Run.State != "ended" || !strings.Contains(w.get(sb.Id).End.GetDetail(), "epoch 3") {
		t.Error(ended, err)
	}
	if of := w.get(sb.Id).End.GetCause(); of != "client_ended" || ended.Msg.Run.End.GetCause() != of {
		t.Errorf("its client ended it: %v, its sandbox %s", ended.Msg.Run.End, of)
	}
	for range 2 { // the second changes nothing
		if ended, err = w.client.Runs.End(t.Context(), connect.NewRequest(&covev1.EndRunRequest{Run: "r"})); err != nil || len(ended.Msg.Ids) != 0 {
			t.Error(ended, err)
		}
	}
	more := w.run(&covev1.CreateRunRequest{Name: "r", Resume: true, Ttl: durationpb.New(time.Minute)})
	if more.Id != first.Id || more.State != "active" || more.Resumed != 1 || w.getRun("r").ExpiresAt == nil {
		t.Errorf("%v", more)
	}
	w.create(in("r", ""))
	pass(time.Minute)
	w.reap()
	if got := w.getRun("r"); got.State != "ended" || got.Sandboxes != 0 || got.End.GetCause() != "lease_expired" {
		t.Errorf("%v", got)
	}
	if _, err := w.client.Runs.Delete(t.Context(), connect.NewRequest(&covev1.DeleteRunRequest{Run: "r"})); err != nil {
		t.Error(err)
	}
	_, err = w.client.Runs.Get(t.Context(), connect.NewRequest(&covev1.GetRunRequest{Run: "r"}))
	wantError(t, err, sandbox.ErrNoRun)
	for name, r := range map[string]*covev1.CreateRunRequest{"name": {}, "ttl": {Name: "x", Ttl: durationpb.New(time.Millisecond)}, "output": {Name: "x", Output: "some"}} {
		_, err := w.client.Runs.Create(t.Context(), connect.NewRequest(r))
		if e := wantError(t, err, sandbox.ErrInvalid); e.Field != name {
			t.Errorf("field %q, want %q", e.Field, name)
		}
	}
}

// A run that keeps its sandboxes ends without them; they have the default timeout.
func TestRunKeepsItsSandboxes(t *testing.T) {
	w, pass, _ := leased(t)
	w.run(&covev1.CreateRunRequest{Name: "r", Keep: true, Ttl: durationpb.New(time.Minute)})
	sb := w.create(in("r", ""))
	if sb.Spec.Lease != "" || sb.ExpiresAt == nil {
		t.Errorf("%v", sb)
	}
	pass(time.Minute)
	w.reap()
	if w.get(sb.Id).End != nil || w.getRun("r").State != "ended" {
		t.Error(w.get(sb.Id), w.getRun("r"))
	}
}

// After a restart a run has its whole time again, and its sandboxes are its own.
func TestRunsSurviveARestart(t *testing.T) {
	w, pass, _ := leased(t)
	run := w.run(&covev1.CreateRunRequest{Name: "r", Ttl: durationpb.New(time.Minute)})
	sb := w.create(in("r", ""))
	pass(time.Hour)
	w.server.leases.empty()
	w.server.members.init()
	if err := w.server.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.reap()
	if w.get(sb.Id).End != nil || w.getRun("r").Sandboxes != 1 {
		t.Error(w.get(sb.Id), w.getRun("r"))
	}
	pass(time.Minute)
	w.reap()
	if w.get(sb.Id).End.GetCause() != "lease_expired" || w.getRun(run.Id).State != "ended" {
		t.Error(w.get(sb.Id), w.getRun("r"))
	}
}

// A run that ends while a sandbox is made in it takes that along.
func TestRunEndsDuringCreate(t *testing.T) {
	w, pass, _ := leased(t)
	for _, keep := range []bool{false, true} {
		name := map[bool]string{false: "ends", true: "keeps"}[keep]
		w.run(&covev1.CreateRunRequest{Name: name, Keep: keep, Ttl: durationpb.New(time.Minute)})
		reached, gate := make(chan struct{}), make(chan struct{})
		w.node.onCreate = func(context.Context, sandbox.Sandbox) error { close(reached); <-gate; return nil }
		done := make(chan error, 1)
		go func() { _, err := w.createWith(t.Context(), "k"+name, in(name, "")); done <- err }()
		<-reached
		pass(time.Minute)
		reaped := make(chan struct{})
		go func() { defer close(reaped); w.server.reapLeases(w.Context()) }()
		if keep {
			<-reaped
		}
		close(gate)
		wantError(t, <-done, &sandbox.Error{Class: sandbox.Precondition, Reason: sandbox.NoRun})
		<-reaped
		w.server.reapLeases(w.Context())
		settled(w)
		w.node.onCreate = nil
	}
	if w.node.liveCount() != 0 {
		t.Errorf("%d live", w.node.liveCount())
	}
}

// Nothing that goes by a clock ends a sandbox that is held, and what was due is
// due when it is let go.
func TestNoClockEndsWhatIsHeld(t *testing.T) {
	w, pass, lease := leased(t)
	sb := w.create(&covev1.SandboxSpec{Lease: lease, Timeout: durationpb.New(time.Hour)})
	held, err := w.store.GetSandbox(w.all(), sb.Id)
	if err != nil {
		t.Fatal(err)
	}
	release, err := w.server.holdOff(w.own(), held, 2*time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	second, err := w.server.holdOff(w.own(), held, 2*time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	if at := w.node.expiryOf(sb.Id); !at.IsZero() {
		t.Errorf("held, it expires at %s", at)
	}
	if _, err := w.client.Sandboxes.SetTimeout(t.Context(), connect.NewRequest(&covev1.SetTimeoutRequest{Id: sb.Id, Timeout: durationpb.New(time.Minute)})); err != nil {
		t.Fatal(err)
	}
	pass(time.Hour)
	w.server.reapLeases(w.Context())
	release()
	if at := w.node.expiryOf(sb.Id); !at.IsZero() || w.get(sb.Id).End != nil {
		t.Errorf("still held, it expires at %s: %v", at, w.get(sb.Id).End)
	}
	second()
	if at := w.node.expiryOf(sb.Id); !at.Equal(w.get(sb.Id).ExpiresAt.AsTime()) && w.get(sb.Id).End == nil {
		t.Errorf("let go, it expires at %s, on record %s", at, w.get(sb.Id).ExpiresAt.AsTime())
	}
	if end := w.ended(sb.Id); end.Cause != sandbox.LeaseExpired {
		t.Errorf("ended with %v", end)
	}
	if _, err := w.server.holdOff(w.own(), held, 2*time.Hour); err == nil {
		t.Error("held after its end")
	}
}

// A tenant's runs are its own.
func TestForeignRun(t *testing.T) {
	s := newShared(t)
	ctx := t.Context()
	r, err := s.red.Runs.Create(ctx, connect.NewRequest(&covev1.CreateRunRequest{Name: "r"}))
	if err != nil {
		t.Fatal(err)
	}
	id := r.Msg.Run.Id
	_, err = s.blue.Runs.Heartbeat(ctx, connect.NewRequest(&covev1.HeartbeatRunRequest{Run: id}))
	wantError(t, err, sandbox.ErrNoRun)
	_, err = s.blue.Runs.Reap(ctx, connect.NewRequest(&covev1.ReapRunRequest{Run: id}))
	wantError(t, err, sandbox.ErrNoRun)
	_, err = s.blue.Runs.PutCheckpoint(ctx, connect.NewRequest(&covev1.PutCheckpointRequest{Run: id, Doc: []byte("x")}))
	wantError(t, err, sandbox.ErrNoRun)
	_, err = s.blue.Sandboxes.Create(ctx, connect.NewRequest(&covev1.CreateSandboxRequest{Spec: in(id, "")}))
	wantError(t, err, sandbox.ErrNoRun)
	if r, err = s.blue.Runs.Create(ctx, connect.NewRequest(&covev1.CreateRunRequest{Name: "r"})); err != nil || r.Msg.Run.Id == id {
		t.Error(r, err)
	}
}

func TestCheckpoints(t *testing.T) {
	w := newWorld(t)
	w.run(&covev1.CreateRunRequest{Name: "r"})
	put := func(doc string, over *int64) (*covev1.Checkpoint, error) {
		r, err := w.client.Runs.PutCheckpoint(t.Context(), connect.NewRequest(&covev1.PutCheckpointRequest{Run: "r", Doc: []byte(doc), IfVersion: over}))
		if err != nil {
			return nil, err
		}
		return r.Msg.Checkpoint, nil
	}
	if c, err := put("a", new(int64)); err != nil || c.Version != 1 {
		t.Fatal(c, err)
	}
	_, err := put("b", new(int64))
	if e := wantError(t, err, sandbox.ErrConflict, "version 1"); e.Field != "if_version" {
		t.Error(e)
	}
	for range sandbox.KeptCheckpoints + 3 {
		if _, err := put("c", nil); err != nil {
			t.Fatal(err)
		}
	}
	list, err := w.client.Runs.ListCheckpoints(t.Context(), connect.NewRequest(&covev1.ListCheckpointsRequest{Run: "r"}))
	if err != nil || len(list.Msg.Checkpoints) != sandbox.KeptCheckpoints || w.getRun("r").Checkpoint != sandbox.KeptCheckpoints+4 {
		t.Error(len(list.Msg.Checkpoints), err)
	}
	_, err = put(strings.Repeat("x", 2<<20), nil)
	wantError(t, err, sandbox.ErrTooLarge, "1MiB")
	_, err = put("", nil)
	wantError(t, err, sandbox.ErrInvalid)
}

// Runs that ended long ago go, with their steps; those that must stay do not.
func TestOldRunsAreForgotten(t *testing.T) {
	w, pass, _ := leased(t, func(c *Config) { c.RunRetention = time.Hour; c.StepDir = t.TempDir() })
	if err := w.server.Reconcile(w.all()); err != nil {
		t.Fatal(err)
	}
	old, kept, active := w.run(&covev1.CreateRunRequest{Name: "old"}), w.run(&covev1.CreateRunRequest{Name: "kept", Keep: true}), w.run(&covev1.CreateRunRequest{Name: "active"})
	sb := w.create(in(old.Id, "g"))
	_, _, _ = rest(w.start(sb.Id, "x1", "true"))
	w.create(in(kept.Id, "g")) // outlives its run
	for _, id := range []string{old.Id, kept.Id} {
		if _, err := w.client.Runs.End(t.Context(), connect.NewRequest(&covev1.EndRunRequest{Run: id})); err != nil {
			t.Fatal(err)
		}
	}
	there := func() (names string) {
		runs, err := w.client.Runs.List(t.Context(), connect.NewRequest(&covev1.ListRunsRequest{Ended: true}))
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range runs.Msg.Runs {
			names += r.Name + " "
		}
		return names
	}
	pass(50 * time.Minute)
	if _, err := w.client.Runs.Heartbeat(t.Context(), connect.NewRequest(&covev1.HeartbeatRunRequest{Run: active.Id})); err != nil {
		t.Fatal(err)
	}
	w.server.forgetRuns(w.all())
	if got := there(); strings.Count(got, " ") != 3 {
		t.Errorf("before its time: %s", got)
	}
	pass(11 * time.Minute)
	w.server.forgetRuns(w.all())
	if got := there(); strings.Contains(got, "old") || !strings.Contains(got, "kept") || !strings.Contains(got, "active") {
		t.Errorf("after its time: %s", got)
	}
	if n, err := w.server.steps.logs.Load().Bytes(sandbox.DefaultTenant); err != nil || n != 0 {
		t.Errorf("%d bytes of its steps are left, %v", n, err)
	}
}
